"""Root causes are found in logs, and every kind of end gets a message that fits a screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.engine import EngineError
from trainer.failure import ENGINE_LOG, explain, root_cause

DYING = """INFO 11-29 18:33:00 [core.py:1] starting
(EngineCore pid=22) ERROR 11-29 18:33:00 [core.py:1368] Traceback (most recent call last):
(EngineCore pid=22) ERROR 11-29 18:33:00 [core.py:1368]   File "core.py", line 1352, in run_engine_core
(EngineCore pid=22) ERROR 11-29 18:33:00 [core.py:1368] ValueError: To serve at least one request, KV cache is too small
ERROR 11-29 18:33:00 [async_llm.py:843] Traceback (most recent call last):
ERROR 11-29 18:33:00 [async_llm.py:843] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (DYING, "ValueError: To serve at least one request, KV cache is too small"),
        ("all is well\n", None),
        ("a.b.CheckpointError: x must be y\n", "a.b.CheckpointError: x must be y"),
        ("\x1b[31m(EngineCore pid=2)\x1b[0m ERROR 11-29 18:33:00 [c.py:1] KeyError: 'k'\n", "KeyError: 'k'"),
        ("INFO 11-29 18:33:00 [x.py:1] no Errors: 0\n", None),
    ],
)
def test_the_first_exception_that_is_no_echo_is_the_cause(log: str, cause: str | None) -> None:
    assert root_cause(log) == cause


def test_an_engine_without_memory(tmp_path: Path) -> None:
    (tmp_path / ENGINE_LOG).write_text(DYING)
    message = explain(EngineError("the engine must start"), tmp_path, kv_cache_gib=0.001, max_model_len=4096)
    lines = message.splitlines()
    assert lines[:2] == [
        "the engine must start",
        "cause: ValueError: To serve at least one request, KV cache is too small",
    ]
    assert "rollout.kv_cache_gib must hold one sequence of rollout.max_model_len = 4096 tokens; got 0.001" in lines[2]
    assert lines[-1].startswith("RuntimeError") and len(lines) < 25


def test_a_cache_larger_than_the_memory(tmp_path: Path) -> None:
    log = "ValueError: Available memory on node 0 (15.4/23.5 GiB) is less than requested memory for kv (500.0 GiB).\n"
    (tmp_path / ENGINE_LOG).write_text(log)
    message = explain(EngineError("the engine must start"), tmp_path, kv_cache_gib=500.0, max_model_len=64)
    assert "rollout.kv_cache_gib must fit into the free memory. Lower it" in message


def test_an_engine_that_was_killed(tmp_path: Path) -> None:
    assert "ended by SIGKILL from outside" in explain(EngineError("x"), tmp_path, ended_by="SIGKILL")
    (tmp_path / ENGINE_LOG).write_text("engine core exited unexpectedly\n")
    assert "ended without a word" in explain(EngineError("x"), tmp_path)


def test_errors_of_users_and_of_ours(tmp_path: Path) -> None:
    import ray.exceptions

    assert explain(ValueError("data.train must be x; got y. Do z"), tmp_path) == "data.train must be x; got y. Do z"
    try:
        {}["missing"]
    except KeyError as error:
        assert "KeyError: 'missing'" in explain(error, tmp_path) and "test_failure.py" in explain(error, tmp_path)
    inner = ray.exceptions.RayTaskError("init_model", "remote traceback", ValueError("lora.rank must be 8; got 9"))
    assert explain(inner, tmp_path) == "lora.rank must be 8; got 9"
    try:
        (tmp_path / "absent" / "file").write_text("")
    except OSError as error:
        assert "absent/file must be usable; got: No such file or directory" in explain(error, tmp_path)
    gone = ray.exceptions.ActorDiedError()
    assert explain(gone, tmp_path).startswith("a trainer worker is gone: ")
