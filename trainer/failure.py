"""What ended a run, on one screen: the root cause, what to do, and the end of the log of whoever failed.

An exception that reaches the driver often is the last link of a chain: a request failed because the engine is gone, the
engine is gone because its core raised. The first exception in the log of the part that failed is the one to read.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from trainer.engine import EngineError

TAIL_LINES = 15
MAX_LINE = 240

_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)): (.*)$")
# Said by the outer process about the inner one; the inner one's own words come before.
_ECHOES = ("Engine core initialization failed", "EngineCore encountered an issue", "Worker failed with error")
_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\([^)]*\))?\s*(?:\x1b\[[0-9;]*m)*\s*(?:ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] ?"
)

DEAD_CORE = "engine core exited unexpectedly"

ENGINE_LOG = "engine.log"
WORKER_LOG = "trainer.log"


def root_cause(log: str) -> str | None:
    """The first exception in a log that is not an echo of another: `ValueError: ...`."""
    for line in log.splitlines():
        match = _RAISED.search(_PREFIX.sub("", line))
        if match and not any(echo in match.group(2) for echo in _ECHOES):
            return f"{match.group(1)}: {match.group(2)}"
    return None


def advice(cause: str, kv_cache_gib: float | None, max_model_len: int) -> str | None:
    """What to do about causes that have a recipe field."""
    if "memory for kv" in cause:
        return "rollout.kv_cache_gib must fit into the free memory. Lower it, or end other programs"
    if "KV cache" in cause or "kv_cache" in cause or "No available memory for the cache" in cause:
        given = "the default" if kv_cache_gib is None else f"{kv_cache_gib:g}"
        return (
            f"rollout.kv_cache_gib must hold one sequence of rollout.max_model_len = {max_model_len} tokens; "
            f"got {given}. Raise it, or lower the length"
        )
    return None


def explain(
    error: BaseException,
    logs: Path,
    ended_by: str | None = None,
    kv_cache_gib: float | None = None,
    max_model_len: int = 0,
) -> str:
    """The message for whatever ended a run.

    Args:
        error: what reached the driver.
        logs: RUN/logs of this run.
        ended_by: the signal that ended the engine's server, if one did.
        kv_cache_gib, max_model_len: of the recipe, for advice.
    """
    import ray.exceptions

    if isinstance(error, EngineError):
        # Engines that are Ray actors write where the workers do.
        path = logs / ENGINE_LOG if (logs / ENGINE_LOG).is_file() else logs / WORKER_LOG
        log = _read(path)
        cause = root_cause(log)
        parts = [str(error)]
        if cause:
            parts.append(f"cause: {cause[:1000]}")
            if hint := advice(cause, kv_cache_gib, max_model_len):
                parts.append(hint)
        elif ended_by:
            parts.append(f"cause: the engine's server was ended by {ended_by} from outside")
        elif DEAD_CORE in log:
            parts.append(
                "cause: the engine's core process ended without a word: it was killed from outside, often by the "
                "kernel when memory is short. Lower rollout.kv_cache_gib, or free memory"
            )
        return "\n".join([*parts, *_tail(log, path)])
    if isinstance(error, ray.exceptions.RayTaskError):
        inner = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(inner, ValueError):
            return str(inner)
        return "\n".join(["a trainer worker failed", *str(error).splitlines()[-TAIL_LINES:]])
    if isinstance(error, ray.exceptions.RayError):
        log = _read(logs / WORKER_LOG)
        first = str(error).splitlines()[0]
        cause = root_cause(log)
        said = [f"cause: {cause}"] if cause else []
        return "\n".join([f"a trainer worker is gone: {first}", *said, *_tail(log, logs / WORKER_LOG)])
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} must be usable; got: {error.strerror}. Check the path, its permissions and the disk"
    if isinstance(error, ValueError) or type(error).__module__.startswith(("trainer", "rollout", "lora", "inkling_rl")):
        return str(error)
    return "".join(traceback.format_exception(error)[-6:]).rstrip()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _tail(log: str, path: Path) -> list[str]:
    lines = [line[:MAX_LINE] for line in log.splitlines() if line.strip()]
    return [f"--- end of {path} ---", *lines[-TAIL_LINES:]] if lines else [f"({path} is empty)"]
