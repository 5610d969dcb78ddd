"""The recipe: one strict schema for everything a run needs to be told.

A recipe is YAML. Unknown keys are errors, every field has its documentation under it, and a rule that spans fields is
a validator named as a sentence. Field names follow SkyRL and the OpenAI API where those have one. Nothing here imports
torch or a vendor: `inkling-rl train --dry-run` answers before anything heavy is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from inkling_rl.recipe import hatches
from inkling_rl.recipe.draft import Draft
from inkling_rl.recipe.section import Section

Dtype = Literal["float32", "bfloat16"]
LoraTarget = Literal["q", "k", "v", "r", "gate", "o"]


class RecipeError(ValueError):
    """A recipe that cannot be used. The message is complete: dotted path, requirement, value, what to do."""


class Model(Section):
    path: str
    """Directory of a release-layout checkpoint, or `builtin:tiny-arithmetic`: the base that ships with the package."""

    dtype: Dtype = "bfloat16"
    """Compute dtype of trainer and engine. float32 is for parity checks and tiny models."""


class Data(Section):
    train: str
    """Training prompts: a .jsonl or .parquet file with a `prompt` column (text or messages), or `arithmetic/train`."""

    eval: str | None = None
    """Held-out prompts in the same form, or `arithmetic/heldout`. Without it there is no `eval/score`."""

    prompt_key: str = "prompt"
    """Column that holds the prompt."""

    answer_key: str = "answer"
    """Column that holds the ground truth, passed to the environment as `answer`."""

    max_prompt_length: Annotated[int, Field(gt=0)] = 512
    """Prompts with more tokens than this are dropped, and counted, before the run starts."""

    shuffle: bool = True
    """Shuffle the training rows once per epoch, from `trainer.seed`."""


class Environment(Section):
    name: str
    """Registered environment (`arithmetic`, `gsm8k`) or `package.module:Class`, a skyrl_gym text environment."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment unchanged."""

    max_turns: Annotated[int, Field(gt=0)] = 1
    """Turns of one episode at the most."""


class Rollout(Section):
    placement: Literal["standalone", "ray"] = "standalone"
    """standalone: one engine process on this node, beside the trainer. ray: engines as Ray actors (clusters)."""

    num_engines: Annotated[int, Field(gt=0)] = 1
    """Engine replicas."""

    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    """GPUs that hold one engine replica."""

    dtype: Dtype | None = None
    """Compute dtype of the engine; `model.dtype` unless given."""

    max_model_len: Annotated[int, Field(gt=0)] = 4096
    """Prompt and completion together, in tokens."""

    max_num_seqs: Annotated[int, Field(gt=0)] = 128
    """Sequences in one engine step. 1 makes a resumed run's metrics bit-equal to an uninterrupted one's."""

    max_num_batched_tokens: Annotated[int, Field(gt=0)] = 8192
    """Tokens in one engine step; longer prompts are prefilled in chunks."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV-cache size in GiB. On a GPU the engine takes what is free unless given; on a CPU 1."""

    prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes (never across policy versions)."""

    strict_kernels: bool | None = None
    """A GPU kernel that does not compile or computes something else stops the start. false: a torch fallback takes its
    place, with a warning that names the slowdown. True where the engine runs on GPUs, unless given; a CPU has none."""

    draft: Draft | None = None
    """Draft tokens with DSpark and verify them, several per step. Without it every step gives one token."""

    effort: Annotated[float, Field(ge=0.0, le=0.99)] = 0.2
    """Thinking effort written into every prompt of the chat format."""

    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Sampling temperature of training rollouts and of the evaluation; the trainer scores at the same temperature."""

    max_generate_length: Annotated[int, Field(gt=0)] = 1024
    """Tokens of one completion at the most."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the engine's HTTP server; 0 picks a free one."""

    startup_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds until the engine must be healthy."""

    request_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without an answer from the engine after which the run stops and names the engine as hung."""

    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, merged last. A key that a recipe field already sets is an error."""


class Trainer(Section):
    seed: Annotated[int, Field(ge=0)] = 0
    """Every random number of the run follows from it."""

    dtype: Dtype | None = None
    """Compute dtype of the trainer; `model.dtype` unless given. Adapters and the optimiser are always float32."""

    num_steps: Annotated[int, Field(gt=0)]
    """Optimiser steps (rollout batches) of the run."""

    train_batch_size: Annotated[int, Field(gt=0)]
    """Prompts per step; every prompt gets `algorithm.n_samples_per_prompt` completions."""

    policy_mini_batch_size: Annotated[int, Field(gt=0)] | None = None
    """Prompts per optimiser step; `train_batch_size` (one step per rollout batch) unless given."""

    micro_batch_size_per_gpu: Annotated[int, Field(gt=0)] = 8
    """Sequences in one forward and backward pass of one worker."""

    num_gpus_per_node: Annotated[int, Field(gt=0)] = 1
    """Trainer workers on a node. On a CPU a worker is a process."""

    num_nodes: Annotated[int, Field(gt=0)] = 1
    """Nodes with trainer workers."""

    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-4
    """Peak learning rate of AdamW."""

    lr_scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Schedule after the warm-up."""

    num_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""

    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""

    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are clipped to this global norm."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. Stage 3 shards the frozen base as well."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    eval_interval: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; the first and the last step are always evaluated when `data.eval` is given."""

    eval_batch_size: Annotated[int, Field(gt=0)] = 256
    """Held-out prompts sent to the engine at once."""

    skyrl_args: dict[str, Any] = Field(default_factory=dict)
    """Further SkyRL settings by dotted key, merged last. A key that a recipe field already sets is an error."""

    deepspeed_args: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed settings by dotted key, merged last. A key that a recipe field already sets is an error."""

    @field_validator("skyrl_args", "deepspeed_args")
    @classmethod
    def nested_maps_become_dotted_keys(cls, given: dict[str, Any]) -> dict[str, Any]:
        return hatches.dotted(given)


