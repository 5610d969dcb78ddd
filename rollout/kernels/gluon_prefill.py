"""Prefill attention for Hopper's matrix unit, in Gluon: loads, products and softmax at the same time.

Not an operator of its own: `rollout.kernels.triton_prefill.attention` launches it where `Tiles.specialized` is set, and
the kernel there computes the same for every other device, dtype and head size. What Triton cannot express is the order:
there a warpgroup waits for the product with the keys before its softmax, and gives the matrix unit nothing to do
meanwhile. Here, per program of 64 positions and two heads of one key/value head:

- two warpgroups, one head each, compute. They issue the product with the keys of tile n, the biases of tile n + 1 and
  the product of the *weights of tile n - 1* with their values, and do the softmax of tile n while the last one runs.
  They share nothing but what is loaded, so that one computes exponentials while the other multiplies.
- a third warpgroup loads keys, values and profiles, up to `STAGES` tiles ahead, and needs few registers. What is loaded
  and what is free again is said by barriers in shared memory; no barrier of the whole program is met in the loop.

Per tile of 128 rows and 64 keys: 1,152 cycles of the matrix unit; of each scheduler 2 x 376 instructions for the
computing warps and 115 to 150 for the loading one; 544 cycles of exponentials; 36 KiB from L2, at 24 bytes per cycle
1,540. The bias is that of `rollout.kernels.triton_bias`, with the ring of `rollout.kernels.gluon_ring`.

With HELD, queries stay in registers: the matrix unit then reads only keys from shared memory, which has 1,500 cycles of
other work per tile, 256 of them for queries.

The maximum of the softmax follows only when it falls behind by more than 8 (a factor of 256, which float32 sums and
bfloat16 weights bear without loss): accumulators are scaled by a warp only where one of its rows has moved. A row that
has not moved is scaled by exactly 1, so that no row depends on its neighbours.

Keys outside of what the tile's rows see are read as the nearest one inside instead of as zeros: their weight is 0, and
pages that were given back are not touched.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rollout.kernels.gluon_items import (
    ANYWHERE,
    LOG2_E,
    NARROW,
    NOT_CONSTANT,
    WIDE,
    advanced,
    inside_of,
    key_range,
    load_profiles,
    pages_of,
    prepared,
    request_of,
    write_zeros,
)
from rollout.kernels.gluon_ring import (
    BY_SCORE,
    KEYS,
    OPEN,
    RING_BYTES,
    ROWS,
    SCORES,
    TURNS_AT,
    arrive,
    loaded,
    open_barriers,
    open_turns,
    position,
    read_ring,
    ring_places,
    wait,
    write_ring,
)

SLACK = gl.constexpr(8.0)
UNMOVED = gl.constexpr("mov.b32 $0, $1;")

VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
MIXTURE = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
BY_VALUE = gl.constexpr(gl.SliceLayout(1, VALUES.value))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
PROFILES = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))

# All 64 accumulators of a thread, scaled in place unless all rows of the warp have a factor of 1.
SCALE = gl.constexpr(
    "{ .reg .pred p; setp.neu.f32 p, $128, 0f3F800000; setp.neu.or.f32 p, $130, 0f3F800000, p;"
    " vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEEP; "
    + " ".join(f"mul.f32 ${n}, ${n}, ${128 + n % 4 // 2 * 2};" for n in range(64))
    + " KEEP: }"
)
# Gates of two neighbouring channels through the sigmoid, with one reciprocal for both: of the product of 1 + e^-x.
# Below -43 a gate counts as -43, or products would leave the range.
SIGMOID = gl.constexpr(
    "{ .reg .f32 a, b, c; mul.f32 a, $2, 0fBFB8AA3B; mul.f32 b, $3, 0fBFB8AA3B;"
    " min.f32 a, a, 0f427C0000; min.f32 b, b, 0f427C0000; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b;"
    " add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; mul.f32 c, a, b; rcp.approx.ftz.f32 c, c;"
    " mul.f32 $0, c, b; mul.f32 $1, c, a; }"
)
IN_PLACE = gl.constexpr(",".join(["=f"] * 64 + [str(n) for n in range(64)] + ["f"] * 64))


@gluon.jit(do_not_specialize=NOT_CONSTANT, do_not_specialize_on_alignment=ANYWHERE)
def prefill_kernel(
    q, r, sink, gate, kv, out, q_scale, r_scale, table, query_start, seq_lens, block_table,
    requests, num_rows, q_clip, r_clip, alpha, floor,
    stride_q, stride_r, stride_sink, stride_gate, stride_out, stride_block, stride_head, stride_token, stride_table,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, REL: gl.constexpr, EXTENT: gl.constexpr,
    WINDOW: gl.constexpr, PAGE: gl.constexpr, LOG_SCALING: gl.constexpr, PADDING: gl.constexpr,
    STAGES: gl.constexpr, LAZY: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    item = gl.num_programs(0) - 1 - gl.program_id(0)
    tile = item // (HEADS // 2)
    head = (item % (HEADS // 2)) * 2
    request = request_of(query_start, requests, tile, ROWS)
    start = gl.load(query_start + request)
    first = (tile - start // ROWS - request) * ROWS
    row = start + first
    end = num_rows
    if request < requests:
        end = gl.load(query_start + request + 1)
    if row < end:
        if request == requests:  # rows of no request
            write_zeros(out + row.to(gl.int64) * stride_out + head * DIM, end - row, stride_out, DIM)
        else:
            length = gl.load(seq_lens + request)
            p0 = length - (end - start) + first
            q_s = gl.allocate_shared_memory(kv.dtype.element_ty, [2, ROWS, DIM], TILE)
            kv_s = gl.allocate_shared_memory(kv.dtype.element_ty, [2 * STAGES, KEYS, DIM], TILE)
            t_s = gl.allocate_shared_memory(gl.float16, [STAGES + 2, KEYS, 2 * REL], PROFILES)
            ring = gl.inline_asm_elementwise(OPEN, "=r,r", [item], dtype=gl.int32, is_pure=False, pack=1)
            bars = open_barriers(ring + RING_BYTES, STAGES, 1)
            open_turns(ring)
            keys = kv + (head // GROUP).to(gl.int64) * stride_head
            tiles = key_range(p0, gl.minimum(p0 + ROWS, length), EXTENT, WINDOW)
            rows = (row, end - row, p0)
            queries = (q, stride_q, q_scale, q_clip, r, stride_r, r_scale, r_clip, alpha, floor)
            results = (gate, stride_gate, out, stride_out)
            sinks = (sink, stride_sink)
            gl.warp_specialize(
                [
                    (_attend, (rows, queries, sinks, results, tiles, head, q_s.index(0), kv_s, t_s, bars, ring, 0,
                               DIM, REL, EXTENT, WINDOW, LOG_SCALING, STAGES, LAZY, HELD, TURNS)),
                    (_attend, (rows, queries, sinks, results, tiles, head + 1, q_s.index(1), kv_s, t_s, bars, ring, 1,
                               DIM, REL, EXTENT, WINDOW, LOG_SCALING, STAGES, LAZY, HELD, TURNS)),
                    (_fetch, (keys, block_table + request * stride_table, table, p0, tiles, kv_s, t_s, bars,
                              stride_block, stride_token, DIM, REL, EXTENT, PAGE, PADDING, STAGES)),
                ],
                [4, 4], [REGISTERS, 64],
            )  # fmt: skip


@gluon.jit
def _fetch(
    keys, pages, table, p0, tiles, kv_s, t_s, bars, stride_block, stride_token, DIM: gl.constexpr,
    REL: gl.constexpr, EXTENT: gl.constexpr, PAGE: gl.constexpr, PADDING: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load keys, values and profiles into the stages, as they become free."""
    visible, far, near, end = tiles
    k_bars, v_bars, t_bar = bars
    entry = table + (EXTENT + PADDING - p0) * (2 * REL)
    for back in gl.static_range(2):
        load_profiles(t_s.index(STAGES + back), entry, near - KEYS + KEYS * back, REL)
    loaded(t_bar)
    slot, phase = far * 0, far * 0 + 1
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    page = pages_of(pages, far, visible, end, PAGE)
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
        slot, phase = advanced(slot, phase, STAGES)


