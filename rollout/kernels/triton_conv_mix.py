"""Short convolution, residual, block-attention-residual mixture and RMSNorm in one pass over a row, on CUDA.

What follows every sublayer up to the input of the next one: `reference.short_conv` of the sublayer's output, its sum
with the running block, and `reference.mix_norm` over the finished blocks and the new running block, one output on
sliding layers and three (q, k, v) on full ones. Every activation is read once and written once: a program owns a row
and keeps the mixtures in registers under an online softmax over the sources, the running block last. A row's earlier
inputs, which are its neighbours', come out of the L2 cache; taps, queries and norm weights out of L1, from which
activations are kept away.

Many rows are bound by memory: as many programs as fit take row after row, and what a row needs first is on its way
while the one before it ends. Few rows are bound by latency: their kernel is launched before the one that writes x has
ended (programmatic dependent launch), adds the finished blocks meanwhile, and has only the convolution, one source and
the norm left to do when x is there.

A row's bits depend on that row alone: the order of its sums is fixed by the shape of a row, not by the number of rows.
How many sources are added at a time does not change them either: the online softmax keeps its largest score as a power
of two, and multiplying by powers of two rounds nothing.

Departure from the reference: the running block is rounded to the dtype it is stored in before it is mixed, so that the
mixture sees what later ones will read.
"""

# Triton's tuples grow by concatenation.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.triton_mixture import (
    added_batch,
    load_batch,
    load_row,
    narrow,
    nothing,
    prefetch,
    store_normed,
    wide,
    wide_row,
    words,
)
from rollout.kernels.triton_taps import tap_pointers, token_offset


class Tile(NamedTuple):
    """A program works on `block` columns at a time in `warps` warps: these define the order of a row's sums.

    It adds `batch` sources at a time while the next ones are read, reads the queries again for each batch or keeps them
    in registers; so many programs run on each multiprocessor and take row after row. `pinned`: it asks for the next
    sources before it adds any, which the compiler would put off: over a barrier it moves no load. These change no bit.
    """

    block: int
    warps: int
    batch: int
    reload: bool
    per_multiprocessor: int = 2
    pinned: bool = True

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, 65536 // (32 * self.warps * self.per_multiprocessor) // 8 * 8)


# By the number of outputs. With three, mixtures and queries do not both fit the registers.
TILES = {1: Tile(512, 4, 2, False), 3: Tile(512, 4, 1, True)}

EARLY_ROWS = 64
"""Up to so many rows may start before the kernel before has ended: that gains a microsecond or two, not bandwidth."""


