"""One safetensors file: the library's bytes, rows in and out, and every kind of broken file refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint import tensor_file
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.tensor_file import TensorFile, TensorFileWriter


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 3, 4, generator=generator)
    return {
        "z.bf16": wide.bfloat16(),
        "a.f8": wide.to(torch.float8_e4m3fn),
        "m.f32": wide,
        "b.u8": torch.arange(40, dtype=torch.uint8).reshape(5, 8),
        "scalar": torch.tensor(1536.0),
        "i64": torch.arange(3),
        "f64": torch.randn(2, dtype=torch.float64, generator=generator),
        "ünusual": torch.ones(1),
        "empty": torch.zeros(0, 3),
    }


def specs(values: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for name, v in values.items()}


def test_a_file_written_in_rows_is_the_librarys_to_the_byte(tmp_path: Path) -> None:
    values = tensors()
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    writer = TensorFileWriter(tmp_path / "ours", specs(values))
    for start in range(5):  # rows of several tensors in turn
        for name in ("z.bf16", "b.u8"):
            writer.write(name, values[name][start : start + 1], start)
    assert writer.incomplete() and "a.f8" in writer.incomplete()
    for name in values.keys() - {"z.bf16", "b.u8"}:
        writer.write(name, values[name])
    assert writer.is_complete
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(value.equal(values[name]) for name, value in load_file(tmp_path / "ours").items() if "f8" not in name)


def test_rows_are_read_where_they_lie(tmp_path: Path) -> None:
    values = tensors()
    save_file(values, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    assert {name: place.spec for name, place in file.places.items()} == specs(values)
    for name, value in values.items():
        assert (
            file.read(name).view(torch.uint8).equal(value.view(torch.uint8)) if value.ndim else file.read(name) == value
        )
    assert file.read("m.f32", 1, 3).equal(values["m.f32"][1:3]) and file.read("m.f32", 5).shape == (0, 3, 4)
    file.read("m.f32").zero_()
    assert file.read("m.f32").equal(values["m.f32"])


@pytest.mark.parametrize("in_kernel", [True, False])
def test_rows_are_copied_from_file_to_file(in_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "COPY_BYTES", 7)
    if not in_kernel:
        monkeypatch.setattr(tensor_file, "_copy_in_kernel", lambda *_: 0)
    values = tensors()
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    writer, source = TensorFileWriter(tmp_path / "ours", specs(values)), TensorFile(tmp_path / "theirs")
    for name, place in source.places.items():
        for start, stop in place.chunks(48):
            writer.copy(name, source, start, stop)
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_rows_come_once_and_in_order(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / "file", {"x": TensorSpec((4, 2), "float32")})
    writer.write("x", torch.zeros(2, 2))
    for rows, start in ((torch.zeros(2, 2), 0), (torch.zeros(1, 2), 3), (torch.zeros(3, 2), 2)):
        with pytest.raises(CheckpointError, match="x must be written once, its rows in order"):
            writer.write("x", rows, start)
    writer.abandon()


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "a header of 0 bytes"),
        (b"{", b"", "a header of 1 bytes"),
        (b"{not}", b"", "must be a readable safetensors file"),
        (b"[1, 2]", b"", "must be a readable safetensors file"),
        (json.dumps(entry()).encode(), bytes(7), "15 bytes|bytes where the header describes"),
        (json.dumps(entry()).encode(), bytes(9), "bytes where the header describes"),
        (json.dumps(entry(shape=[3])).encode(), bytes(8), r"x of 8 bytes, which are not F32 \[3\]"),
        (json.dumps(entry(data_offsets=[4, 12])).encode(), bytes(12), "gap or overlap"),
        (json.dumps(entry() | {"y": entry()["x"]}).encode(), bytes(8), "gap or overlap"),
        (json.dumps({"x": 1}).encode(), bytes(8), "must be a readable safetensors file"),
    ],
)
def test_a_broken_file_is_refused(header: bytes, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(CheckpointError, match=message) as caught:
        TensorFile(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)


def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as handle:
        handle.truncate(len((tmp_path / "file").read_bytes()) - 10)
    with pytest.raises(CheckpointError, match="must have its full length; it was cut while being read"):
        for name in file.places:
            file.read(name)
