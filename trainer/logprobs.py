"""Log-probabilities of sampled tokens under the policy, on right-padded rows.

SkyRL hands over rows padded on the left, responses aligned to the right edge. They are moved to the left edge first:
then every real token sees exactly what it would see alone (attention is causal, convolutions look back, positions start
at zero) and no mask is needed at all. Masks would have to be right in three places of Inkling 2 (attention, short
convolutions, logarithmic scaling of positions); a forgotten one costs 0.3 in log-probability on a tiny model, silently.

Only the real vocabulary counts: the model's head has `unpadded_vocab_size` rows, so padding ids have no probability.

Letters: N rows, L tokens of a row, A action (response) positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

# Positions whose logits exist at once where V is large: 2,048 x 200,058 float32 are 1.6 GB.
MAX_LOGITS = 2048 * 200_064


class ActionScores(NamedTuple):
    """Per response position, aligned to the right edge as SkyRL expects; zero where there is no response."""

    logprobs: torch.Tensor
    """[N, A] float32, differentiable."""
    entropy: torch.Tensor
    """[N, A] float32, of the distribution that the token was drawn from; no gradient."""


def to_left_edge(tokens_NL: torch.Tensor, mask_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves left-padded rows to the left edge.

    Args:
        tokens_NL: [N, L] token ids, padded on the left.
        mask_NL: [N, L], 1 on real tokens.

    Returns:
        [N, L] ids padded on the right with whatever was the padding, and [N] lengths.
    """
    lengths_N = mask_NL.long().sum(dim=1)
    width = tokens_NL.shape[1]
    columns_NL = (torch.arange(width, device=tokens_NL.device) + (width - lengths_N)[:, None]) % width
    return tokens_NL.gather(1, columns_NL), lengths_N


def score_actions(
    model: torch.nn.Module,
    tokens_NL: torch.Tensor,
    mask_NL: torch.Tensor,
    num_actions: int,
    temperature: float,
) -> ActionScores:
    """Scores the last `num_actions` positions of every row.

    Args:
        model: returns `.logits` [N, K, V] for the last K positions when given `logits_to_keep=K`.
        tokens_NL: [N, L] token ids, padded on the left.
        mask_NL: [N, L], 1 on real tokens.
        num_actions: A, the longest response.
        temperature: of the sampling; logits are divided by it.
    """
    rows_NL, lengths_N = to_left_edge(tokens_NL, mask_NL)
    width = int(lengths_N.max())
    rows_NL = rows_NL[:, :width]
    # Action a of a row is token `length - A + a`; it is predicted one position earlier.
    targets_NA = torch.arange(num_actions, device=rows_NL.device) + (lengths_N - num_actions)[:, None]
    valid_NA = targets_NA > 0
    targets_NA = targets_NA.clamp(min=1)
    first = int(targets_NA.min()) - 1
    logits_NKV = model(input_ids=rows_NL, use_cache=False, logits_to_keep=width - first).logits
    logits_NAV = _take_positions(logits_NKV, targets_NA - 1 - first)
    logprobs_NA, entropy_NA = _score(logits_NAV, rows_NL.gather(1, targets_NA), temperature)
    return ActionScores(logprobs_NA * valid_NA, entropy_NA * valid_NA)


def _take_positions(logits_NKV: torch.Tensor, positions_NA: torch.Tensor) -> torch.Tensor:
    if logits_NKV.shape[0] == 1 and logits_NKV.shape[1] == positions_NA.shape[1] + 1:
        return logits_NKV[:, :-1]  # one row: a slice, where a copy would double the largest tensor of the step
    return logits_NKV.gather(1, positions_NA[..., None].expand(-1, -1, logits_NKV.shape[-1]))


def _score(logits_NAV: torch.Tensor, tokens_NA: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    def chunk(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # float32 before the division: bfloat16 logits around 30 are 0.125 apart.
        all_logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        entropy = -(all_logprobs.detach().exp() * all_logprobs.detach()).sum(-1)
        return all_logprobs.gather(-1, tokens[..., None]).squeeze(-1), entropy

    rows, _, vocabulary = logits_NAV.shape
    size = max(1, MAX_LOGITS // (rows * vocabulary))
    if size >= logits_NAV.shape[1]:
        return chunk(logits_NAV, tokens_NA)
    parts = [
        checkpoint(chunk, logits, tokens, use_reentrant=False)
        for logits, tokens in zip(logits_NAV.split(size, dim=1), tokens_NA.split(size, dim=1), strict=True)
    ]
    return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)
