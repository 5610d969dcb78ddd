"""Products of many tokens with their experts in Marlin's layout: sizes and launch of `rollout.kernels.gluon_experts`.

For Hopper (compute capability 9.0) alone, and for sizes and numbers of tokens that `fits`; Marlin's own kernel does the
rest. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from inkling_rl.formats import ExpertFormat
from inkling_rl.formats.marlin_layout import BITS
from rollout.kernels.gluon_experts import product_kernel
from rollout.kernels.triton_moe_align import Blocks

LARGEST = 2**31


class Tile(NamedTuple):
    """Tokens of a block, as two products, of which only one is computed where it has room for all tokens."""

    first: int
    second: int

    @property
    def tokens(self) -> int:
        return self.first + self.second


TILES = (Tile(64, 0), Tile(64, 32), Tile(128, 0), Tile(128, 32), Tile(128, 64))
# What a block costs beside its tokens, in tokens: loads of weights and of small tiles weigh more.
BLOCK_COST = 16
# All registers of a multiprocessor: 2 x 232 + 40 = 504 for three warpgroups.
REGISTERS, LOADER = 232, 40
# Columns of a stage, and stages.
STAGES: dict[ExpertFormat, tuple[int, int]] = {"nvfp4": (64, 4), "mxfp8": (32, 5)}


def tile_for(pairs: int, num_experts: int) -> Tile:
    """The cheapest tile if pairs fall on experts by chance: the mean and one deviation."""
    each = pairs / num_experts + (pairs / num_experts) ** 0.5

    def cost(tile: Tile) -> float:
        blocks, rest = divmod(each, tile.tokens)
        last = min(size for size in (tile.first, tile.second, tile.tokens) if size >= rest)
        return blocks * (tile.tokens + BLOCK_COST) + last + BLOCK_COST

    return min(TILES, key=lambda tile: (cost(tile), -tile.tokens))


def tiles_for(least_pairs: int, max_tokens: int, top_k: int, num_experts: int) -> list[Tile]:
    """All tiles of steps of at least so many pairs per expert and at most so many tokens."""
    fewest = -(-least_pairs * num_experts // top_k)
    return sorted({tile_for(tokens * top_k, num_experts) for tokens in range(fewest, max_tokens + 1)})


def fits(rows: int, hidden: int, width: int, top_k: int) -> bool:
    """Whether the kernel takes these sizes; `width` is the padded one."""
    return hidden % 64 == 0 and width % 64 == 0 and rows * top_k * max(hidden, 2 * width) < LARGEST


def grouped_product(
    x_TI: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None, out_NO: torch.Tensor,
    blocks: Blocks, tile: Tile, top_k: int, expert_format: ExpertFormat,
) -> torch.Tensor:  # fmt: skip
    """Pair i, times its expert: row `i // top_k` of x, bfloat16, into row i of `out_NO`, bfloat16.

    Args:
        x_TI: contiguous.
        weight: words of all experts, as `inkling_rl.formats.marlin` has them; `scale` and `scale_2` too.
        out_NO: written for all pairs.
        blocks: of `tile.tokens` pairs.
        top_k: pairs per row of x.
    """
    inputs, pairs, size = x_TI.shape[1], out_NO.shape[0], out_NO.shape[1]
    k, stages = STAGES[expert_format]
    assert x_TI.is_contiguous() and out_NO.is_contiguous() and x_TI.dtype == out_NO.dtype == torch.bfloat16
    assert weight.shape[1:] == (inputs // 16, size * BITS[expert_format] // 2) and inputs % 64 == 0 == size % 64
    constants: dict[str, Any] = {
        "INPUTS": inputs, "SIZE": size, "TOP_K": top_k, "BITS": BITS[expert_format], "FIRST": tile.first,
        "SECOND": tile.second, "K": k, "STAGES": stages, "REGISTERS": REGISTERS, "LOADER": LOADER,
    }  # fmt: skip
    outer = weight if scale_2 is None else scale_2
    grid = (blocks.experts.numel() * triton.cdiv(size, 256),)
    with torch.cuda.device_of(x_TI):
        product_kernel[grid](
            x_TI, weight, scale.view(torch.uint8), outer, out_NO, *blocks, pairs, **constants, num_warps=4
        )
    return out_NO
