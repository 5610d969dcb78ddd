"""Compiles the Triton kernels of many calls at once, on all cores: their compiler's seconds are most of a start.

`triton.AsyncCompileMode` hands compilations to threads, which will do: most of a compilation is passes that leave
Python's lock alone, and assembling is a process. What it does not do, and this does: launch nothing, outlive an error
and an interrupt (it would stay switched on), and say what one waits for.

Not a judge of kernels: what does not compile here fails again, with its reason, when it is launched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from threading import Event, get_ident
from typing import Any

import triton
from triton.runtime.jit import JITFunction

__all__ = ["compile_ahead"]

logger = logging.getLogger(__name__)

MOST_THREADS = 64
"""Beyond, Python's part of the compilations, one at a time, is all of the time."""

PATIENCE = 2.0
"""Seconds, beyond what a cache on disk takes, after which a start says what it waits for."""


def compile_ahead(calls: Iterable[Callable[[], object]], threads: int | None = None) -> None:
    """Compile all kernels that `calls` would launch, and launch none: what they would write is left as it is.

    `calls` are made one after the other, by this thread, so memory that one needs is free for the next. What a call
    raises is raised, what a compilation raises is not. Under Triton's interpreter there is nothing to compile.

    Args:
        threads: that compile; by default one for each core that this process may use.
    """
    if triton.knobs.runtime.interpret:
        return
    threads = threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with _Compilers(threads, thread_name_prefix="compile-ahead") as compilers:
        try:
            # Triton keeps the mode in a context variable, and an exception would leave it there.
            copy_context().run(_compile, calls, compilers)
        except BaseException:
            compilers.stopped.set()
            raise


def _compile(calls: Iterable[Callable[[], object]], compilers: _Compilers) -> None:
    with triton.AsyncCompileMode(compilers, ignore_errors=True), _unlaunched():
        try:
            for call in calls:
                call()
            if waiting := wait(compilers.submitted, timeout=PATIENCE).not_done:
                logger.info("compiling %d kernels on %d threads", len(waiting), compilers.threads)
        except BaseException:
            # The mode waits for all of them.
            compilers.stopped.set()
            raise


class _Compilers(ThreadPoolExecutor):
    """Threads that do nothing more once they are stopped; a cancelled future would be waited for without end."""

    def __init__(self, threads: int, **options: Any) -> None:
        super().__init__(threads, **options)
        self.threads = threads
        self.stopped = Event()
        self.submitted: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def unless_stopped() -> Any:
            if self.stopped.is_set():
                raise CancelledError
            return fn(*arguments, **options)

        future = super().submit(unless_stopped)
        self.submitted.append(future)
        return future


@contextmanager
def _unlaunched() -> Iterator[None]:
    """This thread's launches, of any kernel, end when it is compiled or its compilation is handed over."""
    run, thread = JITFunction.run, get_ident()

    def compile_only(kernel: JITFunction[Any], *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, warmup=warmup or get_ident() == thread, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
