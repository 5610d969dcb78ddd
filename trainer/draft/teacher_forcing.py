"""One pass of target and draft over a batch of blocks, the real tokens given: where losses and measurement start."""

from __future__ import annotations

import torch

from trainer.draft.completions import Blocks
from trainer.draft.losses import Scored
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target


def forward(draft: BlockDraft, target: Target, blocks: Blocks) -> Scored:
    """Run both on `blocks`, which lie on the target's device. The target gets no gradient.

    The draft multiplies in bfloat16 where the target's weights are, with its own weights, norms, softmax and residual
    stream in float32.
    """
    states = target.states(blocks.tokens)
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
