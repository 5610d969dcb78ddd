"""The kernels the model calls. Not implementations: each is the fast one for the tensors' device, or the reference."""

from __future__ import annotations

from rollout.kernels.reference import (
    attention,
    experts,
    linear,
    lora_delta,
    mix_norm,
    rms_norm,
    short_conv,
    softcap_logits,
    store_kv,
)

__all__ = [
    "attention",
    "experts",
    "linear",
    "lora_delta",
    "mix_norm",
    "rms_norm",
    "short_conv",
    "softcap_logits",
    "store_kv",
]
