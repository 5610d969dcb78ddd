"""Reading a release checkpoint: what it holds, whether it is whole, its weights tensor by tensor.

Streams: at most one layer's experts are in memory, and nothing of the file is copied before it is asked for. Not a
model loader: names and values only. torch is imported where tensors are made, so that opening and checking a checkpoint
(shapes come from the files' headers) does not load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec

if TYPE_CHECKING:
    import torch

    from inkling_rl.formats import ExpertFormat

BUILTIN = "builtin:"
_DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}


def resolve(path: str | Path) -> Path:
    """Directory of a checkpoint; `builtin:NAME` is one that ships with the package.

    Raises:
        CheckpointError: no such directory, or no such built-in checkpoint.
    """
    name = str(path)
    if name.startswith(BUILTIN):
        models = Path(str(files("recipes"))) / "models"
        found = sorted(p.parent.name for p in models.glob("*/config.json"))
        if name.removeprefix(BUILTIN) not in found:
            known = ", ".join(BUILTIN + model for model in found) or "none in this installation"
            raise CheckpointError(f"model.path must be a built-in checkpoint ({known}); got {name}. Check the name")
        return models / name.removeprefix(BUILTIN)
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{path} must be a checkpoint directory with a config.json; found none. Check the path")
    return directory


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint directory; `Checkpoint.open` is the way in."""

    path: Path
    config: Mapping[str, Any]
    """config.json as written (full or text class)."""

    quant_config: Mapping[str, Any] | None
    """hf_quant_config.json, or None when the experts are not quantised."""

    shards: Mapping[str, Path]
    """Tensor name -> file."""

    expert_formats: tuple[ExpertFormat, ...]
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the JSON files and the list of tensors; `check` compares them with what the config asks for.

        Raises:
            CheckpointError: a file is missing, unreadable or contradicts itself.
        """
        directory = resolve(path)
        config = _read_json(directory / "config.json")
        quant_file = directory / "hf_quant_config.json"
        quant = _read_json(quant_file) if quant_file.exists() else None
        formats = tuple(layout.expert_formats(quant, config))
        return cls(directory, config, quant, _shards(directory), formats)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Travels between processes as its path: open files do not."""
        return Checkpoint.open, (self.path,)

    @property
    def text_config(self) -> Mapping[str, Any]:
        return layout.text_config(self.config)

    def expert_format(self, layer: int) -> ExpertFormat:
        return self.expert_formats[layer]

    def stored(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every stored tensor, from the files' headers."""
        specs = {}
        for name in self.shards:
            header = self._handle(name).get_slice(name)
            dtype = header.get_dtype()
            specs[name] = TensorSpec(tuple(header.get_shape()), _DTYPE_NAMES.get(dtype, dtype))
        return specs

    def check(self) -> None:
        """Compare names, shapes, dtypes and scale denominators with what the configuration asks for.

        Raises:
            CheckpointError: the first difference, one clear message.
        """
        expected = layout.release_tensors(self.config, self.quant_config)
        compare(expected, self.stored(), str(self.path))
        for name in expected:
            if name.endswith("_outer_scale_denominator") and float(self.tensor(name)) not in (1536.0, 2688.0):
                raise CheckpointError(
                    f"{self.shards[name].name}:{name} must be 1536 or 2688; got {float(self.tensor(name))}. "
                    "The checkpoint was made by another recipe"
                )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored (a copy: the file is mapped, not read).

        Raises:
            CheckpointError: no tensor of this name.
        """
        if name not in self.shards:
            raise CheckpointError(f"{self.path} must hold {name}; it does not.{_nearest(name, self.shards)}")
        stored: torch.Tensor = self._handle(name).get_tensor(name)
        return stored.clone()

    def companions(self, layer: int) -> dict[str, torch.Tensor]:
        """Scales, anchors and denominators of a layer's experts under their release names, as stored."""
        weights = {f"{layout.experts_prefix(layer)}.{matrix}" for matrix in layout.EXPERT_MATRICES}
        names = [name for name in self.shards if layout.layer_of_experts(name) == layer and name not in weights]
        return {name: self.tensor(name) for name in names}

    def iter_text(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Release name and value of every text tensor, experts dequantised, w13 interleaved as stored.

        Tensors that the release keeps in float32 stay float32; all others come in `dtype`.
        """
        for name in layout.text_tensors(self.config):
            if layout.layer_of_experts(name) is not None:
                yield name, self._experts(name, dtype)
            elif layout.is_float32(name):
                yield name, self.tensor(name).float()
            else:
                yield name, self.tensor(name).to(dtype)

    def iter_hf(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The same under the names and in the shapes of transformers' `Inkling2ForCausalLM`.

        Gate and up rows are separated and the unembedding loses its padded rows: `load_state_dict(strict=True)` works.
        """
        from inkling_rl.formats import mixed

        for name, value in self.iter_text(dtype):
            if name.endswith("w13_weight"):
                value = mixed.deinterleave(value)
            elif name == f"{layout.TEXT_PREFIX}unembed.weight":
                value = value[: self.text_config["unpadded_vocab_size"]].clone()
            yield layout.hf_name(name), value

    def _experts(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from inkling_rl.formats import mixed

        prefix, _, matrix = name.rpartition(".")
        stored = {
            key.removeprefix(f"{prefix}."): self.tensor(key)
            for key in self.shards
            if key == name or key.startswith(f"{name}_")
        }
        if matrix not in stored:
            self.tensor(name)  # raises, naming it
        return mixed.dequantize_matrix(stored, matrix, dtype, name=prefix)

    def _handle(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.shards[name]
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} must be a readable safetensors file; got: {error}. Copy it again"
                ) from error
        return self._handles[path]


def compare(expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec], where: str) -> None:
    """Refuse the first difference between two tables, missing and extra names before shapes before dtypes.

    Raises:
        CheckpointError: names the tensor, what was required and got, and the nearest name if there is one.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        raise CheckpointError(
            f"{where}: {missing[0]} must be present; it is missing ({len(missing)} in all)."
            f"{_nearest(missing[0], extra, 'Stored instead')} Convert or copy the checkpoint again"
        )
    if extra:
        raise CheckpointError(
            f"{where}: {extra[0]} must not be present; config.json and hf_quant_config.json describe no such tensor "
            f"({len(extra)} in all).{_nearest(extra[0], expected)} Remove it or correct the configuration"
        )
    for what in ("shape", "dtype"):
        for name, spec in expected.items():
            required, got = getattr(spec, what), getattr(found[name], what)
            if required != got:
                raise CheckpointError(
                    f"{where}: {name} must have {what} {_show(required)}; got {_show(got)}. "
                    "Check its entry in hf_quant_config.json and config.json, or convert the checkpoint again"
                )


def _show(value: tuple[int, ...] | str) -> str:
    return value if isinstance(value, str) else str(list(value))


def _nearest(name: str, known: Any, lead: str = "The nearest name is") -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" {lead}: {close[0]}." if close else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} must be readable JSON; got: {error}. Copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; got {type(content).__name__}. Copy it again")
    return content


def _shards(directory: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = {name: directory / shard for name, shard in _read_json(index).get("weight_map", {}).items()}
    else:
        named = {}
    held: dict[str, Path] = {}
    for path in sorted(set(named.values())) or [directory / "model.safetensors"]:
        if not path.is_file():
            raise CheckpointError(f"{path} must be present; it is missing. Copy the checkpoint again")
        try:
            with safe_open(path, framework="pt") as shard:
                held |= dict.fromkeys(shard.keys(), path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} must be a readable safetensors file; got: {error}. Copy it again") from error
    for name, path in named.items():
        if held.get(name) != path:
            raise CheckpointError(f"{path} must hold {name}, as {index.name} says; it does not. Copy it again")
    return held
