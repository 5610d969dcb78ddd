"""Builds C++ kernels once per machine and source, and loads them.

Plain C interface through ctypes: no torch headers, so a build takes seconds instead of a minute and does not depend on
torch's version. The cache key is everything the binary depends on: source, flags, compiler and the CPU's instruction
set (`-march=native`). Several processes may start at once: one builds under a file lock, the result appears by rename.

Not a build system: one translation unit per library, no linking of others. What a library does without a compiler is
its user's choice; here it is None after one warning.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

# No contraction to fused multiply-add: bytes and log-probabilities depend on every rounding, see the sources.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
KERNELS_ENV = "INKLING_RL_KERNELS"
CACHE_ENV = "INKLING_RL_CACHE"
BUILD_SECONDS = 300


class BuildError(RuntimeError):
    """Kernels could not be built or loaded; their user falls back to torch."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A shared library made from one folder of C++."""

    name: str
    """Of the file in the cache."""

    main: Path
    """The translation unit; everything beside it in its folder is part of the key."""

    purpose: str
    """What the warning calls it: "The engine's C++ kernels"."""

    consequence: str
    """What the warning says happens without it: "The engine runs on torch instead, about 13 times slower"."""

    flags: tuple[str, ...] = FLAGS

    def load(self) -> ctypes.CDLL | None:
        """The loaded library, or None after one warning when it is switched off or cannot be built."""
        return _load(self)

    def build(self) -> Path:
        """Path of the shared library, built if this machine does not have it yet.

        Raises:
            BuildError: no compiler, or it failed.
        """
        compiler = find_compiler()
        directory = cache_directory()
        target = directory / f"{self.name}-{self._key(compiler)}.so"
        if target.exists():
            return target
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / f"{self.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    self._compile(compiler, target)
        except OSError as error:
            raise BuildError(f"{directory} cannot be written: {error}") from error
        return target

    def _key(self, compiler: str) -> str:
        version = _run([compiler, "-dumpfullversion", "-dumpversion"])
        texts = "".join(path.read_text() for path in sorted(self.main.parent.glob("*.*")))
        parts = (texts, " ".join(self.flags), compiler, version, platform.machine(), _cpu_features())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _compile(self, compiler: str, target: Path) -> None:
        handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            _run([compiler, *self.flags, str(self.main), "-o", name])
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)


@cache
def _load(library: NativeLibrary) -> ctypes.CDLL | None:
    if os.environ.get(KERNELS_ENV) == "torch":
        return None
    try:
        return ctypes.CDLL(str(library.build()))
    except (BuildError, OSError) as error:
        logger.warning(
            "%s are not available (%s). %s. Install g++, or set CXX to a C++17 compiler",
            library.purpose,
            error,
            library.consequence,
        )
        return None


def forget() -> None:
    """Make the next `load` of every library look again (for tests of the environment)."""
    _load.cache_clear()


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


def _cpu_features() -> str:
    """Instruction set of this machine; a shared home directory may be mounted on several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout
