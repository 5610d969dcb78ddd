"""Implementations of Marlin's layouts, chosen by device: the seam between `formats.marlin` and what moves the bytes.

Each implementation has the functions of `inkling_rl.formats.reference.marlin` named here, with the same arguments
and the same bytes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch

from inkling_rl.formats.kernels import cpu_marlin, torch_marlin


class MarlinKernels(Protocol):
    """See `inkling_rl.formats.reference.marlin`."""

    def largest_scales(self, scales: torch.Tensor, /) -> torch.Tensor: ...

    def pack_weight(self, codes: torch.Tensor, bits: int, shards: int, rows: int, columns: int, /) -> torch.Tensor: ...

    def permute_scales(
        self, scales: torch.Tensor, shift: int | None, shards: int, rows: int, groups: int, /
    ) -> torch.Tensor: ...


def choose(device: torch.device) -> MarlinKernels:
    """Implementation for tensors of `device`: Triton on CUDA, C++ on the CPU, torch without a compiler or elsewhere."""
    if device.type == "cuda":
        from inkling_rl.formats.kernels import triton_marlin

        return triton_marlin
    if device.type == "cpu" and cpu_marlin.functions() is not None:
        return cpu_marlin
    return torch_marlin


def fused(device: torch.device) -> ModuleType | None:
    """`triton_engine`, which quantises straight to the engine's layout, where it can run."""
    if device.type != "cuda":
        return None
    from inkling_rl.formats.kernels import triton_engine

    return triton_engine
