"""The rejection sampler on torch: against a scalar reading of its rule, and its output against the target's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.plugin import rejection
from tests.rollout.drafting import chi_square

VOCABULARY = 12
BLOCK = 3


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    rejection.install()
    assert rejection.is_installed()
    yield


def distributions(seed: int, sharpness: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(BLOCK + 1, VOCABULARY, generator=generator)).softmax(-1)


def draw(probs: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """[number, positions]."""
    return torch.multinomial(probs, number, replacement=True, generator=generator).T.contiguous()


def sample(target: torch.Tensor, draft: torch.Tensor | None, drafted: torch.Tensor, seed: int) -> torch.Tensor:
    """vLLM's `rejection_sample` for requests that all have the same distributions: [requests, BLOCK + 1]."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    number = len(drafted)
    torch.manual_seed(seed)
    metadata: Any = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(number), generators={}, top_k=None, top_p=None
    )
    bonus = draw(target[BLOCK:], number, torch.Generator().manual_seed(seed + 1))
    return rejection_sample(
        drafted.flatten(),
        [BLOCK] * number,
        BLOCK,
        torch.arange(1, number + 1, dtype=torch.int32) * BLOCK,
        None if draft is None else draft[:BLOCK].repeat(number, 1),
        target[:BLOCK].log().repeat(number, 1),
        bonus.int(),
        metadata,
    )


def p_values(target: torch.Tensor, output: torch.Tensor) -> list[float]:
    """Of each position, among the requests that got there, against the target's distribution."""
    found = []
    for position in range(BLOCK + 1):
        tokens = output[:, position]
        tokens = tokens[tokens >= 0]
        assert len(tokens) > 500
        found.append(chi_square(torch.bincount(tokens, minlength=VOCABULARY), target[position]))
    return found


@pytest.mark.parametrize("kind", ["drawn from the draft", "always the same", "drawn, but without probabilities"])
def test_output_is_distributed_as_the_target(kind: str) -> None:
    target, draft = distributions(1, 1.5), distributions(2, 0.8)
    number, generator = 100_000, torch.Generator().manual_seed(3)
    drafted = {
        "drawn from the draft": draw(draft[:BLOCK], number, generator),
        "always the same": target[:BLOCK].argmax(-1).expand(number, -1),
        "drawn, but without probabilities": draw(target[:BLOCK], number, generator),
    }[kind]
    output = sample(target, draft if kind == "drawn from the draft" else None, drafted, seed=4)
    assert min(p_values(target, output)) > 0.01 / (3 * (BLOCK + 1))


def test_a_sampler_without_the_residual_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is one that accepts everything, and one that keeps what follows a rejection."""
    from vllm.v1.sample import rejection_sampler

    target, draft = distributions(1, 0.8), distributions(2, 0.8)
    drafted = draw(draft[:BLOCK], 100_000, torch.Generator().manual_seed(3))

    def from_target(output: torch.Tensor, cumulative: Any, ids: Any, draft_probs: Any, *rest: Any, **more: Any) -> None:
        rejection.sample_recovered_tokens(output, cumulative, ids, torch.zeros_like(draft_probs), *rest, **more)

    monkeypatch.setattr(rejection_sampler, "_sample_recovered_tokens", from_target)
    assert max(p_values(target, sample(target, draft, drafted, seed=4))[:BLOCK]) < 1e-6
    monkeypatch.undo()
    generous = draft.clone()
    generous[:, :] = 1e-6
    assert min(p_values(target, sample(target, generous, drafted, seed=4))) < 1e-6


def scalar(
    counts: list[int],
    drafted: list[int],
    q: torch.Tensor,
    p: torch.Tensor,
    bonus: list[int],
    recovered: list[int],
    uniform: torch.Tensor,
    greedy: torch.Tensor,
) -> list[list[int]]:
    """The rule, request by request and token by token."""
    rows, first = [], 0
    for index, count in enumerate(counts):
        row: list[int] = []
        for place in range(first, first + count):
            token = drafted[place]
            if greedy[index]:
                accepted, other = token == int(p[place].argmax()), int(p[place].argmax())
            else:
                accepted = token >= 0 and float(p[place, token]) > float(uniform[place]) * float(q[place, token])
                other = recovered[place]
            row.append(token if accepted else other)
            if not accepted:
                break
        else:
            row.append(bonus[index])
        rows.append(row + [-1] * (BLOCK + 1 - len(row)))
        first += count
    return rows


def test_ragged_batches_of_greedy_and_random_requests_follow_the_rule() -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(200):
        counts = torch.randint(0, BLOCK + 1, (6,), generator=generator).tolist()
        rows = sum(counts)
        p, q = (torch.randn(rows, VOCABULARY, generator=generator).softmax(-1) for _ in range(2))
        drafted = torch.randint(-1, VOCABULARY, (rows,), generator=generator)
        greedy = torch.rand(6, generator=generator) < 0.4
        likely = torch.rand(rows, generator=generator) < 0.6
        drafted = torch.where(likely, p.argmax(-1) if rows else drafted, drafted)
        recovered, bonus = (torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (rows, 6))
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
        output = torch.full((6, BLOCK + 1), -1, dtype=torch.int32)
        cumulative = torch.tensor(counts).cumsum(0).int()
        rejection.rejection_greedy_sample(
            output, cumulative, drafted, p.argmax(-1), bonus[:, None], greedy, BLOCK, None, None
        )
        rejection.rejection_random_sample(
            output, cumulative, drafted, q, p, bonus[:, None], recovered, uniform, greedy, BLOCK, None
        )
        expected = scalar(counts, drafted.tolist(), q, p, bonus.tolist(), recovered.tolist(), uniform, greedy)
        assert output.tolist() == expected


def test_a_token_that_the_target_never_gives_never_comes() -> None:
    """Where nothing is left of the target above the draft, too."""
    target = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    uniform = torch.zeros(1, dtype=torch.float64)
    output, cumulative = torch.full((1, 2), -1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    recovered = torch.zeros(1, dtype=torch.int64)
    noise = torch.tensor([[9.0, 1.0, 2.0, 9.0]])
    rejection.sample_recovered_tokens(recovered, cumulative, torch.tensor([3]), target, target, noise, max_spec_len=1)
    assert recovered.tolist() == [2]
    draft = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    never = torch.zeros(1, dtype=torch.bool)
    rejection.rejection_random_sample(
        output, cumulative, torch.tensor([3]), draft, target, torch.tensor([[1]]), recovered, uniform, never, 1, None
    )
    assert output.tolist() == [[2, -1]]


def test_temperatures_are_spread_over_rows_without_rounding() -> None:
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    found = expand_batch_to_tokens(torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5]), 5, 0, 1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5]))
    found = expand_batch_to_tokens(torch.tensor([0.7, 0.0]), torch.tensor([1, 3]), 3, 0, 1)
    assert torch.equal(found, torch.tensor([0.7, 1.0, 1.0]))
