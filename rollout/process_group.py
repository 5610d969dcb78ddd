"""Starting and ending an engine as one process group.

vLLM's API server and its engine core outlive each other: a signal to one leaves the other with the memory and, where it
was forked, the port. So an engine gets a process group of its own, and the whole group is ended. For the case that the
launcher itself is killed, its pid goes into the environment and every engine process watches it
(`rollout.plugin.launcher`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from rollout.plugin.launcher import LAUNCHER_ENV

GRACE_SECONDS = 10.0  # for the engine's own clean-up; requests in flight are aborted, not drained


def start_group(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int | None
) -> subprocess.Popen[bytes]:
    """Starts a program as the leader of a new process group. Its stdout and stderr go to `output`."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment, LAUNCHER_ENV: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_group(process: subprocess.Popen[bytes], grace_seconds: float = GRACE_SECONDS) -> int:
    """Ends the group of `start_group`, first politely, and returns the exit status of its leader."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_seconds)
    # Also when the leader has ended by itself: its children may not have.
    _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(group, number)
