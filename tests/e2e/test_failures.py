"""One run that is hit by everything, against one left alone: failures are named, nothing is left, no bit differs.

The engine hangs, the trainer is killed, the engine's core is killed, and each time the run is continued. With one
sequence at a time in the engine the metrics of all steps must be those of the undisturbed run, bit by bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inkling_rl.recipe import dump
from tests.trainer.conftest import build_recipe

pytestmark = pytest.mark.timeout(900)

NUM_STEPS = 4
PROMPT_LENGTH = 40  # of every sum, rendered
# Metrics that measure time, or the moment.
CLOCKS = ("timing/", "time/", "tokens/per_second", "sync/seconds", "trajectory_time", "tokens_per_second")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("e2e")
    heldout = directory / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in (100, 250)))
    recipe = build_recipe(
        "builtin:tiny-arithmetic",
        data={"eval": str(heldout), "max_prompt_length": PROMPT_LENGTH},
        # No room behind a completion that runs out of tokens.
        rollout={
            "max_num_seqs": 1,
            "max_generate_length": 24,
            "max_model_len": PROMPT_LENGTH + 24,
            "request_timeout": 6.0,
        },
        trainer={"num_steps": NUM_STEPS, "train_batch_size": 3, "learning_rate": 1e-3, "eval_interval": 2},
        lora={"rank": 8, "targets": ["q", "v"]},
        checkpoint={"interval": 1},
        logging={"runs_dir": str(directory / "runs")},
    )
    path = directory / "recipe.yaml"
    path.write_text(dump(recipe))
    return path


class Training:
    """A training process, its console line by line, and everything below it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "inkling_rl.cli", "train", *arguments]
        # Whatever is started below it inherits this, whatever group or session it moves to.
        self.mark = f"INKLING_TEST_RUN={uuid.uuid4().hex}"
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict([self.mark.split("=")])
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.engine = 0

    def read(self, until: str | None = None) -> str:
        """Reads on to a line with `until`, or to the end. Returns everything so far."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"engine: process (\d+)", line):
                self.engine = int(found.group(1))
            if until is not None and until in line:
                return "".join(self.lines)
        assert until is None, f"no line with {until!r} in:\n{''.join(self.lines)}"
        self.process.wait(timeout=60)
        return "".join(self.lines)

    def engine_processes(self) -> list[int]:
        return [pid for pid, group, _ in processes() if group == self.engine]

    def assert_nothing_is_left(self) -> None:
        """Neither engine nor trainer nor Ray; Ray's agents notice the end of their parent with a delay."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            left = [(pid, name) for pid, _, name in processes() if self.mark in _environment(pid)]
            if not left:
                return
            time.sleep(0.5)
        raise AssertionError(f"left: {left}")


def processes() -> list[tuple[int, int, str]]:
    """Pid, group and command line of every running process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            name = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):
            continue
        if state not in ("Z", "X"):
            found.append((int(stat.parent.name), int(group), name))
    return found


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not any(c in k for c in CLOCKS)} for line in lines]


def hang(training: Training) -> None:
    for pid in training.engine_processes():
        os.kill(pid, signal.SIGSTOP)


def kill_core(training: Training) -> None:
    (core,) = (pid for pid, group, name in processes() if group == training.engine and "EngineCore" in name)
    os.kill(core, signal.SIGKILL)


def kill_trainer(training: Training) -> None:
    os.kill(training.process.pid, signal.SIGKILL)


def disturb(arguments: list[str], after: str, how: Callable[[Training], None]) -> tuple[int, str]:
    """Runs until a line, does something to it, and returns exit status and console."""
    training = Training(*arguments)
    training.read(after)
    how(training)
    console = training.read()
    training.assert_nothing_is_left()
    return training.process.returncode, console


def test_a_run_that_everything_happens_to_equals_one_left_alone(recipe_file: Path) -> None:
    alone, hit = (recipe_file.parent / "runs" / name for name in ("alone", "hit"))
    training = Training(str(recipe_file), "-s", "logging.run_name=alone")
    console = training.read()
    assert training.process.returncode == 0, console
    assert re.search(rf"result: {NUM_STEPS} steps, held-out \d\.\d+ -> \d\.\d+", console)
    training.assert_nothing_is_left()

    status, console = disturb([str(recipe_file), "-s", "logging.run_name=hit"], f"step 1/{NUM_STEPS}", hang)
    assert status == 1
    assert "rollout.request_timeout = 6 s" in console and "It hangs" in console
    assert f"--resume {hit}" in console

    status, console = disturb(["--resume", str(hit)], f"step 2/{NUM_STEPS}", kill_trainer)
    assert status == -signal.SIGKILL

    status, console = disturb(["--resume", str(hit)], f"step 3/{NUM_STEPS}", kill_core)
    assert status == 1
    assert "the engine's core process ended without a word" in console and "engine.log" in console

    training = Training("--resume", str(hit))
    console = training.read()
    assert training.process.returncode == 0, console
    training.assert_nothing_is_left()

    expected = rows(alone)
    assert [row["step"] for row in expected] == list(range(NUM_STEPS + 1))
    assert rows(hit) == expected
    samples = [(run / "samples.jsonl").read_text() for run in (alone, hit)]
    assert samples[0] == samples[1]
    states = [(run / "checkpoints" / f"step-{NUM_STEPS}" / "run.json").read_text() for run in (alone, hit)]
    assert states[0] == states[1]
    weights = [
        (run / "checkpoints" / f"step-{NUM_STEPS}" / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in (alone, hit)
    ]
    assert weights[0] == weights[1]


def test_what_a_run_leaves_behind(recipe_file: Path) -> None:
    """Depends on the run of the test above."""
    run = recipe_file.parent / "runs" / "alone"
    last = rows(run)[-1]
    assert {"reward/mean", "eval/score", "eval/greedy_score", "mismatch/kl", "mismatch/abs_logprob_diff"} <= last.keys()
    assert {"sync/bytes", "tokens/generated", "policy_version", "mismatch/probe"} <= last.keys()
    assert last["policy_version"] == NUM_STEPS - 1
    assert 0 < last["mismatch/abs_logprob_diff"] < 1e-5
    versions = [json.loads(line)["policy_version"] for line in (run / "samples.jsonl").read_text().splitlines()]
    assert sorted(set(versions)) == list(range(NUM_STEPS))
    assert (run / "checkpoints" / "latest").read_text() == f"step-{NUM_STEPS}\n"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-3", "step-4"]
    assert (run / "recipe.yaml").is_file()
