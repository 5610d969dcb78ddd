"""SkyRL's training loop with our parts in its hooks: batches, publication, evaluation, mismatch, checkpoints, metrics.

The order of a step is SkyRL's (`RayPPOTrainer.train`): generate, reward, advantages, forward_backward and optim_step,
[checkpoint staged], publish, [refresh the draft], [evaluate], log, [checkpoint committed]. A checkpoint gets its name
only after the step's metrics are written: whatever is killed in between, a resumed run repeats whole steps and no row
is missing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.evaluate import evaluate
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback

from inkling_rl import metrics
from inkling_rl.recipe import Recipe
from inkling_rl.types import Publication
from trainer.acceptance import DraftCounts
from trainer.client import request_seed
from trainer.dataset import Batches, Prompts
from trainer.generator import Generator
from trainer.losses import mismatch
from trainer.progress import Progress
from trainer.publish import Publisher
from trainer.refresh import DraftRefresh
from trainer.resume import Checkpoints, RunState, draft_version, identity_of, read_state, served_draft

logger = logging.getLogger(__name__)

NUM_PROBE_PROMPTS = 8
MAX_PROBE_TOKENS = 32
SAME_REWARD = 1e-6  # SkyRL's tolerance for a group without variance


class MismatchError(RuntimeError):
    """Engine and trainer are too far apart for the samples to train on."""


class PublishingDispatch(WorkerDispatch):
    """SkyRL's dispatch, which publishes through `trainer.publish` where SkyRL would broadcast weights."""

    def attach(self, publisher: Publisher, loop: Loop) -> None:
        self.publisher = publisher
        self.loop = loop
        self.publication: Publication | None = None

    def init_weight_sync_state(self, inference_engine_client: Any) -> None:
        """Nothing to rendezvous."""

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Publishes the live adapter as the version that equals the number of finished steps."""
        self.publication = await self.publisher.publish(self.loop.global_step)
        self.last_weight_sync_seconds = self.publication.seconds
        if self.loop.refresh is not None:
            await self.loop.refresh.after_publication(self.loop.global_step)

    async def call(self, method: str, *arguments: Any) -> Any:
        """A method of the policy worker on every rank; the first rank's answer."""
        references = self._actor_groups["policy"].async_run_ray_method("pass_through", method, *arguments)
        answers = await asyncio.gather(*(asyncio.wrap_future(reference.future()) for reference in references))
        return answers[0]

    def wait_for(self, method: str, *arguments: Any) -> Any:
        """`call` for SkyRL's hooks that are no coroutines."""
        import ray

        return ray.get(self._actor_groups["policy"].async_run_ray_method("pass_through", method, *arguments))[0]


