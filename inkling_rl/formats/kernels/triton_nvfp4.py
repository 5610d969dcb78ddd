"""NVFP4 with Four Over Six on CUDA: the functions of `inkling_rl.formats.reference.nvfp4` as Triton kernels.

Quantising is bound by instructions before it is bound by memory (2.5625 bytes leave about 20 instructions per element
on an H200), so it is done in two steps:

- `_fast_kernel` reads every block once. A thread owns whole blocks, so no value crosses threads. Blocks for which
  `fast_block` is not certain (about one in 1,500 of Gaussian weights; all that saturate, whose scale is subnormal or
  zero, or that hold values that are not finite) go on lists.
- `_exact_kernel` repeats the reference operation by operation for the listed blocks, and counts what is to be counted.

Not a definition: every byte is the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rl.formats.kernels.triton_blocks import absmax, aligned, append, check_size, load_block, pointers
from inkling_rl.formats.kernels.triton_four_over_six import (
    LISTED,
    SPAN,
    count_block,
    exact_base,
    exact_candidate,
    exact_choice,
    fast_block,
    prepare,
)
from inkling_rl.formats.reference import nvfp4 as reference

BLOCK_SIZE = reference.BLOCK_SIZE
TILE, TILES, UNROLL, WARPS = 128, 16, 2, 4


def largest(weight: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    source, stride_e, stride_n, flat = pointers(weight)
    experts, rows, columns = weight.shape
    num_blocks = rows * columns // BLOCK_SIZE
    bits = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    grid = (triton.cdiv(num_blocks, 256 * 8), experts)
    with torch.cuda.device(weight.device):
        _largest_kernel[grid](
            source, bits, stride_e, stride_n, num_blocks, columns // BLOCK_SIZE, flat, 256, 8, num_warps=8
        )
    return bits.view(torch.float32)


def quantize(
    weight: torch.Tensor, anchor: torch.Tensor, denominator: int, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. Nothing waits for the device: the counts are there when the stream gets to them."""
    source, stride_e, stride_n, flat = pointers(weight)
    experts, rows, columns = weight.shape
    num_blocks, per_row = rows * columns // BLOCK_SIZE, columns // BLOCK_SIZE
    empty = lambda *shape, dtype: torch.empty(experts, *shape, dtype=dtype, device=weight.device)
    codes, counts = empty(rows, columns // 2, dtype=torch.uint8), empty(3, dtype=torch.int64)
    chosen = (
        empty(rows, per_row, dtype=torch.uint8)
        if scales is None
        else scales.clone(memory_format=torch.contiguous_format)
    )
    state = prepare(anchor, denominator, counts, num_blocks)
    where = (stride_e, stride_n, num_blocks, per_row, flat, state.spans, SPAN, LISTED)
    with torch.cuda.device(weight.device):
        if scales is None:
            _fast_kernel[(triton.cdiv(num_blocks, TILE * TILES), experts)](
                source, state.table, state.scales, codes.view(torch.int32), chosen, state.lists, *where,
                num_blocks % (TILE * TILES) == 0, TILE, TILES, UNROLL, 65536, 4,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        given, tile, warps = (True, 128, 4) if scales is not None else (False, 32, 1)
        _exact_kernel[(state.spans, experts)](
            source, state.scales, codes.view(torch.int32), chosen, state.lists, counts, *where, given, tile,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, chosen, counts


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, denominator: int, dtype: torch.dtype
) -> torch.Tensor:
    """See the reference."""
    codes, scales = aligned(codes), scales.contiguous()
    experts, rows, half = codes.shape
    check_size(experts, 2 * rows * half)
    values = torch.empty(experts, rows, 2 * half, dtype=dtype, device=codes.device)
    words = rows * half // 4
    outer = reference.outer_scale(amax.float().contiguous(), denominator)
    with torch.cuda.device(codes.device):
        _dequantize_kernel[(triton.cdiv(words, 512), experts)](
            codes.view(torch.int32), scales, outer, values, words, 512, num_warps=4, enable_fp_fusion=False
        )
    return values


@triton.jit
def _largest_kernel(
    weight, bits, stride_e, stride_n, num_blocks,
    BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    found = tl.zeros([TILE], tl.int32)
    for i in range(TILES):
        block = (tl.program_id(0) * TILES + i) * TILE + tl.arange(0, TILE)
        inside = block < num_blocks
        b = load_block(weight + expert * stride_e, block, inside, stride_n, BLOCKS_PER_ROW, FLAT, False, TILE)
        # Magnitudes are ordered like their bits, NaN above all.
        found = tl.maximum(found, absmax(b).to(tl.int32, bitcast=True))
    tl.atomic_max(bits + expert, tl.max(found, 0), sem="relaxed")


@triton.jit
def _fast_kernel(
    weight, table, expert_scales, codes, scales, lists, stride_e, stride_n, num_blocks,
    BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr, spans, SPAN: tl.constexpr, LISTED: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, two16, four,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    encode = tl.load(expert_scales + expert * 4)
    weight, table = weight + expert * stride_e, table + expert * 128
    codes, scales = codes + expert * num_blocks * 2, scales + expert * num_blocks
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        start = (tl.program_id(0) * TILES + i) * TILE
        block = start + tl.arange(0, TILE)
        inside = block < num_blocks
        b = load_block(weight, block, inside, stride_n, BLOCKS_PER_ROW, FLAT, EVEN, TILE)
        low, high, scale, certain = fast_block(b, encode, table, two16, four, TILE)
        _store(codes, scales, block, inside, low, high, scale, EVEN)
        todo = ~certain if EVEN else inside & ~certain
        target = lists + (expert * spans + start.to(tl.uint32) // SPAN) * (1 + LISTED // 2)
        append(todo.to(tl.int32), target.to(tl.int64), block & (SPAN - 1), LISTED)


@triton.jit
def _store(codes, scales, block, inside, low, high, scale, EVEN: tl.constexpr):
    words = codes + block[:, None] * 2 + tl.arange(0, 2)[None, :]
    if EVEN:
        tl.store(words, tl.join(low, high))
        tl.store(scales + block, scale.to(tl.uint8))
    else:
        tl.store(words, tl.join(low, high), mask=inside[:, None])
        tl.store(scales + block, scale.to(tl.uint8), mask=inside)


@triton.jit
def _exact_kernel(
    weight, expert_scales, codes, scales, lists, counts, stride_e, stride_n, num_blocks,
    BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr, spans, SPAN: tl.constexpr, LISTED: tl.constexpr,
    GIVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Listed blocks, all blocks of a span whose list overflowed, or, with GIVEN, all blocks under their `scales`."""
    expert = tl.program_id(1).to(tl.int64)
    weight, counts = weight + expert * stride_e, counts + expert * 3
    codes, scales = codes + expert * num_blocks * 2, scales + expert * num_blocks
    found = lists + (expert * spans + tl.program_id(0)) * (1 + LISTED // 2)
    number = tl.load(found)
    whole = GIVEN or number > LISTED
    number = tl.where(whole, SPAN, number)
    for first in range(0, number, TILE):
        k = first + tl.arange(0, TILE)
        inside = k < number
        place = (found + 1).to(tl.pointer_type(tl.int16)) + k
        place = tl.load(place, mask=inside & ~whole, other=0).to(tl.int32)
        block = tl.program_id(0) * SPAN + tl.where(whole, k, place)
        inside = inside & (block < num_blocks)
        b = load_block(weight, block, inside, stride_n, BLOCKS_PER_ROW, FLAT, False, TILE)
        _exact_block(b, block, inside, codes, scales, counts, expert_scales + expert * 4, GIVEN, TILE)


@triton.jit
def _exact_block(b, block, inside, codes, scales, counts, expert_scales, GIVEN: tl.constexpr, TILE: tl.constexpr):
    if GIVEN:
        decode, denominator = tl.load(expert_scales + 1), tl.load(expert_scales + 3)
        base, anchor = exact_base(b, tl.load(expert_scales), TILE), tl.load(expert_scales + 2)
        scale = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        low, high, _ = exact_candidate(b, scale, decode, anchor, denominator, False, TILE)
    else:
        low, high, scale, base, anchor = exact_choice(b, expert_scales, TILE)
    _store(codes, scales, block, inside, low, high, scale, False)
    count_block(counts, b, base, anchor, inside)


@triton.jit
def _dequantize_kernel(codes, scales, outers, values, words, TILE: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    outer = tl.load(outers + expert)
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < words
    packed = tl.load(codes + expert * words + word, mask=inside, other=0)
    byte = tl.load(scales + expert * (words // 2) + word // 2, mask=inside, other=0)
    scale = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    nibble = tl.arange(0, 8)[None, :]
    code = packed[:, None] >> (nibble * 4)
    # Exponent and mantissa bits of E2M1 at their places in a float32 are 2^-126 of the value, exactly.
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    scaled = value * scale[:, None] * outer
    scaled = (scaled.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    element = expert * words * 8 + word[:, None] * 8 + nibble
    tl.store(values + element, scaled.to(values.dtype.element_ty), mask=inside[:, None])
