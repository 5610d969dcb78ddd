"""The draft as vLLM's configuration sees it: a model of its own beside the target, under `speculative_config`.

vLLM 0.30 has DSpark for GPUs and plain Markov heads only. Our draft runs there as method `dspark`, with the speculator
replaced by `rollout.plugin.speculator`, and on a CPU as `dflash`, with the proposer replaced by
`rollout.plugin.proposer`. Here: which config class that draft has, how the `dspark_*` keys of a target become one, and
whether a configuration asks for such a draft at all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.platforms import current_platform

from inkling_rl.checkpoint.reader import read_json
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.shape import STANDALONE_MODEL_TYPE, DraftShape, as_release, standalone_config
from inkling_rl.engine_args import draft_method
from rollout.plugin.compat import MODEL_TYPES
from rollout.plugin.device import check_draft
from rollout.plugin.shape import EngineError

logger = logging.getLogger("vllm.inkling2.draft")

ARCHITECTURES = ("Inkling2DSparkModel", "DFlashInkling2DSparkModel")
"""Of a draft: vLLM puts `DFlash` before that of any draft of that method."""

FOREIGN_ARCHITECTURE = "K3DSparkModel"
"""vLLM takes a draft of method `dspark` for DeepSeek's unless it has one of a few names. After ours, which is found
first, this one changes nothing else."""

_original = SpeculativeConfig.hf_config_override


class Inkling2DSparkConfig(PretrainedConfig):
    """A draft's config.json in the flat form, see `inkling_rl.draft.shape`."""

    model_type = STANDALONE_MODEL_TYPE


def hf_config_override(config: PretrainedConfig) -> PretrainedConfig:
    """In place of vLLM's: the draft that a target's config.json describes, or that of a directory of its own.

    Raises:
        CheckpointError: the checkpoint holds no draft.
    """
    if config.model_type not in (*MODEL_TYPES, STANDALONE_MODEL_TYPE):
        return _original(config)
    flat = standalone_config(config.to_dict())
    text = getattr(config, "text_config", config)
    return Inkling2DSparkConfig(
        **flat | {"architectures": [*flat["architectures"], FOREIGN_ARCHITECTURE]},
        # vLLM's own names for the same things.
        dflash_config={"mask_token_id": flat["mask_token_id"], "target_layer_ids": flat["target_layer_ids"]},
        max_position_embeddings=getattr(text, "max_position_embeddings", 1 << 20),
    )


def register() -> None:
    """Make the config class and the override known; idempotent."""
    AutoConfig.register(STANDALONE_MODEL_TYPE, Inkling2DSparkConfig, exist_ok=True)
    SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)


def is_registered() -> bool:
    return SpeculativeConfig.hf_config_override is hf_config_override


def is_ours(speculative: Any) -> bool:
    """Whether a vLLM `SpeculativeConfig` (or None) asks for a draft of this plugin."""
    draft = getattr(speculative, "draft_model_config", None)
    return draft is not None and not set(ARCHITECTURES).isdisjoint(draft.architectures or [])


def draft_shape(vllm_config: Any) -> DraftShape | None:
    """Sizes of the draft that is asked for, checked against the target and its own files; None without one.

    Raises:
        CheckpointError: a draft for another target, or one that is not whole.
        EngineError: drafting asked for in a way that this engine has not.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in ("ngram", "suffix"):
        return None
    method = draft_method("cpu" if current_platform.is_cpu() else "cuda")
    if not is_ours(speculative) or speculative.method != method:
        raise EngineError(
            f"speculative_config.method must be {method} (a DSpark draft), ngram or suffix for Inkling 2 on "
            f"{current_platform.device_name}; got {speculative.method}. Leave it out, or use rollout.draft"
        )
    _check(vllm_config)
    target = read_json(Path(vllm_config.model_config.model) / "config.json")
    if vllm_config.load_config.load_format == "dummy":
        shape = DraftShape.from_config(as_release(read_json(Path(speculative.model) / "config.json")))
    else:
        draft = DraftCheckpoint.open(speculative.model, target)
        draft.check_tokens(speculative.num_speculative_tokens)
        shape = draft.shape
    check_draft(shape)
    return shape


def open_draft(vllm_config: Any) -> DraftCheckpoint:
    """The draft's files; `draft_shape` has checked them."""
    target = read_json(Path(vllm_config.model_config.model) / "config.json")
    return DraftCheckpoint.open(vllm_config.speculative_config.model, target)


def _check(vllm_config: Any) -> None:
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if current_platform.is_cpu():
        _require("async_scheduling", not scheduler.async_scheduling, "off", scheduler.async_scheduling, "Leave it out")
    adaptive = speculative.enable_adaptive_verification
    _require("enable_adaptive_verification", not adaptive, "off", adaptive, "Leave it out")
    topk = speculative.dspark_draft_topk
    _require("dspark_draft_topk", topk is None, "left unset", topk, "Leave it out")
    method = speculative.rejection_sample_method
    _require("rejection_sample_method", method == "standard", "standard", method, "Leave it out")
    padded = not speculative.disable_padded_drafter_batch
    _require("disable_padded_drafter_batch", padded, "false", not padded, "Leave it out")
    schedule = speculative.num_speculative_tokens_per_batch_size
    _require("num_speculative_tokens_per_batch_size", schedule is None, "left unset", schedule, "Leave it out")
    _require("kv_transfer_config", vllm_config.kv_transfer_config is None, "left unset", "one", "Leave it out")
    ranks = vllm_config.parallel_config.data_parallel_size
    # The routes that replace a draft reach the workers of the first.
    _require("data_parallel_size", ranks == 1, "1", ranks, "Start several engines (rollout.num_engines)")
    if not current_platform.is_cpu():
        # vLLM's speculator lays the rows of a whole batch's drafts into buffers of max_num_batched_tokens. The
        # scheduler sees to that in serving; the measuring run drafts for max_num_seqs requests without asking it.
        room, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs * speculative.num_speculative_tokens
        least = f"at least max_num_seqs x num_speculative_tokens = {rows}"
        remedy = "Raise it (rollout.max_num_batched_tokens), or lower max_num_seqs (rollout.max_num_seqs)"
        _require("max_num_batched_tokens", room >= rows, least, room, remedy)


def warn_of_room(vllm_config: Any) -> None:
    """Say so where a step cannot verify and draft for all requests that may run: some then wait in every step."""
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    # vLLM's scheduler counts the rows of a verification, and room to draft in besides.
    rows = 1 + speculative.num_speculative_tokens + speculative.max_num_new_slots_for_drafting
    room, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if room < num_seqs * rows:
        logger.warning(
            "a step drafts for %d of %d requests: each takes %d of max_num_batched_tokens = %d. Raise it to %d "
            "(rollout.max_num_batched_tokens) for all of them in every step, or lower max_num_seqs "
            "(rollout.max_num_seqs)",
            *(room // rows, num_seqs, rows, room, num_seqs * rows),
        )


def _require(name: str, holds: bool, requirement: str, value: object, remedy: str) -> None:
    if not holds:
        raise EngineError(f"{name} must be {requirement} where a draft is used; got {value}. {remedy}")
