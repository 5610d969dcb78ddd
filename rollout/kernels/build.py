"""The engine's C++ kernels as a library that is built once per machine, see `inkling_rl.native`.

python -m rollout.kernels.build        builds ahead of the first start and prints the file
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from inkling_rl.native import NativeLibrary

SLOWDOWN = 13
KERNELS = NativeLibrary(
    name="inkling2_cpu",
    main=Path(__file__).with_name("cpu") / "interface.cpp",
    purpose="The engine's C++ kernels",
    consequence=f"The engine runs on torch instead, about {SLOWDOWN} times slower",
)


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None after one warning when they are switched off or cannot be built."""
    return KERNELS.load()


def build() -> Path:
    """Path of the shared library, built if this machine does not have it yet.

    Raises:
        inkling_rl.native.BuildError: no compiler, or it failed.
    """
    return KERNELS.build()


if __name__ == "__main__":
    print(build())
