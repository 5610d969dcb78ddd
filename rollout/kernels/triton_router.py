"""The router of the experts on CUDA: logits in float32 precision on the matrix units, then the choice; two launches.

A float32 product would run on the vector units at a tenth of the rate. Here every float32 number is the sum of three
bfloat16 ones, exactly but for the last bits of subnormals, and products of bfloat16 numbers are exact: three products
for bfloat16 activations, six for float32 ones (what is left out is below 2^-24). The weight is split where it is used,
so there is no second copy that an update could leave behind.

The matrix unit truncates its float32 sum after every 16 columns, always toward zero, so the errors of a long sum add
up. It sums 64 columns at a time, from zero and small terms first; those sums are added and rounded by the vector units.
Relative error of a row's logits, by emulation of that truncation at 4608 columns: 1.5e-7 (a float32 product: 1e-7;
running sums of 256 columns: 2e-6).

The sum over the hidden size is a fixed tree: those 64 columns, segments of 256, three groups of segments, the groups.
Few tokens are spread over many programs (one per segment), many tokens are not; the tree, and so a row's bits, is the
same.

The choice is launched before the sums have ended, and waits for them once it runs: the second launch costs nothing. Few
tokens' sums may be launched before the kernel before them has ended, see `route`: then the router's weights are in
registers when the tokens come, and time passes for the tokens alone.
"""

# Triton's tuples grow by concatenation.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.triton_mixture import prefetch

COLUMNS, SEGMENT, GROUPS = 64, 256, 3
CHUNK = 128
"""Experts that the choice takes side by side: no more, lest it calculate with many that are not there."""

_UPPER_HALF = tl.constexpr(-0x10000)  # 0xFFFF0000
_LEAST = tl.constexpr(-0x80000000)


class Tile(NamedTuple):
    """Tokens, stages in flight, and warps of a program; 64 experts per program and 4 warps."""

    tokens: int
    stages: int
    warps: int


# Up to so many tokens: what a program is and whether it takes a segment, a group or the whole row. Only the sum's tree,
# which these do not touch, is part of the definition of a row's bits.
PLANS: tuple[tuple[int, Tile, str], ...] = (
    (64, Tile(16, 5, 4), "segment"),  # 5: all four steps of a segment are in flight at once
    (1024, Tile(64, 3, 4), "group"),
    (2**31, Tile(64, 3, 4), "row"),
)


