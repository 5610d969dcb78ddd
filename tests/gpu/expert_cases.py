"""Layers of routed experts on a GPU and what they must give, for the tests and the benchmark there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import Inkling2TextConfig

from inkling_rl.checkpoint.tiny import tiny_config
from inkling_rl.formats import ExpertFormat, marlin, mixed
from rollout.kernels import composed, cuda, reference
from rollout.plugin import dummy
from rollout.plugin.experts import Experts, SparseMoe
from rollout.plugin.marlin_experts import MarlinExperts
from rollout.plugin.shape import ModelShape

Size = tuple[int, int, int, int]


def kernels(vector_rows: int = 0, min_pairs: int | None = None) -> cuda.Kernels:
    """A table of all kernels, untried."""
    ours = {name: cuda._triton(name) for name in cuda._TRITON}
    return replace(cuda.FALLBACKS, **ours, fell_back=(), vector_rows=vector_rows, min_pairs=min_pairs)


def dummy_moe(expert_format: ExpertFormat, size: Size, dtype: torch.dtype) -> SparseMoe:
    """A layer of dummy weights on the device."""
    experts, top_k, hidden, width = size
    text = tiny_config()["text_config"] | {
        "n_routed_experts": experts, "num_experts_per_tok": top_k, "hidden_size": hidden,
        "moe_intermediate_size": width,
    }  # fmt: skip
    shape = ModelShape.from_config(Inkling2TextConfig(**text), [expert_format] * 6)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            moe = SparseMoe(shape, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    dummy.fill(moe)
    return moe


def make_moe(expert_format: ExpertFormat, size: Size, dtype: torch.dtype) -> SparseMoe:
    """A layer whose experts are all different."""
    experts, _, hidden, width = size
    moe = dummy_moe(expert_format, size, dtype)
    if isinstance(moe.experts, MarlinExperts):
        g = torch.Generator("cuda").manual_seed(hidden)
        w13 = torch.randn(experts, 2 * width, hidden, generator=g, device="cuda").bfloat16() / hidden**0.5
        w2 = torch.randn(experts, hidden, width, generator=g, device="cuda").bfloat16() / width**0.5
        for key, tensor in marlin.from_weights(w13, w2, expert_format).items():
            moe.experts.get_parameter(key).data.copy_(tensor)
    return moe


def weights_of(moe: SparseMoe) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, float32, as Marlin multiplies with them."""
    if isinstance(moe.experts, Experts):
        return moe.experts.gate_up_proj.float(), moe.experts.down_proj.float()
    engine = dict(moe.experts.named_parameters())
    parts = [
        marlin.dequantize(engine, matrix, moe.experts.expert_format, moe.experts.expert_width)
        for matrix in mixed.MATRICES
    ]
    return mixed.deinterleave(parts[0]), parts[1]


def inputs(rows: int, moe: SparseMoe, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(1000 * seed + rows)
    return torch.randn(rows, moe.shape.hidden_size, generator=g, device="cuda").to(dtype)


def expected_of(moe: SparseMoe, weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    shape = moe.shape
    routing = moe.gate.weight, moe.gate.e_score_correction_bias
    limits = shape.experts_per_token, shape.route_scale, shape.gate_cap, shape.up_cap
    return reference.experts(x, *routing, *weights, *limits)


def same_choice(moe: SparseMoe, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows that the reference routes to the same experts; near-ties may fall the other way."""
    logits = x.double() @ moe.gate.weight.double().t()
    top_k, scale = moe.shape.experts_per_token, moe.shape.route_scale
    same = (composed.route(logits, moe.gate.e_score_correction_bias, top_k, scale)[1] == chosen).all(1)
    assert float(same.float().mean()) > 0.98
    return same


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


class Part(nn.Module):
    """A model with a norm and one layer's experts, under the names of the real one."""

    def __init__(self, moe: SparseMoe) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(4, device="cuda"), requires_grad=False)
        self.model = nn.Module()
        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.experts = moe.experts
        self.model.layers = nn.ModuleList([layer])
