"""`inkling-rl draft train` and `inkling-rl draft measure`: from a checkpoint and data to a draft on disk, or a number.

While a draft is trained, OUT.training holds the completions and the newest state of the optimiser; the same command
continues there, and the end removes it. OUT appears whole or not at all.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint.directory import refuse_used
from inkling_rl.checkpoint.reader import Checkpoint, read_json, resolve
from inkling_rl.draft.checkpoint import DraftCheckpoint, check_target
from inkling_rl.draft.shape import DraftShape
from lora.base import fingerprint
from trainer.draft import files
from trainer.draft.completions import Completion, Sampling, load_completions, read_data
from trainer.draft.loop import Masters, Plan, StepResult, Training, save_state
from trainer.draft.measure import Worth, measure
from trainer.draft.model import BlockDraft, new_weights
from trainer.draft.target import Target
from trainer.progress import Progress
from trainer.resume import lock, write_atomically

SAVE_SECONDS = 60.0
LINE_SECONDS = 10.0
INTERRUPTED = 130
HELD_OUT_SHARE, MAX_HELD_OUT = 0.1, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `draft train` is asked for."""

    checkpoint: str
    data: str
    out: Path
    draft: str | None = None
    """Where shape and starting weights come from; the checkpoint's own draft where it is None."""

    is_fresh: bool = False
    """Begin with random weights; only the shape is taken."""

    is_bundled: bool = False
    """Write a copy of the checkpoint with the draft in it, not a directory of the draft's own."""

    plan: Plan = field(default_factory=Plan)
    sampling: Sampling = field(default_factory=Sampling)
    device: str | None = None
    dtype: str | None = None

    def identity(self, base_model: str) -> dict[str, Any]:
        """What must be the same for a training to be continued."""
        return {
            "base_model": base_model,
            "--data": self.data,
            "--draft": self.draft,
            "--fresh": self.is_fresh,
            "plan": asdict(self.plan) | {"coefficients": self.plan.coefficients._asdict()},
            "sampling": asdict(self.sampling),
        }