def route(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    route_scale: float,
    weights_TK: torch.Tensor | None = None,
    experts_TK: torch.Tensor | None = None,
    plan: tuple[Tile, str] | None = None,
    early: bool = True,
    constant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [T, top_k] and expert numbers int32 [T, top_k], in ascending order of the number.

    Args:
        x_TH: input of the experts, bfloat16 or float32.
        router_EH: float32, any strides. bias_E: float32; only selects.
        weights_TK, experts_TK: written instead of new tensors; contiguous.
        early: launch the choice before the sums have ended.
        constant: router and bias are written neither by the kernel before nor by one that may still run then. Few
            tokens' sums start before it has ended and read the router's weights at once.
    """
    num_rows, num_experts = x_TH.shape[0], router_EH.shape[0]
    assert x_TH.stride(1) == 1 and router_EH.dtype == bias_E.dtype == torch.float32 and top_k <= num_experts
    if weights_TK is None:
        weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=x_TH.device)
    if experts_TK is None:
        experts_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=x_TH.device)
    assert weights_TK.is_contiguous() and experts_TK.is_contiguous()
    if num_rows:
        early = early and not triton.knobs.runtime.interpret
        parts_PTE, inner = _logits(x_TH, router_EH, plan, early, constant)
        with torch.cuda.device_of(x_TH):
            _choose_kernel[(num_rows,)](
                parts_PTE, bias_E, weights_TK, experts_TK, num_rows, route_scale, num_experts,
                min(CHUNK, triton.next_power_of_2(num_experts)), parts_PTE.shape[0] // inner, inner, top_k, early,
                num_warps=1, **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
    return weights_TK, experts_TK


def logits(x_TH: torch.Tensor, router_EH: torch.Tensor, plan: tuple[Tile, str] | None = None) -> torch.Tensor:
    """`x W^T` [T, E] with the precision and the order of sums of `route`; for tests."""
    parts_PTE, inner = _logits(x_TH, router_EH, plan)
    total_TE = torch.zeros_like(parts_PTE[0])
    for group in parts_PTE.split(inner):
        of_group = torch.zeros_like(total_TE)
        for part in group:
            of_group += part
        total_TE += of_group
    return total_TE


def choose_plan(num_rows: int, dtype: torch.dtype) -> tuple[Tile, str]:
    """The plan for `num_rows` tokens. Float32 ones and the sums of a whole row do not both fit the registers."""
    fits = PLANS[:2] if dtype == torch.float32 else PLANS
    return next((plan[1:] for plan in fits if num_rows <= plan[0]), fits[-1][1:])


def _logits(
    x_TH: torch.Tensor, router_EH: torch.Tensor, plan: tuple[Tile, str] | None, early: bool = False,
    constant: bool = False,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Partial sums float32 [parts, T, E], and how many of them make a group."""
    num_rows, hidden = x_TH.shape
    num_experts = router_EH.shape[0]
    tile, span = plan or choose_plan(num_rows, x_TH.dtype)
    per_group = triton.cdiv(triton.cdiv(hidden, SEGMENT), GROUPS)
    segments, groups = {"segment": (1, 1), "group": (per_group, 1), "row": (per_group, GROUPS)}[span]
    parts = GROUPS * per_group // (segments * groups)
    parts_PTE = torch.empty(parts, num_rows, num_experts, dtype=torch.float32, device=x_TH.device)
    given = (x_TH, router_EH, parts_PTE, x_TH.stride(0), *router_EH.stride(), num_rows, num_experts, hidden)
    grid = triton.cdiv(num_experts, 64), triton.cdiv(num_rows, tile.tokens), parts
    with torch.cuda.device_of(x_TH):
        # Float32 tokens take more registers than are left beside the weights.
        if constant and span == "segment" and x_TH.dtype == torch.bfloat16:
            options = {"launch_pdl": True} if early else {}
            _segment_kernel[grid](*given, SEGMENT, tile.tokens, COLUMNS, early, num_warps=tile.warps, **options)
        else:
            _logits_kernel[grid](
                *given, groups, segments, SEGMENT, tile.tokens, COLUMNS, early, num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip
    return parts_PTE, (per_group if span == "segment" else 1)


# Numbers of rows are no constants of the code anywhere here: an engine would compile in the middle of serving.
@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    x, router, parts, stride_x, stride_expert, stride_column, num_rows, num_experts, HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Experts are the rows of the matrix instruction: those operands come out of registers, where they are split."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0) * 64 + tl.arange(0, 64)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    experts_there, rows_there = expert < num_experts, row < num_rows
    first = tl.program_id(2) * (GROUPS * SEGMENTS * SEGMENT)
    experts_at = router + expert[:, None] * stride_expert
    rows_at = x + row[None, :].to(tl.int64) * stride_x
    total = tl.zeros([64, TOKENS], tl.float32)
    of_group = tl.zeros([64, TOKENS], tl.float32)
    of_segment = tl.zeros([64, TOKENS], tl.float32)
    STEPS: tl.constexpr = SEGMENT // COLUMNS
    for step in range(GROUPS * SEGMENTS * STEPS):
        column = first + step * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        weight = tl.load(
            experts_at + column[None, :] * stride_column, mask=experts_there[:, None] & inside[None, :], other=0.0
        )
        given = tl.load(rows_at + column[:, None], mask=rows_there[None, :] & inside[:, None], other=0.0)
        of_segment += _product(weight, given)
        if step % STEPS == STEPS - 1:
            of_group += of_segment
            of_segment = tl.zeros([64, TOKENS], tl.float32)
        if GROUPS > 1:  # noqa: SIM102 - a constant of the compiler's
            if step % (STEPS * SEGMENTS) == STEPS * SEGMENTS - 1:
                total += of_group
                of_group = tl.zeros([64, TOKENS], tl.float32)
    place = parts + tl.program_id(2).to(tl.int64) * num_rows * num_experts
    place += row[None, :].to(tl.int64) * num_experts + expert[:, None]
    tl.store(place, total if GROUPS > 1 else of_group, mask=experts_there[:, None] & rows_there[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _segment_kernel(
    x, router, parts, stride_x, stride_expert, stride_column, num_rows, num_experts, HIDDEN: tl.constexpr,
    SEGMENT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_logits_kernel` of one segment, launched early: all its weights are read and split while it waits for x."""
    expert = tl.program_id(0) * 64 + tl.arange(0, 64)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    experts_there, rows_there = expert < num_experts, row < num_rows
    first = tl.program_id(2) * SEGMENT
    experts_at = router + expert[:, None] * stride_expert
    rows_at = x + row[None, :].to(tl.int64) * stride_x
    STEPS: tl.constexpr = SEGMENT // COLUMNS
    if EARLY:
        # Registers hold too few loads at a time. A line of the cache has 32 numbers.
        column = tl.minimum(first + tl.arange(0, SEGMENT // 32) * 32, HIDDEN - 1)
        rows_of = router + tl.minimum(expert, num_experts - 1)[:, None] * stride_expert
        prefetch(rows_of + column[None, :] * stride_column)
    weights = ()
    for step in tl.static_range(STEPS):
        column = first + step * COLUMNS + tl.arange(0, COLUMNS)
        there = experts_there[:, None] & (column < HIDDEN)[None, :]
        weights = weights + (tl.load(experts_at + column[None, :] * stride_column, mask=there, other=0.0),)
    thirds = ()
    for step in tl.static_range(STEPS):
        thirds = thirds + _thirds(weights[step])
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    given = ()
    for step in tl.static_range(STEPS):
        column = first + step * COLUMNS + tl.arange(0, COLUMNS)
        there = rows_there[None, :] & (column < HIDDEN)[:, None]
        given = given + (tl.load(rows_at + column[:, None], mask=there, other=0.0),)
    total = tl.zeros([64, TOKENS], tl.float32)
    for step in tl.static_range(STEPS):
        of_step = tl.dot(thirds[3 * step + 2], given[step])
        of_step = tl.dot(thirds[3 * step + 1], given[step], of_step)
        total += tl.dot(thirds[3 * step], given[step], of_step)
    place = parts + tl.program_id(2).to(tl.int64) * num_rows * num_experts
    place += row[None, :].to(tl.int64) * num_experts + expert[:, None]
    tl.store(place, total, mask=experts_there[:, None] & rows_there[None, :])


@triton.jit
def _product(weight, given):
    """`weight @ given` in float32 precision, small terms first."""
    a0, a1, a2 = _thirds(weight)
    if given.dtype == tl.bfloat16:
        total = tl.dot(a2, given)
        total = tl.dot(a1, given, total)
        return tl.dot(a0, given, total)
    else:
        b0, b1, b2 = _thirds(given)
        total = tl.dot(a2, b0)
        total = tl.dot(a0, b2, total)
        total = tl.dot(a1, b1, total)
        total = tl.dot(a1, b0, total)
        total = tl.dot(a0, b1, total)
        return tl.dot(a0, b0, total)


@triton.jit
def _thirds(x):
    """Three bfloat16 numbers whose sum is x: its 24 bits, eight at a time, by logic rather than by slow conversions."""
    first = x.to(tl.int32, bitcast=True) & _UPPER_HALF
    rest = x - first.to(tl.float32, bitcast=True)
    second = rest.to(tl.int32, bitcast=True) & _UPPER_HALF
    third = (rest - second.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return _upper_half(first), _upper_half(second), _upper_half(third)


@triton.jit
def _upper_half(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    parts, bias, weights, experts, num_rows, route_scale, NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row. What belongs to its experts are tuples of chunks, because their number is no power of two."""
    row = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = (NUM_EXPERTS + TILE - 1) // TILE
    # A constant of the model: read before the wait.
    lean = _load_experts(bias, NUM_EXPERTS, TILE)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    loaded = ()  # all of it before the first sum
    for part in tl.static_range(GROUPS * INNER):
        start = parts + (part * tl.cast(num_rows, tl.int64) + row) * NUM_EXPERTS
        loaded = loaded + _load_experts(start, NUM_EXPERTS, TILE)
    score, ordered = (), ()
    for c in tl.static_range(CHUNKS):
        logit = tl.zeros([TILE], tl.float32)
        for group in tl.static_range(GROUPS):
            of_group = tl.zeros([TILE], tl.float32)
            for part in tl.static_range(INNER):
                of_group += loaded[(group * INNER + part) * CHUNKS + c]
            logit += of_group
        score = score + (1.0 / (1.0 + tl.exp(-logit)),)
        biased = (score[c] + lean[c]).to(tl.int32, bitcast=True)
        # Ordered like the floats. No float is the least integer.
        number = biased ^ ((biased >> 31) & 0x7FFFFFFF)
        if NUM_EXPERTS % TILE:
            number = tl.where(c * TILE + tl.arange(0, TILE) < NUM_EXPERTS, number, _LEAST)
        ordered = ordered + (number,)
    chosen = _largest(ordered, TOP_K, TILE)
    total = tl.zeros([TILE], tl.float32)
    for c in tl.static_range(CHUNKS):
        total += tl.where(chosen[c] > 0, score[c], 0.0)
    factor = route_scale / (tl.sum(total, axis=0) + 1e-20)
    before = row * TOP_K - 1
    for c in tl.static_range(CHUNKS):
        place = before + tl.cumsum(chosen[c], axis=0)
        before += tl.sum(chosen[c], axis=0)
        tl.store(weights + place, score[c] * factor, mask=chosen[c] > 0)
        tl.store(experts + place, c * TILE + tl.arange(0, TILE), mask=chosen[c] > 0)


@triton.jit
def _load_experts(start, NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """A number for every expert; 0 beyond the last."""
    loaded = ()
    for c in tl.static_range((NUM_EXPERTS + TILE - 1) // TILE):
        expert = c * TILE + tl.arange(0, TILE)
        if NUM_EXPERTS % TILE:
            loaded = loaded + (tl.load(start + expert, mask=expert < NUM_EXPERTS, other=0.0),)
        else:
            loaded = loaded + (tl.load(start + expert),)
    return loaded


@triton.jit
def _largest(ordered, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """1 for the TOP_K largest, of equal ones the first, and 0.

    That many times the largest number below the last one gives the least that is chosen, unless numbers are equal: then
    one by one, at twice the reductions.
    """
    least = _maximum(ordered)
    for _ in tl.static_range(TOP_K - 1):
        left = ()
        for c in tl.static_range(len(ordered)):
            left = left + (tl.where(ordered[c] < least, ordered[c], _LEAST),)
        least = _maximum(left)
    chosen, count = (), tl.zeros([TILE], tl.int32)
    for c in tl.static_range(len(ordered)):
        chosen = chosen + ((ordered[c] >= least).to(tl.int32),)
        count += chosen[c]
    if tl.sum(count, axis=0) != TOP_K:
        left, chosen = ordered, ()
        for _turn in range(TOP_K):
            most, best = _maximum(left), tl.full([TILE], 0x7FFFFFFF, tl.int32)
            for c in tl.static_range(len(ordered)):
                expert = c * TILE + tl.arange(0, TILE)
                best = tl.minimum(best, tl.where(left[c] == most, expert, 0x7FFFFFFF))
            taken, first = (), tl.min(best, axis=0)
            for c in tl.static_range(len(ordered)):
                taken = taken + (tl.where(c * TILE + tl.arange(0, TILE) == first, _LEAST, left[c]),)
            left = taken
        for c in tl.static_range(len(ordered)):
            chosen = chosen + (((ordered[c] != _LEAST) & (left[c] == _LEAST)).to(tl.int32),)
    return chosen


@triton.jit
def _maximum(chunks):
    most = chunks[0]
    for c in tl.static_range(1, len(chunks)):
        most = tl.maximum(most, chunks[c])
    return tl.max(most, axis=0)
