"""Cases of the experts of few tokens, for the interpreter on a CPU and for a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inkling_rl.formats import ExpertFormat, marlin, mixed
from rollout.kernels import composed, triton_moe_vector
from rollout.kernels.triton_moe_vector import Shape
from tests.rollout.moe_cases import chosen_experts

CAPS = 4.0, 25.0


class Layer(NamedTuple):
    parameters: dict[str, torch.Tensor]
    gate_up: torch.Tensor
    """float32 [E, 2 I, H], gate half and up half."""

    down: torch.Tensor
    top_k: int


def make_layer(device: str, expert_format: ExpertFormat, size: tuple[int, int, int, int]) -> Layer:
    """A layer whose experts are all different, one of them large and one with blocks of zeros."""
    num_experts, top_k, hidden, width = size
    g = torch.Generator().manual_seed(hidden)
    w13 = torch.randn(num_experts, 2 * width, hidden, generator=g) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, width, generator=g) / width**0.5
    w13[0] *= 30
    w13[1, 3, 16:80], w2[1, 7, :32] = 0, 0
    weights = (w.bfloat16().to(device) for w in (w13, w2))
    parameters = {key: tensor.contiguous() for key, tensor in marlin.from_weights(*weights, expert_format).items()}
    gate_up, down = (marlin.dequantize(parameters, m, expert_format, width) for m in mixed.MATRICES)
    return Layer(parameters, mixed.deinterleave(gate_up), down, top_k)


def expected(layer: Layer, x: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """Float64."""
    rows = []
    for row, weights, experts in zip(x.double(), weights_TK.double(), experts_TK.long(), strict=True):
        gate_up = torch.einsum("knh,h->kn", layer.gate_up[experts].double(), row)
        hidden = composed.expert_activation(gate_up, *CAPS).double()
        rows.append(torch.einsum("khi,ki,k->h", layer.down[experts].double(), hidden, weights))
    return torch.stack(rows)


def draw(layer: Layer, tokens: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, routing weights and experts; with few experts, several tokens have the same."""
    num_experts, _, hidden = layer.gate_up.shape
    g = torch.Generator().manual_seed(tokens)
    device = layer.down.device
    x = (scale * torch.randn(tokens, hidden, generator=g)).bfloat16().to(device)
    weights = torch.rand(tokens, layer.top_k, generator=g).to(device)
    return x, weights, chosen_experts(tokens, num_experts, layer.top_k, str(device), seed=tokens)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def check(
    layer: Layer,
    tokens: int,
    dtype: torch.dtype,
    up: Shape | None = None,
    down: Shape | None = None,
    scale: float = 1.0,
) -> None:
    x, weights, chosen = draw(layer, tokens, scale)
    out = torch.full(x.shape, float("nan"), dtype=dtype, device=x.device)
    got = triton_moe_vector.experts(x, weights, chosen, layer.parameters, CAPS, out, up, down)
    assert got is out
    error = relative_error(got, expected(layer, x, weights, chosen))
    # One rounding to a half on the way, 2^-12 / sqrt(3); the interpreter truncates to bfloat16.
    limit = 4e-4 if dtype == torch.float32 else 6e-3 if x.is_cpu else 3e-3
    assert error < limit, (tokens, dtype, up, down, error)


def check_nan(layer: Layer) -> None:
    x, weights, chosen = draw(layer, 3)
    x[1] = float("nan")
    got = triton_moe_vector.experts(
        x, weights, chosen, layer.parameters, CAPS, torch.empty_like(x, dtype=torch.float32)
    )
    wanted = expected(layer, x, weights, chosen)
    assert bool(got[1].isnan().all()) and relative_error(got[[0, 2]], wanted[[0, 2]]) < 4e-4