def conv_mix(
    x_TH: torch.Tensor,
    state_BNC: torch.Tensor,
    sources_TL: torch.Tensor,
    slots_T: torch.Tensor,
    weight: torch.Tensor,
    residual_TH: torch.Tensor | None,
    blocks_STH: torch.Tensor,
    queries_QH: torch.Tensor,
    weights_QH: torch.Tensor,
    mix_eps: float,
    norm_eps: float,
    running_TH: torch.Tensor,
    out_QTH: torch.Tensor,
    tile: Tile | None = None,
    early: bool = False,
) -> None:
    """Write `running` and `out`, and store `x` in the state at the batch's slots.

    Args:
        x_TH: output of the sublayer, bfloat16 or float32, as all activations; rows may lie apart.
        state_BNC: this stream's channels of the convolution pages, see `rollout.plugin.conv_state`.
        sources_TL: `triton_taps.tap_sources` of the step.
        slots_T: int64; a row beyond them or with a negative slot is not stored.
        weight: static taps [H, 1, 4], last tap the current token; any strides.
        residual_TH: running block before this sublayer; None where a block opens.
        blocks_STH: finished blocks [S, T, H].
        queries_QH, weights_QH: of the mixtures and of the norms after them, 1 or 3 rows.
        running_TH: the new running block; may be `residual` itself or the next plane of `blocks`' buffer.
        out_QTH: normed mixtures.
        tile: how a program works.
        early: all but `x`, and what it is written to, is older than the kernel before and whatever may still run then.
            Few rows start before that has ended, and have done all but what `x` is needed for when it does.
    """
    num_rows, hidden = x_TH.shape
    tile = tile or TILES[out_QTH.shape[0]]
    assert queries_QH.shape == weights_QH.shape == (out_QTH.shape[0], hidden) and out_QTH.shape[0] in (1, 3)
    assert hidden % 2 == 0 and weight.shape == (hidden, 1, 4) and slots_T.stride(0) == 1
    assert queries_QH.is_contiguous() and weights_QH.is_contiguous() and sources_TL.is_contiguous()
    rows = (x_TH, state_BNC, blocks_STH, running_TH, out_QTH)
    assert all(tensor.stride(-1) == 1 for tensor in (*rows, running_TH if residual_TH is None else residual_TH))
    if num_rows == 0:
        return
    taps_LH = weight[:, 0].t()
    early = early and num_rows <= EARLY_ROWS
    kernel, options = _conv_mix_kernel, {"PINNED": tile.pinned, "maxnreg": tile.registers}
    if early:
        waits = not triton.knobs.runtime.interpret
        kernel, options = _early_kernel, {"WAIT": waits} | ({"launch_pdl": True} if waits else {})
    programs = num_rows if early else min(num_rows, tile.per_multiprocessor * _multiprocessors(x_TH.device))
    with torch.cuda.device_of(x_TH):
        kernel[(programs,)](
            x_TH, state_BNC, sources_TL, slots_T, taps_LH, residual_TH, blocks_STH, queries_QH, weights_QH, running_TH,
            out_QTH, x_TH.stride(0), *state_BNC.stride()[:2], *taps_LH.stride(),
            0 if residual_TH is None else residual_TH.stride(0), *blocks_STH.stride()[:2], running_TH.stride(0),
            *out_QTH.stride()[:2], num_rows, slots_T.shape[0], blocks_STH.shape[0], 1.0 / hidden,
            math.log2(math.e) / math.sqrt(hidden), 1.0 / math.sqrt(5.0), mix_eps, norm_eps, state_BNC.shape[1], hidden,
            min(tile.block, triton.next_power_of_2(hidden)), out_QTH.shape[0], tile.batch, tile.reload,
            num_warps=tile.warps, **options,
        )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    # Under the interpreter some, so that programs take several rows.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Else the compiler would make other code, at seconds each, for 1 row and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_blocks"])
