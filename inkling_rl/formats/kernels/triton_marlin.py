"""Marlin's layouts on CUDA: each stored byte is read once, each of the engine's bytes written once.

A program turns 64 output channels by `TILES_K` tiles of 16 k into whole rows of words. Loads run along a stored row (16
bytes per lane), stores along a row of words (16 bytes per lane); between the two Triton moves the words through shared
memory. Inside a lane a word is made by masks and shifts only: the bytes of eight (NVFP4) or sixteen (MXFP8) codes of
one row are exchanged pairwise, as in a transposition of a 4 x 4 matrix of bytes.

Not the definition (`inkling_rl.formats.reference.marlin`). Interleaved and sliced inputs are read in place; a copy is
made only where a row's 16 k do not start at their own alignment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rl.formats.kernels.triton_blocks import check_size

TILES_K = 16
SCALE_ROWS, SCALE_GROUPS = 128, 32
LARGEST_WORDS = 4096

_LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
_HIGH_NIBBLES = tl.constexpr(-0x0F0F0F10)  # 0xF0F0F0F0 as int32
_EVEN_BYTES = tl.constexpr(0x00FF00FF)
_ODD_BYTES = tl.constexpr(-0x00FF0100)  # 0xFF00FF00
_LOWER_HALF = tl.constexpr(0xFFFF)
_UPPER_HALF = tl.constexpr(-0x10000)  # 0xFFFF0000
_ADDEND = tl.constexpr(0x78787878)
_ONES = tl.constexpr(0x01010101)


def largest_scales(scales: torch.Tensor) -> torch.Tensor:
    """See `reference.marlin.largest_scales`."""
    experts, rows, groups = scales.shape
    places = (rows * groups, scales.stride(0), scales.data_ptr(), scales.storage_offset())
    if scales.stride()[1:] != (groups, 1) or any(n % 16 for n in places):
        return scales.amax((1, 2))  # a slice of columns: the smaller part of a layer's scales
    words = scales.flatten(1).view(torch.int32)
    found = torch.zeros(experts, dtype=torch.int32, device=scales.device)
    grid = (triton.cdiv(words.shape[1], LARGEST_WORDS), experts)
    with torch.cuda.device_of(scales):
        _largest_kernel[grid](words, found, words.stride(0), words.shape[1], LARGEST_WORDS, num_warps=4)
    return found.to(torch.uint8)


def pack_weight(codes: torch.Tensor, bits: int, shards: int, rows: int, columns: int) -> torch.Tensor:
    """See `reference.marlin.pack_weight`."""
    experts, stored_rows, stored_bytes = codes.shape
    check_size(experts, stored_rows * stored_bytes * 8 // bits)
    source = _as_int64(codes, 2 * bits)
    words = torch.empty(experts, columns // 16, shards * rows * bits // 2, dtype=torch.int32, device=codes.device)
    grid = (triton.cdiv(columns // 16, TILES_K), shards * rows // 64, experts)
    with torch.cuda.device_of(codes):
        (_pack4_kernel if bits == 4 else _pack8_kernel)[grid](
            source, words, source.stride(0), source.stride(1), source.shape[2] * 4 // bits, stored_rows // shards,
            rows, columns // 16, words.shape[2], shards, TILES_K, num_warps=4,
        )  # fmt: skip
    return words


def permute_scales(scales: torch.Tensor, shift: int | None, shards: int, rows: int, groups: int) -> torch.Tensor:
    """See `reference.marlin.permute_scales`."""
    experts, stored_rows, _ = scales.shape
    source, vector = _as_int32(scales)
    out = torch.empty(experts, groups, shards * rows, dtype=torch.uint8, device=scales.device)
    grid = (triton.cdiv(groups, SCALE_GROUPS), triton.cdiv(shards * rows, SCALE_ROWS), experts)
    with torch.cuda.device_of(scales):
        _scale_kernel[grid](
            source, out.view(torch.int32), source.stride(0) // vector, source.stride(1) // vector,
            source.shape[2] // vector, stored_rows // shards, rows, groups, shift or 0,
            shards, shift is not None, bool(shift), vector, SCALE_ROWS, SCALE_GROUPS, num_warps=4,
        )  # fmt: skip
    return out


def _as_int64(codes: torch.Tensor, alignment: int) -> torch.Tensor:
    """The same bytes as int64; `alignment` bytes hold the 16 k that a lane loads at once."""
    if codes.stride(2) != 1 or any(n % alignment for n in _places(codes)):
        codes = codes.clone(memory_format=torch.contiguous_format)
    return codes.view(torch.int64)


def _as_int32(scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same bytes as int32, and how many words of a row one load can take, 4, 2 or 1.

    Copied, and filled up with zeros, where a row does not start or end at a multiple of four bytes.
    """
    if scales.shape[2] % 4:
        scales = torch.nn.functional.pad(scales, (0, -scales.shape[2] % 16))
    elif scales.stride(2) != 1 or any(n % 4 for n in _places(scales)):
        scales = scales.clone(memory_format=torch.contiguous_format)
    vector = next(v for v in (4, 2, 1) if all(n % (4 * v) == 0 for n in (*_places(scales), scales.shape[2])))
    return scales.view(torch.int32), vector


