"""The part of the recipe about drafts: `rollout.draft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inkling_rl.recipe.section import Section


class Refresh(Section):
    interval: Annotated[int, Field(gt=0)]
    """Steps between refreshes: the draft is trained on the completions since the last one, and published."""

    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-3
    """Peak learning rate of a refresh; it falls to nearly zero at its end."""

    num_epochs: Annotated[float, Field(gt=0.0)] = 1.0
    """Times that a refresh sees each of its completions; below 1 it sees a part of them."""

    batch_size: Annotated[int, Field(gt=0)] = 32
    """Completions per optimiser step of a refresh."""

    micro_batch_size: Annotated[int, Field(gt=0)] | None = None
    """Completions at a time on each GPU, in training and in measuring; decides memory, not the result.
    `trainer.micro_batch_size_per_gpu` unless given."""

    max_anchors: Annotated[int, Field(gt=0)] = 512
    """Tokens of a completion and epoch at which the draft is trained to go on; of a longer one so many are drawn."""


class Draft(Section):
    num_tokens: Annotated[int, Field(gt=0)] = 7
    """Tokens drafted per step; no more than the block that the draft was trained for."""

    sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    """How drafts are drawn. probabilistic: at the request's temperature, and accepted by the ratio of probabilities.
    greedy: the likeliest token, accepted with its probability. Either way the output is distributed as without."""

    path: str | None = None
    """Directory of a draft of its own; the one inside `model.path` unless given."""

    refresh: Refresh | None = None
    """Train the draft on the rollouts as the policy moves, and publish it. Without it the draft stays as it is."""
