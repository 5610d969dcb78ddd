"""SkyRL's strategy interface over a DeepSpeed engine: distributed set-up, backward, step, checkpoint, adapter.

Gradients accumulate over micro-batches until `optimizer_step`, as SkyRL's split of forward_backward and optim_step asks
(`managed_gradient_accumulation: false`). Only the adapter is trainable and it is float32 under every base dtype, so no
mixed-precision wrapper is involved: DeepSpeed sees float32 gradients and torch's AdamW.

Checkpoints are DeepSpeed's own, without the frozen base, plus one file of random-number state per rank. They resume at
the number of ranks that wrote them; the adapter beside them is independent of it.

Source: deepspeed 0.19.8 `runtime/engine.py`; the interface is `skyrl.backends.skyrl_train.distributed.strategy`.
Departure: DeepSpeed would compile a shared-memory extension for CPU collectives, a minute of compiler; gloo does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy

from inkling_rl.recipe import Recipe
from trainer.resume import ResumeError

TAG = "state"


def engine_config(recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's configuration dictionary for a recipe, escape hatch merged last."""
    trainer = recipe.trainer
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": trainer.micro_batch_size_per_gpu,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": trainer.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": {"stage": trainer.zero_stage},
    }
    if trainer.zero_stage == 3:
        # Small tensors stay partitioned too: an adapter is nothing but small tensors.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    for key, value in trainer.deepspeed_args.items():
        section = config
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return config


def device() -> torch.device:
    """This rank's device: its GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class DeepSpeedStrategy(DistributedStrategy):
    """One rank's share of the training engine."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.engine: Any = None
        self.world_size = 1

    def setup_distributed(self) -> None:
        """Joins the process group that the worker made. Call before any model exists."""
        if not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        self.world_size = dist.get_world_size()

    def prepare(self, model: torch.nn.Module, num_training_steps: int) -> tuple[Any, Any, Any]:
        """Hands a wrapped model to DeepSpeed.

        Args:
            model: with a trainable float32 adapter on a frozen base.
            num_training_steps: optimiser steps of the whole run, for the schedule.

        Returns:
            engine, optimiser and learning-rate scheduler.
        """
        import deepspeed
        from transformers import get_scheduler

        trainer = self.recipe.trainer
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=trainer.learning_rate,
            weight_decay=trainer.weight_decay,
        )
        scheduler = get_scheduler(
            trainer.lr_scheduler,
            optimizer,
            num_warmup_steps=trainer.num_warmup_steps,
            num_training_steps=num_training_steps,
        )
        self.engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=engine_config(self.recipe)
        )
        return self.engine, optimizer, scheduler

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **_: Any) -> None:
        model.backward(loss)

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **_: Any) -> torch.Tensor:
        """Reduces gradients, clips, steps optimiser and schedule.

        Returns:
            Global gradient norm before clipping.
        """
        norm = None
        if self.recipe.trainer.zero_stage == 0:
            # DeepSpeed reports none without ZeRO, and frees the gradients in its step: reduce here, then measure.
            # Reducing averages equal values again inside step(), which changes nothing.
            model.buffered_allreduce_fallback()
            gradients = [p.grad for p in model.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        model.step()
        reported = model.get_global_grad_norm()
        if norm is None:
            norm = torch.as_tensor(float(reported if reported is not None else 0.0))
        return norm.detach().float()

    @contextmanager
    def whole(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, every rank sees these parameters whole (they are partitioned under stage 3)."""
        if self.recipe.trainer.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
            yield

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """PEFT file names -> the adapter's tensors, whole, on the CPU. Every rank must call it."""
        from lora.model import adapter_parameters, adapter_state

        with self.whole(list(adapter_parameters(self.engine.module).values())):
            return adapter_state(self.engine.module)

    def save_checkpoint(
        self, model: Any, ckpt_dir: str, node_local_rank: int = 0, optimizer: Any = None, scheduler: Any = None,
        tokenizer: Any = None,
    ) -> None:  # fmt: skip
        """Writes adapter, optimiser, schedule and random state below `ckpt_dir`. Every rank must call it."""
        Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
        client_state = {"world_size": self.world_size}
        model.save_checkpoint(
            ckpt_dir, tag=TAG, client_state=client_state, save_latest=False, exclude_frozen_parameters=True
        )
        torch.save(self.get_rng_state(), Path(ckpt_dir) / f"rng_rank{dist.get_rank()}.pt")
        dist.barrier()

    def load_checkpoint(
        self, model: Any, ckpt_dir: str, optimizer: Any = None, scheduler: Any = None, load_module_strict: bool = False,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """Restores what `save_checkpoint` wrote, bit by bit; learning rate and decay are those of the recipe.

        Raises:
            ResumeError: written by another number of ranks, or not there.
        """
        ranks = len(list(Path(ckpt_dir).glob("rng_rank*.pt")))
        if ranks != self.world_size:
            raise ResumeError(
                f"trainer.num_gpus_per_node x trainer.num_nodes must be {ranks}, as when {ckpt_dir} was written; "
                f"got {self.world_size}. Resume with the same number of workers"
            )
        path, state = model.load_checkpoint(
            ckpt_dir,
            tag=TAG,
            # The frozen base is not in the file; DeepSpeed would call that incomplete.
            load_module_strict=False,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
        )
        rng = torch.load(Path(ckpt_dir) / f"rng_rank{dist.get_rank()}.pt", weights_only=False)
        self.load_rng_state(rng)
        if load_optimizer_states and load_lr_scheduler_states:
            self._set_rates(model.lr_scheduler)
        return path, state

    def _set_rates(self, scheduler: Any) -> None:
        """Learning rate and decay are the recipe's, which may have changed since the checkpoint was written.

        torch restores them with the rest of the state. Where the recipe is the same, so is every bit.
        """
        trainer = self.recipe.trainer
        scheduler.base_lrs = [trainer.learning_rate for _ in scheduler.base_lrs]
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [trainer.learning_rate * factor for factor in factors]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
            group |= {"lr": rate, "initial_lr": trainer.learning_rate, "weight_decay": trainer.weight_decay}

    def save_hf_model(self, model: Any, output_dir: str, tokenizer: Any = None, **_: Any) -> None:
        raise ValueError(
            "trainer.skyrl_args.trainer.hf_save_interval must not be set: adapters are exported instead. Remove it"
        )

    def all_reduce(self, data: Any, op: str = "mean", group: Any = None) -> Any:
        """Reduces a number, a tensor or a dictionary of them over ranks; on a CPU nothing goes through a GPU."""
        if torch.cuda.is_available():
            return super().all_reduce(data, op, group)
        if isinstance(data, dict):
            return {key: self.all_reduce(value, op, group) for key, value in data.items()}
        tensor = torch.as_tensor(data, dtype=torch.float64) if not isinstance(data, torch.Tensor) else data.clone()
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
        dist.all_reduce(tensor, op=operation, group=group)
        if op == "mean":
            tensor = tensor / dist.get_world_size(group)
        return tensor if isinstance(data, torch.Tensor) else tensor.item()

    def offload_to_cpu(self, *_: Any, **__: Any) -> None:
        """Nothing: engine and trainer never share a device (`placement.colocate_all` is off)."""

    def backload_to_gpu(self, *_: Any, **__: Any) -> None:
        """Nothing; see `offload_to_cpu`."""
