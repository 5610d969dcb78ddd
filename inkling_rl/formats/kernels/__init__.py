"""Fast implementations of the number formats, chosen by device.

Each has the functions of its reference (`inkling_rl.formats.reference`) with the same arguments and the same bytes:
C++ on the CPU, Triton on CUDA, the reference itself where neither can run.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch

from inkling_rl.formats.kernels import cpu_mxfp8, cpu_nvfp4
from inkling_rl.formats.kernels.cpu_library import have_native
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4


class NVFP4Kernels(Protocol):
    """See `inkling_rl.formats.reference.nvfp4`."""

    def largest(self, weight: torch.Tensor, /) -> torch.Tensor: ...

    def quantize(
        self, weight: torch.Tensor, anchor: torch.Tensor, denominator: int, scales: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def dequantize(
        self, codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, denominator: int, dtype: torch.dtype, /
    ) -> torch.Tensor: ...


class MXFP8Kernels(Protocol):
    """See `inkling_rl.formats.reference.mxfp8`."""

    def quantize(
        self, weight: torch.Tensor, scales: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, /) -> torch.Tensor: ...


def nvfp4(device: torch.device) -> NVFP4Kernels:
    """Implementation of NVFP4 for tensors of `device`."""
    if device.type == "cpu" and have_native():
        return cpu_nvfp4
    if device.type == "cuda" and have_triton():
        from inkling_rl.formats.kernels import triton_nvfp4

        return triton_nvfp4
    return reference_nvfp4


def mxfp8(device: torch.device) -> MXFP8Kernels:
    """Implementation of MXFP8 for tensors of `device`."""
    if device.type == "cpu" and have_native():
        return cpu_mxfp8
    if device.type == "cuda" and have_triton():
        from inkling_rl.formats.kernels import triton_mxfp8

        return triton_mxfp8
    return reference_mxfp8


@cache
def have_triton() -> bool:
    """Whether Triton is installed; it comes with torch for CUDA."""
    return find_spec("triton") is not None


def have_fast(device: torch.device) -> bool:
    """Whether something better than the reference, which makes float32 copies, serves tensors of `device`."""
    return nvfp4(device) is not reference_nvfp4