def _conv_mix_kernel(
    x, state, sources, slots, taps, residual, blocks, queries, weights, running, out, stride_x, stride_block,
    stride_token, stride_lag, stride_tap, stride_residual, stride_source, stride_row, stride_running, stride_query,
    stride_out, num_rows, num_slots, num_blocks, per_hidden, score_scale, conv_scale, mix_eps, norm_eps,
    TOKENS_PER_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    BATCH: tl.constexpr, RELOAD: tl.constexpr, PINNED: tl.constexpr,
):  # fmt: skip
    """Row after row; the next one's first sources and its inputs are read while this one ends."""
    row, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lags = _lags(sources, row)
    ahead = load_batch(blocks + row * stride_row, 0, num_blocks, stride_source, HIDDEN, BLOCK, BATCH)
    inputs = _inputs(x, state, lags, row, True, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK, HIDDEN, BLOCK)
    before = _before(residual, row, True, stride_residual, HIDDEN, BLOCK)
    for _turn in range(tl.cdiv(num_rows - tl.program_id(0), programs)):
        more = row + programs < num_rows
        following = tl.where(more, row + programs, row)
        lags = _lags(sources, following)
        slot = tl.load(slots + row, mask=row < num_slots, other=-1)
        stored = _convolved(
            inputs, before, state, slot, taps, stride_block, stride_token, stride_lag, stride_tap,
            running + row * stride_running, conv_scale, TOKENS_PER_BLOCK, HIDDEN, BLOCK,
        )  # fmt: skip
        mixed, largest, total = nothing(QUERIES, HIDDEN, BLOCK)
        for first in range(0, num_blocks, BATCH):
            # New names: those from before the loop would be carried through it.
            added = wide_row(ahead)
            is_last = first + BATCH >= num_blocks
            start = blocks + tl.where(is_last, following, row) * stride_row
            ahead = load_batch(
                start, tl.where(is_last, 0, first + BATCH), tl.where(is_last & (not more), 0, num_blocks),
                stride_source, HIDDEN, BLOCK, BATCH,
            )  # fmt: skip
            if PINNED:
                tl.debug_barrier()
            mixed, largest, total = added_batch(
                mixed, largest, total, added, queries, first, num_blocks, per_hidden, score_scale, mix_eps, QUERIES,
                HIDDEN, BLOCK, BATCH, RELOAD,
            )  # fmt: skip
        if QUERIES == 1:
            inputs = _inputs(
                x, state, lags, following, more, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK, HIDDEN, BLOCK
            )
            before = _before(residual, following, more, stride_residual, HIDDEN, BLOCK)
            if PINNED:
                tl.debug_barrier()
        mixed, largest, total = added_batch(
            mixed, largest, total, wide_row(stored), queries, 0, 1, per_hidden, score_scale, mix_eps,
            QUERIES, HIDDEN, BLOCK, 1, RELOAD,
        )  # fmt: skip
        CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
        for q in tl.static_range(QUERIES):
            if QUERIES > 1 and q == QUERIES - 1:  # where there are registers for it
                inputs = _inputs(
                    x, state, lags, following, more, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK, HIDDEN,
                    BLOCK,
                )  # fmt: skip
                before = _before(residual, following, more, stride_residual, HIDDEN, BLOCK)
            store_normed(
                mixed[q * CHUNKS : (q + 1) * CHUNKS], 1.0 / total[q], weights + q * HIDDEN,
                out + q * stride_query + row * stride_out, per_hidden, norm_eps, HIDDEN, BLOCK,
            )  # fmt: skip
        row = following


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_blocks"])
def _early_kernel(
    x, state, sources, slots, taps, residual, blocks, queries, weights, running, out, stride_x, stride_block,
    stride_token, stride_lag, stride_tap, stride_residual, stride_source, stride_row, stride_running, stride_query,
    stride_out, num_rows, num_slots, num_blocks, per_hidden, score_scale, conv_scale, mix_eps, norm_eps,
    TOKENS_PER_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    BATCH: tl.constexpr, RELOAD: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """`_conv_mix_kernel` of one row, launched before the kernel that writes x has ended.

    What comes after this one may be launched at once: see `triton_skinny` for what it may do before this one has ended.
    """
    if WAIT:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    blocks += row * stride_row
    lags = _lags(sources, row)
    ahead = load_batch(blocks, 0, num_blocks, stride_source, HIDDEN, BLOCK, BATCH)
    before = _before(residual, row, True, stride_residual, HIDDEN, BLOCK)
    slot = tl.load(slots + row, mask=row < num_slots, other=-1)
    if WAIT:
        for lag in tl.static_range(4):
            _prefetch_row(taps + lag * stride_lag, HIDDEN)
            if lag > 0:
                pointers = tap_pointers(x, state, lags[lag - 1], stride_x, stride_block, stride_token, TOKENS_PER_BLOCK)
                _prefetch_row(pointers[1], HIDDEN)
        for q in tl.static_range(QUERIES):
            _prefetch_row(weights + q * HIDDEN, HIDDEN)
    mixed, largest, total = nothing(QUERIES, HIDDEN, BLOCK)
    for first in range(0, num_blocks, BATCH):
        added = wide_row(ahead)
        ahead = load_batch(blocks, first + BATCH, num_blocks, stride_source, HIDDEN, BLOCK, BATCH)
        mixed, largest, total = added_batch(
            mixed, largest, total, added, queries, first, num_blocks, per_hidden, score_scale, mix_eps, QUERIES, HIDDEN,
            BLOCK, BATCH, RELOAD,
        )  # fmt: skip
    if WAIT:
        tl.extra.cuda.gdc_wait()
    inputs = _inputs(x, state, lags, row, True, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK, HIDDEN, BLOCK)
    stored = _convolved(
        inputs, before, state, slot, taps, stride_block, stride_token, stride_lag, stride_tap,
        running + row * stride_running, conv_scale, TOKENS_PER_BLOCK, HIDDEN, BLOCK,
    )  # fmt: skip
    mixed, largest, total = added_batch(
        mixed, largest, total, wide_row(stored), queries, 0, 1, per_hidden, score_scale, mix_eps,
        QUERIES, HIDDEN, BLOCK, 1, RELOAD,
    )  # fmt: skip
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for q in tl.static_range(QUERIES):
        store_normed(
            mixed[q * CHUNKS : (q + 1) * CHUNKS], 1.0 / total[q], weights + q * HIDDEN,
            out + q * stride_query + row * stride_out, per_hidden, norm_eps, HIDDEN, BLOCK,
        )  # fmt: skip


@triton.jit
def _lags(sources, row):
    """Where the three earlier inputs of a row are."""
    return tl.load(sources + row * 3), tl.load(sources + row * 3 + 1), tl.load(sources + row * 3 + 2)


@triton.jit
def _inputs(
    x, state, lags, row, there, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of x and the three inputs before it, in words of the state's dtype; zeros before the first position."""
    dtype: tl.constexpr = state.dtype.element_ty
    alike: tl.constexpr = x.dtype.element_ty == dtype
    inputs = _as_stored(load_row(x + row * stride_x, there, HIDDEN, BLOCK), dtype, alike)
    for lag in tl.static_range(3):
        source = lags[lag]
        from_x, from_state = tap_pointers(x, state, source, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK)
        if alike:
            inputs = inputs + load_row(from_x, there & (source != -1), HIDDEN, BLOCK)
        else:
            here = _as_stored(load_row(from_x, there & (source >= 0), HIDDEN, BLOCK), dtype, alike)
            in_state = load_row(from_state, there & (source < -1), HIDDEN, BLOCK)
            for c in tl.static_range(len(in_state)):
                inputs = inputs + (tl.where(source >= 0, here[c], in_state[c]),)
    return inputs


@triton.jit
def _as_stored(chunks, dtype: tl.constexpr, alike: tl.constexpr):
    if alike:
        return chunks
    else:
        rounded = ()
        for c in tl.static_range(len(chunks)):
            rounded = rounded + (narrow(wide(chunks[c]), dtype),)
        return rounded


@triton.jit
def _before(residual, row, there, stride_residual, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The running block before the sublayer; nothing where a block opens."""
    if residual is None:
        return ()
    else:
        return load_row(residual + row * stride_residual, there, HIDDEN, BLOCK)


@triton.jit
def _convolved(
    inputs, before, state, slot, taps, stride_block, stride_token, stride_lag, stride_tap, running, conv_scale,
    TOKENS_PER_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new running block in words; stores it, and the inputs in the state."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    chunks = ()
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        total = wide(inputs[c])
        for lag in tl.static_range(4):
            tap = tl.load(taps + (3 - lag) * stride_lag + columns * stride_tap, mask=columns < HIDDEN, other=0.0)
            total = tl.fma(wide(inputs[lag * CHUNKS + c]), tap.to(tl.float32), total)
        if len(before) > 0:
            value = tl.fma(total, conv_scale, wide(before[c]))
        else:
            value = total * conv_scale
        chunks = chunks + (narrow(value, running.dtype.element_ty),)
    stored = state + token_offset(slot, stride_block, stride_token, TOKENS_PER_BLOCK)
    for c in tl.static_range(CHUNKS):
        pointers, inside = words(stored, c, HIDDEN, BLOCK)
        tl.store(pointers, inputs[c], mask=inside & (slot >= 0))
        pointers, inside = words(running, c, HIDDEN, BLOCK)
        tl.store(pointers, chunks[c], mask=inside)
    return chunks


@triton.jit
def _prefetch_row(start, HIDDEN: tl.constexpr):
    LINE: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HIDDEN + LINE - 1) // LINE)
    prefetch(start + tl.minimum(tl.arange(0, LINES) * LINE, HIDDEN - 1))
