"""Settings of every test process and of what it starts."""

import logging
import os

import pytest

# OpenMP's threads spin where they wait for each other. With another process on the same cores that made a file of tests
# take nine minutes instead of 15 seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(autouse=True)
def _warnings_are_seen() -> None:
    """What vLLM's server imports has the root logger and pytest's own handlers let errors through only.

    Tests that look for a warning would depend on their order.
    """
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)
