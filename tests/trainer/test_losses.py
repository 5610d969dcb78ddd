"""The mismatch between rollout and trainer on known values."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.losses import masked_mean, mismatch, rollout_difference


def test_mismatch_of_equal_log_probabilities_is_zero() -> None:
    values = torch.tensor([[-1.0, -2.0]])
    assert mismatch(values, values, torch.ones_like(values)) == {
        "mismatch/kl": 0.0,
        "mismatch/abs_logprob_diff": 0.0,
        "mismatch/max_logprob_diff": 0.0,
    }


def test_mismatch_counts_sampled_tokens_only() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -9.0]])
    rollout = torch.tensor([[-1.5, -2.0, 0.0]])
    values = mismatch(trainer, rollout, torch.tensor([[1.0, 1.0, 0.0]]))
    assert values["mismatch/abs_logprob_diff"] == pytest.approx(0.25)
    assert values["mismatch/max_logprob_diff"] == pytest.approx(0.5)
    # k3 with d = 0.5 and d = 0.
    assert values["mismatch/kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)


def test_mismatch_of_nothing_is_no_metric() -> None:
    assert mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == {}


def test_mismatch_estimates_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = (torch.log_softmax(torch.randn(50, generator=generator), -1) for _ in range(2))
    exact = float((rollout.exp() * (rollout - trainer)).sum())
    drawn = torch.multinomial(rollout.exp(), 200_000, replacement=True, generator=generator)
    values = mismatch(trainer[drawn][None], rollout[drawn][None], torch.ones(1, len(drawn)))
    assert values["mismatch/kl"] == pytest.approx(exact, rel=0.02)


def test_an_infinite_difference_stays_a_number() -> None:
    values = mismatch(torch.tensor([[-1e4]]), torch.tensor([[0.0]]), torch.ones(1, 1))
    assert math.isfinite(values["mismatch/kl"]) and values["mismatch/abs_logprob_diff"] == 1e4


def test_masked_mean_and_moments() -> None:
    values, mask = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 2.0]])
    assert float(masked_mean(values, mask)) == 3.0
    assert float(masked_mean(values, torch.zeros(1, 2))) == 0.0
    moments = rollout_difference(values, torch.zeros(1, 2), mask)
    name = "minibatch_rollout_logprobs_abs_diff"
    assert moments == {f"{name}_mean": 3.0, f"{name}_sq_mean": 9.0, f"{name}_max": 3.0, f"{name}_min": 0.0}
    assert rollout_difference(values, None, mask) == {}
