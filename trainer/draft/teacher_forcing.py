"""Target and draft over a batch of blocks, the real tokens given: where losses and measurement start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer.draft.completions import Blocks
from trainer.draft.losses import Scored
from trainer.draft.model import BlockDraft
from trainer.draft.target import States, Target

# Attention scores of one layer that exist at once: 2^28 float32 are 1 GiB.
MAX_SCORES = 1 << 28

Part = tuple[slice, slice]
"""Sequences and anchors of a batch."""


def passes(draft: BlockDraft, target: Target, blocks: Blocks) -> Iterator[tuple[Part, Scored]]:
    """Run both on `blocks`, the target once, the draft on a part of the blocks at a time.

    Parts are small enough for `MAX_SCORES`. How many there are follows from the shape of `blocks` alone, so that ranks
    with batches of one shape run the target's modules equally often.
    """
    states = target.states(blocks.tokens)
    for part in parts(blocks, draft.shape.num_heads):
        sequences, anchors = part
        cut = Blocks(blocks.tokens[sequences], *(value[sequences, anchors] for value in blocks[1:]))
        yield part, forward(draft, target, cut, States(*(value[sequences] for value in states)))


def parts(blocks: Blocks, num_heads: int) -> list[Part]:
    """The batch cut between sequences, and through the anchors of one where its own are too many.

    Every cut through a sequence's anchors costs the draft its context's keys and values once more.
    """
    num_sequences, num_anchors, num_rows = blocks.labels.shape
    per_anchor = num_heads * num_rows * (blocks.tokens.shape[1] + num_rows)
    anchors_each = min(num_anchors, max(1, MAX_SCORES // per_anchor))
    sequences_each = max(1, MAX_SCORES // (per_anchor * num_anchors))
    return [
        (slice(row, row + sequences_each), slice(anchor, anchor + anchors_each))
        for row in range(0, num_sequences, sequences_each)
        for anchor in range(0, num_anchors, anchors_each)
    ]


def forward(draft: BlockDraft, target: Target, blocks: Blocks, states: States | None = None) -> Scored:
    """Run both on `blocks`, which lie on the target's device. The target gets no gradient, and is not run for `states`.

    The draft multiplies in bfloat16 where the target's weights are, with its own weights, norms, softmax and residual
    stream in float32.
    """
    states = states or target.states(blocks.tokens)
    wide = draft.weights["norm.weight"].dtype
    is_narrow = states.final.dtype == torch.bfloat16
    with torch.autocast(target.device.type, torch.bfloat16, enabled=is_narrow):
        rows = draft.rows(
            states.outputs.to(wide),
            target.embed(blocks.inputs).to(wide),
            blocks.anchors,
            blocks.previous,
        )
    # Row k gives the token at anchor + 1 + k, whose logits the target computes one position earlier.
    at_NAB = blocks.anchors[..., None] + torch.arange(blocks.labels.shape[-1], device=blocks.anchors.device)
    at_NAB = at_NAB.clamp(max=blocks.tokens.shape[1] - 1)
    row_N11 = torch.arange(len(at_NAB), device=at_NAB.device)[:, None, None]
    return Scored(
        hidden=rows.hidden.to(wide).flatten(0, 2),
        features=rows.features.to(wide).flatten(0, 2),
        confidence=None if rows.confidence is None else rows.confidence.to(wide).flatten(),
        target=states.final[row_N11, at_NAB].flatten(0, 2),
        labels=blocks.labels.flatten(),
        weights=blocks.weights.flatten(),
    )
