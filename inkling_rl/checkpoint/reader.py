"""Reading a release checkpoint: what it holds, whether it is whole, its weights tensor by tensor.

Streams: rows of a tensor are read when they are asked for, into memory that is the caller's alone. `expert` and
`iter_experts` hold a few experts, `iter_text` and `iter_hf` one matrix of one layer. Not a model loader: names and
values only. torch is imported where tensors are made, so that opening and checking a checkpoint (shapes come from the
files' headers) does not load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_rl.checkpoint import layout, source
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.tensor_file import Place, TensorFile

if TYPE_CHECKING:
    import torch

    from inkling_rl.formats import ExpertFormat

BUILTIN = "builtin:"
INDEX_FILE = "model.safetensors.index.json"
GROUP_BYTES = 8 * 2**20
"""Of BF16 values; so many experts are read and converted at once, and at least one.

Such a group stays in the cache between the steps that it goes through, and the allocator keeps its memory: groups of
32 MiB took twice as long, most of it in page faults.
"""


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
    """How each layer's experts are stored."""

    source_quant_config: Mapping[str, Any] | None
    """hf_quant_config.json of the release that BF16 experts were dequantised from, or None."""

    source_shards: Mapping[str, Path]
    """Companion or digest of dequantised experts -> file, see `inkling_rl.checkpoint.source`."""

    source_formats: tuple[ExpertFormat, ...]
    """How each layer's experts were stored in that release; `bf16` where nothing is known of one."""

    _files: dict[Path, TensorFile] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the JSON files and the list of tensors; `check` compares them with what the config asks for.

        Raises:
            CheckpointError: a file is missing, unreadable or contradicts itself.
        """
        directory = resolve(path)
        config = read_json(directory / "config.json")
        quant, source_quant = (
            read_json(directory / name) if (directory / name).exists() else None
            for name in ("hf_quant_config.json", source.QUANT_FILE)
        )
        files: dict[Path, TensorFile] = {}
        shards = _shards(directory, INDEX_FILE, files)
        scales = _shards(directory, source.SCALES_INDEX_FILE, files) if source_quant is not None else {}
        formats, source_formats = (tuple(layout.expert_formats(table, config)) for table in (quant, source_quant))
        return cls(directory, config, quant, shards, formats, source_quant, scales, source_formats, files)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Travels between processes as its path: open files do not."""
        return Checkpoint.open, (self.path,)

    @property
    def text_config(self) -> Mapping[str, Any]:
        return layout.text_config(self.config)

    def expert_format(self, layer: int) -> ExpertFormat:
        return self.expert_formats[layer]

    def stored(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every stored tensor of the model, from the files' headers."""
        return {name: self.place(name).spec for name in self.shards}

    def check(self) -> None:
        """Compare names, shapes, dtypes and scale denominators with what the configuration asks for.

        Raises:
            CheckpointError: the first difference, one clear message.
        """
        expected = layout.release_tensors(self.config, self.quant_config)
        compare(expected, self.stored(), str(self.path))
        remembered = source.source_tensors(self.config, self.quant_config, self.source_quant_config)
        compare(remembered, {name: self.place(name).spec for name in self.source_shards}, str(self.path))
        for name in [*expected, *remembered]:
            if name.endswith("_outer_scale_denominator") and float(self.tensor(name)) not in (1536.0, 2688.0):
                raise CheckpointError(
                    f"{self._path_of(name).name}:{name} must be 1536 or 2688; got {float(self.tensor(name))}. "
                    "The checkpoint was made by another recipe"
                )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, in memory of its own.

        Raises:
            CheckpointError: no tensor of this name.
        """
        return self.file(name).read(name)

    def place(self, name: str) -> Place:
        """Shape, dtype and place in its file of a tensor, companions of dequantised experts included."""
        return self.file(name).places[name]

    def file(self, name: str) -> TensorFile:
        """The file that holds a tensor; its error is that of `tensor`."""
        path = self._path_of(name)
        if path not in self._files:
            self._files[path] = TensorFile(path)
        return self._files[path]

    def companions(self, layer: int) -> dict[str, torch.Tensor]:
        """Scales, anchors and denominators of a layer's experts under their release names, as stored.

        Of dequantised experts these are the ones that the release had.
        """
        weights = {f"{layout.experts_prefix(layer)}.{matrix}" for matrix in layout.EXPERT_MATRICES}
        names = [name for name in (*self.shards, *self.source_shards) if layout.layer_of_experts(name) == layer]
        return {name: self.tensor(name) for name in names if name not in weights and not name.endswith(source.DIGEST)}

    def stored_experts(self, layer: int, matrix: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Experts `start` to `stop` of `w13_weight` or `w2_weight` as stored.

        Returns:
            The weight and its companions by what follows `mlp.experts.`, a row per expert; denominators are scalars.
        """
        prefix = f"{layout.experts_prefix(layer)}."
        name = prefix + matrix
        names = [key for key in self.shards if key == name or key.startswith(f"{name}_")]
        return {key.removeprefix(prefix): self.rows(key, start, stop) for key in names or [name]}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor as stored, a scalar whole."""
        is_scalar = not self.place(name).spec.shape
        return self.tensor(name) if is_scalar else self.file(name).read(name, start, stop)

    def expert(self, layer: int, matrix: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert of `w13_weight` (rows interleaved) or `w2_weight`, `[rows, columns]` in `dtype`.

        Raises:
            CheckpointError: no such layer, matrix or expert. FormatError: companions missing or of another recipe.
        """
        num_experts = self.place(f"{layout.experts_prefix(layer)}.{matrix}").num_rows
        if not 0 <= expert < num_experts:
            raise CheckpointError(f"expert must be 0 to {num_experts - 1}; got {expert}. Count from 0")
        return self._dequantized(layer, matrix, expert, expert + 1, dtype)[0]

    def iter_experts(
        self, layer: int, matrix: str, dtype: torch.dtype, group: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """All experts of a matrix in order, a few at a time: first expert, `[group or fewer, rows, columns]`.

        Args:
            layer, matrix, dtype: as in `expert`.
            group: how many at a time; by default what makes 8 MiB in BF16, at least one.
        """
        name = f"{layout.experts_prefix(layer)}.{matrix}"
        for start, stop in self.expert_groups(name, group):
            yield start, self._dequantized(layer, matrix, start, stop, dtype)

    def expert_groups(self, name: str, group: int | None = None) -> Iterator[tuple[int, int]]:
        """First expert and the one after the last of each group of an expert matrix, `group` as in `iter_experts`."""
        spec = self.place(name).spec
        values = spec.shape[1] * spec.shape[2] * (2 if spec.dtype == "uint8" else 1)
        group = group or max(1, GROUP_BYTES // (2 * values))
        for start in range(0, spec.shape[0], group):
            yield start, min(start + group, spec.shape[0])

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
        import torch

        layer, matrix = layout.layer_of_experts(name), name.rpartition(".")[2]
        assert layer is not None
        values: torch.Tensor | None = None
        for start, group in self.iter_experts(layer, matrix, dtype):
            if values is None:
                values = torch.empty(self.place(name).num_rows, *group.shape[1:], dtype=dtype, device=group.device)
            values[start : start + len(group)] = group
        assert values is not None
        return values

    def _dequantized(self, layer: int, matrix: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        from inkling_rl.formats import mixed

        stored = self.stored_experts(layer, matrix, start, stop)
        return mixed.dequantize_matrix(stored, matrix, dtype, name=layout.experts_prefix(layer))

    def _path_of(self, name: str) -> Path:
        path = self.shards.get(name) or self.source_shards.get(name)
        if path is None:
            raise CheckpointError(f"{self.path} must hold {name}; it does not.{_nearest(name, self.shards)}")
        return path


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint's.

    Raises:
        CheckpointError: unreadable, or no object.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} must be readable JSON; got: {error}. Copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; got {type(content).__name__}. Copy it again")
    return content


def _shards(directory: Path, index_file: str, files: dict[Path, TensorFile]) -> dict[str, Path]:
    """Tensor name -> file of an index (without one: the file of that name without numbers); `files` gets the opened."""
    index = directory / index_file
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index} must map tensors to files under weight_map; it does not. Copy it again")
        named = {name: directory / shard for name, shard in weight_map.items()}
    else:
        named = {}
    held: dict[str, Path] = {}
    for path in sorted(set(named.values())) or [directory / index_file.removesuffix(".index.json")]:
        if not path.is_file():
            raise CheckpointError(f"{path} must be present; it is missing. Copy the checkpoint again")
        files[path] = TensorFile(path)
        held |= dict.fromkeys(files[path].places, path)
    for name, path in named.items():
        if held.get(name) != path:
            raise CheckpointError(f"{path} must hold {name}, as {index.name} says; it does not. Copy it again")
    return held
