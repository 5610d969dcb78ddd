"""Records that cross a boundary between the parts: rollout to trainer, trainer to metrics and files.

Frozen, keyword-only, plain Python values (they are pickled by Ray and written as JSON). Not configuration, which is the
recipe's, and not tensors, which stay inside a part. Lengths that belong together are checked when a record is made:
a misalignment of tokens and log-probabilities trains on the wrong tokens without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

StopReason = Literal["stop", "length", "max_turns", "environment", "abort"]
"""stop: the model ended its turn; length: out of tokens; max_turns, environment: the episode was ended for it."""

PublicationKind = Literal["adapter", "weights", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one prompt, as sampled and as scored."""

    row: int
    """Index of the prompt in the data file."""

    sample: int
    """Index within the prompt's group."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The completion, stop token included."""

    logprobs: tuple[float, ...]
    """Of `token_ids`, by the engine that sampled them, natural logarithm."""

    policy_version: int
    """Version that sampled every token of it."""

    stop_reason: StopReason
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"sample {self.sample} of row {self.row} must have one log-probability per token; got "
                f"{len(self.token_ids)} tokens and {len(self.logprobs)} log-probabilities. Ask the engine for logprobs"
            )

    def as_row(self, step: int, prompt: str, completion: str) -> dict[str, Any]:
        """A line of samples.jsonl: the texts and what was decided about them, without the token lists."""
        return {
            "step": step,
            "row": self.row,
            "sample": self.sample,
            "policy_version": self.policy_version,
            "prompt": prompt,
            "completion": completion,
            "num_tokens": len(self.token_ids),
            "stop_reason": self.stop_reason,
            "reward": self.reward,
            "reward_parts": dict(self.reward_parts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """Which draft an engine drafts with, and which it could go back to."""

    version: int
    files: str | None
    """Digest of the tensors in its files; None for a draft without a manifest, which is version 0."""

    memory: str
    """Digest of the tensors that it computes with."""

    held: int | None
    """Version that is held beside it: staged, replaced by it, or taken back."""

    previous: int | None
    """The same where it is the one that was replaced: what to forget the one that serves would go back to."""

    num_blocks: int
    """Drafted since it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One version of the policy, or of its draft, made visible to every engine."""

    version: int
    kind: PublicationKind
    num_bytes: int
    """Sent to all engines together."""

    seconds: float
    """From the first byte staged to the last engine's acknowledgement."""

    num_engines: int = 1

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores on the held-out problems by one policy version; each a mean reward between 0 and 1."""

    step: int
    policy_version: int
    num_problems: int
    score: float
    """Sampled at the training temperature."""

    greedy_score: float | None = None

    def as_row(self) -> dict[str, Any]:
        return asdict(self)
