"""What refreshing a draft is worth while its policy moves: the quick start with its draft left alone, or refreshed.

    python -m tests.benchmarks.draft_refresh OUT [--num-steps 24] [--interval 2] [--every 3] [--seed 0]

Trains both arms through SkyRL, DeepSpeed and the engine, with a checkpoint every step. Then, at every third step s of
each, so that drafts fresh and a step old alternate: the policy after s steps and the draft that serves the next
rollouts, on 256 held-out prompts, always the same, with one completion each, sampled anew from that policy with
transformers. The number is the expected tokens per verification step of `trainer.draft.measure`, computed and not
drawn. Its standard error is over 16 groups of 16 prompts. Asked for is, as the mean of the last five measured steps:
left alone, a loss of a tenth or more; refreshed, at least 95 % of the start, and above the other by more than twice the
standard error. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import batched
from pathlib import Path
from typing import Any

import torch

from inkling_rl.arithmetic import rows
from inkling_rl.chat import Renderer
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from lora.files import read_adapter
from lora.model import attach, load_adapter_state
from trainer.dataset import read_tokenizer
from trainer.draft.completions import Completion
from trainer.draft.measure import measure
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target

BASE = "builtin:tiny-arithmetic"
NUM_PROMPTS, NUM_GROUPS, NUM_LAST = 256, 16, 5
EFFORT, MAX_TOKENS, NUM_TOKENS = 0.2, 48, 7
LOSS, KEPT = 0.9, 0.95
CPU = torch.device("cpu")

Curve = dict[int, list[float]]
"""Tokens per verification step of every group, by step."""


def train(out: Path, name: str, num_steps: int, seed: int, interval: int | None) -> Path:
    """One arm, as a user would run it."""
    run = out / f"{name}-{seed}"
    if (run / "checkpoints" / f"step-{num_steps}").is_dir():
        return run
    settings = [
        f"logging.runs_dir={out}",
        f"logging.run_name={run.name}",
        f"rollout.draft.num_tokens={NUM_TOKENS}",
        f"trainer.num_steps={num_steps}",
        f"trainer.seed={seed}",
        "data.eval=null",
        "checkpoint.interval=1",
        f"checkpoint.max_to_keep={num_steps}",
    ]
    if interval:
        settings.append(f"rollout.draft.refresh.interval={interval}")
    arguments = ["quickstart.yaml", *(part for setting in settings for part in ("-s", setting))]
    if (run / "checkpoints" / "latest").is_file():
        arguments = ["--resume", str(run)]
    subprocess.run([sys.executable, "-m", "inkling_rl.cli", "train", *arguments], check=True)
    return run


class Ruler:
    """The fixed prompts, and one model whose adapter is exchanged."""

    def __init__(self, seed: int) -> None:
        self.checkpoint = Checkpoint.open(BASE)
        self.shape = DraftCheckpoint.open(BASE, self.checkpoint.config).shape
        self.bare = Target.load(self.checkpoint, self.shape.target_layers, CPU, torch.float32)
        self.adapted: Any = None
        renderer = Renderer(read_tokenizer(self.checkpoint.path))
        messages = [[{"role": "user", "content": row["prompt"]}] for row in rows("heldout", NUM_PROMPTS)]
        self.prompts = torch.tensor([renderer.render(message, effort=EFFORT) for message in messages])
        self.stop = renderer.stop_token_ids[0]
        self.seed = seed

    def length(self, adapter: Path | None, draft: Path | None) -> list[float]:
        """Tokens per verification step of each group of prompts."""
        opened = DraftCheckpoint.open(draft or BASE, self.checkpoint.config)
        block_draft = BlockDraft(opened.shape, {name: value.float() for name, value in opened.tensors()})
        target = self._target(adapter)
        made = target.complete(self.prompts, 1.0, MAX_TOKENS, self.stop, self.seed)
        completions = [
            Completion(tuple(prompt), tuple(tokens)) for prompt, tokens in zip(self.prompts.tolist(), made, strict=True)
        ]
        return [
            measure(block_draft, target, group, num_tokens=NUM_TOKENS).tokens_per_step
            for group in batched(completions, NUM_PROMPTS // NUM_GROUPS)
        ]

    def _target(self, path: Path | None) -> Target:
        if path is None:
            assert self.adapted is None, "the bare model first"
            return self.bare
        adapter = read_adapter(path, self.checkpoint.config)
        if self.adapted is None:
            self.adapted = attach(self.bare.model, adapter)
        load_adapter_state(self.adapted, adapter.state)
        return Target(self.adapted.get_base_model(), self.shape.target_layers)


def curve(run: Path, steps: range, seed: int) -> Curve:
    """Of an arm. What was measured is kept in a file of the run and not measured again."""
    kept = run / f"tokens_per_step-{seed}.json"
    found: Curve = {int(step): values for step, values in json.loads(kept.read_text()).items()} if kept.exists() else {}
    ruler = Ruler(seed)
    for step in (step for step in steps if step not in found):
        checkpoint = run / "checkpoints" / f"step-{step}"
        draft = checkpoint / "draft"
        found[step] = ruler.length(checkpoint / "adapter" if step else None, draft if draft.is_dir() else None)
        kept.write_text(json.dumps(found))
        print(f"{run.name} step {step}: {statistics.fmean(found[step]):.3f}", flush=True)
    return {step: found[step] for step in steps}


def rewards(run: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["reward/mean"] for row in lines if "reward/mean" in row}


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def last(found: Curve) -> list[float]:
    """Mean over the last measured steps, of each group."""
    steps = sorted(found)[-NUM_LAST:]
    return [statistics.fmean(values) for values in zip(*(found[step] for step in steps), strict=True)]


def report(alone: Curve, refreshed: Curve, rewarded: list[dict[int, float]]) -> bool:
    """Prints both curves and says whether what is asked for holds."""
    print("\n| step | reward, left alone / refreshed | left alone | refreshed |\n|---|---|---|---|")
    for step in sorted(alone):
        shown = [f"{statistics.fmean(found[step]):.2f} ± {error(found[step]):.2f}" for found in (alone, refreshed)]
        reward = " / ".join(f"{arm[step]:.2f}" if step in arm else "-" for arm in rewarded)
        print(f"| {step} | {reward} | {' | '.join(shown)} |")
    print("\nA mark is a tenth of a token per verification step: . left alone, # refreshed")
    for step in sorted(alone):
        for label, mark, found in ((step, ".", alone), ("", "#", refreshed)):
            print(f"{label:>4} {mark * round(10 * statistics.fmean(found[step]))}")
    start, off, on = statistics.fmean(alone[0]), last(alone), last(refreshed)
    gain = [a - b for a, b in zip(on, off, strict=True)]
    means = [statistics.fmean(values) for values in (off, on, gain)]
    print(
        f"\nstart {start:.3f}; mean of the last {NUM_LAST}: left alone {means[0]:.3f} ± {error(off):.3f} "
        f"({means[0] / start:.1%} of the start), refreshed {means[1]:.3f} ± {error(on):.3f} ({means[1] / start:.1%}); "
        f"difference {means[2]:.3f} ± {error(gain):.3f}"
    )
    return means[0] <= LOSS * start and means[1] >= KEPT * start and means[2] > 2 * error(gain)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--num-steps", type=int, default=24)
    parser.add_argument("--interval", type=int, default=2)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = given.out.absolute()
    runs = [
        train(out, name, given.num_steps, given.seed, interval)
        for name, interval in (("alone", None), (f"refreshed-{given.interval}", given.interval))
    ]
    steps = range(0, given.num_steps + 1, given.every)
    curves = [curve(run, steps, given.seed) for run in runs]
    holds = report(*curves, [rewards(run) for run in runs])
    print("holds" if holds else "does NOT hold")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
