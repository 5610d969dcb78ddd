"""Trials of the two kernels that take experts from vLLM's Marlin, and the torch functions they are compared with.

Like `rollout.kernels.trials`, before weights are there: on random codes and scales of a few experts with the model's
sizes. That is still a hundred megabytes, so the torch functions run on the device too. They read Marlin's layout by
`inkling_rl.formats`, not by Marlin's operators, which a driver would first compile for most of a minute. In an engine
they never run: where one of the kernels does not, Marlin does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from inkling_rl.formats import ExpertFormat
from inkling_rl.formats.marlin_inverse import matrix_values
from inkling_rl.formats.marlin_layout import padded_width, shapes
from rollout.kernels import composed
from rollout.kernels.fallback import Blocks
from rollout.kernels.trials import LIMITS, Sizes, Trial

EXPERTS = 3
ROWS = 3
_LEAST_SCALE = 128
"""Of NVFP4's scale bytes: 2, as the engine has them; smaller ones count as 0."""


def vector_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    caps: tuple[float, float],
    out_TH: torch.Tensor,
    up: Any = None,
    down: Any = None,
    early: bool = True,
) -> torch.Tensor:
    """`triton_moe_vector.experts`. Waits for the device."""
    expert_format: ExpertFormat = "nvfp4" if "w13_weight_scale_2" in parameters else "mxfp8"
    total_TH = torch.zeros_like(out_TH, dtype=torch.float64)
    for expert in experts_TK.unique().tolist():
        token, rank = (experts_TK == expert).nonzero(as_tuple=True)
        gate_up_PC = x_TH[token].double() @ _values(parameters, "w13_weight", expert, expert_format).t()
        hidden_PI = composed.expert_activation(gate_up_PC, *caps).double()
        down_PH = hidden_PI @ _values(parameters, "w2_weight", expert, expert_format).t()
        total_TH.index_add_(0, token, down_PH * weights_TK[token, rank, None])
    return out_TH.copy_(total_TH)


def _values(
    parameters: Mapping[str, torch.Tensor], matrix: str, expert: int, expert_format: ExpertFormat
) -> torch.Tensor:
    """Of one expert, float64 [outputs, inputs]: float32 products may be rounded to tf32."""
    some = slice(expert, expert + 1)
    scale_2 = parameters[f"{matrix}_scale_2"][some] if expert_format == "nvfp4" else None
    return matrix_values(parameters[matrix][some], parameters[f"{matrix}_scale"][some], scale_2, expert_format)[
        0
    ].double()


def grouped_product(
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_2: torch.Tensor | None,
    out_NO: torch.Tensor,
    blocks: Blocks,
    tile: Any,
    top_k: int,
    expert_format: ExpertFormat,
) -> torch.Tensor:
    """`grouped_product.grouped_product`. Waits for the device."""
    parameters = {"weight": weight, "weight_scale": scale} | ({} if scale_2 is None else {"weight_scale_2": scale_2})
    used = int(blocks.num_rows) // tile.tokens
    for rows, expert in zip(blocks.rows.split(tile.tokens)[:used], blocks.experts[:used].tolist(), strict=True):
        pairs = rows[rows < out_NO.shape[0]].long()
        product_PO = x_TI[pairs // top_k].double() @ _values(parameters, "weight", expert, expert_format).t()
        out_NO[pairs] = product_PO.to(out_NO.dtype)
    return out_NO


def layer(sizes: Sizes, expert_format: ExpertFormat) -> dict[str, torch.Tensor]:
    """A few experts as the engine holds them, of random codes: weights about one over the root of their inputs."""
    g = torch.Generator().manual_seed(0)
    parameters = {}
    for key, (shape, dtype) in shapes(expert_format, EXPERTS, sizes.hidden, sizes.expert_width).items():
        padded = padded_width(sizes.expert_width, sizes.hidden, expert_format)
        inputs = sizes.hidden if key.startswith("w13") else padded
        if dtype == torch.int32:
            words = torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int32)
            # E4M3 codes below 2, so that none is NaN.
            parameters[key] = words & ~0x40404040 if expert_format == "mxfp8" else words
        elif dtype == torch.float32:
            # Codes and scales are about 3 and 4; 2^126 is what Marlin's decoding leaves undone.
            factors = torch.rand(shape, generator=g) + 0.5
            parameters[key] = factors * (2.0**126 / (12 * math.sqrt(inputs)))
        else:
            first = _LEAST_SCALE if expert_format == "nvfp4" else 127 - round(math.log2(0.6 * math.sqrt(inputs))) - 1
            scales = first + torch.randint(0, 16 if expert_format == "nvfp4" else 3, shape, generator=g)
            parameters[key] = scales.to(torch.uint8).view(dtype)
    return parameters


def _vector_experts(sizes: Sizes) -> Iterator[Trial]:
    for expert_format in sizes.expert_formats:
        g = torch.Generator().manual_seed(1)
        # Fewer experts than a token chooses, so some come twice; the kernels go by pairs and do not mind.
        chosen = torch.arange(ROWS * sizes.top_k, dtype=torch.int32).view(ROWS, sizes.top_k) % EXPERTS
        x, weights = torch.randn(ROWS, sizes.hidden, generator=g), torch.rand(ROWS, sizes.top_k, generator=g)
        caps, out = (sizes.gate_cap, sizes.up_cap), torch.zeros(ROWS, sizes.hidden, dtype=torch.bfloat16)
        arguments = (x.bfloat16(), weights, chosen, layer(sizes, expert_format), caps, out)
        yield Trial(f"{expert_format}, {ROWS} tokens", arguments, LIMITS[torch.bfloat16], (5,), on_device=True)


def _grouped_product(sizes: Sizes) -> Iterator[Trial]:
    """Every tile that a step may choose; of its blocks one is full, in the others one of the two parts is enough."""
    from rollout.kernels.grouped_product import tiles_for

    for expert_format in sizes.expert_formats:
        parameters, g = layer(sizes, expert_format), torch.Generator().manual_seed(1)
        for tile in tiles_for(sizes.least_pairs, sizes.max_tokens, sizes.top_k, sizes.experts):
            counts = [tile.tokens, tile.second + 1, max(tile.second - 1, 1)]
            pairs = sum(counts)
            rows = torch.full((len(counts), tile.tokens), pairs, dtype=torch.int32)
            for row, part in zip(rows, torch.arange(pairs, dtype=torch.int32).split(counts), strict=True):
                row[: len(part)] = part
            experts = torch.tensor([0, 2, 1], dtype=torch.int32)
            blocks = Blocks(rows.flatten(), experts, torch.tensor([rows.numel()], dtype=torch.int32))
            for matrix, top_k in (("w13_weight", sizes.top_k), ("w2_weight", 1)):
                weight, scale = parameters[matrix], parameters[f"{matrix}_scale"]
                inputs, outputs = weight.shape[1] * 16, scale.shape[2]
                x = torch.randn(-(-pairs // top_k), inputs, generator=g).bfloat16()
                out = torch.zeros(pairs, outputs, dtype=torch.bfloat16)
                scale_2 = parameters.get(f"{matrix}_scale_2")
                arguments = (x, weight, scale, scale_2, out, blocks, tile, top_k, expert_format)
                what = f"{expert_format}, {matrix}, blocks of {tile.tokens}"
                yield Trial(what, arguments, LIMITS[torch.bfloat16], (4,), on_device=True)


EXPERT_TRIALS: dict[str, Callable[[Sizes], Iterator[Trial]]] = {
    "vector_experts": _vector_experts,
    "grouped_product": _grouped_product,
}
