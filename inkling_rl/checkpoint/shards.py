"""Numbered safetensors files with an index, planned before the first byte is written.

Which tensor goes into which file depends on the table of tensors alone, not on the order in which they arrive, so that
equal tensors give equal files. Not a checkpoint: any table of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint.layout import TensorSpec
from inkling_rl.checkpoint.reader import compare
from inkling_rl.checkpoint.tensor_file import TensorFile, TensorFileWriter, num_bytes

MAX_SHARD_BYTES = 5 * 10**9


def plan_shards(
    specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES, like: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Names per file, in the order of the table; a file is closed before it would grow beyond `max_shard_bytes`.

    Args:
        specs: the table.
        max_shard_bytes: one tensor may exceed it.
        like: name -> file of an earlier set; its grouping is taken over if it has the same names.
    """
    if like is not None and set(like) == set(specs):
        groups: dict[str, list[str]] = {file: [] for file in sorted(set(like.values()))}
        for name in specs:
            groups[like[name]].append(name)
        return list(groups.values())
    shards: list[list[str]] = []
    size = 0
    for name, spec in specs.items():
        if not shards or size + num_bytes(spec) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes(spec)
    return shards


class ShardWriter:
    """Writes the files of one plan; every tensor has its place, whole or row by row, in any order.

    A file goes to the disk and is closed as soon as its last row is written. Use as a context manager: leaving it with
    an error closes what is open.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        shards: list[list[str]],
        where: str,
        prefix: str = "model",
    ) -> None:
        self.directory, self.specs, self.where, self.prefix = directory, specs, where, prefix
        self.weight_map: dict[str, str] = {}
        self._files: dict[str, TensorFileWriter] = {}
        for number, names in enumerate(shards):
            file = f"{prefix}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            self._files[file] = TensorFileWriter(directory / file, {name: specs[name] for name in names})
            self.weight_map |= dict.fromkeys(names, file)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.abandon()

    def put(self, name: str, value: torch.Tensor) -> None:
        """Write a whole tensor.

        Raises:
            CheckpointError: no such tensor in the table, another shape or dtype, or it came before.
        """
        spec = TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if name not in self.specs:
            compare(self.specs, dict(self.specs) | {name: spec}, self.where)
        compare({name: self.specs[name]}, {name: spec}, self.where)
        self.put_rows(name, value, 0)

    def put_rows(self, name: str, rows: torch.Tensor, start: int) -> None:
        """Write the next rows (`start` on) of a tensor."""
        file = self._files[self.weight_map[name]]
        file.write(name, rows.detach().to("cpu"), start)
        if file.is_complete:
            file.close()

    def copy_rows(self, name: str, source: TensorFile, start: int, stop: int) -> None:
        """Copy the next rows of a tensor from another file."""
        file = self._files[self.weight_map[name]]
        file.copy(name, source, start, stop)
        if file.is_complete:
            file.close()

    def finish(self) -> None:
        """Close all files and write the index.

        Raises:
            CheckpointError: tensors of the table that never came.
        """
        missing = {name for file in self._files.values() for name in file.incomplete()}
        compare(self.specs, {name: spec for name, spec in self.specs.items() if name not in missing}, self.where)
        for file in self._files.values():
            file.close()
        if not self.specs:
            return
        total = sum(num_bytes(spec) for spec in self.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.weight_map.items()))}
        (self.directory / f"{self.prefix}.safetensors.index.json").write_text(to_json(index), encoding="utf-8")


def to_json(content: Mapping[str, Any]) -> str:
    """As all JSON files of a checkpoint are written."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
