"""Builds the C++ kernels once per machine and source, and loads them.

Plain C interface through ctypes: no torch headers, so a build takes seconds instead of a minute and does not depend on
torch's version. The cache key is everything the binary depends on: source, flags, compiler and the CPU's instruction
set (`-march=native`). Several processes may start at once: one builds under a file lock, the result appears by rename.

    python -m rollout.kernels.build        builds ahead of the first start and prints the file
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("cpu")
MAIN = SOURCES / "interface.cpp"
# No contraction to fused multiply-add: the compiler would do it in one tile and not in another, see the source.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
KERNELS_ENV = "INKLING_RL_KERNELS"
CACHE_ENV = "INKLING_RL_CACHE"
SLOWDOWN = 13
BUILD_SECONDS = 300


class BuildError(RuntimeError):
    """The kernels could not be built or loaded; the engine falls back to torch."""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None after one warning when they are switched off or cannot be built."""
    if os.environ.get(KERNELS_ENV) == "torch":
        return None
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logger.warning(
            "The engine's C++ kernels are not available (%s). It runs on torch instead, about %d times slower. "
            "Install g++, or set CXX to a C++17 compiler",
            error,
            SLOWDOWN,
        )
        return None


def build() -> Path:
    """Path of the shared library, built if this machine does not have it yet.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    directory = cache_directory()
    target = directory / f"inkling2_cpu-{_key(compiler)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error}") from error
    return target


def find_compiler() -> str:
    """The C++ compiler: CXX, or the first usual name on the path."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C++ compiler: neither CXX nor g++ nor c++ is on the path")


def cache_directory() -> Path:
    """Where built kernels are kept: INKLING_RL_CACHE, or the user's cache directory."""
    root = os.environ.get(CACHE_ENV)
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inkling-rl" / "kernels"


def _key(compiler: str) -> str:
    version = _run([compiler, "-dumpfullversion", "-dumpversion"])
    texts = "".join(path.read_text() for path in sorted(SOURCES.glob("*.*")))
    parts = (texts, " ".join(FLAGS), compiler, version, platform.machine(), _cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Instruction set of this machine; a shared home directory may be mounted on several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        _run([compiler, *FLAGS, str(MAIN), "-o", name])
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


if __name__ == "__main__":
    print(build())
