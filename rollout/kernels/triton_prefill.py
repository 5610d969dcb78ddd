"""Relative attention for many query tokens per request over paged keys and values, for CUDA: prefill in chunks.

On a Hopper GPU an engine's rows go to `rollout.kernels.gluon_prefill` instead (`choose_tiles`); the kernel here is for
other devices, sizes and dtypes, and for rows that come raw.

Oracle: `rollout.kernels.reference.attention`, whose arguments these are. Correct for any number of query tokens, but a
request takes at least one tile of 64 positions: for 1 to 8 of them `rollout.kernels.triton_decode` is the one to call.

A program has `positions` consecutive query positions of one request and `packed` query heads of one key/value head:
their rows lie in one tile of the matrix unit, so that keys and values are read once for both heads and only 64 of 1,088
columns are computed in vain at a window of 1024. Queries and `r` that come raw are scaled, clipped and multiplied by
the log-length factor while they are loaded. Keys come from pages only: those of the chunk must have been
stored there before (`store_kv`). Scores are in units of log2, online softmax in float32.

Two loops: tiles beyond the extent of the bias (full attention only), plain; then the tiles with bias, of which the few
at the edge of the window and on the diagonal are masked behind a branch. A third loop for those would empty the
pipeline of loads twice more. What a query may not see is not read either, so that a NaN there cannot spread.

Programs are dealt out from the last tile to the first: long ones first within a request, and the heads of a tile
together, so that they find its keys in L2. The bias is `rollout.kernels.triton_bias`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from rollout.kernels import gluon_items, gluon_prefill
from rollout.kernels.paged import PagedBatch
from rollout.kernels.prefill_tiles import INTERPRETED, REGISTERS, Tiles, choose_tiles, ring_sizes
from rollout.kernels.triton_bias import (
    LOG2_E,
    fill_ring,
    open_ring,
    product,
    profile_table,
    read_ring,
    ring_rows,
    unmoved,
)


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
    out_dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`reference.attention` for any step, `out_dtype` [T, N D].

    `q`, `r`, `sink`, `gate` may be float32, bfloat16 or float16 with any row stride. Without `q_scale` and `r_scale`,
    `q` and `r` are taken as `prepare` leaves them (`rollout.kernels.units`). Nothing is read back to the host, and the
    grid depends on the number of rows and requests only: safe to capture. Rows beyond `batch.query_start[-1]` come out
    as zeros.

    Raises:
        ValueError: a shape that the kernel does not cover.
    """
    num_rows, num_heads, kv_heads = q_TC.shape[0], sink_TN.shape[1], kv_BKNC.shape[1]
    head_dim, (rel, extent) = q_TC.shape[1] // num_heads, proj_MR.shape
    _check(kv_BKNC, head_dim, rel, window)
    ready = rel == 16 and _is_prepared(q_TC, r_TC, gate_TC, kv_BKNC, q_scale_ND, r_scale_NM)
    hopper = ready and _is_hopper(q_TC.device)
    tiles = tiles or choose_tiles(head_dim, num_heads // kv_heads, kv_BKNC.dtype, hopper=hopper, window=window)
    requests = batch.seq_lens.shape[0]
    programs = (num_rows // tiles.positions + requests + 1) * (num_heads // tiles.packed)
    exact = kv_BKNC.dtype == torch.float32
    padding = 2 * (tiles.positions + tiles.keys)
    table = profile_table(proj_MR, padding, torch.float32 if exact else torch.float16)
    out_TC = q_TC.new_empty(q_TC.shape, dtype=out_dtype)
    rows = (q_TC, r_TC, sink_TN, gate_TC, kv_BKNC, out_TC)
    step = (table, batch.query_start, batch.seq_lens, batch.block_table, requests, num_rows)
    strides = (
        *(x.stride(0) for x in (q_TC, r_TC, sink_TN, gate_TC, out_TC)), *kv_BKNC.stride()[:3],
        batch.block_table.stride(0),
    )  # fmt: skip
    sizes = {
        "HEADS": num_heads, "GROUP": num_heads // kv_heads, "DIM": head_dim, "REL": rel, "EXTENT": extent,
        "WINDOW": window or 0, "PAGE": kv_BKNC.shape[2], "PADDING": padding,
    }  # fmt: skip
    if tiles.specialized:
        assert ready and not exact and (*tiles[:3], head_dim) == (64, 2, 64, 128)
        gluon_prefill.prefill_kernel[(min(programs, _multiprocessors(q_TC.device)),)](
            *rows, *step, *strides, **sizes, **REGISTERS, STAGES=tiles.stages, LAZY=tiles.lazy, HELD=tiles.held,
            TURNS=tiles.turns, num_warps=4,
        )  # fmt: skip
        return out_TC
    ring = ring_sizes(tiles, exact)
    ring_elements = 0 if ring["SHARED"] else programs * tiles.positions * tiles.packed * ring["PITCH"]
    alpha, floor = log_scaling or (0.0, 1)
    _prefill_kernel[(programs,)](
        *rows, q_scale_ND, r_scale_NM, *step, q_clip, r_clip, alpha, float(floor), *strides,
        table.new_empty(ring_elements), **sizes, **ring,
        LOG_SCALING=log_scaling is not None and q_scale_ND is not None,
        # With the ring in global memory a pipeline of loads would read biases before they are there.
        num_warps=tiles.warps, num_stages=tiles.stages if ring["SHARED"] else 1,
    )  # fmt: skip
    return out_TC


def _is_prepared(
    q_TC: torch.Tensor,
    r_TC: torch.Tensor,
    gate_TC: torch.Tensor,
    kv_BKNC: torch.Tensor,
    q_scale_ND: torch.Tensor | None,
    r_scale_NM: torch.Tensor | None,
) -> bool:
    """Whether products can take rows as they are, all copied 16 bytes at a time."""
    dtypes = ((q_TC, kv_BKNC.dtype), (r_TC, torch.float16), (gate_TC, kv_BKNC.dtype), (kv_BKNC, kv_BKNC.dtype))
    copied = (
        x.dtype == dtype and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
        for x, dtype in dtypes
    )  # fmt: skip
    return q_scale_ND is None and r_scale_NM is None and all(copied)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 5


@cache
def _is_hopper(device: torch.device) -> bool:
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _check(kv_BKNC: torch.Tensor, head_dim: int, rel: int, window: int | None) -> None:
    page = kv_BKNC.shape[2]
    for name, value, allowed in (
        ("head_dim", head_dim, (16, 32, 64, 128, 256)),
        ("d_rel", rel, (16, 32, 64)),
        ("tokens per block", page, tuple(1 << bit for bit in range(16))),
        ("dtype of keys and values", kv_BKNC.dtype, (torch.float32, torch.bfloat16, torch.float16)),
    ):
        if value not in allowed:
            choices = ", ".join(str(choice).removeprefix("torch.") for choice in allowed)
            raise ValueError(f"{name} must be one of {choices} for attention on a GPU; got {value}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 for attention on a GPU; got {window}.")


@triton.jit(do_not_specialize=gluon_items.NOT_CONSTANT, do_not_specialize_on_alignment=gluon_items.ANYWHERE)
def _prefill_kernel(
    q, r, sink, gate, kv, out, q_scale, r_scale, table, query_start, seq_lens, block_table,
    requests, num_rows, q_clip, r_clip, alpha, floor,
    stride_q, stride_r, stride_sink, stride_gate, stride_out, stride_block, stride_head, stride_token, stride_table,
    scratch, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, REL: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, LOG_SCALING: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr,
    KEYS: tl.constexpr, RING: tl.constexpr, PITCH: tl.constexpr, PADDING: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = POSITIONS * PACKED
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = item // (HEADS // PACKED)
    request = _request_of(query_start, requests, tile, POSITIONS)
    start = tl.load(query_start + request)
    first = (tile - start // POSITIONS - request) * POSITIONS
    end = num_rows
    if request < requests:
        end = tl.load(query_start + request + 1)
    i = tl.arange(0, ROWS) % POSITIONS
    head = (item % (HEADS // PACKED)) * PACKED + tl.arange(0, ROWS) // POSITIONS
    row = (start + first + i).to(tl.int64)
    live = start + first + i < end
    column = tl.arange(0, DIM)
    place = out + row[:, None] * stride_out + head[:, None] * DIM + column[None, :]
    if request == requests:  # rows of no request
        tl.store(place, tl.zeros([ROWS, DIM], out.dtype.element_ty), mask=live[:, None])
    elif start + first < end:
        length = tl.load(seq_lens + request)
        p0 = length - (end - start) + first
        # Of queries and mixtures that come raw, see `rollout.kernels.units`.
        log2_e = tl.full([ROWS], LOG2_E, tl.float32)
        if LOG_SCALING:
            log2_e *= 1.0 + alpha * tl.log(tl.maximum((p0 + i + 1).to(tl.float32) / floor, 1.0))
        queries = _load_rows(q, q_scale, row, head, live, stride_q, q_clip, log2_e * DIM**-0.5, DIM)
        queries = queries.to(kv.dtype.element_ty)
        mixture = _load_rows(r, r_scale, row, head, live, stride_r, r_clip, log2_e, REL)
        mixture = _by_parity(mixture, i, REL).to(table.dtype.element_ty)
        ring = open_ring(scratch, tl.program_id(0), ROWS, PITCH, SHARED)
        keys = kv + ((item % (HEADS // PACKED)) * PACKED // GROUP).to(tl.int64) * stride_head
        acc, top, total = _all_tiles(
            queries, mixture, ring, table, keys, block_table + request * stride_table, p0,
            tl.minimum(p0 + POSITIONS, length), i, stride_block, stride_token, EXTENT, WINDOW, PAGE, KEYS, RING, PITCH,
            PADDING, PRECISION, SHARED,
        )  # fmt: skip
        # exp(sink) joins the denominator: the same as sigmoid(lse - sink) times the softmax.
        sinks = tl.load(sink + row * stride_sink + head, mask=live, other=0.0).to(tl.float32)
        total += tl.exp2(sinks * LOG2_E - top)
        gates = tl.load(gate + row[:, None] * stride_gate + head[:, None] * DIM + column[None, :], mask=live[:, None])
        acc = acc / total[:, None] * tl.sigmoid(gates.to(tl.float32))
        tl.store(place, acc.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _request_of(query_start, requests, tile, POSITIONS: tl.constexpr):
    """The request whose tiles include `tile`, or `requests` for rows of none.

    Request b's tiles begin at `query_start[b] // POSITIONS + b`: far enough apart for all its rows, and known without
    counting the tiles of the requests before it.
    """
    low, high = requests * 0, requests
    while low < high:
        middle = (low + high + 1) // 2
        begun = tl.load(query_start + middle) // POSITIONS + middle <= tile
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return low


@triton.jit
def _load_rows(x, scale, row, head, live, stride, clip, factor, WIDTH: tl.constexpr):
    """Rows of `x` as float32 [ROWS, WIDTH]; where there is a `scale`, scaled, clipped and times `factor`."""
    column = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.load(x + row[:, None] * stride + column, mask=live[:, None], other=0.0).to(tl.float32)
    if scale is not None:
        rows = rows * tl.load(scale + column).to(tl.float32)
        norm = tl.sqrt(tl.sum(rows * rows, 1))
        rows = rows * (tl.minimum(clip / (norm + 1e-6), 1.0) * factor)[:, None]
    return rows


@triton.jit
def _by_parity(rows, i, WIDTH: tl.constexpr):
    """[ROWS, 2 WIDTH]: a row in the first half where its position `i` is even, else in the second; zeros elsewhere."""
    both = tl.reshape(tl.permute(tl.join(rows, rows), (0, 2, 1)), [rows.shape[0], 2 * WIDTH])
    half = tl.arange(0, 2 * WIDTH)[None, :] // WIDTH
    return tl.where(half == (i % 2)[:, None], both, 0.0)


@triton.jit
def _all_tiles(
    queries, mixture, ring, table, kv, pages, p0, end, i, stride_block, stride_token, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, RING: tl.constexpr, PITCH: tl.constexpr,
    PADDING: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Accumulated values, maxima and sums of the softmax over all keys that a row of the tile may see."""
    ROWS: tl.constexpr = queries.shape[0]
    rows, shift = ring_rows(ring, ROWS, PITCH, SHARED), i // 2 * 2
    visible = tl.maximum(p0 - WINDOW + 1, 0) if WINDOW else p0 * 0
    near = tl.maximum(tl.maximum(p0 - EXTENT + 1, 0), visible) // KEYS * KEYS
    state = (
        tl.zeros(queries.shape, tl.float32),
        tl.full([ROWS], -1e30, tl.float32),  # finite, so that a tile without a visible key changes nothing
        tl.zeros([ROWS], tl.float32),
    )
    if WINDOW == 0 or WINDOW > EXTENT:
        far = visible // KEYS * KEYS
        page = _pages_of(pages, far, visible, end, PAGE, KEYS)
        for first in tl.range(far, near, KEYS):
            k, v = _load_tile(
                kv, page, first, visible, end, stride_block, stride_token, queries.shape[1], PAGE, KEYS, WINDOW > 0
            )
            page = _pages_of(pages, first + KEYS, visible, end, PAGE, KEYS)
            scores = product(queries, tl.trans(k), None, PRECISION)
            if WINDOW:
                scores = _masked(scores, first, p0, i, WINDOW, KEYS)
            state = _accumulate(state, scores, v, PRECISION)
    for back in tl.static_range(RING // 2, -KEYS, -KEYS):
        fill_ring(rows, mixture, table, near - back, p0, EXTENT, PADDING, KEYS, RING, PRECISION, SHARED)
    page = _pages_of(pages, near, visible, end, PAGE, KEYS)
    for first in tl.range(near, end, KEYS):
        k, v = _load_tile(kv, page, first, visible, end, stride_block, stride_token, queries.shape[1], PAGE, KEYS, True)
        page = _pages_of(pages, first + KEYS, visible, end, PAGE, KEYS)
        bias = read_ring(rows, shift, state[1], first, KEYS, RING, SHARED)
        scores = product(queries, tl.trans(k), bias.to(tl.float32), PRECISION)
        # The next tile's biases, now: moving them fills gaps of the softmax, and this tile's were read while the matrix
        # unit still multiplied the values of the tile before.
        fill_ring(rows, mixture, table, first + KEYS, p0, EXTENT, PADDING, KEYS, RING, PRECISION, SHARED)
        if (first + KEYS > p0 + 1) | (first < end - WINDOW if WINDOW else False):
            scores = _masked(scores, unmoved(first, SHARED), p0, i, WINDOW, KEYS)
        state = _accumulate(state, scores, v, PRECISION)
    return state


@triton.jit
def _pages_of(pages, first, visible, end, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Entries of the block table for positions `first` to `first + KEYS - 1`: one, or one for each position.

    Loaded a tile ahead: Triton would make the pipeline of keys and values half as deep for a load that they wait for.
    """
    if PAGE >= KEYS:
        return tl.load(pages + first // PAGE, mask=first < end, other=0)
    else:
        n = first + tl.arange(0, KEYS)
        return tl.load(pages + n.to(tl.uint32) // PAGE, mask=(n >= visible) & (n < end), other=0)


@triton.jit
def _load_tile(
    kv, page, first, visible, end, stride_block, stride_token, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys and values of positions `first` to `first + KEYS - 1`, [KEYS, DIM] each.

    With EDGE, positions before `visible` and from `end` on are zeros and not read.
    """
    n = first + tl.arange(0, KEYS)
    token = page.to(tl.int64) * stride_block + (n & (PAGE - 1)) * stride_token
    place = kv + token[:, None] + tl.arange(0, DIM)[None, :]
    if EDGE:
        inside = ((n >= visible) & (n < end))[:, None]
        return tl.load(place, mask=inside, other=0.0), tl.load(place + DIM, mask=inside, other=0.0)
    else:
        return tl.load(place), tl.load(place + DIM)


@triton.jit
def _masked(scores, first, p0, i, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    distance = (p0 + i)[:, None] - (first + tl.arange(0, KEYS))[None, :]
    hidden = distance < 0
    if WINDOW:
        hidden = hidden | (distance >= WINDOW)
    return tl.where(hidden, float("-inf"), scores)


@triton.jit
def _accumulate(state, scores, v, PRECISION: tl.constexpr):
    """One step of the online softmax; `state` is (values, maximum, sum) of each row."""
    acc, top, total = state
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    acc = product(weights.to(v.dtype), v, acc * decay[:, None], PRECISION)
    return acc, new_top, total
