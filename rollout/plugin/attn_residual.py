"""Block attention residuals: the input of every sublayer is a mixture of finished blocks and the running one.

Source: transformers 5.24 `Inkling2BlockAttentionResidual`. Departure: the running sum stays float32 between layers
(transformers rounds it to the model's dtype once per layer).
"""

from __future__ import annotations

import torch
from torch import nn

from rollout.kernels import ops

# The mixture normalises its sources with this epsilon whatever the config says.
MIX_EPS = 1e-6


class ResidualQuery(nn.Module):
    """The learned queries of one mixture, float32: [H], or [3, H] for the q, k and v inputs of a full layer."""

    def __init__(self, hidden_size: int, num_queries: int = 1) -> None:
        super().__init__()
        shape = (hidden_size,) if num_queries == 1 else (num_queries, hidden_size)
        self.query = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


class RMSNormWeight(nn.Module):
    """Weight of an RMSNorm, kept in float32; the norm itself is part of the mixing kernel."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32), requires_grad=False)


class BlockStates:
    """Residual stream of one forward pass: finished blocks [S, T, H] and how many there are."""

    def __init__(self, num_blocks: int, first_TH: torch.Tensor) -> None:
        self.states = first_TH.new_empty(num_blocks, *first_TH.shape)
        self.finished = 0

    def append(self, block_TH: torch.Tensor) -> None:
        """Close a block."""
        self.states[self.finished] = block_TH
        self.finished += 1

    def mix(
        self, partial_TH: torch.Tensor, query: ResidualQuery | None, norms: tuple[RMSNormWeight, ...], eps: float
    ) -> torch.Tensor:
        """Input of a sublayer, float32 [len(norms), T, H]; `query` None means the running block alone."""
        weights_QH = norms[0].weight[None] if len(norms) == 1 else torch.stack([norm.weight for norm in norms])
        queries_QH = None if query is None else query.query.view(-1, partial_TH.shape[-1])
        return ops.mix_norm(self.states[: self.finished], partial_TH, queries_QH, weights_QH, MIX_EPS, eps)
