"""Weights straight to Marlin's layout on CUDA: what quantising and `triton_marlin` give, in one pass over the weights.

A program works on 64 output channels by 64 columns, of which every thread owns whole blocks, as in `triton_nvfp4`.
Codes become words in registers; the words cross threads once, through shared memory, so that loads and stores both move
whole sectors. Blocks are numbered in the order of tiles: 64 channels of one tile of 16 columns follow each other.

Scales are written as the engine has them for shift 0 (see `reference.marlin.scale_shift`). The shift is known only when
all scales are: the largest of each expert is returned, and where it asks for another shift the caller takes the long
way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rl.formats.kernels.triton_blocks import absmax, append, column, e4m3_pack, load_16, pointers
from inkling_rl.formats.kernels.triton_four_over_six import (
    LISTED,
    SPAN,
    count_block,
    exact_choice,
    fast_block,
    prepare,
)
from inkling_rl.formats.kernels.triton_marlin import transpose4, zip_bytes
from inkling_rl.formats.kernels.triton_mxfp8 import count_non_finite, scale_bits, scale_byte

TILES = 4
_LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
_HIGH_NIBBLES = tl.constexpr(-0x0F0F0F10)
_INFINITY = tl.constexpr(0x7F800000)


def nvfp4(
    weight: torch.Tensor, anchor: torch.Tensor, denominator: int, shards: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words and scales of NVFP4.

    Args:
        weight: `[E, shards * F, K]`, bfloat16 or float32; for `shards` 2 gate and up rows alternate.
        anchor: float32 `[E]`. `denominator`: 1536 or 2688.
        rows: F padded to a multiple of 64. `columns`: K padded to one.

    Returns:
        int32 `[E, columns / 16, 2 * shards * rows]`, uint8 `[E, columns / 16, shards * rows]` for shift 0, the largest
        E4M3 scale byte int32 `[E]`, and the counts of `reference.nvfp4.quantize`.
    """
    source, stride_e, stride_n, _ = pointers(weight)
    experts, stored_rows, stored_columns = weight.shape
    tiles_k, strips = columns // 16, shards * rows // 64
    empty = lambda *shape, dtype: torch.empty(experts, *shape, dtype=dtype, device=weight.device)
    words = empty(tiles_k, 2 * shards * rows, dtype=torch.int32)
    scales, counts = empty(tiles_k, shards * rows, dtype=torch.uint8), empty(3, dtype=torch.int64)
    largest = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    state = prepare(anchor, denominator, counts, strips * tiles_k * 64)
    place = (stride_e, stride_n, stored_rows // shards, stored_columns // 16, rows, tiles_k, strips, shards)
    with torch.cuda.device(weight.device):
        _nvfp4_kernel[(triton.cdiv(tiles_k, 4 * TILES), strips, experts)](
            source, state.table, state.scales, words, scales, state.lists, largest, *place, state.spans,
            SPAN, LISTED, TILES, 65536, 4, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _exact_kernel[(state.spans, experts)](
            source, state.scales, words.view(torch.uint8), scales, state.lists, largest, counts, *place, state.spans,
            SPAN, LISTED, 32, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return words, scales, largest, counts


def mxfp8(
    weight: torch.Tensor, shards: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words int32 `[E, columns / 16, 4 * shards * rows]`, scales uint8 `[E, columns / 32, shards * rows]` and the
    counts of `reference.mxfp8.quantize`; arguments as for `nvfp4`."""
    source, stride_e, stride_n, _ = pointers(weight)
    experts, stored_rows, stored_columns = weight.shape
    strips = shards * rows // 64
    empty = lambda *shape, dtype: torch.empty(experts, *shape, dtype=dtype, device=weight.device)
    words = empty(columns // 16, 4 * shards * rows, dtype=torch.int32)
    scales = empty(columns // 32, shards * rows, dtype=torch.uint8)
    counts = torch.zeros(experts, dtype=torch.int64, device=weight.device)
    with torch.cuda.device(weight.device):
        _mxfp8_kernel[(columns // 64, strips, experts)](
            source, words, scales, counts, stride_e, stride_n, stored_rows // shards, stored_columns // 32, rows,
            columns // 32, strips, shards, 65536, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    count_non_finite(weight, counts)
    return words, scales, counts


@triton.jit
def _stored_row(channel, rows, SHARDS: tl.constexpr):
    """Row within the shard, and row in the release, of an engine's output channel."""
    shard = channel // rows
    row = channel - shard * rows
    return row, SHARDS * row + shard


@triton.jit
def _nvfp4_kernel(
    weight, table, expert_scales, words, scales, lists, largest, stride_e, stride_n, valid_rows, valid_k, rows,
    tiles_k, strips, SHARDS: tl.constexpr, spans, SPAN: tl.constexpr, LISTED: tl.constexpr, TILES: tl.constexpr,
    two16, four,
):  # fmt: skip
    """A lane's blocks: rows n and n + 8 of one tile of k, which share their four words."""
    WORDS: tl.constexpr = 16 if weight.dtype.element_ty == tl.float32 else 8
    expert, strip = tl.program_id(2).to(tl.int64), tl.program_id(1)
    encode = tl.load(expert_scales + expert * 4)
    weight, table = weight + expert * stride_e, table + expert * 128
    words, scales = words + expert * tiles_k * strips * 128, scales + expert * tiles_k * strips * 64
    lists += expert * spans * (1 + LISTED // 2)
    lane = tl.arange(0, 128)
    r = lane // 4  # r = 4 i + j
    n = 16 * (r % 4) + r // 4
    row, stored = _stored_row(strip * 64 + n, rows, SHARDS)
    start = weight + stored.to(tl.int64) * stride_n
    top = tl.zeros([128], tl.int32)
    for i in range(TILES):
        first = (tl.program_id(0) * TILES + i) * 4
        kt = first + lane % 4
        inside_a = (kt < valid_k) & (row < valid_rows)
        inside_b = (kt < valid_k) & (row + 8 < valid_rows)
        a = load_16(start + kt * WORDS, inside_a, False, 128)
        al, ah, a_scale, a_certain = fast_block(a, encode, table, two16, four, 128)
        b = load_16(start + 8 * SHARDS * stride_n + kt * WORDS, inside_b, False, 128)
        bl, bh, b_scale, b_certain = fast_block(b, encode, table, two16, four, 128)
        # Padding has scale byte 0, whose table entry is no number.
        al, ah, a_scale = tl.where(inside_a, al, 0), tl.where(inside_a, ah, 0), tl.where(inside_a, a_scale, 0)
        bl, bh, b_scale = tl.where(inside_b, bl, 0), tl.where(inside_b, bh, 0), tl.where(inside_b, b_scale, 0)
        # Uncertain blocks count when the exact step knows them: their scale here may be the larger candidate's.
        top = tl.maximum(top, tl.maximum(tl.where(a_certain, a_scale, 0), tl.where(b_certain, b_scale, 0)))
        a0, a1 = _halves(al, ah)
        b0, b1 = _halves(bl, bh)
        w0, w1, w2, w3 = transpose4(a0, b0, a1, b1)
        quads = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # q = 2 * axis 1 + axis 2
        tile = tl.reshape(tl.permute(tl.reshape(quads, [8, 4, 4, 4]), (2, 0, 3, 1)), [4, 128])  # kt, i, q, j
        k = (first + tl.arange(0, 4))[:, None]
        tl.store(words + k * (strips * 128) + strip * 128 + tl.arange(0, 128)[None, :], tile, mask=k < tiles_k)
        moved = tl.reshape(tl.join(_moved(a_scale), _moved(b_scale)), [8, 2, 2, 4, 2])  # i, j / 2, j % 2, kt, half
        moved = tl.reshape(tl.permute(moved, (3, 0, 1, 4, 2)), [4, 64]).to(tl.uint8)
        tl.store(scales + k * (strips * 64) + strip * 64 + tl.arange(0, 64)[None, :], moved, mask=k < tiles_k)
        block = (strip * tiles_k + kt) * 64 + n
        _list(lists, block, inside_a & ~a_certain, SPAN, LISTED)
        _list(lists, block + 8, inside_b & ~b_certain, SPAN, LISTED)
    tl.atomic_max(largest + expert, tl.max(top, 0), sem="relaxed")


@triton.jit
def _list(lists, block, todo, SPAN: tl.constexpr, LISTED: tl.constexpr):
    target = lists + (block.to(tl.uint32) // SPAN) * (1 + LISTED // 2)
    append(todo.to(tl.int32), target.to(tl.int64), block & (SPAN - 1), LISTED)


@triton.jit
def _halves(low, high):
    """Codes 0-7 and 8-15 to bytes (code 2c, code 2c + 8) and (code 2c + 1, code 2c + 9) for c = 0 to 3."""
    even = (low & _LOW_NIBBLES) | ((high << 4) & _HIGH_NIBBLES)
    odd = ((low >> 4) & _LOW_NIBBLES) | (high & _HIGH_NIBBLES)
    return even, odd


@triton.jit
def _moved(byte):
    """E4M3 scale bytes as the engine has them for shift 0: subnormals are dropped."""
    return tl.where(byte < 8, 0, byte + 0x78)


@triton.jit
def _exact_kernel(
    weight, expert_scales, word_bytes, scales, lists, largest, counts, stride_e, stride_n, valid_rows, valid_k, rows,
    tiles_k, strips, SHARDS: tl.constexpr, spans, SPAN: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As in `triton_nvfp4`; a block's codes are whole bytes of four words."""
    WORDS: tl.constexpr = 16 if weight.dtype.element_ty == tl.float32 else 8
    expert = tl.program_id(1).to(tl.int64)
    found = lists + (expert * spans + tl.program_id(0)) * (1 + LISTED // 2)
    number = tl.load(found)
    whole = number > LISTED
    number = tl.where(whole, SPAN, number)
    for first in range(0, number, TILE):
        index = first + tl.arange(0, TILE)
        place = tl.load((found + 1).to(tl.pointer_type(tl.int16)) + index, mask=(index < number) & ~whole, other=0)
        block = tl.program_id(0) * SPAN + tl.where(whole, index, place.to(tl.int32))
        n, kt, strip = block % 64, block // 64 % tiles_k, block // 64 // tiles_k
        row, stored = _stored_row(strip * 64 + n, rows, SHARDS)
        inside = (index < number) & (strip < strips) & (row < valid_rows) & (kt < valid_k)
        b = load_16(weight + expert * stride_e + stored.to(tl.int64) * stride_n + kt * WORDS, inside, False, TILE)
        low, high, scale, base, anchor = exact_choice(b, expert_scales + expert * 4, TILE)
        i, j, half = n % 8, n // 16, n // 8 % 2
        even, odd = _halves(low, high)
        line = expert * tiles_k + kt
        byte = word_bytes + (line * strips + strip) * 512 + i * 64 + j * 4 + half
        for c in tl.static_range(4):
            tl.store(byte + 16 * c, ((even >> (8 * c)) & 0xFF).to(tl.uint8), mask=inside)
            tl.store(byte + 16 * c + 2, ((odd >> (8 * c)) & 0xFF).to(tl.uint8), mask=inside)
        m = i * 8 + j // 2 * 4 + 2 * half + j % 2
        tl.store(scales + (line * strips + strip) * 64 + m, _moved(scale).to(tl.uint8), mask=inside)
        tl.atomic_max(largest + expert, tl.max(tl.where(inside, scale, 0), 0), sem="relaxed")
        count_block(counts + expert * 3, b, base, anchor, inside)


@triton.jit
def _mxfp8_kernel(
    weight, words, scales, counts, stride_e, stride_n, valid_rows, valid_groups, rows, groups, strips,
    SHARDS: tl.constexpr, two16,
):  # fmt: skip
    """A lane's block: one row of two tiles of k, that is eight words."""
    WORDS: tl.constexpr = 16 if weight.dtype.element_ty == tl.float32 else 8
    expert, strip = tl.program_id(2).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, 128)
    r, group = lane // 2, tl.program_id(0) * 2 + lane % 2  # r = 8 i + 2 j + half
    n = 16 * (r // 2 % 4) + r // 8 + 8 * (r % 2)
    row, stored = _stored_row(strip * 64 + n, rows, SHARDS)
    inside = (row < valid_rows) & (group < valid_groups)
    start = weight + expert * stride_e + stored.to(tl.int64) * stride_n + group * (2 * WORDS)
    a, b = load_16(start, inside, False, 128), load_16(start + WORDS, inside, False, 128)
    bits = tl.maximum(absmax(a), absmax(b), propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    byte = scale_byte(bits)
    inverse = scale_bits(254 - byte).to(tl.float32, bitcast=True)
    first, second = _mxfp8_words(a, inverse, two16), _mxfp8_words(b, inverse, two16)
    both = tl.reshape(tl.join(first, second), [8, 8, 2, 4, 2])  # i, (j, half), group, q, second
    tile = tl.reshape(tl.permute(both, (2, 4, 0, 3, 1)), [4, 256])
    k = (tl.program_id(0) * 4 + tl.arange(0, 4))[:, None]
    words += expert * groups * strips * 512
    tl.store(words + k * (strips * 256) + strip * 256 + tl.arange(0, 256)[None, :], tile)
    columns = tl.reshape(tl.permute(tl.reshape(byte, [8, 2, 2, 2, 2]), (4, 0, 1, 3, 2)), [2, 64]).to(tl.uint8)
    g = (tl.program_id(0) * 2 + tl.arange(0, 2))[:, None]
    scales += expert * groups * strips * 64
    tl.store(scales + g * (strips * 64) + strip * 64 + tl.arange(0, 64)[None, :], columns)
    tl.atomic_max(counts + expert + lane * 0, 1, mask=inside & (bits >= _INFINITY), sem="relaxed")


@triton.jit
def _mxfp8_words(b, inverse, two16):
    """The four words of one row at one tile of k, `[TILE, 2, 2]`."""
    a0, a1 = _mxfp8_codes(b, 0, inverse, two16), _mxfp8_codes(b, 1, inverse, two16)
    b0, b1 = _mxfp8_codes(b, 2, inverse, two16), _mxfp8_codes(b, 3, inverse, two16)
    w0, w1 = zip_bytes(a0, b0)
    w2, w3 = zip_bytes(a1, b1)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _mxfp8_codes(b, i: tl.constexpr, inverse, two16):
    x0, x1 = column(b, 4 * i, two16) * inverse, column(b, 4 * i + 1, two16) * inverse
    x2, x3 = column(b, 4 * i + 2, two16) * inverse, column(b, 4 * i + 3, two16) * inverse
    return e4m3_pack(x0, x1, x2, x3)
