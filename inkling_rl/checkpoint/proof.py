"""`inkling-rl convert --check`: the result is read again from the disk and proved, tensor by tensor.

To BF16: every expert, quantised against the companions beside it, gives the bytes of SRC, and the companions are SRC's.
To the release form: every untouched expert has the digest of the bytes that it had in the release (no copy of that is
needed), every other one the bytes that its values quantise to. What was not converted has SRC's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from inkling_rl.checkpoint import layout, source
from inkling_rl.checkpoint.conversion import Plan
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.progress import Progress
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.requantize import requantize, same_bytes
from inkling_rl.checkpoint.source import source_companions
from inkling_rl.checkpoint.tensor_file import COPY_BYTES


class ProofError(CheckpointError):
    """A conversion whose result is not what it must be; nothing of it is left."""


def check(
    checkpoint: Checkpoint,
    directory: Path,
    dst: Path,
    plan: Plan,
    untouched: Mapping[str, torch.Tensor],
    progress: Progress | None,
) -> None:
    """Prove the result in `directory`, which will be `dst`.

    Args:
        checkpoint: SRC.
        untouched: expert matrix -> bool `[E]`, the experts that must have their old bytes.

    Raises:
        ProofError: names the first tensor (and expert) that is not what it must be.
    """
    try:
        result = Checkpoint.open(directory)
        result.check()
    except CheckpointError as error:
        raise ProofError(str(error).replace(str(directory), str(dst))) from error
    if progress:
        progress.phase("check", plan.num_bytes)
    try:
        for name in (*result.shards, *result.source_shards):
            layer = layout.layer_of_experts(name)
            if layer not in plan.layers:
                _check_copy(checkpoint, result, name)
            elif name.endswith(layout.EXPERT_MATRICES):
                assert layer is not None
                _check_matrix(checkpoint, result, name, plan, untouched.get(name))
            if progress:
                progress.advance(result.place(name).num_bytes)
    finally:
        if progress:
            progress.stop()


def _check_matrix(
    checkpoint: Checkpoint, result: Checkpoint, name: str, plan: Plan, untouched: torch.Tensor | None
) -> None:
    layer, matrix = layout.layer_of_experts(name), name.rpartition(".")[2]
    assert layer is not None
    for start, stop in result.expert_groups(name):
        if plan.to == "bf16":
            _check_dequantized(checkpoint, result, name, layer, matrix, start, stop)
            continue
        stored = result.stored_experts(layer, matrix, start, stop)
        companions = source_companions(checkpoint, name, matrix, start, stop)
        must = torch.zeros(stop - start, dtype=torch.bool) if untouched is None else untouched[start:stop]
        if companions is not None:
            same = (source.digests(stored, matrix) == companions[matrix + source.DIGEST]).all(1)
            _refuse(must & ~same, start, name, result, "the bytes that it had in the release")
        if not must.all():
            weight = checkpoint.rows(name, start, stop)
            again = requantize(weight, matrix, plan.formats[layer], companions, name)[0]
            _compare(again, stored, start, name, matrix, result, "the bytes that its values quantise to")


def _check_dequantized(
    checkpoint: Checkpoint, result: Checkpoint, name: str, layer: int, matrix: str, start: int, stop: int
) -> None:
    before = checkpoint.stored_experts(layer, matrix, start, stop)
    companions = source_companions(result, name, matrix, start, stop)
    assert companions is not None
    kept = {key: value for key, value in companions.items() if key in before}
    _compare({key: before[key] for key in kept}, kept, start, name, matrix, result, "the bytes of SRC's")
    weight = result.rows(name, start, stop)
    again, untouched, _ = requantize(weight, matrix, checkpoint.expert_formats[layer], companions, name)
    _compare(before, again, start, name, matrix, result, "the values of SRC's bytes, which give them back")
    if not untouched.all():  # the same bytes, but of other values, or under another digest
        digest = matrix + source.DIGEST
        wrong = ~(source.digests(before, matrix) == companions[digest]).all(1)
        _refuse(wrong, start, name + source.DIGEST, result, "SRC's digest")
        _refuse(~untouched, start, name, result, "the values of SRC's bytes, which give them back")


def _compare(
    required: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    start: int,
    name: str,
    matrix: str,
    result: Checkpoint,
    what: str,
) -> None:
    """Refuse the first expert of which a tensor differs in a byte; scalars belong to all."""
    for key, value in required.items():
        if same_bytes(value, found[key]):
            continue
        a, b = (_bytes(tensor) for tensor in (value, found[key]))
        full_name = name + key.removeprefix(matrix)
        differs = (a != b).flatten(1).any(1) if a.ndim > 1 else torch.ones(1, dtype=torch.bool)
        _refuse(differs, start, full_name, result, what)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, rows of experts first; a scalar's four bytes flat."""
    if tensor.ndim == 0:
        return tensor.reshape(1).view(torch.uint8)
    return tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1)


def _refuse(failed: torch.Tensor, start: int, name: str, result: Checkpoint, what: str) -> None:
    if not failed.any():
        return
    experts = (failed.nonzero()[:, 0] + start).tolist()
    raise ProofError(
        f"{result.file(name).path.name}:{name} must hold {what}; expert {experts[0]} does not ({len(experts)} in this "
        "group). Convert again; if it stays, the release was made by a writer whose bytes its values do not determine"
    )


def _check_copy(checkpoint: Checkpoint, result: Checkpoint, name: str) -> None:
    place = result.place(name)
    if checkpoint.place(name).spec == place.spec:
        for start, stop in place.chunks(COPY_BYTES):
            if not same_bytes(*(c.rows(name, start, stop) for c in (result, checkpoint))):
                break
        else:
            return
    raise ProofError(
        f"{result.file(name).path.name}:{name} must be a copy of SRC's; it differs. Check the disk and convert again"
    )