class Loop(RayPPOTrainer):
    """One run."""

    generator: Generator
    dispatch: PublishingDispatch

    def __init__(
        self, recipe: Recipe, train: Prompts, heldout: Prompts | None, run_dir: Path, progress: Progress, **skyrl: Any
    ) -> None:
        """`skyrl` are the arguments of SkyRL's trainer, without its data sets."""
        self.recipe = recipe
        self.prompts = train
        self.run_dir = run_dir
        self.progress = progress
        self.checkpoints = Checkpoints(run_dir / "checkpoints", recipe.checkpoint.max_to_keep)
        self._staged: Path | None = None
        self._is_first_batch = False  # whether the batch being trained on was sampled by the probe's first version
        self._mask: list[list[int]] = []
        self.drafted = DraftCounts()
        self.refresh: DraftRefresh | None = None
        served = served_draft(recipe, run_dir)
        self._draft_version = draft_version(served) if served else None
        super().__init__(train_dataset=train, eval_dataset=None, **skyrl)
        if heldout is not None:
            self.eval_dataloader = Batches(heldout.items, recipe.trainer.eval_batch_size, is_shuffled=False, seed=None)
        self.add_callback(StepRecord(self))
        self.tracker.after_log = self._commit_checkpoint

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        trainer = self.recipe.trainer
        self.train_dataloader = Batches(
            self.prompts.items, trainer.train_batch_size, is_shuffled=self.recipe.data.shuffle, seed=trainer.seed
        )
        self.cfg.trainer.epochs = math.ceil(trainer.num_steps / len(self.train_dataloader))
        self.total_training_steps = trainer.num_steps

    def build_models(self, policy: Any, critic: Any, ref: Any) -> None:
        """Starts the workers, and the publisher that exports from them."""
        super().build_models(policy, critic, ref)
        self.dispatch = PublishingDispatch(
            cfg=self.cfg, policy_actor_group=self.policy_model, inference_engine_client=self.inference_engine_client
        )
        publisher = Publisher(
            self.inference_engine_client,
            directory=self.run_dir / "adapters",
            timeout=self.recipe.sync.timeout,
            export=lambda directory: self.dispatch.call("export_adapter", directory),
            score=lambda sequences: self.dispatch.call("score", sequences),
        )
        self.dispatch.attach(publisher, self)
        draft = self.recipe.rollout.draft
        if draft is not None and draft.refresh is not None:
            self.refresh = DraftRefresh(
                self.recipe,
                self.run_dir,
                call=lambda *called: self.dispatch.call("draft", *called),
                wait_for=lambda *called: self.dispatch.wait_for("draft", *called),
                publish=publisher.publish_draft,
                progress=self.progress,
            )

    async def generate(self, input_batch: Any) -> Any:
        """SkyRL's, preceded once by the making of the probe."""
        publisher = self.dispatch.publisher
        if self.recipe.sync.probe and publisher.probe is None:
            await publisher.start_probe(*await self._probe_sequences())
            self._is_first_batch = True
        client, drafts = self.inference_engine_client, self.recipe.rollout.draft is not None
        before = await client.draft_counts() if drafts else DraftCounts()
        output = await super().generate(input_batch)
        self.drafted = (await client.draft_counts()).plus(before, -1) if drafts else before
        self._mask = [list(mask) for mask in output["loss_masks"]]
        self._record_rollout(self.generator.samples)
        if self.refresh is not None:
            self.refresh.collect(self.generator.samples, self._mask)
        return output

    async def _probe_sequences(self) -> tuple[list[list[int]], list[int]]:
        prompts, sequences = [], []
        for item in self.prompts.items[:NUM_PROBE_PROMPTS]:
            ids = self.tokenizer.apply_chat_template(item["prompt"], add_generation_prompt=True)
            sampling = {
                "max_tokens": min(MAX_PROBE_TOKENS, self.recipe.rollout.max_generate_length),
                "temperature": self.recipe.rollout.temperature,
                "seed": request_seed(self.recipe.trainer.seed, "probe", item["uid"]),
                "logprobs": 0,
            }
            session = f"probe-{item['uid']}"
            request = {"prompt_token_ids": [ids], "sampling_params": sampling, "session_ids": [session]}
            output = await self.inference_engine_client.generate(request)
            await self.inference_engine_client.finish_session(session)
            prompts.append(ids)
            # The engine scores a sequence as a prompt, and wants room for one more token behind it.
            sequences.append([*ids, *output["response_ids"][0]][: self.recipe.rollout.max_model_len - 1])
        return sequences, [len(ids) for ids in prompts]

    def _record_rollout(self, samples: list[Any]) -> None:
        self.tracker.log_samples(samples, self.global_step, self.tokenizer.decode)
        lengths = [len(sample.token_ids) for sample in samples]
        groups: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            groups[sample.row].append(sample.reward)
        flat = [row for row, rewards in groups.items() if max(rewards) - min(rewards) <= SAME_REWARD]
        if flat and self.cfg.trainer.algorithm.zero_variance_filter:
            logger.info("step %d: groups without variance, left out: rows %s", self.global_step, flat)
        self.all_metrics |= {
            metrics.REWARD_MEAN: sum(sample.reward for sample in samples) / len(samples),
            metrics.REWARD_ZERO_VARIANCE: len(flat) / len(groups),
            metrics.TOKENS_GENERATED: sum(lengths),
            metrics.COMPLETION_LENGTH_MEAN: sum(lengths) / len(lengths),
            metrics.COMPLETION_TRUNCATED: sum(s.stop_reason == "length" for s in samples) / len(samples),
            metrics.POLICY_VERSION: samples[0].policy_version,
        }
        if self.recipe.rollout.draft is not None:
            version = self.refresh.version if self.refresh else self._draft_version
            self.all_metrics[metrics.DRAFT_VERSION_SERVED] = version

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        """SkyRL's, then the mismatch between engine and trainer over every sampled token.

        Raises:
            MismatchError: it is above `sync.max_abs_logprob_diff`, or not a number.
        """
        training_input = super().fwd_logprobs_values_reward(training_input)
        trainer, rollout = training_input["action_log_probs"], training_input["rollout_logprobs"]
        if trainer is None or rollout is None:
            return training_input
        # Of the generator, not of the batch: there the filter of groups without variance has zeroed it.
        mask = torch.zeros_like(rollout)
        for row, tokens in enumerate(self._mask):
            mask[row, mask.shape[1] - len(tokens) :] = torch.tensor(tokens, dtype=mask.dtype)
        values = mismatch(trainer, rollout, mask)
        self.all_metrics |= values
        difference, limit = values.get(metrics.MISMATCH_ABS_LOGPROB_DIFF, 0.0), self.recipe.sync.max_abs_logprob_diff
        if not difference <= limit:
            raise MismatchError(
                f"step {self.global_step}: mean |trainer - engine| log-probability must be at most "
                f"sync.max_abs_logprob_diff = {limit:g}; got {difference:.3g}. Engine and trainer do not compute the "
                "same model: run `inkling-rl verify` on the checkpoint"
            )
        if self._is_first_batch and self.dispatch.publisher.probe is not None:
            # Thousands of tokens where the probe has hundreds: in bfloat16 a few of them make most of the mean.
            probe = self.dispatch.publisher.probe
            probe.mismatch = max(probe.mismatch, difference)
            self._is_first_batch = False
        return training_input

    async def eval(self, vllm_metrics_scraper: Any = None) -> dict[str, float]:
        """Held-out scores at the training temperature and, beside it, greedy."""
        values: dict[str, float] = await super().eval()
        values[metrics.EVAL_SCORE] = values["eval/all/avg_score"]
        sampled = self.cfg.generator.eval_sampling_params
        self.cfg.generator.eval_sampling_params = replace(sampled, temperature=0.0)
        try:
            greedy = await evaluate(self.eval_dataloader, self.generator, self.cfg, self.global_step, self.tokenizer)
        finally:
            self.cfg.generator.eval_sampling_params = sampled
        return values | {metrics.EVAL_GREEDY_SCORE: greedy["eval/all/avg_score"]}

    def save_checkpoints(self) -> str:
        """Stages a checkpoint; `_commit_checkpoint` names it once the step is logged."""
        self._staged = self.checkpoints.begin(self.global_step)
        self.dispatch.save_checkpoint("policy", str(self._staged / "policy"))
        self.dispatch.wait_for("export_adapter", str(self._staged / "adapter"))
        return str(self._staged)

    def _commit_checkpoint(self, step: int) -> None:
        if self._staged is None:
            return
        if self.refresh is not None:
            self.refresh.save(self._staged)
        state = RunState(
            step=step,
            identity=identity_of(self.recipe),
            cursor=self.train_dataloader.state_dict(),
            probe=self.dispatch.publisher.probe,
        )
        self.checkpoints.commit(self._staged, state)
        self._staged = None

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Restores the newest checkpoint of the run directory, if it has one."""
        if not self.checkpoints.steps():
            return 0, None
        path = self.checkpoints.latest()
        state = read_state(path)
        self.train_dataloader.load_state_dict(state.cursor)
        self.dispatch.load_checkpoint("policy", str(path / "policy"))
        self.dispatch.publisher.probe = state.probe if self.recipe.sync.probe else None
        if self.refresh is not None:
            self.refresh.restore(path)
        return state.step, str(path)


class StepRecord(TrainingCallback):
    """Decides when a checkpoint is due, and turns SkyRL's metrics of a step into ours and into a line."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        step, interval = callback_input.global_step, self.loop.recipe.checkpoint.interval
        control.should_save = step == self.loop.total_training_steps or (interval > 0 and step % interval == 0)

    def on_train_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.loop.progress.start(callback_input.global_step)

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        logs = callback_input.logs
        publisher, publication = self.loop.dispatch.publisher, self.loop.dispatch.publication
        if callback_input.global_step > 0 and "timing/step" in logs:
            logs |= step_metrics(logs) | self.loop.drafted.metrics()
            logs |= self.loop.refresh.metrics if self.loop.refresh else {}
            if publication is not None:
                logs |= {metrics.SYNC_SECONDS: publication.seconds, metrics.SYNC_BYTES: publication.num_bytes}
            if publisher.last_result is not None:
                logs[metrics.MISMATCH_PROBE] = publisher.last_result.difference
        self.loop.progress.step(callback_input.global_step, logs)


def step_metrics(logs: dict[str, Any]) -> dict[str, Any]:
    """Our names for what SkyRL measured in a step."""
    renamed = {
        metrics.TIME_STEP: logs["timing/step"],
        metrics.TIME_ROLLOUT: logs["timing/generate"],
        metrics.TIME_TRAIN: logs["timing/fwd_logprobs_values_reward"] + logs["timing/train_critic_and_policy"],
        metrics.TOKENS_PER_SECOND: logs[metrics.TOKENS_GENERATED] / max(logs["timing/generate"], 1e-9),
        metrics.ENTROPY: logs.get("policy/policy_entropy"),
        metrics.CLIP_FRACTION: logs.get("policy/loss_metrics/clip_ratio"),
        metrics.LEARNING_RATE: logs.get("policy/policy_lr"),
    }
    return {name: value for name, value in renamed.items() if value is not None}
