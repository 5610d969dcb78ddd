"""Starting and ending an engine as one process group, and engine processes that end when their launcher is gone.

vLLM's API server and its engine core outlive each other: a signal to one leaves the other with the memory and, where it
was forked, the port. So an engine gets a process group of its own, and the whole group is ended. For the case that the
launcher itself is killed, its pid goes into the environment, and every engine process watches it (the plugin starts the
watch).

Departure from `PR_SET_PDEATHSIG`: that one fires when the *thread* that forked ends, which would kill an engine started
from a helper thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from inkling_rl.engine_args import UNSET

LAUNCHER_VARIABLE = "INKLING_RL_LAUNCHER_PID"
GRACE_SECONDS = 10.0  # for the engine's own clean-up; requests in flight are aborted, not drained
EXIT_CODE = 70

_watching = False


def watch_launcher() -> bool:
    """Ends this process as soon as the process named by `INKLING_RL_LAUNCHER_PID` has ended. Safe to call again.

    Returns:
        Whether a launcher is watched: False where the variable is not set, as under a plain `vllm serve`.
    """
    global _watching
    pid = os.environ.get(LAUNCHER_VARIABLE, "")
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    if not _watching:
        _watching = True
        threading.Thread(target=_exit_after, args=(int(pid),), name="launcher-watch", daemon=True).start()
    return True


def start_group(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int | None
) -> subprocess.Popen[bytes]:
    """Starts a program as the leader of a new process group. Its stdout and stderr go to `output`."""
    inherited = {key: value for key, value in os.environ.items() if key != UNSET}
    return subprocess.Popen(
        command,
        env={**inherited, **environment, LAUNCHER_VARIABLE: str(os.getpid())},
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


def _exit_after(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(EXIT_CODE)
    except OSError:
        _poll_until_gone(pid)
        os._exit(EXIT_CODE)
    # Readable when the process has ended, also while nobody has reaped it yet; a reused pid cannot deceive it.
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll():
        pass
    # No clean-up: whoever would wait for it is gone, and a hung engine could not run it.
    os._exit(EXIT_CODE)


def _poll_until_gone(pid: int) -> None:
    """For kernels without pidfd."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except PermissionError:
            pass
        time.sleep(1.0)
