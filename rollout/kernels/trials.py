"""Small random inputs on which each kernel of a GPU is tried at the start, with a model's sizes; see `cuda.load`.

Not a test of the kernels (tests/gpu has adversarial ones): a second's work that finds what does not compile, does not
launch or computes something else on this machine. Everything that a kernel is compiled for is the model's own: head
sizes, extents, pages, dtypes, so that what compiles here is what runs later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from inkling_rl.formats import ExpertFormat
from rollout.kernels import fallback
from rollout.kernels.paged import PagedBatch
from rollout.kernels.units import mixture_dtype, query_units

# Of a row against the size of a mean row. float32 sums in another order, or three tf32 products; in bfloat16 one
# rounding of the result, or in attention of queries, weights and values too. What a compiler gets wrong is larger.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
ATTENTION_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

# (tokens already there, tokens of this step): new, decoding, second token, across a page, as padding of a graph.
STEP = ((0, 3), (70, 1), (1, 1), (6, 4), (0, 0))
LONG_STEP = ((5, 300),)
"""With more rows than a GPU runs programs at once: some take several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """One kind of attention layer. Without a window it is a full one: dynamic convolutions and log-length scaling."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    extent: int
    window: int | None
    page: int
    """Tokens in a block of its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """A draft's layers and head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    """Tokens in a block of its pages."""

    block_rows: int
    rank: int
    vocab: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All that the kernels of a model are compiled for."""

    dtype: torch.dtype
    """Of activations."""

    state_dtype: torch.dtype
    """Of pages: keys, values and inputs of convolutions."""

    attention: tuple[AttentionSizes, ...]
    hidden: int
    experts: int
    top_k: int
    expert_width: int
    d_rel: int
    conv_page: int
    """Tokens in a block of convolution state."""

    gate_cap: float
    up_cap: float
    max_queries: tuple[int, ...] = (1,)
    """Rows per request in the batches that the decode kernel takes: 1, and more where drafts are verified."""

    few_rows: int = 32
    """Up to so many rows there are kernels of their own for products."""

    expert_formats: tuple[ExpertFormat, ...] = ()
    """Of the layers whose experts are in Marlin's layout."""

    least_pairs: int = 1
    """Pairs per expert from which on they have a kernel of their own."""

    max_tokens: int = 8192
    """Of a step."""

    max_requests: int = 16
    """Of a step."""

    draft: DraftSizes | None = None
    """Where there is one."""

    @property
    def few(self) -> tuple[int, ...]:
        """Rows of a trial of each of them: up to 8, up to 16 and up to 32."""
        return tuple(rows for rows in (3, 13, 21) if rows <= self.few_rows)


