"""The publication probe: fixed sequences, what engine and trainer think of them, and how far their changes may part.

It catches what no list of served adapters shows: an adapter that binds nothing, a stale scale, a module left out. Pure
arithmetic on lists; scoring is `trainer.publish`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# float32 on both sides already differs by this much; a threshold below it would measure rounding.
LEAST_MISMATCH = 1e-6


@dataclass
class Probe:
    """Fixed sequences and what engine and trainer last thought of their completions."""

    sequences: list[list[int]]
    """Prompt and completion together, as token ids."""

    prompt_lengths: list[int]
    mismatch: float = 0.0
    """Mean |engine - trainer| log-probability of step 0: the larger one of the probe's and of the first rollouts'."""

    engine: list[float] = field(default_factory=list)
    trainer: list[float] = field(default_factory=list)

    def completions(self, scored: Sequence[Sequence[float]]) -> list[float]:
        """The log-probabilities of completion tokens, all sequences in one list. `scored` lacks each first token."""
        return [
            value for values, length in zip(scored, self.prompt_lengths, strict=True) for value in values[length - 1 :]
        ]


@dataclass(frozen=True)
class ProbeResult:
    """Mean absolute changes of log-probability from the version before, over the probe's tokens."""

    trainer_change: float
    difference: float
    """Mean |engine change - trainer change|."""

    limit: float
    """Difference above which the publication fails."""


def compare_changes(probe: Probe, engine: Sequence[float], trainer: Sequence[float]) -> ProbeResult:
    """How differently engine and trainer moved since the values that the probe holds."""
    engine_changes = [new - old for new, old in zip(engine, probe.engine, strict=True)]
    trainer_changes = [new - old for new, old in zip(trainer, probe.trainer, strict=True)]
    change = mean_abs(trainer_changes)
    difference = mean_abs([e - t for e, t in zip(engine_changes, trainer_changes, strict=True)])
    return ProbeResult(change, difference, max(0.25 * change, 2.0 * max(probe.mismatch, LEAST_MISMATCH)))


def mean_abs(values: Sequence[float]) -> float:
    """Mean absolute value; 0 of nothing."""
    return sum(abs(value) for value in values) / max(1, len(values))
