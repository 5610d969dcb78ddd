"""The kernels that the model's modules call: the C++ twin on the CPU, else the torch reference.

The choice is made once per process (`INKLING_RL_KERNELS=torch` forces the reference); a missing compiler costs speed
and one warning, never a start. On CUDA the decoder's layers run in `rollout.plugin.fused`, and of these functions only
`linear` is called there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from rollout.kernels import native, reference


@cache
def have_native() -> bool:
    """Whether the C++ kernels are there; builds them on the first call."""
    return native.functions() is not None


def _dispatched[Function: Callable[..., Any]](slow: Function, fast: Function) -> Function:
    def call(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if x.is_cpu and have_native():
            return fast(x, *arguments, **options)
        return slow(x, *arguments, **options)

    call.__name__, call.__doc__ = slow.__name__, slow.__doc__
    return call  # type: ignore[return-value]


def linear(x_TC: torch.Tensor, weight_OC: torch.Tensor) -> torch.Tensor:
    """`x W^T`, [T, O]: float32 on the CPU, on CUDA in the weight's dtype with sums in float32."""
    if x_TC.is_cuda:
        return F.linear(x_TC.to(weight_OC.dtype), weight_OC)
    return _linear(x_TC, weight_OC)


attention = _dispatched(reference.attention, native.attention)
experts = _dispatched(reference.experts, native.experts)
lora_delta = _dispatched(reference.lora_delta, native.lora_delta)
mix_norm = _dispatched(reference.mix_norm, native.mix_norm)
short_conv = _dispatched(reference.short_conv, native.short_conv)
_linear = _dispatched(reference.linear, native.linear)
softcap_logits = _dispatched(reference.softcap_logits, native.softcap_logits)
store_kv = _dispatched(reference.store_kv, native.store_kv)
