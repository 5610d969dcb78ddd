"""Relative attention for 1 to 8 query tokens per request over paged keys and values, for CUDA: decode and verify.

Oracle: `rollout.kernels.reference.attention`, whose arguments these are. Not for prefill: the query rows of one
key/value head (its query heads times the tokens of the step) lie in one tile of the matrix unit, so that keys and
values cross the memory bus once; with more rows than a tile holds that stops paying.

Layout of pages: vLLM's LBHNC, the one layout `rollout.plugin.paging` declares on every device. A kernel gets the view
`[blocks, key/value heads, tokens per block, channels]` of one layer with keys in channels `[0, D)` and values in
`[D, 2 D)`, so that a token's key and value are one stretch of memory and, in full layers, so is a block of a head. Only
the last stride is fixed (1); block, head and token strides are free, because pages may be padded and an owner of
sliding state holds several layers side by side. Tokens per block is a power of two. Where it is a multiple of the tile,
a tile has one entry of the block table, else every position looks up its own.

The bias of a distance d < R is `r proj[:, d]`, a matrix product as well. One query token has one distance to each
position of a tile, and the profiles are read in that order; several tokens get a product over all distances of the
tile, from which each row gathers its own stretch. In bfloat16 `r` and (if stored in float32) `proj` are split into two
bfloat16 numbers each, which leaves about 16 bits: the bias adds no error of its own to what rounding queries and keys
costs. Tiles that lie beyond the extent for all query tokens run without bias and masks.

How the work is divided, and the second kernel that merges: `rollout.kernels.triton_merge`. The same step gives the same
bits every time; a row's last bits depend on where its work is cut, and so on the rest of the batch, unlike on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels import units
from rollout.kernels.paged import PagedBatch
from rollout.kernels.triton_logits import COMPILED, add_bias, dot, load_biases, load_profiles, load_queries, log_scale
from rollout.kernels.triton_merge import line_of_work, merge_kernel, visible

MAX_QUERIES = 8
# Query rows of one key/value head in a tile: per key/value head, query heads times query tokens.
MAX_ROWS = 64
# Lengths are read as one vector by every program. Few sizes of it, for each is a kernel to compile; up to 128 a thread
# has one at the most.
BATCHES = (16, 128, 1024, 4096)
MAX_REQUESTS = BATCHES[-1]
# About one wave of an H200: rows times query heads up to which the merge takes one program for each.
MERGE_PROGRAMS = 2048
_LOG2_E = tl.constexpr(units.LOG2_E)


class Tiles(NamedTuple):
    """Shape of a launch: positions per tile, warps and pipeline stages of a program, programs per multiprocessor."""

    tile: int
    warps: int
    stages: int
    per_multiprocessor: int


def choose_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """For `rows` query rows in a tile (16, 32 or 64): the best over all rows of `tests.benchmarks.decode_gpu --sweep`.

    On an H200. For 16 rows (32, 4, 3, 3) is as good; deeper pipelines and programs of one warp lose.
    """
    if dtype == torch.float32:  # not for speed
        return Tiles(32 if rows == 16 else 16, 4, 2, 2)
    return Tiles(64, 4, 3, 2) if rows == 16 else Tiles(32, 4, 4, 2)


def attention(
    q_TC: torch.Tensor,
    r_TC: torch.Tensor,
    sink_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    kv_BKNC: torch.Tensor,
    batch: PagedBatch,
    q_scale_ND: torch.Tensor | None,
    r_scale_NM: torch.Tensor | None,
    proj_MR: torch.Tensor,
    q_clip: float,
    r_clip: float,
    window: int | None,
    log_scaling: tuple[float, int] | None,
    *,
    max_queries: int,
    out_dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
    programs: int | None = None,
    early_merge: bool = True,
) -> torch.Tensor:
    """`reference.attention` for a step in which no request has more than `max_queries` <= 8 rows, `out_dtype` [T, N D].

    `q`, `r`, `sink`, `gate` may be float32, bfloat16 or float16 with any row stride. Without `q_scale` and `r_scale`,
    `q` and `r` are taken as `prepare` leaves them (`rollout.kernels.units`). Nothing is read back to the host, and the
    grid depends on the number of requests and rows only: safe to capture. Rows beyond `batch.query_start[-1]` come out
    as zeros. `programs` overrides the number of programs, `tiles` their shape; with `early_merge` each of the two
    kernels is launched before what it waits for has ended (programmatic dependent launch, see `triton_skinny`).

    Raises:
        ValueError: a shape that the kernel does not cover.
    """
    num_heads, kv_heads = sink_TN.shape[1], kv_BKNC.shape[1]
    head_dim, group = q_TC.shape[1] // num_heads, num_heads // kv_heads
    _check(kv_BKNC, head_dim, proj_MR.shape[0], group, max_queries, batch)
    assert all(x.stride(1) == 1 for x in (q_TC, r_TC, sink_TN, gate_TC, batch.block_table))
    assert proj_MR.is_contiguous() and kv_BKNC.shape[3] == 2 * head_dim and kv_BKNC.stride(3) == 1
    out_TC = q_TC.new_empty(q_TC.shape, dtype=out_dtype)
    requests = batch.seq_lens.shape[0]
    if requests == 0 or q_TC.shape[0] == 0:
        return out_TC.zero_()
    rows = _tile_rows(max_queries * group)
    tiles = tiles or choose_tiles(rows, kv_BKNC.dtype)
    early_merge = early_merge and not triton.knobs.runtime.interpret
    if programs is None:
        programs = tiles.per_multiprocessor * _multiprocessors(q_TC.device)
    pieces, sums = buffers(q_TC, programs + requests * kv_heads, max_queries * group, head_dim)
    alpha, floor = log_scaling or (0.0, 1)
    shape = {
        "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "MAX_QUERIES": max_queries,
        "WINDOW": window or 0, "TILE": tiles.tile, "PAGE": kv_BKNC.shape[2],
        "BATCH": _batch(requests),
    }  # fmt: skip
    options = {"launch_pdl": True} if early_merge else {}
    _decode_kernel[(programs,)](
        q_TC, r_TC, q_scale_ND, r_scale_NM, proj_MR, kv_BKNC, batch.block_table, batch.query_start, batch.seq_lens,
        pieces, sums, requests, q_TC.stride(0), r_TC.stride(0), *kv_BKNC.stride()[:3], batch.block_table.stride(0),
        q_clip, r_clip, alpha, float(floor),
        REL=proj_MR.shape[0], EXTENT=proj_MR.shape[1], ROWS=rows,
        LOG_SCALING=log_scaling is not None and q_scale_ND is not None, MODE=_mode(kv_BKNC.dtype), EARLY=early_merge,
        **shape, num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    chunk, heads = _merge_shape(requests, q_TC.shape[0], num_heads, kv_heads, programs)
    merge_kernel[(q_TC.shape[0], num_heads if heads == 1 else kv_heads)](
        pieces, sums, sink_TN, gate_TC, out_TC, batch.query_start, batch.seq_lens,
        requests, programs, sink_TN.stride(0), gate_TC.stride(0), **shape,
        CHUNK=chunk, HEADS=heads, EARLY=early_merge, num_warps=4, **options,
    )  # fmt: skip
    return out_TC


def _batch(requests: int) -> int:
    return next(size for size in BATCHES if requests <= size)


def _merge_shape(requests: int, rows: int, num_heads: int, kv_heads: int, programs: int) -> tuple[int, int]:
    """Pieces that the merge takes at a time, and query heads of its programs.

    Few rows: a program for every head. Many: one for the heads that share a key/value head, few pieces at a time. As
    many pieces as a pair has when all requests are as long; others take more than one turn.
    """
    heads = 1 if rows * num_heads <= MERGE_PROGRAMS else triton.next_power_of_2(num_heads // kv_heads)
    pieces = triton.next_power_of_2(programs // (requests * kv_heads) + 2)
    return max(4, min(pieces, 64 // heads)), heads


def distinct_batches(
    most_requests: int, max_queries: int, num_heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, list[tuple[int, int]]]:
    """Programs of a launch, and for each compilation of the two kernels numbers of requests and rows that come to it.

    Of all steps of up to so many requests, which have up to `max_queries` rows each; `dtype` is that of pages.
    """
    tiles = choose_tiles(_tile_rows(max_queries * num_heads // kv_heads), dtype)
    programs, found = tiles.per_multiprocessor * _multiprocessors(device), dict[tuple[int, int, int], tuple[int, int]]()
    for requests in range(1, most_requests + 1):
        for rows in (requests, requests * max_queries):
            shape = _batch(requests), *_merge_shape(requests, rows, num_heads, kv_heads, programs)
            found.setdefault(shape, (requests, rows))
    return programs, list(found.values())


def buffers(like: torch.Tensor, pieces: int, lines: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the merge reads: outputs of the pieces, of so many query rows each, and their log-sums."""
    return (
        like.new_empty(pieces, lines, head_dim, dtype=torch.float32),
        like.new_empty(pieces, lines, dtype=torch.float32),
    )


