"""Products of a few rows with wide weights on CUDA, `y = x W^T`: a decode step's projections and its logits, one launch
each.

At one to 32 rows a product is the time that its weights take to come in. So weights are the rows of the matrix
instruction and the step's rows its columns, padded to 8, 16 or 32; all programs are resident at once (but for the
logits), each with several stages of loads in flight, so that every one of them gets an equal share of the bandwidth and
they end together. A program sums whole rows of a weight: no partial sums in memory, no atomics, and a row's bits depend
on nothing else in the batch, except that up to 8, up to 16 and up to 32 rows are kernels of their own.

The attention's launch has segments: what belongs to the first input, keys and values of the second and third, and the
small float32 weights of sinks and dynamic taps. Those keep float32 precision by three bfloat16 products, as the
router's logits do (`triton_router`).

Weights do not depend on the kernel before: while it runs, the first of them are fetched into the L2 cache (programmatic
dependent launch). That is a hint; every load comes after the end of the kernel before, so even a weight that it wrote
is read as it left it.

What all kernels keep to that are launched early or let others be, so that a whole step may be one chain of them:

* Every program waits for the end of the kernel before, and writes nothing until then. So the end of a kernel is the end
  of all before it too.
* A kernel lets the next one start (`gdc_launch_dependents`) after its own wait; then nothing but these two runs. What
  the next one reads before its wait may be anything that this one does not write.
* `triton_conv_mix`'s kernel of few rows and `triton_merge`'s let it start at once, while the kernel before them may
  still run. What follows those reads no activation before its wait: this module's kernels and the router's sums.

Not for many rows, float32 activations or adapters: torch's products do those, see `rollout.plugin.fused`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.triton_router import _thirds
from rollout.kernels.triton_softcap import softcapped


class Tile(NamedTuple):
    """Of a program: rows of the weight, columns per step, steps in flight and warps.

    And how many bytes each thread asks for before the kernel before has ended: while a mixture runs, or attention ends.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    fetched: int = 512


# Up to 16 rows, and up to 32. A stage is 16 KB of weights; about 100 KB per program, two of which a multiprocessor
# holds: 264 programs. The inputs of Inkling 2 Small's attention need 240 of the first kind. Its output has too few rows
# to reach all multiprocessors, and is read by 72 deep programs: 144 smaller ones took 19 us on an H200 instead of 16.
# Of these weights 16 and 9 MB are asked for early.
WIDE = Tile(64, 128, 5, 4), Tile(64, 128, 4, 4)
NARROW = Tile(64, 128, 8, 4, 1024), Tile(64, 128, 8, 4, 1024)

SMALL = (32, 128)
"""Rows and columns per step of a program of a float32 weight."""

MOST_ROWS = 32


def linear(x_TC: torch.Tensor, weight_OC: torch.Tensor, tile: Tile | None = None, early: bool = True) -> torch.Tensor:
    """`x W^T` [T, O], rounded once.

    Args:
        x_TC: up to `MOST_ROWS` rows, bfloat16; rows may lie apart.
        weight_OC: bfloat16, contiguous.
        tile: shape of a program.
        early: start before the kernel before has ended.
    """
    out_TO = x_TC.new_empty(x_TC.shape[0], weight_OC.shape[0])
    _launch(x_TC[None], weight_OC, out_TO, tile=tile or NARROW[x_TC.shape[0] > 16], early=early)
    return out_TO


