"""Marlin's layouts of fused experts: the definition in code.

vLLM's Marlin kernels (weight-only, the choice on Hopper for both formats) hold an expert's matrix as int32 words in the
order in which the lanes of a warp feed tensor cores, and block scales transposed and permuted within 64 channels. NVFP4
scales have a format without sign and with five exponent bits there, moved up by a power of two that all local
experts share. Everything here follows from closed forms of where each code goes.

Not fast, and no checks: index arithmetic in plain torch, expert by expert. Source: vLLM 0.30
`quantization/utils/{marlin_utils,marlin_utils_fp4,marlin_utils_fp8}.py` (what is computed and in which order) and its
`gptq_marlin_repack` operator for the weights. Departures: none in bytes.
"""

from __future__ import annotations

import math

import torch

from inkling_rl.formats.reference import nvfp4

TILE_K = 16
TILE_N = 64
# One word's codes: place in the word (from the low end) to number of the code.
_NVFP4_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
_MXFP8_PLACES = (0, 2, 1, 3)
_SCALE_PLACES = (0, 2, 1, 3)


def pack_weight(codes: torch.Tensor, bits: int, shards: int, rows: int, columns: int) -> torch.Tensor:
    """Words of a stack of experts.

    Args:
        codes: uint8 `[E, R, K * bits / 8]`, stored rows and bytes; for `shards` 2 the rows alternate gate, up.
        bits: 4 (NVFP4) or 8 (MXFP8).
        shards: 2 for w13, whose halves the engine keeps apart, 1 for w2.
        rows: per shard after padding with zeros, a multiple of 64.
        columns: K after padding with zeros, a multiple of 16.

    Returns:
        int32 `[E, columns / 16, shards * rows * bits / 2]`.
    """
    place_n, place_k = _places(bits, shards * rows, columns)
    words = []
    for expert in codes:
        matrix = _unpack(_pad(_engine_rows(expert, shards, rows), columns * bits // 8), bits).long()
        fields = matrix[place_n, place_k]
        shifts = torch.arange(0, 32, bits, device=codes.device)
        words.append(_as_int32((fields << shifts).sum(-1)))
    return torch.stack(words)


def permute_scales(scales: torch.Tensor, shift: int | None, shards: int, rows: int, groups: int) -> torch.Tensor:
    """Scale bytes of a stack of experts, `uint8 [E, R, G]` to `[E, groups, shards * rows]`.

    `shift` is that of `scale_shift` for NVFP4 and None for MXFP8, whose bytes stay as they are. Padding is byte 0.
    """
    source = _scale_columns(shards * rows, scales.device)
    bytes_ = scales if shift is None else scale_bytes(scales, shift)
    return torch.stack([_pad(_engine_rows(expert, shards, rows), groups)[source].T for expert in bytes_])


def largest_scales(scales: torch.Tensor) -> torch.Tensor:
    """uint8 `[E]`: the largest byte of each expert's scales `uint8 [E, R, G]`; of numbers it is the largest number."""
    return scales.amax((1, 2))


def scale_shift(largest: int) -> int:
    """Powers of two by which NVFP4 scales move up: `floor(log2(448 / scale))` of the largest E4M3 byte of all local
    experts of a matrix; 0 where all are zero."""
    if largest == 0:
        return 0
    value = float(nvfp4.e4m3_values(torch.tensor([largest], dtype=torch.uint8, device="cpu")))
    return math.floor(math.log2(448.0 / value))


def scale_bytes(scales: torch.Tensor, shift: int) -> torch.Tensor:
    """E4M3 bytes (not negative, no NaN) to bytes of five exponent and three mantissa bits without a sign.

    The engine's scale is `scale * 2^(7 + shift)`. What stays below 2 is flushed to zero: the kernel takes the top bit
    for granted. For `shift` 0 these are exactly the subnormal scales.
    """
    scaled = (nvfp4.e4m3_values(scales) * 2.0 ** (7 + shift)).to(torch.float16)
    flushed = torch.where(scaled < 2, 0, scaled)
    # Half precision has five exponent bits; dropping the sign and seven mantissa bits leaves the byte, exactly.
    return (flushed.view(torch.int16) >> 7).to(torch.uint8)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """float32 values that the kernel takes from the bytes of `scale_bytes`: `scale * 2^(7 + shift)`, or 0."""
    return (scales.to(torch.int16) << 7).view(torch.float16).float()


def outer_scale(amax: torch.Tensor, denominator: int, shift: int) -> torch.Tensor:
    """float32 `[E]`: `amax / denominator` rounded once, times 2^119, over 2^shift.

    The kernel widens E2M1 to bfloat16 without correcting the exponent, which costs 2^126; 2^7 of it is in the scales.
    """
    return (nvfp4.outer_scale(amax, denominator) * 2.0**119) / 2.0**shift


def _engine_rows(expert: torch.Tensor, shards: int, rows: int) -> torch.Tensor:
    """Stored rows `[shards * F, C]` to `[shards * rows, C]`: gate rows, zeros, up rows, zeros."""
    out = expert.new_zeros(shards, rows, expert.shape[-1])
    for shard in range(shards):
        stored = expert[shard::shards]
        out[shard, : len(stored)] = stored
    return out.flatten(0, 1)


def _pad(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    out = matrix.new_zeros(len(matrix), columns)
    out[:, : matrix.shape[1]] = matrix
    return out


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return packed if bits == 8 else torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _places(bits: int, size_n: int, size_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each code of each word, `[K / 16, N * bits / 2, 32 / bits]` each."""
    kt = torch.arange(size_k // TILE_K)[:, None, None]
    w = torch.arange(size_n * bits // 2)[None, :, None]
    if bits == 4:
        u = torch.tensor(_NVFP4_PLACES)
        r = u % 4
        block, i, j, half = w // 128, w % 128 // 4, w % 4, u // 4
    else:
        r = torch.tensor(_MXFP8_PLACES)
        block, i, j, half = w // 256, w % 256 // 8, w % 8 // 2, w % 2
    k = TILE_K * kt + 2 * (i % 4) + (r & 1) + 8 * (r >> 1)
    n = TILE_N * block + 16 * j + i // 4 + 8 * half
    places = torch.broadcast_tensors(n, k)
    return places[0], places[1]


def _scale_columns(size_n: int, device: torch.device) -> torch.Tensor:
    """Source row of each column of permuted scales."""
    column = torch.arange(size_n, device=device)
    m = column % TILE_N
    p = (m & ~3) + torch.tensor(_SCALE_PLACES, device=device)[m & 3]
    return TILE_N * (column // TILE_N) + p // 8 + 8 * (p % 8)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit values held in int64 to the int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