def largest_buffers(
    like: torch.Tensor, requests: int, num_heads: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest that `attention` takes for so many requests: with as many rows for each as there may be."""
    lines = MAX_QUERIES * num_heads // kv_heads
    programs = choose_tiles(_tile_rows(lines), like.dtype).per_multiprocessor * _multiprocessors(like.device)
    return buffers(like, programs + requests * kv_heads, lines, head_dim)


def _tile_rows(lines: int) -> int:
    return max(16, triton.next_power_of_2(lines))


def _check(kv_BKNC: torch.Tensor, head_dim: int, rel: int, group: int, max_queries: int, batch: PagedBatch) -> None:
    page, requests, dtype = kv_BKNC.shape[2], batch.seq_lens.shape[0], kv_BKNC.dtype
    faults = [
        ("max_queries", 1 <= max_queries <= MAX_QUERIES, f"1 to {MAX_QUERIES}", max_queries),
        ("query heads x query tokens", group * max_queries <= MAX_ROWS, f"at most {MAX_ROWS}", group * max_queries),
        ("the KV cache's dtype", dtype in (torch.float32, torch.bfloat16), "float32 or bfloat16", dtype),
        ("head_dim", head_dim in (16, 32, 64, 128), "16, 32, 64 or 128", head_dim),
        ("d_rel", rel in (16, 32, 64), "16, 32 or 64", rel),
        ("tokens per block", _is_power_of_2(page), "a power of two", page),
        ("requests", requests <= MAX_REQUESTS, f"at most {MAX_REQUESTS}", requests),
    ]
    for name, holds, requirement, got in faults:
        if not holds:
            raise ValueError(f"{name} must be {requirement} for decode attention on CUDA; got {got}. Use the reference")


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _mode(dtype: torch.dtype) -> str:
    """How products are taken, see `triton_logits.dot`."""
    return "bf16" if dtype == torch.bfloat16 else "ieee"


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["requests", "table_stride"])
def _decode_kernel(
    q, r, q_scale, r_scale, proj, kv, table, query_start, seq_lens, pieces, sums,
    requests, q_stride, r_stride, block_stride, head_stride, token_stride, table_stride,
    q_clip, r_clip, alpha, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, REL: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, MAX_QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BATCH: tl.constexpr, LOG_SCALING: tl.constexpr, MODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program's stretch of the line of work: a piece for each pair that it crosses."""
    if EARLY:  # the merge may come as soon as there is room for it, which is when programs of this kernel end
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ends = line_of_work(query_start, seq_lens, requests, KV_HEADS, WINDOW, TILE, BATCH, PAGE)
    work = tl.max(ends, 0)
    per_program = tl.cdiv(work, tl.num_programs(0))
    start = tl.program_id(0) * per_program
    stop = tl.minimum(start + per_program, work)
    if start >= stop:
        return
    request = tl.sum((ends <= start).to(tl.int32), 0)
    pair_start = tl.max(tl.where(ends <= start, ends, 0), 0)
    begin, count, length, first, tiles = _request(query_start, seq_lens, request, WINDOW, TILE, PAGE)
    head = (start - pair_start) // tiles
    pair_start += head * tiles
    while pair_start < stop:
        begin, count, length, first, tiles = _request(query_start, seq_lens, request, WINDOW, TILE, PAGE)
        if tiles > 0:
            rows = tl.arange(0, ROWS)
            token = rows // GROUP
            real = (token < count) & (token < MAX_QUERIES)
            heads = head * GROUP + rows % GROUP
            factor = log_scale(length - count + token, alpha, floor, LOG_SCALING) * _LOG2_E
            out, log_sum = _attend(
                load_queries(q, q_scale, begin + token, heads, real, factor, q_stride, q_clip, HEAD_DIM),
                load_biases(r, r_scale, begin + token, heads, real, factor, r_stride, r_clip, REL),
                proj, kv + head.to(tl.int64) * head_stride, table + request.to(tl.int64) * table_stride, first,
                tl.maximum(start - pair_start, 0), tl.minimum(stop - pair_start, tiles), length, length - count, token,
                block_stride, token_stride, HEAD_DIM, REL, EXTENT, WINDOW, PAGE, MAX_QUERIES, TILE, MODE,
            )  # fmt: skip
            place = (tl.program_id(0) + request * KV_HEADS + head).to(tl.int64) * (MAX_QUERIES * GROUP) + rows
            channel = tl.arange(0, HEAD_DIM)
            tl.store(pieces + place[:, None] * HEAD_DIM + channel[None, :], out, mask=real[:, None])
            tl.store(sums + place, log_sum, mask=real)
        pair_start += tiles
        head += 1
        if head == KV_HEADS:
            head = 0
            request += 1


@triton.jit
def _request(query_start, seq_lens, request, WINDOW: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):
    """First row, rows, length, position of the first tile and tiles of a request."""
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    length = tl.load(seq_lens + request)
    first, tiles = visible(length, count, WINDOW, TILE, PAGE)
    return begin, count, length, first, tiles


@triton.jit
def _attend(
    queries, biases, proj, kv, table, first, low, high, length, start, token, block_stride, token_stride,
    HEAD_DIM: tl.constexpr, REL: tl.constexpr, EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    MAX_QUERIES: tl.constexpr, TILE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Normalised output and base-2 log-sum of tiles `low` to `high - 1`; `start` is the first query's position."""
    top = token * 0.0 - float("inf")
    total = token * 0.0
    out = queries * 0.0
    queries = queries.to(kv.dtype.element_ty)
    # Positions up to start - EXTENT are out of every query's bias, and before every query.
    plain = low
    if WINDOW == 0:
        plain = tl.minimum(tl.maximum((start - EXTENT + 1) // TILE, low), high)
        for tile in range(low, plain):
            keys, values = _load(
                kv, table, first + tile * TILE, 0, length, block_stride, token_stride, HEAD_DIM, PAGE, TILE, False
            )
            out, top, total = _step(dot(queries, keys, None, MODE), values, out, top, total, MODE, False)
    lowest = start - WINDOW + 1 if WINDOW > 0 else 0
    # Profiles come a tile ahead, or their way from the second cache would be added to every tile's time.
    last = start - first - TILE + 1
    ahead = load_profiles(proj, last - plain * TILE, REL, EXTENT, MAX_QUERIES, TILE)
    for tile in range(plain, high):
        keys, values = _load(
            kv, table, first + tile * TILE, lowest, length, block_stride, token_stride, HEAD_DIM, PAGE, TILE, True
        )
        profiles = ahead
        ahead = load_profiles(proj, last - (tile + 1) * TILE, REL, EXTENT, MAX_QUERIES, TILE)
        logits = add_bias(dot(queries, keys, None, MODE), biases, profiles, token, MAX_QUERIES, TILE, MODE)
        position = first + tile * TILE + tl.arange(0, TILE)
        distance = (start + token)[:, None] - position[None, :]
        hidden = distance < 0
        if WINDOW > 0:
            hidden |= distance >= WINDOW
        out, top, total = _step(tl.where(hidden, -float("inf"), logits), values, out, top, total, MODE, True)
    # Rows that see none of these positions: a log-sum of minus infinity, and no 0 / 0.
    return out / tl.where(total > 0.0, total, 1.0)[:, None], top + tl.log2(total)


@triton.jit
def _load(
    kv, table, position, lowest, length, block_stride, token_stride, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [TILE, D] from `position` on. MASKED: only from `lowest` to `length - 1`, the others are zero."""
    offsets = tl.arange(0, TILE)
    inside = (position + offsets >= lowest) & (position + offsets < length)
    # The pipeline computes addresses ahead of the loop's end, and the table is read for real: it must not be left.
    if PAGE % TILE == 0:
        block = _table_entry(table + tl.minimum(position, length - 1) // PAGE)
        place = block.to(tl.int64) * block_stride + (position % PAGE + offsets) * token_stride
    else:
        at = tl.minimum(position + offsets, length - 1)
        place = _table_entry(table + at // PAGE).to(tl.int64) * block_stride + at % PAGE * token_stride
    pointers = kv + place[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    if MASKED:
        keys = tl.load(pointers, mask=inside[:, None], other=0.0)
        values = tl.load(pointers + HEAD_DIM, mask=inside[:, None], other=0.0)
    else:
        keys = tl.load(pointers)
        values = tl.load(pointers + HEAD_DIM)
    return tl.trans(keys), values


@triton.jit
def _table_entry(pointer):
    """The block at `pointer`, as PTX: a `tl.load` would take half of the pipeline's stages, which keys and values need.

    Entries share cache lines, so all but one load in thirty-two tiles is a hit in the first cache.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointer)


@triton.jit
def _step(logits, values, out, top, total, MODE: tl.constexpr, MASKED: tl.constexpr):
    """Take one tile into the running softmax."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    pivot = new_top
    if MASKED:
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(logits - pivot[:, None])
    decay = tl.exp2(top - pivot)
    total = total * decay + tl.sum(weights, 1)
    return dot(weights.to(values.dtype), values, out * decay[:, None], MODE), new_top, total
