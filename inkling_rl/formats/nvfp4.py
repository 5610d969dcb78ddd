"""NVFP4 with Four Over Six: the definition in code.

A block of 16 values along K shares one E4M3 scale; an expert shares one float32 anchor (`amax`). Two scales are tried
per block, one that maps the block's maximum to 6 and one that maps it to 4, and the one with the smaller absolute error
is kept. The value of a code is `e2m1(code) * e4m3(scale) * (amax / denominator)` with `denominator = 6 * scale_max`.

Not fast: plain torch operations in the order that the bytes depend on. Every operation is a separate IEEE float32
operation rounded to nearest (eager torch never contracts a multiply and an add); the error is a sequential sum over the
block, because a tree sum picks the other candidate in about 1 % of low-entropy blocks.

Source: Cook et al., Four Over Six (arXiv 2512.02010); the arithmetic is Transformer Engine's torch reference
(`custom_recipes/reference_nvfp4.py`), recipe MAE, ties to 6. Departures, so that equal values have equal bytes: a block
whose scale byte is 0 stores codes 0 (hardware stores +-7), -0.0 keeps its sign (code 8), non-finite input is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_rl.formats.errors import FormatError, check_scales, check_weight

BLOCK_SIZE = 16
E4M3_MAX = 448.0
SCALE_MAXIMA = (256, 448)
DENOMINATORS = tuple(6 * m for m in SCALE_MAXIMA)
FLOAT_MAX = torch.finfo(torch.float32).max
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class NVFP4Tensor:
    """Quantised weights as the release stores them."""

    codes: torch.Tensor
    """uint8 `[..., K / 2]`; element 2j in the low nibble, 2j + 1 in the high one."""

    scales: torch.Tensor
    """uint8 view of E4M3 `[..., K / 16]`."""

    amax: torch.Tensor
    """float32 anchor: scalar, or `[E]` for a stack of experts."""

    denominator: int
    """1536 or 2688; the outer scale is `amax / denominator`, rounded once."""

    saturated: int = 0
    """Blocks whose map-to-6 scale would exceed 448, counted while quantising (0 for imported tensors)."""

    def __post_init__(self) -> None:
        if self.denominator not in DENOMINATORS:
            raise FormatError(
                f"outer_scale_denominator must be {DENOMINATORS[0]} or {DENOMINATORS[1]}; got {self.denominator}. "
                "The checkpoint was made by another recipe"
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values `[..., K]`, computed in float32 and rounded once more to `dtype`."""
        values = e2m1_values(self.codes)
        blocks = values.unflatten(-1, (-1, BLOCK_SIZE))
        # value * scale has at most six significant bits, so this product is exact and only the next one rounds.
        scaled = (blocks * e4m3_values(self.scales)[..., None]).flatten(-2)
        denominator = torch.tensor(float(self.denominator), device=self.amax.device)
        outer = self.amax / denominator
        return (scaled * outer.reshape(outer.shape + (1,) * (scaled.ndim - outer.ndim))).to(dtype)


