"""MXFP8 with the ceiling scale: weights to the bytes of a release, and back.

`inkling_rl.formats.reference.mxfp8` defines the arithmetic; here are the checks and the choice of an implementation by
device. The bytes are the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_rl.formats import kernels
from inkling_rl.formats.errors import FormatError, as_experts, check_scales, check_weight, refuse_non_finite
from inkling_rl.formats.reference.mxfp8 import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class MXFP8Tensor:
    """Quantised weights as the release stores them."""

    codes: torch.Tensor
    """uint8 view of E4M3 `[..., K]`."""

    scales: torch.Tensor
    """uint8 E8M0 `[..., K / 32]`: the scale is 2^(byte - 127), 255 is NaN."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values `[..., K]`; exact in float32 and, but for subnormal results, in bfloat16."""
        codes, scales = as_experts(self.codes), as_experts(self.scales)
        return kernels.mxfp8(codes.device).dequantize(codes, scales, dtype).reshape(self.codes.shape)


def quantize(weight: torch.Tensor, scales: torch.Tensor | None = None, *, name: str = "weight") -> MXFP8Tensor:
    """Quantise `weight` along its last dimension.

    Args:
        weight: `[K]`, `[N, K]` or `[E, N, K]`, bfloat16 or float32, K % 32 == 0; any strides.
        scales: uint8 `[..., K / 32]`; keep these block scales and choose codes only.
        name: how errors name the tensor.

    Raises:
        FormatError: non-finite values, wrong dtype, K not a multiple of 32, foreign scales.
    """
    check_weight(weight, BLOCK_SIZE, name)
    if scales is not None:
        check_scales(scales, weight, BLOCK_SIZE, name)
        if bool((scales == 255).any()):
            raise FormatError(f"{name}_scale must be a number; got the NaN byte 255. The stored tensor is damaged")
    given = None if scales is None else as_experts(scales)
    weight = weight.detach()  # bytes have no gradient; the reference would record one
    codes, chosen, non_finite = kernels.mxfp8(weight.device).quantize(as_experts(weight), given)
    refuse_non_finite(non_finite.tolist(), weight.ndim, name)
    return MXFP8Tensor(codes.reshape(weight.shape), chosen.reshape(*weight.shape[:-1], -1))
