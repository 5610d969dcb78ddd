"""Adapters on disk: PEFT directories (`adapter_config.json`, `adapter_model.safetensors`), written whole or not at all.

What is written here, plain PEFT loads onto transformers' `Inkling2ForCausalLM`, and the engine onto its own model. What
is read is checked against the base model first: an engine that is given a name it does not know serves the base model
and says nothing, so everything that could not be applied exactly is refused by name.

Not here: merging, expert layouts, adapters in memory. PEFT itself is not needed to read or write, nor imported.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lora.schema import (
    FULL_PREFIX,
    PEFT_PREFIX,
    TARGETS,
    TEXT_PREFIX,
    AdapterError,
    Shape,
    check_targets,
    module_pattern,
    plan,
    tensor_names,
    tensor_shapes,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_KEY = "base_model_fingerprint"

# PEFT settings that change what an adapter computes, and the only value of each that the engine can apply.
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


class Adapter(NamedTuple):
    """An adapter that fits its base model.

    `state` maps PEFT names of the text class to float32 tensors: A [rank, in_features], B [out_features, rank].
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_model: str | None
    state: dict[str, torch.Tensor]


def write_adapter(
    directory: str | Path,
    state: Mapping[str, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    base_model: str,
    dropout: float = 0.0,
    fingerprint: str | None = None,
) -> Path:
    """Writes a PEFT directory that appears whole or not at all; an older one of the same name is replaced.

    Args:
        directory: the adapter's directory; its parent is created.
        state: what `lora.model.adapter_state` returns.
        rank, alpha, targets, dropout: as the adapter was made with.
        base_model: path or name of the base, recorded for PEFT and for readers.
        fingerprint: of the base's weights (`lora.base.fingerprint`), recorded so that a reader can tell two bases of
            one shape apart.

    Raises:
        AdapterError: a tensor is missing, does not belong, has another rank, or is not finite.
    """
    names = check_targets(targets)
    _check_written(state, names, rank)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
        "target_modules": module_pattern(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
    metadata = {"format": "pt"} | ({BASE_KEY: fingerprint} if fingerprint else {})
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tensors = {name: value.detach().to("cpu", torch.float32).clone() for name, value in state.items()}
        save_file(tensors, stage / WEIGHTS_FILE, metadata=metadata)
        _sort_metadata(stage / WEIGHTS_FILE)
        (stage / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        os.chmod(stage, 0o755)  # mkdtemp makes it private; an engine may run as another user
        _replace(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return target


def read_adapter(directory: str | Path, config: Mapping[str, Any], *, fingerprint: str | None = None) -> Adapter:
    """Reads a PEFT directory and checks that it fits the base model, name by name and shape by shape.

    Names of the text class (`model.layers.N`) and of the full class (`model.language_model.layers.N`) are accepted.

    Args:
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        config: `config.json` of the base model, as a dictionary.
        fingerprint: of the base's weights; compared where the adapter records one.

    Raises:
        AdapterError: anything that could not be applied exactly; the message names file and key.
    """
    path = Path(directory)
    settings = _read_settings(path)
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    tensors, metadata = _read_tensors(path / WEIGHTS_FILE)
    recorded = metadata.get(BASE_KEY)
    if fingerprint and recorded and recorded != fingerprint:
        raise AdapterError(
            f"{path / WEIGHTS_FILE}: {BASE_KEY} must be that of the base model, {fingerprint[:12]}; got "
            f"{recorded[:12]}, of {settings.get('base_model_name_or_path')}. Serve the adapter on the base it was "
            "trained on"
        )
    modules = plan(config, TARGETS)
    targets = _check_tensors(path / WEIGHTS_FILE, tensors, modules, rank)
    return Adapter(rank, alpha, targets, settings.get("base_model_name_or_path"), tensors)


def _check_written(state: Mapping[str, torch.Tensor], targets: tuple[str, ...], rank: int) -> None:
    suffixes = tuple(TARGETS[name].suffix for name in targets)
    for name, value in state.items():
        module, _, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if not module.endswith(suffixes) or factor not in ("A.weight", "B.weight"):
            raise AdapterError(
                f"{name} must be a factor of a module of lora.targets {list(targets)}. Write the state that "
                "lora.model.adapter_state returns"
            )
        given = value.shape[0 if factor == "A.weight" else 1]
        if given != rank:
            raise AdapterError(
                f"{name} must have rank {rank}; got {given} in shape {tuple(value.shape)}. Check lora.rank"
            )
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            raise AdapterError(f"{name} must be finite; got {bad} values that are not. Lower trainer.learning_rate")
        if not {*tensor_names(module)} <= state.keys():
            raise AdapterError(f"{module} must have both factors; got only {name}. Write the whole adapter state")
    if not state:
        raise AdapterError("an adapter must have tensors; got none. Write the state of a wrapped model")


def _sort_metadata(file: Path) -> None:
    """Equal adapters must be equal bytes; safetensors writes metadata in the order of a randomly seeded hash."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(text) == size, "safetensors writes its header otherwise than compactly"
        stream.seek(8)
        stream.write(text)


def _replace(stage: Path, target: Path) -> None:
    # A directory with files in it cannot be replaced by rename, so an older one steps aside first.
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) if target.exists() else None
    if old:
        os.rename(target, old / target.name)
    os.rename(stage, target)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _read_settings(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    if not file.is_file():
        raise AdapterError(f"{path} must hold {CONFIG_FILE}; it is missing. Give a directory that PEFT wrote")
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise AdapterError(f"{file} must be JSON; got {error}. Write the adapter again") from error
    for key in ("r", "lora_alpha"):
        value = settings.get(key) if isinstance(settings, dict) else None
        if not isinstance(value, int | float) or value <= 0:
            raise AdapterError(f"{file}: {key} must be a number above 0; got {value!r}. Write the adapter again")
    for key, plain in PLAIN_LORA.items():
        if key in settings and settings[key] not in plain:
            raise AdapterError(
                f"{file}: {key} must be {plain[0]!r}; got {settings[key]!r}, which the engine cannot apply. "
                "Train a plain LoRA adapter"
            )
    return dict(settings)


def _read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors as float32 under names of the text class, and the file's metadata."""
    if not file.is_file():
        raise AdapterError(f"{file} must exist; it is missing. Give a directory that PEFT wrote")
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                value = opened.get_tensor(name)
                if not value.dtype.is_floating_point or not bool(torch.isfinite(value).all()):
                    raise AdapterError(f"{file}:{name} must hold finite numbers. Write the adapter again")
                text_name = name.replace(f"{PEFT_PREFIX}{FULL_PREFIX}", f"{PEFT_PREFIX}{TEXT_PREFIX}")
                if text_name in tensors:
                    raise AdapterError(f"{file}:{name} must be given once; got two spellings of it. Keep one of them")
                tensors[text_name] = value.float()
            return tensors, dict(opened.metadata() or {})
    except SafetensorError as error:
        raise AdapterError(f"{file} must be a safetensors file; got {error}. Write the adapter again") from error


def _check_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], modules: Mapping[str, Shape], rank: int
) -> tuple[str, ...]:
    """The targets that the tensors belong to, after checking every name and shape."""
    shapes = tensor_shapes(modules, rank)
    for name, value in tensors.items():
        if name not in shapes:
            raise AdapterError(
                f"{file}:{name} must be a factor of {', '.join(TARGETS)} in one of the model's layers; the base model "
                "has no such module. Use an adapter of this model, with these targets only"
            )
        if tuple(value.shape) != shapes[name]:
            raise AdapterError(
                f"{file}:{name} must have shape {shapes[name]} (rank {rank}); got {tuple(value.shape)}. "
                "Use an adapter of this model, whose adapter_config.json states its rank"
            )
    found = [module for module in modules if set(tensor_names(module)) & tensors.keys()]
    for module in found:
        for name in tensor_names(module):
            if name not in tensors:
                raise AdapterError(f"{file}:{name} must be there beside its other factor. Write the adapter again")
    if not found:
        raise AdapterError(f"{file} must hold tensors; it is empty. Write the adapter again")
    return tuple(name for name, target in TARGETS.items() if any(m.endswith(target.suffix) for m in found))
