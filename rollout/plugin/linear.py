"""Linear layers of the engine: vLLM's replicated linear with our kernel, so that vLLM can wrap it with adapters.

Not a quantised layer, and not vLLM's CPU linear: that one packs the weight into a closure and drops the parameter,
which makes a live update impossible, and its result for a row depends on how many rows the batch has.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from rollout.kernels import ops
from rollout.kernels.layout import k_major


class KernelLinearMethod(UnquantizedLinearMethod):
    """Keeps the weight [out, in] in the model's dtype; sums are float32, see `ops.linear`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing to pack: the kernel reads the parameter itself, so an update in place is seen at once."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None, "Inkling 2 has no biases"
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return ops.linear(x, weight)


class Projection(ReplicatedLinear):
    """A projection that adapters may target: `y = x W^T` [T, out], see `ops.linear`. Called through its wrapper."""

    def __init__(self, input_size: int, output_size: int, prefix: str) -> None:
        super().__init__(input_size, output_size, bias=False, prefix=prefix, return_bias=False)
        self.quant_method = KernelLinearMethod()
        if self.weight.is_cpu:
            self.weight.data = k_major(self.weight.data)


class Weight(nn.Module):
    """A named weight [..., out, in] that no adapter may target."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_weight(*shape, dtype=dtype)


def empty_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Parameter [..., out, in] that lies in memory as the kernels read it."""
    weight = torch.empty(shape, dtype=dtype)
    return nn.Parameter(k_major(weight) if weight.is_cpu else weight, requires_grad=False)