class Lora(Section):
    rank: Annotated[int, Field(gt=0)] = 16
    """Rank of every adapter matrix pair. The engine serves 1, 8, 16, 32, 64, 128, 256, 320 and 512."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters are scaled by alpha / rank."""

    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout before the adapter in training. The engine has none, so a value above 0 is reported as mismatch."""

    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1, strict=False)] = ("q", "k", "v", "o")
    """Attention projections: q, k, v, r (relative bias), gate and o."""

    @field_validator("rank")
    @classmethod
    def rank_is_one_the_engine_serves(cls, rank: int) -> int:
        served = (1, 8, 16, 32, 64, 128, 256, 320, 512)
        if rank not in served:
            raise ValueError(f"must be one of {', '.join(map(str, served))}; got {rank}. Take the next larger one")
        return rank


class Algorithm(Section):
    n_samples_per_prompt: Annotated[int, Field(gt=1)] = 8
    """Completions per prompt: the group whose mean reward is the baseline."""

    advantage_estimator: Literal["grpo", "rloo", "reinforce++", "maxrl"] = "grpo"
    """SkyRL's group-relative estimators."""

    policy_loss: Literal["regular", "dual_clip", "gspo", "cispo"] = "regular"
    """SkyRL's policy loss; `regular` is the clipped PPO surrogate."""

    eps_clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Lower clip of the probability ratio."""

    eps_clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """Upper clip of the probability ratio."""

    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """How token losses become one number."""

    normalize_by_std: bool = True
    """Divide group-relative advantages by the group's standard deviation."""

    importance_sampling: Literal["token", "off"] = "token"
    """Correct for the difference between the rollout's and the trainer's log-probabilities, per token."""

    importance_sampling_cap: Annotated[float, Field(gt=1.0)] = 2.0
    """Weights of the correction are truncated here."""


