"""Draft training against the slow reference in float64: values, losses, gradients; what a block may see; resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import random_tensors, tiny_config
from inkling_rl.draft.reference import ReferenceDraft
from inkling_rl.draft.shape import PREFIX, DraftShape
from trainer.draft.completions import Blocks, Completion, make_blocks, sample_anchors
from trainer.draft.loop import Masters, Plan, Share, StepResult, Training, save_state
from trainer.draft.losses import Coefficients, Scored, backward, decay
from trainer.draft.model import BlockDraft, new_weights
from trainer.draft.target import States, Target
from trainer.draft.teacher_forcing import forward
from trainer.model import load_frozen

SHAPE = DraftShape.from_config(tiny_config())
COEFFICIENTS = Coefficients()
# Lengths of prompt and completion: one block ends with the completion, one has a single token left.
LENGTHS = ((9, 12), (3, 2), (17, 30))


class ExactTarget(Target):
    """States of every sequence computed alone, in float32, handed on in float64, with rubbish where there is padding.

    So what differs between a batch and single sequences is the draft's doing. Padding is token 0 at the end.
    """

    def states(self, tokens_NT: torch.Tensor) -> States:
        rows = []
        for tokens_T in tokens_NT:
            length = int(tokens_T.nonzero().max()) + 1
            alone = super().states(tokens_T[None, :length])
            rubbish = (0, 0, 0, tokens_NT.shape[1] - length)
            rows.append([torch.nn.functional.pad(x[0].double(), rubbish, value=1e3) for x in alone])
        return States(*(torch.stack(x) for x in zip(*rows, strict=True)))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids).double()


def small_target(checkpoint: Path) -> Target:
    """In float32, as trained."""
    return Target.load(Checkpoint.open(checkpoint), SHAPE.target_layers, torch.device("cpu"), torch.float32)


def exact_target(checkpoint: Path) -> Target:
    model = load_frozen(Checkpoint.open(checkpoint), torch.float32, torch.device("cpu"))
    model.lm_head.double()
    return ExactTarget(model, SHAPE.target_layers)


def exact_weights() -> dict[str, torch.Tensor]:
    tensors = random_tensors(11).items()
    return {name.removeprefix(PREFIX): value.double() for name, value in tensors if name.startswith(PREFIX)}


def three_completions() -> list[Completion]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for prompt, tokens in LENGTHS:
        ids = torch.randint(1, 500, (prompt + tokens,), generator=generator).tolist()
        made.append(Completion(tuple(ids[:prompt]), tuple(ids[prompt:])))
    return made


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


def blocks_of(completions: list[Completion], anchors: list[list[int]]) -> Blocks:
    return make_blocks(completions, anchors, SHAPE.mask_token_id, torch.exp(-torch.arange(7).double() / 4))


def all_anchors(completions: list[Completion]) -> list[list[int]]:
    return [sample_anchors(completion, 512, 0) for completion in completions]


def trainable(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone().requires_grad_() for name, value in weights.items()}


def reference_loss(
    target: Target, weights: dict[str, torch.Tensor], completions: list[Completion], anchors: list[list[int]]
) -> torch.Tensor:
    """The objective block by block and row by row, as it is written in the paper, from the reference draft."""
    reference = ReferenceDraft(SHAPE, weights)
    terms, total = [], 0.0
    for completion, positions in zip(completions, anchors, strict=True):
        ids = completion.prompt + completion.tokens
        states = target.states(torch.tensor([ids]))
        outputs_TC, p_TV = states.outputs[0], torch.softmax(target.logits(states.final[0]), -1)
        for anchor in positions:
            real = iter(ids[anchor + 1 :] + (0,) * SHAPE.block_size)
            block = reference.block(
                target.embed, padded(target), outputs_TC[:anchor], ids[anchor], lambda _, real=real: next(real)
            )
            assert block.confidence is not None
            for k in range(min(SHAPE.block_size, len(ids) - 1 - anchor)):
                q_V, p_V = torch.softmax(block.logits[k], -1), p_TV[anchor + k]
                q_V = q_V[:500]
                distance = (q_V - p_V).abs().sum()
                accepted = torch.minimum(q_V, p_V).sum().detach()
                c = block.confidence[k]
                weight = float(torch.exp(torch.tensor(-k / 4.0, dtype=torch.float64)))
                bce = -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c))
                terms.append(weight * (-0.1 * torch.log(q_V[ids[anchor + 1 + k]]) + 0.9 * distance + bce))
                total += weight
    return torch.stack(terms).sum() / total


def padded(target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's head over the padded vocabulary, as the engine's: padding ids cannot be drawn."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(target.logits(hidden), (0, 12), value=float("-inf"))

    return logits


def batched_loss(
    target: Target, weights: dict[str, torch.Tensor], parts: Iterable[Scored], total: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of rows, some at a time."""
    loss, markov = torch.zeros((), dtype=torch.float64), weights["markov_head.markov_w2.weight"]
    for scored in parts:
        summed = backward(
            scored, target.logits, markov, SHAPE.block_size, lambda losses: COEFFICIENTS.total(losses) / total
        )
        loss += COEFFICIENTS.total(summed) / total
    found = {name: value.grad for name, value in weights.items() if value.grad is not None}
    assert found.keys() == weights.keys()
    return loss, found


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Relative to each tensor's largest value."""
    return max(
        float((value - second[name]).abs().max() / second[name].abs().max().clamp(min=1e-12))
        for name, value in first.items()
    )


