"""A draft's RNN head on CUDA: one step of the cell for all requests, and the logits that it adds to the target's.

References and notation: `rollout.kernels.draft`, `draw_blocks_reference`. Seven times per block one follows the other,
so a launch each, grids from shapes, nothing read back to the host. `early` as in `triton_draft`.

The cell is some hundred kilobytes of weights and little work: float32 throughout, weights in bfloat16 widened. A
program has some columns of all three gates for some requests, and no product is split over programs.

The logits are 100 MB of `w2`, read once for up to 64 requests: weights are the rows of the matrix instruction and
requests its columns. Programs are as many as a GPU holds at once and take turns at blocks of the vocabulary, the next
ones of which are on their way meanwhile; what comes of the cell stays in shared memory. With weights in bfloat16 it is
held as two bfloat16 numbers, whose sum is off by 2^-17 at most, so that a logit has the rounding of its weights (2^-9)
and none of its own. Float32 weights are for tiny models: exact, and slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels import triton_decode
from rollout.kernels.triton_draft import _launch
from rollout.kernels.triton_logits import dot
from rollout.kernels.triton_skinny import _prefetch
from rollout.kernels.triton_softcap import softcapped

COLUMNS_AT_ONCE = 256
"""Of the cell's inputs."""

MOST_TOKENS = 64
"""Requests for which `w2` is read once."""

MOST_RANK = 256
"""Of the logits: all of a row of `w2` is one operand."""

PREFETCHED = 256
"""Bytes that a thread asks for before the kernel before has ended."""


class Tile(NamedTuple):
    """How the logits are launched: rows of `w2` per turn, warps, stages, programs per multiprocessor."""

    rows: int
    warps: int
    stages: int
    per_multiprocessor: int


def choose_tile(tokens: int, dtype: torch.dtype) -> Tile:
    """For up to so many requests.

    Loads on their way, per multiprocessor: 190, 130 and 64 KB of `w2`; of 64 requests as much stays beside them. Two
    programs with 16 requests and tiles of 64 rows would not fit.
    """
    if dtype == torch.float32:  # not for speed
        return Tile(16, 4, 1, 2)
    if tokens <= 16:
        return Tile(64, 4, 4, 2) if tokens <= 8 else Tile(32, 4, 5, 2)
    return Tile(64, 8, 3, 1)


def rnn_step(
    prepared_RJ: torch.Tensor,
    state_RS: torch.Tensor,
    tokens_R: torch.Tensor,
    w1_VS: torch.Tensor,
    joint: torch.Tensor,
    state_out_RS: torch.Tensor,
    out_RS: torch.Tensor,
    early: bool = False,
) -> None:
    """One step of the cell: `[g c o] = joint [s; w1[token]] + prepared`, written to `state_out` and `out`.

    `state_out` is `sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`, `out` is `tanh(o)`, which `token_logits` takes.

    Args:
        prepared_RJ: the hidden states' share and the bias, float32 [R, 3 S]; rows may lie apart.
        state_RS: float32. `state_out_RS` must be another tensor.
        tokens_R: int64 with any stride, the tokens before those to draw; each is a row of `w1`.
        w1_VS, joint: `Head.w1` and `Head.joint` [3 S, 2 S], bfloat16 or float32; rows may lie apart.
        state_out_RS, out_RS: float32.
    """
    num_rows, rank = state_RS.shape
    assert prepared_RJ.shape == (num_rows, 3 * rank) and joint.shape == (3 * rank, 2 * rank)
    assert all(x.stride(1) == 1 for x in (prepared_RJ, w1_VS, joint))
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (state_RS, state_out_RS, out_RS))
    assert state_out_RS.shape == out_RS.shape == state_RS.shape and tokens_R.shape == (num_rows,)
    if num_rows == 0:
        return
    assert state_out_RS.is_meta or state_out_RS.data_ptr() != state_RS.data_ptr()
    rows, columns, warps = cell_shape(num_rows)
    with torch.cuda.device_of(state_RS):
        _rnn_kernel[(triton.cdiv(rank, columns), triton.cdiv(num_rows, rows))](
            prepared_RJ, state_RS, tokens_R, w1_VS, joint, state_out_RS, out_RS, num_rows, tokens_R.stride(0),
            prepared_RJ.stride(0), w1_VS.stride(0), joint.stride(0), RANK=rank,
            WIDTH=min(COLUMNS_AT_ONCE, triton.next_power_of_2(rank)), ROWS=rows, COLUMNS=columns,
            **_launch(early, warps),
        )  # fmt: skip


