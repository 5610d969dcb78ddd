"""How weights lie in memory: for the C++ kernels input dimension outermost ("k-major"), on CUDA as torch has them.

Shapes stay those of torch, [..., out, in]; only the strides differ, and vLLM's loaders and live reload keep strides. So
a weight needs no second, packed copy that an update could leave behind. Both functions change nothing but the layout.
"""

from __future__ import annotations

import torch
from torch import nn


def k_major(weight: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension outermost: [..., O, C] with strides (..., 1, O)."""
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_k_major(weight: torch.Tensor) -> bool:
    return weight.transpose(-1, -2).is_contiguous()


def consecutive(*weights: nn.Parameter) -> torch.Tensor:
    """Make parameters [N_i, ...] stretches of one new tensor [sum N_i, ...], which is returned.

    One product then does for several projections of the same input, and what is written into a parameter is seen by it.
    Values are not kept: for construction.
    """
    whole = torch.empty(
        sum(weight.shape[0] for weight in weights), *weights[0].shape[1:],
        dtype=weights[0].dtype, device=weights[0].device,
    )  # fmt: skip
    for weight, part in zip(weights, whole.split([weight.shape[0] for weight in weights]), strict=True):
        weight.data = part
    return whole
