"""A warning about a draft of which nothing is accepted: it only costs time, and nobody looks at counters."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("vllm.inkling2.draft")

SILENT_STEPS = 256
"""Verified drafts in a row without one accepted token after which a warning is due."""

LOOK_EVERY = 16
"""Steps of a GPU's runner between two looks: each costs the host a few launches."""


class DraftWatch:
    """Counts verified drafts since a token was last accepted, and warns once per stretch."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens` of a draft."""
        self.num_tokens = num_tokens
        self.silent = 0
        self.version = 0
        """Of the draft that `silent` counts for."""

    def count(self, version: int, num_verified: int, num_accepted: int) -> None:
        """Take in drafts of a version, and how many of their tokens were accepted."""
        if self.version != version:
            self.version, self.silent = version, 0
        if num_accepted:
            self.silent = 0
            return
        before, self.silent = self.silent, self.silent + num_verified
        if before < SILENT_STEPS <= self.silent:
            logger.warning(
                "the draft has had none of its tokens accepted in %d drafts of %d tokens: drafting only costs time. "
                "Train it for this model, or leave rollout.draft out",
                self.silent,
                self.num_tokens,
            )


class DeviceWatch:
    """The same where the numbers are on a GPU that nobody waits for: a sample of the steps, read at the next look."""

    def __init__(self, num_tokens: int) -> None:
        self.drafts = DraftWatch(num_tokens)
        self.steps = 0
        self._seen: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        """Version, verified and accepted on their way to the host, and when they are there."""

    def observe(self, version: int, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Look at a step in which requests emitted `num_sampled` tokens each and `num_rejected` drafted ones fell."""
        self.steps += 1
        if self.steps % LOOK_EVERY:
            return
        if self._seen is not None:
            seen_version, numbers, event = self._seen
            if not event.query():
                return
            self.drafts.count(seen_version, *numbers.tolist())
        verified = ((num_sampled > 0) & (num_sampled + num_rejected > 1)).sum()
        accepted = (num_sampled - 1).clamp(min=0).sum()
        numbers = torch.stack((verified, accepted)).to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._seen = version, numbers, event
