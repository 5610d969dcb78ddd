"""What every end-to-end test has in common: it leaves no process behind, however it ends."""

from collections.abc import Iterator

import pytest

from tests.e2e import training


@pytest.fixture(autouse=True)
def _trainings_end_with_their_test() -> Iterator[None]:
    yield
    while training.STARTED:
        training.STARTED.pop().end()
