"""The engine as the driver sees it: a process group that is started, watched, asked for its health and ended.

`EngineProcess` owns one standalone server (`trainer.server`) in a session of its own, so that ending the group ends
every process of it, whatever state they are in. Requests are `trainer.client`'s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inkling_rl.engine_args import DRAFT_ROUTES, UNSET, command_line, engine_environment
from trainer.server import LAUNCHER, SOCKET

HOST = "127.0.0.1"

BASE_MODEL_NAME = "base"
"""What the engine calls the model without an adapter: policy version 0."""

# Beyond what the recipe decides: log-probabilities of the distribution that was sampled from (after the temperature),
# sampling defaults of the request alone, a fixed name for the base, and a way to replace the draft.
SERVER_ARGUMENTS: dict[str, Any] = {
    "served_model_name": [BASE_MODEL_NAME],
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "middleware": [DRAFT_ROUTES],
}


def visible_gpus() -> list[str]:
    """Names of this node's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return [str(number) for number, _ in enumerate(listed.splitlines())]


class EngineError(RuntimeError):
    """The engine did not start, died, hung, or answered with an error. The message says which; its log says why."""


class PublicationError(RuntimeError):
    """A version that is not served as it was trained. The version before it still serves."""


class PortError(ValueError):
    """`rollout.port` cannot be used."""


class EngineProcess:
    """One engine server and everything below it. Starts at once; `wait_until_healthy` says when it can be used."""

    def __init__(
        self, arguments: Mapping[str, Any], *, port: int, log: Path, gpus: Sequence[str] | None = None
    ) -> None:
        """Starts the server.

        Args:
            arguments: vLLM's, by name.
            port: to listen on; 0 picks a free one.
            log: file for everything that the engine's processes say.
            gpus: names of the GPUs it may use; all that this process sees unless given.

        Raises:
            PortError: the port is in use.
        """
        self.log = log
        listener = _listener(port)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        inherited = {key: value for key, value in os.environ.items() if key != UNSET}
        environment = inherited | engine_environment() | {LAUNCHER: str(os.getpid()), SOCKET: str(listener.fileno())}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        line = command_line(dict(arguments) | {"host": HOST, "port": self.port, "disable_uvicorn_access_log": True})
        log.parent.mkdir(parents=True, exist_ok=True)
        with listener, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.server", *line],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ended_by(self) -> str | None:
        """Name of the signal that ended the server, if one did."""
        status = self.process.poll()
        return signal.Signals(-status).name if status is not None and status < 0 else None

    def wait_until_healthy(self, timeout: float) -> None:
        """Returns when the engine answers.

        Raises:
            EngineError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.is_alive():
                raise EngineError(f"the engine must start; its server ended with status {self.process.returncode}")
            if self._answers():
                return
            time.sleep(0.25)
        raise EngineError(
            f"the engine must be healthy within rollout.startup_timeout = {timeout:g} s; it is not. Raise it, or see "
            "the engine's log"
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ask_to_end(self) -> None:
        """Sends the whole group SIGTERM and does not wait; `end` is still due."""
        if group_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def end(self, grace: float = 3.0) -> None:
        """Ends the whole group: asks, waits, kills. Safe to call again, and on a stopped (SIGSTOP) process."""
        for sent, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if not group_members(self.process.pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            _wait_for_group(self.process, wait)
        self.process.wait()


def _wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        process.poll()  # reaps the leader
        if not group_members(process.pid):
            return
        time.sleep(0.05)


def group_members(group: int) -> list[int]:
    """Running processes of a process group. Ended ones that nobody has reaped yet do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(process_group) == group and state not in ("Z", "X"):
            members.append(int(stat.parent.name))
    return members


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A port in TIME_WAIT from the last run is free; one that another process listens on is not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        # At once: until somebody listens, a second run could bind the same port too, and fail a minute later.
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortError(
            f"rollout.port must be a free port; got {port} ({error.strerror}). Set another, or 0 to pick a free one"
        ) from error
    return listener
