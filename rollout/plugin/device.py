"""Which GPUs the engine runs on, what it runs there, and every refusal that depends on the GPU.

A row of `GPUS` is a place in the dispatch: the generation's name, how experts run there and whether that has ever run.
Blackwell's row is a place and no more: it would take FlashInfer's TRT-LLM experts, which multiply NVFP4 and MXFP8 by
activations quantised inside the kernel, with a scale per token. That is not written; what the row names instead are the
portable kernels (Triton attention, Marlin experts), and they have not run there.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal, NamedTuple

import torch
from vllm.platforms import current_platform

from inkling_rl.draft.shape import DraftShape
from rollout.kernels.trials import AttentionSizes, DraftSizes, Sizes
from rollout.plugin.paging import DECODE_QUERIES, CacheOwner, decode_counts, state_dtype
from rollout.plugin.shape import AttentionShape, EngineError, ModelShape

logger = logging.getLogger(__name__)

UNTESTED_GPU = "INKLING_RL_UNTESTED_GPU"


class Gpu(NamedTuple):
    """What runs on GPUs of one compute capability."""

    generation: str
    experts: Literal["marlin"]
    has_run: bool


GPUS: dict[tuple[int, int], Gpu] = {
    (9, 0): Gpu("Hopper", "marlin", has_run=True),
    (10, 0): Gpu("Blackwell", "marlin", has_run=False),
    (10, 3): Gpu("Blackwell", "marlin", has_run=False),
    (12, 0): Gpu("Blackwell", "marlin", has_run=False),
    (12, 1): Gpu("Blackwell", "marlin", has_run=False),
}
SUPPORTED = "an NVIDIA GPU of compute capability 9.0 (Hopper), or a CPU"

# What the Triton kernels cover; the C++ ones of the CPU cover more.
HEAD_DIMS = (16, 32, 64, 128)
REL_DIMS = (16, 32, 64)
MAX_GROUP = 8
"""Query heads per key/value head: with the 8 tokens of a verified draft they share a tile of 64 rows."""
MAX_DRAFT_ROWS = 64
"""Query heads per key/value head of a draft times the rows of a block: they share a tile, too."""
MAX_DRAFT_RANK = 256
MAX_SEQS = 4096
"""Requests of a step: decode attention reads all lengths as one vector."""


def gpu() -> Gpu:
    """The row of the GPU at hand.

    Raises:
        EngineError: it has none.
    """
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    found = GPUS.get((capability.major, capability.minor)) if capability else None
    if found is None:
        got = f"{_name()}, compute capability {capability.as_version_str()}" if capability else _name()
        raise EngineError(f"device must be {SUPPORTED}; got {got}. Take another machine")
    return found


def check_device(vllm_config: Any) -> None:
    """Refuse a GPU, or a model on a GPU, that the kernels do not cover. Nothing to refuse on a CPU.

    Raises:
        EngineError: the first fault.
    """
    if current_platform.is_cpu():
        return
    found = gpu()
    if not found.has_run:
        if os.environ.get(UNTESTED_GPU) != "1":
            raise EngineError(
                f"device must be {SUPPORTED}; got {_name()} ({found.generation}), on which this engine has never run. "
                f"Set {UNTESTED_GPU}=1 to try its portable kernels there"
            )
        logger.warning(
            "%s (%s): the engine has never run on such a GPU. It takes portable kernels there (Triton attention, "
            "%s experts); run `inkling-rl verify` before you trust a number",
            _name(), found.generation, found.experts,
        )  # fmt: skip
    if vllm_config.lora_config is not None:
        # vLLM 0.30's LoRA kernels assert this in the first step that has an adapter.
        dtype = vllm_config.model_config.dtype
        _require("dtype", dtype == torch.bfloat16, "bfloat16 where adapters are loaded", dtype, "Set it to bfloat16")
    seqs = vllm_config.scheduler_config.max_num_seqs
    _require("max_num_seqs", seqs <= MAX_SEQS, f"{MAX_SEQS} or less", seqs, "Lower it")
    if (drafts := vllm_config.speculative_config) is not None:
        # More rows would be prefill's, which reads a request's keys once per 64 rows and head: slow, and never run so.
        drafted, most = drafts.num_speculative_tokens, DECODE_QUERIES - 1
        _require("speculative_config.num_speculative_tokens", drafted <= most, f"{most} or less", drafted, "Lower it")
    shape = ModelShape.from_config(vllm_config.model_config.hf_text_config)
    _require("d_rel", shape.d_rel in REL_DIMS, _one_of(REL_DIMS), shape.d_rel)
    for prefix, kind in (("", shape.full), ("swa_", shape.sliding)):
        _require(f"{prefix}head_dim", kind.head_dim in HEAD_DIMS, _one_of(HEAD_DIMS), kind.head_dim)
        group = kind.num_heads // kind.num_kv_heads
        name = f"{prefix}num_attention_heads / {prefix}num_key_value_heads"
        _require(name, group <= MAX_GROUP, f"{MAX_GROUP} or less", group)


def check_draft(shape: DraftShape) -> None:
    """Refuse a draft that the kernels of a GPU do not cover. Nothing to refuse on a CPU.

    Raises:
        EngineError: the first fault.
    """
    if current_platform.is_cpu():
        return
    remedy = "Draft on a CPU, or leave rollout.draft out"
    _require("the draft's head_dim", shape.head_dim in HEAD_DIMS, _one_of(HEAD_DIMS), shape.head_dim, remedy)
    rows = shape.num_heads // shape.num_kv_heads * shape.block_size
    name = "the draft's num_attention_heads / num_key_value_heads x block_size"
    _require(name, rows <= MAX_DRAFT_ROWS, f"{MAX_DRAFT_ROWS} or less", rows, remedy)
    rank, most = shape.rank, MAX_DRAFT_RANK
    _require("the draft's markov_rank", rank <= most, f"{most} or less", rank, remedy)


def _name() -> str:
    return str(current_platform.get_device_name()) if current_platform.is_cuda() else str(current_platform.device_name)


def kernel_sizes(vllm_config: Any, shape: ModelShape, draft: DraftShape | None = None) -> Sizes:
    """What the kernels are compiled for; call it when the model's pages are registered (`paging.CachePlan`)."""
    pages = {}
    for prefix, owner in vllm_config.compilation_config.static_forward_context.items():
        if isinstance(owner, CacheOwner):
            pages[prefix.rsplit(".", 1)[-1]] = owner.spec.block_size
    kinds = (("full_cache", shape.full), ("sliding_cache", shape.sliding))
    dtype = vllm_config.model_config.dtype
    return Sizes(
        dtype=dtype,
        state_dtype=state_dtype(vllm_config),
        attention=tuple(_attention(kind, pages[name]) for name, kind in kinds if name in pages),
        hidden=shape.hidden_size,
        experts=shape.num_experts,
        top_k=shape.experts_per_token,
        expert_width=shape.expert_width,
        d_rel=shape.d_rel,
        conv_page=pages["conv_cache"],
        gate_cap=shape.gate_cap,
        up_cap=shape.up_cap,
        # Others are dense, see `rollout.plugin.experts`.
        expert_formats=tuple(sorted(set(shape.expert_formats) - {"bf16"})) if dtype == torch.bfloat16 else (),
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_queries=decode_counts(vllm_config),
        draft=_draft(draft, pages["draft_cache"]) if draft else None,
    )


def _attention(kind: AttentionShape, page: int) -> AttentionSizes:
    return AttentionSizes(
        num_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        extent=kind.rel_extent,
        window=kind.window,
        page=page,
    )


def _draft(shape: DraftShape, page: int) -> DraftSizes:
    return DraftSizes(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page=page,
        block_rows=shape.block_size,
        rank=shape.rank,
        vocab=shape.vocab_size,
        norm_eps=shape.norm_eps,
    )


def _one_of(values: tuple[int, ...]) -> str:
    return f"one of {', '.join(map(str, values))}"


def _require(
    name: str, holds: bool, requirement: str, value: object, remedy: str = "Run it on a CPU or use another engine"
) -> None:
    if not holds:
        raise EngineError(f"{name} must be {requirement} on a GPU; got {value}. {remedy}")
