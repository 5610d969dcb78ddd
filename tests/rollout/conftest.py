"""Fixtures shared by the engine's tests: one tiny checkpoint and its oracle for the whole session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inkling_rl.checkpoint.tiny import write_tiny
from tests.rollout.engines import oracle


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engine") / "tiny", seed=1)


@pytest.fixture(scope="session")
def tiny_oracle(tiny_checkpoint: Path) -> Any:
    return oracle(tiny_checkpoint)
