"""How well the rollouts' draft does, from the counters that vLLM publishes at /metrics.

Counters only grow, so what a step did is the difference of two readings. vLLM counts drafted tokens behind a stop token
as accepted; tokens per verification step are therefore computed from the tokens that were returned, of which the first
of every request needed no draft.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from inkling_rl import metrics

_SAMPLE = re.compile(r"^vllm:(?P<name>\w+?)(?:_total)?\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What engines have counted since they started."""

    drafts: int = 0
    tokens: int = 0
    """Returned."""

    requests: int = 0
    """Finished."""

    accepted: tuple[int, ...] = ()
    """Drafts of which the token at each position was accepted."""

    @classmethod
    def parse(cls, text: str) -> DraftCounts:
        """One engine's, in Prometheus' text format. What is not there counts as zero."""
        sums: dict[str, float] = {}
        accepted: dict[int, int] = {}
        for sample in _SAMPLE.finditer(text):
            name, value = sample["name"], float(sample["value"])
            sums[name] = sums.get(name, 0.0) + value
            if name == "spec_decode_num_accepted_tokens_per_pos" and (position := _POSITION.search(sample["labels"])):
                accepted[int(position[1])] = accepted.get(int(position[1]), 0) + int(value)
        return cls(
            int(sums.get("spec_decode_num_drafts", 0)),
            int(sums.get("generation_tokens", 0)),
            int(sums.get("request_success", 0)),
            tuple(accepted[position] for position in sorted(accepted)),
        )

    def plus(self, other: DraftCounts, sign: int = 1) -> DraftCounts:
        """Of several engines together, or with sign -1 what happened since the other reading."""
        length = max(len(self.accepted), len(other.accepted))
        one, two = (counts.accepted + (0,) * (length - len(counts.accepted)) for counts in (self, other))
        sums = {
            field.name: getattr(self, field.name) + sign * getattr(other, field.name)
            for field in fields(self)
            if field.name != "accepted"
        }
        return DraftCounts(**sums, accepted=tuple(a + sign * b for a, b in zip(one, two, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Our names; nothing where nothing was drafted."""
        if not self.drafts:
            return {}
        found = {metrics.ACCEPTANCE_LENGTH: (self.tokens - self.requests) / self.drafts}
        for position, count in enumerate(self.accepted, start=1):
            found[f"{metrics.ACCEPTANCE_AT}{position}"] = count / self.drafts
        return found
