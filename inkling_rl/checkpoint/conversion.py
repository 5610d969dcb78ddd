"""What a conversion changes: which layers, into which formats, and which files the result has.

A checkpoint may be converted in part. Each layer's experts are then in one of two states, and the directory says so:
hf_quant_config.json lists the layers that are quantised, source_hf_quant_config.json the formats that dequantised ones
had (`inkling_rl.checkpoint.source`). Pure tables: nothing is read but JSON, nothing computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inkling_rl import __version__
from inkling_rl.checkpoint import layout, source
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.reader import INDEX_FILE, Checkpoint, read_json
from inkling_rl.checkpoint.shards import to_json
from inkling_rl.checkpoint.tensor_file import num_bytes
from inkling_rl.formats import ExpertFormat

Form = Literal["bf16", "release"]
_QUANTISED_KEY = "quantization_config"
_OURS = {
    "config.json",
    "hf_quant_config.json",
    INDEX_FILE,
    source.QUANT_FILE,
    source.CONFIG_FILE,
    source.MODEL_INDEX_FILE,
    source.SCALES_INDEX_FILE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A conversion of one checkpoint."""

    to: Form
    layers: frozenset[int]
    """Whose experts change their form."""

    formats: tuple[ExpertFormat, ...]
    """How each layer's experts are stored in the result."""

    model: Mapping[str, TensorSpec]
    """Tensors of the result."""

    scales: Mapping[str, TensorSpec]
    """Companions and digests beside it."""

    like: Mapping[str, str] | None
    """Tensor -> file of the release that the result becomes again, if that is known."""

    texts: Mapping[str, bytes]
    """JSON files of the result."""

    copied: tuple[Path, ...]
    """Files that come along unchanged: the tokenizer, licences."""

    @property
    def num_bytes(self) -> int:
        """Of the result, but for the headers of its files."""
        tensors = [num_bytes(spec) for table in (self.model, self.scales) for spec in table.values()]
        return sum(tensors) + sum(map(len, self.texts.values())) + sum(path.stat().st_size for path in self.copied)


def make_plan(checkpoint: Checkpoint, to: Form, layers: Collection[int] | None = None) -> Plan:
    """Decide a conversion.

    Args:
        checkpoint: what to convert; `check` has passed.
        to: form of the experts in the result.
        layers: whose experts to convert, all that can be unless given.

    Raises:
        CheckpointError: a layer that does not exist or cannot be converted, or nothing to convert.
    """
    stored = checkpoint.expert_formats
    wanted = _dequantised(stored) if to == "bf16" else _quantised(checkpoint)
    chosen = _chosen([layer for layer, form in enumerate(wanted) if form != stored[layer]], layers, checkpoint, to)
    formats = tuple(wanted[layer] if layer in chosen else form for layer, form in enumerate(stored))
    # What dequantised layers were: those of now, those of earlier conversions.
    was: tuple[ExpertFormat, ...] = tuple(
        now if now != "bf16" else before for now, before in zip(stored, checkpoint.source_formats, strict=True)
    )
    remembers = any(now == "bf16" != before for now, before in zip(formats, was, strict=True)) and (
        to == "bf16" or checkpoint.source_quant_config is not None
    )
    quant, quant_text = _table(formats, checkpoint)
    source_quant, source_text = _table(was, checkpoint) if remembers else (None, None)
    texts = {"hf_quant_config.json": quant_text, source.QUANT_FILE: source_text}
    texts |= _configs(checkpoint, is_whole=not remembers and "bf16" not in formats)
    index = checkpoint.path / (source.MODEL_INDEX_FILE if checkpoint.source_quant_config is not None else INDEX_FILE)
    if remembers and index.exists():
        texts[source.MODEL_INDEX_FILE] = index.read_bytes()
    return Plan(
        to=to,
        layers=chosen,
        formats=formats,
        model=layout.release_tensors(checkpoint.config, quant),
        scales=source.source_tensors(checkpoint.config, quant, source_quant),
        like=read_json(index).get("weight_map") if to == "release" and not remembers and index.exists() else None,
        texts={name: text for name, text in texts.items() if text is not None},
        copied=tuple(
            path
            for path in sorted(checkpoint.path.iterdir())
            if path.is_file() and path.suffix != ".safetensors" and path.name not in _OURS
        ),
    )


