"""Compiles the products of `rollout.kernels.grouped_product` that a test or a benchmark will launch, on all cores."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch

from inkling_rl.formats import ExpertFormat
from inkling_rl.formats.marlin_layout import BITS, BLOCK_SIZES
from rollout.kernels.compile_ahead import compile_ahead
from rollout.kernels.grouped_product import Tile, grouped_product
from rollout.kernels.triton_moe_align import Blocks


class Product(NamedTuple):
    """What a compiled kernel depends on."""

    expert_format: ExpertFormat
    inputs: int
    outputs: int
    top_k: int
    tile: Tile


def of_layer(expert_format: ExpertFormat, hidden: int, padded: int, top_k: int, tile: Tile) -> list[Product]:
    """Both products of a layer."""
    first = Product(expert_format, hidden, 2 * padded, top_k, tile)
    return [first, Product(expert_format, padded, hidden, 1, tile)]


def compile_products(products: Iterable[Product]) -> None:
    compile_ahead([_call(product) for product in sorted(set(products))])


def _call(product: Product) -> partial[torch.Tensor]:
    expert_format, inputs, outputs, top_k, tile = product
    new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device="cuda")
    words = new(torch.int32, 1, inputs // 16, outputs * BITS[expert_format] // 2)
    scales = new(torch.uint8, 1, inputs // BLOCK_SIZES[expert_format], outputs)
    outer = new(torch.float32, 1) if expert_format == "nvfp4" else None
    blocks = Blocks(new(torch.int32, tile.tokens), new(torch.int32, 1), new(torch.int32, 1))
    x, out = new(torch.bfloat16, 1, inputs), new(torch.bfloat16, top_k, outputs)
    return partial(grouped_product, x, words, scales, outer, out, blocks, tile, top_k, expert_format)
