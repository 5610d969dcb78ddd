"""Versions of a draft in one worker of an engine: one serves, another is held beside it, and the two can be exchanged.

    stage     the files are read and checked against their manifest, the engine's base model and the draft that serves;
              their tensors are held in the host's memory, and nothing else happens
    switch    the parameters exchange their values with what is held, in place: kernels and graphs keep their pointers
    forget    what is held is let go

After a switch the version before it is held, so that the way back is the same switch. What is held lies on the host:
beside the KV cache of a GPU there is no room for a second draft. Digests of memory are computed when it changes and
kept; only `status` with `verify` looks at the parameters again.

Between two steps of the engine only, and with an empty prefix cache: pages of context hang on the draft that wrote
them. `rollout.draft_routes` sees to both; the driver's half of the protocol is `trainer.publish_draft`.

`DraftTransfer` are the methods that vLLM's `collective_rpc` reaches on every worker (`worker_extension_cls`). A refusal
is an answer and no exception, so that its reason arrives as it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.manifest import Manifest, checksum, digest
from inkling_rl.draft.shape import DraftShape
from lora.base import fingerprint

logger = logging.getLogger("vllm.inkling2.draft")


class DraftRefusedError(ValueError):
    """A draft that cannot be taken over, or a version that is not there."""


@dataclass(frozen=True, slots=True)
class Held:
    """A draft in memory beside the one that serves."""

    version: int
    files: str | None
    """Digest of the tensors in its files; None for a draft without a manifest."""

    memory: str
    """`memory_digest` of `tensors`."""

    tensors: Mapping[str, torch.Tensor]
    """By parameter, in the parameters' dtype, on the host."""

    replaces: int
    """Version that must serve when this one is switched to."""

    was_replaced: bool
    """It served, and the one that serves took its place. Not so for one that is staged, or that was taken back."""


class DraftVersions:
    """The draft of one worker, by version."""

    def __init__(self, model: nn.Module, shape: DraftShape, draft: DraftCheckpoint) -> None:
        """`model` holds the weights of `draft`, its parameters under the draft's names of tensors."""
        self.model = model
        self.shape = shape
        self.version = draft.version
        self.files = draft.manifest.digest if draft.manifest else None
        self.held: Held | None = None
        self.num_blocks = 0
        """Drafted since this version serves."""

        self._base_model: str | None = None
        self._memory: str | None = None
        """Digest of the parameters; None until somebody asks."""

    def stage(self, directory: Path, version: int, replaces: int | None, target: Path) -> dict[str, Any]:
        """Read a draft and hold it beside the one that serves, in place of what was held.

        Args:
            directory: of the draft; every worker must be able to read it.
            version: it must be of.
            replaces: version that must serve; the one that its training began with unless given.
            target: directory of the engine's checkpoint.

        Returns:
            `version`, `files`: digest of the tensors in the files; `memory`: digest of the tensors as they are held.

        Raises:
            CheckpointError, DraftRefusedError: it cannot be taken over; what serves stays as it is.
        """
        base = Checkpoint.open(target)
        draft = DraftCheckpoint.open(directory, base.config)
        manifest = self._check(draft, version, replaces, base)
        parameters = dict(self.model.named_parameters())
        self.held = None  # before the new one is read: there is room for one
        tensors = {name: value.to("cpu", parameters[name].dtype) for name, value in draft.tensors()}
        replaced = manifest.parent_version if replaces is None else replaces
        assert replaced is not None and tensors.keys() == parameters.keys()
        held = Held(version, manifest.digest, memory_digest(tensors), tensors, replaced, was_replaced=False)
        self.held = held
        return {"version": version, "files": held.files, "memory": held.memory}

    def switch(self, version: int) -> dict[str, Any]:
        """Make the held version serve and hold the one that served; nothing where it serves already.

        Returns:
            As `status`.

        Raises:
            DraftRefusedError: it is not held, or not for the version that serves.
        """
        if version == self.version:
            return self.status()
        held = self.held
        if held is None or held.version != version:
            raise DraftRefusedError(
                f"draft version {version} must be staged before it is switched to; got "
                f"{'none' if held is None else f'version {held.version}'} staged. Stage it again"
            )
        if held.replaces != self.version:
            raise DraftRefusedError(
                f"draft version {version} must be switched to from version {held.replaces}; version {self.version} "
                "serves. Stage it again"
            )
        # All of it before the first parameter changes: memory may run out here, and must not half-way.
        memory = self._digest()
        before = {name: on_host(parameter) for name, parameter in self.model.named_parameters()}
        self._memory = None  # what a copy that fails leaves behind is looked at
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(held.tensors[name])
        # On the way back what goes was taken back, and nobody wants to be led to it again.
        was_replaced = not held.was_replaced
        self.held = Held(self.version, self.files, memory, before, replaces=version, was_replaced=was_replaced)
        self.version, self.files, self._memory, self.num_blocks = version, held.files, held.memory, 0
        logger.info("draft version %d serves now, in place of version %d", version, self.held.version)
        return self.status()

    def forget(self, version: int) -> dict[str, Any]:
        """Let a held version go; nothing where it is not held.

        Returns:
            As `status`.

        Raises:
            DraftRefusedError: it serves.
        """
        if version == self.version:
            raise DraftRefusedError(f"draft version {version} must not serve to be forgotten; it does. Switch first")
        if self.held is not None and self.held.version == version:
            self.held = None
        return self.status()

    def status(self, verify: bool = False) -> dict[str, Any]:
        """What serves.

        Args:
            verify: look at all parameters again, and do not only say what they were when they changed.

        Returns:
            `version`, `files` and `memory` as in `stage`; `held`: version or None; `previous`: the same, where it is
            what the one that serves replaced; `num_blocks`.
        """
        held = self.held
        return {
            "version": self.version,
            "files": self.files,
            "memory": self._digest(verify),
            "held": None if held is None else held.version,
            "previous": None if held is None or not held.was_replaced else held.version,
            "num_blocks": self.num_blocks,
        }

    def _digest(self, verify: bool = False) -> str:
        """`memory_digest` of the parameters."""
        if verify or self._memory is None:
            self._memory = memory_digest(dict(self.model.named_parameters()))
        return self._memory

    def _check(self, draft: DraftCheckpoint, version: int, replaces: int | None, base: Checkpoint) -> Manifest:
        path, manifest = draft.source.path, draft.manifest
        if manifest is None:
            raise DraftRefusedError(f"{path} must hold draft.json; it does not. Write it with inkling-rl draft train")
        _require(path, "version", version, manifest.version, "Publish each version under its own number")
        if version == self.version:
            raise DraftRefusedError(
                f"{path}: draft version {version} must not be the one that serves; it is. Give a new draft a new number"
            )
        replaced = manifest.parent_version if replaces is None else replaces
        if replaced != self.version:
            given = "parent_version" if replaces is None else "replaces"
            raise DraftRefusedError(
                f"{path}: {given} of draft version {version} must be {self.version}, which serves; got {replaced}. "
                "Publish the versions between first, or say which version it replaces"
            )
        for name in DraftShape.__slots__:
            _require(path, name, getattr(self.shape, name), getattr(draft.shape, name), "Start an engine on it instead")
        if self._base_model is None:
            self._base_model = fingerprint(base)
        _require(path, "base_model", self._base_model, manifest.base_model, "Take a draft of this engine's checkpoint")
        return manifest


