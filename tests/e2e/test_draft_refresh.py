"""A run that refreshes its draft, through SkyRL, DeepSpeed and the engine: versions, and the same bits when killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from inkling_rl import metrics
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.recipe import dump
from tests.e2e.test_failures import Training, kill_trainer, rows
from tests.trainer.conftest import build_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BASE = "builtin:tiny-arithmetic"
NUM_STEPS, INTERVAL = 5, 2
SECONDS = (metrics.DRAFT_SYNC_SECONDS, metrics.TIME_DRAFT_REFRESH)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("refresh")
    recipe = build_recipe(
        BASE,
        # One sequence at a time: what the engine computes depends on no race.
        rollout={
            "max_num_seqs": 1,
            "max_generate_length": 24,
            "draft": {"num_tokens": 7, "refresh": {"interval": INTERVAL, "batch_size": 8}},
        },
        trainer={"num_steps": NUM_STEPS, "train_batch_size": 3, "learning_rate": 4e-3},
        checkpoint={"interval": 1},
        logging={"runs_dir": str(directory / "runs")},
    )
    path = directory / "recipe.yaml"
    path.write_text(dump(recipe))
    return path


@pytest.fixture(scope="module")
def alone(recipe_file: Path) -> Path:
    training = Training(str(recipe_file), "-s", "logging.run_name=alone")
    console = training.read()
    assert training.process.returncode == 0, console
    assert console.count("draft 2: loss ") == console.count("draft 3: loss ") == 1
    return recipe_file.parent / "runs" / "alone"


def tensors(draft: Path) -> dict[str, Any]:
    return dict(DraftCheckpoint.open(draft, Checkpoint.open(BASE).config).tensors())


def test_versions_advance_and_the_engine_drafts_with_the_newest(alone: Path) -> None:
    steps = rows(alone)
    # The shipped draft is version 1; drafts 2 and 3 are published after steps 2 and 4.
    assert [row[metrics.DRAFT_VERSION_SERVED] for row in steps] == [1, 1, 2, 2, 3]
    assert [row.get(metrics.DRAFT_VERSION) for row in steps] == [None, 2, None, 3, None]
    for row in steps[1::2]:
        assert 0 < row[metrics.DRAFT_LOSS] < 3
        assert 1 < row[metrics.DRAFT_LENGTH_BEFORE] < row[metrics.DRAFT_LENGTH] < 8
    assert all(row[metrics.ACCEPTANCE_LENGTH] > 1 for row in steps)
    assert sorted(path.name for path in (alone / "drafts").iterdir()) == ["draft-2", "draft-3"]
    served = alone / "checkpoints" / f"step-{NUM_STEPS}" / "draft"
    manifest = json.loads((served / "draft.json").read_text())
    assert (manifest["version"], manifest["parent_version"]) == (3, 2)
    assert manifest["training"]["policy_version"] == 4
    # Two steps of three prompts, four completions each; those of a single token have nothing to predict.
    assert 20 <= manifest["training"]["num_completions"] <= 24
    last, before = tensors(served), tensors(alone / "drafts" / "draft-2")
    # In bfloat16 a weight that moved by less than half of its last bit stands still.
    assert sum(not value.equal(before[name]) for name, value in last.items()) > 0.8 * len(last)


def kill_after(step: int, run: Path, *arguments: str) -> None:
    """Kills a training as soon as the checkpoint of a step has its name."""
    training = Training(*arguments)
    training.read(f"step {step}/{NUM_STEPS}")
    latest, deadline = run / "checkpoints" / "latest", time.monotonic() + 60
    while not (latest.is_file() and latest.read_text() == f"step-{step}\n"):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    kill_trainer(training)
    training.read()
    training.assert_nothing_is_left()


def test_a_killed_run_equals_one_left_alone(recipe_file: Path, alone: Path) -> None:
    """After step 3 draft 2 serves and completions wait for the refresh after step 4."""
    hit = alone.with_name("hit")
    kill_after(3, hit, str(recipe_file), "-s", "logging.run_name=hit")
    training = Training("--resume", str(hit))
    console = training.read()
    assert training.process.returncode == 0, console
    assert "continuing after step 3" in console
    assert without_seconds(rows(hit)) == without_seconds(rows(alone))
    last = [run / "checkpoints" / f"step-{NUM_STEPS}" for run in (alone, hit)]
    for name in ("run.json", "adapter/adapter_model.safetensors", "draft_completions.jsonl", "draft_training.pt"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert sorted(os.listdir(last[0] / "draft")) == sorted(os.listdir(last[1] / "draft"))
    for file in (last[0] / "draft").iterdir():
        assert file.read_bytes() == (last[1] / "draft" / file.name).read_bytes(), file.name


def without_seconds(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in SECONDS} for row in found]
