"""Building the C++ kernels: once, safely when several processes start, and never a reason not to start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inkling_rl import native as libraries
from rollout.kernels import build, native, ops, reference


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and no memory of what this process has loaded."""
    forget = (libraries.forget, native.functions.cache_clear, ops.have_native.cache_clear)
    monkeypatch.setenv(libraries.CACHE_ENV, str(tmp_path))
    monkeypatch.delenv(libraries.KERNELS_ENV, raising=False)
    for call in forget:
        call()
    yield tmp_path
    for call in forget:
        call()


def calls_linear() -> bool:
    x, weight = torch.randn(3, 16), torch.randn(5, 16)
    return torch.allclose(ops.linear(x, weight), reference.linear(x, weight), atol=1e-5)


@pytest.mark.skipif(not ops.have_native(), reason="no C++ compiler on this machine")
def test_processes_that_start_together_share_one_build(fresh: Path) -> None:
    command = [sys.executable, "-m", "rollout.kernels.build"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(3)]
    printed = {process.communicate(timeout=120)[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    [built] = (fresh / "kernels").glob("*.so")  # no temporary file is left either
    assert printed == {str(built)}
    before = built.stat().st_mtime_ns
    assert build.build() == built and built.stat().st_mtime_ns == before
    assert ops.have_native() and calls_linear()


def test_without_a_compiler_the_engine_runs_on_torch_and_says_so_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, logger="inkling_rl.native"):
        assert calls_linear() and calls_linear()
    assert not ops.have_native()
    [record] = [r for r in caplog.records if r.name == "inkling_rl.native"]
    assert "no C++ compiler" in record.getMessage() and "times slower" in record.getMessage()


def test_a_failing_compiler_is_reported_and_leaves_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fresh / "broken-cxx"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 1 && exit 0\necho "no such header" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(libraries.BuildError, match="no such header"):
        build.build()
    assert not list((fresh / "kernels").glob("*.so"))
    assert not ops.have_native() and calls_linear()


def test_the_kernels_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.KERNELS_ENV, "torch")
    assert not ops.have_native() and calls_linear()
    assert not (fresh / "kernels").exists()
