"""The quick start as a user runs it: the held-out score rises, and does not when rewards say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl import arithmetic
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.metrics import ACCEPTANCE_AT, ACCEPTANCE_LENGTH, EVAL_GREEDY_SCORE, EVAL_SCORE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def train(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    """Runs the quick start into `directory/run` and returns the rows of its metrics."""
    settings = [f"logging.runs_dir={directory}", "logging.run_name=run", *overrides]
    command = [sys.executable, "-m", "inkling_rl.cli", "train", "quickstart.yaml"]
    for setting in settings:
        command += ["-s", setting]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.splitlines()[-1].startswith("result: ")
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def scores(rows: list[dict[str, Any]], name: str = EVAL_SCORE) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_the_held_out_score_rises_and_the_adapter_travels(tmp_path: Path) -> None:
    rows = train(tmp_path, "trainer.seed=1")
    held_out = scores(rows)
    assert 0.2 <= held_out[0] <= 0.6
    assert held_out[1] - held_out[0] >= 0.1
    assert held_out[-1] - held_out[0] >= 0.3
    assert scores(rows, EVAL_GREEDY_SCORE)[-1] > scores(rows, EVAL_GREEDY_SCORE)[0]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(s["num_tokens"] for s in samples) / len(samples) >= 20
    assert {s["policy_version"] for s in samples} == set(range(max(s["policy_version"] for s in samples) + 1))
    assert plain_peft_score(tmp_path / "run") > held_out[0] + 0.25


def test_engine_and_trainer_agree_in_bfloat16(tmp_path: Path) -> None:
    # A whole step's tokens: the mean hangs on the few whose experts change by rounding.
    [row] = train(tmp_path, "model.dtype=bfloat16", "trainer.num_steps=1", "data.eval=null", "trainer.seed=2")
    assert row["policy_version"] == 0
    assert 0.0 < row["mismatch/abs_logprob_diff"] < 5e-3


def test_drafted_rollouts_agree_with_the_trainer_and_say_how_well_they_are_drafted(tmp_path: Path) -> None:
    short = ("trainer.num_steps=2", "trainer.train_batch_size=8", "data.eval=null")
    rows = train(tmp_path, "rollout.draft.num_tokens=7", "trainer.seed=3", *short)
    assert rows[0]["mismatch/abs_logprob_diff"] < 1e-5
    accepted = [[row[f"{ACCEPTANCE_AT}{position}"] for position in range(1, 8)] for row in rows[:2]]
    for row, positions in zip(rows, accepted, strict=False):
        assert 3.0 < row[ACCEPTANCE_LENGTH] < 8.0
        assert positions[0] < 1.0 and positions == sorted(positions, reverse=True)
        # vLLM also counts what follows a stop token.
        assert 0.0 <= 1 + sum(positions) - row[ACCEPTANCE_LENGTH] < 1.0


def test_rewards_that_say_nothing_teach_nothing(tmp_path: Path) -> None:
    """In half of the steps; with the real rewards the score rises by 0.2 in a third of them."""
    data = tmp_path / "coin.jsonl"
    rows = [row | {"coin": True} for row in arithmetic.rows("train")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"data.train={data}", "environment.name=tests.e2e.environments:CoinWhereTold")
    held_out = scores(train(tmp_path, *settings, "trainer.num_steps=9", "trainer.eval_interval=9"))
    assert held_out[-1] - held_out[0] < 0.05


def plain_peft_score(run: Path) -> float:
    """Held-out score of the run's last adapter, loaded by PEFT on transformers' model and sampled there."""
    from peft import PeftModel

    from trainer import pretrain

    adapter = max((run / "adapters").iterdir(), key=lambda path: int(path.name.removeprefix("policy-v")))
    base = pretrain.build_model()
    base.load_state_dict(dict(Checkpoint.open("builtin:tiny-arithmetic").iter_hf(torch.float32)))
    return pretrain.score_model(PeftModel.from_pretrained(base, adapter)).score
