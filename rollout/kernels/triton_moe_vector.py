"""Routed experts of few tokens on CUDA: matrices times single rows, in two launches, on Marlin's parameters.

Bound by memory: of an expert's weights, half a byte (NVFP4) or a byte (MXFP8) and the block scales are read once per
*pair* (token, chosen expert). The first kernel has a program per pair and 64 gate columns with their up columns, and
ends with the activation; the second one per pair and some output columns. The program that is the last of a token's
to arrive there adds up, in float32 and in the order of the experts, so bits do not depend on which one it was.

Marlin's kernel reads an expert's weights once for all its tokens; a step of 8 tokens has 1.07 times as many pairs as
experts, one of 16 tokens 1.16 times. `rollout.kernels.cuda.VECTOR_ROWS` is where it takes over.

Departures from Marlin's path: gate, up and down sums are not rounded to bfloat16, the activation is rounded to a half
(it is at most `gate_cap * up_cap`), inputs lie on a grid of 2^-20 below 2^-10 and must stay below 2^20 in magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.triton_activation import situ
from rollout.kernels.triton_moe_words import accumulate, columns

# What decoding leaves undone: NVFP4's outer scale has 2^126 in it, E2M1 halves lack 2^14, E4M3 halves 2^8, inputs 2^4.
_UP_4, _DOWN_4 = tl.constexpr(2.0**-108), tl.constexpr(2.0**-112)
_UP_8, _DOWN_8 = tl.constexpr(2.0**12), tl.constexpr(2.0**8)


class Shape(NamedTuple):
    """How one of the two kernels is launched."""

    warps: int
    tiles: int = 8
    """Of a chain, 8 or 4: half the registers for weights on their way, more work on scales."""

    blocks: int = 1
    """Of 64 output columns per program of the second kernel, 1 or 2."""

    registers: int = 168
    """Of a thread, at most: three programs of four warps with 168 fit a multiprocessor, or five with 96."""


# One token of the release has 288 programs of the first and 576 of the second kernel: on 132 multiprocessors, up to
# three or five each. All of them must fit at once.
SHAPES = {
    (4, "up"): Shape(4), (4, "down"): Shape(4, registers=96), (8, "up"): Shape(4, 4),
    (8, "down"): Shape(4, 4, registers=96),
}  # fmt: skip
"""By bits of a code and kernel."""


def experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    caps: tuple[float, float],
    out_TH: torch.Tensor,
    up: Shape | None = None,
    down: Shape | None = None,
    early: bool = True,
) -> torch.Tensor:
    """Weighted sum of the chosen experts, into `out_TH` [T, H].

    Args:
        x_TH: bfloat16. weights_TK: float32. experts_TK: int32. All contiguous.
        parameters: of `inkling_rl.formats.marlin`, NVFP4 if there are outer scales, else MXFP8.
        caps: of the activation, at most 65504 in product.
        out_TH: bfloat16 or float32.
        up, down: how to launch the two kernels.
        early: launch the first before the kernel before has ended, and the second while the first runs, so that its
            first weights are there when it ends. What each waits for: `triton_skinny`.
    """
    (num_rows, hidden), top_k = x_TH.shape, experts_TK.shape[1]
    bits, padded = (4 if "w13_weight_scale_2" in parameters else 8), parameters["w2_weight"].shape[1] * 16
    assert x_TH.is_contiguous() and x_TH.dtype == torch.bfloat16 and out_TH.is_contiguous()
    assert weights_TK.is_contiguous() and experts_TK.is_contiguous() and experts_TK.dtype == torch.int32
    assert hidden % 64 == 0 and padded % 64 == 0 and caps[0] * caps[1] <= 65504
    if num_rows == 0:
        return out_TH
    up, down = up or SHAPES[bits, "up"], down or SHAPES[bits, "down"]
    down = down if hidden // 64 % down.blocks == 0 else down._replace(blocks=1)
    parts, early = hidden // 64 // down.blocks, early and not triton.knobs.runtime.interpret
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x_TH.device)
    hidden_NP, partial_NH = new(num_rows * top_k, padded, dtype=torch.float16), new(num_rows * top_k, hidden)
    arrived = new(num_rows, parts, dtype=torch.int32)
    of = lambda name: (
        parameters[name], parameters[f"{name}_scale"].view(torch.int64),
        parameters.get(f"{name}_scale_2", weights_TK),
    )  # fmt: skip
    options = {"launch_pdl": True} if early else {}
    with torch.cuda.device_of(x_TH):
        _expert_up_kernel[(num_rows * top_k * padded // 64,)](
            x_TH.view(torch.int32), *of("w13_weight"), experts_TK, hidden_NP, arrived, hidden, padded, top_k, parts,
            triton.next_power_of_2(parts), *caps, bits, up.tiles, up.warps, early, num_warps=up.warps,
            maxnreg=up.registers, **options,
        )  # fmt: skip
        _expert_down_kernel[(num_rows * top_k * parts,)](
            hidden_NP.view(torch.int32), *of("w2_weight"), experts_TK, weights_TK, partial_NH, arrived, out_TH, hidden,
            padded, top_k, bits, down.blocks, down.tiles, down.warps, early, num_warps=down.warps,
            maxnreg=down.registers, **options,
        )  # fmt: skip
    return out_TH


@triton.jit
def _expert_up_kernel(
    x, words, scales, outer, experts, out, arrived, HIDDEN: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    PARTS: tl.constexpr, PARTS_2: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, BITS: tl.constexpr,
    TILES: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The activation of 64 columns of a pair; the first program of a token also sets its counters to zero."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    UNITS: tl.constexpr = PADDED // 64
    pair, block = (tl.program_id(0) // UNITS).to(tl.int64), tl.program_id(0) % UNITS
    if (pair % TOP_K == 0) & (block == 0):
        part = tl.arange(0, PARTS_2)
        tl.store(arrived + pair // TOP_K * PARTS + part, tl.zeros_like(part), mask=part < PARTS)
    expert = tl.load(experts + pair)
    factor = tl.load(outer + expert) * _UP_4 if BITS == 4 else _UP_8
    row = x + pair // TOP_K * (HIDDEN // 2)
    pieces = accumulate(
        row, words, scales, expert, block, UNITS, 2 * PADDED, HIDDEN, 2, BITS, TILES, WARPS, True, False
    )
    for piece in tl.static_range(2):
        value = situ(pieces[piece] * factor, pieces[piece + 2] * factor, GATE_CAP, UP_CAP)
        tl.store(out + pair * PADDED + block * 64 + columns(piece, BITS), value.to(tl.float16))


@triton.jit
def _expert_down_kernel(
    x, words, scales, outer, experts, weights, partial, arrived, out, HIDDEN: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Weighted outputs of a pair, float32, and from the last program of a token and these columns their sum."""
    UNITS: tl.constexpr = HIDDEN // 64 // BLOCKS
    WIDTH: tl.constexpr = 64 * BLOCKS
    pair, unit = (tl.program_id(0) // UNITS).to(tl.int64), tl.program_id(0) % UNITS
    expert, weight = tl.load(experts + pair), tl.load(weights + pair)
    factor = weight * (tl.load(outer + expert) * _DOWN_4 if BITS == 4 else _DOWN_8)
    row = x + pair * (PADDED // 2)
    pieces = accumulate(
        row, words, scales, expert, unit * BLOCKS, 1, HIDDEN, PADDED, BLOCKS, BITS, TILES, WARPS, False, EARLY
    )
    own = partial + pair * HIDDEN + unit * WIDTH
    for piece in tl.static_range(BLOCKS * 2):
        tl.store(own + piece // 2 * 64 + columns(piece % 2, BITS), pieces[piece] * factor)
    # All threads have stored; then one of them releases, and acquires what the others have.
    tl.debug_barrier()
    token = pair // TOP_K
    before = tl.atomic_add(arrived + token * UNITS + unit, 1, sem="acq_rel", scope="gpu")
    if before == TOP_K - 1:
        column = unit * WIDTH + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float32)
        for rank in tl.static_range(TOP_K):
            total += tl.load(partial + (token * TOP_K + rank) * HIDDEN + column, cache_modifier=".cg")
        tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty))
