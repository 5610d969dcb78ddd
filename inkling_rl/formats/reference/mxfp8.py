"""MXFP8 (E4M3 codes, one E8M0 scale per 32 values) with the ceiling scale: the definition in code.

The scale is the smallest power of two that keeps the block's maximum at or below 448 (RCEIL, as ModelOpt, vLLM,
FlashInfer and cuBLAS use; the OCP text's floor saturates one block in five). It is computed from the bits of the
maximum, because a float32 `log2` is off by one at powers of two.

Not fast, and no checks: plain torch. Source: OCP Microscaling v1.0 section 6.3; NVIDIA's rounding of its scale.
Departures: an all-zero block, or one whose maximum is so small that the exponent would be negative, stores scale byte 0
(2^-127).
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 32
E4M3_MAX = 448.0
_MANTISSA_OF_1_75 = 0x600000


def quantize(weight: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a stack of experts `[E, N, K]`, bfloat16 or float32, any strides; `scales` as in the result, to keep.

    Returns:
        Codes uint8 (E4M3) `[E, N, K]`, scales uint8 (E8M0) `[E, N, K / 32]` and int64 `[E]`, the number of values that
        are not finite. The bytes of an expert with such values mean nothing.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK_SIZE))
    chosen = ceiling_scales(blocks.abs().amax(-1)) if scales is None else scales.clone()
    # Multiplying by 2^(127 - byte) is exact; that power of two is the value of the mirrored byte.
    inverse = e8m0_values(254 - chosen)
    # The clamp matters for given scales, and is not left to the cast: only torch 2.13 and later saturate there.
    codes = (blocks * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2).view(torch.uint8), chosen, (~torch.isfinite(weight)).sum((1, 2))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of codes `[..., K]` under scales `[..., K / 32]`."""
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK_SIZE))
    return (values * e8m0_values(scales)[..., None]).flatten(-2).to(dtype)


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
