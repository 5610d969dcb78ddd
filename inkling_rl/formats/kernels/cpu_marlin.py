"""Marlin's layouts on the CPU in C++, see `cpp_marlin/marlin.cpp`.

The functions of `inkling_rl.formats.reference.marlin` with the same bytes; `torch_marlin` stands in without a compiler.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from inkling_rl.formats.kernels.torch_marlin import largest_scales, scale_table
from inkling_rl.native import NativeLibrary

__all__ = ["functions", "largest_scales", "pack_weight", "permute_scales"]  # torch's maximum runs at memory speed

KERNELS = NativeLibrary(
    name="marlin_cpu",
    main=Path(__file__).with_name("cpp_marlin") / "marlin.cpp",
    purpose="The C++ kernels of Marlin's layouts",
    consequence="They run on torch instead, 25 to 50 times slower",
)


class Source(Structure):
    """The stored side, strides in bytes; see the C++."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("expert_stride", "row_stride", "shards", "rows", "bytes")),
    ]


_P, _I, _S = c_void_p, c_int64, POINTER(Source)


@cache
def functions() -> Any:
    """The library with argument types set, or None when there is none."""
    loaded = KERNELS.load()
    if loaded is not None:
        loaded.marlin_pack_weight.argtypes = [_S, _I, _I, _I, _I, _P, _I]
        loaded.marlin_permute_scales.argtypes = [_S, _I, _I, _I, _P, _I, _P, _I]
        loaded.marlin_pack_weight.restype = loaded.marlin_permute_scales.restype = None
    return loaded


def pack_weight(codes: torch.Tensor, bits: int, shards: int, rows: int, columns: int) -> torch.Tensor:
    """See `reference.marlin.pack_weight`."""
    codes = _dense_rows(codes)
    words = torch.empty(len(codes), columns // 16, shards * rows * bits // 2, dtype=torch.int32, device="cpu")
    functions().marlin_pack_weight(
        _source(codes, shards), len(codes), bits, rows, columns // 16, words.data_ptr(), torch.get_num_threads()
    )
    return words


def permute_scales(scales: torch.Tensor, shift: int | None, shards: int, rows: int, groups: int) -> torch.Tensor:
    """See `reference.marlin.permute_scales`."""
    scales = _dense_rows(scales)
    out = torch.empty(len(scales), groups, shards * rows, dtype=torch.uint8, device="cpu")
    table = None if shift is None else scale_table(shift)
    functions().marlin_permute_scales(
        _source(scales, shards),
        len(scales),
        rows,
        groups,
        None if table is None else table.data_ptr(),
        bool(shift),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _dense_rows(stored: torch.Tensor) -> torch.Tensor:
    return stored if stored.stride(-1) == 1 else stored.contiguous()


def _source(stored: torch.Tensor, shards: int) -> Any:
    """The tensor as the kernels take it; the caller keeps it alive."""
    _, rows, columns = stored.shape
    return byref(Source(stored.data_ptr(), stored.stride(0), stored.stride(1), shards, rows // shards, columns))
