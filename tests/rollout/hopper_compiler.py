"""Triton as on a Hopper GPU that is not there: it compiles, from tensors on `meta`, and a launch fails."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from rollout.kernels import cuda, triton_conv_mix, triton_decode, triton_prefill

META = torch.device("meta")
_numbers = count(100)


class _Driver:
    """What a launch asks of it before it needs a GPU. Each is a device of its own, for which nothing is compiled."""

    def __init__(self) -> None:
        self._number = next(_numbers)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    patch.setattr(triton.runtime.driver, "_active", _Driver())
    for module in (triton_conv_mix, triton_decode, triton_prefill):
        patch.setattr(module, "_multiprocessors", lambda device: 132)
    patch.setattr(triton_prefill, "_is_hopper", lambda device: True)
    patch.setattr(cuda, "_capability", lambda device: (9, 0))


class Compiler:
    """In the place of Triton's: it notes what it is asked for, and makes nothing of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        """Names of kernels."""

        patch.setattr(triton.compiler, "compile", self)

    def __call__(self, src: Any, target: GPUTarget, options: dict[str, Any], _env_vars: Any = None) -> object:
        assert target.arch == 90
        self.asked.append(src.fn.__name__)
        return object()
