"""Prefill attention for Hopper, in Gluon: loads, products and softmax at the same time, in programs of many tiles.

Not an operator of its own: `rollout.kernels.triton_prefill.attention` launches it where `Tiles.specialized` is set, for
rows as an engine has them (`_is_prepared` there), and the kernel there computes the same for everything else. What
Triton cannot express is the order: there a warpgroup waits for the product with the keys before its softmax, and gives
the matrix unit nothing to do meanwhile. Here every multiprocessor has one program, which takes items in turn; an item
is 64 positions and two heads of one key/value head.

- two warpgroups, one head each, compute (`rollout.kernels.gluon_softmax`). They share nothing but what is loaded, so
  that one computes exponentials while the other multiplies; with TURNS they issue their products in turn.
- a third warpgroup loads keys, values and profiles, up to `STAGES` tiles ahead, and needs few registers. It goes from
  the last keys of an item straight to the first of the next one. It also loads queries and `r`, which the products take
  as they are, and gates near the end. It waits for the memory of the queries only after two tiles of keys and values,
  which so arrive while the item before ends. What is loaded and what is free again is said by barriers in shared
  memory; no barrier of the whole program is met in a loop. What an item is, this warpgroup finds out and leaves there.
- with HELD queries stay in registers, as the product's left operand. A product of 64 x 64 x 16 takes 32 cycles of the
  matrix unit and, with both operands from shared memory, as many of that: 256 of 1,500 cycles per tile.
- results go out through the memory of the gates, 128 bytes of a row at a time instead of 16.

Per tile of 128 rows and 64 keys: 1,152 cycles of the matrix unit; of each scheduler 2 x 376 instructions for the
computing warps and 115 to 150 for the loading one; 544 cycles of exponentials; 36 KiB from L2, at 24 bytes per cycle
1,540. Starting and ending a program would cost 14,000 to 19,000 cycles that nothing hides, beside 33,000 of work at a
window of 1024.

Items are dealt out by a rule, without a counter in memory: the longest first, to the programs from first to last and
then from last to first, so that the sums of two rounds agree. Keys outside of what an item's rows see are read as the
nearest one inside instead of as zeros: their weight is 0, and pages that were given back are not touched.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from rollout.kernels.gluon_items import (
    ANYWHERE,
    NARROW,
    NOT_CONSTANT,
    WIDE,
    advanced,
    inside_of,
    key_range,
    load_profiles,
    pages_of,
    request_of,
    write_zeros,
)
from rollout.kernels.gluon_ring import (
    KEYS,
    OPEN,
    RING_BYTES,
    ROWS,
    TURNS_AT,
    arrive,
    loaded,
    open_barriers,
    open_turns,
    position,
    ring_places,
    wait,
)
from rollout.kernels.gluon_softmax import MIXTURE, VALUES, first_biases, first_state, gated, over_all_tiles

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
PROFILES = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
PUT = gl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
TAKE = gl.constexpr("ld.shared.b32 $0, [$1];")


@gluon.jit(do_not_specialize=NOT_CONSTANT, do_not_specialize_on_alignment=ANYWHERE)
def prefill_kernel(
    q, r, sink, gate, kv, out, table, query_start, seq_lens, block_table, requests, num_rows,
    stride_q, stride_r, stride_sink, stride_gate, stride_out, stride_block, stride_head, stride_token, stride_table,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, REL: gl.constexpr, EXTENT: gl.constexpr,
    WINDOW: gl.constexpr, PAGE: gl.constexpr, PADDING: gl.constexpr, STAGES: gl.constexpr, LAZY: gl.constexpr,
    HELD: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, LOADING: gl.constexpr,
):  # fmt: skip
    items = _tiles_used(query_start, requests, num_rows) * (HEADS // 2)
    queue = (query_start, seq_lens, requests, num_rows, items, gl.program_id(0), gl.num_programs(0))
    q_s = gl.allocate_shared_memory(kv.dtype.element_ty, [2, ROWS, DIM], TILE)
    g_s = gl.allocate_shared_memory(kv.dtype.element_ty, [2, ROWS, DIM], TILE)
    kv_s = gl.allocate_shared_memory(kv.dtype.element_ty, [2 * STAGES, KEYS, DIM], TILE)
    t_s = gl.allocate_shared_memory(gl.float16, [STAGES + 2, KEYS, 2 * REL], PROFILES)
    r_s = gl.allocate_shared_memory(gl.float16, [2, ROWS, 2 * REL], PROFILES)
    ring = gl.inline_asm_elementwise(OPEN, "=r,r", [items], dtype=gl.int32, is_pure=False, pack=1)
    open_barriers(ring + RING_BYTES, 4 * STAGES + 10)
    open_turns(ring)
    sinks, results = (sink, stride_sink), (out, stride_out)
    rows = (q, stride_q, r, stride_r, gate, stride_gate)
    pool = (kv, block_table, table, stride_block, stride_head, stride_token, stride_table)
    gl.warp_specialize(
        [
            (_attend, (sinks, results, q_s.index(0), g_s.index(0), r_s.index(0), kv_s, t_s, ring, 0, DIM, REL, EXTENT,
                       WINDOW, STAGES, LAZY, HELD, TURNS)),
            (_attend, (sinks, results, q_s.index(1), g_s.index(1), r_s.index(1), kv_s, t_s, ring, 1, DIM, REL, EXTENT,
                       WINDOW, STAGES, LAZY, HELD, TURNS)),
            (_fetch, (queue, rows, pool, q_s, g_s, r_s, kv_s, t_s, ring, HEADS, GROUP, DIM, REL, EXTENT, WINDOW, PAGE,
                      PADDING, STAGES)),
        ],
        [4, 4], [REGISTERS, LOADING],
    )  # fmt: skip


@gluon.jit
def _bars(ring, STAGES: gl.constexpr):
    """Addresses of the barriers: of keys and values, and of first profiles, queries and gates."""
    first = ring + (RING_BYTES + 32)
    later = first + 32 * STAGES
    return first, first + 16 * STAGES, later, later + 16, later + 32


@gluon.jit
def _item_bar(ring, number):
    """What computing warpgroups know of an item lies in one of two places: they have no registers left for it."""
    return ring + RING_BYTES + (number & 1) * 16


@gluon.jit
def _word(ring, number, WORD: gl.constexpr):
    """First row, rows that are there, position of the first, where keys end (or -1: no request), head."""
    at = ring + RING_BYTES + 960 + (number & 1) * 32 + 4 * WORD
    return gl.inline_asm_elementwise(TAKE, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _told(ring, number, WORD: gl.constexpr):
    wait(_item_bar(ring, number), number // 2 % 2)
    return _word(ring, number, WORD)


@gluon.jit
def _tell(ring, number, words):
    bar = _item_bar(ring, number)
    wait(bar + 8, number // 2 % 2 ^ 1)
    for n in gl.static_range(5):
        at = ring + RING_BYTES + 960 + (number & 1) * 32 + 4 * n
        gl.inline_asm_elementwise(PUT, "=r,r,r", [at, words[n]], dtype=gl.int32, is_pure=False, pack=1)
    arrive(bar, 32)  # every thread, of which each has written


@gluon.jit
def _tiles_used(query_start, requests, num_rows):
    """Numbers of tiles end here; those before may include some without rows, at most one of each request."""
    begun = gl.load(query_start + requests)
    used = begun // ROWS + requests + (num_rows - begun + ROWS - 1) // ROWS
    if (begun == num_rows) & (requests > 0):  # no rows without a request
        last = gl.load(query_start + (requests - 1))
        used = last // ROWS + requests - 1 + (begun - last + ROWS - 1) // ROWS
    return used


@gluon.jit
def _item(queue, turn, HEADS: gl.constexpr):
    """First row, rows that are there (or none), position of the first, where keys end (or -1), request, head."""
    query_start, seq_lens, requests, num_rows, items, program, programs = queue
    n = turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)
    item = gl.maximum(items - 1 - n, 0)
    tile = item // (HEADS // 2)
    request = request_of(query_start, requests, tile, ROWS)
    start = gl.load(query_start + request)
    first = (tile - start // ROWS - request) * ROWS
    end, last, p0 = num_rows, num_rows * 0 - 1, num_rows * 0
    if request < requests:
        end = gl.load(query_start + request + 1)
        length = gl.load(seq_lens + request)
        p0 = length - (end - start) + first
        last = gl.minimum(p0 + ROWS, length)
    live = gl.where(n < items, end - start - first, 0)
    return start + first, live, p0, last, request, (item % (HEADS // 2)) * 2


@gluon.jit
def _fetch(
    queue, rows, pool, q_s, g_s, r_s, kv_s, t_s, ring, HEADS: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, REL: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr,
    PADDING: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load everything for all items, one after the other, as memory becomes free."""
    zero = ring * 0
    slot, phase, turned, number = zero, zero + 1, zero + 1, zero
    for turn in range(0, (queue[4] + queue[6] - 1) // queue[6]):
        item = _item(queue, turn, HEADS)
        row, live, p0, end, _, head = item
        if live > 0:
            _tell(ring, number, (row, live, p0, end, head))
            number = number + 1
            if end >= 0:
                slot, phase = _fetch_item(
                    item, rows, pool, q_s, g_s, r_s, kv_s, t_s, ring, slot, phase, turned, GROUP, DIM, REL, EXTENT,
                    WINDOW, PAGE, PADDING, STAGES,
                )  # fmt: skip
                turned = turned ^ 1
    _tell(ring, number, (zero, zero, zero, zero, zero))


@gluon.jit
def _fetch_item(
    item, rows, pool, q_s, g_s, r_s, kv_s, t_s, ring, slot, phase, turned, GROUP: gl.constexpr, DIM: gl.constexpr,
    REL: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, PADDING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Queries after the second tile (or the only one), whose memory is free earlier. Gates after the last."""
    row, live, p0, end, request, head = item
    kv, block_table, table, stride_block, stride_head, stride_token, stride_table = pool
    q, stride_q, r, stride_r, gate, stride_gate = rows
    k_bars, v_bars, t_bar, q_bar, g_bar = _bars(ring, STAGES)
    visible, far, near, end = key_range(p0, end, EXTENT, WINDOW)
    second = gl.where(far + KEYS < end, far + KEYS, far)
    keys, pages = kv + (head // GROUP).to(gl.int64) * stride_head, block_table + request * stride_table
    entry = table + (EXTENT + PADDING - p0) * (2 * REL)
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    page = pages_of(pages, far, visible, end, PAGE)
    wait(t_bar + 8, turned)
    for back in gl.static_range(2):
        load_profiles(t_s.index(STAGES + back), entry, near - KEYS + KEYS * back, REL)
    loaded(t_bar)
    for first in range(far, end, KEYS):
        token = page.to(gl.int64) * stride_block + (inside_of(first, visible, end) & (PAGE - 1)) * stride_token
        source = keys + token[:, None] + channel[None, :]
        page = pages_of(pages, first + KEYS, visible, end, PAGE)
        wait(k_bars + 16 * slot + 8, phase)
        async_copy.async_copy_global_to_shared(kv_s.index(slot), source)
        if first >= near:
            load_profiles(t_s.index(slot), entry, first + KEYS, REL)
        loaded(k_bars + 16 * slot)
        wait(v_bars + 16 * slot + 8, phase)
        async_copy.async_copy_global_to_shared(kv_s.index(STAGES + slot), source + DIM)
        loaded(v_bars + 16 * slot)
        if first == second:
            wait(q_bar + 8, turned)
            _copy_rows(q_s, q, stride_q, row, live, head, DIM)
            _copy_mixture(r_s, r, stride_r, row, live, head, REL)
            loaded(q_bar)
        if first + KEYS >= end:
            wait(g_bar + 8, turned)
            _copy_rows(g_s, gate, stride_gate, row, live, head, DIM)
            loaded(g_bar)
        slot, phase = advanced(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _copy_rows(rows_s, x, stride, row, live, head, DIM: gl.constexpr):
    """Both heads' channels; rows that are not there are read as the last one that is."""
    i = gl.minimum(position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))), live - 1)
    channel = head * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    source = x + (row + i).to(gl.int64)[:, None] * stride + channel[None, :]
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(rows_s.index(half), source + half * DIM)


