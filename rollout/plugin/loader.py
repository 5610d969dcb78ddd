"""From the tensors of a checkpoint, under release or transformers names, to the parameters of the model.

Not a reader: vLLM's loaders, a live reload or a weight transfer deliver (name, tensor) pairs in any order. Everything
is accounted for: a text tensor that is missing, unknown or misshapen is an error, as is a quantised expert tensor
without its companions; vision and draft tensors are skipped because this model has neither. Every write goes through
the parameter's `weight_loader`: vLLM's live reload replaces that function and would not see a direct copy.

Quantised experts are dequantised matrix by matrix where the model has them so. Where it keeps them as Marlin's tensors,
a layer's are converted once both matrices and all companions are there, on the model's device, one matrix after the
other and some experts at a time, so that beside the model it holds less than one layer. Marlin's own tensors, under
the parameters' names, are copied as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.conversion import default_formats
from inkling_rl.checkpoint.layout import TEXT_PREFIX, CheckpointError, hf_name
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.formats import ExpertFormat, marlin
from inkling_rl.formats.mixed import MATRICES, companions, deinterleave, dequantize_matrix, stored_format

SKIPPED_PREFIXES = ("model.visual.", "model.vision_tower.", "model.dspark.")
_EXPERT = re.compile(
    r"(?P<prefix>model\.llm\.layers\.\d+\.mlp\.experts)\.(?P<matrix>w13_weight|w2_weight)(?P<rest>\w*)"
)


class Kept(NamedTuple):
    """A layer's experts that are not dequantised: their module's name, format and device."""

    module: str
    expert_format: ExpertFormat
    device: torch.device


def expert_formats(vllm_config: Any) -> list[ExpertFormat]:
    """How the experts of each layer are stored in the model that is about to be built, by its hf_quant_config.json.

    Dummy weights without that file have the release's pattern.

    Raises:
        CheckpointError: an unknown algorithm or group size, or an entry that is no layer's experts.
    """
    model = vllm_config.model_config
    num_layers = model.hf_text_config.num_hidden_layers
    quant = get_hf_file_to_dict("hf_quant_config.json", model.model, model.revision)
    if quant is None and vllm_config.load_config.load_format == "dummy":
        return default_formats(num_layers)
    return layout.expert_formats(quant, {"num_hidden_layers": num_layers})


def check_source(path: str, load_format: str) -> None:
    """Compare a release checkpoint's files with what its configuration asks for, before anything is read.

    Names and shapes alone are checked again while loading; here the dtypes, the format tags of hf_quant_config.json and
    the scale denominators are, and the message can name the file. Other sources (transformers' names, dummy weights,
    a hub name) are left to `load`. For dummy weights this is where vLLM's loader of them is told about this model.

    Raises:
        CheckpointError: the first difference.
    """
    if load_format == "dummy":
        from rollout.plugin import dummy

        dummy.install()
    if load_format not in ("auto", "hf", "safetensors") or not Path(path, "config.json").is_file():
        return
    checkpoint = Checkpoint.open(path)
    if any(name.startswith(TEXT_PREFIX) for name in checkpoint.shards):
        checkpoint.check()


def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Write every tensor into the model and return the names of the parameters written.

    The first call must bring the whole model; later ones (live updates) may bring parts, of quantised experts that the
    model keeps so whole layers.

    Raises:
        CheckpointError: a missing, unknown or misshapen tensor.
        FormatError: expert codes without their companions, or with a denominator of another recipe.
    """
    # A LoRA wrapper puts `base_layer` between a projection and its weight; checkpoints never have it.
    parameters = {name.replace(".base_layer.", "."): (name, value) for name, value in model.named_parameters()}
    written: set[str] = set()
    with torch.no_grad():
        for name, tensor in text_weights(weights, next(model.parameters()).dtype, kept_layers(model)):
            if name not in parameters:
                raise CheckpointError(
                    f"{name} must be a tensor of Inkling 2's text model; got an unknown name. Drop it"
                )
            own_name, parameter = parameters[name]
            if name == "lm_head.weight":
                tensor = tensor[: parameter.shape[0]]
            _check_fit(name, tensor, parameter)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            written.add(own_name)
    missing = {own_name for own_name, _ in parameters.values()} - written
    if missing and not getattr(model, "is_loaded", False):
        shown = ", ".join(sorted(missing)[:4])
        raise CheckpointError(f"the checkpoint must hold every tensor of the model; {len(missing)} missing: {shown}")
    model.is_loaded = True  # type: ignore[assignment]
    return written


