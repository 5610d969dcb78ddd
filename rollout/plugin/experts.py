"""Router and routed experts. Source: transformers 5.24 `Inkling2TopKRouter`, `Inkling2Experts`.

On a CPU, and in a float32 model, expert weights are dequantised when they are loaded: there is no kernel for NVFP4 or
MXFP8 then, and the value of a code is defined by its format, so nothing is lost but memory. A bfloat16 model on an
NVIDIA GPU keeps them as they are stored (`rollout.plugin.marlin_experts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rollout.kernels import composed, ops
from rollout.plugin.linear import empty_weight
from rollout.plugin.shape import ModelShape

if TYPE_CHECKING:
    from rollout.kernels.cuda import Kernels
    from rollout.plugin.marlin_experts import MarlinExperts

logger = logging.getLogger(__name__)

MANY_EXPERTS = 32


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
        self.caps = shape.gate_cap, shape.up_cap
        self.gate_up_proj = empty_weight(num, 2 * width, hidden)
        self.down_proj = empty_weight(num, hidden, width)

    def forward(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts [T, H] in x's dtype, by all experts on all tokens: for small models and tests.

        Which rows go to which expert is known on the device alone, so only this much work can be captured in a graph.
        Float32, experts in ascending order; a token's sum has a zero for each that it did not choose.
        """
        x = x_TH.float()
        weights_TE = x.new_zeros(x.shape[0], self.gate_up_proj.shape[0]).scatter_(1, experts_TK.long(), weights_TK)
        total_TH = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            hidden = composed.expert_activation(F.linear(x, gate_up.float()), *self.caps)
            total_TH += F.linear(hidden, down.float()) * weights_TE[:, expert, None]
        return total_TH.to(x_TH.dtype)


class SparseMoe(nn.Module):
    """Top-k of all experts for every token."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer_id = layer
        self.capture_fn: Callable[[torch.Tensor], None] | None = None
        """Takes the chosen experts' numbers, int32 [T, top_k], of every step: vLLM's `RoutedExpertsCaptureSource`."""
        self.router: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self.gate = Router(shape)
        self.experts = _experts(shape, layer)

    def use(self, kernels: Kernels) -> None:
        """Run on these kernels, of which some may be fallbacks, rather than on the Triton functions themselves."""
        self.router = kernels.route
        if not isinstance(self.experts, Experts):
            self.experts.use(kernels)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts [T, H]: float32 on the CPU, in x's dtype on CUDA."""
        if x_TH.is_cuda:
            weights_TK, experts_TK = self._route(x_TH)
            if self.capture_fn is not None:
                self.capture_fn(experts_TK)
            return self.experts(x_TH, weights_TK, experts_TK)
        shape, gate, experts = self.shape, self.gate, self.experts
        assert isinstance(experts, Experts)
        if self.capture_fn is not None:
            logits_TE = ops.linear(x_TH, gate.weight)
            choice = composed.route(logits_TE, gate.e_score_correction_bias, shape.experts_per_token, shape.route_scale)
            self.capture_fn(choice[1])
        return ops.experts(
            x_TH,
            gate.weight,
            gate.e_score_correction_bias,
            experts.gate_up_proj,
            experts.down_proj,
            shape.experts_per_token,
            shape.route_scale,
            shape.gate_cap,
            shape.up_cap,
        )

    def _route(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and numbers int32 of the chosen experts, [T, top_k], ascending."""
        if self.router is None:
            from rollout.kernels.triton_router import route

            self.router = route
        gate, shape = self.gate, self.shape
        bias_E = gate.e_score_correction_bias
        # Parameters are written between steps; what runs right before this is the mixture that x comes from.
        return self.router(x_TH, gate.weight, bias_E, shape.experts_per_token, shape.route_scale, constant=True)


def _experts(shape: ModelShape, layer: int) -> Experts | MarlinExperts:
    """The experts of a layer, by its format, on the default device in the default dtype."""
    expert_format, is_cuda = shape.expert_formats[layer], torch.get_default_device().type == "cuda"
    if is_cuda and expert_format != "bf16" and torch.get_default_dtype() == torch.bfloat16:
        from rollout.plugin.marlin_experts import MarlinExperts

        return MarlinExperts(shape, expert_format, f"model.layers.{layer}.mlp.experts")
    if is_cuda and shape.num_experts > MANY_EXPERTS:
        _warn_dense(shape.num_experts, shape.experts_per_token)
    return Experts(shape)


@cache
def _warn_dense(num_experts: int, top_k: int) -> None:
    logger.warning(
        "experts that are bfloat16 in the checkpoint, or in a float32 model, run all on every token on a GPU: about %d "
        "times the work. Use a bfloat16 model with NVFP4 or MXFP8 experts (inkling-rl convert)",
        num_experts // top_k,
    )
