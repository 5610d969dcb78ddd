"""Which steps of few tokens leave Marlin for `rollout.kernels.triton_moe_vector`, and how they run there.

The kernels are tried once per process, format and model size, on the layer's own parameters and against Marlin's path,
by the first call that is not captured in a graph. Where they fail, or compute something else, one warning is logged
and Marlin keeps all steps. `rollout.kernels.cuda` is not asked: what replaces these kernels is not torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollout.plugin.marlin_experts import MarlinExperts

logger = logging.getLogger(__name__)

# Marlin's path rounds four times to bfloat16, and so is not the one to be compared to more closely.
LIMIT = 1e-2
TRIED_ROWS = 2

_RUNS: dict[tuple[object, ...], bool] = {}


def runs(layer: MarlinExperts, x_TH: torch.Tensor, top_k: int) -> bool:
    """Whether the kernels run for layers like this one; tries them if it is not known and nothing is captured."""
    hidden, padded = x_TH.shape[1], layer.w2_weight.shape[1] * 16
    key = x_TH.device, layer.expert_format, hidden, padded, top_k, layer.caps
    if key in _RUNS:
        return _RUNS[key]
    if torch.cuda.get_device_capability(x_TH.device) < (9, 0) or torch.cuda.is_current_stream_capturing():
        return False
    _RUNS[key] = False  # what the trial compares with is Marlin
    _RUNS[key] = _agrees(layer, x_TH, top_k)
    return _RUNS[key]


def forward(
    layer: MarlinExperts, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """`MarlinExperts.forward` by the other kernels."""
    from rollout.kernels.triton_moe_vector import experts

    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    parameters = {name: parameter.data for name, parameter in layer.named_parameters()}
    x_TH = x_TH.to(torch.bfloat16).contiguous()
    return experts(x_TH, weights_TK, experts_TK, parameters, layer.caps, out_TH)


def _agrees(layer: MarlinExperts, like_TH: torch.Tensor, top_k: int) -> bool:
    num_experts, hidden, device = layer.w2_weight.shape[0], like_TH.shape[1], like_TH.device
    x_TH = torch.linspace(0, 99, TRIED_ROWS * hidden, device=device).cos().view(TRIED_ROWS, hidden).to(like_TH.dtype)
    weights_TK = torch.linspace(0.1, 1, TRIED_ROWS * top_k, device=device).view(TRIED_ROWS, top_k)
    # The first experts and the last ones.
    first = torch.arange(top_k, dtype=torch.int32, device=device)
    chosen_TK = torch.stack([first, first + (num_experts - top_k)])
    try:
        got = forward(layer, x_TH, weights_TK, chosen_TK).float()
        wanted = layer(x_TH, weights_TK, chosen_TK).float()
        difference, size = float((got - wanted).norm()), float(wanted.norm())
    # Compilers and drivers fail in ways that nobody lists; Marlin is there for all of them.
    except Exception as problem:
        logger.warning("few tokens with %s experts run on Marlin: %s", layer.expert_format, problem)
        return False
    if not difference <= LIMIT * size:
        error = difference / max(size, 1e-30)
        logger.warning("few tokens with %s experts run on Marlin: relative error %.1e", layer.expert_format, error)
        return False
    return True
