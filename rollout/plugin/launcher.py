"""Ends an engine process when the process that launched it is gone.

A killed trainer cannot stop its engine, and vLLM's engine core outlives its API server, holding memory and a port. Every
process of an engine therefore watches the launcher's pid itself; the environment reaches spawned children.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

LAUNCHER_ENV = "INKLING_RL_LAUNCHER_PID"
POLL_SECONDS = 1.0
EXIT_CODE = 70

_watcher: threading.Thread | None = None


def watch() -> None:
    """Start the watching thread once, if the environment names a launcher."""
    global _watcher
    pid = _launcher_pid()
    if pid is None or is_watching():
        return
    _watcher = threading.Thread(target=_end_with, args=(pid, _start_time(pid)), name="launcher-watch", daemon=True)
    _watcher.start()


def is_watching() -> bool:
    """Whether the watch runs, or is not asked for."""
    return _launcher_pid() is None or (_watcher is not None and _watcher.is_alive())


def _launcher_pid() -> int | None:
    value = os.environ.get(LAUNCHER_ENV, "")
    return int(value) if value.isdigit() and int(value) != os.getpid() else None


def _start_time(pid: int) -> str | None:
    """Clock tick at which a process started, None if it is gone; tells a pid from its later reuse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not noticed yet.
    return None if fields[0] in ("Z", "X") else fields[19]


def _end_with(pid: int, started: str | None) -> None:
    while started is not None and _start_time(pid) == started:
        time.sleep(POLL_SECONDS)
    print(f"launcher {pid} is gone: ending engine process {os.getpid()}", file=sys.stderr, flush=True)
    # No clean-up: whoever would wait for it is gone, and a hung engine could not run it.
    os._exit(EXIT_CODE)
