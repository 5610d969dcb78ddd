"""A draft's layers on CUDA, beside their products: norm with rotation, context into pages, attention of blocks.

References and notation: `rollout.kernels.draft`, whose `*_reference` these are tested against. The head's kernels are
in `triton_draft_head`. Nothing is read back to the host and grids depend on shapes only, so all can be captured.

Attention has the division of work of `triton_decode`: the requests' tiles, head after head, are one line, of which
every program takes an equal stretch, so that a long context among short ones keeps all multiprocessors busy. A request
has one tile for the rows of its block, which is taken first, and as many as its context fills; without context the
pages are not touched. Query heads of a key/value head times the rows of a block are one tile of the matrix unit, so
keys and values cross the memory bus once. No row is hidden from another, so a mask is needed for the context's end
alone. Scores are scaled after the product: prepared queries would be rounded a second time.

In pages of bfloat16 queries, a block's own keys and values and the weights are rounded to bfloat16 as well; sums, and
the maximum and the sum of a softmax, are float32. Over float32 pages everything is float32, exact and slow.

With `early` a kernel is launched before the one before has ended, and does nothing until it has; it lets the next one
start once it is its turn. Those are the rules of `triton_skinny`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels import triton_decode, units
from rollout.kernels.draft import Angles, Blocks
from rollout.kernels.triton_decode import MAX_REQUESTS, MAX_ROWS, Tiles, _load, _step, buffers, choose_tiles
from rollout.kernels.triton_logits import dot
from rollout.kernels.triton_merge import _weigh
from rollout.kernels.triton_taps import token_offset

ELEMENTS = 2048
"""Of a program that norms and turns queries."""

MERGE_PROGRAMS = 2048
"""Lines of a step (rows times query heads) up to which the merge takes one program for each; about one wave."""

MERGE_LINES = 8
"""Of a program of the merge with more."""

HEAD_DIMS = (16, 32, 64, 128)


def norm_rotate(
    x_TC: torch.Tensor,
    weight_D: torch.Tensor,
    angles: Angles,
    eps: float,
    out_dtype: torch.dtype | None = None,
    early: bool = False,
) -> torch.Tensor:
    """RMS norm of every head's vector, then its rotation, [T, N, D] in the input's dtype or `out_dtype`.

    Args:
        x_TC: bfloat16 or float32, rows may lie apart.
        weight_D: contiguous.
        angles: of the rows.
        eps: of the norm.
    """
    (num_rows, width), size = x_TC.shape, weight_D.shape[0]
    heads = width // size
    assert x_TC.stride(1) == 1 and width % size == 0 and size in HEAD_DIMS and weight_D.is_contiguous()
    _check_angles(angles, num_rows, size)
    out_TND = x_TC.new_empty(num_rows, heads, size, dtype=out_dtype or x_TC.dtype)
    tile = min(triton.next_power_of_2(heads), ELEMENTS // size)
    if num_rows:
        with torch.cuda.device_of(x_TC):
            _norm_rotate_kernel[(num_rows, triton.cdiv(heads, tile))](
                x_TC, weight_D, *angles, out_TND, x_TC.stride(0), angles.cos.stride(0), eps, HEADS=heads,
                HALF=size // 2, TILE=tile, **_launch(early),
            )  # fmt: skip
    return out_TND


def store_context(
    kv_TC: torch.Tensor,
    weight_D: torch.Tensor,
    angles: Angles,
    eps: float,
    kv_PKNC: torch.Tensor,
    slots_T: torch.Tensor,
    early: bool = False,
) -> None:
    """Write keys, normed and turned, and values of context into pages, in the pages' dtype.

    Args:
        kv_TC: all keys, then all values, [T, 2 K D]; bfloat16 or float32, rows may lie apart.
        weight_D, angles, eps: see `norm_rotate`.
        kv_PKNC: pages.
        slots_T: int64, `page * tokens per page + offset`. Negative ones are not stored, nor rows beyond the last.
    """
    (num_rows, width), size, heads = kv_TC.shape, weight_D.shape[0], kv_PKNC.shape[1]
    assert kv_TC.stride(1) == kv_PKNC.stride(3) == slots_T.stride(0) == 1 and weight_D.is_contiguous()
    assert width == 2 * heads * size and kv_PKNC.shape[3] == 2 * size and size in HEAD_DIMS
    _check_angles(angles, num_rows, size)
    if num_rows:
        with torch.cuda.device_of(kv_TC):
            _store_kernel[(num_rows, 2)](
                kv_TC, weight_D, *angles, kv_PKNC, slots_T, kv_TC.stride(0), angles.cos.stride(0),
                *kv_PKNC.stride()[:3], slots_T.shape[0], eps, PAGE=kv_PKNC.shape[2], HEADS=heads, HALF=size // 2,
                TILE=triton.next_power_of_2(heads), **_launch(early),
            )  # fmt: skip


def attention(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv_PKNC: torch.Tensor,
    blocks: Blocks,
    out_dtype: torch.dtype | None = None,
    programs: int | None = None,
    tiles: Tiles | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Attention of each request's block to its context's pages and to the whole block, [T, N, D] like `q`.

    Args:
        q_TND, k_TKD, v_TKD: of the blocks' rows, request after request; bfloat16 or float32, rows may lie apart.
        kv_PKNC: pages, float32 or bfloat16; only the last stride is fixed.
        blocks: lengths int32 or int64. Of a request without context only the block's own rows are read.
        out_dtype: of the result; that of `q` without.
        programs, tiles: number and shape of the first kernel's programs.

    Raises:
        ValueError: a shape that the kernel does not cover.
    """
    (num_rows, num_heads, size), requests, kv_heads = q_TND.shape, blocks.lengths.shape[0], kv_PKNC.shape[1]
    out_TND = q_TND.new_empty(q_TND.shape, dtype=out_dtype or q_TND.dtype)
    if requests == 0 or num_rows == 0:
        return out_TND
    rows, group = num_rows // requests, num_heads // kv_heads
    _check(kv_PKNC, size, group, rows, requests)
    assert num_rows == rows * requests and num_heads == group * kv_heads and kv_PKNC.shape[3] == 2 * size
    assert k_TKD.shape == v_TKD.shape == (num_rows, kv_heads, size)
    assert all(x.stride(2) == 1 and x.stride(1) == size for x in (q_TND, k_TKD, v_TKD))
    assert kv_PKNC.stride(3) == 1 and blocks.block_table.stride(1) == blocks.lengths.stride(0) == 1
    padded = max(16, triton.next_power_of_2(rows * group))
    tiles = tiles or choose_tiles(padded, kv_PKNC.dtype)
    programs = programs or tiles.per_multiprocessor * triton_decode._multiprocessors(q_TND.device)
    pieces, sums = buffers(q_TND, programs + requests * kv_heads, rows * group, size)
    chunk, lines = _merge_shape(requests, rows * group, kv_heads, programs)
    shape = {
        "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": size, "BLOCK": rows, "TILE": tiles.tile,
        "BATCH": triton_decode._batch(requests),
    }  # fmt: skip
    with torch.cuda.device_of(q_TND):
        _attention_kernel[(programs,)](
            q_TND, k_TKD, v_TKD, kv_PKNC, blocks.block_table, blocks.lengths, pieces, sums, requests,
            q_TND.stride(0), k_TKD.stride(0), v_TKD.stride(0), *kv_PKNC.stride()[:3], blocks.block_table.stride(0),
            units.query_units(size), **shape, PAGE=kv_PKNC.shape[2], ROWS=padded,
            OWN=max(16, triton.next_power_of_2(rows)),
            MODE=triton_decode._mode(kv_PKNC.dtype), num_stages=tiles.stages, **_launch(early, tiles.warps),
        )  # fmt: skip
        _merge_kernel[(triton.cdiv(rows * group, lines), kv_heads, requests)](
            pieces, sums, out_TND, blocks.lengths, requests, programs, **shape, CHUNK=chunk, LINES=lines,
            **_launch(early),
        )  # fmt: skip
    return out_TND


