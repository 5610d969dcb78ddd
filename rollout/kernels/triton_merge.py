"""How decode attention is divided over programs, and the kernel that puts the pieces together.

The work of a step is a line of tiles: request after request, within it key/value head after head, within it the visible
positions from the first to the last. Every program takes an equal stretch of that line, so a batch of one long and many
short requests keeps all multiprocessors busy, and the grid depends on nothing but the device: lengths are read there,
and a captured graph stays right when they change. Where a stretch crosses from one *pair* (request, head) into the
next, the program leaves one piece per pair. Piece `program + pair` of the workspace is its place: along the line at
least one of the two grows from piece to piece, so no two pieces share one.

A piece is a normalised output and the base-2 logarithm of the sum of its exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def visible(length, num_queries, WINDOW: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Where a request's tiles begin, and how many there are to the end of it.

    They begin at 0, or with a window where the first query sees first; further back, at a multiple of the tile, if a
    tile then lies within one block.
    """
    if WINDOW > 0:
        first = tl.maximum(length - num_queries - WINDOW + 1, 0)
        if PAGE % TILE == 0:
            first -= first % TILE
    else:
        first = length * 0
    return first, tl.where(num_queries > 0, (length - first + TILE - 1) // TILE, 0)


@triton.jit
def line_of_work(
    query_start, seq_lens, requests, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    BATCH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Tiles up to and including each request, over all heads, int32 [BATCH]; requests beyond the last add none."""
    index = tl.arange(0, BATCH)
    inside = index < requests
    length = tl.load(seq_lens + index, mask=inside, other=0)
    before = tl.load(query_start + index, mask=inside, other=0)
    after = tl.load(query_start + index + 1, mask=inside, other=0)
    tiles = visible(length, after - before, WINDOW, TILE, PAGE)[1]
    return tl.cumsum(tiles, 0) * KV_HEADS


@triton.jit(do_not_specialize=["requests", "programs"])
def merge_kernel(
    pieces, sums, sink, gate, out, query_start, seq_lens,
    requests, programs, sink_stride, gate_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weigh the pieces of one row of the step, apply sink and gate in float32, round once.

    A program has one query head (HEADS 1) or all those of a key/value head (HEADS a power of two of GROUP or more).
    Rows that belong to no request (padding of a captured batch) become zero. EARLY: launched before the decode kernel
    has ended, for which it waits once it knows what to do; also where there is nothing to do, for what comes after this
    kernel takes its end for the end of both. That may be launched at once, see `triton_skinny`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if HEADS == 1:
        kv_head = tl.program_id(1) // GROUP
        member = tl.program_id(1) % GROUP + tl.arange(0, 1)
    else:
        kv_head = tl.program_id(1)
        member = tl.arange(0, HEADS)
    real = member < GROUP
    ends = line_of_work(query_start, seq_lens, requests, KV_HEADS, WINDOW, TILE, BATCH, PAGE)
    per_program = tl.maximum(tl.cdiv(tl.max(ends, 0), programs), 1)
    index = tl.arange(0, BATCH)
    last_row = tl.load(query_start + index + 1, mask=index < requests, other=2147483647)
    request = tl.sum((last_row <= row).to(tl.int32), 0)
    heads = kv_head * GROUP + member
    channel = tl.arange(0, HEAD_DIM)[None, :]
    place = out + row.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + heads[:, None] * HEAD_DIM + channel
    if request >= requests:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        tl.store(place, tl.zeros([HEADS, HEAD_DIM], out.dtype.element_ty), mask=real[:, None])
        return
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    tiles = visible(tl.load(seq_lens + request), count, WINDOW, TILE, PAGE)[1]
    first_tile = tl.max(tl.where(index < request, ends, 0), 0) + kv_head * tiles
    first, last = first_tile // per_program, (first_tile + tiles - 1) // per_program
    pair = request * KV_HEADS + kv_head
    sinks = tl.load(sink + row * sink_stride + heads, mask=real, other=0.0).to(tl.float32)
    gates = tl.load(gate + row.to(tl.int64) * gate_stride + heads[:, None] * HEAD_DIM + channel, mask=real[:, None])
    if EARLY:
        tl.extra.cuda.gdc_wait()
    value, log_sum = _weigh(
        pieces, sums, first + pair, last + pair, (row - begin) * GROUP + member, real, channel, MAX_QUERIES * GROUP,
        CHUNK,
    )  # fmt: skip
    scale = 1.0 / (1.0 + tl.exp(sinks - log_sum * _LN_2))
    value = value * scale[:, None] / (1.0 + tl.exp(-gates.to(tl.float32)))
    tl.store(place, value.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _weigh(pieces, sums, first, last, offset, real, channel, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Output [HEADS, D] and base-2 log-sum [HEADS] of pieces `first` to `last`, CHUNK at a time."""
    top = offset * 0.0 - float("inf")
    total = offset * 0.0
    value = total[:, None] + channel * 0.0
    for start in range(first, last + 1, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        inside = (piece <= last)[:, None] & real[None, :]
        place = piece.to(tl.int64)[:, None] * ROWS + offset[None, :]
        log_sums = tl.load(sums + place, mask=inside, other=-float("inf"))
        pointers = pieces + place[:, :, None] * channel.shape[1] + channel[None, :, :]
        part = tl.load(pointers, mask=inside[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        # A piece whose positions are all hidden from this query has minus infinity; so may all seen so far.
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(log_sums - pivot[None, :])
        decay = tl.exp2(top - pivot)
        total = total * decay + tl.sum(weights, 0)
        value = value * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        top = new_top
    return value / tl.where(total > 0.0, total, 1.0)[:, None], top + tl.log2(total)
