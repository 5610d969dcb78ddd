"""From the tensors of a checkpoint, under release or transformers names, to the parameters of the model.

Not a reader: vLLM's loaders, a live reload or a weight transfer deliver (name, tensor) pairs in any order. Everything
is accounted for: a text tensor that is missing, unknown or misshapen is an error, as is a quantised expert tensor
without its companions; vision and draft tensors are skipped because this model has neither. Every write goes through
the parameter's `weight_loader`: vLLM's live reload replaces that function and would not see a direct copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from inkling_rl.checkpoint.layout import TEXT_PREFIX, CheckpointError, hf_name
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.formats.mixed import companions, deinterleave, dequantize_matrix, stored_format

SKIPPED_PREFIXES = ("model.visual.", "model.vision_tower.", "model.dspark.")
_EXPERT = re.compile(
    r"(?P<prefix>model\.llm\.layers\.\d+\.mlp\.experts)\.(?P<matrix>w13_weight|w2_weight)(?P<rest>\w*)"
)


def check_source(path: str, load_format: str) -> None:
    """Compare a release checkpoint's files with what its configuration asks for, before anything is read.

    Names and shapes alone are checked again while loading; here the dtypes, the format tags of hf_quant_config.json and
    the scale denominators are, and the message can name the file. Other sources (transformers' names, dummy weights,
    a hub name) are left to `load`.

    Raises:
        CheckpointError: the first difference.
    """
    if load_format not in ("auto", "hf", "safetensors") or not Path(path, "config.json").is_file():
        return
    checkpoint = Checkpoint.open(path)
    if any(name.startswith(TEXT_PREFIX) for name in checkpoint.shards):
        checkpoint.check()


def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Write every tensor into the model and return the names of the parameters written.

    The first call must bring the whole model; later ones (live updates) may bring parts.

    Raises:
        CheckpointError: a missing, unknown or misshapen tensor.
        FormatError: expert codes without their companions, or with a denominator of another recipe.
    """
    # A LoRA wrapper puts `base_layer` between a projection and its weight; checkpoints never have it.
    parameters = {name.replace(".base_layer.", "."): (name, value) for name, value in model.named_parameters()}
    written: set[str] = set()
    with torch.no_grad():
        for name, tensor in text_weights(weights, next(model.parameters()).dtype):
            if name not in parameters:
                raise CheckpointError(
                    f"{name} must be a tensor of Inkling 2's text model; got an unknown name. Drop it"
                )
            own_name, parameter = parameters[name]
            if name == "lm_head.weight":
                tensor = tensor[: parameter.shape[0]]
            if tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"{name} must have shape {list(parameter.shape)}; got {list(tensor.shape)}. "
                    "Take config.json and tensors from the same checkpoint"
                )
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            written.add(own_name)
    missing = {own_name for own_name, _ in parameters.values()} - written
    if missing and not getattr(model, "is_loaded", False):
        shown = ", ".join(sorted(missing)[:4])
        raise CheckpointError(f"the checkpoint must hold every tensor of the model; {len(missing)} missing: {shown}")
    model.is_loaded = True  # type: ignore[assignment]
    return written


def text_weights(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The text model's tensors under transformers' names: experts dequantised to `dtype`, gate rows before up rows."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        if name.startswith(SKIPPED_PREFIXES):
            continue
        if match := _EXPERT.fullmatch(name):
            stored = waiting.setdefault(f"{match['prefix']}.{match['matrix']}", {})
            stored[match["matrix"] + match["rest"]] = tensor
            if _is_complete(stored, match["matrix"]):
                yield _experts(
                    waiting.pop(f"{match['prefix']}.{match['matrix']}"), match["prefix"], match["matrix"], dtype
                )
        elif name.startswith(TEXT_PREFIX):
            yield hf_name(name), tensor
        else:
            yield name.replace("model.language_model.", "model.", 1), tensor
    for name, stored in waiting.items():
        prefix, matrix = name.rsplit(".", 1)
        if matrix not in stored:
            raise CheckpointError(f"{name} must come with its companions; got only {sorted(stored)}. Add the codes")
        # Names the companion that never came.
        yield _experts(stored, prefix, matrix, dtype)


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
