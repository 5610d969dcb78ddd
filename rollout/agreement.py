"""Counting how far two sets of log-probabilities are apart. Pure arithmetic on rows and tensors; no engine, no model.

Positions: row i of a sequence is the distribution of its token i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

NEAR_TIE = 1e-4  # log-probabilities this close may swap places between two correct float32 programs

Row = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """|difference| of log-probabilities, over `num_values` of them. NaN where a value was not finite."""

    num_values: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `Differences` has counted."""

    prompt: Spread
    """The real token at every prompt position but the first."""

    generated: Spread
    """The real token at every generated position."""

    likeliest: Spread
    """All tokens of all rows, unlikely ones too, whose log-probabilities are the noisiest."""

    argmax_agreement: float
    """Share of positions whose likeliest token is the same."""

    argmax_disagreements: int
    near_ties: int
    """Disagreements where the reference itself has the two within 1e-4."""

    greedy_agreement: float
    """Share of generated tokens that the reference would have chosen after the same tokens."""


@dataclass
class Differences:
    """Differences between rows of an engine and a reference, sequence by sequence."""

    prompt: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    likeliest: list[float] = field(default_factory=list)
    disagreements: int = 0
    near_ties: int = 0
    greedy_hits: int = 0

    def add(self, rows: Sequence[Row], expected_TV: torch.Tensor, token_ids: Sequence[int], num_prompt: int) -> None:
        """Count one sequence.

        Args:
            rows: token -> log-probability for positions 1..T-1; each holds the real token.
            expected_TV: float32 [num_tokens, vocabulary] of the reference; its last row is not used.
            token_ids: the sequence; the first `num_prompt` are its prompt.
        """
        assert len(rows) == len(token_ids) - 1 <= len(expected_TV)
        likeliest_T = expected_TV.argmax(-1).tolist()
        for position, row in enumerate(rows):
            is_prompt = position + 1 < num_prompt
            reference = expected_TV[position]
            differences = {token: abs(value - float(reference[token])) for token, value in row.items()}
            (self.prompt if is_prompt else self.generated).append(differences[token_ids[position + 1]])
            self.likeliest += differences.values()
            ours, theirs = max(row, key=lambda token: row[token]), likeliest_T[position]
            if ours != theirs:
                self.disagreements += 1
                self.near_ties += bool(reference[theirs] - reference[ours] < NEAR_TIE)
            self.greedy_hits += not is_prompt and token_ids[position + 1] == theirs

    def report(self) -> Agreement:
        num_positions = len(self.prompt) + len(self.generated)
        return Agreement(
            prompt=spread(self.prompt),
            generated=spread(self.generated),
            likeliest=spread(self.likeliest),
            argmax_agreement=1 - self.disagreements / max(1, num_positions),
            argmax_disagreements=self.disagreements,
            near_ties=self.near_ties,
            greedy_agreement=self.greedy_hits / max(1, len(self.generated)),
        )


@dataclass(frozen=True, slots=True)
class Changed:
    """Mean |change| that an adapter makes to the log-probability of the real tokens, and how far the two sides part."""

    num_positions: int
    engine_mean: float
    oracle_mean: float
    mean_difference: float
    max_difference: float


@dataclass
class Change:
    """Changes that an adapter makes, in an engine and in a reference, at the same tokens."""

    engine: list[float] = field(default_factory=list)
    oracle: list[float] = field(default_factory=list)

    def add(
        self,
        adapted_rows: Sequence[Row],
        base_rows: Sequence[Row],
        adapted_TV: torch.Tensor,
        base_TV: torch.Tensor,
        token_ids: Sequence[int],
    ) -> None:
        """Count one sequence; arguments as in `Differences.add`, with the adapter and without."""
        for position, token in enumerate(token_ids[1:]):
            self.engine.append(adapted_rows[position][token] - base_rows[position][token])
            self.oracle.append(float(adapted_TV[position, token] - base_TV[position, token]))

    def report(self) -> Changed:
        engine, oracle = torch.tensor(self.engine).double(), torch.tensor(self.oracle).double()
        difference = (engine - oracle).abs()
        return Changed(
            num_positions=len(self.engine),
            engine_mean=float(engine.abs().mean()),
            oracle_mean=float(oracle.abs().mean()),
            mean_difference=float(difference.mean()),
            max_difference=float(difference.max()),
        )


def spread(differences: Sequence[float]) -> Spread:
    """Mean, 99th percentile and maximum."""
    if not differences:
        return Spread(0, 0.0, 0.0, 0.0)
    # sort, not quantile: that one refuses more than 16 million values. NaN sorts last, so it shows in the maximum.
    ordered = torch.tensor(differences, dtype=torch.float64).sort().values
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Spread(len(ordered), float(ordered.mean()), float(p99), float(ordered[-1]))
