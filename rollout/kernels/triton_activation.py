"""The activation between the two products of an expert, on CUDA: `composed.expert_activation`.

Elementwise, so bound by memory: 6 bytes per output in bfloat16, which leaves an H200 40 instructions and 5 special
functions per output. Hence one exponential for both functions of the gate where the cap is 4, one for the up half,
and one reciprocal for all three quotients. Float32 inside; relative errors below 1e-5, and absolute ones of 1e-15
where the gate is below -40.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 2048, 4

# 1 - 2^y = -(y ln 2) (1 + (y ln 2) / 2 + ...) for small y, where the difference would cancel.
_SMALL = tl.constexpr(0.09)
_SERIES_1 = tl.constexpr(-0.6931471805599453)
_SERIES_2 = tl.constexpr(-0.24022650695910072)
_SERIES_3 = tl.constexpr(-0.05550410866482158)
_SERIES_4 = tl.constexpr(-0.009618129107628477)
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
        with torch.cuda.device_of(gate_up_TC):
            _activation_kernel[(triton.cdiv(num_rows * width, block),)](
                gate_up_TC, out_TI, gate_up_TC.stride(0), num_rows * width, width, gate_cap, up_cap, block,
                num_warps=warps,
            )  # fmt: skip
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
    """`c tanh(g / c) sigmoid(g) * d tanh(u / d)`, float32; c d times the product of three quotients."""
    # The limits keep the product of the denominators finite; tanh is -1 there, and the sigmoid 1e-18.
    gate_above, gate_decay = _tanh(gate, GATE_CAP, 30.0)
    up_above, up_decay = _tanh(up, UP_CAP, 24.0)
    if GATE_CAP == 4.0:
        decay = gate_decay * gate_decay  # exp(-g)
    else:
        decay = _exp2(tl.minimum(gate * -_LOG2_E, 60.0, propagate_nan=tl.PropagateNan.ALL))
    scaled = up_decay * (1.0 / (GATE_CAP * UP_CAP)) + 1.0 / (GATE_CAP * UP_CAP)
    return gate_above * up_above * _reciprocal((1.0 + gate_decay) * scaled * (1.0 + decay))


@triton.jit
def _tanh(x, CAP: tl.constexpr, LIMIT: tl.constexpr):
    """`1 - e` and `e = exp(-2 x / CAP)`, whose quotient with `1 + e` is `tanh(x / CAP)`."""
    y = tl.minimum(x * (-2.0 * _LOG2_E / CAP), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    decay = _exp2(y)
    near = y * (_SERIES_1 + y * (_SERIES_2 + y * (_SERIES_3 + y * _SERIES_4)))
    return tl.where(tl.abs(y) < _SMALL, near, 1.0 - decay), decay


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
