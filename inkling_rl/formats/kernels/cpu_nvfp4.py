"""NVFP4 on the CPU in C++: the functions of `inkling_rl.formats.reference.nvfp4` with the same bytes.

Rows are spread over as many threads as torch uses; memory is that of the results. Source: `cpp/nvfp4.h`, one block per
vector lane, so that sixteen sequential error sums run side by side.
"""

from __future__ import annotations

import torch

from inkling_rl.formats.kernels.cpu_library import as_argument, dense_bytes, dense_columns, functions, threads
from inkling_rl.formats.reference.nvfp4 import BLOCK_SIZE


def largest(weight: torch.Tensor) -> torch.Tensor:
    """float32 `[E]`: the largest magnitude of each expert of `weight [E, N, K]`; NaN where it holds one."""
    weight = dense_columns(weight)
    result = torch.empty(weight.shape[0], dtype=torch.float32, device="cpu")
    functions().fmt_largest(as_argument(weight), result.data_ptr(), threads())
    return result


def quantize(
    weight: torch.Tensor, anchor: torch.Tensor, denominator: int, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. Any strides; columns that are not dense are copied first."""
    weight, anchor = dense_columns(weight), anchor.float().contiguous()
    experts, rows, columns = weight.shape
    assert anchor.shape == (experts,) and columns % BLOCK_SIZE == 0
    given = None if scales is None else dense_bytes(scales)
    assert given is None or given.shape == (experts, rows, columns // BLOCK_SIZE)
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="cpu")
    chosen = torch.empty(experts, rows, columns // BLOCK_SIZE, dtype=torch.uint8, device="cpu")
    counts = torch.zeros(experts, 3, dtype=torch.int64, device="cpu")
    functions().fmt_quantize_nvfp4(
        as_argument(weight),
        anchor.data_ptr(),
        denominator,
        None if given is None else given.data_ptr(),
        codes.data_ptr(),
        chosen.data_ptr(),
        counts.data_ptr(),
        threads(),
    )
    return codes, chosen, counts


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, denominator: int, dtype: torch.dtype
) -> torch.Tensor:
    """See the reference. bfloat16 and float32 are written directly, other types are converted expert by expert."""
    codes, scales, amax = dense_bytes(codes), dense_bytes(scales), amax.float().contiguous()
    experts, rows, half_columns = codes.shape
    blocks = rows * half_columns * 2 // BLOCK_SIZE
    assert scales.numel() == experts * blocks and amax.shape == (experts,)
    values = torch.empty(experts, rows, 2 * half_columns, dtype=dtype, device="cpu")
    if dtype not in (torch.bfloat16, torch.float32):
        for e in range(experts):
            one = slice(e, e + 1)
            values[one] = dequantize(codes[one], scales[one], amax[one], denominator, torch.float32)
        return values
    functions().fmt_dequantize_nvfp4(
        codes.data_ptr(),
        scales.data_ptr(),
        amax.data_ptr(),
        denominator,
        experts,
        blocks,
        values.data_ptr(),
        int(dtype is torch.bfloat16),
        threads(),
    )
    return values
