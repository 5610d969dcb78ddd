"""Page geometry of the model's caches, and the attention backend that hands vLLM's page tables to the kernels.

vLLM allocates pages per KV-cache *group* and pays scheduler time per group, request and step. Three kinds of state need
different lifetimes (full attention, sliding attention, convolution windows), so three groups are the least there can
be: full layers, and as many *owners* of sliding and of convolution state as there are full layers, each holding the
state of several layers side by side in one page. All pages have the same number of bytes: block sizes are chosen here
(powers of two) and the rest of a page is padding, which vLLM reads through a strided view.

A draft's layers are a fourth kind: as many owners again, because vLLM wants as many in every group. Where its layers
are fewer, some owners hold none, which costs nothing: the group's page is as large anyway.

The number of tokens in a block must always be read from the bound cache's shape; vLLM scales block sizes on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from inkling_rl.draft.shape import DraftShape
from rollout.kernels.paged import PagedBatch
from rollout.plugin.shape import ModelShape

DECODE_QUERIES = 8
"""Rows of a request up to which the decode kernel takes it: a verified draft of 7 tokens and the one before."""


@dataclass
class PagedMetadata(AttentionMetadata):
    """vLLM's per-group metadata: the batch as kernels want it, and on CUDA how attention divides it.

    The first `decode_requests` requests, which hold the first `decode_rows` rows, have at most `max_queries` rows each.
    """

    batch: PagedBatch
    decode_requests: int = 0
    decode_rows: int = 0
    max_queries: int = 0
    prefill: PagedBatch | None = None
    """The requests after them, with rows counted from `decode_rows` on; None if there are none."""


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Wraps the runner's tensors; next to nothing is computed per step, so a further group costs next to nothing."""

    # One graph serves every batch of as many requests with as many rows each: kernels read lengths on the device.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.counts = decode_counts(vllm_config)

    # vLLM calls this by keyword: the parameter names are part of the interface.
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        common = common_attn_metadata
        batch = PagedBatch(common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping)
        return (
            divide(batch, common.query_start_loc_cpu, common.max_query_len, self.counts)
            if self.device.type == "cuda"
            else (PagedMetadata(batch))
        )


def decode_counts(vllm_config: Any) -> tuple[int, ...]:
    """Rows per request that decode attention is compiled for: a token, a verified draft with the token before, all."""
    drafts = vllm_config.speculative_config
    verified = {_ceil_power_of_two(drafts.num_speculative_tokens + 1)} if drafts is not None else set()
    return tuple(sorted({1, DECODE_QUERIES} | {rows for rows in verified if rows < DECODE_QUERIES}))


def divide(
    batch: PagedBatch, query_start: torch.Tensor, longest: int, counts: tuple[int, ...] = (1, DECODE_QUERIES)
) -> PagedMetadata:
    """Requests of few rows for the decode kernel, and those after the first longer one for the prefill kernel.

    vLLM's V2 runner sorts a batch by rows per request, so this is all of them in either, unless drafts of more than 7
    tokens come first: then the prefill kernel takes all. Counts of rows are rounded up to one of `counts`, because each
    is a kernel to compile.

    Args:
        batch: of the step.
        query_start: the batch's, on the host.
        longest: rows of the longest request that the step, or a graph captured with it, may have.
        counts: ascending, see `decode_counts`.
    """
    rounded = lambda rows: next(count for count in counts if rows <= count)
    if longest <= DECODE_QUERIES:
        return PagedMetadata(batch, len(query_start) - 1, int(query_start[-1]), rounded(longest))
    rows = query_start.diff()
    long = (rows > DECODE_QUERIES).nonzero()
    if len(long) == 0:
        return PagedMetadata(batch, len(rows), int(query_start[-1]), rounded(int(rows.max())))
    first = int(long[0])
    start = int(query_start[first])
    starts = batch.query_start[first:] - start if start else batch.query_start[first:]
    prefill = PagedBatch(starts, batch.seq_lens[first:], batch.block_table[first:], batch.slots[start:])
    queries = rounded(int(rows[:first].max())) if first else 0
    return PagedMetadata(batch, first, start, queries, prefill)