def _dequantised(stored: Sequence[ExpertFormat]) -> list[ExpertFormat]:
    return ["bf16"] * len(stored)


def _quantised(checkpoint: Checkpoint) -> list[ExpertFormat]:
    """Formats after a whole conversion to the release form: those of the source, or the release's own pattern."""
    if checkpoint.source_quant_config is None:
        pattern = default_formats(len(checkpoint.expert_formats))
    else:
        pattern = list(checkpoint.source_formats)
    return [p if now == "bf16" else now for now, p in zip(checkpoint.expert_formats, pattern, strict=True)]


def default_formats(num_layers: int) -> list[ExpertFormat]:
    """The release's pattern: NVFP4 in the first five sixths of the layers, MXFP8 in the rest (40 and 8 of 48)."""
    num_nvfp4 = num_layers * 5 // 6
    return ["nvfp4" if layer < num_nvfp4 else "mxfp8" for layer in range(num_layers)]


def _chosen(
    possible: Sequence[int], layers: Collection[int] | None, checkpoint: Checkpoint, to: Form
) -> frozenset[int]:
    num_layers = len(checkpoint.expert_formats)
    form = "quantised" if to == "release" else "BF16"
    if not possible:
        raise CheckpointError(
            f"{checkpoint.path} must have experts to convert; all its {num_layers} layers are {form} already. "
            "Use it as it is"
        )
    if layers is None:
        return frozenset(possible)
    for layer in sorted(layers):
        if not 0 <= layer < num_layers:
            raise CheckpointError(f"--layers must name layers 0 to {num_layers - 1}; got {layer}. Correct it")
        if layer not in possible:
            stays = to == "release" and checkpoint.expert_formats[layer] == "bf16"
            why = "is BF16 in the release too" if stays else f"is {form} already"
            raise CheckpointError(
                f"--layers must name layers that --to {to} changes; layer {layer} {why}. Leave it out"
            )
    if not layers:
        raise CheckpointError("--layers must name at least one layer; got none. Leave the option out to convert all")
    return frozenset(layers)


def _table(formats: Sequence[ExpertFormat], checkpoint: Checkpoint) -> tuple[Mapping[str, Any] | None, bytes | None]:
    """hf_quant_config.json for these formats: a file that there is, to the byte, where one says the same."""
    if set(formats) == {"bf16"}:
        return None, None
    tables = (("hf_quant_config.json", checkpoint.quant_config), (source.QUANT_FILE, checkpoint.source_quant_config))
    for file, table in tables:
        if table is not None and layout.expert_formats(table, checkpoint.config) == list(formats):
            return table, (checkpoint.path / file).read_bytes()
    base = checkpoint.source_quant_config or checkpoint.quant_config or _default_table()
    section = dict(base.get("quantization", base))
    section |= {"quant_algo": "MIXED_PRECISION", "group_size": 16, "quantized_layers": layout.quantized_layers(formats)}
    table = dict(base) | {"quantization": section} if "quantization" in base else section
    return table, to_json(table).encode()


def _default_table() -> dict[str, Any]:
    unquantised = ["model.llm.embed", "model.llm.unembed", "model.visual*", "model.dspark*"]
    return {
        "producer": {"name": "inkling-rl", "version": __version__},
        "quantization": {"kv_cache_quant_algo": None, "exclude_modules": unquantised},
    }


def _configs(checkpoint: Checkpoint, *, is_whole: bool) -> dict[str, bytes | None]:
    """config.json, and the release's beside it where the two differ.

    They differ only when the release's names its quantisation: that says nothing true of BF16 experts, and loaders
    would act on it. Of a checkpoint converted in part, hf_quant_config.json alone says how it is quantised.
    """
    own, kept = (checkpoint.path / name for name in ("config.json", source.CONFIG_FILE))
    if is_whole and kept.exists():
        before = read_json(kept)
        config = dict(checkpoint.config) | {_QUANTISED_KEY: before.get(_QUANTISED_KEY)}
        return {"config.json": kept.read_bytes() if config == before else to_json(config).encode()}
    if is_whole or _QUANTISED_KEY not in checkpoint.config:
        return {"config.json": own.read_bytes(), source.CONFIG_FILE: kept.read_bytes() if kept.exists() else None}
    config = {key: value for key, value in checkpoint.config.items() if key != _QUANTISED_KEY}
    return {"config.json": to_json(config).encode(), source.CONFIG_FILE: own.read_bytes()}
