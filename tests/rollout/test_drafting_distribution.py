"""Sampled output of a real engine with a draft against the exact distribution, by chi-square.

Eight or ten tokens are allowed, so that the distribution of the fourth token is a sum over 512 or 1,000 prefixes of the
transformers model. The random draft is often wrong, and what it gets wrong must be made good by the residual; the
shipped one is often right, and what it gets right must not come too often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.reader import resolve
from rollout.plugin import rejection
from tests.benchmarks.drafting_speed import prompts
from tests.rollout.drafting import chi_square, speculative
from tests.rollout.engines import completion_of, engine, oracle, random_prompts

ALLOWED = tuple(range(40, 48))
DIGITS = tuple(range(48, 58))
"""The shipped model's tokens below 256 are bytes."""

TESTED = (2, 4)
"""Which generated tokens are looked at."""

NUMBERS = (5_000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3000)]))
"""Of completions drawn."""

LEVEL = 0.01
PREFIXES = random_prompts((12, 40), seed=20)


def marginals(model: Any, prefix: list[int], temperature: float, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Exact distribution over the allowed tokens of the generated tokens 1 to 4."""
    allowed = torch.tensor(tokens)
    paths, weights = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(max(TESTED)):
        rows = torch.cat([torch.tensor(prefix).expand(len(paths), -1), paths], dim=1)
        with torch.no_grad():
            logits = model(rows, use_cache=False).logits[:, -1, allowed]
        joint = weights[:, None] * (logits.double() / temperature).softmax(-1)
        found.append(joint.sum(0))
        paths = torch.cat([paths.repeat_interleave(len(tokens), 0), allowed.repeat(len(paths))[:, None]], dim=1)
        weights = joint.flatten()
    return found


def counts(llm: Any, prefix: list[int], temperature: float, number: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    """How often each allowed token came as the generated tokens 1 to 4."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=6, temperature=temperature, ignore_eos=True, detokenize=False, allowed_token_ids=list(tokens)
    )
    found = torch.zeros(max(TESTED), len(tokens), dtype=torch.int64)
    for first in range(0, number, 5000):
        inputs = [{"prompt_token_ids": prefix}] * min(5000, number - first)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        drawn = torch.tensor([completion_of(output)[: max(TESTED)] for output in outputs]).T - tokens[0]
        found += torch.stack([torch.bincount(row, minlength=len(tokens)) for row in drawn])
    return list(found)


class Kinds:
    """How the tokens of drafted requests came about."""

    def __init__(self) -> None:
        self.accepted = self.recovered = self.bonus = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Kinds:
        write = rejection.Rows.write

        def spy(rows: Any, output: torch.Tensor, accepted: torch.Tensor, *arguments: Any) -> None:
            write(rows, output, accepted, *arguments)
            emitted = (output >= 0).sum(1)
            whole = emitted == rows.counts + 1
            self.bonus += int(whole.sum())
            self.recovered += int((~whole).sum())
            self.accepted += int((emitted - 1).sum())

        monkeypatch.setattr(rejection.Rows, "write", spy)
        return self


def without_residual(
    output: torch.Tensor, cumulative: Any, ids: Any, draft_probs: Any, *rest: Any, **more: Any
) -> None:
    """A rejected token is replaced by a draw from the target itself."""
    rejection.sample_recovered_tokens(output, cumulative, ids, torch.zeros_like(draft_probs), *rest, **more)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[Any]:
    """Blocks of two: a bonus token is common."""
    arguments = {"max_model_len": 64, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    with engine(tiny_checkpoint, **arguments, speculative_config=speculative(tiny_checkpoint, num_tokens=2)) as llm:
        yield llm


def p_values(
    llm: Any, model: Any, prefix: list[int], temperature: float, number: int, tokens: Sequence[int] = ALLOWED
) -> list[float]:
    exact = marginals(model, prefix, temperature, tokens)
    found = counts(llm, prefix, temperature, number, tokens)
    return [chi_square(found[place - 1], exact[place - 1]) for place in TESTED]


def test_tokens_are_distributed_as_without_a_draft(llm: Any, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 4000
    kinds = Kinds().watch(monkeypatch)
    assert min(p_values(llm, tiny_oracle, PREFIXES[0], 1.0, number)) > LEVEL / len(TESTED)
    assert min(kinds.accepted, kinds.recovered, kinds.bonus) > number // 10


def test_a_sampler_that_skips_the_residual_is_found_out(
    llm: Any, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "_sample_recovered_tokens", without_residual)
    assert min(p_values(llm, tiny_oracle, PREFIXES[0], 1.0, 4000)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prefix", range(len(PREFIXES)))
def test_many_draws(
    llm: Any, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch, prefix: int, temperature: float, number: int
) -> None:
    num_tests = len(TESTED) * len(PREFIXES) * 2
    kinds = Kinds().watch(monkeypatch)
    assert min(p_values(llm, tiny_oracle, PREFIXES[prefix], temperature, number)) > LEVEL / num_tests
    assert min(kinds.accepted, kinds.recovered, kinds.bonus) > number // 10


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_many_draws_with_the_shipped_draft(temperature: float, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("builtin:tiny-arithmetic")
    [prefix] = prompts(str(path), 1)
    arguments = {"max_model_len": 64, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    with engine(path, **arguments, speculative_config=speculative(path)) as llm:
        kinds = Kinds().watch(monkeypatch)
        found = p_values(llm, oracle(path), prefix, temperature, number, DIGITS)
    assert min(found) > LEVEL / (2 * len(TESTED))
    assert min(kinds.accepted, kinds.recovered) > number // 10
