"""What tests of drafting share: engine arguments, a look at what is drafted, and drafts that are good on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.shape import standalone_config
from trainer.draft import files

NUM_TOKENS = 7


def write_version(
    base: Path, directory: Path, version: int, parent: int | None, *, noise: float = 0.0, seed: int | None = None
) -> Path:
    """The draft in `base` in a directory of its own, as another version.

    Args:
        base: a checkpoint with a draft.
        directory: to be made.
        version, parent: what `draft.json` says.
        noise: every weight is moved by this share of its tensor's deviation.
        seed: of the noise; the version unless given.
    """
    checkpoint = Checkpoint.open(base)
    opened = DraftCheckpoint.open(base, checkpoint.config)
    generator = torch.Generator().manual_seed(version if seed is None else seed)
    weights = {
        name: (value + noise * value.float().std(correction=0) * torch.randn(value.shape, generator=generator)).to(
            value.dtype
        )
        for name, value in opened.tensors()
    }
    contents = files.manifest(weights, checkpoint, version=version, parent_version=parent, facts={})
    return files.write_draft(directory, standalone_config(opened.source.config), weights, contents)


def switch_draft(llm: Any, version: int) -> dict[str, Any]:
    """What `rollout.draft_routes` does, for an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=True)
    [answer] = llm.collective_rpc("switch_draft", args=(version,))
    core.resume_scheduler()
    return answer


def speculative(path: str | Path, sampling: str = "probabilistic", num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """vLLM's `speculative_config` for a draft."""
    return {
        "method": "dflash",
        "model": str(path),
        "num_speculative_tokens": num_tokens,
        "draft_sample_method": sampling,
        "disable_eagle_block_drop": True,
    }


def counter(llm: Any, name: str) -> int:
    """A counter of vLLM's: num_drafts, num_draft_tokens, num_accepted_tokens."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of counts [V] under a distribution [V]; bins of which fewer than 5 are expected are pooled."""
    counts, expected = counts.double(), probabilities.double() / probabilities.double().sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token came that has no probability"
    small = expected < 5
    pools = [(counts[~small], expected[~small])]
    if expected[small].sum() >= 5:
        pools.append((counts[small].sum()[None], expected[small].sum()[None]))
    counts, expected = (torch.cat(parts) for parts in zip(*pools, strict=True))
    statistic = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    assert freedom > 0
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@dataclass(frozen=True)
class Drafted:
    """One block as the engine drafted it."""

    request: str
    length: int
    """Tokens of context."""

    anchor: int
    tokens: list[int]
    hidden: torch.Tensor
    """[block_size, H]."""


@contextmanager
def watched(monkeypatch: Any) -> Iterator[list[Drafted]]:
    """Every block that engines in this process draft inside the block."""
    from rollout.plugin.draft import Draft
    from rollout.plugin.proposer import DSparkProposer

    seen: list[Drafted] = []
    hidden: list[torch.Tensor] = []
    draft, compute = DSparkProposer.draft, Draft.hidden

    def spy_hidden(self: Any, *arguments: Any) -> torch.Tensor:
        hidden.append(compute(self, *arguments))
        return hidden[-1]

    def spy(self: Any, anchors: torch.Tensor, blocks: Any, num_tokens: int, choice: Any) -> Any:
        result = draft(self, anchors, blocks, num_tokens, choice)
        unfinished = self.runner.discard_request_mask.np
        rows = [row for row in range(self.runner.input_batch.num_reqs) if not unfinished[row]]
        states = hidden.pop().unflatten(0, (len(rows), -1))
        for place, row in enumerate(rows):
            request = self.runner.input_batch.req_ids[row]
            length, anchor = int(blocks.lengths[place]), int(anchors[place])
            seen.append(Drafted(request, length, anchor, result[0][place].tolist(), states[place]))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "hidden", spy_hidden)
        patch.setattr(DSparkProposer, "draft", spy)
        yield seen


@contextmanager
def drafts(monkeypatch: Any, tokens: Callable[[str, int], Sequence[int]]) -> Iterator[None]:
    """Engines draft `tokens(request, length of its context)` as if certain, whatever the draft model says."""
    from rollout.plugin.proposer import DSparkProposer

    def draft(self: Any, anchors: torch.Tensor, blocks: Any, num_tokens: int, choice: Any) -> Any:
        unfinished = self.runner.discard_request_mask.np
        rows = [row for row in range(self.runner.input_batch.num_reqs) if not unfinished[row]]
        ids = [self.runner.input_batch.req_ids[row] for row in rows]
        drafted = [
            list(tokens(name, int(length)))[:num_tokens] for name, length in zip(ids, blocks.lengths, strict=True)
        ]
        return torch.tensor([row + [0] * (num_tokens - len(row)) for row in drafted]), None

    with monkeypatch.context() as patch:
        patch.setattr(DSparkProposer, "draft", draft)
        yield
