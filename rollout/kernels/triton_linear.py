"""Small float32 projections of few rows on CUDA: sinks and dynamic convolution taps.

Not for wide weights or many rows: a program takes a few outputs of one row, so every weight is read once per row (from
the L2 cache). `project` hands many rows to torch. Products and sums are float32, as transformers keeps these weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
"""Rows up to which one launch of ours beats two of torch; about where the weights have been read too often."""

_OUTPUTS, _BLOCK, _WARPS = 4, 512, 4


def project(x_JTH: torch.Tensor, weight_JNH: torch.Tensor) -> torch.Tensor:
    """`x W^T` of J independent pairs, float32 [J, T, N].

    Args:
        x_JTH: bfloat16 or float32; rows and planes may lie apart.
        weight_JNH: float32, contiguous.
    """
    (num_jobs, num_rows, hidden), num_outputs = x_JTH.shape, weight_JNH.shape[1]
    if num_rows > MAX_ROWS or x_JTH.is_cpu:
        return torch.bmm(x_JTH.float(), weight_JNH.transpose(1, 2))
    assert x_JTH.stride(2) == 1 and weight_JNH.is_contiguous() and weight_JNH.dtype == torch.float32
    out_JTN = torch.empty(num_jobs, num_rows, num_outputs, dtype=torch.float32, device=x_JTH.device)
    if num_rows:
        with torch.cuda.device_of(x_JTH):
            _project_kernel[(num_rows, triton.cdiv(num_outputs, _OUTPUTS), num_jobs)](
                x_JTH, weight_JNH, out_JTN, *x_JTH.stride()[:2], num_rows, num_outputs, hidden, _OUTPUTS, _BLOCK,
                num_warps=_WARPS,
            )  # fmt: skip
    return out_JTN


@triton.jit(do_not_specialize=["num_rows"])
def _project_kernel(
    x, weight, out, stride_job, stride_row, num_rows, N: tl.constexpr, HIDDEN: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, job = tl.program_id(0), tl.program_id(2)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x += job.to(tl.int64) * stride_job + row.to(tl.int64) * stride_row
    weight += (job * N + outputs[:, None]) * HIDDEN
    total = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for first in tl.static_range(0, HIDDEN, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        value = tl.load(x + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
        inside = (columns < HIDDEN)[None] & (outputs < N)[:, None]
        total += tl.load(weight + columns[None], mask=inside, other=0.0) * value[None]
    tl.store(out + (job * num_rows + row) * N + outputs, tl.sum(total, 1), mask=outputs < N)