def kept_layers(model: nn.Module) -> dict[str, Kept]:
    """Layers whose experts the model keeps as Marlin's tensors, by the release's prefix of their names."""
    kept = {}
    for name, module in model.named_modules():
        expert_format = getattr(module, "expert_format", None)
        if expert_format is not None:
            prefix = name.replace("model.layers.", f"{TEXT_PREFIX}layers.", 1)
            kept[prefix] = Kept(name, expert_format, module.device)
    return kept


def text_weights(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, kept: Mapping[str, Kept] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The text model's tensors under the names of its parameters, which are transformers'.

    Experts come dequantised to `dtype`, gate rows before up rows; those of `kept` layers as Marlin's tensors.
    """
    kept = kept or {}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        if name.startswith(SKIPPED_PREFIXES):
            continue
        if match := _EXPERT.fullmatch(name):
            prefix, matrix = match["prefix"], match["matrix"]
            key = prefix if prefix in kept else f"{prefix}.{matrix}"
            stored = waiting.setdefault(key, {})
            stored[matrix + match["rest"]] = tensor
            if prefix in kept:
                if all(_is_complete(stored, each) for each in MATRICES):
                    yield from _engine_experts(waiting.pop(key), prefix, kept[prefix])
            elif _is_complete(stored, matrix):
                yield _experts(waiting.pop(key), prefix, matrix, dtype)
        elif name.startswith(TEXT_PREFIX):
            yield hf_name(name), tensor
        else:
            yield name.replace("model.language_model.", "model.", 1), tensor
    for key, stored in waiting.items():
        if key in kept:
            # Names the matrix or the companion that never came.
            yield from _engine_experts(stored, key, kept[key])
            continue
        prefix, matrix = key.rsplit(".", 1)
        if matrix not in stored:
            raise CheckpointError(f"{key} must come with its companions; got only {sorted(stored)}. Add the codes")
        # Names the companion that never came.
        yield _experts(stored, prefix, matrix, dtype)


def _check_fit(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"{name} must have shape {list(parameter.shape)}; got {list(tensor.shape)}. "
            "Take config.json and tensors from the same checkpoint"
        )
    # Codes and their scales are bytes, not numbers: another dtype would be converted in the copy.
    are_bytes = parameter.dtype.itemsize == 1 or not parameter.dtype.is_floating_point
    if are_bytes and tensor.dtype != parameter.dtype:
        raise CheckpointError(
            f"{name} must be {parameter.dtype}; got {tensor.dtype}. Make it with inkling_rl.formats.marlin"
        )


def _is_complete(stored: dict[str, torch.Tensor], matrix: str) -> bool:
    weight = stored.get(matrix)
    if weight is None:
        return False
    by_dtype = {torch.uint8: companions("nvfp4"), torch.float8_e4m3fn: companions("mxfp8")}
    return all(matrix + suffix in stored for suffix in by_dtype.get(weight.dtype, ()))


def _experts(stored: dict[str, torch.Tensor], prefix: str, matrix: str, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    if stored[matrix].dtype == torch.float32:
        values = stored[matrix]
    else:
        stored_format(stored, matrix, prefix)
        values = dequantize_matrix(stored, matrix, dtype, name=prefix)
    return hf_name(f"{prefix}.{matrix}"), deinterleave(values) if matrix == "w13_weight" else values


def _engine_experts(stored: dict[str, torch.Tensor], prefix: str, kept: Kept) -> Iterator[tuple[str, torch.Tensor]]:
    for matrix in marlin.matrices_from_release(stored, kept.expert_format, device=kept.device, name=prefix):
        while matrix:  # what was taken is let go: the next matrix must not find this one on the device
            key = next(iter(matrix))
            yield f"{kept.module}.{key}", matrix.pop(key)
