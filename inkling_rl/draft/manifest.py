"""`draft.json`: which draft a directory holds, where it came from, and the checksum of every tensor.

It travels with the files from training (`trainer.draft.files` writes it) to the engines that take the draft over. A
draft without it is one that nobody trained here: version 0. torch is imported where a tensor is looked at.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.reader import read_json
from inkling_rl.checkpoint.tensor_file import num_bytes

if TYPE_CHECKING:
    import torch

MANIFEST_FILE = "draft.json"
LAYOUT = "inkling2-dspark-rnn"
"""Tag of what the tensors' names and shapes mean."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What `draft.json` says of one tensor, as it is stored."""

    shape: list[int]
    dtype: str
    sha256: str
    """Of its bytes in the order of its elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorEntry:
        return cls(list(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor))

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.shape), self.dtype)

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A read `draft.json`, without how the draft was made and what it is worth."""

    path: Path
    version: int
    parent_version: int | None
    """Version of the draft that training began with; None where it began with random weights."""

    base_model: str
    """`lora.base.fingerprint` of the target."""

    tensors: Mapping[str, TensorEntry]

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a directory, None where there is none.

        Raises:
            CheckpointError: it cannot be read, or a field is missing or misshapen.
        """
        path = directory / MANIFEST_FILE
        if not path.is_file():
            return None
        content = read_json(path)
        parent, tensors = content.get("parent_version"), content.get("tensors")
        _require(path, "layout", content.get("layout") == LAYOUT, LAYOUT, content.get("layout"))
        _require(path, "version", _is_count(content.get("version")), "a whole number", content.get("version"))
        _require(path, "parent_version", parent is None or _is_count(parent), "a whole number or null", parent)
        base_model = content.get("base_model")
        _require(path, "base_model", isinstance(base_model, str), "a fingerprint", base_model)
        _require(path, "tensors", isinstance(tensors, dict), "a table of tensors", type(tensors).__name__)
        return cls(
            path=path,
            version=content["version"],
            parent_version=parent,
            base_model=content["base_model"],
            tensors={name: _entry(path, name, entry) for name, entry in content["tensors"].items()},
        )

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that identify names and contents of all tensors."""
        return digest({name: entry.sha256 for name, entry in self.tensors.items()})

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(num_bytes(entry.spec) for entry in self.tensors.values())

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor with its checksum.

        Raises:
            CheckpointError: it is not what was written.
        """
        found = checksum(tensor)
        if found != self.tensors[name].sha256:
            raise CheckpointError(
                f"{self.path.parent}: {name} must have the SHA-256 of {self.path.name}, {self.tensors[name].sha256}; "
                f"got {found}. The file is damaged or of another draft: copy it again"
            )


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, wherever and however it lies in memory."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy()).hexdigest()


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum of tensors' names and checksums."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _entry(path: Path, name: str, entry: object) -> TensorEntry:
    key, keys = f"tensors.{name}", {"shape", "dtype", "sha256"}
    _require(path, key, isinstance(entry, dict) and entry.keys() >= keys, "shape, dtype, sha256", entry)
    assert isinstance(entry, dict)
    shape, dtype, sha256 = (entry[name] for name in ("shape", "dtype", "sha256"))
    is_shape = isinstance(shape, list) and all(map(_is_count, shape))
    _require(path, f"{key}.shape", is_shape, "a list of whole numbers", shape)
    _require(path, f"{key}.dtype", isinstance(dtype, str), "the name of a dtype", dtype)
    is_digest = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) is not None
    _require(path, f"{key}.sha256", is_digest, "64 lower-case hexadecimal digits", sha256)
    return TensorEntry(shape, dtype, sha256)


def _require(path: Path, key: str, holds: bool, requirement: str, value: object) -> None:
    if not holds:
        raise CheckpointError(f"{path}: {key} must be {requirement}; got {value!r}. Copy the draft again")
