"""Writing a release checkpoint, atomically: a directory appears whole or not at all.

`write_checkpoint` takes finished tensors one by one, each straight to its place on the disk; `export_release` turns the
weights of transformers' `Inkling2ForCausalLM` into them, quantising the experts by each layer's format. Nothing here
chooses numbers: formats do the arithmetic, the layout says what must be written, and a tensor that is missing, extra or
misshapen stops the write before anything is visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.directory import new_directory
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.shards import MAX_SHARD_BYTES, ShardWriter, plan_shards, to_json
from inkling_rl.checkpoint.tensor_file import num_bytes
from inkling_rl.formats import ExpertFormat, mixed


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
        tensors: release name and value, in any order; each is written as it comes and held no longer.
        files: name -> content, written beside (tokenizer files).
        max_shard_bytes: a shard is closed before it would grow beyond this; one tensor may exceed it.

    Raises:
        CheckpointError: the directory is in use, the disk is full, or the tensors are not those that `config` and
            `quant` describe.
    """
    path = Path(path)
    expected = layout.release_tensors(config, quant)
    with new_directory(path, sum(map(num_bytes, expected.values()))) as partial:
        with ShardWriter(partial, expected, plan_shards(expected, max_shard_bytes), str(path)) as shards:
            for name, value in tensors:
                shards.put(name, value)
                del value  # while the next one is made
            shards.finish()
        (partial / "config.json").write_text(to_json(config), encoding="utf-8")
        if quant is not None:
            (partial / "hf_quant_config.json").write_text(to_json(quant), encoding="utf-8")
        for name, content in (files or {}).items():
            assert Path(name).name == name, f"{name} must be a plain file name"
            (partial / name).write_bytes(content.encode() if isinstance(content, str) else content)
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
