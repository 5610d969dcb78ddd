"""What a run does around its steps: its directory, its end, and the signals that may and may not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inkling_rl.recipe import Recipe, RecipeError, load
from tests.trainer.conftest import Recipes
from trainer.interrupts import Interrupted
from trainer.progress import Progress
from trainer.resume import ResumeError
from trainer.run import Run, train


def make(recipe: Recipe, resume: Path | None = None) -> Run:
    return Run(recipe, resume, "train", Progress(1))


@pytest.fixture
def named(recipes: Recipes, tmp_path: Path) -> Recipe:
    return recipes(logging={"runs_dir": tmp_path, "run_name": "one"})


def test_a_run_makes_its_directory_and_no_second_run_takes_it(named: Recipe, tmp_path: Path) -> None:
    first = make(named)
    assert first._prepare_directory() is None
    assert load(tmp_path / "one" / "recipe.yaml") == named
    with pytest.raises(RecipeError, match=r"logging\.run_name must be a new directory .* which exists"):
        make(named)._prepare_directory()
    # Nor does a resume take it from a run that is still going, whatever it has written.
    (tmp_path / "one" / "adapters" / "policy-v1").mkdir(parents=True)
    with pytest.raises(ResumeError, match="another process is training in it"):
        make(named, tmp_path / "one")._prepare_directory()
    assert (tmp_path / "one" / "adapters" / "policy-v1").is_dir()


@pytest.mark.parametrize("place", ["/proc/nowhere", __file__])
def test_a_place_where_nothing_can_be_written_is_refused(recipes: Recipes, place: str) -> None:
    with pytest.raises(RecipeError, match=r"logging\.runs_dir must be a directory that can be written; got "):
        make(recipes(logging={"runs_dir": place, "run_name": "x"}))._prepare_directory()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"kv_cache_gib": 1e6}}, "rollout.kv_cache_gib must be below the"),
        ({"model": {"path": "/proc"}}, "/proc must be a checkpoint directory"),
        ({"rollout": {"num_engines": 2}}, "rollout.placement must be ray for more than one engine"),
    ],
)
def test_a_run_that_cannot_begin_says_so_at_once_and_leaves_nothing(
    recipes: Recipes, tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    status = train(recipes(logging={"runs_dir": tmp_path, "run_name": "x"}, **changes))
    captured = capfd.readouterr()
    assert status == 2 and f"error: {message}" in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "x").exists()


def test_a_run_interrupted_before_it_recorded_anything_leaves_nothing(
    named: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "_start_engine", lambda self, path: os.kill(os.getpid(), signal.SIGTERM))
    assert train(named) == 128 + signal.SIGTERM
    assert not (tmp_path / "one").exists()


def test_an_interrupt_that_c_code_turns_into_an_error_is_an_interrupt(
    named: Recipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Ray's `get` does: `SystemError: <class 'Interrupted'> returned a result with an exception set`."""

    def raised_in_c(self: Run, path: Path) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except Interrupted as interruption:
            raise SystemError("returned a result with an exception set") from interruption

    monkeypatch.setattr(Run, "_start_engine", raised_in_c)
    assert train(named) == 128 + signal.SIGINT
    assert capfd.readouterr().err == "interrupted by SIGINT\n"


def test_errors_go_to_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inkling_rl.cli", "train", "quickstart.yaml", "-s", "model.path=/proc"]
    done = subprocess.run(
        [*command, "-s", f"logging.runs_dir={tmp_path}"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: /proc must be a checkpoint directory") and "error" not in done.stdout
