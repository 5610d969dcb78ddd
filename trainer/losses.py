"""What the trainer measures and minimises, as pure functions of tensors that return metrics.

The policy loss itself is SkyRL's (`PolicyLossRegistry`), with its token-level truncated importance-sampling correction;
what is here is the rest of the objective and the measure of how far rollout and trainer are apart.

Letters: N sequences, A response positions.
"""

from __future__ import annotations

import torch


def mismatch(
    trainer_logprobs_NA: torch.Tensor, rollout_logprobs_NA: torch.Tensor, mask_NA: torch.Tensor
) -> dict[str, float]:
    """How far the rollout's log-probabilities are from the trainer's, over sampled tokens.

    `mismatch/kl` is Schulman's k3 estimator of KL(rollout || trainer), exp(d) - 1 - d with d = trainer - rollout: never
    negative and of low variance. Empty where nothing was sampled.

    Args:
        trainer_logprobs_NA, rollout_logprobs_NA: [N, A], natural logarithms at the sampling temperature.
        mask_NA: [N, A], above 0 on tokens that the engine sampled.
    """
    difference = (trainer_logprobs_NA - rollout_logprobs_NA)[mask_NA > 0].double()
    if difference.numel() == 0:
        return {}
    # Where the two part completely (-1e4 against 0) exp overflows; 20 is already a KL that stops the run.
    k3 = difference.clamp(-20.0, 20.0).expm1() - difference.clamp(-20.0, 20.0)
    return {
        "mismatch/kl": float(k3.mean()),
        "mismatch/abs_logprob_diff": float(difference.abs().mean()),
        "mismatch/max_logprob_diff": float(difference.abs().max()),
    }


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over positions where the mask is above 0; 0 where it is empty."""
    if mask is None:
        return values.mean()
    weights = (mask > 0).to(values.dtype)
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def rollout_difference(
    logprobs_NA: torch.Tensor, rollout_logprobs_NA: torch.Tensor | None, mask_NA: torch.Tensor | None
) -> dict[str, float]:
    """Moments and extremes of |trainer - rollout| of one micro-batch, under the names that SkyRL reduces.

    Moments, not the deviation: they average correctly over micro-batches and ranks.
    """
    if rollout_logprobs_NA is None:
        return {}
    name = "minibatch_rollout_logprobs_abs_diff"
    difference = (logprobs_NA.detach() - rollout_logprobs_NA).abs()
    masked = difference if mask_NA is None else difference * (mask_NA > 0)
    return {
        f"{name}_mean": float(masked_mean(difference, mask_NA)),
        f"{name}_sq_mean": float(masked_mean(difference.square(), mask_NA)),
        f"{name}_max": float(masked.max()),
        f"{name}_min": float(masked.min()),
    }
