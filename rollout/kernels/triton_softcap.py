"""The softcap of the logits and the columns of padding tokens, in one pass on CUDA; see `reference.softcap_logits`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
# Rows whose logits lie in memory twice at a time: a prompt's log-probabilities are asked for a thousand rows at once.
_ROWS = 256


def softcap_logits(x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int) -> torch.Tensor:
    """`cap tanh(x W^T / cap)`, float32 [T, padded_size]; -inf beyond the weight's rows. The product is not rounded."""
    out_TP = torch.empty(x_TH.shape[0], padded_size, dtype=torch.float32, device=x_TH.device)
    for x_RH, out_RP in zip(x_TH.to(weight_VH.dtype).split(_ROWS), out_TP.split(_ROWS), strict=True):
        if weight_VH.dtype == torch.float32:
            logits_RV = x_RH @ weight_VH.t()
        else:
            logits_RV = torch.mm(x_RH, weight_VH.t(), out_dtype=torch.float32)
        if out_RP.numel():
            with torch.cuda.device_of(x_TH):
                _softcap_kernel[(triton.cdiv(padded_size, _BLOCK), out_RP.shape[0])](
                    logits_RV, out_RP, logits_RV.shape[1], padded_size, cap, 1.0 / cap, _BLOCK
                )
    return out_TP


@triton.jit
def _softcap_kernel(logits, out, size, padded_size, cap, per_cap, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * size + columns, mask=columns < size, other=0.0)
    capped = softcapped(value, cap, per_cap)
    tl.store(
        out + row * padded_size + columns, tl.where(columns < size, capped, float("-inf")), mask=columns < padded_size
    )


@triton.jit
def softcapped(value, cap, per_cap):
    """`cap tanh(value / cap)`."""
    # tanh by an exponential loses small values to cancellation; near 0 its series is exact in float32.
    ratio = value * per_cap
    decay = tl.exp(-2.0 * tl.abs(ratio))
    tanh = (1.0 - decay) / (1.0 + decay)
    square = ratio * ratio
    small = tl.abs(ratio) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    tanh = tl.where(tl.abs(ratio) < 0.15, small, tanh)
    return cap * tl.where(ratio < 0, -tanh, tanh)
