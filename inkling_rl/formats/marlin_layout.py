"""Names, shapes and slices of Marlin's layouts: what `formats.marlin` and its inverse share.

Not the bytes: `inkling_rl.formats.reference.marlin` defines them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inkling_rl.formats import ExpertFormat
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.reference import mxfp8, nvfp4

BITS: dict[ExpertFormat, int] = {"nvfp4": 4, "mxfp8": 8}
BLOCK_SIZES: dict[ExpertFormat, int] = {"nvfp4": nvfp4.BLOCK_SIZE, "mxfp8": mxfp8.BLOCK_SIZE}
SCALE_DTYPES: dict[ExpertFormat, torch.dtype] = {"nvfp4": torch.float8_e4m3fn, "mxfp8": torch.float8_e8m0fnu}
SHARDS = {"w13_weight": 2, "w2_weight": 1}


def padded_width(width: int, hidden: int, expert_format: ExpertFormat) -> int:
    """The local expert width that the engine holds: a multiple of 64, for NVFP4 of 128 where `hidden` is none of it."""
    multiple = 128 if expert_format == "nvfp4" and hidden % 128 else 64
    return -(-width // multiple) * multiple


def shapes(
    expert_format: ExpertFormat, experts: int, hidden: int, width: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each of the engine's tensors for `experts` local experts of local `width`."""
    bits, block, padded = BITS[expert_format], BLOCK_SIZES[expert_format], padded_width(width, hidden, expert_format)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for matrix, rows, columns in (("w13_weight", 2 * padded, hidden), ("w2_weight", hidden, padded)):
        expected[matrix] = ((experts, columns // 16, rows * bits // 2), torch.int32)
        expected[f"{matrix}_scale"] = ((experts, columns // block, rows), SCALE_DTYPES[expert_format])
        if expert_format == "nvfp4":
            expected[f"{matrix}_scale_2"] = ((experts,), torch.float32)
    return expected


def check_format(expert_format: ExpertFormat, name: str) -> None:
    if expert_format not in BITS:
        raise FormatError(
            f"{name} must be nvfp4 or mxfp8 to be held by Marlin; got {expert_format}. Copy unquantised experts as is"
        )


def check_sizes(hidden: int, width: int, expert_format: ExpertFormat, tp_size: int, tp_rank: int, name: str) -> None:
    block = BLOCK_SIZES[expert_format]
    if hidden % 64:
        raise FormatError(f"{name}: hidden size must be a multiple of 64 for Marlin; got {hidden}. Use another backend")
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise FormatError(f"tp_rank must be in [0, tp_size); got {tp_rank} of {tp_size}. Pass the rank's own place")
    if width % (tp_size * block):
        raise FormatError(
            f"tp_size must divide the expert width into multiples of {block} ({expert_format}'s block); got {tp_size} "
            f"for {width}. Use expert parallelism or another tp_size"
        )


def slice_tensor(tensor: torch.Tensor, matrix: str, width: int, tp_rank: int, tp_size: int, per: int) -> torch.Tensor:
    """View of a rank's part: rows of w13, or columns of w2 of which one holds `per` values."""
    local = width // tp_size
    if matrix == "w13_weight":  # gate and up alternate, so that both slices are one range of rows
        return tensor[:, 2 * local * tp_rank : 2 * local * (tp_rank + 1)]
    return tensor[:, :, local * tp_rank // per : local * (tp_rank + 1) // per]


def slice_matrix(
    stored: Mapping[str, torch.Tensor], matrix: str, width: int, bits: int, tp_rank: int, tp_size: int
) -> dict[str, torch.Tensor]:
    """A rank's part of one stored matrix and its companions, as views."""
    block = nvfp4.BLOCK_SIZE if bits == 4 else mxfp8.BLOCK_SIZE
    per_column = {matrix: 8 // bits, f"{matrix}_scale": block}
    return {
        key: slice_tensor(tensor, matrix, width, tp_rank, tp_size, per_column[key]) if key in per_column else tensor
        for key, tensor in stored.items()
        if key == matrix or key.startswith(f"{matrix}_")
    }


def slice_source(
    source: Mapping[str, torch.Tensor], width: int, expert_format: ExpertFormat, tp_rank: int, tp_size: int
) -> dict[str, torch.Tensor]:
    block = BLOCK_SIZES[expert_format]
    return {
        key: slice_tensor(tensor, key.removesuffix("_scale"), width, tp_rank, tp_size, block)
        if key.removesuffix("_scale") in SHARDS and key.endswith("_scale")
        else tensor
        for key, tensor in source.items()
    }
