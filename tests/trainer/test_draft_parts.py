"""Training in parts is training at once: pieces of logits, parts of the blocks, shares of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.test_draft_training import (
    SHAPE,
    all_anchors,
    batched_loss,
    blocks_of,
    exact_target,
    exact_weights,
    largest_difference,
    small_target,
    three_completions,
    train,
    trainable,
)
from trainer.draft import losses, teacher_forcing
from trainer.draft.completions import Completion
from trainer.draft.loop import Share
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target
from trainer.draft.teacher_forcing import forward, passes


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Target:
    return small_target(checkpoint)


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Target:
    return exact_target(checkpoint)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return exact_weights()


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    return three_completions()


def test_logits_in_pieces_change_nothing(
    target: Target,
    weights: dict[str, torch.Tensor],
    completions: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = blocks_of(completions, all_anchors(completions))
    one, other = trainable(weights), trainable(weights)
    total = blocks.weights.sum()
    whole, expected = batched_loss(target, one, [forward(BlockDraft(SHAPE, one), target, blocks)], total)
    monkeypatch.setattr(losses, "MAX_LOGITS", 14 * 512)
    pieces, found = batched_loss(target, other, [forward(BlockDraft(SHAPE, other), target, blocks)], total)
    assert abs(float(whole - pieces)) < 1e-12
    assert largest_difference(found, expected) < 1e-9


@pytest.mark.parametrize(("blocks_each", "num_parts"), [(29 * 2, 2), (29, 3), (10, 9)])
def test_blocks_in_parts_change_nothing(
    target: Target,
    weights: dict[str, torch.Tensor],
    completions: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    blocks_each: int,
    num_parts: int,
) -> None:
    """Two completions at a time, one, and a third of one."""
    blocks = blocks_of(completions, all_anchors(completions))
    one, other = trainable(weights), trainable(weights)
    total = blocks.weights.sum()
    whole, expected = batched_loss(target, one, [forward(BlockDraft(SHAPE, one), target, blocks)], total)
    per_block = SHAPE.num_heads * 7 * (blocks.tokens.shape[1] + 7)
    monkeypatch.setattr(teacher_forcing, "MAX_SCORES", blocks_each * per_block)
    cut = [scored for _, scored in passes(BlockDraft(SHAPE, other), target, blocks)]
    assert len(cut) == num_parts
    pieces, found = batched_loss(target, other, cut, total)
    assert abs(float(whole - pieces)) < 1e-12
    assert largest_difference(found, expected) < 1e-9


def test_ranks_run_the_target_equally_often_and_add_up_to_one(
    small: Target, completions: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose longest completions differ: with weights spread over ranks a call more on one would wait for ever."""
    added: list[list[torch.Tensor]] = []
    monkeypatch.setattr(Share, "add_up", lambda share, tensors: added.append([t.clone() for t in tensors]))
    monkeypatch.setattr(losses, "MAX_LOGITS", 14 * 512)
    monkeypatch.setattr(teacher_forcing, "MAX_SCORES", 10 * SHAPE.num_heads * 7 * (47 + 7))
    calls: list[str] = []
    model = small.model
    for name, module in (("head", model.lm_head), ("embed", model.model.embed_tokens), ("model", model.model)):
        run = module.forward
        monkeypatch.setattr(module, "forward", lambda *a, n=name, r=run, **k: (calls.append(n), r(*a, **k))[1])
    by_rank = {}
    for share in (Share(), Share(0, 2), Share(1, 2)):
        training = train(small, completions, batch_size=3, micro_batch_size=1, max_anchors=512, share=share)
        calls.clear()
        training.advance()
        by_rank[share] = list(calls)
    assert by_rank[Share(0, 2)] == by_rank[Share(1, 2)]
    assert by_rank[Share(0, 2)].count("model") == 2 and by_rank[Share(0, 2)].count("head") > 20
    single, *ranks = added
    for expected, first, second in zip(single, *ranks, strict=True):
        torch.testing.assert_close(first + second, expected, rtol=1e-4, atol=1e-5)