class PagedBackend(AttentionBackend):
    """Names the builder and the layout; there is no attention implementation behind it, the model calls kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "INKLING2_PAGED"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("Inkling 2 attends in rollout.kernels; its backend only describes pages")

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Bytes of a page and tokens per block of each kind of state. Block sizes are powers of two."""

    page_bytes: int
    blocks: dict[str, int]

    @classmethod
    def fit(cls, block_size: int, token_bytes: dict[str, int]) -> PageGeometry:
        """Smallest common page that holds `block_size` tokens of full attention and a token of each other kind.

        Args:
            block_size: tokens per block asked for, a power of two.
            token_bytes: bytes per token and owner of each kind.
        """
        base = token_bytes.get("full", token_bytes.get("sliding", 1))
        while block_size * base < max(token_bytes.values()):
            block_size *= 2
        page = block_size * base
        return cls(page, {kind: _floor_power_of_two(page // size) for kind, size in token_bytes.items()})

    def spec(self, kind: str, heads: int, channels: int, dtype: torch.dtype, window: int | None) -> KVCacheSpec:
        """vLLM's description of one owner. `channels` counts keys and values together."""
        block = self.blocks[kind]
        used = block * heads * channels * dtype.itemsize
        padded = None if used == self.page_bytes else self.page_bytes
        common = {"block_size": block, "num_kv_heads": heads, "dtype": dtype, "page_size_padded": padded}
        if kind == "draft":
            # Fields unlike those of full layers keep vLLM from dealing the draft's layers over the target's groups.
            return FullAttentionSpec(head_size=channels, head_size_v=0, **common)
        if window is None:
            return FullAttentionSpec(head_size=channels // 2, **common)
        return SlidingWindowSpec(head_size=channels, head_size_v=0, sliding_window=window, **common)


def _floor_power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _ceil_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class CacheOwner(AttentionLayerBase):
    """A piece of paged state that vLLM allocates and binds. Not a module: it has no parameters and is not called."""

    def __init__(self, spec: KVCacheSpec, prefix: str) -> None:
        self.spec = spec
        self.prefix = prefix
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Duplicate layer name: {prefix}")
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec


def draft_owners(vllm_config: VllmConfig) -> set[str]:
    """Names of the owners of a draft's pages, those without a layer included."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name for name, owner in layers.items() if isinstance(owner, CacheOwner) and name.endswith(".draft_cache")}


@dataclass(frozen=True, slots=True)
class CacheSlice:
    """The channels of one layer inside an owner's pages."""

    owner: CacheOwner
    first: int
    last: int

    @property
    def key(self) -> str:
        """Name under which the step's metadata is found."""
        return self.owner.prefix

    def view(self) -> torch.Tensor:
        """`[blocks, heads, tokens per block, channels]` of this layer; a view of whatever is bound now."""
        return self.owner.kv_cache[..., self.first : self.last]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The slice of every layer: attention state and convolution state; those of the draft's layers."""

    attention: list[CacheSlice]
    conv: list[CacheSlice]
    draft: list[CacheSlice]

    @classmethod
    def create(
        cls, shape: ModelShape, vllm_config: VllmConfig, prefix: str, draft: DraftShape | None = None
    ) -> CachePlan:
        """Make the owners and register them with vLLM, for the model whose layers are `prefix.layers.N`."""
        dtype = state_dtype(vllm_config)
        full_layers = [layer for layer in range(shape.num_layers) if shape.is_full[layer]]
        sliding_layers = [layer for layer in range(shape.num_layers) if not shape.is_full[layer]]
        num_owners = max(1, len(full_layers))
        sliding_groups = _deal(sliding_layers, num_owners)
        conv_groups = _deal(list(range(shape.num_layers)), num_owners)
        kinds = {
            "full": (shape.full.num_kv_heads, 2 * shape.full.head_dim, _deal(full_layers, num_owners)),
            "sliding": (shape.sliding.num_kv_heads, 2 * shape.sliding.head_dim, sliding_groups),
            "conv": (1, conv_channels(shape), conv_groups),
        }
        if draft is not None:
            deal = _deal_all(list(range(draft.num_layers)), num_owners)
            kinds["draft"] = (draft.num_kv_heads, 2 * draft.head_dim, deal)
        geometry = PageGeometry.fit(
            vllm_config.cache_config.block_size,
            {
                kind: dtype.itemsize * heads * channels * len(groups[0])
                for kind, (heads, channels, groups) in kinds.items()
                if groups
            },
        )
        windows = {"full": None, "sliding": shape.sliding.window, "conv": shape.conv_taps, "draft": None}
        slices: dict[str, dict[int, CacheSlice]] = {}
        for kind, (heads, channels, groups) in kinds.items():
            slices[kind] = {}
            for number, group in enumerate(groups):
                spec = geometry.spec(kind, heads, len(groups[0]) * channels, dtype, windows[kind])
                place = f"draft.{number}" if kind == "draft" else f"layers.{group[0]}"
                owner = CacheOwner(spec, f"{prefix}.{place}.{kind}_cache")
                for index, layer in enumerate(group):
                    slices[kind][layer] = CacheSlice(owner, index * channels, (index + 1) * channels)
        attention = slices["full"] | slices["sliding"]
        layers = range(shape.num_layers)
        of_draft = list(slices.get("draft", {}).values())
        return cls([attention[layer] for layer in layers], [slices["conv"][layer] for layer in layers], of_draft)


def state_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """What pages hold: float32 on a CPU unless bfloat16 is asked for, elsewhere the model's dtype.

    Rounding keys, values and convolution inputs to bfloat16 was six sevenths of the engine's error against the float32
    model (mean |log-prob difference| 7.3e-3 with it, 1.2e-3 without), and a CPU gains no speed from it.
    """
    if vllm_config.cache_config.cache_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32 if current_platform.is_cpu() else vllm_config.model_config.dtype


def conv_channels(shape: ModelShape) -> int:
    """Channels of convolution state per layer and token: key, value, attention output, expert output.

    The wider of the two kinds of attention decides, so that all owners have one spec.
    """
    kv = max(kind.num_kv_heads * kind.head_dim for kind in (shape.full, shape.sliding))
    return 2 * kv + 2 * shape.hidden_size


def _deal_all(layers: list[int], num_groups: int) -> list[list[int]]:
    """Exactly so many runs, the first ones as long as possible alike and the last ones empty where layers are few."""
    size = -(-len(layers) // num_groups)
    return [layers[size * group : size * (group + 1)] for group in range(num_groups)]


def _deal(layers: list[int], num_groups: int) -> list[list[int]]:
    """Consecutive runs of nearly equal length, longest first, without empty ones."""
    size, rest = divmod(len(layers), num_groups)
    sizes = [size + 1] * rest + [size] * (num_groups - rest)
    starts = [sum(sizes[:index]) for index in range(num_groups)]
    return [layers[start : start + size] for start, size in zip(starts, sizes, strict=True) if size]
