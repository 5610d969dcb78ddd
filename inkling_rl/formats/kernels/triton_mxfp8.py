"""MXFP8 on CUDA: the functions of `inkling_rl.formats.reference.mxfp8` as Triton kernels.

Bound by memory (3.03125 bytes per element): every value is read once, four neighbouring threads share a block and
exchange their maxima. Values that are not finite cost nothing until there are some: the quantising kernel only marks
the expert, and `_count_kernel` reads marked experts again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rl.formats.kernels.triton_blocks import check_size
from inkling_rl.formats.reference import mxfp8 as reference

BLOCK_SIZE = reference.BLOCK_SIZE
TILE, TILES, WARPS = 64, 2, 4
_MANTISSA_OF_1_75 = tl.constexpr(0x600000)
_INFINITY = tl.constexpr(0x7F800000)


def quantize(weight: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. Nothing waits for the device: the counts are there when the stream gets to them."""
    experts, rows, columns = weight.shape
    check_size(experts, rows * columns)
    weight = weight.detach()
    if weight.stride(2) != 1:
        weight = weight.contiguous()
    per_row = columns // BLOCK_SIZE
    num_blocks = rows * per_row
    codes = torch.empty(experts, rows, columns, dtype=torch.uint8, device=weight.device)
    chosen = torch.empty(experts, rows, per_row, dtype=torch.uint8, device=weight.device)
    if scales is not None:
        chosen.copy_(scales)
    counts = torch.zeros(experts, dtype=torch.int64, device=weight.device)
    where = (weight.stride(0), weight.stride(1), num_blocks, per_row, weight.stride(1) == columns)
    with torch.cuda.device(weight.device):
        _quantize_kernel[(triton.cdiv(num_blocks, TILE * TILES), experts)](
            weight, codes, chosen, counts, *where, scales is not None, TILE, TILES,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    count_non_finite(weight, counts)
    return codes, chosen, counts


def count_non_finite(weight: torch.Tensor, counts: torch.Tensor) -> None:
    """Replace what is not 0 in `counts` int64 `[E]` by the expert's number of values that are not finite."""
    if weight.stride(2) != 1:
        weight = weight.contiguous()
    experts, rows, columns = weight.shape
    per_row = columns // BLOCK_SIZE
    where = (weight.stride(0), weight.stride(1), rows * per_row, per_row, weight.stride(1) == columns)
    with torch.cuda.device(weight.device):
        _count_kernel[(experts,)](weight, counts, *where, 256, num_warps=8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See the reference."""
    codes, scales = codes.contiguous(), scales.contiguous()
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    num_blocks = scales.numel()
    with torch.cuda.device(codes.device):
        _dequantize_kernel[(triton.cdiv(num_blocks, TILE),)](codes, scales, values, num_blocks, TILE, num_warps=WARPS)
    return values


@triton.jit
def _load(weight, block, inside, stride_n, BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr):
    if FLAT:
        start = block * 32
    else:
        start = (block // BLOCKS_PER_ROW).to(tl.int64) * stride_n + (block % BLOCKS_PER_ROW) * 32
    pointers = weight + start[:, None] + tl.arange(0, 32)[None, :]
    return tl.load(pointers, mask=inside[:, None], other=0).to(tl.float32)


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(bits):
    """The ceiling scale's E8M0 byte for a block whose largest magnitude has these float32 bits."""
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > _MANTISSA_OF_1_75).to(tl.int32)
    return tl.minimum(tl.maximum(byte, 0), 254)


@triton.jit
def scale_bits(byte):
    """float32 bits of an E8M0 byte below 255; that of byte 0 is subnormal."""
    return tl.where(byte == 0, 0x00400000, byte << 23)


@triton.jit
def _quantize_kernel(
    weight, codes, scales, counts, stride_e, stride_n, num_blocks, BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr,
    GIVEN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    codes += expert * num_blocks * 32
    scales += expert * num_blocks
    for i in tl.static_range(TILES):
        block = (tl.program_id(0) * TILES + i) * TILE + tl.arange(0, TILE)
        inside = block < num_blocks
        x = _load(weight + expert * stride_e, block, inside, stride_n, BLOCKS_PER_ROW, FLAT)
        bits = tl.max(_magnitude_bits(x), axis=1)  # ordered like the magnitudes, NaN above all
        if GIVEN:
            byte = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        else:
            byte = scale_byte(bits)
            tl.store(scales + block, byte.to(tl.uint8), mask=inside)
        inverse = scale_bits(254 - byte).to(tl.float32, bitcast=True)  # 2^(127 - byte)
        code = (x * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the cast saturates on the device
        tl.store(codes + block[:, None] * 32 + tl.arange(0, 32)[None, :], code, mask=inside[:, None])
        tl.atomic_max(counts + expert + block * 0, 1, mask=inside & (bits >= _INFINITY), sem="relaxed")


@triton.jit
def _count_kernel(
    weight, counts, stride_e, stride_n, num_blocks, BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    if tl.load(counts + expert) != 0:
        total = tl.zeros([TILE], tl.int32)
        for first in range(0, num_blocks, TILE):
            block = first + tl.arange(0, TILE)
            x = _load(weight + expert * stride_e, block, block < num_blocks, stride_n, BLOCKS_PER_ROW, FLAT)
            total += tl.sum((_magnitude_bits(x) >= _INFINITY).to(tl.int32), axis=1)
        tl.store(counts + expert, tl.sum(total, axis=0).to(tl.int64))


@triton.jit
def _dequantize_kernel(codes, scales, values, num_blocks, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < num_blocks
    byte = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
    scale = tl.where(byte == 255, 0x7FC00000, scale_bits(byte)).to(tl.float32, bitcast=True)
    element = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(codes + element, mask=inside[:, None], other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(values + element, (code * scale[:, None]).to(values.dtype.element_ty), mask=inside[:, None])
