"""Compiles the Triton kernels of many calls at once, on all cores: their compiler's seconds are most of a test's time.

The passes of Triton's compiler leave Python's lock alone, so threads will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def compile_ahead(kernels: Iterable[JITFunction], calls: Iterable[Callable[[], object]]) -> None:
    """Compile what `calls` would launch of `kernels`, and launch none of it: what they would write is left as it is."""
    with ThreadPoolExecutor(os.cpu_count()) as executor, triton.AsyncCompileMode(executor), _unlaunched(kernels):
        for call in calls:
            call()


@contextmanager
def _unlaunched(kernels: Iterable[JITFunction]) -> Iterator[None]:
    kernels = list(kernels)
    for kernel in kernels:
        run = kernel.run

        def compile_only(*args: Any, warmup: bool, run: Callable[..., object] = run, **options: Any) -> None:
            run(*args, warmup=True, **options)

        kernel.run = compile_only
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run
