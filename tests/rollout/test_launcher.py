"""A group ends as a whole, and its processes end with their launcher: checked on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout.launcher import end_group, start_group

# A launcher that starts a watching child, which starts a watching grandchild; each writes its pid.
CHILD = """
import os, subprocess, sys, time
from rollout.launcher import watch_launcher
assert watch_launcher() and watch_launcher()
leaf = len(sys.argv) > 2
open(sys.argv[1] + ("/grandchild" if leaf else "/child"), "w").write(str(os.getpid()))
if not leaf:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "leaf"])
time.sleep(60)
"""
LAUNCHER = """
import sys, time
from rollout.launcher import start_group
start_group([sys.executable, sys.argv[1] + "/code.py", sys.argv[1]], {}, None)
time.sleep(60)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder: Path) -> list[int]:
    files = [folder / "child", folder / "grandchild"]
    assert wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_everything_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CHILD)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    processes = pids(tmp_path)
    assert all(is_alive(pid) for pid in processes)
    launcher.send_signal(signal.SIGKILL)  # and not reaped: the watchers must see it all the same
    assert wait_for(lambda: not any(is_alive(pid) for pid in processes), 10)
    launcher.wait()


def test_a_group_ends_with_what_its_leader_left_behind(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CHILD)
    process = start_group([sys.executable, str(tmp_path / "code.py"), str(tmp_path)], {}, subprocess.DEVNULL)
    child, grandchild = pids(tmp_path)
    assert child == process.pid and os.getpgid(grandchild) == child
    os.kill(child, signal.SIGKILL)
    assert end_group(process) == -signal.SIGKILL
    assert wait_for(lambda: not is_alive(grandchild), 10)
