"""The generation service: vLLM's OpenAI server for a checkpoint or a recipe, watched from start to end.

This side checks what can be checked in a second (checkpoint, adapters, port), starts the server as a process group with
its log in a file, waits until it is healthy, says so in one line, and ends the whole group on Ctrl-C. When the engine
dies, its root cause is printed and not the hundred lines around it.

Not here: the server itself (`rollout.api_server`) and the trainer's engine (`trainer.server`). Nothing imports vLLM.
"""

from __future__ import annotations

import re
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.engine_args import (
    DRAFT_ROUTES,
    check_memory,
    command_line,
    engine_arguments,
    engine_environment,
    served_rank,
    serving_arguments,
)
from inkling_rl.recipe import Recipe
from rollout.launcher import end_group, start_group

STARTUP_SECONDS = 600.0
TAIL_LINES = 20
CHAT_ARGUMENTS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    # vLLM's own parsers for the wire format of Inkling 1, which Inkling 2 keeps; they find our special tokens by name.
    "tool_call_parser": "inkling",
    "reasoning_parser": "inkling",
    "middleware": [DRAFT_ROUTES],
}


class ServiceError(ValueError):
    """The service cannot start, or its engine has failed. The message is complete."""


def service_arguments(
    checkpoint: Checkpoint,
    recipe: Recipe | None = None,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """vLLM server arguments: the engine's, those of the chat format, the adapters; `extra` is merged last.

    Raises:
        AdapterError: an adapter does not fit the checkpoint.
    """
    from lora.base import fingerprint
    from lora.files import read_adapter

    base = fingerprint(checkpoint) if adapters else None
    ranks = [read_adapter(path, checkpoint.config, fingerprint=base).rank for path in (adapters or {}).values()]
    model = str(checkpoint.path)
    if recipe:
        arguments = engine_arguments(recipe, model=model)
        # A service takes adapters of other runs too, with other targets.
        del arguments["lora_target_modules"]
        arguments["max_lora_rank"] = served_rank(max([recipe.lora.rank, *ranks]))
        # The effort of the run is the default of its service; a request may ask for another one.
        arguments["default_chat_template_kwargs"] = {"reasoning_effort": recipe.rollout.effort}
    else:
        arguments = serving_arguments(model, max_lora_rank=max([64, *ranks]))
    arguments |= CHAT_ARGUMENTS | {"served_model_name": [recipe.model.path if recipe else checkpoint.path.name]}
    if not (checkpoint.path / "chat_template.jinja").exists():
        arguments["chat_template"] = str(files("inkling_rl").joinpath("chat_template.jinja"))
    if adapters:
        arguments["lora_modules"] = [f"{name}={Path(path).absolute()}" for name, path in adapters.items()]
        arguments["max_loras"] = max(arguments["max_loras"], len(adapters))
    return arguments | dict(extra or {})


def serve(
    model_path: str,
    recipe: Recipe | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    adapters: Mapping[str, str | Path] | None = None,
    extra: Mapping[str, Any] | None = None,
    log: Path | None = None,
) -> None:
    """Serves until Ctrl-C or SIGTERM. Leaves no process behind, whatever happens.

    Args:
        model_path: checkpoint directory or `builtin:NAME`.
        recipe: engine settings, effort and seed are taken from it.
        host, port: address to listen on; port 0 picks a free one.
        adapters: served model name -> PEFT directory; more can be loaded at run time (`/v1/load_lora_adapter`).
        extra: further vLLM arguments, merged last.
        log: file for vLLM's own output; a temporary one unless given.

    Raises:
        ServiceError: the port is taken, or the engine did not start or has stopped.
        EngineArgumentError: the KV cache does not fit the memory that is free.
        CheckpointError, AdapterError: what is to be served cannot be.
    """
    checkpoint = Checkpoint.open(model_path)
    checkpoint.check()
    arguments = service_arguments(checkpoint, recipe, adapters=adapters, extra=extra)
    check_memory(arguments)
    port = free_port(host, port)
    line = command_line(arguments | {"host": host, "port": port})
    log = log or Path(tempfile.gettempdir()) / f"inkling-rl-serve-{port}.log"
    # SIGINT as well: a shell starts background programs with it ignored, and Python then leaves it so.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with log.open("wb") as output:
            _say(f"starting the engine for {checkpoint.path} (log: {log})")
            process = start_group([sys.executable, "-m", "rollout.api_server", *line], engine_environment(), output)
            try:
                started = time.monotonic()
                _wait_until_healthy(process, f"http://{_reachable(host)}:{port}", log, recipe)
                names = ", ".join([arguments["served_model_name"][0], *(adapters or {})])
                seconds = time.monotonic() - started
                _say(f"serving {names} at http://{host}:{port}/v1 after {seconds:.0f} s; Ctrl-C ends it")
                status = process.wait()
                raise ServiceError(f"the engine must keep running; it ended with status {status}. {root_cause(log)}")
            except KeyboardInterrupt:
                _say("ending the engine")
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would stop the ending half-way
                end_group(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, or a free one for 0.

    Raises:
        ServiceError: it is in use, or not ours to use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                f"port must be free on {host}; got {port} ({error.strerror}). Take another one, or 0 for any"
            ) from error
        return int(probe.getsockname()[1])


# A line of an exception at the end of a traceback, behind vLLM's prefixes of process and logger.
_EXCEPTION = re.compile(
    r"^(?:\([\w ]+pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?(?P<error>[\w.]*(?:Error|Exception)\b.*)$"
)
HINTS = {
    "cache blocks": "Raise rollout.kv_cache_gib. ",
    "kv cache": "Raise rollout.kv_cache_gib or lower rollout.max_model_len. ",
    "memory for kv": "Lower rollout.kv_cache_gib. ",
    "address already in use": "Take another port. ",
}
_CONSEQUENCES = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")


def root_cause(log: Path) -> str:
    """The first exception in an engine's log that is not the consequence of another, or the log's last lines."""
    lines = log.read_text(errors="replace").splitlines()
    found = [match["error"] for line in lines if (match := _EXCEPTION.match(line))]
    causes = [error for error in found if not any(mark in error for mark in _CONSEQUENCES)]
    if not causes:
        return "The end of its log:\n" + "\n".join(lines[-TAIL_LINES:])
    hint = next((hint for mark, hint in HINTS.items() if mark in causes[0].lower()), "")
    return f"Root cause: {causes[0].rstrip('.')}. {hint}The log is {log}"


def _wait_until_healthy(process: Any, url: str, log: Path, recipe: Recipe | None) -> None:
    limit = recipe.rollout.startup_timeout if recipe else STARTUP_SECONDS
    end = time.monotonic() + limit
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        if time.monotonic() > end:
            raise ServiceError(
                f"the engine must be healthy within rollout.startup_timeout = {limit:.0f} s; it is not. Raise it or "
                f"read {log}. {root_cause(log)}"
            )
    raise ServiceError(f"the engine must start; it ended with status {process.returncode}. {root_cause(log)}")


def _reachable(host: str) -> str:
    """An address under which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