def cell_shape(num_rows: int) -> tuple[int, int, int]:
    """Requests, columns and warps of a program of the cell.

    Few columns, so that there are as many programs as multiprocessors; with many requests, whose programs read the
    weights anew, more of them.
    """
    if num_rows == 1:
        return 1, 2, 4
    return (8, 2, 4) if num_rows <= 32 else (8, 8, 8)


def token_logits(
    base_RV: torch.Tensor,
    out_RS: torch.Tensor,
    w2_VS: torch.Tensor,
    result_RV: torch.Tensor | None = None,
    tile: Tile | None = None,
    early: bool = False,
) -> torch.Tensor:
    """`base + out w2^T`, float32 [R, V]; what is -inf in `base` stays so.

    Args:
        base_RV: the target's head on a row of each block, float32; rows may lie apart.
        out_RS: of `rnn_step`.
        w2_VS: `Head.w2`, bfloat16 or float32, contiguous.
        result_RV: where to write, else a new tensor; may be `base`.
        tile: how to launch.

    Raises:
        ValueError: a rank that the kernel does not cover.
    """
    (num_rows, vocabulary), rank = base_RV.shape, out_RS.shape[1]
    if rank > MOST_RANK:
        raise ValueError(f"rank must be at most {MOST_RANK} for a draft on CUDA; got {rank}. Use the reference")
    result_RV = torch.empty_like(base_RV, memory_format=torch.contiguous_format) if result_RV is None else result_RV
    assert base_RV.dtype == result_RV.dtype == out_RS.dtype == torch.float32 and result_RV.shape == base_RV.shape
    assert w2_VS.shape == (vocabulary, rank) and w2_VS.is_contiguous() and out_RS.is_contiguous()
    assert base_RV.stride(1) == result_RV.stride(1) == 1 and out_RS.shape[0] == num_rows
    if num_rows == 0:
        return result_RV
    tokens, width = tokens_at_once(num_rows), triton.next_power_of_2(rank)
    groups, tile = triton.cdiv(num_rows, tokens), tile or choose_tile(tokens, w2_VS.dtype)
    resident = tile.per_multiprocessor * triton_decode._multiprocessors(base_RV.device)
    # What is asked for ahead begins at a multiple of 16 bytes.
    prefetched = PREFETCHED if rank % 8 == 0 else 0
    programs = min(triton.cdiv(resident, groups), triton.cdiv(vocabulary, tile.rows))
    with torch.cuda.device_of(base_RV):
        _token_logits_kernel[(groups, programs)](
            base_RV, out_RS, w2_VS, result_RV, num_rows, vocabulary, base_RV.stride(0), result_RV.stride(0),
            RANK=rank, WIDTH=max(16, width), TOKENS=tokens, TILE=tile.rows, MODE=triton_decode._mode(w2_VS.dtype),
            PIECES=max(1, 32 * tile.warps // tile.rows), PREFETCH=prefetched, num_stages=tile.stages,
            **_launch(early, tile.warps),
        )  # fmt: skip
    return result_RV


def tokens_at_once(num_rows: int) -> int:
    """Columns of the matrix instruction, padding included."""
    return max(8, min(triton.next_power_of_2(num_rows), MOST_TOKENS))


# Numbers of rows are no constants of the code: an engine would compile in the middle of serving.
@triton.jit(do_not_specialize=["num_rows", "token_stride", "prepared_stride"])
def _rnn_kernel(
    prepared, state, tokens, w1, joint, state_out, out, num_rows, token_stride, prepared_stride, w1_stride,
    joint_stride, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens + row * token_stride, mask=row < num_rows, other=0)
    is_place = (row < num_rows)[:, None] & (column < RANK)[None, :]
    given = prepared + row.to(tl.int64)[:, None] * prepared_stride + column[None, :]
    gate = tl.load(given, mask=is_place, other=0.0)
    candidate = tl.load(given + RANK, mask=is_place, other=0.0)
    output = tl.load(given + 2 * RANK, mask=is_place, other=0.0)
    own = row[:, None] * RANK + column[None, :]
    old = tl.load(state + own, mask=is_place, other=0.0)
    for first in tl.static_range(0, RANK, WIDTH):
        # [requests, columns, inputs]: the sum over inputs is taken once, at the end.
        place = first + tl.arange(0, WIDTH)[None, None, :]
        inside = (place < RANK) & (row < num_rows)[:, None, None]
        before = tl.load(state + row[:, None, None] * RANK + place, mask=inside, other=0.0)
        embedded = tl.load(w1 + token[:, None, None] * w1_stride + place, mask=inside, other=0.0).to(tl.float32)
        gate += _share(joint, column, place, before, embedded, joint_stride, RANK)
        candidate += _share(joint + RANK * joint_stride, column, place, before, embedded, joint_stride, RANK)
        output += _share(joint + 2 * RANK * joint_stride, column, place, before, embedded, joint_stride, RANK)
    keep = tl.sigmoid(gate)
    tl.store(state_out + own, keep * old + (1.0 - keep) * softcapped(candidate, 1.0, 1.0), mask=is_place)
    tl.store(out + own, softcapped(output, 1.0, 1.0), mask=is_place)


@triton.jit
def _share(joint, column, place, before, embedded, joint_stride, RANK: tl.constexpr):
    """What some inputs add to some columns of a gate, [requests, columns]."""
    weights = joint + column[None, :, None] * joint_stride + place
    inside = (column < RANK)[None, :, None] & (place < RANK)
    of_state = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    of_token = tl.load(weights + RANK, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(of_state * before + of_token * embedded, 2)


@triton.jit(do_not_specialize=["num_rows", "vocabulary", "base_stride", "result_stride"])
def _token_logits_kernel(
    base, states, w2, result, num_rows, vocabulary, base_stride, result_stride, RANK: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, MODE: tl.constexpr, PIECES: tl.constexpr,
    PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program's turns at the vocabulary, for up to TOKENS requests."""
    block, column = tl.program_id(1), tl.arange(0, WIDTH)
    if EARLY:
        if MODE == "bf16":
            begin = block.to(tl.int64) * TILE
            _prefetch(w2 + begin * RANK, vocabulary - begin, RANK, TILE, PIECES, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    base += token[None, :] * base_stride
    result += token[None, :] * result_stride
    is_token = (token < num_rows)[None, :]
    inside = (column < RANK)[:, None] & is_token
    given = tl.load(states + token[None, :] * RANK + column[:, None], mask=inside, other=0.0)
    high = given.to(w2.dtype.element_ty)
    low = (given - high.to(tl.float32)).to(w2.dtype.element_ty)
    # The target's logits come a turn ahead; only what a product takes is loaded further ahead.
    ahead = _load_base(base, block * TILE, vocabulary, is_token, TILE)
    for turn in range(block, tl.cdiv(vocabulary, TILE), tl.num_programs(1)):
        row = turn * TILE + tl.arange(0, TILE)
        # Rows beyond the last read the last one again.
        weights = w2 + tl.minimum(row, vocabulary - 1).to(tl.int64)[:, None] * RANK + column[None, :]
        if RANK == WIDTH:
            value = tl.load(weights)
        else:
            value = tl.load(weights, mask=(column < RANK)[None, :], other=0.0)
        logits = ahead
        ahead = _load_base(base, (turn + tl.num_programs(1)) * TILE, vocabulary, is_token, TILE)
        added = dot(value, high, None, MODE)
        if MODE == "bf16":
            added = dot(value, low, added, MODE)
        tl.store(result + row[:, None], logits + added, mask=(row < vocabulary)[:, None] & is_token)


@triton.jit
def _load_base(base, first, vocabulary, is_token, TILE: tl.constexpr):
    """The target's logits [TILE, TOKENS] from a token on."""
    row = first + tl.arange(0, TILE)
    return tl.load(base + row[:, None], mask=(row < vocabulary)[:, None] & is_token, other=0.0)
