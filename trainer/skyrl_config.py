"""A recipe as SkyRL's configuration: one table of dotted keys, the escape hatch merged last, SkyRL's own validation.

Importing this module imports SkyRL, so it happens after `trainer.vendor.prepare` and never for `--help`.
Departures from SkyRL's defaults, each with its reason, are in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import vendor

vendor.prepare()

from skyrl.train.config import SkyRLTrainConfig, TrainerConfig, make_config  # noqa: E402
from skyrl.train.utils.utils import validate_cfg  # noqa: E402

from inkling_rl.engine_args import engine_arguments  # noqa: E402
from inkling_rl.recipe import Recipe, RecipeError  # noqa: E402
from trainer.engine import BASE_MODEL_NAME, SERVER_ARGUMENTS  # noqa: E402
from trainer.resume import served_draft  # noqa: E402


@dataclass
class InklingTrainerConfig(TrainerConfig):
    """SkyRL's trainer section, and what our worker reads beside it."""

    recipe: str = ""
    """Which it came from, as JSON, so that it travels."""

    draft: str = ""
    """Directory of the draft that serves, where rollouts are drafted."""


InklingConfig: type[SkyRLTrainConfig] = make_config(trainer_cls=InklingTrainerConfig)

# Settings of SkyRL that the worker does not implement. Accepting them would train something else than was asked.
UNSUPPORTED: dict[str, Any] = {
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.use_kl_in_reward": False,
    "trainer.algorithm.use_entropy_loss": False,
    "trainer.algorithm.enable_sample_support_replay": False,
    # A step would be made of several batches, of which seeds, samples and the mismatch know only the last.
    "trainer.algorithm.dynamic_sampling.type": None,
    "trainer.hf_save_interval": -1,
    "trainer.resume_mode": "latest",
    "trainer.placement.colocate_all": False,
    "trainer.fully_async.enabled": False,
    "trainer.mtp.enabled": False,
    "trainer.strategy": "deepspeed",
    "trainer.max_tokens_per_microbatch": -1,
    "trainer.policy.sequence_parallel_size": 1,
    "generator.batched": False,
    "generator.step_wise_trajectories": False,
    "generator.vision_language_generator": False,
}


def build(
    recipe: Recipe,
    *,
    model_path: Path,
    run_dir: Path,
    engine_url: str | None,
    stop_token_ids: list[int],
    is_resumed: bool = False,
) -> SkyRLTrainConfig:
    """SkyRL's validated configuration for a recipe.

    Args:
        recipe: the whole run.
        model_path: resolved directory of the checkpoint.
        run_dir: where everything of the run goes.
        engine_url: of the standalone engine, or None where SkyRL places engines as Ray actors.
        stop_token_ids: that end a turn.
        is_resumed: the evaluation before training belongs to the first run only.

    Raises:
        RecipeError: SkyRL refuses the combination, or `trainer.skyrl_args` asks for what this trainer has not.
    """
    settings = _settings(recipe, model_path, run_dir, stop_token_ids)
    settings |= _engine(recipe, model_path, run_dir, engine_url)
    settings["trainer.eval_before_train"] = recipe.data.eval is not None and not is_resumed
    settings |= recipe.trainer.skyrl_args
    for key, only in UNSUPPORTED.items():
        if key in recipe.trainer.skyrl_args and settings[key] != only:
            raise RecipeError(f"trainer.skyrl_args.{key} must be {only!r}; got {settings[key]!r}. Remove it")
    try:
        cfg = InklingConfig.from_cli_overrides(settings)
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise RecipeError(f"SkyRL refuses the configuration: {error}") from error
    # SkyRL validates "mp" or "ray" only; a CPU engine keeps its worker in the engine's process.
    if executor := engine_arguments(recipe).get("distributed_executor_backend"):
        cfg.generator.inference_engine.distributed_executor_backend = executor
    return cfg


