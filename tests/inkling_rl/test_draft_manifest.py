"""draft.json: read back as written, refused where it is not whole, and checked against every tensor that is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.manifest import MANIFEST_FILE, Manifest, TensorEntry, checksum
from inkling_rl.draft.shape import standalone_config
from trainer.draft.files import manifest, write_bundled, write_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("manifest") / "tiny", seed=5)


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    """The target's draft in a directory of its own, as version 3 after version 2."""
    source = Checkpoint.open(target)
    weights = dict(DraftCheckpoint.open(target, source.config).tensors())
    contents = manifest(weights, source, version=3, parent_version=2, facts={})
    return write_draft(tmp_path / "draft", standalone_config(source.config), weights, contents)


def change(draft: Path, **fields: Any) -> None:
    path = draft / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def entry(**fields: Any) -> dict[str, Any]:
    """A manifest of one tensor, with these fields in place of right ones."""
    return {"tensors": {"norm.weight": {"shape": [128], "dtype": "bfloat16", "sha256": "0" * 64} | fields}}


def test_a_checksum_is_that_of_the_elements_in_order() -> None:
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    expected = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert checksum(values) == checksum(values.T.contiguous().T) == expected
    assert checksum(values) != checksum(values.T.contiguous())
    assert TensorEntry.of(values.bfloat16()).as_row() | {"sha256": ""} == {
        "shape": [2, 3],
        "dtype": "bfloat16",
        "sha256": "",
    }
    assert checksum(torch.tensor(1.0)) == hashlib.sha256(b"\x00\x00\x80\x3f").hexdigest()


def test_an_opened_draft_knows_its_version(target: Path, draft: Path) -> None:
    config = Checkpoint.open(target).config
    opened = DraftCheckpoint.open(draft, config)
    assert opened.version == 3 and opened.manifest is not None
    assert opened.manifest.parent_version == 2
    assert len(dict(opened.tensors())) == len(opened.manifest.tensors) == 31
    # A tiny model's draft was trained by nobody.
    bundled = DraftCheckpoint.open(target, config)
    assert bundled.manifest is None and bundled.version == 0


def test_the_digest_is_that_of_the_tensors_alone(draft: Path) -> None:
    before = Manifest.read(draft)
    change(draft, version=9)
    after = Manifest.read(draft)
    assert before is not None and after is not None and before.digest == after.digest
    tensors = json.loads((draft / MANIFEST_FILE).read_text())["tensors"]
    tensors["norm.weight"]["sha256"] = "0" * 64
    change(draft, tensors=tensors)
    other = Manifest.read(draft)
    assert other is not None and other.digest != before.digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "another"}, "layout must be inkling2-dspark-rnn; got 'another'"),
        ({"version": None}, "version must be a whole number; got None"),
        ({"version": True}, "version must be a whole number; got True"),
        ({"parent_version": "2"}, "parent_version must be a whole number or null; got '2'"),
        ({"base_model": 1}, "base_model must be a fingerprint; got 1"),
        ({"tensors": []}, "tensors must be a table of tensors; got 'list'"),
        ({"tensors": {"norm.weight": {"shape": [1]}}}, "tensors.norm.weight must be shape, dtype, sha256"),
        (entry(shape=5), "tensors.norm.weight.shape must be a list of whole numbers; got 5"),
        (entry(shape=["128"]), r"tensors.norm.weight.shape must be a list of whole numbers; got \['128'\]"),
        (entry(shape=[-1]), r"tensors.norm.weight.shape must be a list of whole numbers; got \[-1\]"),
        (entry(shape=[True]), r"tensors.norm.weight.shape must be a list of whole numbers; got \[True\]"),
        (entry(dtype=16), "tensors.norm.weight.dtype must be the name of a dtype; got 16"),
        (entry(sha256=7), "tensors.norm.weight.sha256 must be 64 lower-case hexadecimal digits; got 7"),
        (entry(sha256="g" * 64), "tensors.norm.weight.sha256 must be 64 lower-case hexadecimal digits; got 'ggg"),
        (entry(sha256="0" * 63), "tensors.norm.weight.sha256 must be 64 lower-case hexadecimal digits; got '000"),
        (entry(sha256="0" * 64 + "\n"), "tensors.norm.weight.sha256 must be 64 lower-case hexadecimal digits"),
    ],
)
def test_a_manifest_that_is_not_whole_is_refused(draft: Path, fields: dict[str, Any], message: str) -> None:
    change(draft, **fields)
    with pytest.raises(CheckpointError, match=message):
        Manifest.read(draft)


def test_a_manifest_of_other_tensors_is_refused_when_the_draft_is_opened(target: Path, draft: Path) -> None:
    config = Checkpoint.open(target).config
    tensors = json.loads((draft / MANIFEST_FILE).read_text())["tensors"]
    for name, entry, message in (
        ("norm.weight", None, "norm.weight must not be present"),
        ("other.weight", tensors["norm.weight"], "other.weight must be present"),
        ("norm.weight", tensors["norm.weight"] | {"shape": [64]}, r"norm.weight must have shape \[64\]; got \[128\]"),
        ("norm.weight", tensors["norm.weight"] | {"dtype": "float32"}, "norm.weight must have dtype float32"),
    ):
        changed = tensors | {name: entry}
        change(draft, tensors={key: value for key, value in changed.items() if value is not None})
        with pytest.raises(CheckpointError, match=message):
            DraftCheckpoint.open(draft, config)


def test_a_flipped_bit_is_found_when_the_tensor_is_read(target: Path, draft: Path) -> None:
    config = Checkpoint.open(target).config
    (file,) = draft.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    opened = DraftCheckpoint.open(draft, config)
    with pytest.raises(CheckpointError, match=r"must have the SHA-256 of draft.json, [0-9a-f]{64}; got [0-9a-f]{64}"):
        dict(opened.tensors())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_draft_that_is_not_finite_is_neither_written_nor_read(target: Path, tmp_path: Path, value: float) -> None:
    """Its checksums are right: they say nothing about what the numbers are."""
    source = Checkpoint.open(target)
    opened = DraftCheckpoint.open(target, source.config)
    weights = dict(opened.tensors())
    weights["markov_head.markov_w2.weight"][3, :2] = value
    contents = manifest(weights, source, version=1, parent_version=0, facts={})
    message = r"markov_head.markov_w2.weight of the draft must hold finite numbers; got 2 of 8192 that are NaN or inf"
    path = tmp_path / "draft"
    for write in (
        lambda: write_draft(path, source.config, weights, contents),
        lambda: write_bundled(path, source, source.config, weights, contents),
    ):
        with pytest.raises(CheckpointError, match=message):
            write()
        assert list(tmp_path.iterdir()) == []
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(standalone_config(source.config)))
    for has_manifest in (False, True):
        if has_manifest:
            (path / MANIFEST_FILE).write_text(json.dumps(contents))
        draft = DraftCheckpoint.open(path, source.config)
        assert (draft.manifest is not None) == has_manifest
        with pytest.raises(CheckpointError, match=f"{path}: {message}"):
            dict(draft.tensors())
