"""Two engines as Ray actors of SkyRL's server group: every version of policy and draft reaches both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inkling_rl.recipe import dump
from tests.e2e.training import RAY_AGENTS, Training, kill_trainer
from tests.trainer.conftest import build_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_engines_as_ray_actors(tmp_path: Path) -> None:
    recipe = build_recipe(
        "builtin:tiny-arithmetic",
        rollout={"placement": "ray", "num_engines": 2, "draft": {"refresh": {"interval": 1}}},
        logging={"runs_dir": str(tmp_path), "run_name": "run"},
    )
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    training = Training(str(tmp_path / "recipe.yaml"))
    console = training.read()
    assert training.process.returncode == 0, console
    training.assert_nothing_is_left()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [0, 1]
    adapter = (tmp_path / "run" / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert rows[-1]["sync/bytes"] > 1.5 * adapter
    assert rows[-1]["mismatch/abs_logprob_diff"] < 1e-5
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert len(re.findall(r"Loaded new LoRA adapter: name 'policy-v2'", log)) == 2
    assert [row["rollout/draft_version"] for row in rows] == [1, 2]
    assert len(re.findall(r"draft version 3 serves now, in place of version 2", log)) == 2


def test_engine_actors_end_with_a_killed_driver(tmp_path: Path) -> None:
    recipe = build_recipe(
        "builtin:tiny-arithmetic",
        rollout={"placement": "ray"},
        trainer={"num_steps": 50},
        logging={"runs_dir": str(tmp_path), "run_name": "run"},
    )
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    training = Training(str(tmp_path / "recipe.yaml"))
    training.read("step 1/50")
    kill_trainer(training)
    training.read()
    training.assert_nothing_is_left(but=RAY_AGENTS)