@gluon.jit
def _copy_mixture(r_s, r, stride, row, live, head, REL: gl.constexpr):
    """Both heads' `r`, twice beside each other; what a row's parity hides is made zero later."""
    j = gl.minimum(position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, NARROW))), live - 1)
    part = head * REL + gl.arange(0, 2 * REL, layout=gl.SliceLayout(0, NARROW)) % REL
    source = r + (row + j).to(gl.int64)[:, None] * stride + part[None, :]
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(r_s.index(half), source + half * REL)


@gluon.jit
def _attend(
    sinks, results, q_s, g_s, r_s, kv_s, t_s, ring, SECOND: gl.constexpr, DIM: gl.constexpr, REL: gl.constexpr,
    EXTENT: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, LAZY: gl.constexpr, HELD: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """One head of all items, by one warpgroup."""
    number = ring * 0
    places, turned = (number, number, number, number, number), number
    write_at, read_at = ring_places(ring + RING_BYTES // 2 * SECOND)
    live = _told(ring, number, 1)
    while live > 0:
        if _word(ring, number, 3) >= 0:
            places = _attend_item(
                number, sinks, results, q_s, g_s, r_s, kv_s, t_s, ring, write_at, read_at, places, turned, SECOND, DIM,
                REL, EXTENT, WINDOW, STAGES, LAZY, HELD, TURNS,
            )  # fmt: skip
            turned = turned ^ 1
        elif SECOND == 0:
            out, stride_out = results
            row, head = _word(ring, number, 0), _word(ring, number, 4)
            write_zeros(out + row.to(gl.int64) * stride_out + head * DIM, live, stride_out, DIM)
        arrive(_item_bar(ring, number) + 8, 1)
        number = number + 1
        live = _told(ring, number, 1)


@gluon.jit
def _attend_item(
    number, sinks, results, q_s, g_s, r_s, kv_s, t_s, ring, write_at, read_at, places, turned, SECOND: gl.constexpr,
    DIM: gl.constexpr, REL: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    LAZY: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    k_bars, v_bars, t_bar, q_bar, g_bar = _bars(ring, STAGES)
    row, live, head = _word(ring, number, 0), _word(ring, number, 1), _word(ring, number, 4) + SECOND
    first = first_state(sinks, row, live, head, kv_s.dtype, DIM)
    p0 = _word(ring, number, 2)
    _, far, near, end = key_range(p0, _word(ring, number, 3), EXTENT, WINDOW)
    wait(q_bar, turned)
    mixture = _by_parity(r_s, REL)
    wait(t_bar, turned)
    first_biases(mixture, t_s, write_at, near, STAGES)
    arrive(t_bar + 8, 1)
    if HELD:
        left = q_s.load(MIXTURE)
        arrive(q_bar + 8, 1)
    else:
        left = q_s
    operands = (left, mixture, kv_s, t_s, k_bars, ring + TURNS_AT, read_at, write_at)
    state, odd = over_all_tiles(
        first, places, operands, p0, far, near, end, SECOND, EXTENT, WINDOW, STAGES, LAZY, TURNS
    )  # fmt: skip
    if not HELD:
        arrive(q_bar + 8, 1)
    row, live, head = _word(ring, number, 0), _word(ring, number, 1), _word(ring, number, 4) + SECOND
    v_slot, v_phase = _finish(state, results, (row, live, head), g_s, kv_s, v_bars, g_bar, turned, DIM, STAGES)
    return state[4], state[5], v_slot, v_phase, odd


@gluon.jit
def _by_parity(r_s, REL: gl.constexpr):
    """`r` [ROWS, 2 M], of which each row keeps the half of its position's parity (`triton_bias`)."""
    i = position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, MIXTURE)))
    part = gl.arange(0, 2 * REL, layout=gl.SliceLayout(0, MIXTURE))
    mixture = r_s.load(MIXTURE)
    return gl.where((part // REL)[None, :] == (i % 2)[:, None], mixture, gl.zeros_like(mixture))


@gluon.jit
def _finish(
    state, results, rows, g_s, kv_s, v_bars, g_bar, turned, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The last tile's values, the gate, and out. Back come the next slot of values and its phase."""
    acc, _, total, weights, _, _, v_slot, v_phase = state
    out, stride_out = results
    row, live, head = rows
    wait(v_bars + 16 * v_slot, v_phase)
    token = warpgroup_mma(weights, kv_s.index(STAGES + v_slot), acc, is_async=True)
    wait(g_bar, turned)
    acc = gated(token, total, g_s.load(VALUES)).to(out.dtype.element_ty)
    arrive(v_bars + 16 * v_slot + 8, 1)
    v_slot, v_phase = advanced(v_slot, v_phase, STAGES)
    if out.dtype.element_ty == g_s.dtype:
        g_s.store(acc)
        _write(out, stride_out, row, live, head, g_s.load(WIDE), WIDE, DIM)
    else:
        _write(out, stride_out, row, live, head, acc, VALUES, DIM)
    arrive(g_bar + 8, 1)
    return v_slot, v_phase


@gluon.jit
def _write(out, stride, row, live, head, values, LAYOUT: gl.constexpr, DIM: gl.constexpr):
    i = position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))
    channel = head * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    place = out + (row + i).to(gl.int64)[:, None] * stride + channel[None, :]
    gl.store(place, values, mask=(i < live)[:, None])
