"""MXFP8 on the CPU in C++: the functions of `inkling_rl.formats.reference.mxfp8` with the same bytes.

Blocks are spread over as many threads as torch uses; memory is that of the results. Source: `cpp/mxfp8.h`.
"""

from __future__ import annotations

import torch

from inkling_rl.formats.kernels.cpu_library import as_argument, dense_bytes, dense_columns, functions, threads
from inkling_rl.formats.reference.mxfp8 import BLOCK_SIZE


def quantize(weight: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. Any strides; columns that are not dense are copied first."""
    weight = dense_columns(weight)
    experts, rows, columns = weight.shape
    assert columns % BLOCK_SIZE == 0
    given = None if scales is None else dense_bytes(scales)
    assert given is None or given.shape == (experts, rows, columns // BLOCK_SIZE)
    codes = torch.empty(experts, rows, columns, dtype=torch.uint8, device="cpu")
    chosen = torch.empty(experts, rows, columns // BLOCK_SIZE, dtype=torch.uint8, device="cpu")
    counts = torch.zeros(experts, dtype=torch.int64, device="cpu")
    functions().fmt_quantize_mxfp8(
        as_argument(weight),
        None if given is None else given.data_ptr(),
        codes.data_ptr(),
        chosen.data_ptr(),
        counts.data_ptr(),
        threads(),
    )
    return codes, chosen, counts


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See the reference. bfloat16 and float32 are written directly, other types are converted part by part."""
    codes, scales = dense_bytes(codes), dense_bytes(scales)
    assert codes.numel() == scales.numel() * BLOCK_SIZE
    values = torch.empty(codes.shape, dtype=dtype, device="cpu")
    if dtype not in (torch.bfloat16, torch.float32):
        for part, c, s in zip(values, codes, scales, strict=True):
            part.copy_(dequantize(c, s, torch.float32))
        return values
    functions().fmt_dequantize_mxfp8(
        codes.data_ptr(),
        scales.data_ptr(),
        scales.numel(),
        values.data_ptr(),
        int(dtype is torch.bfloat16),
        threads(),
    )
    return values
