"""Tokens per verification step: the sum over positions against enumeration, and against speculative sampling itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.reference import ReferenceDraft
from trainer.draft import losses, teacher_forcing
from trainer.draft.completions import Completion, Sampling, load_completions
from trainer.draft.measure import expected_visits, measure
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target

BASE = "builtin:tiny-arithmetic"
STOP = 263


def enumerated_steps(kept: torch.Tensor, anchor: int = 0) -> float:
    """Expected steps from an anchor on, by trying every outcome of every draw."""
    left = len(kept) - anchor
    if left <= 0:
        return 0.0
    num_rows = min(kept.shape[1], left)
    total = 0.0
    for outcome in itertools.product((False, True), repeat=num_rows):
        chances = [float(kept[anchor, k]) if hit else 1 - float(kept[anchor, k]) for k, hit in enumerate(outcome)]
        accepted = next((k for k, hit in enumerate(outcome) if not hit), num_rows)
        total += float(torch.tensor(chances).double().prod()) * enumerated_steps(kept, anchor + min(accepted + 1, left))
    return 1 + total


@pytest.mark.parametrize(("tokens", "rows"), [(1, 3), (4, 2), (5, 3), (3, 7)])
def test_expected_visits_are_those_of_every_outcome(tokens: int, rows: int) -> None:
    kept = torch.rand(tokens, rows, generator=torch.Generator().manual_seed(tokens)).double()
    assert float(expected_visits(kept).sum()) == pytest.approx(enumerated_steps(kept), rel=1e-6)


def test_known_drafts_have_known_worth() -> None:
    # Nothing is accepted: a step per token. Everything is: 8 tokens a step, and what is left at the end.
    assert float(expected_visits(torch.zeros(20, 7).double()).sum()) == 20
    visits = expected_visits(torch.ones(20, 7).double())
    assert visits.nonzero().flatten().tolist() == [0, 8, 16]


class Decoder:
    """Speculative decoding as the paper writes it, one sequence, no cache: the reference draft and transformers."""

    def __init__(self, target: Target, reference: ReferenceDraft, seed: int) -> None:
        self.target, self.reference = target, reference
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, ids: list[int]) -> list[int]:
        """The tokens that one verification step adds."""
        before = self.target.states(torch.tensor([ids[:-1]])).outputs[0]
        drawn: list[int] = []

        def choose(logits: torch.Tensor) -> int:
            drawn.append(self._draw(logits.softmax(-1)))
            return drawn[-1]

        block = self.reference.block(self.target.embed, self.target_logits, before, ids[-1], choose)
        final = self.target.states(torch.tensor([ids + drawn])).final[0, len(ids) - 1 :]
        p = self.target_logits(final).softmax(-1)
        q = block.logits.softmax(-1)
        for k, token in enumerate(drawn):
            if float(torch.rand((), generator=self.generator)) * float(q[k, token]) >= float(p[k, token]):
                return [*drawn[:k], self._draw((p[k] - q[k]).clamp(min=0))]
        return [*drawn, self._draw(p[len(drawn)])]

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.target.logits(hidden)
        return torch.nn.functional.pad(logits, (0, 512 - logits.shape[-1]), value=float("-inf"))

    def _draw(self, weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.generator))


@torch.no_grad()
def simulate(decoder: Decoder, completions: list[Completion]) -> tuple[list[int], list[int]]:
    """Steps and tokens of each completion that speculative decoding makes, from the prompts and first tokens given."""
    steps, tokens = [], []
    for prompt, first in completions:
        ids = [*prompt, first[0]]
        count = 0
        while ids[-1] != STOP and len(ids) < len(prompt) + 48:
            new = decoder.step(ids)
            ids += new[: new.index(STOP) + 1] if STOP in new else new
            count += 1
        steps.append(count)
        tokens.append(len(ids) - len(prompt) - 1)
    return steps, tokens


def load(num_completions: int) -> tuple[Target, DraftCheckpoint, list[Completion]]:
    checkpoint = Checkpoint.open(BASE)
    opened = DraftCheckpoint.open(BASE, checkpoint.config)
    target = Target.load(checkpoint, opened.shape.target_layers, torch.device("cpu"), torch.float32)
    sampling = Sampling(num_completions=num_completions)
    return target, opened, load_completions("arithmetic/train", target, checkpoint.path, sampling, seed=5)


def compare(num_measured: int, num_simulated: int) -> tuple[float, float, float, int]:
    """Computed and simulated tokens per step of the shipped draft, the latter's standard error, and its steps."""
    target, opened, completions = load(num_measured)
    weights = {name: value.float() for name, value in opened.tensors()}
    worth = measure(BlockDraft(opened.shape, weights), target, completions, num_tokens=7)
    decoder = Decoder(target, ReferenceDraft(opened.shape, weights), seed=6)
    steps, tokens = (torch.tensor(x).double() for x in simulate(decoder, completions[:num_simulated]))
    ratio = float(tokens.sum() / steps.sum())
    # Of a ratio of sums over independent completions.
    error = float((tokens - ratio * steps).square().sum().sqrt() / steps.sum())
    return worth.tokens_per_step, ratio, error, int(steps.sum())


