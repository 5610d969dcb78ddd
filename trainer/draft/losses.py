"""What a draft is trained to minimise, as pure functions of tensors.

For row k (from 0) of a block, with the draft's distribution q, the target's p, the real token x and the confidence c:

    0.1 CE(q, x) + 0.9 |q - p|_1 + 1.0 BCE(c, 1 - |q - p|_1 / 2),    weighted by exp(-k / 4)

1 - |q - p|_1 / 2 = sum min(p, q) is the probability that speculative sampling accepts the row's token, given that those
before it were accepted; it is a label and gets no gradient. Every term is a sum over rows that the caller divides by
the sum of weights of the whole batch, so that micro-batches and padding change nothing.

Source: DSpark (arXiv 2607.05147), with DeepSpec's configuration where the paper differs from it (a decay of 4, the
paper says the block size). Departure: p is the target's distribution over its unpadded vocabulary, and a row with
k tokens left before the end of its completion counts up to the last token, the stop token included.

Letters: M rows, H hidden, R rank, V vocabulary (unpadded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

# Logits of one distribution that exist at once: 2^27 float32 are 0.5 GiB, and about six such tensors live in a piece.
MAX_LOGITS = 1 << 27


class Losses(NamedTuple):
    """Weighted sums over rows; scalars, float32."""

    cross_entropy: torch.Tensor
    distance: torch.Tensor
    """Of |q - p|_1."""

    confidence: torch.Tensor
    acceptance: torch.Tensor
    """[B]: sum of acceptance probabilities per row of the block, not weighted by the decay; no gradient."""


class Scored(NamedTuple):
    """The rows of all blocks in the order of the blocks, M first in every tensor."""

    hidden: torch.Tensor
    """[M, H]"""

    features: torch.Tensor
    """[M, R]"""

    confidence: torch.Tensor | None
    target: torch.Tensor
    """[M, H]: the target's final hidden state at the position that predicts the row's token."""

    labels: torch.Tensor
    weights: torch.Tensor
    """0 where a row has no token."""


class Coefficients(NamedTuple):
    """How the terms are added."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0

    def total(self, losses: Losses) -> torch.Tensor:
        return (
            self.cross_entropy * losses.cross_entropy
            + self.distance * losses.distance
            + self.confidence * losses.confidence
        )


def decay(block_size: int, gamma: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Weights of the rows of a block [B]: later tokens matter only where the earlier ones were accepted."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32, device=device) / gamma)


def backward(
    rows: Scored,
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    markov_w2_VR: torch.Tensor,
    block_size: int,
    objective: Callable[[Losses], torch.Tensor],
) -> Losses:
    """Sums of the terms over rows, and gradients of what is made of them, which are added up where the weights are.

    A piece of the rows at a time goes from logits to the gradient of the rows themselves, and only then all of them to
    the draft's weights: logits of one piece exist at once, nothing is computed twice, and the target's head, whose
    weight may be spread over ranks, runs forward and backward one piece after the other.

    Args:
        rows: M a multiple of `block_size`.
        target_logits: the target's head with its softcap, [M, H] to float32 [M, V].
        markov_w2_VR: the padded vocabulary's rows may follow; they are never sampled.
        block_size: B.
        objective: linear in the first three terms.

    Returns:
        The sums, without gradients.
    """
    names = [name for name in ("hidden", "features", "confidence") if getattr(rows, name) is not None]
    sums, gradients = [], []
    for piece in pieces(rows, len(markov_w2_VR), multiple=block_size):
        leaves = {name: getattr(piece, name).detach().requires_grad_() for name in names}
        losses = _score(piece._replace(**leaves), target_logits, markov_w2_VR, block_size)
        objective(losses).backward()
        sums.append([term.detach() for term in losses])
        gradients.append([leaf.grad for leaf in leaves.values()])
    whole = [torch.cat(parts) for parts in zip(*gradients, strict=True)]
    torch.autograd.backward([getattr(rows, name) for name in names], whole)
    return Losses(*(torch.stack(terms).sum(0) for terms in zip(*sums, strict=True)))


def pieces(rows: Scored, vocabulary: int, multiple: int = 1) -> Iterator[Scored]:
    """The rows in their order, so many at a time that one distribution over `vocabulary` has `MAX_LOGITS` at most.

    How many pieces there are follows from the number of rows alone. A piece has a multiple of `multiple` rows.
    """
    size = max(1, MAX_LOGITS // vocabulary // multiple) * multiple
    for first in range(0, len(rows.labels), size):
        yield Scored(*(None if value is None else value[first : first + size] for value in rows))  # type: ignore[arg-type]


def distributions(
    rows: Scored, target_logits: Callable[[torch.Tensor], torch.Tensor], markov_w2_VR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of q and p, float32 [M, V] each (float64 where the weights are). p has no gradient."""
    base_MV = target_logits(rows.hidden)
    wide = torch.promote_types(base_MV.dtype, torch.float32)
    added_MV = F.linear(rows.features, markov_w2_VR[: base_MV.shape[-1]]).to(wide)
    with torch.no_grad():
        log_p_MV = target_logits(rows.target).to(wide).log_softmax(-1)
    return (base_MV.to(wide) + added_MV).log_softmax(-1), log_p_MV


def _score(
    rows: Scored, target_logits: Callable[[torch.Tensor], torch.Tensor], markov_w2_VR: torch.Tensor, block_size: int
) -> Losses:
    log_q_MV, log_p_MV = distributions(rows, target_logits, markov_w2_VR)
    distance_M = (log_q_MV.exp() - log_p_MV.exp()).abs().sum(-1)
    cross_entropy_M = -log_q_MV.gather(-1, rows.labels[:, None])[:, 0]
    # The sum of two rounded distributions may differ from 2 in the last bit; a label outside [0, 1] is refused.
    accepted_M = (1 - 0.5 * distance_M.detach()).clamp(0, 1)
    if rows.confidence is None:
        confidence = distance_M.new_zeros(())
    else:
        logits_M = rows.confidence.to(distance_M.dtype)
        terms_M = F.binary_cross_entropy_with_logits(logits_M, accepted_M, reduction="none")
        confidence = (rows.weights * terms_M).sum()
    return Losses(
        (rows.weights * cross_entropy_M).sum(),
        (rows.weights * distance_M).sum(),
        confidence,
        (accepted_M * (rows.weights > 0)).unflatten(0, (-1, block_size)).sum(0),
    )