class DraftTransfer:
    """Methods of every worker of an engine with a draft; vLLM mixes them into its worker class."""

    def stage_draft(self, directory: str, version: int, replaces: int | None = None) -> dict[str, Any]:
        """`DraftVersions.stage`, or `refused` with the reason."""
        target = Path(self.vllm_config.model_config.model)  # type: ignore[attr-defined]
        return _answer(lambda: versions_of(self).stage(Path(directory), version, replaces, target))

    def switch_draft(self, version: int) -> dict[str, Any]:
        """`DraftVersions.switch`, or `refused` with the reason."""
        return _answer(lambda: versions_of(self).switch(version))

    def forget_draft(self, version: int) -> dict[str, Any]:
        """`DraftVersions.forget`, or `refused` with the reason."""
        return _answer(lambda: versions_of(self).forget(version))

    def draft_status(self, verify: bool = False) -> dict[str, Any]:
        """`DraftVersions.status`, or `refused` with the reason."""
        return _answer(lambda: versions_of(self).status(verify))


def versions_of(worker: Any) -> DraftVersions:
    """Where vLLM's runners keep the draft: V1 calls what drafts a drafter, V2 a speculator.

    Raises:
        DraftRefusedError: this engine has no draft whose weights came from files.
    """
    drafters = (getattr(worker.model_runner, name, None) for name in ("drafter", "speculator"))
    models = (getattr(drafter, "model", None) for drafter in drafters)
    versions = next((found for model in models if (found := getattr(model, "versions", None))), None)
    if not isinstance(versions, DraftVersions):
        raise DraftRefusedError(
            "rollout.draft must be given, with weights from files, where a draft is to be replaced; this engine has "
            "none. Start it with one"
        )
    return versions


def on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy that later changes do not reach."""
    return parameter.detach().to("cpu", copy=True)


def memory_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`inkling_rl.draft.manifest.digest` of tensors in memory."""
    return digest({name: checksum(tensor) for name, tensor in tensors.items()})


def _answer(method: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return method()
    except (CheckpointError, DraftRefusedError, OSError, MemoryError, RuntimeError) as error:
        # RuntimeError: what torch raises where there is no room for the tensors.
        logger.warning("a draft was refused: %s", error)
        return {"refused": str(error)}


def _require(path: Path, name: str, required: object, got: object, remedy: str) -> None:
    if required != got:
        raise DraftRefusedError(f"{path}: {name} of the draft must be {required}; got {got}. {remedy}")
