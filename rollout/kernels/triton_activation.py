"""The activation between the two products of an expert, on CUDA: `composed.expert_activation`.

Elementwise, so bound by memory: 6 bytes per output in bfloat16, which leaves an H200 40 instructions and 5 special
functions per output. Hence one exponential for both functions of the gate where the cap is 4, one for the up half,
and one reciprocal for all three quotients. Float32 inside, relative errors below 2e-6 everywhere: near zero, where
`1 - exp` cancels, tanh is a polynomial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4

_SMALL = tl.constexpr(0.1)
_SIGN = tl.constexpr(-0x80000000)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(1.4426950408889634)


def expert_activation(
    gate_up_TC: torch.Tensor,
    gate_cap: float,
    up_cap: float,
    out_TI: torch.Tensor | None = None,
    block: int = BLOCK,
    warps: int = WARPS,
) -> torch.Tensor:
    """Rows [T, I] from [T, 2 I] (gate half, up half), in the input's dtype or that of `out_TI`; I % 8 == 0."""
    num_rows, width = gate_up_TC.shape[0], gate_up_TC.shape[1] // 2
    if out_TI is None:
        out_TI = gate_up_TC.new_empty(num_rows, width)
    assert gate_up_TC.stride(1) == 1 and out_TI.is_contiguous() and out_TI.shape == (num_rows, width)
    assert width % 8 == 0 and block % 8 == 0
    if num_rows:
        _activation_kernel[(triton.cdiv(num_rows * width, block),)](
            gate_up_TC, out_TI, gate_up_TC.stride(0), num_rows * width, width, gate_cap, up_cap, block, num_warps=warps
        )
    return out_TI


@triton.jit
def _activation_kernel(
    gate_up, out, stride, size, WIDTH: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    inside = start + tl.arange(0, BLOCK) < size
    # Within the program int32 will do. Eight neighbours lie in one row, which the compiler does not see by itself.
    element = (start % WIDTH).to(tl.int32) + tl.arange(0, BLOCK)
    row = tl.max_constancy(element // WIDTH, 8)
    column = tl.max_contiguous(tl.multiple_of(element % WIDTH, 8), 8)
    place = gate_up + (start // WIDTH) * stride + row * stride + column
    gate = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = situ(gate, up, GATE_CAP, UP_CAP)
    tl.store(out + start + tl.arange(0, BLOCK), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def situ(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    """`c tanh(g / c) sigmoid(g) * d tanh(u / d)`, float32."""
    gate_tanh, gate_below, gate_decay = _tanh_quotient(tl.abs(gate), GATE_CAP)
    up_tanh, up_below, _ = _tanh_quotient(tl.abs(up), UP_CAP)
    if GATE_CAP == 4.0:
        decay = gate_decay * gate_decay  # exp(-|g|)
    else:
        decay = _exp2(tl.abs(gate) * -_LOG2_E)
    above = gate_tanh * up_tanh * tl.where(gate < 0.0, decay, 1.0) * (GATE_CAP * UP_CAP)
    value = above * _reciprocal(gate_below * up_below * (1.0 + decay))
    sign = (gate.to(tl.int32, bitcast=True) ^ up.to(tl.int32, bitcast=True)) & _SIGN
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _tanh_quotient(x, CAP: tl.constexpr):
    """`tanh(x / CAP)` for x >= 0 as numerator and denominator (between 1 and 2), and `exp(-2 x / CAP)`."""
    decay = _exp2(x * (-2.0 * _LOG2_E / CAP))
    z = x * (1.0 / CAP)
    square = z * z
    series = z * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(z < _SMALL, series * (1.0 + decay), 1.0 - decay), 1.0 + decay, decay


# What follows are single instructions: Triton's own functions take four each, for subnormal numbers.
# Those do not matter beside 1. The interpreter knows no PTX.
@triton.jit
def _exp2(x):
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _reciprocal(x):
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