def softcap_logits(
    x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int, tile: Tile | None = None,
    early: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`triton_softcap.softcap_logits` of few rows, product and softcap in one launch."""
    x_TH = x_TH.to(weight_VH.dtype)
    out_TP = torch.empty(x_TH.shape[0], padded_size, dtype=torch.float32, device=x_TH.device)
    _launch(x_TH[None], weight_VH, out_TP, cap=cap, tile=tile or WIDE[x_TH.shape[0] > 16], early=early)
    return out_TP


def attention_inputs(
    x_QTH: torch.Tensor, weight_OH: torch.Tensor, keys_values: torch.Tensor | None, sinks_NH: torch.Tensor,
    taps: torch.Tensor | None, tile: Tile | None = None, early: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """All projections of an attention sublayer: [T, O + 2 C] like x, sinks float32 [T, N], taps float32 [2, T, S].

    Args:
        x_QTH: the input of all; in full layers those of queries, keys and values. Bfloat16, up to `MOST_ROWS` rows.
        weight_OH: what is multiplied with the first input.
        keys_values: [2, C, H] in full layers: what is multiplied with the second and the third. Contiguous like all.
        sinks_NH: float32; with the first input.
        taps: float32 [2, S, H] in full layers; with the second and the third.
    """
    rows, later = x_QTH.shape[1], 0 if keys_values is None else 2 * keys_values.shape[1]
    assert (keys_values is None) == (taps is None) == (x_QTH.shape[0] == 1)
    out_TC = x_QTH.new_empty(rows, weight_OH.shape[0] + later)
    sink_TN = torch.empty(rows, sinks_NH.shape[0], dtype=torch.float32, device=x_QTH.device)
    taps_out = None if taps is None else torch.empty(2, rows, taps.shape[1], dtype=torch.float32, device=taps.device)
    small = (sinks_NH, taps, sink_TN, taps_out)
    _launch(x_QTH, weight_OH, out_TC, keys_values=keys_values, small=small, tile=tile or WIDE[rows > 16], early=early)
    return out_TC, sink_TN, taps_out


def _launch(
    x_QTH: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, keys_values: torch.Tensor | None = None,
    small: tuple[torch.Tensor | None, ...] = (None,) * 4, cap: float = 0.0, tile: Tile, early: bool,
) -> None:  # fmt: skip
    (_, rows, hidden), outputs = x_QTH.shape, weight.shape[0]
    weights = [w for w in (weight, keys_values) if w is not None]
    assert all(w.is_contiguous() and w.dtype == x_QTH.dtype == torch.bfloat16 for w in weights)
    assert all(s is None or (s.is_contiguous() and s.dtype == torch.float32) for s in small)
    assert x_QTH.stride(2) == 1 and rows <= MOST_ROWS and hidden % 8 == 0 and out.is_contiguous()
    if not rows:
        return
    later, (num_sinks, num_taps) = 0 if keys_values is None else keys_values.shape[1], (_outputs(s) for s in small[:2])
    counted = ((out.shape[1] if cap else outputs, tile.rows), (num_sinks, SMALL[0]))
    programs = sum(triton.cdiv(*count) for count in counted)
    programs += 2 * (triton.cdiv(later, tile.rows) + triton.cdiv(num_taps, SMALL[0]))
    early = early and not triton.knobs.runtime.interpret
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    strides = x_QTH.stride(0), x_QTH.stride(1) if rows > 1 else hidden
    with torch.cuda.device_of(x_QTH):
        _skinny_kernel[(programs,)](
            x_QTH, weight, keys_values, out, *small, *strides, rows, outputs, later, num_sinks, num_taps, out.shape[1],
            cap, 1.0 / cap if cap else 0.0, HIDDEN=hidden, TOKENS=max(8, triton.next_power_of_2(rows)), ROWS=tile.rows,
            COLUMNS=tile.columns, SMALL_ROWS=SMALL[0], SMALL_COLUMNS=SMALL[1], HAS_SMALL=small[0] is not None,
            FULL=keys_values is not None, CAPPED=bool(cap), EARLY=early, PIECES=max(1, 32 * tile.warps // tile.rows),
            PREFETCH=tile.fetched, num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip


def _outputs(weight: torch.Tensor | None) -> int:
    return 0 if weight is None else weight.shape[-2]


# Numbers of rows are no constants of the code: an engine would compile in the middle of serving. Nor are sizes of
# weights: what is tried on small ones at the start is what runs later.
@triton.jit(do_not_specialize=["num_rows", "outputs", "later", "num_sinks", "num_taps", "width"])
def _skinny_kernel(
    x, weight, keys_values, out, sinks, taps, sinks_out, taps_out, stride_plane, stride_row, num_rows, outputs, later,
    num_sinks, num_taps, width, cap, per_cap, HIDDEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SMALL_ROWS: tl.constexpr, SMALL_COLUMNS: tl.constexpr, HAS_SMALL: tl.constexpr,
    FULL: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr, PIECES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Float32 segments first, because their programs have the longer way from a load to a sum."""
    program = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    first_small = 0
    if HAS_SMALL:
        first_small = tl.cdiv(num_sinks, SMALL_ROWS)
        if FULL:
            first_small += 2 * tl.cdiv(num_taps, SMALL_ROWS)
    program -= first_small
    if program >= 0:
        plane, first, count, base = _place(program, weight, keys_values, outputs, later, HIDDEN, ROWS, FULL)
        row = tl.arange(0, ROWS)
        # Rows beyond the last read the last one again.
        start = tl.minimum(first, count - 1)
        base += tl.cast(start, tl.int64) * HIDDEN
        if EARLY:
            _prefetch(base, count - start, HIDDEN, ROWS, PIECES, PREFETCH)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        rows_at = base + tl.minimum(row, count - start - 1)[:, None] * HIDDEN
        tokens_at = x + plane * stride_plane + token[None, :] * stride_row
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in range(tl.cdiv(HIDDEN, COLUMNS)):
            value, given = _load(rows_at, tokens_at, token < num_rows, step, HIDDEN, COLUMNS)
            total = tl.dot(value, given, total)
        row += first
        if CAPPED:
            total = tl.where((row < count)[:, None], softcapped(total, cap, per_cap), float("-inf"))
            count = width
        column = tl.where(plane == 0, 0, outputs + (plane - 1) * later) + row
        place = out + tl.cast(token, tl.int64)[None, :] * width + column[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=(row < count)[:, None] & (token < num_rows)[None, :])
    else:
        if HAS_SMALL:
            _small(
                x, program + first_small, sinks, taps, sinks_out, taps_out, stride_plane, stride_row, num_rows,
                num_sinks, num_taps, HIDDEN, 16 if TOKENS < 16 else TOKENS, SMALL_ROWS, SMALL_COLUMNS, FULL, EARLY,
            )  # fmt: skip


@triton.jit
def _place(program, weight, later_weight, outputs, later, HIDDEN: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """Which input, from which row on, of how many, and the weight [count, HIDDEN]."""
    plane, block, count, base = program * 0, program, outputs, weight
    if FULL:
        blocks, each = tl.cdiv(outputs, ROWS), tl.cdiv(later, ROWS)
        beyond = tl.maximum(program - blocks, 0)
        is_first = program < blocks
        plane = tl.where(is_first, 0, 1 + beyond // each)
        block = tl.where(is_first, program, beyond % each)
        count = tl.where(is_first, outputs, later)
        base = tl.where(is_first, weight, later_weight + tl.cast(beyond // each, tl.int64) * later * HIDDEN)
    return plane, block * ROWS, count, base


@triton.jit
def _load(rows_at, tokens_at, is_token, step, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of the weight's rows, [ROWS, COLUMNS], and of the input's, [COLUMNS, TOKENS]."""
    column = step * COLUMNS + tl.arange(0, COLUMNS)
    if HIDDEN % COLUMNS == 0:
        value = tl.load(rows_at + column[None, :])
        given = tl.load(tokens_at + column[:, None], mask=is_token[None, :], other=0.0)
    else:
        inside = column < HIDDEN
        value = tl.load(rows_at + column[None, :], mask=inside[None, :], other=0.0)
        given = tl.load(tokens_at + column[:, None], mask=is_token[None, :] & inside[:, None], other=0.0)
    return value, given


@triton.jit
def _small(
    x, program, sinks, taps, sinks_out, taps_out, stride_plane, stride_row, num_rows, num_sinks, num_taps,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sinks and dynamic taps: float32 weights in float32 precision.

    Weights are the columns of the matrix instruction here: then every warp splits rows of its own into their thirds.
    """
    plane, first, count, base = _place(program, sinks, taps, num_sinks, num_taps, HIDDEN, ROWS, FULL)
    row, token = first + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows_at = base + tl.minimum(row, count - 1)[:, None] * HIDDEN
    tokens_at = x + plane * stride_plane + token[None, :] * stride_row
    # 1, unknown to the compiler: it would turn a sum of products into one long chain of them, which the matrix unit
    # truncates after every 16 columns.
    one = (num_rows > 0).to(tl.float32)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    rest = tl.zeros([TOKENS, ROWS], tl.float32)
    for step in range(tl.cdiv(HIDDEN, COLUMNS)):
        value, given = _load(rows_at, tokens_at, token < num_rows, step, HIDDEN, COLUMNS)
        high, middle, low = _thirds(tl.trans(value))
        given = tl.trans(given)
        total = tl.fma(tl.dot(given, high), one, total)
        rest = tl.fma(tl.dot(given, middle), one, tl.fma(tl.dot(given, low), one, rest))
    place = sinks_out
    if FULL:
        place = tl.where(plane == 0, sinks_out, taps_out + tl.maximum(plane - 1, 0) * num_rows * num_taps)
    place += token[:, None] * count + row[None, :]
    tl.store(place, total + rest, mask=(token < num_rows)[:, None] & (row < count)[None, :])


@triton.jit
def _prefetch(
    base, count, HIDDEN: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Ask the L2 cache for the beginning of every row; each thread asks for one piece of one."""
    OF_ROW: tl.constexpr = 2 * HIDDEN // PIECES // 16 * 16
    SIZE: tl.constexpr = BYTES if BYTES < OF_ROW else OF_ROW
    if SIZE > 0:
        lane = tl.arange(0, ROWS * PIECES)
        row = tl.cast(tl.minimum(lane // PIECES, count - 1), tl.int64)
        address = tl.cast(base, tl.int64) + row * (2 * HIDDEN) + lane % PIECES * SIZE
        size = tl.full([ROWS * PIECES], SIZE, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, size], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
