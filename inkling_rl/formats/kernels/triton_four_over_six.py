"""Four Over Six of one block on CUDA: the device functions that the kernels of every layout share.

`fast_block` finds the codes of both candidates exactly, but their errors only within a proven bound: in units of the
scale. Where the two errors differ by more than the bound, the choice is certainly the reference's. `exact_choice`
repeats the reference operation by operation, for every block for which `fast_block` is not certain.

Not a definition (`inkling_rl.formats.reference.nvfp4`). Compiled without contraction; each fused multiply-add is
written out and exact in what matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inkling_rl.formats.kernels.triton_blocks import (
    abs_times,
    absmax,
    column,
    e4m3_pack,
    e4m3_pair,
    e4m3_pair_values,
    e4m3_two,
    nearest_float32,
    pack_codes,
    sign_bytes,
    two_floats,
)

SPAN, LISTED = 16384, 256
"""Blocks that share a list of uncertain ones, and how many fit; with more of them the whole span is done again."""

_SIXTH = tl.constexpr(nearest_float32(1 / 6))
_SIXTH_REST = tl.constexpr(nearest_float32(1 / 6 - nearest_float32(1 / 6)))
_TWO_22 = tl.constexpr(2.0**22)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
# The fast form works in units of 1/64 of a code's value: the codes are then E4M3 subnormals, see `pack_codes`.
_FLOOR = tl.constexpr((1 + 2.0**-21) / 64)
# |fast error - exact error| of one candidate is at most u * (7 * 16 * max|x| + 42 * error), u = 2^-24: one rounding in
# y, four in the scale it is measured in, two in the reference's product and quotient, the rest in differences and sums.
# Both errors together are at most 6.1 max|x|, because a code is at most 1 from y <= 7, and 0.5 from y <= 5.
_BOUND = tl.constexpr((2 * 7 * 16 + 42 * 6.1) * 2.0**-24)
# Anchors between which nothing in the fast form is subnormal or overflows.
_SMALLEST, _LARGEST = tl.constexpr(2.0**-80), tl.constexpr(2.0**100)


@dataclass(frozen=True, slots=True)
class State:
    """What the kernels of one call share."""

    table: torch.Tensor
    """int64 `[E, 128]`: per scale byte two float32, the inverse of the scale in units and the size of a unit."""

    scales: torch.Tensor
    """float32 `[E, 4]`: encode scale, decode scale, anchor, denominator."""

    lists: torch.Tensor
    """int32 `[E, spans, 1 + LISTED / 2]`, see `triton_blocks.append`."""

    spans: int


def prepare(anchor: torch.Tensor, denominator: int, counts: torch.Tensor, num_blocks: int) -> State:
    """The state for experts of `num_blocks` blocks under `anchor` float32 `[E]`; sets `counts` int64 `[E, 3]` to 0."""
    experts, spans = len(anchor), triton.cdiv(num_blocks, SPAN)
    empty = lambda *shape, dtype: torch.empty(experts, *shape, dtype=dtype, device=anchor.device)
    state = State(
        empty(128, dtype=torch.int64),
        empty(4, dtype=torch.float32),
        empty(spans, 1 + LISTED // 2, dtype=torch.int32),
        spans,
    )
    with torch.cuda.device(anchor.device):
        _prepare_kernel[(experts,)](
            anchor.contiguous(), denominator, state.table, state.scales, state.lists, counts, spans, LISTED, 1024,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return state


@triton.jit
def _prepare_kernel(
    anchors, denominator, table, expert_scales, lists, counts, spans, LISTED: tl.constexpr, TILE: tl.constexpr
):
    """Per expert: encode scale, decode scale, anchor and denominator; what the fast form needs of each scale byte.

    A table entry is the inverse of the scale in units, and the size of a unit; NaN where the fast form does not hold,
    so that nothing is certain there. Lists are emptied and counts set to zero.
    """
    expert = tl.program_id(0).to(tl.int64)
    anchor, den = tl.load(anchors + expert), denominator.to(tl.float32)
    encode = tl.minimum(tl.div_rn(den, anchor), _FLOAT_MAX)
    decode = tl.div_rn(1.0, encode)
    tl.store(expert_scales + expert * 4, encode)
    tl.store(expert_scales + expert * 4 + 1, decode)
    tl.store(expert_scales + expert * 4 + 2, anchor)
    tl.store(expert_scales + expert * 4 + 3, den)
    byte = tl.arange(0, 128)
    scale, _ = e4m3_pair_values(byte)
    inverse = tl.div_rn(tl.full([128], 1.0, tl.float32), scale * decode) * 0.015625
    unit = scale * tl.div_rn(anchor, den) * 64.0
    holds = (byte >= 8) & (byte < 127) & (anchor >= _SMALLEST) & (anchor <= _LARGEST)
    inverse = tl.where(holds, inverse, float("nan")).to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
    word = (unit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | inverse.to(tl.int64)
    tl.store(table + expert * 128 + byte, word)
    for first in range(0, spans, TILE):
        span = first + tl.arange(0, TILE)
        tl.store(lists + (expert * spans + span) * (1 + LISTED // 2), 0, mask=span < spans)
    tl.store(counts + expert * 3 + tl.arange(0, 4), 0, mask=tl.arange(0, 4) < 3)


@triton.jit
def fast_block(b, encode, table, two16, four, TILE: tl.constexpr):
    """Words of codes 0-7 and 8-15, scale byte, and whether they are certainly the reference's."""
    maximum = absmax(b)
    # maximum / 6, correctly rounded: 1/6 in two parts, 48 bits; thirds are never near the middle between two floats.
    base = tl.fma(maximum, _SIXTH, maximum * _SIXTH_REST) * encode
    byte6, byte4 = e4m3_two(base, base * 1.5)
    inverse6, unit6 = two_floats(tl.load(table + byte6))
    inverse4, unit4 = two_floats(tl.load(table + byte4))
    error6 = tl.zeros([TILE], tl.float32)
    error4 = tl.zeros([TILE], tl.float32)
    a6, error6 = _round4(b, 0, inverse6, error6, two16)
    a4, error4 = _round4(b, 0, inverse4, error4, two16)
    b6, error6 = _round4(b, 1, inverse6, error6, two16)
    b4, error4 = _round4(b, 1, inverse4, error4, two16)
    c6, error6 = _round4(b, 2, inverse6, error6, two16)
    c4, error4 = _round4(b, 2, inverse4, error4, two16)
    d6, error6 = _round4(b, 3, inverse6, error6, two16)
    d4, error4 = _round4(b, 3, inverse4, error4, two16)
    lead = error6 * unit6 - error4 * unit4
    second = lead > 0
    low = pack_codes(tl.where(second, a4, a6), tl.where(second, b4, b6), sign_bytes(b, 0), sign_bytes(b, 1), four)
    high = pack_codes(tl.where(second, c4, c6), tl.where(second, d4, d6), sign_bytes(b, 2), sign_bytes(b, 3), four)
    certain = (tl.abs(lead) > maximum * _BOUND) & (base <= 448.0)
    return low, high, tl.where(second, byte4, byte6), certain


