"""Short convolution, residual, block-attention-residual mixture and RMSNorm in one pass over a row, on CUDA.

What follows every sublayer up to the input of the next one: `reference.short_conv` of the sublayer's output, its sum
with the running block, and `reference.mix_norm` over the finished blocks and the new running block, one output on
sliding layers and three (q, k, v) on full ones. Every activation is read once and written once: a program owns a row
and keeps the mixtures in registers under an online softmax over the sources. A row's earlier inputs, which are its
neighbours', come out of the L2 cache; taps, queries and norm weights out of L1, from which activations are kept away.

A row's bits depend on that row alone: the order of its sums is fixed by the shape of a row, not by the number of rows.
How many sources are added at a time does not change them either: the online softmax keeps its largest score as a power
of two, and multiplying by powers of two rounds nothing. Products that are added to something are written as one `fma`:
the compiler would fuse some of them and not others, depending on the code around.

Departure from the reference: the running block is rounded to the dtype it is stored in before it is mixed, so that the
mixture sees what later ones will read.
"""

# Triton's tuples grow by concatenation.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.triton_taps import load_tap, tap_pointers, token_offset


class Tile(NamedTuple):
    """A program works on `block` columns at a time in `warps` warps: these define the order of a row's sums.

    It adds `batch` sources at a time while the next ones are read, reads the queries again for each batch or keeps them
    in registers, may be held to `registers` per thread, and asks for the row `prefetch` rows on to be brought into the
    L2 cache: more bytes are then under way than programs have registers for. These change no bit.
    """

    block: int
    warps: int
    batch: int
    reload: bool
    registers: int | None = None
    prefetch: int = 0


FEW_ROWS = 256
"""Up to so many rows, hardly more than one program at a time runs on a multiprocessor: latency is all."""

# By the number of outputs, for few rows and for many. With three, mixtures and queries do not both fit the registers.
# Both define the same bits, and today they are the same: three programs per multiprocessor with prefetched rows took
# 373 us for 8,192 tokens on an H200, where this one had taken 296 before products were written as fused ones.
TILES = {
    1: (Tile(512, 4, 2, False), Tile(512, 4, 2, False)),
    3: (Tile(512, 4, 1, True), Tile(512, 4, 1, True)),
}

