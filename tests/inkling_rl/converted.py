"""What the tests of `inkling-rl convert` share: changing checkpoints on the disk and comparing them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint.reader import Checkpoint

W13, W2 = (f"model.llm.layers.3.mlp.experts.{matrix}" for matrix in ("w13_weight", "w2_weight"))
MXFP8_W2 = "model.llm.layers.5.mlp.experts.w2_weight"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def changed(
    path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object], files: str = "model"
) -> Path:
    """A copy of a checkpoint, all its `files` tensors changed in memory and written into one file again."""
    shutil.copytree(path, target)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(target.glob(f"{files}-*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    change(tensors)
    save_file(tensors, target / f"{files}-all.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, f"{files}-all.safetensors")}
    (target / f"{files}.safetensors.index.json").write_text(json.dumps(index))
    return target


def expert_differences(a: Path, b: Path) -> dict[str, list[int]]:
    """Tensor -> experts whose bytes differ, over all tensors of two checkpoints."""
    ours, theirs = Checkpoint.open(a), Checkpoint.open(b)
    assert set(ours.shards) == set(theirs.shards)
    found = {}
    for name in ours.shards:
        x, y = ours.tensor(name), theirs.tensor(name)
        rows = [e for e in range(len(x)) if not raw(x[e]).equal(raw(y[e]))] if x.ndim else []
        if rows or (not x.ndim and x != y):
            found[name] = rows
    return found
