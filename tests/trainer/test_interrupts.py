"""Signals as an exception: where they come from, while modules are imported, and where Python drops an exception."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from trainer import interrupts
from trainer.interrupts import Interrupted


@pytest.fixture
def hang_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
def test_a_hang_up_ends_a_run_but_not_one_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts.raised():
        interrupts.raise_on_signals()  # as after Ray's start
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    # What one run was told does not hold for the next one in this process.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(Interrupted, match="SIGHUP"), interrupts.raised():
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_signal_waits_while_modules_are_imported() -> None:
    """An exception out of the import of a C++ module would abort the process."""
    reached = False
    with interrupts.raised():
        with pytest.raises(Interrupted, match="SIGINT"), interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            reached = True
        assert reached and interrupts.RECEIVED == [signal.SIGINT]
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)


def press(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # and the handler has run


class Node:
    """Something that a weak reference can be had of."""


def in_a_callback() -> None:
    node = Node()
    reference = weakref.ref(node, press)
    del node
    assert reference() is None


class Dying:
    def __del__(self) -> None:
        press()


def in_a_finaliser() -> None:
    Dying()


@pytest.mark.parametrize("signalled", [in_a_callback, in_a_finaliser])
def test_where_python_drops_the_exception_it_comes_again(
    signalled: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with interrupts.raised():
        with pytest.raises(Interrupted, match="SIGINT"):
            signalled()
            time.sleep(30)
        assert interrupts.RECEIVED == [signal.SIGINT] * 2
    assert capfd.readouterr().err == ""


def test_while_cleaning_up_it_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.raised():
        in_a_callback()
        interrupts.ignore()
        time.sleep(3 * interrupts.AGAIN)
    assert interrupts.RECEIVED == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == ""
