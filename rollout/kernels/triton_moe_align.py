"""Which rows Marlin multiplies with which expert, for few tokens, on CUDA: one launch and no atomics on results.

Rows are the pairs (token, chosen expert), numbered `token * top_k + rank`. They are sorted by expert, and those of each
expert filled up to whole blocks with the number of pairs, which no row has. One program per expert counts all pairs, so
the programs need not wait for each other; within an expert rows ascend. vLLM's `moe_align_block_size` takes two
launches and leaves the order within an expert to chance; for thousands of pairs it is the one to use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_PAIRS, WARPS = 2048, 4
BLOCK_SIZES = (8, 16, 32, 48, 64)
"""Of Marlin."""


class Blocks(NamedTuple):
    """What Marlin's kernel for experts takes, int32."""

    rows: torch.Tensor
    """Pairs by expert, `block_size` to a block, filled up with the number of pairs."""

    experts: torch.Tensor
    """Expert of each block."""

    num_rows: torch.Tensor
    """How much of `rows` is used, [1]."""


def block_size(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: little padding and, for many tokens, few loads of an expert; vLLM's own rule."""
    return next((size for size in BLOCK_SIZES if num_pairs / num_experts / size < 0.9), BLOCK_SIZES[-1])


def single_token(top_k: int, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` and `num_rows` of one token, whose `experts` are its chosen ones: nothing of it depends on the choice."""
    rows = torch.full((top_k, block_size), top_k, dtype=torch.int32, device=device)
    rows[:, 0] = torch.arange(top_k, dtype=torch.int32, device=device)
    return rows.flatten(), torch.full((1,), top_k * block_size, dtype=torch.int32, device=device)


def align(experts_TK: torch.Tensor, num_experts: int, block_size: int) -> Blocks:
    """Blocks of at most `MAX_PAIRS` pairs; expert numbers int32, contiguous, within a token distinct."""
    pairs = experts_TK.numel()
    assert experts_TK.is_contiguous() and experts_TK.dtype == torch.int32 and 0 < pairs <= MAX_PAIRS
    most = min(pairs * block_size, pairs + num_experts * (block_size - 1))
    num_blocks = triton.cdiv(most, block_size)
    new = lambda size: torch.empty(size, dtype=torch.int32, device=experts_TK.device)
    blocks = Blocks(new(num_blocks * block_size), new(num_blocks), new(1))
    tile = tile_of(pairs)
    with torch.cuda.device_of(experts_TK):
        _align_kernel[(num_experts,)](
            experts_TK, *blocks, pairs, num_experts, max(32, triton.next_power_of_2(num_experts + 1)), tile,
            block_size, triton.next_power_of_2(block_size), num_warps=WARPS,
        )  # fmt: skip
    return blocks


def tile_of(pairs: int) -> int:
    """Pairs that a program compares at once."""
    return max(128, triton.next_power_of_2(pairs))


@triton.jit(do_not_specialize=["pairs"])
def _align_kernel(
    experts, rows, block_experts, num_rows, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    pair = tl.arange(0, TILE)
    expert = tl.load(experts + pair, mask=pair < pairs, other=EXPERTS)
    bins = tl.arange(0, BINS)
    count = tl.histogram(expert, BINS)
    filled = tl.where(bins < EXPERTS, (count + BLOCK - 1) // BLOCK * BLOCK, 0)
    if own == 0:
        tl.store(num_rows, tl.sum(filled, axis=0))
    first = tl.sum(tl.where(bins < own, filled, 0), axis=0)
    own_count = tl.sum(tl.where(bins == own, count, 0), axis=0)
    own_filled = tl.sum(tl.where(bins == own, filled, 0), axis=0)
    mine = expert == own
    tl.store(rows + first + tl.cumsum(mine.to(tl.int32), axis=0) - 1, pair, mask=mine)
    lane = tl.arange(0, LANES)
    tl.store(rows + first + own_count + lane, tl.zeros_like(lane) + pairs, mask=own_count + lane < own_filled)
    for block in range(own_filled // BLOCK):
        tl.store(block_experts + first // BLOCK + block, own)
