"""A draft on disk: bundled in its target's checkpoint or in a directory of its own, checked against the target.

Everything that can be known from config.json and the tensor files' headers is checked when a draft is opened; no weight
is read. Not a loader: `tensors` gives names and values, and reads nothing of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.reader import Checkpoint, compare
from inkling_rl.draft.manifest import Manifest
from inkling_rl.draft.shape import PREFIX, DraftShape, as_release

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An opened draft; `DraftCheckpoint.open` is the way in."""

    source: Checkpoint
    shape: DraftShape
    prefix: str
    """What precedes the draft's own names of tensors in its files."""

    manifest: Manifest | None
    """Its `draft.json`; None for one that nobody trained here."""

    @classmethod
    def open(cls, path: str | Path, target: Mapping[str, Any]) -> DraftCheckpoint:
        """Open a draft and check that it is whole and made for a target.

        Args:
            path: a checkpoint with a draft in it, or a directory of a draft alone.
            target: config.json of the target (full or text class).

        Raises:
            CheckpointError: no draft there, a tensor missing, unknown or misshapen, a draft for another target, or a
                `draft.json` that speaks of other tensors.
        """
        source = Checkpoint.open(path)
        shape = DraftShape.from_config(source.config)
        bundled = "dspark_block_size" in source.config
        prefix = PREFIX if bundled else ""
        release = as_release(source.config)
        dtype = str(release.get("dtype") or layout.text_config(release).get("dtype") or "bfloat16")
        expected = {
            prefix + name.removeprefix(PREFIX): TensorSpec(size, dtype)
            for name, size in layout.draft_shapes(release).items()
        }
        stored = {name: source.place(name).spec for name in source.shards if name.startswith(prefix)}
        compare(expected, stored, str(source.path))
        check_target(shape, target, source.path)
        manifest = Manifest.read(source.path)
        if manifest is not None:
            own = {name.removeprefix(prefix): spec for name, spec in stored.items()}
            compare({name: entry.spec for name, entry in manifest.tensors.items()}, own, str(manifest.path))
        return cls(source, shape, prefix, manifest)

    @property
    def version(self) -> int:
        """Of the draft; 0 for one that nobody trained here."""
        return self.manifest.version if self.manifest else 0

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse more tokens than the draft was trained to give.

        Raises:
            CheckpointError: more than its block holds.
        """
        if not 1 <= num_tokens <= self.shape.block_size:
            raise CheckpointError(
                f"rollout.draft.num_tokens must be 1 to {self.shape.block_size}, the block of the draft in "
                f"{self.source.path}; got {num_tokens}. Lower it"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The draft's own names and the tensors as stored, one by one, in memory of their own.

        Raises:
            CheckpointError: a tensor is not the one that `draft.json` speaks of, or holds NaN or infinity.
        """
        for name in self.source.shards:
            if name.startswith(self.prefix):
                own, tensor = name.removeprefix(self.prefix), self.source.tensor(name)
                if self.manifest is not None:
                    self.manifest.check(own, tensor)
                check_finite(self.source.path, own, tensor)
                yield own, tensor


def check_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of the draft in `path` with NaN or infinity in it.

    From logits that are NaN a GPU's sampler draws token 0 every time: such a draft costs time and says nothing.

    Raises:
        CheckpointError: with the number of such values.
    """
    num_bad = tensor.numel() - int(tensor.isfinite().sum())
    if num_bad:
        raise CheckpointError(
            f"{path}: {name} of the draft must hold finite numbers; got {num_bad} of {tensor.numel()} that are NaN or "
            "infinite. Take a draft from before, or train it again with a lower learning rate"
        )


def check_target(shape: DraftShape, target: Mapping[str, Any], path: Path) -> None:
    """Refuse a draft from `path` that was made for another target than this config.json's.

    Raises:
        CheckpointError: hidden size, vocabulary or number of layers differ.
    """
    text = layout.text_config(target)
    for key, own in (
        ("hidden_size", shape.hidden_size),
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_target_layers),
    ):
        if own != text[key]:
            raise CheckpointError(
                f"rollout.draft: {path} must be a draft for a target with {key} {text[key]}; got one for {own}. "
                "Take the draft of this checkpoint"
            )