@dataclass(frozen=True, slots=True)
class Trial:
    """One call."""

    what: str
    arguments: Sequence[Any]
    limit: float
    written: tuple[int, ...] = ()
    """Places of the arguments that the kernel writes to."""

    options: dict[str, Any] = field(default_factory=dict)
    kept: Callable[[Any], Any] = lambda result: result
    """What of a result on the host counts; the rest may be anything."""

    on_device: bool = False
    """Whether what the kernel is compared with runs there as well: it would take a host too long."""

    def to(self, device: torch.device) -> list[Any]:
        """The arguments on a device, all of them copies."""
        return [moved(argument, device) for argument in self.arguments]

    def call(self, kernel: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return kernel(*arguments, **self.options)


def moved(argument: Any, device: torch.device) -> Any:
    """A copy of an argument or a result on a device."""
    if isinstance(argument, dict):
        return {key: moved(part, device) for key, part in argument.items()}
    if isinstance(argument, tuple):
        parts = [moved(part, device) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, PagedBatch):
        fields = ("query_start", "seq_lens", "block_table", "slots")
        return replace(argument, **{name: moved(getattr(argument, name), device) for name in fields})
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def worst_error(got: Any, wanted: Any) -> float:
    """Of the worst row in the 2-norm against a mean row's, or of the worst element against the largest.

    The larger of the two, so that one wrong lane is seen as well as a row that is wrong a little everywhere. Infinite
    for NaN, for another integer, shape or dtype.
    """
    if isinstance(wanted, tuple):
        return max(worst_error(*pair) for pair in zip(got, wanted, strict=True))
    if wanted is None:
        return 0.0
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if not wanted.dtype.is_floating_point:
        return 0.0 if torch.equal(got, wanted) else math.inf
    got, wanted = (x.double().reshape(-1, x.shape[-1]) for x in (got, wanted))
    difference = torch.where(got == wanted, 0.0, got - wanted)  # -inf equals itself
    size = wanted.nan_to_num(neginf=0.0)
    of_row = difference.norm(dim=-1).max() / size.square().sum(-1).mean().sqrt().clamp(min=1e-30)
    of_element = difference.abs().max() / size.abs().max().clamp(min=1e-30)
    return math.inf if bool(difference.isnan().any()) else float(torch.maximum(of_row, of_element))


def _tap_sources(sizes: Sizes) -> Iterator[Trial]:
    batch, rows = _batch(STEP, sizes.conv_page)
    yield Trial("addresses", (batch, rows + 2, sizes.conv_page), 0.0)


def _prepare(sizes: Sizes) -> Iterator[Trial]:
    for kind in sizes.attention:
        draw, full = _Draw(), kind.window is None
        heads, kv_heads, dim = kind.num_heads, kind.num_kv_heads, kind.head_dim
        conv, rows = _batch(STEP, sizes.conv_page)
        paged, _ = _batch(STEP, kind.page)
        widths = (heads * dim, kv_heads * dim, kv_heads * dim, heads * sizes.d_rel)
        taps = [draw(4, kv_heads * dim) if full else draw(4, kv_heads * dim).t()[:, None] for _ in range(2)]
        dynamic = [draw(rows, kv_heads, 4) if full else None for _ in range(2)]
        state = draw(int(conv.block_table.max()) + 1, sizes.conv_page, 2 * kv_heads * dim, dtype=sizes.state_dtype)
        kv = torch.zeros(int(paged.block_table.max()) + 1, kv_heads, kind.page, 2 * dim, dtype=sizes.state_dtype)
        positions = torch.cat([torch.arange(past, past + new) for past, new in STEP])
        arguments = (
            *(draw(rows, width, dtype=sizes.dtype) * 3 for width in widths),
            draw(heads, dim), draw(heads, sizes.d_rel), *taps, *dynamic, state,
            fallback.tap_sources(conv, rows, sizes.conv_page), conv.slots, kv, paged.slots, positions,
            2 * math.sqrt(dim), 8.0, 1e-6, (0.1, 16) if full else None,
            torch.zeros(rows, heads, dim, dtype=sizes.dtype),
            torch.zeros(rows, heads, sizes.d_rel, dtype=mixture_dtype(sizes.dtype)),
        )  # fmt: skip
        yield Trial(_kind(kind), arguments, LIMITS[sizes.dtype], (10, 13, 20, 21))


def _conv_mix(sizes: Sizes) -> Iterator[Trial]:
    is_full = any(kind.window is None for kind in sizes.attention)
    # Few rows and many are kernels of their own; where a block opens, nothing is added.
    kinds = [(queries, opens) for queries, opens in ((1, False), (1, True), (3, False)) if is_full or queries == 1]
    for (queries, opens), step in product(kinds, (STEP, LONG_STEP)):
        draw = _Draw()
        batch, rows = _batch(step, sizes.conv_page)
        state = draw(int(batch.block_table.max()) + 1, sizes.conv_page, sizes.hidden, dtype=sizes.state_dtype)
        rows_of = lambda *shape, draw=draw: draw(*shape, sizes.hidden, dtype=sizes.dtype)
        arguments = (
            rows_of(rows), state, fallback.tap_sources(batch, rows, sizes.conv_page), batch.slots,
            draw(4, sizes.hidden).t()[:, None], None if opens else rows_of(rows), rows_of(5, rows),
            draw(queries, sizes.hidden), draw(queries, sizes.hidden), 1e-6, 1e-6,
            torch.zeros(rows, sizes.hidden, dtype=sizes.dtype),
            torch.zeros(queries, rows, sizes.hidden, dtype=sizes.dtype),
        )  # fmt: skip
        what = f"{queries} outputs, {rows} rows{', a new block' if opens else ''}"
        yield Trial(what, arguments, LIMITS[sizes.dtype], (1, 11, 12), options={"early": True})


def _route(sizes: Sizes) -> Iterator[Trial]:
    draw = _Draw()
    router, bias = draw(sizes.experts, sizes.hidden) * sizes.hidden**-0.5, draw(sizes.experts) * 0.1
    few = draw(7, sizes.hidden, dtype=sizes.dtype)
    # Few different rows: two experts that nearly tie would make a difference of nothing.
    for rows in (9, 70, 1030):
        arguments = (few.repeat(rows // 7 + 1, 1)[:rows], router, bias, sizes.top_k, 8.0)
        yield Trial(f"{rows} tokens", arguments, 1e-4, options={"constant": True})


def _activation(sizes: Sizes) -> Iterator[Trial]:
    gate_up = _Draw()(33, 2 * sizes.expert_width, dtype=sizes.dtype) * 5
    yield Trial("33 tokens", (gate_up, sizes.gate_cap, sizes.up_cap), LIMITS[sizes.dtype])


def _align(sizes: Sizes) -> Iterator[Trial]:
    scores = _Draw()(19, sizes.experts)
    chosen = scores.topk(sizes.top_k).indices.sort(1).values.int()
    for block_size in (8, 16, 48):
        used = lambda blocks, size=block_size: (
            blocks.rows[: int(blocks.num_rows)], blocks.experts[: int(blocks.num_rows) // size], blocks.num_rows
        )  # fmt: skip
        yield Trial(f"blocks of {block_size}", (chosen, sizes.experts, block_size), 0.0, kept=used)


def _weighted_sum(sizes: Sizes) -> Iterator[Trial]:
    draw = _Draw()
    arguments = (draw(9, sizes.top_k, sizes.hidden, dtype=sizes.dtype), draw(9, sizes.top_k))
    yield Trial("9 tokens", arguments, LIMITS[sizes.dtype])


def _project(sizes: Sizes) -> Iterator[Trial]:
    draw, kind = _Draw(), sizes.attention[0]
    for what, jobs, outputs in (("sinks", 1, kind.num_heads), ("taps", 2, 4 * kind.num_kv_heads)):
        x, weight = draw(jobs, 9, sizes.hidden, dtype=sizes.dtype), draw(jobs, outputs, sizes.hidden)
        yield Trial(what, (x, weight), LIMITS[torch.float32])


def _softcap_logits(sizes: Sizes) -> Iterator[Trial]:
    # Of more than one block, and far fewer than a vocabulary: all of it that is a constant of the kernel is whether it
    # is a multiple of 16, and whether it is one when padded.
    for size, padded in ((2500, 2600), (2500, 2608), (2512, 2608)):
        draw = _Draw()
        x, weight = draw(9, sizes.hidden, dtype=sizes.dtype), draw(size, sizes.hidden, dtype=sizes.dtype)
        yield Trial(f"9 tokens, {size} of {padded}", (x, weight, 30.0, padded), LIMITS[sizes.dtype])


def _skinny_inputs(sizes: Sizes) -> Iterator[Trial]:
    """Numbers of outputs are no constants of the kernel."""
    for kind in sizes.attention:
        for rows in sizes.few:
            draw, full = _Draw(), kind.window is None
            x = draw(3 if full else 1, rows, sizes.hidden, dtype=torch.bfloat16)
            weights = (
                draw(300, sizes.hidden, dtype=torch.bfloat16),
                draw(2, 100, sizes.hidden, dtype=torch.bfloat16) if full else None,
                draw(kind.num_heads, sizes.hidden),
                draw(2, 4 * kind.num_kv_heads, sizes.hidden) if full else None,
            )
            yield Trial(f"{_kind(kind)}, {rows} tokens", (x, *weights), LIMITS[torch.bfloat16])


def _skinny_linear(sizes: Sizes) -> Iterator[Trial]:
    draw = _Draw()
    for width in sorted({kind.num_heads * kind.head_dim for kind in sizes.attention}):
        for rows in sizes.few:
            arguments = (draw(rows, width, dtype=torch.bfloat16), draw(300, width, dtype=torch.bfloat16))
            yield Trial(f"{width} columns, {rows} tokens", arguments, LIMITS[torch.bfloat16])


def _skinny_logits(sizes: Sizes) -> Iterator[Trial]:
    draw = _Draw()
    for rows in sizes.few:
        x, weight = (draw(count, sizes.hidden, dtype=torch.bfloat16) for count in (rows, 300))
        yield Trial(f"{rows} tokens", (x, weight, 30.0, 400), LIMITS[torch.bfloat16])


def _decode(sizes: Sizes) -> Iterator[Trial]:
    """A long request in pieces and, where an engine has as many, so many rows that heads are merged together."""
    from rollout.kernels.triton_decode import MERGE_PROGRAMS

    for kind in sizes.attention:
        for most in sizes.max_queries:
            step = ((kind.extent + 70, most), (5, 1), (0, 0))
            yield _attention(sizes, kind, step, {"max_queries": most})
            many = MERGE_PROGRAMS // (most * kind.num_heads) + 1
            if kind.num_heads > kind.num_kv_heads and many <= sizes.max_requests:
                steps = [(5 + request % 3, most) for request in range(many)]
                yield _attention(sizes, kind, steps, {"max_queries": most})


def _prefill(sizes: Sizes) -> Iterator[Trial]:
    for kind in sizes.attention:
        yield _attention(sizes, kind, ((kind.extent + 40, 70), (0, 9), (0, 0)), {})


def _attention(sizes: Sizes, kind: AttentionSizes, step: Sequence[tuple[int, int]], options: dict[str, Any]) -> Trial:
    """Queries and mixtures as `prepare` leaves them."""
    draw = _Draw()
    batch, rows = _batch(step, kind.page)
    width = kind.num_heads * kind.head_dim
    kv = draw(
        int(batch.block_table.max()) + 1, kind.num_kv_heads, kind.page, 2 * kind.head_dim, dtype=sizes.state_dtype
    )
    arguments = (
        (draw(rows, width) * query_units(kind.head_dim)).to(sizes.dtype),
        draw(rows, kind.num_heads * sizes.d_rel, dtype=mixture_dtype(sizes.dtype)),
        draw(rows, kind.num_heads), draw(rows, width, dtype=sizes.dtype), kv, batch, None, None,
        draw(sizes.d_rel, kind.extent) * 0.3, 2 * math.sqrt(kind.head_dim), 8.0, kind.window, None,
    )  # fmt: skip
    what = ", ".join([_kind(kind), f"{len(step)} requests", *(f"{name} {value}" for name, value in options.items())])
    limit = max(ATTENTION_LIMITS[sizes.dtype], ATTENTION_LIMITS[sizes.state_dtype])
    return Trial(what, arguments, limit, options=options | {"out_dtype": sizes.dtype})


def _kind(kind: AttentionSizes) -> str:
    return "full attention" if kind.window is None else "sliding attention"


class _Draw:
    """The same normal numbers every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)


def _batch(step: Sequence[tuple[int, int]], page: int) -> tuple[PagedBatch, int]:
    """Rows and pages of a step, and how many rows; pages in descending order, none is block 0. Row 2 is not stored."""
    pages = [-(-(past + new) // page) for past, new in step]
    table = torch.zeros(len(step), max(pages), dtype=torch.int32)
    free = sum(pages)
    for request, count in enumerate(pages):
        table[request, :count] = torch.arange(free, free - count, -1)
        free -= count
    positions = [torch.arange(past, past + new) for past, new in step]
    slots = [table[i, p // page].long() * page + p % page for i, p in enumerate(positions)]
    counts = torch.tensor([0, *(new for _, new in step)])
    lengths = torch.tensor([past + new for past, new in step], dtype=torch.int32)
    stored = torch.cat(slots)
    stored[2:3] = -1
    return PagedBatch(counts.cumsum(0).int(), lengths, table, stored), len(stored)


TRIALS: dict[str, Callable[[Sizes], Iterator[Trial]]] = {
    "tap_sources": _tap_sources,
    "prepare": _prepare,
    "conv_mix": _conv_mix,
    "route": _route,
    "activation": _activation,
    "align": _align,
    "weighted_sum": _weighted_sum,
    "project": _project,
    "softcap_logits": _softcap_logits,
    "decode": _decode,
    "prefill": _prefill,
    "skinny_inputs": _skinny_inputs,
    "skinny_linear": _skinny_linear,
    "skinny_logits": _skinny_logits,
}
