"""Softmax over tiles of keys for Hopper's matrix unit, in Gluon: products and exponentials at the same time.

The arithmetic of `rollout.kernels.gluon_prefill`, which says who loads what and when; no kernel of its own. One
warpgroup computes one head of 64 positions. It issues the product with the keys of tile n, the biases of tile n + 1 and
the product of the *weights of tile n - 1* with their values, and does the softmax of tile n while the last one runs.
The bias is that of `rollout.kernels.triton_bias`, with the ring of `rollout.kernels.gluon_ring`.

The maximum of the softmax follows only when it falls behind by more than 8 (a factor of 256, which float32 sums and
bfloat16 weights bear without loss): accumulators are scaled by a warp only where one of its rows has moved. A row that
has not moved is scaled by exactly 1, so that no row depends on its neighbours.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from rollout.kernels.gluon_items import LOG2_E, advanced
from rollout.kernels.gluon_ring import BY_SCORE, KEYS, ROWS, SCORES, arrive, position, read_ring, wait, write_ring

SLACK = gl.constexpr(8.0)
UNMOVED = gl.constexpr("mov.b32 $0, $1;")

VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
MIXTURE = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
BY_VALUE = gl.constexpr(gl.SliceLayout(1, VALUES.value))

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
    """The softmax over all tiles of an item, from `first_state`; and `places`, in and out.

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
def over_tiles(
    state, low, high, operands, BIAS: gl.constexpr, LATER: gl.constexpr, BEFORE: gl.constexpr, SECOND: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, LAZY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The tiles from `low` to `high`; the weights of the last one are in `state`, not yet multiplied with values.

    LATER and BEFORE: whether there may be keys after a row's position, and before its window, which it does not see.
    Slots of keys and values, and their barriers, are numbered through: first all keys, then all values. Before an
    item's first tile weights are zeros. They are multiplied with that tile's keys, which are there, unlike values.
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
