"""Marlin's layouts by torch's own copies, on any device, and their inverses.

The permutation of a 16 x 64 tile is one reordering of axes: with n = 64 b + 16 j + 8 u + i and, in bytes, the four
bytes of a word coming from two places in k, a word is four adjacent bytes after one strided copy. NVFP4 then needs its
eight nibbles sorted inside each word, low ones first.

Not the definition (`inkling_rl.formats.reference.marlin`), and only as fast as torch copies bytes.
"""

from __future__ import annotations

import torch

from inkling_rl.formats.reference import marlin as reference
from inkling_rl.formats.reference.marlin import TILE_N

# Axes of stored bytes `[N, K]` in tiles: n = (block, j, half, i), bytes of 16 k = (kt, h, q[, b]).
_NVFP4_ORDER = (4, 0, 3, 6, 1, 2, 5)
_MXFP8_ORDER = (4, 0, 3, 6, 1, 2, 7, 5)


def largest_scales(scales: torch.Tensor) -> torch.Tensor:
    """See `reference.marlin.largest_scales`."""
    return scales.amax((1, 2))


def pack_weight(codes: torch.Tensor, bits: int, shards: int, rows: int, columns: int) -> torch.Tensor:
    """See `reference.marlin.pack_weight`."""
    words = torch.empty(len(codes), columns // 16, shards * rows * bits // 2, dtype=torch.int32, device=codes.device)
    for expert, out in zip(codes, words, strict=True):
        tiles = _tiles(_padded(expert, shards, rows, columns * bits // 8), bits)
        order = _NVFP4_ORDER if bits == 4 else _MXFP8_ORDER
        packed = tiles.permute(order).reshape(out.shape[0], -1).view(torch.int32)
        out.copy_(_sort_nibbles(packed) if bits == 4 else packed)
    return words


def permute_scales(scales: torch.Tensor, shift: int | None, shards: int, rows: int, groups: int) -> torch.Tensor:
    """See `reference.marlin.permute_scales`."""
    out = torch.empty(len(scales), groups, shards * rows, dtype=torch.uint8, device=scales.device)
    table = None if shift is None else scale_table(shift).to(scales.device)
    for expert, target in zip(scales, out, strict=True):
        # n = 64 b + 8 (4 g + s + 2 t) + i, column = 64 b + 8 i + 4 g + 2 s + t
        blocks = _padded(expert, shards, rows, groups).unflatten(0, (-1, 2, 2, 2, 8))
        moved = blocks.permute(5, 0, 4, 1, 3, 2).reshape(target.shape)
        target.copy_(moved if table is None else table[moved.int()])
    return out


def unpack_weight(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_weight` but for row order and padding: uint8 `[E, N, K * bits / 8]` in the engine's rows."""
    experts, tiles_k, per_tile = words.shape
    size_n = per_tile * 2 // bits
    out = torch.empty(experts, size_n, tiles_k * 2 * bits, dtype=torch.uint8, device=words.device)
    order = _NVFP4_ORDER if bits == 4 else _MXFP8_ORDER
    for expert, target in zip(words, out, strict=True):
        tiles = _tiles(target, bits).permute(order)
        packed = _spread_nibbles(expert) if bits == 4 else expert
        tiles.copy_(packed.contiguous().view(torch.uint8).view(tiles.shape))
    return out


def unpermute_scales(scales: torch.Tensor) -> torch.Tensor:
    """`[E, G, N]` back to rows `[E, N, G]`; bytes stay as they are."""
    blocks = scales.unflatten(2, (-1, 8, 2, 2, 2))
    return blocks.permute(0, 2, 4, 6, 5, 3, 1).reshape(scales.shape[0], scales.shape[2], scales.shape[1])


def _padded(expert: torch.Tensor, shards: int, rows: int, columns: int) -> torch.Tensor:
    """Stored rows of one expert in the engine's order `[shards * rows, columns]`, zeros where it pads."""
    halves = expert.unflatten(0, (-1, shards)).transpose(0, 1)
    if halves.shape[1:] == (rows, columns):
        return halves.flatten(0, 1) if shards == 1 else halves.reshape(shards * rows, columns)
    out = expert.new_zeros(shards, rows, columns)
    out[:, : halves.shape[1], : halves.shape[2]] = halves
    return out.flatten(0, 1)


def _tiles(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """`[N, bytes]` as (block, j, half, i, kt, h, q) for NVFP4, with a last axis for a code's byte in MXFP8."""
    tail = (-1, 2, 4) if bits == 4 else (-1, 2, 4, 2)
    return matrix.unflatten(1, tail).unflatten(0, (-1, 4, 2, 8))


def _sort_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Bytes 0-3 of a word to low nibbles 0-3 in its lower half and high nibbles 0-3 in its upper half."""
    low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    return _squeeze(low) | (_squeeze(high) << 16)


def _squeeze(nibbles: torch.Tensor) -> torch.Tensor:
    pairs = (nibbles | (nibbles >> 4)) & 0x00FF00FF
    return (pairs | (pairs >> 8)) & 0xFFFF


def _spread_nibbles(words: torch.Tensor) -> torch.Tensor:
    return _stretch(words & 0xFFFF) | (_stretch((words >> 16) & 0xFFFF) << 4)


def _stretch(half: torch.Tensor) -> torch.Tensor:
    pairs = (half | (half << 8)) & 0x00FF00FF
    return (pairs | (pairs << 4)) & 0x0F0F0F0F


def scale_table(shift: int) -> torch.Tensor:
    """Engine byte of each E4M3 byte; the checks keep NaN and negative ones out."""
    table = torch.zeros(256, dtype=torch.uint8, device="cpu")
    table[:0x7F] = reference.scale_bytes(torch.arange(0x7F, dtype=torch.uint8, device="cpu"), shift)
    return table


assert TILE_N == 4 * 2 * 8
