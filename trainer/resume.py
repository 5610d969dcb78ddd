"""Checkpoints of a run: `RUN/checkpoints/step-N`, written beside, renamed when whole, named by `latest`.

A checkpoint holds the trainer's part (`policy/`: adapter, optimiser, schedule, random state, per rank), the adapter as
a PEFT directory for anybody else (`adapter/`), and `run.json`: step, data cursor, the publication probe with its
values. Nothing of the frozen base, which the recipe names.

Departure from SkyRL's layout (`global_step_N`, `latest_ckpt_global_step.txt`): a directory that is being written never
has the name of a finished one, and the state is readable without unpickling.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from inkling_rl.checkpoint.reader import resolve
from inkling_rl.draft.manifest import Manifest
from inkling_rl.recipe import Recipe
from trainer.probe import Probe

LATEST = "latest"
DRAFTS = "drafts"
"""Directory of a run for the drafts that it has trained."""

DRAFT = "draft"
"""Begins their names; in a checkpoint, the directory of the one that served."""

LOCK_FILE = ".lock"
STATE_FILE = "run.json"
PREFIX = "step-"


class CheckpointMissingError(ValueError):
    """There is nothing to resume from."""


class ResumeError(ValueError):
    """A checkpoint that cannot continue this run."""


@dataclass(frozen=True)
class RunState:
    """What the driver must remember."""

    step: int
    """Finished optimiser steps, which is also the policy version."""

    identity: dict[str, Any]
    """Recipe fields that decide what the saved tensors mean; see `identity_of`."""

    cursor: dict[str, int]
    """Of `trainer.dataset.Batches`."""

    probe: Probe | None


def lock(directory: Path) -> IO[str]:
    """Takes a run directory for this process. The lock ends with the returned file, or with the process.

    Raises:
        ResumeError: another process holds it; two that write one run would mix their checkpoints and metrics.
    """
    file = (directory / LOCK_FILE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ResumeError(
            f"{directory} must not be in use; another process is training in it. Wait for its end, or end it"
        ) from error
    return file


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """Recipe fields that must not change when a run is continued, by dotted path."""
    draft = recipe.rollout.draft
    # A trained draft goes on from the run's, whatever the recipe says; without training any will do.
    refreshed = {"rollout.draft.path": draft.path} if draft and draft.refresh else {}
    return refreshed | {
        "model.path": recipe.model.path,
        "lora.rank": recipe.lora.rank,
        "lora.alpha": recipe.lora.alpha,
        "lora.targets": sorted(recipe.lora.targets),
        "trainer.seed": recipe.trainer.seed,
        "trainer.train_batch_size": recipe.trainer.train_batch_size,
        "trainer.zero_stage": recipe.trainer.zero_stage,
        "trainer.num_gpus_per_node x trainer.num_nodes": recipe.trainer.num_gpus_per_node * recipe.trainer.num_nodes,
        "data.train": recipe.data.train,
        "data.prompt_key": recipe.data.prompt_key,
        "data.max_prompt_length": recipe.data.max_prompt_length,
        "data.shuffle": recipe.data.shuffle,
    }


def check_identity(state: RunState, recipe: Recipe) -> None:
    """Refuses to continue a run under a recipe that gives its tensors or its cursor another meaning.

    Raises:
        ResumeError: the first such field.
    """
    for path, now in identity_of(recipe).items():
        if state.identity.get(path, now) != now:
            raise ResumeError(
                f"{path} must be {state.identity[path]!r}, as in the run that is continued; got {now!r}. "
                "Put it back, or start a new run"
            )


class Checkpoints:
    """The checkpoints below one run directory."""

    def __init__(self, directory: Path, max_to_keep: int) -> None:
        self.directory = directory
        self.max_to_keep = max_to_keep

    def begin(self, step: int) -> Path:
        """An empty directory for the parts of a checkpoint; `commit` gives it its name."""
        for old in self.directory.glob(f".{PREFIX}*.partial"):
            shutil.rmtree(old, ignore_errors=True)  # of a run that was killed while it wrote
        staging = self.directory / f".{PREFIX}{step}.partial"
        staging.mkdir(parents=True)
        return staging

    def commit(self, staging: Path, state: RunState) -> Path:
        """Names a complete checkpoint, points `latest` at it and deletes the oldest beyond `max_to_keep`."""
        write_atomically(staging / STATE_FILE, json.dumps(asdict(state), indent=1))
        final = self.directory / f"{PREFIX}{state.step}"
        shutil.rmtree(final, ignore_errors=True)
        for part in staging.rglob("*"):
            if part.is_file():
                _sync(part)
        os.rename(staging, final)
        write_atomically(self.directory / LATEST, final.name + "\n")
        _sync(self.directory)
        for old in self.steps()[: -self.max_to_keep]:
            shutil.rmtree(self.directory / f"{PREFIX}{old}")
        return final

    def steps(self) -> list[int]:
        """Steps of finished checkpoints, oldest first."""
        names = (path.name.removeprefix(PREFIX) for path in self.directory.glob(f"{PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> Path:
        """The newest finished checkpoint.

        Raises:
            CheckpointMissingError: there is none.
        """
        pointer = self.directory / LATEST
        path = self.directory / pointer.read_text().strip() if pointer.is_file() else None
        if path is None or not (path / STATE_FILE).is_file():
            raise CheckpointMissingError(
                f"{self.directory} must hold a finished checkpoint and `{LATEST}`; it holds none. The run ended before "
                "its first one (checkpoint.interval): start it anew"
            )
        return path


def read_state(checkpoint: Path) -> RunState:
    """What `commit` wrote."""
    content: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
    probe = Probe(**content["probe"]) if content["probe"] else None
    return RunState(step=content["step"], identity=content["identity"], cursor=content["cursor"], probe=probe)


def served_draft(recipe: Recipe, run_dir: Path) -> Path | None:
    """Directory of the draft that engines are started on: the newest that the run has trained, or the recipe's.

    None where rollouts are not drafted.

    Raises:
        CheckpointError: a built-in checkpoint that this installation lacks.
    """
    draft = recipe.rollout.draft
    if draft is None:
        return None
    trained = {int(path.name.rpartition("-")[2]): path for path in (run_dir / DRAFTS).glob(f"{DRAFT}-*")}
    return trained[max(trained)] if trained else resolve(draft.path or recipe.model.path)


def draft_version(directory: Path) -> int:
    """Version of a draft on disk; 0 for one without `draft.json`, which nobody trained here.

    Raises:
        CheckpointError: a `draft.json` that cannot be read.
    """
    manifest = Manifest.read(directory)
    return manifest.version if manifest else 0


def restore_drafts(recipe: Recipe, run_dir: Path, checkpoint: Path) -> None:
    """Leaves in a run directory of its drafts that which served when the checkpoint was taken, and no other.

    None where the recipe has no refresh any more: its own draft serves then.

    Raises:
        CheckpointError: the checkpoint's `draft.json` cannot be read. OSError: its draft cannot be copied. The run's
            drafts are then what they were.
    """
    saved, draft = checkpoint / DRAFT, recipe.rollout.draft
    partial, old = (run_dir / f".{DRAFTS}.{name}" for name in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    if draft is not None and draft.refresh is not None and saved.is_dir():
        shutil.copytree(saved, partial / f"{DRAFT}-{draft_version(saved)}")
    if (run_dir / DRAFTS).is_dir():
        os.rename(run_dir / DRAFTS, old)
    if partial.is_dir():
        os.rename(partial, run_dir / DRAFTS)
    shutil.rmtree(old, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """A file that holds the old text or the new one, whenever this process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
