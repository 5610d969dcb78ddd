"""`inkling-rl convert`: every way to fail, what is left behind, memory, and the command."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint import directory, layout, reader, source, tensor_file
from inkling_rl.checkpoint.convert import convert
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.formats.errors import FormatError
from tests.benchmarks.convert_speed import write_release
from tests.inkling_rl.converted import MXFP8_W2, W13, changed, contents

# Bad input


@pytest.mark.parametrize(
    ("to", "layers", "message"),
    [
        ("release", None, "must have experts to convert; all its 6 layers are quantised already"),
        ("bf16", [0, 6], "must name layers 0 to 5; got 6"),
        ("bf16", [], "must name at least one layer"),
    ],
)
def test_nothing_to_convert(to: Any, layers: list[int] | None, message: str, tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_path, tmp_path / "new", to, layers=layers)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_has_its_form_already_is_named(tiny_path: Path, tmp_path: Path) -> None:
    convert(tiny_path, tmp_path / "part", "bf16", layers=[2])
    with pytest.raises(CheckpointError, match=r"layer 2 is BF16 already\. Leave it out"):
        convert(tmp_path / "part", tmp_path / "new", "bf16", layers=[1, 2])
    with pytest.raises(CheckpointError, match="layer 1 is quantised already"):
        convert(tmp_path / "part", tmp_path / "new", "release", layers=[1, 2])


def test_a_place_that_is_taken(tiny_path: Path, export: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="DST must not be SRC"):
        convert(tiny_path, tiny_path / "." / "x" / "..", "bf16")
    before = contents(export)
    with pytest.raises(CheckpointError, match="must not exist or be an empty directory; it is in use"):
        convert(tiny_path, export, "bf16")
    assert contents(export) == before


@pytest.mark.parametrize("companion", ["_scale", "_amax", "_outer_scale_denominator", source.DIGEST])
def test_a_missing_companion_is_named(companion: str, export: Path, tmp_path: Path) -> None:
    path = changed(export, tmp_path / "export", lambda t: t.pop(W13 + companion), files="source_scales")
    with pytest.raises(CheckpointError, match=rf"layers\.3\.mlp\.experts\.w13_weight{companion} must be present"):
        convert(path, tmp_path / "new", "release")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]


def test_missing_files_beside_are_named(export: Path, tmp_path: Path) -> None:
    shutil.copytree(export, tmp_path / "export")
    (tmp_path / "export" / source.SCALES_INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"source_scales\.safetensors must be present; it is missing"):
        convert(tmp_path / "export", tmp_path / "new", "release")


def test_a_denominator_of_another_recipe_is_named(export: Path, tiny_path: Path, tmp_path: Path) -> None:
    key = f"{W13}_outer_scale_denominator"
    for files, source_path, to in (("source_scales", export, "release"), ("model", tiny_path, "bf16")):
        path = changed(source_path, tmp_path / files, lambda t: t.update({key: torch.tensor(1000.0)}), files=files)
        with pytest.raises(CheckpointError, match=r"w13_weight_outer_scale_denominator must be 1536 or 2688; got 1000"):
            convert(path, tmp_path / "new", to)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_bytes", [reader.GROUP_BYTES, 3 * 2**14])
def test_values_that_are_not_finite_are_named(
    group_bytes: int, export: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GROUP_BYTES", group_bytes)

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MXFP8_W2][11, 0, :2] = torch.nan
        tensors[MXFP8_W2][11, 1, 0] = -torch.inf

    path = changed(export, tmp_path / "nan", poison)
    with pytest.raises(FormatError, match=rf"{MXFP8_W2} must be finite; got non-finite values \(expert 11: 3\)"):
        convert(path, tmp_path / "new", "release")
    path = changed(tiny_path, tmp_path / "inf", lambda t: t[f"{W13}_amax"][13].fill_(torch.inf))
    with pytest.raises(FormatError, match=rf"{W13} must be finite; got non-finite values \(expert 13: \d+\)"):
        convert(path, tmp_path / "new", "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inf", "nan"]


def test_names_of_transformers_are_refused(export: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(layout.TEXT_PREFIX)]:
            tensors[layout.hf_name(name)] = tensors.pop(name)

    path = changed(export, tmp_path / "renamed", rename)
    with pytest.raises(CheckpointError, match=r"model\.llm\.embed\.weight must be present; it is missing"):
        convert(path, tmp_path / "new", "release")


# A disk and a process that end too early


def test_a_disk_without_room_is_noticed_first(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(CheckpointError, match=r"must be on a disk with 0\.00\d GB free; got 0\.001 GB"):
        convert(tiny_path, tmp_path / "new", "bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fills_or_fails_while_writing(
    number: int, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def pwrite(descriptor: int, buffer: memoryview, offset: int) -> int:
        nonlocal written
        written += len(buffer)
        if written > 3 * 10**6:
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffer, offset)

    real = os.pwrite
    monkeypatch.setattr(tensor_file.os, "pwrite", pwrite)
    error = CheckpointError if number == errno.ENOSPC else OSError
    with pytest.raises(error, match="the disk is full" if number == errno.ENOSPC else "new"):
        convert(tiny_path, tmp_path / "new", "bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of 73 MB, 234 MB in BF16."""
    return write_release(tmp_path_factory.mktemp("wide") / "release", experts=12)


