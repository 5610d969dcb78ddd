"""How weights lie in memory for the C++ kernels: input dimension outermost ("k-major").

Shapes stay those of torch, [..., out, in]; only the strides differ, and vLLM's loaders and live reload keep strides. So
a weight needs no second, packed copy that an update could leave behind. Both functions change nothing but the layout.
"""

from __future__ import annotations

import torch


def k_major(weight: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension outermost: [..., O, C] with strides (..., 1, O)."""
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_k_major(weight: torch.Tensor) -> bool:
    return weight.transpose(-1, -2).is_contiguous()