@gluon.jit
def _attend(
    rows, queries, sinks, results, tiles, head, q_s, kv_s, t_s, bars, ring, SECOND: gl.constexpr, DIM: gl.constexpr,
    REL: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, LOG_SCALING: gl.constexpr, STAGES: gl.constexpr,
    LAZY: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One head of all positions, by one warpgroup."""
    _, far, near, end = tiles
    k_bars, v_bars, t_bar = bars
    row, live, p0 = rows
    first = first_state(sinks, row, live, head, kv_s.dtype, DIM)
    mixture = _queries(queries, rows, head, q_s, DIM, REL, LOG_SCALING)
    write_at, read_at = ring_places(ring + RING_BYTES // 2 * SECOND)
    wait(t_bar, 0)
    first_biases(mixture, t_s, write_at, near, STAGES)
    if HELD:
        left = q_s.load(MIXTURE)
    else:
        left = q_s
    operands = (left, mixture, kv_s, t_s, k_bars, ring + TURNS_AT, read_at, write_at)
    zero = far * 0
    places = (zero, zero, zero, zero, zero)
    state, _ = over_all_tiles(
        first, places, operands, p0, far, near, end, SECOND, EXTENT, WINDOW, STAGES, LAZY, TURNS
    )  # fmt: skip
    _finish(state, results, rows, head, kv_s, v_bars, DIM, STAGES)


@gluon.jit
def first_state(sinks, row, live, head, dtype: gl.constexpr, DIM: gl.constexpr):
    """Values, reference, sum and weights of a softmax that has seen the sink only, as a key whose value is zero.

    So the sink, in the denominator of everything, needs nothing at the end.
    """
    sink, stride_sink = sinks
    i = position(gl.arange(0, ROWS, layout=BY_SCORE))
    place = sink + (row + i).to(gl.int64) * stride_sink + head
    top = gl.load(place, mask=i < live, other=0.0).to(gl.float32) * LOG2_E
    return (
        gl.full([ROWS, DIM], 0.0, gl.float32, VALUES),
        top,
        gl.full([ROWS], 1.0, gl.float32, BY_SCORE),
        gl.full([ROWS, KEYS], 0.0, dtype, WEIGHTS),
    )


@gluon.jit
def first_biases(mixture, t_s, write_at, near, STAGES: gl.constexpr):
    """What the first tile reads of the ring but no tile before it has written."""
    bias = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    profiles = t_s.index(STAGES).permute((1, 0))
    earlier = warpgroup_mma(mixture, profiles, bias, use_acc=False, is_async=True)
    profiles = t_s.index(STAGES + 1).permute((1, 0))
    later = warpgroup_mma(mixture, profiles, bias, use_acc=False, is_async=True)
    earlier, later = warpgroup_mma_wait(0, [earlier, later])
    write_ring(write_at, earlier, (near & KEYS) * 2 ^ 128)
    write_ring(write_at, later, (near & KEYS) * 2)


@gluon.jit
def over_all_tiles(
    first, places, operands, p0, far, near, end, SECOND: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, LAZY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The softmax over all tiles of a program, from `first_state`; and `places`, in and out.

    Those are slot and phase of keys and of values, and 64 or 0: whether an odd number of tiles has been computed.
    """
    left, mixture, kv_s, t_s, bars, turns, read_at, write_at = operands
    i = position(gl.arange(0, ROWS, layout=BY_SCORE))
    k_slot, k_phase, v_slot, v_phase, odd = places
    operands = (left, mixture, kv_s, t_s, bars, turns, read_at, write_at, p0 + i, far, (far ^ odd) & KEYS)
    state = (first[0], first[1], first[2], first[3], k_slot, k_phase, v_slot, v_phase)
    # From `inner` on no row's window begins; where that is two tiles wide, later keys come in other tiles.
    NARROW_WINDOW: gl.constexpr = WINDOW < 2 * KEYS
    if WINDOW == 0:
        state = over_tiles(state, far, near, operands, False, False, False, SECOND, WINDOW, STAGES, LAZY, TURNS)
    elif WINDOW > EXTENT:
        state = over_tiles(state, far, near, operands, False, NARROW_WINDOW, True, SECOND, WINDOW, STAGES, LAZY, TURNS)
    inner = near
    if WINDOW:
        inner = gl.minimum(gl.maximum((end - WINDOW + KEYS - 1) // KEYS * KEYS, near), end)
        state = over_tiles(state, near, inner, operands, True, NARROW_WINDOW, True, SECOND, WINDOW, STAGES, LAZY, TURNS)
    diagonal = gl.minimum(gl.maximum((p0 + 1) // KEYS * KEYS, inner), end)
    state = over_tiles(state, inner, diagonal, operands, True, False, False, SECOND, WINDOW, STAGES, LAZY, TURNS)
    state = over_tiles(state, diagonal, end, operands, True, True, False, SECOND, WINDOW, STAGES, LAZY, TURNS)
    return state, odd ^ ((end - far + KEYS - 1) & KEYS)


@gluon.jit
def _queries(queries, rows, head, q_s, DIM: gl.constexpr, REL: gl.constexpr, LOG_SCALING: gl.constexpr):
    """Queries into shared memory; `r` comes back, [ROWS, 2 M] by parity (`triton_bias`), as operand of a product."""
    row, live, p0 = rows
    q, stride_q, q_scale, q_clip, r, stride_r, r_scale, r_clip, alpha, floor = queries
    i = position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE)))
    j = position(gl.arange(0, ROWS, layout=gl.SliceLayout(1, NARROW)))
    channel = head * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    part = gl.arange(0, 2 * REL, layout=gl.SliceLayout(0, NARROW))
    own = (j < live)[:, None] & ((part // REL)[None, :] == (j % 2)[:, None])
    part = head * REL + part % REL
    q_rows = q + (row + i).to(gl.int64)[:, None] * stride_q
    r_rows = r + (row + j).to(gl.int64)[:, None] * stride_r
    wide = gl.load(q_rows + channel[None, :], mask=(i < live)[:, None], other=0.0).to(gl.float32)
    mixture = gl.load(r_rows + part[None, :], mask=own, other=0.0).to(gl.float32)
    wide = prepared(wide, q_scale, channel, q_clip, p0 + i, LOG2_E * DIM**-0.5, alpha, floor, LOG_SCALING)
    q_s.store(wide.to(q_s.dtype))
    fence_async_shared()
    mixture = prepared(mixture, r_scale, part, r_clip, p0 + j, LOG2_E, alpha, floor, LOG_SCALING)
    return gl.convert_layout(mixture.to(gl.float16), MIXTURE)


@gluon.jit
def over_tiles(
    state, low, high, operands, BIAS: gl.constexpr, LATER: gl.constexpr, BEFORE: gl.constexpr, SECOND: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, LAZY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The tiles from `low` to `high`; the weights of the last one are in `state`, not yet multiplied with values.

    LATER and BEFORE: whether there may be keys after a row's position, and before its window, which it does not see.
    Slots of keys and values, and their barriers, are numbered through: first all keys, then all values. Before a
    program's first tile weights are zeros. They are multiplied with that tile's keys, which are there, unlike values.
    """
    acc, top, total, weights, k_slot, k_phase, v_slot, v_phase = state
    left, mixture, kv_s, t_s, bars, turns, read_at, write_at, p, far, even = operands
    for first in range(low, high, KEYS):
        half = (first & KEYS) * 2
        scores = read_ring(read_at, half) if BIAS else gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
        wait(bars + 16 * k_slot, k_phase)
        if TURNS:
            wait(turns + 8 * SECOND, (first ^ even) // KEYS % 2 ^ (1 - SECOND))
        scores_token = warpgroup_mma(left, kv_s.index(k_slot).permute((1, 0)), scores, use_acc=BIAS, is_async=True)
        if BIAS:
            bias = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
            profiles = t_s.index(k_slot).permute((1, 0))
            bias_token = warpgroup_mma(mixture, profiles, bias, use_acc=False, is_async=True)
        is_later = first > far
        slot = gl.where(is_later, STAGES + v_slot, k_slot)
        wait(bars + 16 * slot, gl.where(is_later, v_phase, k_phase))
        acc_token = warpgroup_mma(weights, kv_s.index(slot), acc, is_async=True)
        if TURNS:
            arrive(turns + 8 - 8 * SECOND, 1)
        if BIAS:
            scores, bias = warpgroup_mma_wait(1, [scores_token, bias_token])
        else:
            scores = warpgroup_mma_wait(1, [scores_token])
        arrive(bars + 16 * k_slot + 8, is_later.to(gl.int32))
        k_slot, k_phase = advanced(k_slot, k_phase, STAGES)
        if BIAS:
            write_ring(write_at, bias, half ^ 128)
        scores = _masked(scores, first, p, LATER, BEFORE, WINDOW)
        scores, top, total, decay = _softmax(scores, top, total, LAZY)
        acc = warpgroup_mma_wait(0, [acc_token])
        arrive(bars + 16 * slot + 8, 1)
        next_slot, next_phase = advanced(v_slot, v_phase, STAGES)
        v_slot, v_phase = gl.where(is_later, next_slot, v_slot), gl.where(is_later, next_phase, v_phase)
        acc = _scaled(acc, decay, LAZY)
        weights = gl.convert_layout(scores.to(kv_s.dtype), WEIGHTS)
    return acc, top, total, weights, k_slot, k_phase, v_slot, v_phase


@gluon.jit
def _masked(scores, first, p, LATER: gl.constexpr, BEFORE: gl.constexpr, WINDOW: gl.constexpr):
    # From a position that the compiler may not compute ahead, or 16 registers would hold columns in all loops.
    first = gl.inline_asm_elementwise(UNMOVED, "=r,r", [first], dtype=gl.int32, is_pure=False, pack=1)
    key, p = (first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES)))[None, :], p[:, None]
    if LATER:
        scores = gl.where(key > p, float("-inf"), scores)
    if BEFORE:
        scores = gl.where(key <= p - WINDOW, float("-inf"), scores)
    return scores


@gluon.jit
def _softmax(scores, top, total, LAZY: gl.constexpr):
    """Weights, the new reference and sum of each row, and what the accumulated values are to be multiplied by."""
    highest = gl.max(scores, 1)
    if LAZY:
        new_top = gl.where(highest > top + SLACK, highest, top)
    else:
        new_top = gl.maximum(highest, top)
    weights = gl.exp2(scores - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _scaled(acc, decay, LAZY: gl.constexpr):
    factor = gl.convert_layout(decay, BY_VALUE, assert_trivial=True)[:, None]
    if LAZY:
        factor = gl.broadcast(factor, acc)[0]
        return gl.inline_asm_elementwise(SCALE, IN_PLACE, [acc, factor], dtype=gl.float32, is_pure=True, pack=64)
    else:
        return acc * factor


@gluon.jit
def gated(token, total, gates):
    """The values of a product that is under way over the sums of weights, times the sigmoid of the gates."""
    sigmoid = gl.inline_asm_elementwise(
        SIGMOID, "=f,=f,f,f", [gates.to(gl.float32)], dtype=gl.float32, is_pure=True, pack=2
    )  # fmt: skip
    inverse = gl.convert_layout(1.0 / total, BY_VALUE, assert_trivial=True)
    return warpgroup_mma_wait(0, [token]) * inverse[:, None] * sigmoid


@gluon.jit
def _finish(state, results, rows, head, kv_s, v_bars, DIM: gl.constexpr, STAGES: gl.constexpr):
    """The last tile's values, the gate, and out."""
    acc, _, total, weights, _, _, v_slot, v_phase = state
    gate, stride_gate, out, stride_out = results
    row, live, _ = rows
    i = position(gl.arange(0, ROWS, layout=BY_VALUE))
    at = (row + i).to(gl.int64)
    channel = head * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, VALUES))
    inside = (i < live)[:, None]
    gates = gl.load(gate + at[:, None] * stride_gate + channel[None, :], mask=inside, other=0.0)
    wait(v_bars + 16 * v_slot, v_phase)
    acc = gated(warpgroup_mma(weights, kv_s.index(STAGES + v_slot), acc, is_async=True), total, gates)
    gl.store(out + at[:, None] * stride_out + channel[None, :], acc.to(out.dtype.element_ty), mask=inside)