_NOWHERE = tl.constexpr(-1e9)  # exponent of the weight of a source that is not there, which is then 0


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
    """
    num_rows, hidden = x_TH.shape
    tile = tile or TILES[out_QTH.shape[0]][num_rows > FEW_ROWS]
    assert queries_QH.shape == weights_QH.shape == (out_QTH.shape[0], hidden) and out_QTH.shape[0] in (1, 3)
    assert weight.shape == (hidden, 1, 4) and slots_T.stride(0) == 1
    assert queries_QH.is_contiguous() and weights_QH.is_contiguous() and sources_TL.is_contiguous()
    rows = (x_TH, state_BNC, blocks_STH, running_TH, out_QTH)
    assert all(tensor.stride(-1) == 1 for tensor in (*rows, running_TH if residual_TH is None else residual_TH))
    if num_rows == 0:
        return
    taps_LH = weight[:, 0].t()
    with torch.cuda.device_of(x_TH):
        _conv_mix_kernel[(num_rows,)](
            x_TH, state_BNC, sources_TL, slots_T, taps_LH, residual_TH, blocks_STH, queries_QH, weights_QH, running_TH,
            out_QTH, x_TH.stride(0), *state_BNC.stride()[:2], *taps_LH.stride(),
            0 if residual_TH is None else residual_TH.stride(0), *blocks_STH.stride()[:2], running_TH.stride(0),
            *out_QTH.stride()[:2], slots_T.shape[0], blocks_STH.shape[0], 1.0 / hidden,
            math.log2(math.e) / math.sqrt(hidden), 1.0 / math.sqrt(5.0), mix_eps, norm_eps, state_BNC.shape[1], hidden,
            min(tile.block, triton.next_power_of_2(hidden)), out_QTH.shape[0], tile.batch, tile.reload,
            0 if triton.knobs.runtime.interpret else tile.prefetch,
            num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip


# Else the compiler would make other code, at seconds each, for 1 row and for multiples of 16.
@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _conv_mix_kernel(
    x, state, sources, slots, taps, residual, blocks, queries, weights, running, out, stride_x, stride_block,
    stride_token, stride_lag, stride_tap, stride_residual, stride_source, stride_row, stride_running, stride_query,
    stride_out, num_slots, num_blocks, per_hidden, score_scale, conv_scale, mix_eps, norm_eps,
    TOKENS_PER_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    BATCH: tl.constexpr, RELOAD: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    blocks += row * stride_row
    ahead = _load_batch(blocks, 0, num_blocks, stride_source, HIDDEN, BLOCK, BATCH)
    if PREFETCH > 0:  # noqa: SIM102 - a constant of the compiler's
        if row + PREFETCH < tl.num_programs(0):
            _prefetch(x + (row + PREFETCH) * stride_x, HIDDEN)
            if residual is not None:
                _prefetch(residual + (row + PREFETCH) * stride_residual, HIDDEN)
            for s in range(num_blocks):
                _prefetch(blocks + tl.cast(s, tl.int64) * stride_source + PREFETCH * stride_row, HIDDEN)
    slot = tl.load(slots + row, mask=row < num_slots, other=-1)
    source = _convolved(
        x, state, sources + row * 3, slot, taps, residual, row, stride_x, stride_block, stride_token, stride_lag,
        stride_tap, stride_residual, running + row * stride_running, conv_scale, TOKENS_PER_BLOCK, HIDDEN, BLOCK,
    )  # fmt: skip
    sums = _sums(source, queries, 1, QUERIES, HIDDEN, BLOCK)
    inverse, largest, total = _scores(sums, 0, True, per_hidden, score_scale, mix_eps, QUERIES)
    mixed = ()
    for q in tl.static_range(QUERIES):
        for c in tl.static_range(CHUNKS):
            mixed = mixed + (source[c] * (inverse * total[q]),)
    for first in range(0, num_blocks, BATCH):
        # New names: those from before the loop would be carried through it.
        added = ()
        for c in tl.static_range(BATCH * CHUNKS):
            added = added + (_wide(ahead[c]),)
        ahead = _load_batch(blocks, first + BATCH, num_blocks, stride_source, HIDDEN, BLOCK, BATCH)
        # The compiler keeps the queries in registers unless their address seems to change; by whole lines, lest it
        # load number by number.
        near = queries + (first >> 30) * 32 if RELOAD else queries
        added_sums = _sums(added, near, BATCH, QUERIES, HIDDEN, BLOCK)
        for s in tl.static_range(BATCH):
            over, wholes, parts = _scores(
                added_sums, s, first + s < num_blocks, per_hidden, score_scale, mix_eps, QUERIES
            )
            chunks = added[s * CHUNKS : (s + 1) * CHUNKS]
            mixed, largest, total = _added(mixed, largest, total, chunks, wholes, parts, over, QUERIES, CHUNKS)
    for q in tl.static_range(QUERIES):
        _store_normed(
            mixed[q * CHUNKS : (q + 1) * CHUNKS], 1.0 / total[q], weights + q * HIDDEN,
            out + q * stride_query + row * stride_out, per_hidden, norm_eps, HIDDEN, BLOCK,
        )  # fmt: skip


@triton.jit
def _load_batch(
    blocks, first, num_blocks, stride_source, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr
):
    loaded = ()
    for s in tl.static_range(BATCH):
        start = blocks + tl.cast(first + s, tl.int64) * stride_source
        loaded = loaded + _load_row(start, first + s < num_blocks, HIDDEN, BLOCK)
    return loaded


@triton.jit
def _wide(x):
    """As float32. By integers: of a register with two bfloat16 numbers the compiler then takes either in one step."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _prefetch(start, HIDDEN: tl.constexpr):
    """Ask for a row to be brought into the L2 cache, a line of 128 bytes for each element of a tensor."""
    LINE: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HIDDEN + LINE - 1) // LINE)
    line = start + tl.minimum(tl.arange(0, LINES) * LINE, HIDDEN - 1)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _sums(source, queries, BATCH: tl.constexpr, QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the row, source by source: of squares, and of products with each query."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    partial = ()
    for _ in tl.static_range(BATCH * (QUERIES + 1)):
        partial = partial + (tl.zeros([BLOCK], tl.float32),)
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        query = ()
        for q in tl.static_range(QUERIES):
            query = query + (tl.load(queries + q * HIDDEN + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32),)
        more = ()
        for s in tl.static_range(BATCH):
            value = source[s * CHUNKS + c]
            more = more + (tl.fma(value, value, partial[s * (QUERIES + 1)]),)
            for q in tl.static_range(QUERIES):
                more = more + (tl.fma(value, query[q], partial[s * (QUERIES + 1) + q + 1]),)
        partial = more
    if len(partial) == 2:
        return tl.reduce(partial, 0, _add_2)
    elif len(partial) == 4:
        return tl.reduce(partial, 0, _add_4)
    elif len(partial) == 8:
        return tl.reduce(partial, 0, _add_8)
    else:
        return tl.reduce(partial, 0, _add_16)


@triton.jit
def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add_8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _add_16(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10,
        a11 + b11, a12 + b12, a13 + b13, a14 + b14, a15 + b15,
    )  # fmt: skip


@triton.jit
def _scores(sums, s: tl.constexpr, there, per_hidden, score_scale, mix_eps, QUERIES: tl.constexpr):
    """One over the root mean square of source s, and two to the power of its score under each query.

    A score is in units of log 2; its power is an exponent (int32) and a factor in (1/2, 1].
    """
    inverse = tl.rsqrt(tl.fma(sums[s * (QUERIES + 1)], per_hidden, mix_eps))
    exponents, factors = (), ()
    for q in tl.static_range(QUERIES):
        product = sums[s * (QUERIES + 1) + q + 1] * inverse
        whole = tl.ceil(product * score_scale)
        exponents = exponents + (tl.where(there, whole, _NOWHERE).to(tl.int32),)
        factors = factors + (tl.exp2(tl.fma(product, score_scale, -whole)),)
    return inverse, exponents, factors


@triton.jit
def _power(exponent):
    """2^exponent for an int32 of 0 or less, exactly; 0 below the least normal number."""
    return tl.where(exponent < -126, 0, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _added(mixed, largest, total, source, wholes, parts, inverse, QUERIES: tl.constexpr, CHUNKS: tl.constexpr):
    """The online softmax with one more source. Its running factors are powers of two, so nothing is rounded twice."""
    new_mixed, new_largest, new_total = (), (), ()
    for q in tl.static_range(QUERIES):
        whole, part = wholes[q], parts[q]
        kept = mixed[q * CHUNKS : (q + 1) * CHUNKS]
        kept_total, maximum = total[q], largest[q]
        if whole > maximum:
            kept_total *= _power(maximum - whole)
            kept = _times(kept, _power(maximum - whole), CHUNKS)
            maximum = whole
        new = part * _power(whole - maximum)
        new_largest = new_largest + (maximum,)
        new_total = new_total + (kept_total + new,)
        factor = new * inverse
        for c in tl.static_range(CHUNKS):
            new_mixed = new_mixed + (tl.fma(source[c], factor, kept[c]),)
    return new_mixed, new_largest, new_total


@triton.jit
def _times(values, factor, CHUNKS: tl.constexpr):
    products = ()
    for c in tl.static_range(CHUNKS):
        products = products + (values[c] * factor,)
    return products


@triton.jit
def _store_normed(mixed, scale, weight, out, per_hidden, norm_eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of `scale * mixed` times `weight`."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    squares = tl.zeros([BLOCK], tl.float32)
    learned = ()  # read before the first write, see _convolved
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        learned = learned + (tl.load(weight + columns, mask=columns < HIDDEN, other=0.0),)
        squares = tl.fma(mixed[c], mixed[c], squares)
    factor = scale * tl.rsqrt(tl.fma(tl.sum(squares, axis=0) * scale * scale, per_hidden, norm_eps))
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        value = mixed[c] * factor * learned[c].to(tl.float32)
        tl.store(out + columns, value.to(out.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def _load_row(start, there, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """A row as a tuple of chunks; 0 beyond its end, and everywhere if it is not `there`."""
    chunks = ()
    for c in tl.static_range((HIDDEN + BLOCK - 1) // BLOCK):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        chunks = chunks + (tl.load(start + columns, mask=(columns < HIDDEN) & there, other=0.0, cache_modifier=".cg"),)
    return chunks


@triton.jit
def _convolved(
    x, state, sources, slot, taps, residual, row, stride_x, stride_block, stride_token, stride_lag, stride_tap,
    stride_residual, running, conv_scale, TOKENS_PER_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new running block as stored, float32; stores it, and the inputs in the state.

    All activations are read before anything is written: the compiler moves no read over a write.
    """
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    inputs = _load_row(x + row * stride_x, True, HIDDEN, BLOCK)
    for lag in tl.static_range(1, 4):
        source = tl.load(sources + lag - 1)
        from_x, from_state = tap_pointers(x, state, source, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK)
        for c in tl.static_range(CHUNKS):
            columns = c * BLOCK + tl.arange(0, BLOCK)
            inputs = inputs + (load_tap(from_x, from_state, source, columns, columns < HIDDEN),)
    if residual is not None:
        before = _load_row(residual + row * stride_residual, True, HIDDEN, BLOCK)
    chunks = ()
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        value = _wide(inputs[c].to(state.dtype.element_ty))
        total = value
        for lag in tl.static_range(4):
            tap = tl.load(taps + (3 - lag) * stride_lag + columns * stride_tap, mask=columns < HIDDEN, other=0.0)
            earlier = _wide(inputs[lag * CHUNKS + c].to(state.dtype.element_ty))
            total = tl.fma(earlier, tap.to(tl.float32), total)
        if residual is not None:
            value = tl.fma(total, conv_scale, _wide(before[c]))
        else:
            value = total * conv_scale
        chunks = chunks + (value.to(running.dtype.element_ty),)
    stored = state + token_offset(slot, stride_block, stride_token, TOKENS_PER_BLOCK)
    result = ()
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        inside = columns < HIDDEN
        tl.store(stored + columns, inputs[c].to(state.dtype.element_ty), mask=inside & (slot >= 0))
        tl.store(running + columns, chunks[c], mask=inside)
        result = result + (_wide(chunks[c]),)
    return result
