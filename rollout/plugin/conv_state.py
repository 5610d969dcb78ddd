"""Short convolutions whose last inputs live in vLLM's paged cache.

Source: transformers 5.24 `Inkling2ShortConvolution` and `Inkling2DynamicShortConvolution`. The state of a stream is its
*inputs* at absolute positions, so nothing has to be undone when tokens are rejected, preempted or re-scheduled.
"""

from __future__ import annotations

import torch
from torch import nn

from rollout.kernels import ops
from rollout.kernels.paged import PagedBatch
from rollout.plugin.linear import Weight


class ConvStream:
    """One layer's convolution state in this step; a stream takes its range of channels."""

    def __init__(self, state_BHNC: torch.Tensor, batch: PagedBatch) -> None:
        self.state_BNC = state_BHNC[:, 0]
        self.batch = batch


class ConvWeight(nn.Module):
    """Taps [C, 1, L], float32, lying in memory as [L, C]: the kernel runs over channels."""

    def __init__(self, channels: int, num_taps: int) -> None:
        super().__init__()
        taps_LC = torch.empty(num_taps, channels, dtype=torch.float32)
        self.weight = nn.Parameter(taps_LC.t()[:, None], requires_grad=False)


class ShortConvolution(nn.Module):
    """Static taps, one set per channel, float32. `conv1d.weight` is [C, 1, L], last tap the current token."""

    def __init__(self, channels: int, num_taps: int, offset: int) -> None:
        super().__init__()
        self.conv1d = ConvWeight(channels, num_taps)
        self.range = slice(offset, offset + channels)

    def forward(self, x_TC: torch.Tensor, stream: ConvStream, residual_TC: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve, store the inputs, add `residual`; float32 [T, C]."""
        state = stream.state_BNC[..., self.range]
        return ops.short_conv(x_TC, state, stream.batch, self.conv1d.weight, residual_TC=residual_TC)


class DynamicShortConvolution(nn.Module):
    """Static taps plus taps that each token projects from the layer's input, shared within a key/value head."""

    def __init__(self, channels: int, hidden_size: int, num_heads: int, num_taps: int, offset: int) -> None:
        super().__init__()
        self.static_weight = nn.Parameter(torch.empty(num_taps, channels, dtype=torch.float32), requires_grad=False)
        self.weight_proj = Weight(num_heads * num_taps, hidden_size, dtype=torch.float32)
        self.num_heads = num_heads
        self.range = slice(offset, offset + channels)

    def forward(self, x_TC: torch.Tensor, input_TH: torch.Tensor, stream: ConvStream) -> torch.Tensor:
        """Convolve `x` with taps from `input`, store the inputs; float32 [T, C]."""
        dynamic_TKL = ops.linear(input_TH, self.weight_proj.weight).unflatten(-1, (self.num_heads, -1))
        state = stream.state_BNC[..., self.range]
        return ops.short_conv(x_TC, state, stream.batch, self.static_weight, dynamic_TKL)