def _places(stored: torch.Tensor) -> tuple[int, ...]:
    """Where rows start, in bytes: steps, the address, and the offset, which a view of another type asks about."""
    return (*stored.stride()[:2], stored.data_ptr(), int(stored.storage_offset()))


@triton.jit
def _largest_kernel(words, found, stride_e, count, BLOCK: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(words + expert * stride_e + at, mask=at < count, other=0)
    low = tl.maximum(w & 0xFF, (w >> 8) & 0xFF)
    high = tl.maximum((w >> 16) & 0xFF, (w >> 24) & 0xFF)
    tl.atomic_max(found + expert, tl.max(tl.maximum(low, high), 0))


@triton.jit
def _pack4_kernel(
    codes, words, stride_e, stride_n, valid_k, valid_rows, rows, tiles_k, words_per_row,
    SHARDS: tl.constexpr, TILES_K: tl.constexpr,
):  # fmt: skip
    """`codes` int64 (16 codes each). A lane's element: rows n and n + 8 at one tile of k, that is four words."""
    expert = tl.program_id(2).to(tl.int64)
    shard = tl.program_id(1) * 64 // rows
    first_row = tl.program_id(1) * 64 - shard * rows
    r = tl.arange(0, 32)
    row = first_row + 16 * (r % 4) + r // 4  # r = 4 i + j
    kt = tl.program_id(0) * TILES_K + tl.arange(0, TILES_K)
    start = codes + expert * stride_e + (SHARDS * row + shard)[:, None] * stride_n + kt[None, :]
    inside = kt[None, :] < valid_k
    a = tl.load(start, mask=inside & (row < valid_rows)[:, None], other=0)
    b = tl.load(start + 8 * SHARDS * stride_n, mask=inside & (row + 8 < valid_rows)[:, None], other=0)
    a0, a1, b0, b1 = a.to(tl.int32), (a >> 32).to(tl.int32), b.to(tl.int32), (b >> 32).to(tl.int32)
    # Byte q of the four: low nibbles of both k halves of row n, of row n + 8, then the high ones.
    al = (a0 & _LOW_NIBBLES) | ((a1 << 4) & _HIGH_NIBBLES)
    bl = (b0 & _LOW_NIBBLES) | ((b1 << 4) & _HIGH_NIBBLES)
    ah = ((a0 >> 4) & _LOW_NIBBLES) | (a1 & _HIGH_NIBBLES)
    bh = ((b0 >> 4) & _LOW_NIBBLES) | (b1 & _HIGH_NIBBLES)
    w0, w1, w2, w3 = transpose4(al, bl, ah, bh)
    quads = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [32, TILES_K, 2, 2], q = 2 * axis 2 + axis 3
    tile = tl.permute(tl.reshape(quads, [8, 4, TILES_K, 4]), (2, 0, 3, 1))  # kt, i, q, j
    _store(words, tl.reshape(tile, [TILES_K, 128]), expert, kt, tiles_k, words_per_row, 128, TILES_K)


@triton.jit
def _pack8_kernel(
    codes, words, stride_e, stride_n, valid_k, valid_rows, rows, tiles_k, words_per_row,
    SHARDS: tl.constexpr, TILES_K: tl.constexpr,
):  # fmt: skip
    """`codes` int64 (8 codes each). A lane's element: one row at one tile of k, that is four words."""
    expert = tl.program_id(2).to(tl.int64)
    shard = tl.program_id(1) * 64 // rows
    first_row = tl.program_id(1) * 64 - shard * rows
    r = tl.arange(0, 64)
    row = first_row + 16 * (r // 2 % 4) + r // 8 + 8 * (r % 2)  # r = 8 i + 2 j + half
    kt = tl.program_id(0) * TILES_K + tl.arange(0, TILES_K)
    start = codes + expert * stride_e + (SHARDS * row + shard)[:, None] * stride_n + 2 * kt[None, :]
    inside = (kt[None, :] < valid_k) & (row < valid_rows)[:, None]
    halves = start[:, :, None] + tl.arange(0, 2)[None, None, :]
    a, b = tl.split(tl.load(halves, mask=inside[:, :, None], other=0))  # k 0-7 and 8-15
    w0, w1 = zip_bytes(a.to(tl.int32), b.to(tl.int32))
    w2, w3 = zip_bytes((a >> 32).to(tl.int32), (b >> 32).to(tl.int32))
    quads = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    tile = tl.permute(tl.reshape(quads, [8, 8, TILES_K, 4]), (2, 0, 3, 1))  # kt, i, q, (j, half)
    _store(words, tl.reshape(tile, [TILES_K, 256]), expert, kt, tiles_k, words_per_row, 256, TILES_K)


@triton.jit(do_not_specialize=["shift"])
def _scale_kernel(
    scales, out, stride_e, stride_n, valid_vectors, valid_rows, rows, groups, shift,
    SHARDS: tl.constexpr, NVFP4: tl.constexpr, SHIFTED: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """`scales` int32, four groups of a row each; `out` int32, four columns of a group each.

    Strides and lengths of rows are in units of VECTOR words: this tells the compiler that it may load as many at once.
    """
    expert = tl.program_id(2).to(tl.int64)
    quad = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    m = quad % 16  # column 64 b + 4 m + x of these four comes from row 64 b + m / 2 + 8 (4 (m % 2) + [0, 2, 1, 3][x])
    n = 4 * (quad - m) + m // 2 + 32 * (m % 2)
    shard = n // rows
    row = n - shard * rows
    word = tl.program_id(0) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
    start = scales + expert * stride_e * VECTOR + (SHARDS * row + shard)[:, None] * (stride_n * VECTOR) + word[None, :]
    here = (word // VECTOR < valid_vectors)[None, :] & (shard < SHARDS)[:, None]
    step = 8 * SHARDS * stride_n * VECTOR
    x0 = tl.load(start, mask=here & (row < valid_rows)[:, None], other=0)
    x1 = tl.load(start + 2 * step, mask=here & (row + 16 < valid_rows)[:, None], other=0)
    x2 = tl.load(start + step, mask=here & (row + 8 < valid_rows)[:, None], other=0)
    x3 = tl.load(start + 3 * step, mask=here & (row + 24 < valid_rows)[:, None], other=0)
    w0, w1, w2, w3 = transpose4(x0, x1, x2, x3)
    quads = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS / 4, GROUPS / 4, 2, 2]
    if SHIFTED:
        quads = _shifted_bytes(quads, shift)
    elif NVFP4:
        # A byte c of 8 and more becomes c + 0x78, whose top bit is set; a lower one 0. c is below 0x7F: no carries.
        moved = quads + _ADDEND
        quads = moved & (((moved >> 7) & _ONES) * 0xFF)
    tile = tl.reshape(tl.permute(tl.reshape(quads, [ROWS // 4, GROUPS // 4, 4]), (1, 2, 0)), [GROUPS, ROWS // 4])
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    width = SHARDS * rows // 4
    target = out + expert * groups * width + group[:, None] * width + quad[None, :]
    tl.store(target, tile, mask=(group < groups)[:, None] & (quad < width)[None, :])


@triton.jit
def _shifted_bytes(words, shift):
    """Each E4M3 byte of `words` moved up by `shift` powers of two."""
    moved = tl.zeros_like(words)
    for i in tl.static_range(4):
        c = (words >> (8 * i)) & 0xFF
        # A subnormal c * 2^-9 takes its exponent from the conversion to float32; below 8 * 2^-9 it becomes 0.
        subnormal = (c.to(tl.float32).to(tl.int32, bitcast=True) >> 20) - 8 * 127 + 8 * 13 + 8 * shift
        subnormal = tl.where((c << shift) >= 8, subnormal, 0)
        moved |= tl.where(c >= 8, c + 0x78 + 8 * shift, subnormal) << (8 * i)
    return moved


@triton.jit
def transpose4(x0, x1, x2, x3):
    """Byte b of word a becomes byte a of word b."""
    e01 = (x0 & _EVEN_BYTES) | ((x1 << 8) & _ODD_BYTES)
    o01 = ((x0 >> 8) & _EVEN_BYTES) | (x1 & _ODD_BYTES)
    e23 = (x2 & _EVEN_BYTES) | ((x3 << 8) & _ODD_BYTES)
    o23 = ((x2 >> 8) & _EVEN_BYTES) | (x3 & _ODD_BYTES)
    w0 = (e01 & _LOWER_HALF) | (e23 << 16)
    w2 = ((e01 >> 16) & _LOWER_HALF) | (e23 & _UPPER_HALF)
    w1 = (o01 & _LOWER_HALF) | (o23 << 16)
    w3 = ((o01 >> 16) & _LOWER_HALF) | (o23 & _UPPER_HALF)
    return w0, w1, w2, w3


@triton.jit
def zip_bytes(x, y):
    """Words x0 y0 x1 y1 and x2 y2 x3 y3 of the bytes of x and y."""
    even = (x & _EVEN_BYTES) | ((y << 8) & _ODD_BYTES)  # x0 y0 x2 y2
    odd = ((x >> 8) & _EVEN_BYTES) | (y & _ODD_BYTES)  # x1 y1 x3 y3
    return (even & _LOWER_HALF) | (odd << 16), ((even >> 16) & _LOWER_HALF) | (odd & _UPPER_HALF)


@triton.jit
def _store(words, tile, expert, kt, tiles_k, words_per_row, WIDTH: tl.constexpr, TILES_K: tl.constexpr):
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    target = words + expert * tiles_k * words_per_row + kt[:, None] * words_per_row + column[None, :]
    tl.store(target, tile, mask=(kt < tiles_k)[:, None])