@triton.jit
def _round4(b, i: tl.constexpr, inverse, error, two16):
    """Nearest E2M1 magnitudes of elements 4i to 4i + 3 as packed E4M3 bytes; `error` plus their distances, in units."""
    q0, error = _round1(column(b, 4 * i, two16), inverse, error)
    q1, error = _round1(column(b, 4 * i + 1, two16), inverse, error)
    q2, error = _round1(column(b, 4 * i + 2, two16), inverse, error)
    q3, error = _round1(column(b, 4 * i + 3, two16), inverse, error)
    return e4m3_pack(q0, q1, q2, q3), error


@triton.jit
def _round1(x, inverse, error):
    # In units, y = |x| * inverse. With z = max(y, 1 + 2^-21) * 2^22, floats just below z have the spacing of the E2M1
    # grid at y (0.5 below 2, 1 below 4, 2 above), so z - y rounds y to the grid. z is an even multiple of that spacing
    # wherever y is a tie, so ties go to even; the 2^-21 keeps z - y in z's binade for y <= 1. No clamp at 6: y reaches
    # 7 only where the scale saturates or is subnormal.
    y = abs_times(x, inverse)
    z = tl.maximum(y, _FLOOR)
    q = tl.fma(z, _TWO_22, -1.0 * tl.fma(z, _TWO_22, -1.0 * y))
    return q, error + tl.abs(y - q)


@triton.jit
def exact_choice(b, expert_scales, TILE: tl.constexpr):
    """Words of codes 0-7 and 8-15, scale byte, the map-to-6 scale before its rounding, and the anchor."""
    encode, decode = tl.load(expert_scales), tl.load(expert_scales + 1)
    anchor, denominator = tl.load(expert_scales + 2), tl.load(expert_scales + 3)
    base = exact_base(b, encode, TILE)
    pair = e4m3_pair(tl.minimum(base, 448.0), tl.minimum(base * 1.5, 448.0))
    if (anchor >= _SMALLEST) & (anchor <= _LARGEST):
        low, high, scale = _exact_pick(b, pair, decode, anchor, denominator, True, TILE)
    else:
        low, high, scale = _exact_pick(b, pair, decode, anchor, denominator, False, TILE)
    return low, high, scale, base, anchor


