"""A training in a process of its own, as a user starts it, and what can happen to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

# Metrics that measure time, or the moment.
CLOCKS = (
    "timing/",
    "time/",
    "tokens/per_second",
    "sync/seconds",
    "draft/sync_seconds",
    "trajectory_time",
    "tokens_per_second",
)

# After the end of a driver that was killed they try for a minute to report it to a server that is gone, and then end.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")

STARTED: list[Training] = []


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
        STARTED.append(self)
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

    def end(self) -> None:
        """Whatever is left of it, where a test failed or was interrupted."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
        for pid, _, _ in processes():
            if self.mark in _environment(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def engine_processes(self) -> list[int]:
        return [pid for pid, group, _ in processes() if group == self.engine]

    def assert_nothing_is_left(self, but: tuple[str, ...] = ()) -> None:
        """Neither engine nor trainer nor Ray, `but` perhaps processes whose names begin so."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            left = [(pid, name) for pid, _, name in processes() if self.mark in _environment(pid)]
            left = [(pid, name) for pid, name in left if not name.startswith(but)]
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
