"""NVFP4 with Four Over Six: the definition in code.

A block of 16 values along K shares one E4M3 scale; an expert shares one float32 anchor (`amax`). Two scales are tried
per block, one that maps the block's maximum to 6 and one that maps it to 4, and the one with the smaller absolute error
is kept. The value of a code is `e2m1(code) * e4m3(scale) * (amax / denominator)` with `denominator = 6 * scale_max`.

Not fast, and no checks: plain torch operations in the order that the bytes depend on, which every other implementation
must reproduce to the bit. Every operation is a separate IEEE float32 operation rounded to nearest (eager torch never
contracts a multiply and an add); the error is a sequential sum over the block, because a tree sum picks the other
candidate in about 1 % of low-entropy blocks.

Source: Cook et al., Four Over Six (arXiv 2512.02010); the arithmetic is Transformer Engine's torch reference
(`custom_recipes/reference_nvfp4.py`), recipe MAE, ties to 6. Departures, so that equal values have equal bytes: a block
whose scale byte is 0 stores codes 0 (hardware stores +-7), -0.0 keeps its sign (code 8).
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 16
E4M3_MAX = 448.0
FLOAT_MAX = torch.finfo(torch.float32).max
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def largest(weight: torch.Tensor) -> torch.Tensor:
    """float32 `[E]`: the largest magnitude of each expert of `weight [E, N, K]`; NaN where it holds one."""
    return weight.abs().amax(dim=(-2, -1)).float()


def quantize(
    weight: torch.Tensor, anchor: torch.Tensor, denominator: int, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a stack of experts.

    Args:
        weight: `[E, N, K]`, bfloat16 or float32, any strides.
        anchor: float32 `[E]`.
        denominator: 1536 or 2688.
        scales: uint8 `[E, N, K / 16]` to keep, or None.

    Returns:
        Codes uint8 `[E, N, K / 2]`, scales uint8 `[E, N, K / 16]` and counts int64 `[E, 3]`: values that are not
        finite, blocks whose map-to-6 scale exceeds 448, blocks that are not zero under an anchor of zero. The bytes of
        an expert with a count in the first or the last place mean nothing.
    """
    experts, rows, columns = weight.shape
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=weight.device)
    chosen = torch.empty(experts, rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=weight.device)
    counts = torch.zeros(experts, 3, dtype=torch.int64, device=weight.device)
    for e, amax in enumerate(anchor):
        blocks = weight[e].float().unflatten(-1, (-1, BLOCK_SIZE))
        base = base_scale(blocks, amax, denominator)
        if scales is None:
            scale, code = _four_over_six(blocks, base, amax, denominator)
        else:
            scale, code = scales[e], _codes(blocks, scales[e], decode_scale(amax, denominator))
        codes[e], chosen[e] = pack(torch.where(scale[..., None] == 0, 0, code).flatten(-2)), scale
        counts[e, 0] = (~torch.isfinite(blocks)).sum()
        counts[e, 1] = (base > E4M3_MAX).sum()
        counts[e, 2] = ((blocks != 0).any(-1) & (amax == 0)).sum()
    return codes, chosen, counts


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, denominator: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values `[E, N, K]` of codes `[E, N, K / 2]`, computed in float32 and rounded once more to `dtype`."""
    blocks = e2m1_values(codes).unflatten(-1, (-1, BLOCK_SIZE))
    # value * scale has at most six significant bits, so this product is exact and only the next one rounds.
    scaled = (blocks * e4m3_values(scales)[..., None]).flatten(-2)
    return (scaled * outer_scale(amax, denominator)[:, None, None]).to(dtype)


def outer_scale(amax: torch.Tensor, denominator: int) -> torch.Tensor:
    """float32 `amax / denominator`, rounded once, for anchors of any shape."""
    return amax / _constant(float(denominator), amax)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0-15 `[..., K]` to bytes `[..., K / 2]`, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Packed bytes `[..., K / 2]` to float32 values `[..., K]`."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return table[nibbles.long()]


def e4m3_values(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes to float32 values of the same shape."""
    return scales.view(torch.float8_e4m3fn).float()


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # A tensor, not a Python number: CUDA torch divides by a Python number through its rounded reciprocal.
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def encode_scale(amax: torch.Tensor, denominator: int) -> torch.Tensor:
    limit = _constant(FLOAT_MAX, amax)
    return torch.minimum(_constant(float(denominator), amax) / amax, limit)


def decode_scale(amax: torch.Tensor, denominator: int) -> torch.Tensor:
    return _constant(1.0, amax) / encode_scale(amax, denominator)


def base_scale(blocks: torch.Tensor, amax: torch.Tensor, denominator: int) -> torch.Tensor:
    """float32 `[N, K / 16]`: the map-to-6 scale before its rounding to E4M3. Division first: bytes depend on it."""
    return (blocks.abs().amax(-1) / _constant(6.0, blocks)) * encode_scale(amax, denominator)


def _e4m3(value: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 byte, ties to even, saturating."""
    # The clamp is not left to the cast: torch 2.13 saturates there, earlier releases give NaN above 464.
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e2m1(value: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code, ties to the even code, saturating at 6; the sign of -0.0 is kept."""
    a = value.abs()
    code = (a > 0.25).byte() + (a >= 0.75).byte() + (a > 1.25).byte() + (a >= 1.75).byte()
    code = code + (a > 2.5).byte() + (a >= 3.5).byte() + (a > 5.0).byte()
    return code | (torch.signbit(value).byte() << 3)


def _codes(blocks: torch.Tensor, scale: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """E2M1 codes `[N, K / 16, 16]` of blocks under given scale bytes `[N, K / 16]`."""
    step = e4m3_values(scale) * decode
    inverse = torch.minimum(_constant(1.0, step) / step, _constant(FLOAT_MAX, step))
    return _e2m1(blocks * inverse[..., None])


def _error(
    blocks: torch.Tensor, scale: torch.Tensor, code: torch.Tensor, amax: torch.Tensor, denominator: int
) -> torch.Tensor:
    """Sum of absolute errors per block `[N, K / 16]`, added from the first element to the last."""
    table = torch.tensor(E2M1_VALUES, device=blocks.device)
    value = ((table[code.long()] * e4m3_values(scale)[..., None]) * amax) / _constant(float(denominator), blocks)
    distance = (value - blocks).abs()
    error = torch.zeros_like(distance[..., 0])
    for i in range(BLOCK_SIZE):
        error = error + distance[..., i]
    return error


def _four_over_six(
    blocks: torch.Tensor, base: torch.Tensor, amax: torch.Tensor, denominator: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes `[N, K / 16]` and codes `[N, K / 16, 16]` of the better of the two candidates; a tie takes 6."""
    decode = decode_scale(amax, denominator)
    scale6, scale4 = _e4m3(base), _e4m3(base * _constant(1.5, base))
    code6, code4 = _codes(blocks, scale6, decode), _codes(blocks, scale4, decode)
    error6 = _error(blocks, scale6, code6, amax, denominator)
    error4 = _error(blocks, scale4, code4, amax, denominator)
    pick4 = error4 < error6
    return torch.where(pick4, scale4, scale6), torch.where(pick4[..., None], code4, code6)