def test_the_shipped_draft_is_worth_what_a_simulation_says() -> None:
    computed, simulated, error, steps = compare(num_measured=64, num_simulated=16)
    assert steps > 50 and error < 0.4
    assert abs(computed - simulated) < 4 * error
    assert computed > 3.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_pieces_of_rows_and_parts_of_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    target, opened, completions = load(8)
    draft = BlockDraft(opened.shape, {name: value.float() for name, value in opened.tensors()})
    rows: list[int] = []
    head = target.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(target, "logits", counted)
    whole = measure(draft, target, completions, num_tokens=7, temperature=temperature)
    num_rows = sum(rows)
    assert len(rows) == 2  # of draft and target
    rows.clear()
    monkeypatch.setattr(losses, "MAX_LOGITS", 3 * 512)
    longest = max(len(c.prompt) + len(c.tokens) for c in completions)
    monkeypatch.setattr(teacher_forcing, "MAX_SCORES", 10 * opened.shape.num_heads * 7 * (longest + 7))
    cut = measure(draft, target, completions, num_tokens=7, temperature=temperature)
    assert sum(rows) == num_rows and max(rows) == 3
    assert cut.tokens_per_step == pytest.approx(whole.tokens_per_step, rel=1e-6)
    assert cut.acceptance == pytest.approx(whole.acceptance, rel=1e-5)
    assert cut.confidence_error == pytest.approx(whole.confidence_error, rel=1e-4)
    assert (cut.num_steps, cut.num_completions) == (pytest.approx(whole.num_steps, rel=1e-6), 8)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_shipped_draft_emits_three_tokens_a_step_over_2000_steps(capsys: pytest.CaptureFixture[str]) -> None:
    computed, simulated, error, steps = compare(num_measured=512, num_simulated=400)
    with capsys.disabled():
        print(f"\ncomputed {computed:.3f}, simulated {simulated:.3f} +- {error:.3f} over {steps} steps")
    assert steps >= 2000
    assert abs(computed - simulated) < 4 * error
    assert simulated > 3.0


def test_the_shipped_draft_says_what_it_is() -> None:
    """Tensors and manifest belong together, and to this base."""
    from inkling_rl.checkpoint.reader import read_json
    from inkling_rl.draft.manifest import MANIFEST_FILE
    from lora.base import fingerprint
    from trainer.draft.files import manifest

    checkpoint = Checkpoint.open(BASE)
    opened = DraftCheckpoint.open(BASE, checkpoint.config)
    stored = read_json(Path(checkpoint.path) / MANIFEST_FILE)
    expected = manifest(dict(opened.tensors()), checkpoint, version=1, parent_version=None, facts={})
    assert {key: stored[key] for key in expected} == expected
    assert stored["base_model"] == fingerprint(checkpoint)
    assert stored["worth"]["tokens_per_step"] > 3.0