def test_rows_of_a_padded_batch_are_those_of_the_reference(
    target: Target, weights: dict[str, torch.Tensor], completions: list[Completion]
) -> None:
    anchors = all_anchors(completions)
    scored = forward(BlockDraft(SHAPE, weights), target, blocks_of(completions, anchors))
    most = max(map(len, anchors))
    hidden = scored.hidden.view(3, most, 7, -1)
    features = scored.features.view(3, most, 7, -1)
    assert scored.confidence is not None
    confidence = scored.confidence.sigmoid().view(3, most, 7)
    reference = ReferenceDraft(SHAPE, weights)
    for row, (completion, positions) in enumerate(zip(completions, anchors, strict=True)):
        ids = completion.prompt + completion.tokens
        outputs_TC = target.states(torch.tensor([ids])).outputs[0]
        for place, anchor in enumerate(positions):
            real = iter(ids[anchor + 1 :] + (0,) * 7)
            block = reference.block(
                target.embed, padded(target), outputs_TC[:anchor], ids[anchor], lambda _, real=real: next(real)
            )
            count = min(7, len(ids) - 1 - anchor)
            assert block.confidence is not None
            torch.testing.assert_close(hidden[row, place], block.hidden, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(confidence[row, place, :count], block.confidence[:count], rtol=1e-9, atol=1e-9)
            added = features[row, place] @ weights["markov_head.markov_w2.weight"][:500].T
            logits = target.logits(hidden[row, place]) + added
            torch.testing.assert_close(logits[:count], block.logits[:count, :500], rtol=1e-9, atol=1e-9)


def test_loss_and_gradients_of_a_padded_batch_are_those_of_the_papers_formula(
    target: Target, weights: dict[str, torch.Tensor], completions: list[Completion]
) -> None:
    anchors = [sample_anchors(completion, 3, n) for n, completion in enumerate(completions)]
    assert [len(a) for a in anchors] == [3, 1, 3]
    one, other = trainable(weights), trainable(weights)
    blocks = blocks_of(completions, anchors)
    scored = forward(BlockDraft(SHAPE, one), target, blocks)
    found, found_gradients = batched_loss(target, one, [scored], blocks.weights.sum())
    expected = reference_loss(target, other, completions, anchors)
    assert abs(float(found - expected.detach())) < 1e-10 and 0.5 < float(expected.detach()) < 10
    expected_gradients = dict(zip(other, torch.autograd.grad(expected, list(other.values())), strict=True))
    assert largest_difference(found_gradients, expected_gradients) < 1e-8


def test_a_block_sees_nothing_from_its_anchor_on_but_the_anchor(
    target: Target, weights: dict[str, torch.Tensor], completions: list[Completion]
) -> None:
    whole = completions[2]
    anchor = len(whole.prompt) + 10
    draft = BlockDraft(SHAPE, weights)

    def changed(first: int) -> tuple[Blocks, torch.Tensor, torch.Tensor]:
        """The rows when the completion's tokens from `first` on are others."""
        cut = first - len(whole.prompt)
        tokens = whole.tokens[:cut] + tuple((t + 7) % 500 for t in whole.tokens[cut:])
        blocks = blocks_of([Completion(whole.prompt, tokens)], [[anchor]])
        scored = forward(draft, target, blocks)
        return blocks, scored.hidden, scored.features

    blocks, hidden, features = changed(len(whole.prompt) + len(whole.tokens))
    for k in range(SHAPE.block_size):
        # Others from anchor + 1 + k on: the backbone's rows stay, and of the RNN's those up to row k, which
        # follow tokens up to anchor + k; what is to be predicted is another token.
        others, their_hidden, their_features = changed(anchor + 1 + k)
        assert torch.equal(others.inputs, blocks.inputs)
        # Not bit for bit: other tokens go to other experts, and the target's products have other shapes.
        torch.testing.assert_close(their_hidden, hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(their_features[: k + 1], features[: k + 1], rtol=1e-5, atol=1e-5)
        assert k == SHAPE.block_size - 1 or (their_features[k + 1] - features[k + 1]).abs().max() > 1e-2
        assert others.labels[0, 0, k] != blocks.labels[0, 0, k]
    # The anchor itself and every token before it are seen.
    for first in (anchor, anchor - 1):
        assert (changed(first)[1] - hidden).abs().max() > 1e-2


def test_what_the_target_computes_from_the_anchor_on_is_not_read(
    weights: dict[str, torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(1, 20, 256, generator=generator).double()
    embedded = torch.randn(1, 2, 7, 128, generator=generator).double()
    anchors, previous = torch.tensor([[6, 13]]), torch.arange(14).view(1, 2, 7)

    def hidden(replaced: int) -> torch.Tensor:
        others = outputs.clone()
        others[:, replaced:] = 1e3
        return BlockDraft(SHAPE, weights).rows(others, embedded, anchors, previous).hidden

    assert torch.equal(hidden(13), hidden(20))
    assert torch.equal(hidden(6)[:, 0], hidden(20)[:, 0])
    assert (hidden(12)[:, 1] - hidden(20)[:, 1]).abs().max() > 1e-2


def test_the_draft_sees_the_running_block_sums_and_the_head_the_final_mixture(small: Target) -> None:
    tokens = torch.randint(1, 500, (2, 20), generator=torch.Generator().manual_seed(9))
    states = small.states(tokens)
    model = small.model.model
    first, second = states.outputs.chunk(2, dim=-1)
    recorded = small.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    assert torch.equal(first, recorded.hidden_states[3])
    # Layers 0-2 and 3-5 are blocks: the embedding and the sum at the end of the first are closed, the second runs.
    closed = torch.stack([small.embed(tokens), first], dim=-2)
    with torch.no_grad():
        final = model.norm(model.final_input(closed, second)[0])
    torch.testing.assert_close(final, states.final, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(small.logits(states.final), recorded.logits, rtol=0, atol=0)


def test_padding_does_not_reach_the_targets_states(small: Target, completions: list[Completion]) -> None:
    blocks = blocks_of(completions, all_anchors(completions))
    together = small.states(blocks.tokens)
    for row, completion in enumerate(completions):
        ids = completion.prompt + completion.tokens
        alone = small.states(torch.tensor([ids]))
        for batched, single in zip(together, alone, strict=True):
            torch.testing.assert_close(batched[row, : len(ids)], single[0], rtol=1e-4, atol=1e-4)


def test_labels_end_with_the_completion_and_weights_decay(completions: list[Completion]) -> None:
    blocks = blocks_of(completions[1:2] + completions[:1], [[3], [18, 19]])
    ids = completions[0].prompt + completions[0].tokens
    assert (blocks.weights > 0).sum(-1).tolist() == [[1, 0], [2, 1]]
    assert blocks.labels[1, 0, :2].tolist() == list(ids[19:21]) and len(ids) == 21
    assert blocks.previous[1, 0, :2].tolist() == list(ids[18:20])
    assert blocks.inputs[1, 0].tolist() == [ids[18]] + [SHAPE.mask_token_id] * 6
    torch.testing.assert_close(decay(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), rtol=0, atol=1e-4)


def test_anchors_follow_from_the_seed_and_have_a_successor(completions: list[Completion]) -> None:
    prompt, tokens = completions[2]
    found = sample_anchors(completions[2], 5, "0/3/1")
    assert found == sample_anchors(completions[2], 5, "0/3/1") == sorted(set(found)) and len(found) == 5
    assert found != sample_anchors(completions[2], 5, "0/4/1")
    seen = {a for epoch in range(200) for a in sample_anchors(completions[2], 5, epoch)}
    assert seen == set(range(len(prompt), len(prompt) + len(tokens) - 1))
    assert sample_anchors(Completion((1, 2), (3,)), 5, 0) == []


def train(target: Target, completions: list[Completion], share: Share | None = None, **changes: object) -> Training:
    plan = Plan(**({"num_epochs": 8, "batch_size": 2, "learning_rate": 1e-2, "max_anchors": 4} | changes))  # type: ignore[arg-type]
    start = new_weights(tiny_config(), torch.ones(SHAPE.hidden_size), seed=1)
    return Training(Masters(BlockDraft(SHAPE, start), target.device), target, completions, plan, share or Share())


def test_a_target_in_bfloat16_gives_nearly_the_same_loss(
    checkpoint: Path, small: Target, completions: list[Completion]
) -> None:
    """What a GPU runs: the target's weights and the draft's products in bfloat16, everything else in float32."""
    narrow = Target.load(Checkpoint.open(checkpoint), SHAPE.target_layers, torch.device("cpu"), torch.bfloat16)
    results = []
    for target in (small, narrow):
        training = train(target, completions, batch_size=3, max_anchors=512)
        results.append(training.advance())
        assert all(value.dtype == torch.float32 for value in training.draft.weights.values())
    wide, rounded = results
    assert rounded.loss != wide.loss
    assert rounded.loss == pytest.approx(wide.loss, rel=0.03)
    assert rounded.grad_norm == pytest.approx(wide.grad_norm, rel=0.2)


def test_training_lowers_the_loss_and_leaves_the_target_alone(small: Target, completions: list[Completion]) -> None:
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    results: list[StepResult] = []
    training = train(small, completions, batch_size=3, max_anchors=512, num_epochs=30)
    training.run(lambda step, num_steps, result: results.append(result))
    assert len(results) == training.num_steps == 30
    first, last = (sum(r.loss for r in part) / 6 for part in (results[:6], results[-6:]))
    assert last < 0.85 * first
    assert all(end > start + 0.02 for start, end in zip(results[0].acceptance, results[-1].acceptance, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in small.model.state_dict().items())
    assert not any(p.requires_grad for p in small.model.parameters())


def test_a_continued_training_is_bit_equal_to_one_never_stopped(
    small: Target, completions: list[Completion], tmp_path: Path
) -> None:
    whole = train(small, completions)
    whole.run()
    stopped = train(small, completions)
    while stopped.step < 5:
        stopped.advance()
    save_state(tmp_path / "state.pt", stopped.state())
    continued = train(small, completions)
    continued.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    continued.run()
    assert continued.step == whole.step == 12
    assert all(torch.equal(value, continued.draft.weights[name]) for name, value in whole.draft.weights.items())
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_micro_batches_do_not_change_a_step(small: Target, completions: list[Completion]) -> None:
    results = []
    for micro_batch_size in (1, 3):
        training = train(small, completions, batch_size=3, micro_batch_size=micro_batch_size, max_grad_norm=1e9)
        results.append((training.advance(), training.draft.weights))
    (first, one), (second, other) = results
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert first.acceptance == pytest.approx(second.acceptance, rel=1e-4)
    assert one.keys() == other.keys()


def test_the_rate_warms_up_and_ends_near_zero() -> None:
    plan = Plan(learning_rate=1.0)
    rates = [plan.rate(step, 100) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 1e-3
    assert rates[52] == pytest.approx(0.5, abs=1e-9)


def test_completions_without_a_pair_of_tokens_are_refused(small: Target) -> None:
    with pytest.raises(ValueError, match="completions of two tokens or more; got none"):
        train(small, [Completion((1, 2), (3,))])
