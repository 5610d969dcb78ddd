"""Environments through skyrl_gym itself: registration, one episode, metrics, and failures that say what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.metrics import aggregate_for_environment

from inkling_rl.chat import CONTENT_TEXT, END_MESSAGE
from rollout.envs import EnvironmentFailedError, EnvironmentNameError, register_environments

HERE = "tests.rollout.test_envs"


class CountingEnv(BaseTextEnv):
    """A user's environment: two turns, settings from the recipe, its own aggregation."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.bonus = env_config["bonus"]

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        if action == "boom":
            raise KeyError("no such tool")
        reward = float(action) if action else self.bonus
        return {
            "observations": [{"role": "user", "content": "go on"}],
            "reward": reward,
            "done": self.turns == 2,
            "metadata": {},
        }

    def get_metrics(self) -> dict[str, float]:
        return {"turns": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {"max_turns": max(m["turns"] for m in metrics)}


class FailingAtTheEnd(CountingEnv):
    def get_metrics(self) -> dict[str, float]:
        raise KeyError("no metrics")

    def close(self) -> None:
        raise OSError("sandbox is gone")


def make(name: str, row: dict[str, Any], args: dict[str, Any] | None = None) -> Any:
    assert register_environments(name, args) == name
    return skyrl_gym.make(name, env_config={}, extras=row)


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("arithmetic", {"answer": "933"}, f"{CONTENT_TEXT}933{END_MESSAGE}", f"{CONTENT_TEXT}93{END_MESSAGE}"),
        ("arithmetic", {"reward_spec": {"ground_truth": 933}}, "933", "none"),
        ("gsm8k", {"answer": "2+2 = 4\n#### 4"}, "so it is 4", r"\boxed{5}"),
    ],
)
def test_an_episode_ends_with_one_completion(name: str, row: dict[str, Any], right: str, wrong: str) -> None:
    prompt = [{"role": "user", "content": "?"}]
    metrics = []
    for completion, expected in ((right, 1.0), (wrong, 0.0), ("\x00\ufffd", 0.0), ("", 0.0)):
        env = make(name, row)
        assert env.init(prompt) == (prompt, {})
        output = env.step(completion)
        assert (output["reward"], output["done"], output["observations"]) == (expected, True, [])
        assert output["metadata"] == env.get_metrics()
        metrics.append(env.get_metrics())
    assert aggregate_for_environment(name, metrics)["correct"] == 0.25


def test_a_users_class_gets_its_arguments_and_keeps_its_methods() -> None:
    name = f"{HERE}:CountingEnv"
    env = make(name, {"answer": 1}, {"bonus": 0.5})
    assert env.step("")["reward"] == 0.5 and env.step("")["done"]
    assert aggregate_for_environment(name, [env.get_metrics()]) == {"max_turns": 2}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("boom", "KeyError: 'no such tool'"),
        ("nan", "reward must be a finite number; got nan"),
        ("x", "could not convert"),
    ],
)
def test_a_failure_names_environment_row_and_line(action: str, message: str) -> None:
    env = make(f"{HERE}:CountingEnv", {"answer": 7, "row": 41}, {"bonus": 1})
    with pytest.raises(EnvironmentFailedError) as caught:
        env.step(action)
    text = str(caught.value)
    assert message in text and '"row": 41' in text and f"completion: {action!r}" in text
    assert "Traceback" in text and ("test_envs.py" in text) == (action != "nan")


@pytest.mark.parametrize(("method", "message"), [("get_metrics", "no metrics"), ("close", "sandbox is gone")])
def test_failures_after_the_last_step_are_named_too(method: str, message: str) -> None:
    env = make(f"{HERE}:FailingAtTheEnd", {"answer": 7, "row": 41}, {"bonus": 1})
    with pytest.raises(EnvironmentFailedError, match=rf"(?s){method} must not raise; got .*{message}.*\"row\": 41"):
        getattr(env, method)()


def test_a_row_without_an_answer_fails_with_the_row() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"must have a column `answer`.*got the columns \['question'\]"):
        make("arithmetic", {"question": "1+1"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", "must be one of arithmetic, gsm8k or package.module:Class; got 'arithmetics'"),
        ("no.such.module:Env", "must be an importable package.module:Class"),
        (f"{HERE}:Nothing", "must be an importable package.module:Class"),
        (f"{HERE}:make", "must be a subclass of skyrl_gym's BaseTextEnv"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, message: str) -> None:
    with pytest.raises(EnvironmentNameError, match=message):
        register_environments(name)


def test_a_module_that_raises_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_env.py").write_text("limit = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentNameError, match=r"(?s)'broken_env:Env' \(ZeroDivisionError.*broken_env\.py.*line 1"):
        register_environments("broken_env:Env")
