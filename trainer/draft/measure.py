"""What a draft is worth: tokens emitted per verification step under speculative sampling, computed, not simulated.

Completions are the target's own, and so is what speculative decoding gives. Given such a completion x, the token of
row k is accepted (those before it were) with probability min(1, q(x_k) / p(x_k)): the chance that the token which came
out was the draft's and not a replacement. So one teacher-forced pass over all anchors gives the distribution of every
step's length, and the expected number of steps of a completion follows by a sum over its positions. A simulation with
the reference draft agrees (test). The first token of a completion comes with the prompt and no step; nothing after the
last token is counted.

Letters: N completions, A anchors (every token of a completion that another follows), B rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched

import torch

from trainer.draft.completions import Blocks, Completion, make_blocks
from trainer.draft.losses import Scored, distributions, pieces
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target
from trainer.draft.teacher_forcing import passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Of a draft, on some completions at one temperature."""

    tokens_per_step: float
    """Accepted tokens and the one that the target adds; 1 is what decoding without a draft gives."""

    acceptance: tuple[float, ...]
    """Per row: probability that its token is accepted, given those before it were, at the anchors that occur."""

    confidence_error: float
    """Mean |confidence - acceptance probability| over rows that are reached, 0 without a confidence head."""

    num_steps: float
    """Expected verification steps of all completions."""

    num_completions: int


@torch.no_grad()
def measure(
    draft: BlockDraft,
    target: Target,
    completions: Sequence[Completion],
    *,
    num_tokens: int,
    temperature: float = 1.0,
    batch_size: int = 16,
) -> Worth:
    """Measure a draft.

    Args:
        draft, target: on one device.
        completions: sampled from the target at `temperature`.
        num_tokens: drafted per step, up to the block's size.
        temperature: of target and draft, above 0.
        batch_size: completions at a time.

    Ranks that share the target must measure the same completions, all of them: then they run it equally often.
    """
    sums = torch.zeros(4, num_tokens, dtype=torch.float64)
    steps = tokens = 0.0
    usable = sorted((c for c in completions if len(c.tokens) > 1), key=lambda c: len(c.prompt) + len(c.tokens))
    for batch in batched(usable, batch_size):
        anchors = [range(len(c.prompt), len(c.prompt) + len(c.tokens) - 1) for c in batch]
        ones_B = torch.ones(draft.shape.block_size)
        blocks = make_blocks(batch, anchors, draft.shape.mask_token_id, ones_B).to(target.device)
        kept_NAB, overlap_NAB, error_NAB = _compare(draft, target, blocks, temperature)
        for row, completion in enumerate(batch):
            count = len(completion.tokens) - 1
            kept_AB = kept_NAB[row, :count, :num_tokens]
            visits_A = expected_visits(kept_AB)
            steps += float(visits_A.sum())
            tokens += count
            # Row k is reached where all before it were accepted, and exists where a token is left.
            before_AB = torch.cat([torch.ones(count, 1).double(), kept_AB[:, :-1].cumprod(1)], dim=1)
            exists_AB = torch.arange(num_tokens) < torch.arange(count, 0, -1)[:, None]
            reached_AB = visits_A[:, None] * before_AB * exists_AB
            sums[0] += reached_AB.sum(0)
            sums[1] += (reached_AB * overlap_NAB[row, :count, :num_tokens]).sum(0)
            sums[2] += (reached_AB * error_NAB[row, :count, :num_tokens]).sum(0)
    acceptance = (sums[1] / sums[0].clamp(min=1e-9)).tolist()
    return Worth(
        tokens_per_step=tokens / max(steps, 1e-9),
        acceptance=tuple(acceptance),
        confidence_error=float(sums[2].sum() / sums[0].sum().clamp(min=1e-9)),
        num_steps=steps,
        num_completions=len(usable),
    )


def expected_visits(kept_AB: torch.Tensor) -> torch.Tensor:
    """How often a step starts at each anchor of a completion, [A] float64.

    Args:
        kept_AB: probability that row k's token is accepted, given those before it; [A, B] where anchor a is followed
            by A - a tokens. A step from there emits the accepted tokens and one more, but no more than A - a.
    """
    count, num_rows = kept_AB.shape
    visits = torch.zeros(count + 1, dtype=torch.float64)
    visits[0] = 1.0
    for anchor in range(count):
        left = count - anchor
        longest = min(num_rows + 1, left)
        all_before = torch.cat([torch.ones(1).double(), kept_AB[anchor, : longest - 1].cumprod(0)])
        at_least = torch.cat([all_before, torch.zeros(1).double()])
        visits[anchor + 1 : anchor + 1 + longest] += visits[anchor] * (at_least[:-1] - at_least[1:])
    return visits[:-1]


def _compare(
    draft: BlockDraft, target: Target, blocks: Blocks, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, A, B] each, float64 on the CPU: min(1, q(x) / p(x)) of the real token, sum min(p, q), |confidence - that|."""
    markov_w2_VR = draft.weights["markov_head.markov_w2.weight"]
    found_3NAB = torch.zeros(3, *blocks.labels.shape, dtype=torch.float64)
    for (sequences, anchors), scored in passes(draft, target, blocks):
        compared = [_compare_rows(p, target, markov_w2_VR, temperature) for p in pieces(scored, len(markov_w2_VR))]
        place_3NAB = found_3NAB[:, sequences, anchors]
        place_3NAB[:] = torch.cat(compared, dim=1).view_as(place_3NAB)
    kept_NAB, overlap_NAB, error_NAB = found_3NAB
    return kept_NAB, overlap_NAB, error_NAB


def _compare_rows(rows: Scored, target: Target, markov_w2_VR: torch.Tensor, temperature: float) -> torch.Tensor:
    """[3, M], on the CPU: what `_compare` gives."""
    log_q_MV, log_p_MV = distributions(rows, target.logits, markov_w2_VR)
    if temperature != 1.0:
        log_q_MV, log_p_MV = ((x / temperature).log_softmax(-1) for x in (log_q_MV, log_p_MV))
    at_M1 = rows.labels[:, None]
    kept_M = (log_q_MV.gather(-1, at_M1) - log_p_MV.gather(-1, at_M1))[:, 0].clamp(max=0).exp()
    overlap_M = torch.minimum(log_q_MV.exp(), log_p_MV.exp()).sum(-1)
    if rows.confidence is None:
        error_M = torch.zeros_like(overlap_M)
    else:
        error_M = (rows.confidence.sigmoid() - overlap_M).abs()
    return torch.stack([kept_M, overlap_M, error_M]).double().cpu()
