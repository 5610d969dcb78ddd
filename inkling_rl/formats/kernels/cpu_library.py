"""The C++ kernels of the number formats as one library, and tensors as its arguments.

C++ through ctypes rather than numba: numba compiles in every process (seconds each, in trainer, engine and converter),
gives no say over contraction and denormals, on which bytes depend, and would be a second mechanism beside the one that
the engine's kernels need anyway (`inkling_rl.native`). `python -m inkling_rl.formats.kernels` builds ahead of time.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from inkling_rl.native import NativeLibrary

KERNELS = NativeLibrary(
    name="formats_cpu",
    main=Path(__file__).with_name("cpp") / "formats.cpp",
    purpose="The number formats' C++ kernels",
    consequence="Conversions run on torch instead, 70 to 300 times slower",
)


class Weight(Structure):
    """`[E, N, K]` with dense columns, strides in elements; see `cpp/weight.h`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("experts", "rows", "columns", "expert_stride", "row_stride", "half")),
    ]


_P, _I, _W = c_void_p, c_int64, POINTER(Weight)
_SIGNATURES: dict[str, list[Any]] = {
    "fmt_largest": [_W, _P, _I],
    "fmt_quantize_nvfp4": [_W, _P, _I, _P, _P, _P, _P, _I],
    "fmt_dequantize_nvfp4": [_P, _P, _P, _I, _I, _I, _P, _I, _I],
    "fmt_quantize_mxfp8": [_W, _P, _P, _P, _P, _I],
    "fmt_dequantize_mxfp8": [_P, _P, _I, _P, _I, _I],
}


@cache
def functions(kernels: NativeLibrary = KERNELS) -> Any:
    """The library with argument types set, or None when there is none."""
    loaded = kernels.load()
    if loaded is None:
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def have_native() -> bool:
    """Whether the C++ kernels are there; builds them on the first call."""
    return functions() is not None


def dense_columns(weight: torch.Tensor) -> torch.Tensor:
    """`weight [E, N, K]` itself when its columns are dense, as the kernels read it; else a copy."""
    assert weight.ndim == 3 and weight.dtype in (torch.bfloat16, torch.float32) and weight.is_cpu
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def as_argument(weight: torch.Tensor) -> Any:
    """The tensor as the kernels take it; the caller keeps it alive."""
    experts, rows, columns = weight.shape
    half = int(weight.dtype is torch.bfloat16)
    return byref(Weight(weight.data_ptr(), experts, rows, columns, weight.stride(0), weight.stride(1), half))


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Codes or scales as dense uint8."""
    assert tensor.is_cpu
    return tensor.view(torch.uint8).contiguous()


def threads() -> int:
    return torch.get_num_threads()