def started(source_path: Path, target: Path) -> subprocess.Popen[str]:
    """A conversion in a process of its own, in the middle of writing."""
    command = [sys.executable, "-m", "inkling_rl.cli", "convert", str(source_path), str(target), "--to", "bf16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 60
    while not list(target.parent.glob(f".{target.name}.partial-*/model-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    return process


def test_a_killed_conversion_leaves_no_checkpoint_and_the_next_one_clears_up(wide: Path, tmp_path: Path) -> None:
    process = started(wide, tmp_path / "new")
    process.kill()
    process.communicate()
    assert not (tmp_path / "new").exists() and len(list(tmp_path.glob(".new.partial-*"))) == 1
    convert(wide, tmp_path / "new", "bf16")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_ctrl_c_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    process = started(wide, tmp_path / "new")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 2) and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_another_conversion_at_work_is_left_alone(tiny_path: Path, tmp_path: Path) -> None:
    with directory.new_directory(tmp_path / "new") as partial:
        convert(tiny_path, tmp_path / "new", "bf16")
        assert partial.is_dir()
        shutil.rmtree(tmp_path / "new")
        (partial / "file").touch()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]
    with pytest.raises(CheckpointError, match="it is in use"), directory.new_directory(tmp_path / "late"):
        convert(tiny_path, tmp_path / "late", "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["late", "new"]


PEAK = """
import re, sys
from pathlib import Path
from inkling_rl.checkpoint.convert import convert
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
small, wide, target = map(Path, sys.argv[1:])
for number, source in enumerate((small, wide)):
    convert(source, target / f"bf16-{number}", "bf16", check=True)
    convert(target / f"bf16-{number}", target / f"back-{number}", "release", check=True)
    print(peak())
"""


def test_memory_does_not_grow_with_the_checkpoint(tiny_path: Path, wide: Path, tmp_path: Path) -> None:
    """Peak resident size, everything counted, of a process that converts 4 MB and then 234 MB, there and back."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(tiny_path), str(wide), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    small, large = map(float, result.stdout.split())
    assert large - small < 120, (small, large)


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "inkling_rl.cli", "convert", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_command_shows_what_it_does_and_ends_with_one_line(tiny_path: Path, tmp_path: Path) -> None:
    shown = command(str(tiny_path), str(tmp_path / "new"), "--to", "bf16", "--layers", "0-2,5", "--check")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "convert to bf16" in lines[0] and "layer 5 (4/4): mxfp8 -> bf16, 32 expert matrices" in lines[4]
    assert lines[-1].startswith(f"result: {tmp_path / 'new'} (bf16), 0.01 GB in ") and "checked in" in lines[-1]
    again = command(str(tiny_path), str(tmp_path / "new"), "--to", "bf16")
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "it is in use" in again.stderr


def test_a_failed_check_is_status_1(tiny: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{W13}_scale"].view(torch.uint8)[4, 0, 0] = 0
        tensors[W13][4, 0, :8] = 0x77

    foreign = changed(tiny.path, tmp_path / "foreign", change)
    result = command(str(foreign), str(tmp_path / "new"), "--to", "bf16", "--check")
    assert result.returncode == 1 and "check failed: model-" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()
