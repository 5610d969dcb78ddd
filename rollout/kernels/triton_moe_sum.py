"""The end of a layer of experts on CUDA: the weighted sum over the chosen ones of every token, in float32.

Elementwise, so bound by memory: every output of the experts is read once. The order is that of the columns of
`weights`, which the router gives by ascending expert number, so a row's bits do not depend on where its experts ran.
The weights are applied here, in float32, and not by Marlin, which would round each of them to bfloat16 together with
the outer scale of NVFP4, and its products again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Two outputs of a thread: what they need fits into registers, so a token waits for memory once, not once per expert.
BLOCK, WARPS = 256, 4


def weighted_sum(
    outputs_TKH: torch.Tensor, weights_TK: torch.Tensor, out_TH: torch.Tensor | None = None
) -> torch.Tensor:
    """`sum_k weights[t, k] outputs[t, k]`, [T, H], in the dtype of `out_TH` or of the outputs.

    Args:
        outputs_TKH: bfloat16 or float32, contiguous. weights_TK: float32, contiguous.
        out_TH: written instead of a new tensor.
    """
    num_rows, top_k, hidden = outputs_TKH.shape
    if out_TH is None:
        out_TH = outputs_TKH.new_empty(num_rows, hidden)
    assert outputs_TKH.is_contiguous() and weights_TK.is_contiguous() and out_TH.is_contiguous()
    assert weights_TK.shape == (num_rows, top_k) and weights_TK.dtype == torch.float32
    if num_rows:
        with torch.cuda.device_of(outputs_TKH):
            _sum_kernel[(triton.cdiv(hidden, BLOCK) * num_rows,)](
                outputs_TKH, weights_TK, out_TH, hidden, top_k, BLOCK, num_warps=WARPS
            )
    return out_TH


@triton.jit
def _sum_kernel(outputs, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    PARTS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    start = outputs + row * TOP_K * HIDDEN + column
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        value = tl.load(start + rank * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * TOP_K + rank)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)
