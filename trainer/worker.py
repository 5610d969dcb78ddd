"""The policy worker: SkyRL's worker interface over transformers' Inkling 2, PEFT and DeepSpeed.

One Ray actor per rank. SkyRL's loop calls forward (log-probabilities of rollouts), forward_backward and optim_step;
`trainer.publish` calls `export_adapter` and `score`, `trainer.refresh` calls `draft`. SkyRL's own micro-batch steps
assume CUDA and autocast, so the two of them are written anew here; losses, batching, reduction of metrics and dispatch
stay SkyRL's.

Departures from SkyRL's workers: no weight-transfer rendezvous (adapters travel as files, from the driver), gloo on a
machine without a GPU, float32 log-probabilities whatever the dtype of the model, no cross-entropy path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer import vendor

vendor.prepare()

import ray  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingOutputBatch  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase  # noqa: E402
from skyrl.train.dataset.replay_buffer import Experience  # noqa: E402

from inkling_rl.recipe import Recipe  # noqa: E402
from trainer.deepspeed import DeepSpeedStrategy, device, engine_config  # noqa: E402
from trainer.draft.live import LiveDraft  # noqa: E402
from trainer.draft.loop import Share  # noqa: E402
from trainer.logprobs import score_actions  # noqa: E402
from trainer.losses import masked_mean, rollout_difference  # noqa: E402


class PolicyWorkerCore(PolicyWorkerBase):
    """One rank of the policy. `PolicyWorker` is the Ray actor of it."""

    strategy: DeepSpeedStrategy

    def init_worker_process_group(self) -> None:
        """Joins gloo on a CPU or nccl on GPUs, and the one-dimensional mesh that SkyRL's dispatch needs."""
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            # Ray gives an actor one thread; engine and trainer take turns, so a worker may have its share of the cores.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self._world_size))
            # With two threads some sums are taken in any order, and a resumed run would differ in its last bits.
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if not dist.is_initialized():
            dist.init_process_group(backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        self.device_mesh = dist.device_mesh.init_device_mesh(
            "cuda" if on_gpu else "cpu", mesh_shape=(self._world_size, 1), mesh_dim_names=("dp", "sp")
        )
        rank = self.device_mesh.get_local_rank(mesh_dim="dp")
        self.mesh_rank = MeshRank(
            dp=rank, sp=0, tp=0, pp=0, world_size=self._world_size, dp_size=self._world_size, pp_size=1
        )

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        """Loads the base, adds the adapter, starts DeepSpeed. `model_path` is the resolved checkpoint directory.

        Raises:
            CheckpointError, AdapterError: the model cannot be built from the recipe.
        """
        from inkling_rl.checkpoint.reader import Checkpoint
        from lora.base import fingerprint
        from trainer.model import build_policy

        recipe = Recipe.model_validate_json(self.cfg.recipe)
        self.recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model_path})})
        self.base_model, self.base_fingerprint = recipe.model.path, fingerprint(Checkpoint.open(model_path))
        self._seed()
        self.strategy = DeepSpeedStrategy(self.recipe)
        self.strategy.setup_distributed()
        self.device = device()
        zero3 = engine_config(self.recipe) if recipe.trainer.zero_stage == 3 else None
        policy = build_policy(self.recipe, self.device, zero3)
        steps = num_training_steps or recipe.trainer.num_steps
        self.model, self.optimizer, self.scheduler = self.strategy.prepare(policy, steps)
        self.live_draft = self._live_draft() if recipe.rollout.draft and recipe.rollout.draft.refresh else None

    def _live_draft(self) -> LiveDraft:
        share = Share(self._rank, self._world_size)
        # Inkling 2 itself, with the adapter in its layers.
        policy = self.model.module.get_base_model
        return LiveDraft(self.recipe, Path(self.cfg.draft), policy, self.device, share)

    def _seed(self) -> None:
        import random

        import numpy

        # Ranks draw different dropout masks.
        seed = self.recipe.trainer.seed * 1_000_003 + self._rank
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _set_pad_token_id(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    async def init_weight_sync_state(self, *_: Any) -> None:
        """Nothing to rendezvous: the driver publishes adapters."""

    async def broadcast_to_inference_engines(self, *_: Any, **__: Any) -> None:
        raise AssertionError("adapters are published by trainer.publish")

    def _forward_micro_batch(self, micro_batch: Any) -> TrainingOutputBatch:
        self.model.eval()
        micro_batch.to(self.device)
        with torch.no_grad():
            scores = score_actions(
                self.model,
                micro_batch["sequences"],
                micro_batch["attention_mask"],
                micro_batch.metadata["response_length"],
                self.cfg.algorithm.temperature,
            )
        output = TrainingOutputBatch({"output": scores.logprobs.cpu()})
        output.metadata = micro_batch.metadata
        return output

    def _forward_backward_micro(
        self, experience: Experience, microbatch_weight: float, loss_fn: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Loss and gradients of one micro-batch, and its metrics."""
        assert loss_fn is None, f"only the configured policy loss is trained; got {loss_fn}"
        self.model.train()
        experience.to_device(self.device)
        algorithm, mask = self.cfg.algorithm, experience.loss_mask
        scores = score_actions(
            self.model,
            experience.sequences,
            experience.attention_mask,
            experience.num_actions,
            algorithm.temperature,
        )
        policy_loss, loss_metrics = self.policy_loss_fn(
            scores.logprobs,
            experience.action_log_probs,
            experience.advantages,
            config=algorithm,
            loss_mask=mask,
            rollout_logprobs=experience.rollout_logprobs,
        )
        # SkyRL scales advantages so that the loss is a sum over the global mini-batch; DeepSpeed averages over ranks.
        self.strategy.backward(policy_loss * self.mesh_rank.dp_size, self.model, self.optimizer)
        status: dict[str, Any] = {
            "final_loss": policy_loss.item(),
            "policy_loss": policy_loss.item(),
            "policy_entropy": masked_mean(scores.entropy, experience.response_mask).item(),
            "response_length": experience.num_actions,
            "policy_lr": self.scheduler.get_last_lr()[0],
        }
        status |= {f"loss_metrics/{key}": value for key, value in loss_metrics.items()}
        return status | rollout_difference(scores.logprobs, experience.rollout_logprobs, mask)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of every token but the first of each sequence, under the live adapter.

        Temperature 1 because that is what an engine returns for the tokens of a prompt.
        """
        self.model.eval()
        scored = []
        for ids in sequences:
            tokens = torch.tensor([ids], device=self.device)
            with torch.no_grad():
                scores = score_actions(self.model, tokens, torch.ones_like(tokens), len(ids) - 1, temperature=1.0)
            scored.append(scores.logprobs[0].tolist())
        return scored

    def export_adapter(self, directory: str) -> int:
        """Writes the live adapter as a PEFT directory, atomically (rank 0). Every rank must call it.

        Returns:
            Bytes of the adapter's tensors, 0 on other ranks.
        """
        state = self.strategy.adapter_state()
        if self._rank != 0:
            return 0
        from lora.files import write_adapter

        lora = self.recipe.lora
        write_adapter(
            Path(directory),
            state,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            base_model=self.base_model,
            fingerprint=self.base_fingerprint,
            dropout=lora.dropout,
        )
        return sum(value.numel() * value.element_size() for value in state.values())

    def draft(self, method: str, *arguments: Any) -> Any:
        """A method of the draft that is trained beside the policy. Every rank must call it."""
        assert self.live_draft is not None, "the recipe has no rollout.draft.refresh"
        self.model.eval()
        return getattr(self.live_draft, method)(*arguments)

    def process_id(self) -> int:
        return os.getpid()

    def offload_to_cpu(self, *_: Any, **__: Any) -> None:
        """Nothing; see `DeepSpeedStrategy.offload_to_cpu`."""

    def backload_to_gpu(self, *_: Any, **__: Any) -> None:
        """Nothing; see `DeepSpeedStrategy.offload_to_cpu`."""


PolicyWorker = ray.remote(num_gpus=1)(PolicyWorkerCore)
