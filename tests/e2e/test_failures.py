"""One run that is hit by everything, against one left alone: failures are named, nothing is left, no bit differs.

The engine hangs, the trainer is killed, the engine's core is killed, and each time the run is continued; meanwhile its
draft is refreshed. With one sequence at a time in the engine the metrics of all steps must be those of the undisturbed
run, bit by bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inkling_rl import metrics
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.recipe import dump
from tests.e2e.training import RAY_AGENTS, Training, hang, kill_core, kill_trainer, rows
from tests.trainer.conftest import build_recipe

pytestmark = pytest.mark.timeout(900)

BASE = "builtin:tiny-arithmetic"
NUM_STEPS = 5
PROMPT_LENGTH = 40  # of every sum, rendered


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("e2e")
    heldout = directory / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in (100, 250)))
    recipe = build_recipe(
        BASE,
        data={"eval": str(heldout), "max_prompt_length": PROMPT_LENGTH},
        rollout={
            "max_num_seqs": 1,
            "max_generate_length": 24,
            # No room behind a completion that runs out of tokens.
            "max_model_len": PROMPT_LENGTH + 24,
            "request_timeout": 6.0,
            "draft": {"num_tokens": 7, "refresh": {"interval": 2, "batch_size": 8}},
        },
        trainer={"num_steps": NUM_STEPS, "train_batch_size": 3, "learning_rate": 4e-3, "eval_interval": 2},
        lora={"rank": 8, "targets": ["q", "v"]},
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
    assert re.search(rf"result: {NUM_STEPS} steps, held-out \d\.\d+ -> \d\.\d+", console)
    assert console.count("draft 2: loss ") == console.count("draft 3: loss ") == 1
    training.assert_nothing_is_left()
    return recipe_file.parent / "runs" / "alone"


def disturb(arguments: list[str], after: str, how: Callable[[Training], None]) -> tuple[Training, str]:
    """Runs until a line, does something to it, and returns it with its console."""
    training = Training(*arguments)
    training.read(after)
    how(training)
    console = training.read()
    training.assert_nothing_is_left(but=RAY_AGENTS)
    return training, console


@pytest.mark.slow
def test_a_run_that_everything_happens_to_equals_one_left_alone(recipe_file: Path, alone: Path) -> None:
    hit = alone.with_name("hit")
    stuck, console = disturb([str(recipe_file), "-s", "logging.run_name=hit"], f"step 1/{NUM_STEPS}", hang)
    assert stuck.process.returncode == 1
    assert "rollout.request_timeout = 6 s" in console and "It hangs" in console
    assert f"--resume {hit}" in console

    # The first refresh is over; its checkpoint has its name or not.
    killed, console = disturb(["--resume", str(hit)], f"step 2/{NUM_STEPS}", kill_trainer)
    assert killed.process.returncode == -signal.SIGKILL

    def kill_core_later(training: Training) -> None:
        latest, deadline = hit / "checkpoints" / "latest", time.monotonic() + 60
        while latest.read_text() != "step-3\n":
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.02)
        kill_core(training)

    # Draft 2 serves, and in the checkpoint the completions of step 3 wait for the refresh after step 4.
    headless, console = disturb(["--resume", str(hit)], f"step 3/{NUM_STEPS}", kill_core_later)
    assert headless.process.returncode == 1
    assert "the engine's core process ended without a word" in console and "engine.log" in console

    training = Training("--resume", str(hit))
    console = training.read()
    assert training.process.returncode == 0, console
    assert "continuing after step 3" in console
    for ended in (stuck, killed, headless, training):
        ended.assert_nothing_is_left()

    expected = rows(alone)
    assert [row["step"] for row in expected] == list(range(NUM_STEPS + 1))
    assert rows(hit) == expected
    assert (alone / "samples.jsonl").read_bytes() == (hit / "samples.jsonl").read_bytes()
    last = [run / "checkpoints" / f"step-{NUM_STEPS}" for run in (alone, hit)]
    for name in ("run.json", "adapter/adapter_model.safetensors", "draft_completions.jsonl", "draft_training.pt"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert sorted(os.listdir(last[0] / "draft")) == sorted(os.listdir(last[1] / "draft"))
    for file in (last[0] / "draft").iterdir():
        assert file.read_bytes() == (last[1] / "draft" / file.name).read_bytes(), file.name


def test_what_a_run_leaves_behind(alone: Path) -> None:
    last = rows(alone)[-1]
    assert {"reward/mean", "eval/score", "eval/greedy_score", "mismatch/kl", "mismatch/abs_logprob_diff"} <= last.keys()
    assert {"sync/bytes", "tokens/generated", "policy_version", "mismatch/probe"} <= last.keys()
    assert last["policy_version"] == NUM_STEPS - 1
    assert 0 < last["mismatch/abs_logprob_diff"] < 1e-5
    versions = [json.loads(line)["policy_version"] for line in (alone / "samples.jsonl").read_text().splitlines()]
    assert sorted(set(versions)) == list(range(NUM_STEPS))
    assert (alone / "checkpoints" / "latest").read_text() == f"step-{NUM_STEPS}\n"
    assert sorted(path.name for path in (alone / "checkpoints").iterdir()) == ["latest", "step-4", "step-5"]
    assert (alone / "recipe.yaml").is_file()


def test_versions_of_the_draft_advance_and_the_engine_drafts_with_the_newest(alone: Path) -> None:
    steps = rows(alone)[1:]
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


def tensors(draft: Path) -> dict[str, Any]:
    return dict(DraftCheckpoint.open(draft, Checkpoint.open(BASE).config).tensors())
