"""Metric sinks: the JSON Lines record, the tracker that may fail, and values that are not finite."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from inkling_rl import metrics
from inkling_rl.metrics import JsonlSink, Sinks, WandbSink


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_per_step_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log({metrics.REWARD_MEAN: np.float32(0.5), "tokens/generated": torch.tensor(7), "note": "é"}, step=1)
    assert rows(sink.path) == [{"step": 1, "reward/mean": 0.5, "tokens/generated": 7, "note": "é"}]
    sink.close()


def test_a_resumed_run_has_no_step_twice_and_no_torn_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3, 4):
        sink.log({"reward/mean": step / 10}, step)
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 2, "reward/me')
    resumed = JsonlSink(path, resumed_step=2)
    resumed.log({"reward/mean": 0.9}, 3)
    resumed.close()
    assert [(r["step"], r["reward/mean"]) for r in rows(path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_resuming_from_step_zero_starts_the_record_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlSink(path, resumed_step=0).close()
    assert path.read_text() == ""


def test_values_that_are_not_finite_become_null_and_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = Sinks([JsonlSink(tmp_path / "a.jsonl"), JsonlSink(tmp_path / "b.jsonl")])
    with caplog.at_level(logging.WARNING):
        bad = sinks.log({"x": float("nan"), "y": torch.tensor(float("inf")), "z": 1.0, "list": [1.0, float("nan")]}, 5)
    sinks.close()
    assert bad == ("x", "y")
    assert "step 5" in caplog.text and "x = nan" in caplog.text
    for name in ("a", "b"):
        assert rows(tmp_path / f"{name}.jsonl") == [{"step": 5, "x": None, "y": None, "z": 1.0, "list": [1.0, None]}]


def test_names_are_unique_and_documented() -> None:
    names = {k: v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)}
    assert len(set(names.values())) == len(names)
    lines = Path(metrics.__file__).read_text().splitlines()
    for constant in names:
        (definition,) = [line for line in lines if line.startswith(f"{constant} = ")]
        assert len(definition.partition("  # ")[2]) > 5, f"{constant} has no description"


def test_wandb_offline_writes_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = WandbSink("inkling-rl", "a run", "offline", tmp_path, {"seed": 1})
    sink.log({"reward/mean": 0.5, "broken": float("nan")}, step=1)
    sink.close()
    assert "tracker failed" not in caplog.text
    assert [p for p in tmp_path.rglob("*.wandb") if p.stat().st_size > 0]


def test_a_tracker_that_fails_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    sink = WandbSink("inkling-rl", "run", "offline", blocker / "below")  # cannot be created: its parent is a file
    record = JsonlSink(tmp_path / "metrics.jsonl")
    sinks = Sinks([sink, record])
    sinks.log({"reward/mean": 0.5}, 1)
    sinks.log({"reward/mean": 0.6}, 2)
    sinks.close()
    assert [r["step"] for r in rows(record.path)] == [1, 2]
    assert caplog.text.count("logging.wandb: the tracker failed") == 1
