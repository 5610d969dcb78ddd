"""Adapters on the CPU: what vLLM 0.30 gets wrong, corrected in the worker process.

1. `PunicaWrapperCPU` gives a base-model row (index -1) the adapter in the last slot, because -1 indexes from the end.
   It also gathers a whole weight per token. Its `add_lora_linear` is replaced by a kernel that skips such rows.
2. An adapter tensor that fits no module, or is smaller than its module, is applied in part or not at all, silently.
   Every adapter is checked with `lora.files.read_adapter` before it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.worker_manager import WorkerLoRAManager

from lora.files import read_adapter
from rollout.kernels import ops
from rollout.plugin.compat import MODEL_TYPES

_original_load = WorkerLoRAManager._load_adapter


def install() -> None:
    """Replace both methods; idempotent."""
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    WorkerLoRAManager._load_adapter = load_adapter


def is_installed() -> bool:
    return PunicaWrapperCPU.add_lora_linear is add_lora_linear and WorkerLoRAManager._load_adapter is load_adapter


def add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    buffer: Any = None,
    **kwargs: Any,
) -> None:
    """`y[row] += scale B[slot] (A[slot] x[row])` for rows with an adapter, slice by slice of the output, in place."""
    slots = self.token_lora_indices
    y, x, first = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        ops.lora_delta(y[:, first : first + size], x, a[:, 0], b[:, 0], slots, scale)
        first += size


def load_adapter(self: Any, lora_request: Any) -> Any:
    """Check the directory against the model that runs, then load as vLLM does.

    Raises:
        AdapterError: anything that could not be applied exactly.
    """
    config = self._adapter_manager.model.config
    if getattr(config, "model_type", None) in MODEL_TYPES:
        read_adapter(lora_request.lora_path, config.to_dict())
    return _original_load(self, lora_request)
