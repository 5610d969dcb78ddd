"""MXFP8 (E4M3 codes, one E8M0 scale per 32 values) with the ceiling scale: the definition in code.

The scale is the smallest power of two that keeps the block's maximum at or below 448 (RCEIL, as ModelOpt, vLLM,
FlashInfer and cuBLAS use; the OCP text's floor saturates one block in five). It is computed from the bits of the
maximum, because a float32 `log2` is off by one at powers of two.

Not fast: plain torch. Source: OCP Microscaling v1.0 section 6.3; NVIDIA's rounding of its scale. Departures: an
all-zero block, or one whose maximum is so small that the exponent would be negative, stores scale byte 0 (2^-127).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_rl.formats.errors import FormatError, check_scales, check_weight

BLOCK_SIZE = 32
E4M3_MAX = 448.0
_MANTISSA_OF_1_75 = 0x600000


@dataclass(frozen=True, slots=True)
class MXFP8Tensor:
    """Quantised weights as the release stores them."""

    codes: torch.Tensor
    """uint8 view of E4M3 `[..., K]`."""

    scales: torch.Tensor
    """uint8 E8M0 `[..., K / 32]`: the scale is 2^(byte - 127), 255 is NaN."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values `[..., K]`; exact in float32 and, but for subnormal results, in bfloat16."""
        values = self.codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK_SIZE))
        return (values * e8m0_values(self.scales)[..., None]).flatten(-2).to(dtype)


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
    blocks = weight.float().unflatten(-1, (-1, BLOCK_SIZE))
    chosen = ceiling_scales(blocks.abs().amax(-1)) if scales is None else scales.clone()
    # Multiplying by 2^(127 - byte) is exact; that power of two is the value of the mirrored byte.
    inverse = e8m0_values(254 - chosen)
    # The clamp matters for given scales, and is not left to the cast: only torch 2.13 and later saturate there.
    codes = (blocks * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return MXFP8Tensor(codes.flatten(-2).view(torch.uint8), chosen)


def ceiling_scales(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes of the smallest power of two at or above `amax / 448`, for float32 block maxima of any shape."""
    bits = amax.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return (exponent - 8 + (mantissa > _MANTISSA_OF_1_75).int()).clamp(0, 254).to(torch.uint8)


def e8m0_values(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to float32 powers of two; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    byte = scales.int()
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)
