"""What may not be set through the escape hatches: vendors' keys that the recipe decides, or that nobody reads.

Accepting one would make the recipe say one thing and do another. Not here: keys that a vendor does not know, which the
vendor itself refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

VLLM_ARGS_SET_BY_RECIPE = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "seed": "trainer.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_prefix_caching": "rollout.prefix_caching",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "additional_config": "rollout.strict_kernels",
    "speculative_config": "rollout.draft",
    "worker_extension_cls": "rollout.draft",
    "port": "rollout.port",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
}
# Set after the escape hatch is merged, because the trainer could not work with another value.
VLLM_ARGS_OF_THE_TRAINER = (
    "served_model_name",
    "logprobs_mode",
    "generation_config",
    "enable_lora",
    "host",
    "disable_uvicorn_access_log",
    "middleware",
    "weight_transfer_config",
)
SKYRL_ARGS_SET_BY_RECIPE = {
    "data.train_data": "data.train",
    "data.val_data": "data.eval",
    "environment.env_class": "environment.name",
    "generator.n_samples_per_prompt": "algorithm.n_samples_per_prompt",
    "generator.max_turns": "environment.max_turns",
    "generator.max_input_length": "data.max_prompt_length",
    "generator.sampling_params.max_generate_length": "rollout.max_generate_length",
    "generator.sampling_params.temperature": "rollout.temperature",
    "generator.eval_sampling_params.temperature": "rollout.temperature",
    "generator.inference_engine.model_dtype": "rollout.dtype",
    "generator.inference_engine.num_engines": "rollout.num_engines",
    "generator.inference_engine.tensor_parallel_size": "rollout.tensor_parallel_size",
    "trainer.policy.model.path": "model.path",
    "trainer.draft": "rollout.draft",
    "trainer.policy.model.lora.rank": "lora.rank",
    "trainer.policy.model.lora.alpha": "lora.alpha",
    "trainer.policy.model.lora.dropout": "lora.dropout",
    "trainer.policy.optimizer_config.lr": "trainer.learning_rate",
    "trainer.policy.optimizer_config.num_warmup_steps": "trainer.num_warmup_steps",
    "trainer.policy.optimizer_config.scheduler": "trainer.lr_scheduler",
    "trainer.policy.optimizer_config.weight_decay": "trainer.weight_decay",
    "trainer.policy.optimizer_config.max_grad_norm": "trainer.max_grad_norm",
    "trainer.placement.policy_num_gpus_per_node": "trainer.num_gpus_per_node",
    "trainer.placement.policy_num_nodes": "trainer.num_nodes",
    "trainer.train_batch_size": "trainer.train_batch_size",
    "trainer.policy_mini_batch_size": "trainer.policy_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
    "trainer.epochs": "trainer.num_steps",
    "trainer.max_training_steps": "trainer.num_steps",
    "trainer.max_prompt_length": "data.max_prompt_length",
    "trainer.gradient_checkpointing": "trainer.gradient_checkpointing",
    "trainer.eval_before_train": "data.eval",
    "trainer.eval_interval": "trainer.eval_interval",
    "trainer.eval_batch_size": "trainer.eval_batch_size",
    "trainer.ckpt_interval": "checkpoint.interval",
    "trainer.max_ckpts_to_keep": "checkpoint.max_to_keep",
    "trainer.ckpt_path": "logging.runs_dir",
    "trainer.export_path": "logging.runs_dir",
    "trainer.log_path": "logging.runs_dir",
    "trainer.logger": "logging.wandb",
    "trainer.project_name": "logging.project_name",
    "trainer.run_name": "logging.run_name",
    "trainer.seed": "trainer.seed",
    "trainer.algorithm.advantage_estimator": "algorithm.advantage_estimator",
    "trainer.algorithm.grpo_norm_by_std": "algorithm.normalize_by_std",
    "trainer.algorithm.policy_loss_type": "algorithm.policy_loss",
    "trainer.algorithm.loss_reduction": "algorithm.loss_reduction",
    "trainer.algorithm.eps_clip_low": "algorithm.eps_clip_low",
    "trainer.algorithm.eps_clip_high": "algorithm.eps_clip_high",
    "trainer.algorithm.temperature": "rollout.temperature",
    "trainer.algorithm.off_policy_correction.tis_ratio_type": "algorithm.importance_sampling",
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": "algorithm.importance_sampling_cap",
}
# Sections of SkyRL's configuration that nobody reads here: batches, worker, engine and sampling are the recipe's.
SKYRL_SECTIONS_NOT_READ = (
    "data",
    "generator.sampling_params",
    "generator.eval_sampling_params",
    "generator.inference_engine",
    "trainer.placement",
    "trainer.policy",
    "trainer.critic",
    "trainer.ref",
)
DEEPSPEED_ARGS_SET_BY_RECIPE = {
    "zero_optimization.stage": "trainer.zero_stage",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.learning_rate",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
    "bf16": "trainer.dtype",
}


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings by dotted key: `{a: {b: 1}}` says the same as `{a.b: 1}` and must be judged the same."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def fault(vllm_args: Iterable[str], skyrl_args: Iterable[str], deepspeed_args: Iterable[str]) -> str | None:
    """The first key that may not be set, as a message; None where all may."""
    for path, given, owned in (
        ("rollout.vllm_args", vllm_args, VLLM_ARGS_SET_BY_RECIPE),
        ("trainer.skyrl_args", skyrl_args, SKYRL_ARGS_SET_BY_RECIPE),
        ("trainer.deepspeed_args", deepspeed_args, DEEPSPEED_ARGS_SET_BY_RECIPE),
    ):
        for key in given:
            parts = key.replace("-", "_").split(".")
            names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            if owner := next((owned[name] for name in names if name in owned), None):
                return f"{path}.{key} must not be set: {owner} decides it. Set {owner} instead"
    for key in skyrl_args:
        if section := next((s for s in SKYRL_SECTIONS_NOT_READ if f"{key}.".startswith(f"{s}.")), None):
            return (
                f"trainer.skyrl_args.{key} must not be set: this trainer does not read SkyRL's {section}. Use the "
                "recipe's own fields, rollout.vllm_args or trainer.deepspeed_args"
            )
    for key in vllm_args:
        if key.replace("-", "_") in VLLM_ARGS_OF_THE_TRAINER:
            return f"rollout.vllm_args.{key} must not be set: the trainer needs its own value. Remove it"
    return None
