"""A tiny random checkpoint, written once, and transformers' model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.convert import convert
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only: tests that damage a checkpoint copy it first."""
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny", seed=0)


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Checkpoint:
    return Checkpoint.open(tiny_path)


@pytest.fixture(scope="session")
def export(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only BF16 export of the tiny checkpoint."""
    path = tmp_path_factory.mktemp("convert") / "bf16"
    convert(tiny_path, path, "bf16", check=True)
    return path


@pytest.fixture(scope="session")
def hf_config(tiny: Checkpoint) -> Any:
    from transformers import Inkling2Config

    config = Inkling2Config.from_dict(dict(tiny.config)).text_config
    config._attn_implementation = "eager"
    return config


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    """`[4, 40]`: longer than the window, both bias extents and the floor of the log-length scaling."""
    return torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(1))
