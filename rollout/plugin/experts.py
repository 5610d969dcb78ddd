"""Router and routed experts. Source: transformers 5.24 `Inkling2TopKRouter`, `Inkling2Experts`.

Expert weights are dequantised when they are loaded: a CPU has no kernel for NVFP4 or MXFP8, and the value of a code is
defined by its format, so nothing is lost but memory.
"""

from __future__ import annotations

import torch
from torch import nn

from rollout.kernels import ops
from rollout.plugin.linear import empty_weight
from rollout.plugin.shape import ModelShape


class Router(nn.Module):
    """Routing weights, float32. The bias has the name that vLLM's live reload updates in place."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = empty_weight(shape.num_experts, shape.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(shape.num_experts, dtype=torch.float32), requires_grad=False
        )


class Experts(nn.Module):
    """Stacked expert weights in the model's dtype: gate rows, then up rows."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        num, width, hidden = shape.num_experts, shape.expert_width, shape.hidden_size
        self.gate_up_proj = empty_weight(num, 2 * width, hidden)
        self.down_proj = empty_weight(num, hidden, width)


class SparseMoe(nn.Module):
    """Top-k of all experts for every token."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape)
        self.experts = Experts(shape)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts, float32 [T, H]."""
        return ops.experts(
            x_TH,
            self.gate.weight,
            self.gate.e_score_correction_bias,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.shape.experts_per_token,
            self.shape.route_scale,
            self.shape.gate_cap,
            self.shape.up_cap,
        )