class Sync(Section):
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one publication, all engines together."""

    probe: bool = True
    """After every publication compare the engine's and the trainer's change of log-probabilities on fixed prompts."""

    max_abs_logprob_diff: Annotated[float, Field(gt=0)] = 1.0
    """Mean |trainer - engine| log-probability above which a step stops the run."""


class Logging(Section):
    project_name: str = "inkling-rl"
    """Project of the tracker."""

    run_name: str | None = None
    """Name of the run, one directory; from the recipe's file name and the time unless given."""

    runs_dir: Path = Field(default=Path("runs"), strict=False)
    """Runs are written to `runs_dir/run_name`."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Mirror metrics to Weights & Biases; a failure there never stops a run."""

    num_samples_per_step: Annotated[int, Field(ge=0)] = 8
    """Completions written to samples.jsonl every step."""

    @field_validator("run_name")
    @classmethod
    def run_name_is_one_directory(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..") or "/" in name or "\0" in name):
            raise ValueError(f"must be the name of one directory; got {name!r}. Use logging.runs_dir for the rest")
        return name


class Checkpoint(Section):
    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; the last step is always saved."""

    max_to_keep: Annotated[int, Field(gt=0)] = 2
    """Older checkpoints are deleted."""


class Recipe(Section):
    """A whole run. `inkling_rl.recipe.load` reads it from YAML with overrides and complete error messages."""

    model: Model
    data: Data
    environment: Environment
    rollout: Rollout = Rollout()
    trainer: Trainer
    lora: Lora = Lora()
    algorithm: Algorithm = Algorithm()
    sync: Sync = Sync()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def prompt_and_completion_fit_the_model_length(self) -> Recipe:
        needed = self.data.max_prompt_length + self.rollout.max_generate_length
        if needed > self.rollout.max_model_len:
            raise ValueError(
                f"rollout.max_model_len must be at least data.max_prompt_length + rollout.max_generate_length = "
                f"{needed}; got {self.rollout.max_model_len}. Raise it or shorten one of the two"
            )
        return self

    @model_validator(mode="after")
    def a_step_has_room_for_a_draft(self) -> Recipe:
        draft, room = self.rollout.draft, self.rollout.max_num_batched_tokens
        if draft and draft.num_tokens >= room:
            raise ValueError(
                f"rollout.max_num_batched_tokens must be above rollout.draft.num_tokens = {draft.num_tokens}; "
                f"got {room}. Raise it"
            )
        return self

    @model_validator(mode="after")
    def a_run_is_long_enough_for_a_refresh(self) -> Recipe:
        draft, steps = self.rollout.draft, self.trainer.num_steps
        if draft and draft.refresh and draft.refresh.interval > steps:
            raise ValueError(
                f"rollout.draft.refresh.interval must be at most trainer.num_steps = {steps}; got "
                f"{draft.refresh.interval}. Lower it, or leave rollout.draft.refresh out"
            )
        return self

    @model_validator(mode="after")
    def mini_batch_divides_the_batch(self) -> Recipe:
        batch, mini = self.trainer.train_batch_size, self.policy_mini_batch_size
        if batch % mini:
            raise ValueError(
                f"trainer.policy_mini_batch_size must divide trainer.train_batch_size = {batch}; got {mini}. "
                "Take a divisor"
            )
        return self

    @model_validator(mode="after")
    def workers_divide_the_mini_batch(self) -> Recipe:
        workers = self.trainer.num_gpus_per_node * self.trainer.num_nodes
        sequences = self.policy_mini_batch_size * self.algorithm.n_samples_per_prompt
        if sequences % workers:
            raise ValueError(
                f"trainer.policy_mini_batch_size x algorithm.n_samples_per_prompt = {sequences} must be a multiple of "
                f"trainer.num_gpus_per_node x trainer.num_nodes = {workers}. Change one of them"
            )
        return self

    @model_validator(mode="after")
    def escape_hatches_set_only_what_is_theirs(self) -> Recipe:
        rollout, trainer = self.rollout, self.trainer
        if fault := hatches.fault(rollout.vllm_args, trainer.skyrl_args, trainer.deepspeed_args):
            raise ValueError(fault)
        return self

    @property
    def policy_mini_batch_size(self) -> int:
        """Prompts per optimiser step."""
        return self.trainer.policy_mini_batch_size or self.trainer.train_batch_size

    @property
    def rollout_dtype(self) -> Dtype:
        return self.rollout.dtype or self.model.dtype

    @property
    def trainer_dtype(self) -> Dtype:
        return self.trainer.dtype or self.model.dtype