@triton.jit
def _exact_pick(b, pair, decode, anchor, denominator, NORMAL: tl.constexpr, TILE: tl.constexpr):
    low6, high6, error6 = exact_candidate(b, pair & 0xFF, decode, anchor, denominator, NORMAL, TILE)
    low4, high4, error4 = exact_candidate(b, pair >> 8, decode, anchor, denominator, NORMAL, TILE)
    four = error4 < error6
    return tl.where(four, low4, low6), tl.where(four, high4, high6), tl.where(four, pair >> 8, pair & 0xFF)


@triton.jit
def exact_base(b, encode, TILE: tl.constexpr):
    return tl.div_rn(absmax(b), tl.full([TILE], 6.0, tl.float32)) * encode


@triton.jit
def exact_candidate(b, byte, decode, anchor, denominator, NORMAL: tl.constexpr, TILE: tl.constexpr):
    """Words of codes 0-7 and 8-15 under scale `byte`, and the error of the reference.

    NORMAL says that no product of a code, a scale and the anchor is subnormal or overflows.
    """
    scale, _ = e4m3_pair_values(byte)
    step = scale * decode
    inverse = tl.minimum(tl.div_rn(tl.full([TILE], 1.0, tl.float32), step), _FLOAT_MAX)
    error = tl.zeros([TILE], tl.float32)
    a, error = _exact4(b, 0, inverse, scale, anchor, denominator, error, NORMAL)
    c, error = _exact4(b, 1, inverse, scale, anchor, denominator, error, NORMAL)
    low = pack_codes(a, c, sign_bytes(b, 0), sign_bytes(b, 1), 4)
    a, error = _exact4(b, 2, inverse, scale, anchor, denominator, error, NORMAL)
    c, error = _exact4(b, 3, inverse, scale, anchor, denominator, error, NORMAL)
    high = pack_codes(a, c, sign_bytes(b, 2), sign_bytes(b, 3), 4)
    return tl.where(byte == 0, 0, low), tl.where(byte == 0, 0, high), error


@triton.jit
def _exact4(b, i: tl.constexpr, inverse, scale, anchor, denominator, error, NORMAL: tl.constexpr):
    q0, error = _exact1(column(b, 4 * i, 65536), inverse, scale, anchor, denominator, error, NORMAL)
    q1, error = _exact1(column(b, 4 * i + 1, 65536), inverse, scale, anchor, denominator, error, NORMAL)
    q2, error = _exact1(column(b, 4 * i + 2, 65536), inverse, scale, anchor, denominator, error, NORMAL)
    q3, error = _exact1(column(b, 4 * i + 3, 65536), inverse, scale, anchor, denominator, error, NORMAL)
    return e4m3_pack(q0, q1, q2, q3), error


@triton.jit
def _exact1(x, inverse, scale, anchor, denominator, error, NORMAL: tl.constexpr):
    """Magnitude of the code in units, and `error` plus the reference's distance, operation by operation."""
    y = tl.minimum(tl.abs(x) * inverse, 6.0)
    z = tl.maximum(y, 1 + 2.0**-21)  # rounds as in `_round1`
    q = tl.fma(z, _TWO_22, -1.0 * tl.fma(z, _TWO_22, -1.0 * y))
    product = (q * scale) * anchor
    if NORMAL:
        # product / denominator, correctly rounded: by the reciprocal of a constant, then the exact remainder.
        reciprocal = tl.where(denominator == 1536.0, 1 / 1536, 1 / 2688).to(tl.float32)
        estimate = product * reciprocal
        value = tl.fma(tl.fma(estimate, -1.0 * denominator, product), reciprocal, estimate)
    else:
        value = tl.div_rn(product, denominator + q * 0.0)  # a tensor; q is finite
    return q * 0.015625, error + tl.abs(value - tl.abs(x))


@triton.jit
def count_block(counts, b, base, anchor, inside):
    _add(counts + 1, inside & (base > 448.0))
    maximum = absmax(b)
    _add(counts + 2, inside & (maximum != 0) & (anchor == 0))
    if tl.max((inside & ~(maximum < float("inf"))).to(tl.int32), 0) != 0:
        for i in tl.static_range(16):
            _add(counts, inside & ~(tl.abs(column(b, i, 65536)) < float("inf")))


@triton.jit
def _add(count, found):
    number = tl.sum(found.to(tl.int32), 0)
    if number != 0:
        tl.atomic_add(count, number.to(tl.int64), sem="relaxed")
