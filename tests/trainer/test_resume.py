"""Checkpoints are whole or absent; `latest` names a whole one; a changed recipe is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.conftest import Recipes
from trainer.probe import Probe, compare_changes
from trainer.resume import (
    CheckpointMissingError,
    Checkpoints,
    ResumeError,
    RunState,
    check_identity,
    identity_of,
    lock,
    read_state,
)


def state(step: int) -> RunState:
    probe = Probe([[1, 2, 3]], [2], mismatch=1e-7, engine=[-0.1], trainer=[-0.10000001])
    return RunState(step=step, identity={"lora.rank": 8}, cursor={"num_served": step}, probe=probe)


def save(checkpoints: Checkpoints, step: int) -> Path:
    staging = checkpoints.begin(step)
    (staging / "policy").mkdir()
    (staging / "policy" / "weights").write_bytes(b"x" * step)
    return checkpoints.commit(staging, state(step))


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    path = save(checkpoints, 3)
    assert checkpoints.latest() == path == tmp_path / "step-3"
    assert read_state(path) == state(3)


def test_the_oldest_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2, 9, 10):
        save(checkpoints, step)
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.latest().name == "step-10"


def test_one_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    with pytest.raises(CheckpointMissingError, match="start it anew"):
        checkpoints.latest()
    save(checkpoints, 1)
    (checkpoints.begin(2) / "policy").mkdir()
    assert (checkpoints.steps(), checkpoints.latest().name) == ([1], "step-1")
    save(checkpoints, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def test_a_recipe_that_means_something_else_is_refused(recipes: Recipes) -> None:
    recipe = recipes()
    saved = replace(state(1), identity=identity_of(recipe))
    check_identity(saved, recipes(trainer={"num_steps": 9, "learning_rate": 1e-5}))
    with pytest.raises(ResumeError, match=r"lora\.rank must be 8, as in the run that is continued; got 16"):
        check_identity(saved, recipes(lora={"rank": 16}))
    with pytest.raises(ResumeError, match=r"trainer\.seed"):
        check_identity(saved, recipes(trainer={"seed": 1}))
    # alpha scales the saved factors: with another one the same tensors are another policy.
    with pytest.raises(ResumeError, match=r"lora\.alpha"):
        check_identity(saved, recipes(lora={"alpha": 1.0}))
    # The rest decide which row a cursor points at.
    for change in ({"shuffle": False}, {"max_prompt_length": 7}, {"prompt_key": "question"}):
        with pytest.raises(ResumeError, match=rf"data\.{next(iter(change))}"):
            check_identity(saved, recipes(data=change))


def test_one_process_at_a_time_holds_a_run(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(ResumeError, match="must not be in use; another process is training in it"):
        lock(tmp_path)
    held.close()
    lock(tmp_path).close()


def test_the_probe_compares_changes() -> None:
    probe = Probe([[1, 2, 3, 4]], [2], mismatch=1e-3, engine=[-1.0, -2.0], trainer=[-1.001, -2.0])
    assert probe.completions([[-9.0, -1.0, -2.0]]) == [-1.0, -2.0]
    result = compare_changes(probe, engine=[-1.1, -2.2], trainer=[-1.101, -2.2])
    assert result.trainer_change == pytest.approx(0.15) and result.limit == pytest.approx(0.0375)
    assert result.difference == pytest.approx(0.0, abs=1e-12)
    # The engine did not move: as far off as the trainer moved, and refused.
    stuck = compare_changes(probe, engine=[-1.0, -2.0], trainer=[-1.101, -2.2])
    assert stuck.difference == pytest.approx(0.15) and stuck.difference > stuck.limit
    # Nothing moved: the mismatch is the limit.
    assert compare_changes(probe, engine=[-1.0, -2.0], trainer=[-1.001, -2.0]).limit == pytest.approx(2e-3)
    assert not compare_changes(probe, engine=[float("nan"), -2.0], trainer=[-1.0, -2.0]).difference <= 1.0
