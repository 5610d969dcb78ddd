"""What a BF16 checkpoint remembers of the release that it was made from.

Experts that were dequantised keep their companions (scales, anchors, denominators) and a digest of their old bytes in
files beside the checkpoint's own, listed in an index of their own. So the directory is an ordinary BF16 checkpoint to
everybody else, engine and transformers included, and `inkling-rl convert --to release` gives unchanged experts the
bytes that they had. Copied into a trained checkpoint (`cp EXPORT/source_* TRAINED/`), the files serve it as well.

Not the conversion: names, shapes and digests.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import Config, TensorSpec
from inkling_rl.formats import ExpertFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from inkling_rl.checkpoint.reader import Checkpoint

QUANT_FILE = "source_hf_quant_config.json"
"""hf_quant_config.json of the release; says which layers the companions are of."""
CONFIG_FILE = "source_config.json"
"""config.json of the release, kept where the export's had to differ."""
MODEL_INDEX_FILE = "source_model.safetensors.index.json"
"""The release's index: the way back cuts the same shards."""
SCALES = "source_scales"
SCALES_INDEX_FILE = f"{SCALES}.safetensors.index.json"
DIGEST = "_sha256"
"""Suffix of uint8 `[E, 32]`: SHA-256 of each expert's stored weight, scales, anchor and denominator, in this order."""


def source_tensors(config: Config, quant: Config | None, source_quant: Config | None) -> dict[str, TensorSpec]:
    """Companions and digests that belong beside the BF16 experts of a checkpoint: name -> shape and dtype.

    Args:
        config: config.json.
        quant: hf_quant_config.json, whose layers are quantised still and keep their companions themselves.
        source_quant: hf_quant_config.json of the release that the others came from, or None.
    """
    stored, source = layout.expert_formats(quant, config), layout.expert_formats(source_quant, config)
    specs: dict[str, TensorSpec] = {}
    for name, spec in layout.text_tensors(config).items():
        layer = layout.layer_of_experts(name)
        if layer is not None and stored[layer] == "bf16" and source[layer] != "bf16":
            specs |= companion_tensors(name, spec, source[layer])
    return specs


def companion_tensors(name: str, spec: TensorSpec, expert_format: ExpertFormat) -> dict[str, TensorSpec]:
    """The companions and the digest of one expert matrix of the BF16 view."""
    specs = layout.expert_specs(name, spec, expert_format)
    del specs[name]
    return specs | {f"{name}{DIGEST}": TensorSpec((spec.shape[0], 32), "uint8")}


def digests(stored: Mapping[str, torch.Tensor], matrix: str) -> torch.Tensor:
    """uint8 `[G, 32]`: digest of each of G stored experts, `w13_weight`, `w13_weight_scale`, ... with G rows each."""
    import torch

    suffixes = ("", "_scale", "_amax", "_outer_scale_denominator")
    tensors = [stored[matrix + suffix] for suffix in suffixes if matrix + suffix in stored]
    rows = []
    for expert in range(stored[matrix].shape[0]):
        digest = hashlib.sha256()
        for tensor in tensors:
            part = tensor[expert] if tensor.ndim else tensor
            digest.update(memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy()))
        rows.append(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))
    return torch.stack(rows)


def source_companions(
    checkpoint: Checkpoint, name: str, matrix: str, start: int, stop: int
) -> dict[str, torch.Tensor] | None:
    """Companions and digests of dequantised experts `start` to `stop`, by what follows `mlp.experts.`, or None."""
    names = [key for key in checkpoint.source_shards if key.startswith(f"{name}_")]
    if not names:
        return None
    return {matrix + key.removeprefix(name): checkpoint.rows(key, start, stop) for key in names}