def quantize(
    weight: torch.Tensor,
    amax: torch.Tensor | float | None = None,
    scales: torch.Tensor | None = None,
    scale_max: int = 256,
    *,
    name: str = "weight",
) -> NVFP4Tensor:
    """Quantise `weight` along its last dimension.

    Args:
        weight: `[K]`, `[N, K]` or a stack of experts `[E, N, K]`, bfloat16 or float32, K % 16 == 0; any strides.
        amax: the anchor to use (scalar, or `[E]` for three dimensions); the maximum of the weights unless given.
        scales: uint8 `[..., K / 16]`; keep these block scales and choose codes only. They mean something only together
            with the anchor they were made with.
        scale_max: E4M3 value that the anchor's block gets, 256 (Four Over Six) or 448.
        name: how errors name the tensor.

    Raises:
        FormatError: non-finite values, wrong dtype, K not a multiple of 16, an unusable anchor, foreign scales.
    """
    if scale_max not in SCALE_MAXIMA:
        raise FormatError(f"scale_max must be 256 or 448; got {scale_max}. Use 256, the release's recipe")
    check_weight(weight, BLOCK_SIZE, name)
    if scales is not None:
        check_scales(scales, weight, BLOCK_SIZE, name)
    anchor = _anchor(weight, amax, name)
    experts = weight if weight.ndim == 3 else weight.reshape(1, -1, weight.shape[-1])
    given = None if scales is None else scales.reshape(*experts.shape[:2], -1)
    codes = torch.empty(*experts.shape[:2], weight.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    chosen = torch.empty(*experts.shape[:2], weight.shape[-1] // BLOCK_SIZE, dtype=torch.uint8, device=weight.device)
    saturated = 0
    for e, expert_amax in enumerate(anchor.reshape(-1)):
        blocks = experts[e].float().unflatten(-1, (-1, BLOCK_SIZE))
        base = _base_scale(blocks, expert_amax, 6 * scale_max)
        if given is None:
            scale, code = _four_over_six(blocks, base, expert_amax, 6 * scale_max)
        else:
            scale, code = given[e], _codes(blocks, given[e], _decode_scale(expert_amax, 6 * scale_max))
        codes[e], chosen[e] = pack(torch.where(scale[..., None] == 0, 0, code).flatten(-2)), scale
        saturated += int((base > E4M3_MAX).sum())
    shape = weight.shape[:-1]
    return NVFP4Tensor(codes.reshape(*shape, -1), chosen.reshape(*shape, -1), anchor, 6 * scale_max, saturated)


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


def _anchor(weight: torch.Tensor, amax: torch.Tensor | float | None, name: str) -> torch.Tensor:
    magnitude = weight.abs()
    largest = (magnitude.amax(dim=(-2, -1)) if weight.ndim == 3 else magnitude.max()).float()
    if amax is None:
        return largest
    anchor = torch.as_tensor(amax, dtype=torch.float32, device=weight.device)
    if anchor.shape != largest.shape:
        raise FormatError(
            f"{name}_amax must have shape {list(largest.shape)}; got {list(anchor.shape)}. Pass one anchor per expert"
        )
    if not bool((torch.isfinite(anchor) & (anchor >= 0)).all()):
        raise FormatError(f"{name}_amax must be finite and not negative; got {anchor.tolist()}. Recompute the anchor")
    dead = ((anchor == 0) & (largest > 0)).reshape(-1).nonzero().flatten().tolist()
    if dead:
        raise FormatError(
            f"{name}_amax must be positive where the expert is not all zero; got 0 for expert {dead[0]} "
            f"({len(dead)} in all). Re-anchor these experts"
        )
    return anchor


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # A tensor, not a Python number: CUDA torch divides by a Python number through its rounded reciprocal.
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _encode_scale(amax: torch.Tensor, denominator: int) -> torch.Tensor:
    limit = _constant(FLOAT_MAX, amax)
    return torch.minimum(_constant(float(denominator), amax) / amax, limit)


def _decode_scale(amax: torch.Tensor, denominator: int) -> torch.Tensor:
    return _constant(1.0, amax) / _encode_scale(amax, denominator)


def _base_scale(blocks: torch.Tensor, amax: torch.Tensor, denominator: int) -> torch.Tensor:
    """float32 `[N, K / 16]`: the map-to-6 scale before its rounding to E4M3. Division first: bytes depend on it."""
    return (blocks.abs().amax(-1) / _constant(6.0, blocks)) * _encode_scale(amax, denominator)


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
    decode = _decode_scale(amax, denominator)
    scale6, scale4 = _e4m3(base), _e4m3(base * _constant(1.5, base))
    code6, code4 = _codes(blocks, scale6, decode), _codes(blocks, scale4, decode)
    error6 = _error(blocks, scale6, code6, amax, denominator)
    error4 = _error(blocks, scale4, code4, amax, denominator)
    pick4 = error4 < error6
    return torch.where(pick4, scale4, scale6), torch.where(pick4[..., None], code4, code6)
