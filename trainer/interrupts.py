"""Signals that end a run: Ctrl-C, SIGTERM and a terminal that hangs up, as one exception in the main thread.

    raised()    inside, they raise `Interrupted` wherever the main thread is
    held()      inside that, they wait for the end of a block
    ignore()    from there to the end of `raised`, for cleaning up

Python drops an exception that is raised in a finaliser or in the callback of a weak reference, and prints it. A signal
that came at such a moment is sent again.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IGNORED: set[signal.Signals] = set()
RECEIVED: list[int] = []  # signals that are ending the run, in order
AGAIN = 0.05  # seconds


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP. Not an Exception: nothing between here and there may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def raised() -> Iterator[None]:
    """Inside, the signals that end a program raise `Interrupted` in the main thread, wherever it is."""
    RECEIVED.clear()
    IGNORED.clear()
    before, hook = {number: signal.getsignal(number) for number in SIGNALS}, sys.unraisablehook
    if before[signal.SIGHUP] is signal.SIG_IGN:
        IGNORED.add(signal.SIGHUP)  # nohup: the run is to outlive its terminal
    raise_on_signals()
    timers: list[threading.Timer] = []

    def dropped(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            timers.append(threading.Timer(AGAIN, _send, [unraisable.exc_value.number]))
            timers[-1].start()
        else:
            hook(unraisable)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Inside, those signals wait for the end: out of the import of a C++ module an exception aborts the process."""
    waiting: list[int] = []
    for number in SIGNALS:
        if number not in IGNORED:
            signal.signal(number, lambda received, frame: waiting.append(received))
    try:
        yield
    finally:
        raise_on_signals()
    if waiting:
        _raise(waiting[0], None)


def raise_on_signals() -> None:
    """Also to be called where a library has put handlers of its own in the place of these."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in IGNORED else _raise)


def ignore() -> None:
    """From here to the end of `raised` no signal ends anything but SIGKILL."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: int, frame: Any) -> None:
    RECEIVED.append(number)
    raise Interrupted(number)


def _send(number: int) -> None:
    """To the main thread, so that it comes out of a system call, too."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)
