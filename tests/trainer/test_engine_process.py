"""The handle of an engine: ports, ends, and a server whose launcher is killed before vLLM is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.engine import HOST, EngineError, EngineProcess, PortError, _listener, group_members, visible_gpus


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind((HOST, 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(PortError, match=rf"rollout.port must be a free port; got {port}"):
            EngineProcess({}, port=port, log=tmp_path / "engine.log")
    assert not (tmp_path / "engine.log").exists()


def test_a_port_of_an_engine_that_still_starts_is_busy_too() -> None:
    with _listener(0) as starting, pytest.raises(PortError, match=r"rollout\.port must be a free port"):
        _listener(starting.getsockname()[1])


@pytest.mark.slow  # vLLM's parser comes after vLLM's imports
def test_arguments_that_the_engine_refuses_end_the_wait(tmp_path: Path) -> None:
    engine = EngineProcess({"no_such_argument": 1}, port=0, log=tmp_path / "engine.log")
    try:
        with pytest.raises(EngineError, match="its server ended with status 2"):
            engine.wait_until_healthy(120.0)
        assert "no-such-argument" in engine.log.read_text()
    finally:
        engine.end()
    assert group_members(engine.process.pid) == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ending_reaches_every_process_of_the_group(tmp_path: Path, is_stopped: bool) -> None:
    engine = EngineProcess({}, port=0, log=tmp_path / "engine.log")
    assert engine.process.pid in group_members(engine.process.pid)
    if is_stopped:
        os.killpg(engine.process.pid, signal.SIGSTOP)
    engine.end(grace=0.2)
    assert group_members(engine.process.pid) == []
    assert engine.ended_by in ("SIGTERM", "SIGKILL")
    engine.end()


def test_a_server_ends_with_its_launcher_before_vllm_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from trainer.engine import EngineProcess\n"
        f"engine = EngineProcess({{}}, port=0, log=Path({str(tmp_path / 'engine.log')!r}))\n"
        "print(engine.process.pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    time.sleep(0.5)  # it watches as soon as Python is up
    assert group_members(server)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 15
    while group_members(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_members(server) == []


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
