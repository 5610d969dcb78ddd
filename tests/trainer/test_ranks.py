"""Two ranks under every ZeRO stage train what one process trains, policy and draft, and restore it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow


def run(world_size: int, stage: int, checkpoint: Path, out: Path) -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out.mkdir()
    command = [sys.executable, "-m", "tests.trainer.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(port), str(stage), str(checkpoint), str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
    return torch.load(out / "result.pt", weights_only=False)


@pytest.fixture(scope="module")
def single(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(1, 0, checkpoint, tmp_path_factory.mktemp("single") / "out")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks_equal_one(single: Any, checkpoint: Path, tmp_path: Path, stage: int) -> None:
    result = run(2, stage, checkpoint, tmp_path / "out")
    assert result["is_restored"]
    for (loss, norm), (expected_loss, expected_norm) in zip(result["steps"], single["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for name, value in result["adapter"].items():
        # AdamW's first steps have the size of the learning rate whatever the gradient: rounding shows where it is 0.
        assert torch.allclose(value, single["adapter"][name], atol=1e-3), name
        assert (value - single["adapter"][name]).abs().mean() < 1e-5, name
    assert result["refreshed"] == pytest.approx(single["refreshed"], rel=2e-3)
    drafts = [torch.load(tmp_path / "out" / f"draft-rank{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(value, drafts[1][name]) for name, value in drafts[0].items())
