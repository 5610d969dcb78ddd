"""Products of many tokens with their experts in Marlin's layout: sizes and launch of `rollout.kernels.gluon_experts`.

For Hopper (compute capability 9.0) alone, and for sizes and numbers of tokens that `fits`; Marlin's own kernel does the
rest. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import triton

from inkling_rl.formats import ExpertFormat, marlin
from inkling_rl.formats.marlin_layout import BITS
from rollout.kernels.gluon_experts import product_kernel
from rollout.kernels.triton_moe_align import Blocks

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
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


_RUNS: dict[tuple[torch.device, ExpertFormat], bool] = {}


def runs_on(device: torch.device, expert_format: ExpertFormat) -> bool:
    """Whether the kernel is for this device and gives the right values there: tried once, with a warning if not.

    The trial waits for the device. While a graph is captured it is put off, and the answer is no.
    """
    key = device, expert_format
    if key not in _RUNS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _RUNS[key] = _passes(device, expert_format)
    return _RUNS[key]


def _passes(device: torch.device, expert_format: ExpertFormat) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    try:
        error = trial(device, expert_format)
    except Exception as problem:  # whatever the compiler or the driver raises
        logger.warning("products of many tokens with %s experts run on Marlin: %s", expert_format, problem)
        return False
    if not error < 2**-8:
        logger.warning(
            "products of many tokens with %s experts run on Marlin: relative error %.1e", expert_format, error
        )
        return False
    return True


def trial(device: torch.device, expert_format: ExpertFormat) -> float:
    """Relative error of a small product: two experts of which one has a token more than a block."""
    tile, size, inputs = TILES[0], 128, 256
    w13 = torch.linspace(-2, 2, 4 * 64 * inputs, device=device).sin().view(2, 2 * 64, inputs)
    engine = marlin.from_weights(w13.bfloat16(), w13.mT[:, :, :64].bfloat16().contiguous(), expert_format)
    pairs = tile.tokens + 2
    rows = torch.full((3 * tile.tokens,), pairs, dtype=torch.int32, device=device)
    rows[: tile.tokens + 1] = torch.arange(tile.tokens + 1, device=device)
    rows[2 * tile.tokens] = tile.tokens + 1
    blocks = Blocks(rows, rows.new_tensor([0, 0, 1]), rows.new_tensor([rows.numel()]))
    x = torch.linspace(0, 99, pairs * inputs, device=device).cos().view(pairs, inputs).bfloat16()
    out = torch.full((pairs, size), float("nan"), dtype=torch.bfloat16, device=device)
    scale_2 = engine.get("w13_weight_scale_2")
    grouped_product(x, engine["w13_weight"], engine["w13_weight_scale"], scale_2, out, blocks, tile, 1, expert_format)
    stored = marlin.dequantize(engine, "w13_weight", expert_format, 64).float()
    weights = torch.cat((stored[:, 0::2], stored[:, 1::2]), 1)
    wanted = torch.cat((x[:-1].float() @ weights[0].T, x[-1:].float() @ weights[1].T))
    return float((out.float() - wanted).norm() / wanted.norm())


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
