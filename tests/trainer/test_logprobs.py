"""Log-probabilities do not depend on padding, on the other rows of a batch, or on chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainer.logprobs as logprobs_module
from tests.trainer.conftest import Recipes
from trainer.logprobs import score_actions, to_left_edge
from trainer.model import load_base

LENGTHS = ((5, 3), (40, 20), (17, 9), (1, 24), (60, 1))  # prompt and response; the window is 8, the relative extent 16


@pytest.fixture(scope="module")
def model(recipes: Recipes) -> torch.nn.Module:
    return load_base(recipes(), torch.device("cpu")).eval()


def batch(seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 250, (p + r,), generator=generator) for p, r in LENGTHS]
    width = max(len(row) for row in rows)
    tokens, mask = torch.full((len(rows), width), 256), torch.zeros(len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        tokens[n, width - len(row) :] = row
        mask[n, width - len(row) :] = 1
    return rows, tokens, mask


def alone(model: torch.nn.Module, row: torch.Tensor, num_actions: int, temperature: float) -> torch.Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0].float() / temperature
    scored = torch.log_softmax(logits, -1)[:-1].gather(-1, row[1:, None])[:, 0]
    return scored[-num_actions:]


def test_rows_move_to_the_left_edge() -> None:
    moved, lengths = to_left_edge(torch.tensor([[0, 0, 7, 8], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1] * 4]))
    assert lengths.tolist() == [2, 4]
    assert moved.tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_scores_as_each_row_alone(model: torch.nn.Module, temperature: float) -> None:
    rows, tokens, mask = batch()
    num_actions = max(r for _, r in LENGTHS)
    with torch.no_grad():
        scores = score_actions(model, tokens, mask, num_actions, temperature)
        for n, (row, (_, response)) in enumerate(zip(rows, LENGTHS, strict=True)):
            expected = alone(model, row, response, temperature)
            assert torch.allclose(scores.logprobs[n, -response:], expected, atol=1e-5, rtol=0)
    # Before the first token of a row there is nothing to score.
    assert scores.logprobs[0, : num_actions - 7].abs().max() == 0
    assert scores.entropy[1, -20:].min() > 0 and scores.entropy.max() <= torch.log(torch.tensor(500.0))


def test_padding_ids_change_nothing(model: torch.nn.Module) -> None:
    _, tokens, mask = batch()
    with torch.no_grad():
        first = score_actions(model, tokens, mask, 24, 1.0).logprobs
        second = score_actions(model, torch.where(mask > 0, tokens, 3), mask, 24, 1.0).logprobs
    assert torch.equal(first, second)


def test_only_the_real_vocabulary_has_probability(model: torch.nn.Module, checkpoint: Path) -> None:
    tokens = torch.arange(10, 20)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.shape[-1] == 500


def test_chunks_give_the_same_values_and_gradients(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokens, mask = batch()
    weight = model.get_parameter("lm_head.weight")
    weight.requires_grad_(True)
    results = []
    for limit in (logprobs_module.MAX_LOGITS, 5 * 500 * 7):
        monkeypatch.setattr(logprobs_module, "MAX_LOGITS", limit)
        weight.grad = None
        scores = score_actions(model, tokens, mask, 24, 1.0)
        scores.logprobs.sum().backward()
        assert weight.grad is not None
        results.append((scores.logprobs.detach(), scores.entropy, weight.grad.clone()))
    weight.requires_grad_(False)
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


def test_one_row_is_sliced_and_not_gathered(model: torch.nn.Module) -> None:
    rows, _, _ = batch()
    row = rows[1]
    with torch.no_grad():
        scores = score_actions(model, row[None], torch.ones_like(row)[None], 20, 1.0)
        assert torch.allclose(scores.logprobs[0], alone(model, row, 20, 1.0), atol=1e-5, rtol=0)