def _launch(early: bool, warps: int = 4) -> dict[str, Any]:
    """Options of a launch, and the constant that goes with `early`."""
    early = early and not triton.knobs.runtime.interpret
    return {"EARLY": early, "num_warps": warps} | ({"launch_pdl": True} if early else {})


def _check_angles(angles: Angles, num_rows: int, size: int) -> None:
    cos, sin = angles
    assert cos.shape == sin.shape == (num_rows, size // 2) and cos.stride() == sin.stride() and cos.stride(1) == 1


def _check(kv_PKNC: torch.Tensor, size: int, group: int, rows: int, requests: int) -> None:
    faults = [
        ("query heads x block_size", group * rows <= MAX_ROWS, f"at most {MAX_ROWS}", group * rows),
        (
            "the KV cache's dtype",
            kv_PKNC.dtype in (torch.float32, torch.bfloat16),
            "float32 or bfloat16",
            kv_PKNC.dtype,
        ),
        ("head_dim", size in HEAD_DIMS, "16, 32, 64 or 128", size),
        ("requests", requests <= MAX_REQUESTS, f"at most {MAX_REQUESTS}", requests),
    ]
    for name, holds, requirement, got in faults:
        if not holds:
            raise ValueError(f"{name} must be {requirement} for a draft on CUDA; got {got}. Use the reference")


def _merge_shape(requests: int, lines: int, kv_heads: int, programs: int) -> tuple[int, int]:
    """Pieces that the merge takes at a time, and lines of its programs: as `triton_decode._merge_shape` has it."""
    at_once = 1 if requests * kv_heads * lines <= MERGE_PROGRAMS else MERGE_LINES
    pieces = triton.next_power_of_2(programs // (requests * kv_heads) + 2)
    return max(4, min(pieces, 64 // at_once)), at_once


def distinct_batches(
    most_requests: int, rows: int, num_heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, list[int]]:
    """Programs of a launch, and a number of requests for each compilation of attention's two kernels.

    Of all steps of up to so many requests with `rows` rows each; `dtype` is that of pages.
    """
    lines = rows * num_heads // kv_heads
    tiles = choose_tiles(max(16, triton.next_power_of_2(lines)), dtype)
    programs, found = tiles.per_multiprocessor * triton_decode._multiprocessors(device), dict[tuple[int, ...], int]()
    for requests in range(1, most_requests + 1):
        found.setdefault((triton_decode._batch(requests), *_merge_shape(requests, lines, kv_heads, programs)), requests)
    return programs, list(found.values())


@triton.jit
def _norm_rotate_kernel(
    x, weight, cos, sin, out, x_stride, angle_stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    angle = row * angle_stride
    first, second = _turned(x + row * x_stride, weight, cos + angle, sin + angle, head, head < HEADS, eps, HALF)
    place = out + row * (HEADS * 2 * HALF) + head * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(place, first.to(out.dtype.element_ty), mask=head < HEADS)
    tl.store(place + HALF, second.to(out.dtype.element_ty), mask=head < HEADS)


@triton.jit(do_not_specialize=["num_slots"])
def _store_kernel(
    kv_rows, weight, cos, sin, kv, slots, row_stride, angle_stride, block_stride, head_stride, token_stride, num_slots,
    eps, PAGE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has the keys of a row or its values."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row, mask=row < num_slots, other=-1)
    head = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS) & (slot >= 0)
    given = kv_rows + row * row_stride
    place = kv + token_offset(slot, block_stride, token_stride, PAGE) + head.to(tl.int64) * head_stride + channel
    if tl.program_id(1) == 0:
        angle = row * angle_stride
        first, second = _turned(given, weight, cos + angle, sin + angle, head, inside, eps, HALF)
    else:
        values = given + HEADS * 2 * HALF + head * (2 * HALF) + channel
        first = tl.load(values, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(values + HALF, mask=inside, other=0.0).to(tl.float32)
        place += 2 * HALF
    tl.store(place, first.to(kv.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def _turned(x, weight, cos, sin, head, inside, eps, HALF: tl.constexpr):
    """Both halves [heads, D / 2] of the heads' normed and turned vectors, float32."""
    channel = tl.arange(0, HALF)[None, :]
    x += head * (2 * HALF) + channel
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares * (0.5 / HALF) + eps)[:, None]
    first *= scale * tl.load(weight + channel).to(tl.float32)
    second *= scale * tl.load(weight + HALF + channel).to(tl.float32)
    c, s = tl.load(cos + channel), tl.load(sin + channel)
    return first * c - second * s, second * c + first * s


@triton.jit
def _tiles(length, TILE: tl.constexpr):
    """Tiles of a request: one for its block and those of its context."""
    return 1 + (tl.maximum(length, 0) + TILE - 1) // TILE


@triton.jit
def _line(lengths, requests, KV_HEADS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr):
    """Tiles up to and including each request, over all heads, int32 [BATCH]; requests beyond the last add none."""
    index = tl.arange(0, BATCH)
    length = tl.load(lengths + index, mask=index < requests, other=0).to(tl.int32)
    return tl.cumsum(tl.where(index < requests, _tiles(length, TILE), 0), 0) * KV_HEADS


@triton.jit(do_not_specialize=["requests", "table_stride"])
def _attention_kernel(
    q, k, v, kv, table, lengths, pieces, sums, requests, q_stride, k_stride, v_stride, block_stride, head_stride,
    token_stride, table_stride, scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    OWN: tl.constexpr, MODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program's stretch of the line of work: a piece for each pair (request, head) that it crosses."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ends = _line(lengths, requests, KV_HEADS, TILE, BATCH)
    work = tl.max(ends, 0)
    per_program = tl.cdiv(work, tl.num_programs(0))
    start = tl.program_id(0) * per_program
    stop = tl.minimum(start + per_program, work)
    if start >= stop:
        return
    request = tl.sum((ends <= start).to(tl.int32), 0)
    pair_start = tl.max(tl.where(ends <= start, ends, 0), 0)
    tiles = _tiles(tl.load(lengths + request).to(tl.int32), TILE)
    head = (start - pair_start) // tiles
    pair_start += head * tiles
    line, channel = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    own = tl.arange(0, OWN)
    real = line < GROUP * BLOCK
    while pair_start < stop:
        length = tl.load(lengths + request).to(tl.int32)
        tiles = _tiles(length, TILE)
        first = tl.maximum(start - pair_start, 0)
        row = request.to(tl.int64) * BLOCK
        heads = head * GROUP + line % GROUP
        queries = q + (row + line // GROUP)[:, None] * q_stride + heads[:, None] * HEAD_DIM + channel[None, :]
        # A block's own tile is one program's; for the others nothing of it is there, and nothing is read.
        is_own = ((own < BLOCK) & (first == 0))[:, None]
        column = head * HEAD_DIM + channel[None, :]
        keys = tl.load(k + (row + own)[:, None] * k_stride + column, mask=is_own, other=0.0)
        values = tl.load(v + (row + own)[:, None] * v_stride + column, mask=is_own, other=0.0)
        out, log_sum = _attend(
            tl.load(queries, mask=real[:, None], other=0.0).to(kv.dtype.element_ty), keys, values,
            tl.where(first == 0, BLOCK, 0), kv + head.to(tl.int64) * head_stride,
            table + request.to(tl.int64) * table_stride, tl.maximum(first - 1, 0),
            tl.minimum(stop - pair_start, tiles) - 1, length, block_stride, token_stride, scale, HEAD_DIM, PAGE, ROWS,
            OWN, TILE, MODE,
        )  # fmt: skip
        place = (tl.program_id(0) + request * KV_HEADS + head).to(tl.int64) * (GROUP * BLOCK) + line
        tl.store(pieces + place[:, None] * HEAD_DIM + channel[None, :], out, mask=real[:, None])
        tl.store(sums + place, log_sum, mask=real)
        pair_start += tiles
        head += 1
        if head == KV_HEADS:
            head = 0
            request += 1


@triton.jit
def _attend(
    queries, own_keys, own_values, num_own, kv, table, low, high, length, block_stride, token_stride, scale,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Normalised output and base-2 log-sum of a block's own rows and of the context's tiles `low` to `high - 1`.

    There is at least one key among them, so that every line has a sum.
    """
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    own = dot(queries, tl.trans(own_keys.to(queries.dtype)), None, MODE) * scale
    own = tl.where((tl.arange(0, OWN) < num_own)[None, :], own, -float("inf"))
    out, top, total = _step(own, own_values.to(queries.dtype), out, top, total, MODE, True)
    for tile in range(low, high):
        keys, values = _load(kv, table, tile * TILE, 0, length, block_stride, token_stride, HEAD_DIM, PAGE, TILE, True)
        seen = (tile * TILE + tl.arange(0, TILE) < length)[None, :]
        logits = tl.where(seen, dot(queries, keys, None, MODE) * scale, -float("inf"))
        out, top, total = _step(logits, values, out, top, total, MODE, True)
    return out / total[:, None], top + tl.log2(total)


@triton.jit(do_not_specialize=["requests", "programs"])
def _merge_kernel(
    pieces, sums, out, lengths, requests, programs, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, CHUNK: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weigh the pieces of some lines of a pair, and round once."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, request = tl.program_id(1), tl.program_id(2)
    ends = _line(lengths, requests, KV_HEADS, TILE, BATCH)
    per_program = tl.cdiv(tl.max(ends, 0), programs)
    tiles = _tiles(tl.load(lengths + request).to(tl.int32), TILE)
    first_tile = tl.max(tl.where(tl.arange(0, BATCH) < request, ends, 0), 0) + head * tiles
    pair = request * KV_HEADS + head
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    channel = tl.arange(0, HEAD_DIM)[None, :]
    value, _ = _weigh(
        pieces, sums, first_tile // per_program + pair, (first_tile + tiles - 1) // per_program + pair, line,
        line < GROUP * BLOCK, channel, GROUP * BLOCK, CHUNK,
    )  # fmt: skip
    row = request.to(tl.int64) * BLOCK + line // GROUP
    place = row * (KV_HEADS * GROUP) + head * GROUP + line % GROUP
    mask = (line < GROUP * BLOCK)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + channel, value.to(out.dtype.element_ty), mask=mask)
