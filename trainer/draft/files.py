"""A trained draft as files: a directory of its own, or a checkpoint with the draft bundled in it.

Both appear whole or not at all, and both hold `draft.json`: the draft's version and that of the draft it was trained
from, the base model that it belongs to, and name, shape, dtype and checksum of every tensor. Reading and checking is
`inkling_rl.draft.checkpoint`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.directory import new_directory
from inkling_rl.checkpoint.layout import TensorSpec
from inkling_rl.checkpoint.reader import INDEX_FILE, Checkpoint
from inkling_rl.checkpoint.shards import ShardWriter, plan_shards, to_json
from inkling_rl.checkpoint.tensor_file import num_bytes
from inkling_rl.draft.checkpoint import check_finite
from inkling_rl.draft.manifest import LAYOUT, MANIFEST_FILE, TensorEntry
from inkling_rl.draft.shape import PREFIX, as_release, standalone_config
from lora.base import fingerprint


def manifest(
    weights: Mapping[str, torch.Tensor],
    target: Checkpoint,
    *,
    version: int,
    parent_version: int | None,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """What `draft.json` says of stored weights.

    Args:
        weights: by the names without prefix, as they are stored.
        target: the base model; its fingerprint is that of adapters.
        version: of this draft.
        parent_version: of the draft whose weights it began with, None where it began with random ones.
        facts: how it was made, and what it is worth.
    """
    tensors = {name: TensorEntry.of(value).as_row() for name, value in sorted(weights.items())}
    return {
        "layout": LAYOUT,
        "version": version,
        "parent_version": parent_version,
        "base_model": fingerprint(target),
        "num_parameters": sum(value.numel() for value in weights.values()),
        "tensors": tensors,
        **facts,
    }


def stored(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights as the files hold them: on the CPU, in the dtype of the config."""
    dtype = getattr(torch, str(config.get("dtype") or "bfloat16"))
    return {name: value.detach().to("cpu", dtype) for name, value in weights.items()}


def write_draft(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], contents: Mapping[str, Any]
) -> Path:
    """Write a directory of the draft's own.

    Args:
        path: does not exist, or is empty.
        config: config.json that describes the draft, in either form.
        weights: as `stored` gives them.
        contents: of `draft.json`.

    Raises:
        CheckpointError: the directory is in use, the disk is full, the weights are not those of `config`, or one of
            them holds NaN or infinity.
    """
    _check_finite(path, weights)
    release = as_release(config)
    dtype = str(release.get("dtype") or "bfloat16")
    specs = {n.removeprefix(PREFIX): TensorSpec(shape, dtype) for n, shape in layout.draft_shapes(release).items()}
    with new_directory(path, sum(map(num_bytes, specs.values()))) as partial:
        with ShardWriter(partial, specs, plan_shards(specs), str(path)) as shards:
            for name, value in weights.items():
                shards.put(name, value)
            shards.finish()
        (partial / "config.json").write_text(to_json(standalone_config(release)), encoding="utf-8")
        (partial / MANIFEST_FILE).write_text(to_json(contents), encoding="utf-8")
    return path


def write_bundled(
    path: Path,
    source: Checkpoint,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    contents: Mapping[str, Any],
) -> Path:
    """Copy a checkpoint with another draft in it; every other tensor and file stays byte for byte as it is.

    Args:
        path, weights, contents: as in `write_draft`.
        source: the checkpoint. Where it has no draft yet, the draft gets a file of its own.
        config: config.json that describes the draft, in either form.

    Raises:
        CheckpointError: as in `write_draft`.
    """
    _check_finite(path, weights)
    draft_keys = {key: value for key, value in as_release(config).items() if key.startswith("dspark_")}
    kept = {key: value for key, value in source.config.items() if not key.startswith("dspark_")}
    bundled = kept | draft_keys
    specs = layout.release_tensors(bundled, source.quant_config)
    # The grouping of the source's files; what is new comes last.
    like = {name: source.shards[name].name if name in source.shards else "~" for name in specs}
    with new_directory(path, sum(map(num_bytes, specs.values()))) as partial:
        with ShardWriter(partial, specs, plan_shards(specs, like=like), str(path)) as shards:
            for name in specs:
                if name.startswith(PREFIX):
                    shards.put(name, weights[name.removeprefix(PREFIX)])
                else:
                    shards.copy_rows(name, source.file(name), 0, source.place(name).num_rows)
            shards.finish()
        (partial / "config.json").write_text(to_json(bundled), encoding="utf-8")
        (partial / MANIFEST_FILE).write_text(to_json(contents), encoding="utf-8")
        written = {INDEX_FILE, "config.json", MANIFEST_FILE, *(file.name for file in source.shards.values())}
        for file in source.path.iterdir():
            if file.is_file() and file.name not in written:
                shutil.copyfile(file, partial / file.name)
    return path


def _check_finite(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    for name, value in weights.items():
        check_finite(path, name, value)
