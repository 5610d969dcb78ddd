"""Writing a release checkpoint, atomically: a directory appears whole or not at all.

`write_checkpoint` takes finished tensors one by one and cuts them into shards; `export_release` turns the weights of
transformers' `Inkling2ForCausalLM` into them, quantising the experts by each layer's format. Nothing here chooses
numbers: formats do the arithmetic, the layout says what must be written, and a tensor that is missing, extra or
misshapen stops the write before anything is visible.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.reader import compare
from inkling_rl.formats import ExpertFormat, mixed

MAX_SHARD_BYTES = 5 * 10**9


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    quant: Mapping[str, Any] | None,
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Mapping[str, str | bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write config.json, hf_quant_config.json, shards with their index, and further files.

    Args:
        path: directory that does not exist yet, or is empty.
        config: config.json.
        quant: hf_quant_config.json, or None for experts in the model's dtype.
        tensors: release name and value, in any order; at most one shard of them is held.
        files: name -> content, written beside (tokenizer files).
        max_shard_bytes: a shard is closed before it would grow beyond this; one tensor may exceed it.

    Raises:
        CheckpointError: the directory is in use, or the tensors are not those that `config` and `quant` describe.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} must not exist or be an empty directory; it is in use. Choose another directory")
    expected = layout.release_tensors(config, quant)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had this one's id
    partial.mkdir()
    try:
        shards, found = _write_shards(partial, tensors, max_shard_bytes)
        compare(expected, found, str(path))
        _write_text_files(partial, config, quant, files or {})
        _name_shards(partial, shards, found)
        _sync(partial)
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


def export_release(
    path: str | Path,
    config: Mapping[str, Any],
    quant: Mapping[str, Any] | None,
    state: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    source: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write trained weights as a release checkpoint.

    Args:
        path, config, quant, files, max_shard_bytes: see `write_checkpoint`.
        state: transformers' `Inkling2ForCausalLM` name -> tensor, float32 or bfloat16 (a `state_dict`).
        extra: further tensors under release names, written in the dtype of the config: vision tower, draft.
        source: stored companions (`model.llm.layers.0.mlp.experts.w13_weight_scale`, ...) of the matrices that must
            get their old bytes back, as `Checkpoint.companions` gives them; other matrices get new scales.

    Raises:
        CheckpointError: tensors missing, extra or misshapen. FormatError: weights that a format cannot hold.
    """
    return write_checkpoint(
        path, config, quant, release_items(config, quant, state, extra or {}, source or {}), files, max_shard_bytes
    )


def release_items(
    config: Mapping[str, Any],
    quant: Mapping[str, Any] | None,
    state: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
    source: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Release name and stored tensor, one layer's experts at a time; arguments as in `export_release`."""
    formats = layout.expert_formats(quant, config)
    specs = layout.text_tensors(config)
    known = {layout.hf_name(name) for name in specs}
    if missing := sorted(known - set(state)):
        raise CheckpointError(
            f"state: {missing[0]} must be present; it is missing ({len(missing)} in all). Pass the whole model"
        )
    if unknown := sorted(set(state) - known):
        raise CheckpointError(
            f"state: {unknown[0]} must be a tensor of Inkling2ForCausalLM for this config; it is not "
            f"({len(unknown)} in all). Merge adapters before the export"
        )
    for name, spec in specs.items():
        value = state[layout.hf_name(name)].detach()
        layer = layout.layer_of_experts(name)
        if layer is None:
            yield name, _ordinary(name, value, spec)
        elif name.endswith("w13_weight"):
            w2 = state[layout.hf_name(f"{layout.experts_prefix(layer)}.w2_weight")].detach()
            yield from _experts(layer, value, w2, formats[layer], spec, source)
    for name, value in extra.items():
        yield name, value.to(getattr(torch, str(config.get("dtype") or "bfloat16")))


def _ordinary(name: str, value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if name == f"{layout.TEXT_PREFIX}unembed.weight" and value.shape[0] < spec.shape[0]:
        padding = value.new_zeros(spec.shape[0] - value.shape[0], value.shape[1])
        value = torch.cat([value, padding])
    return value.to(getattr(torch, spec.dtype))


def _experts(
    layer: int,
    gate_up: torch.Tensor,
    w2: torch.Tensor,
    expert_format: ExpertFormat,
    spec: TensorSpec,
    source: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = layout.experts_prefix(layer)
    kept = {name.removeprefix(f"{prefix}."): value for name, value in source.items() if name.startswith(f"{prefix}.")}
    w13 = mixed.interleave(gate_up)
    if expert_format == "bf16":
        dtype = getattr(torch, spec.dtype)
        stored = {"w13_weight": w13.to(dtype), "w2_weight": w2.to(dtype)}
    else:
        stored = mixed.quantize_layer(w13, w2, expert_format, kept or None, name=prefix)
    for suffix, value in stored.items():
        yield f"{prefix}.{suffix}", value


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[list[list[str]], dict[str, TensorSpec]]:
    """Write numbered shards; returns the names in each and the spec of every tensor."""
    shards: list[list[str]] = []
    found: dict[str, TensorSpec] = {}
    pending: dict[str, torch.Tensor] = {}

    def close() -> None:
        save_file(pending, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    size = 0
    for name, value in tensors:
        if name in found:
            raise CheckpointError(f"{name} must be written once; it came twice. Remove one of the two")
        if pending and size + value.nbytes > max_shard_bytes:
            close()
            size = 0
        found[name] = TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        # Own memory: safetensors refuses views that share storage, and a slice would keep its whole parent alive.
        pending[name] = value.detach().to("cpu", copy=True).contiguous()
        size += value.nbytes
    if pending:
        close()
    return shards, found


def _name_shards(directory: Path, shards: list[list[str]], found: Mapping[str, TensorSpec]) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        shard = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}.safetensors").rename(directory / shard)
        # safetensors creates files that only their owner reads; a checkpoint is shared like its config.
        (directory / shard).chmod((directory / "config.json").stat().st_mode)
        weight_map |= dict.fromkeys(names, shard)
    width = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}
    total = sum(torch.Size(spec.shape).numel() * width[spec.dtype] for spec in found.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(_json(index))


def _write_text_files(
    directory: Path, config: Mapping[str, Any], quant: Mapping[str, Any] | None, files: Mapping[str, str | bytes]
) -> None:
    (directory / "config.json").write_text(_json(config))
    if quant is not None:
        (directory / "hf_quant_config.json").write_text(_json(quant))
    for name, content in files.items():
        assert Path(name).name == name, f"{name} must be a plain file name"
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _sync(directory: Path) -> None:
    """Bring the files to the disk before the directory gets its name, so that a power cut leaves no half checkpoint."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
