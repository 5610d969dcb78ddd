"""Ctrl-C as a terminal sends it, to the whole foreground group: while a run starts, and twice inside a step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from inkling_rl.recipe import dump
from tests.e2e.training import Training
from tests.trainer.conftest import build_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def press(training: Training) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(training.process.pid, signal.SIGINT)


@pytest.mark.parametrize(("line", "is_kept"), [("start trainer ...", False), ("step 1/50", True)])
def test_an_interrupt_ends_everything(tmp_path: Path, line: str, is_kept: bool) -> None:
    recipe = build_recipe(
        "builtin:tiny-arithmetic",
        trainer={"num_steps": 50},
        checkpoint={"interval": 1},
        logging={"runs_dir": str(tmp_path), "run_name": "run"},
    )
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    training = Training(str(tmp_path / "recipe.yaml"))
    training.read(line)
    time.sleep(1.0)
    press(training)
    time.sleep(0.3)
    press(training)  # cleaning up goes on
    console = training.read()
    # A second one after the end of the cleaning up meets Python's own handler.
    assert training.process.returncode in (128 + signal.SIGINT, -signal.SIGINT), console
    assert "interrupted by SIGINT" in console and "Traceback" not in console
    training.assert_nothing_is_left()
    assert (tmp_path / "run").exists() == is_kept
    assert ("--resume" in console) == is_kept