class DraftProgress(Progress):
    """Console of a draft's training: a line every ten seconds."""

    _shown = 0.0

    def trained(self, step: int, result: StepResult) -> None:
        """After an optimiser step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if step == self.num_steps or self.seconds - self._shown >= LINE_SECONDS:
            self._shown = self.seconds
            self.line(
                f"step {step}/{self.num_steps}  loss {result.loss:.4f}  cross-entropy {result.cross_entropy:.3f}  "
                f"distance {result.distance:.3f}  acceptance {_shares(result.acceptance)}"
            )

    def sampled(self, done: int, wanted: int) -> None:
        """After a batch of completions."""
        if done == wanted or self.seconds - self._shown >= LINE_SECONDS:
            self._shown = self.seconds
            self.line(f"completions {done}/{wanted}")


def train(job: Job) -> int:
    """Train a draft and write it.

    Returns:
        0, or 130 after Ctrl-C: the state is kept and the same command continues.

    Raises:
        ValueError: checkpoint, draft, data, device or directory cannot be used.
    """
    progress = DraftProgress(0)
    try:
        return _train(job, progress)
    except KeyboardInterrupt:
        progress.line("interrupted; what was sampled is kept, the same command continues")
        return INTERRUPTED
    finally:
        progress.stop()


def _train(job: Job, progress: DraftProgress) -> int:
    refuse_used(job.out.absolute())
    source = Checkpoint.open(job.checkpoint)
    read_data(job.data, source.text_config["unpadded_vocab_size"])  # a fault here should cost no minutes
    config, start, version = _start(job, source)
    device, dtype = placement(job.device, job.dtype)
    place = job.out.absolute().with_name(f"{job.out.absolute().name}.training")
    place.mkdir(parents=True, exist_ok=True)
    with lock(place):
        _check_identity(place, job.identity(fingerprint(source)))
        with progress.phase("load target"):
            target = Target.load(source, start.shape.target_layers, device, dtype)
        cache = place / "completions.jsonl"
        completions = load_completions(
            job.data, target, source.path, job.sampling, job.plan.seed, cache, progress.sampled
        )
        train_part, held_out = split(completions, job.plan.seed)
        training = Training(Masters(start, device), target, train_part, job.plan)
        if not _run(training, place / "state.pt", progress):
            progress.line(f"interrupted at step {training.step}/{training.num_steps}; the same command continues")
            return INTERRUPTED
        weights = files.stored(training.draft.weights, source.config if job.is_bundled else config)
        worth = _worth(weights, training, held_out, job.sampling.temperature)
        contents = files.manifest(
            weights,
            source,
            version=version + 1,
            parent_version=None if job.is_fresh else version,
            facts={"training": _facts(job, training, progress.seconds), "worth": asdict(worth) if worth else None},
        )
        if job.is_bundled:
            files.write_bundled(job.out, source, config, weights, contents)
        else:
            files.write_draft(job.out, config, weights, contents)
        shutil.rmtree(place)
    shown = f"{worth.tokens_per_step:.2f} tokens per step, acceptance {_shares(worth.acceptance)}" if worth else "-"
    progress.line(f"result: {job.out}  version {version + 1}  held out: {shown}  {progress.seconds:.0f} s")
    return 0


def measure_draft(
    checkpoint: str,
    data: str,
    *,
    draft: str | None,
    num_tokens: int | None,
    sampling: Sampling,
    seed: int,
    device: str | None,
    dtype: str | None,
) -> Worth:
    """Tokens per verification step of a draft on disk, on completions of its target.

    Raises:
        ValueError: checkpoint, draft, data or device cannot be used.
    """
    source = Checkpoint.open(checkpoint)
    opened = DraftCheckpoint.open(draft or checkpoint, source.config)
    num_tokens = opened.shape.block_size if num_tokens is None else num_tokens
    opened.check_tokens(num_tokens)
    where, precision = placement(device, dtype)
    target = Target.load(source, opened.shape.target_layers, where, precision)
    weights = {name: value.to(where, torch.float32) for name, value in opened.tensors()}
    completions = load_completions(data, target, source.path, sampling, seed)
    block_draft = BlockDraft(opened.shape, weights)
    return measure(block_draft, target, completions, num_tokens=num_tokens, temperature=sampling.temperature)


def placement(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Where to compute, and the dtype of the target: a GPU in bfloat16 if there is one, else the CPU in float32.

    Raises:
        ValueError: no such device here.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device must be cpu, or cuda on a machine with such a GPU; got {name}. Leave it out")
    return torch.device(name), getattr(torch, dtype or ("bfloat16" if kind == "cuda" else "float32"))


def split(completions: Sequence[Completion], seed: int) -> tuple[list[Completion], list[Completion]]:
    """Completions to train on and to measure with; no prompt is in both, and at most a tenth is held out."""
    wanted = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * len(completions)))
    prompts = sorted({completion.prompt for completion in completions})
    random.Random(f"held out/{seed}").shuffle(prompts)
    counts = dict.fromkeys(prompts, 0)
    for completion in completions:
        counts[completion.prompt] += 1
    held: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        if total + counts[prompt] <= wanted:
            held.add(prompt)
            total += counts[prompt]
    return [c for c in completions if c.prompt not in held], [c for c in completions if c.prompt in held]


def _start(job: Job, source: Checkpoint) -> tuple[dict[str, Any], BlockDraft, int]:
    """Config, starting weights and version that the training begins from."""
    path = job.draft or job.checkpoint
    if job.is_fresh:
        config = read_json(resolve(path) / "config.json")
        shape = DraftShape.from_config(config)
        check_target(shape, source.config, resolve(path))
        weights = new_weights(config, source.tensor("model.llm.norm.weight"), job.plan.seed)
        return config, BlockDraft(shape, weights), 0
    opened = DraftCheckpoint.open(path, source.config)
    weights = {name: value.float() for name, value in opened.tensors()}
    return dict(opened.source.config), BlockDraft(opened.shape, weights), opened.version


def _check_identity(place: Path, identity: dict[str, Any]) -> None:
    path = place / "job.json"
    identity = json.loads(json.dumps(identity))
    if path.is_file():
        before = read_json(path)
        for key, value in identity.items():
            if before.get(key) != value:
                raise ValueError(
                    f"{key} must be that of the training in {place}, {before.get(key)}; got {value}. Put it back, "
                    "remove the directory, or choose another --out"
                )
    else:
        write_atomically(path, json.dumps(identity, indent=1) + "\n")


def _run(training: Training, path: Path, progress: DraftProgress) -> bool:
    """Train to the end, saving as time goes by; False when it was interrupted."""
    if path.is_file():
        training.restore(torch.load(path, map_location=training.target.device, weights_only=True))
        progress.line(f"continued at step {training.step}")
    progress.num_steps = training.num_steps
    progress.start(training.step)
    saved = time.monotonic()
    with _deferred_interrupts() as interrupts:
        while training.step < training.num_steps and not interrupts:
            progress.trained(training.step + 1, training.advance())
            if time.monotonic() - saved >= SAVE_SECONDS:
                save_state(path, training.state())
                saved = time.monotonic()
        save_state(path, training.state())
    return not interrupts


@contextmanager
def _deferred_interrupts() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end up in the list, so that a step ends before them; a second one ends the process at once."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worth(
    weights: dict[str, torch.Tensor], training: Training, held_out: Sequence[Completion], temperature: float
) -> Worth | None:
    """Of the weights as stored."""
    if not held_out:
        return None
    shape, device = training.draft.shape, training.target.device
    draft = BlockDraft(shape, {name: value.to(device, torch.float32) for name, value in weights.items()})
    return measure(draft, training.target, held_out, num_tokens=shape.block_size, temperature=temperature)


def _facts(job: Job, training: Training, seconds: float) -> dict[str, Any]:
    return {
        "data": job.data if job.data.startswith("arithmetic/") else Path(job.data).name,
        "num_completions": len(training.completions),
        "num_tokens": sum(len(completion.tokens) for completion in training.completions),
        "num_steps": training.num_steps,
        "plan": asdict(job.plan) | {"coefficients": job.plan.coefficients._asdict()},
        "sampling": asdict(job.sampling),
        "seconds": round(seconds),
        "torch": torch.__version__,
    }


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
