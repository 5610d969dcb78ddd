"""Where the last inputs of every row of a step lie: the addresses that the fused short convolutions read.

A tap is either a row of this step or a slot of the paged state. The rule of `reference.short_conv` (inputs are stored
before any is read, because a request may be given the pages of a prefix that another request computes in this very
step) cannot hold inside a kernel that stores and reads in one pass. So the addresses are resolved once per step: a slot
that this step fills is read from the row that fills it. All layers and streams of the step share the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.paged import PagedBatch

LAGS = 3
"""Earlier inputs of a row: taps minus the current one."""

TILE = 512
"""Rows that a program looks at in one step."""


def tap_sources(
    batch: PagedBatch, num_rows: int, tokens_per_block: int, out_TL: torch.Tensor | None = None
) -> torch.Tensor:
    """Sources of rows' earlier inputs, int64 [num_rows, 3]; see `composed.tap_sources` for the meaning.

    Runs on the device without waiting for it; with `out_TL` also inside a CUDA graph. `num_rows` may exceed the rows of
    the batch's requests: those rows have no earlier inputs.
    """
    device = batch.slots.device
    if out_TL is None:
        out_TL = torch.empty(num_rows, LAGS, dtype=torch.int64, device=device)
    assert out_TL.shape == (num_rows, LAGS) and out_TL.is_contiguous() and batch.block_table.stride(1) == 1
    out_TL.fill_(-1)
    requests = batch.seq_lens.shape[0]
    if requests and num_rows:
        with torch.cuda.device_of(out_TL):
            _sources_kernel[(requests,)](
                batch.query_start, batch.seq_lens, batch.block_table, batch.slots, out_TL, batch.block_table.stride(0),
                min(num_rows, batch.slots.shape[0]), tokens_per_block, TILE, num_warps=4,
            )  # fmt: skip
    return out_TL


@triton.jit(do_not_specialize=["num_slots", "stride_table"])
def _sources_kernel(
    query_start, seq_lens, block_table, slots, out, stride_table, num_slots, TOKENS_PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first, last = tl.load(query_start + request), tl.load(query_start + request + 1)
    start = tl.load(seq_lens + request) - (last - first)
    for begin in range(first, last, TILE):
        row = begin + tl.arange(0, TILE)
        for lag in tl.static_range(1, 4):
            tl.store(
                out + row.to(tl.int64) * 3 + lag - 1, (row - lag).to(tl.int64), mask=(row - lag >= first) & (row < last)
            )
    if (last > first) & (start > 0):
        table = block_table + request.to(tl.int64) * stride_table
        slot_1 = _slot(table, start - 1, TOKENS_PER_BLOCK)
        slot_2 = _slot(table, start - 2, TOKENS_PER_BLOCK)
        slot_3 = _slot(table, start - 3, TOKENS_PER_BLOCK)
        row_1 = tl.full([TILE], -1, tl.int32)
        row_2, row_3 = row_1, row_1
        for begin in range(0, num_slots, TILE):
            row = begin + tl.arange(0, TILE)
            filled = tl.load(slots + row, mask=row < num_slots, other=-1)
            row_1 = tl.where(filled == slot_1, row, row_1)
            row_2 = tl.where(filled == slot_2, row, row_2)
            row_3 = tl.where(filled == slot_3, row, row_3)
        _store_source(out, first, last, start, 1, tl.max(row_1, axis=0), slot_1)
        _store_source(out, first, last, start, 2, tl.max(row_2, axis=0), slot_2)
        _store_source(out, first, last, start, 3, tl.max(row_3, axis=0), slot_3)


@triton.jit
def _slot(table, position, TOKENS_PER_BLOCK: tl.constexpr):
    """Slot of a position; -2, which no row fills, of a negative one."""
    block = tl.load(table + position // TOKENS_PER_BLOCK, mask=position >= 0, other=0)
    return tl.where(position >= 0, block.to(tl.int64) * TOKENS_PER_BLOCK + position % TOKENS_PER_BLOCK, -2)


@triton.jit
def _store_source(out, first, last, start, back: tl.constexpr, written, slot):
    """The state's position `start - back` is the tap of lag `back + i` of the request's row i."""
    source = tl.where(written >= 0, written.to(tl.int64), -2 - slot)
    for i in tl.static_range(0, 4 - back):
        place = out + (first + i).to(tl.int64) * 3 + back + i - 1
        tl.store(place, source, mask=(first + i < last) & (start >= back))


@triton.jit
def token_offset(slot, stride_block, stride_token, TOKENS_PER_BLOCK: tl.constexpr):
    """Offset of a slot in a page pool, int64; of slot 0 for a negative one."""
    slot = tl.maximum(slot, 0)
    return (slot // TOKENS_PER_BLOCK) * stride_block + (slot % TOKENS_PER_BLOCK) * stride_token


@triton.jit
def tap_pointers(x, state, source, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK: tl.constexpr):
    """Start of a source's channels in `x` and in `state`, for `load_tap`. One pointer, twice, where types allow."""
    in_x = x + tl.maximum(source, 0) * stride_x
    in_state = state + token_offset(-2 - source, stride_block, stride_token, TOKENS_PER_BLOCK)
    if x.dtype.element_ty == state.dtype.element_ty:
        start = tl.where(source >= 0, in_x, in_state)
        return start, start
    else:
        return in_x, in_state


@triton.jit
def load_tap(in_x, in_state, source, columns, inside):
    """An earlier input in the state's dtype; zeros before the request's first position."""
    if in_x.dtype.element_ty == in_state.dtype.element_ty:
        return tl.load(in_x + columns, mask=inside & (source != -1), other=0.0, cache_modifier=".cg")
    else:
        here = tl.load(in_x + columns, mask=inside & (source >= 0), other=0.0, cache_modifier=".cg")
        there = tl.load(in_state + columns, mask=inside & (source < -1), other=0.0, cache_modifier=".cg")
        return tl.where(source >= 0, here.to(in_state.dtype.element_ty), there)