def _settings(recipe: Recipe, model_path: Path, run_dir: Path, stop_token_ids: list[int]) -> dict[str, Any]:
    trainer, algorithm, rollout = recipe.trainer, recipe.algorithm, recipe.rollout
    is_eval = recipe.data.eval is not None
    sampling = {
        "max_generate_length": rollout.max_generate_length,
        "temperature": rollout.temperature,
        "logprobs": 0,
        "additional_kwargs": {"stop_token_ids": stop_token_ids},
    }
    return {
        "data.train_data": [recipe.data.train],
        "data.val_data": [recipe.data.eval] if recipe.data.eval else [],
        # Batches are a pure function of seed and step (trainer.dataset); loader processes would cost 38 s at the start.
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": False,
        "environment.env_class": recipe.environment.name,
        # Environments run in the event loop's thread pool; more threads than this only wait on the interpreter.
        "environment.skyrl_gym.max_env_workers": 8,
        "generator.n_samples_per_prompt": algorithm.n_samples_per_prompt,
        "generator.max_turns": recipe.environment.max_turns,
        "generator.max_input_length": recipe.data.max_prompt_length
        if recipe.environment.max_turns == 1
        else rollout.max_model_len - rollout.max_generate_length,
        # The sampled end token stays as sampled; the other mode of SkyRL appends one with log-probability 0.
        "generator.use_conversation_multi_turn": True,
        "generator.sampling_params": sampling,
        "generator.eval_sampling_params": sampling,
        "trainer.recipe": recipe.model_dump_json(),
        # Absolute: a worker's working directory may be another.
        "trainer.draft": str(draft.absolute()) if (draft := served_draft(recipe, run_dir)) else "",
        "trainer.strategy": "deepspeed",
        "trainer.policy.model.path": str(model_path),
        "trainer.policy.model.lora.rank": recipe.lora.rank,
        "trainer.policy.model.lora.alpha": int(recipe.lora.alpha),
        "trainer.policy.model.lora.lora_sync_path": str(run_dir / "adapters"),
        "trainer.policy.optimizer_config.lr": trainer.learning_rate,
        "trainer.policy.optimizer_config.num_warmup_steps": trainer.num_warmup_steps,
        "trainer.policy.optimizer_config.scheduler": trainer.lr_scheduler,
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": trainer.num_gpus_per_node,
        "trainer.placement.policy_num_nodes": trainer.num_nodes,
        "trainer.train_batch_size": trainer.train_batch_size,
        "trainer.policy_mini_batch_size": recipe.policy_mini_batch_size,
        "trainer.micro_train_batch_size_per_gpu": _micro_batch(recipe),
        "trainer.micro_forward_batch_size_per_gpu": _micro_batch(recipe),
        "trainer.max_training_steps": trainer.num_steps,
        "trainer.eval_interval": (trainer.eval_interval or trainer.num_steps) if is_eval else -1,
        "trainer.eval_batch_size": trainer.eval_batch_size,
        "trainer.ckpt_interval": recipe.checkpoint.interval or trainer.num_steps,
        "trainer.max_ckpts_to_keep": recipe.checkpoint.max_to_keep,
        # The old log-probabilities are those of the same micro-batches as the update's, so the ratio starts at 1.
        "trainer.recompute_old_logprobs_per_minibatch": True,
        "trainer.max_prompt_length": recipe.data.max_prompt_length,
        "trainer.seed": trainer.seed,
        "trainer.gradient_checkpointing": trainer.gradient_checkpointing,
        "trainer.ckpt_path": str(run_dir / "checkpoints"),
        "trainer.export_path": str(run_dir / "exports"),
        "trainer.log_path": str(run_dir / "logs"),
        # Resuming is trainer.resume's: SkyRL would look for its own layout.
        "trainer.resume_mode": "latest",
        "trainer.logger": "console",
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.print_example_interval": 0,
        "trainer.dump_eval_results": False,
        "trainer.flash_attn": False,
        "trainer.remove_microbatch_padding": False,
        "trainer.project_name": recipe.logging.project_name,
        "trainer.run_name": run_dir.name,
        "trainer.algorithm.advantage_estimator": algorithm.advantage_estimator,
        "trainer.algorithm.grpo_norm_by_std": algorithm.normalize_by_std,
        "trainer.algorithm.policy_loss_type": algorithm.policy_loss,
        "trainer.algorithm.loss_reduction": algorithm.loss_reduction,
        # The constant that one loss reduction divides by. Given without need it only makes SkyRL warn at every step.
        "trainer.algorithm.max_seq_len": rollout.max_model_len
        if algorithm.loss_reduction == "seq_mean_token_sum_norm"
        else None,
        "trainer.algorithm.eps_clip_low": algorithm.eps_clip_low,
        "trainer.algorithm.eps_clip_high": algorithm.eps_clip_high,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.algorithm.zero_variance_filter": algorithm.advantage_estimator != "reinforce++",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": None
        if algorithm.importance_sampling == "off"
        else algorithm.importance_sampling,
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": algorithm.importance_sampling_cap,
    }


def _micro_batch(recipe: Recipe) -> int:
    """SkyRL wants micro-batches that divide what a rank gets of a mini-batch; the largest such up to the recipe's."""
    workers = recipe.trainer.num_gpus_per_node * recipe.trainer.num_nodes
    share = recipe.policy_mini_batch_size * recipe.algorithm.n_samples_per_prompt // workers
    return max(size for size in range(1, min(recipe.trainer.micro_batch_size_per_gpu, share) + 1) if share % size == 0)


def _engine(recipe: Recipe, model_path: Path, run_dir: Path, engine_url: str | None) -> dict[str, Any]:
    rollout = recipe.rollout
    prefix = "generator.inference_engine."
    settings: dict[str, Any] = {
        f"{prefix}model_dtype": recipe.rollout_dtype,
        f"{prefix}num_engines": rollout.num_engines,
        f"{prefix}tensor_parallel_size": rollout.tensor_parallel_size,
        f"{prefix}enable_prefix_caching": rollout.prefix_caching,
        f"{prefix}max_num_batched_tokens": rollout.max_num_batched_tokens,
        f"{prefix}max_num_seqs": rollout.max_num_seqs,
        f"{prefix}served_model_name": BASE_MODEL_NAME,
        f"{prefix}distributed_executor_backend": "mp",
        f"{prefix}enable_ray_prometheus_stats": False,
    }
    if engine_url is not None:
        return settings | {f"{prefix}external_proxy_url": engine_url, f"{prefix}run_engines_locally": False}
    draft = served_draft(recipe, run_dir)
    arguments = engine_arguments(recipe, model=str(model_path), draft=draft) | SERVER_ARGUMENTS
    # Weights do not travel SkyRL's way, whose receiver comes with its worker class; a draft's worker class is ours.
    arguments["weight_transfer_config"] = None
    return settings | {f"{prefix}engine_init_kwargs": arguments}
