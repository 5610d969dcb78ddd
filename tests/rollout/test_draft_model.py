"""The draft's modules without an engine, on pages made by hand, against the slow reference; loading its tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.reference import ReferenceDraft
from rollout.kernels.draft import Blocks
from rollout.plugin.draft import Draft

PAGE, LENGTH = 16, 37


@pytest.fixture(scope="module")
def opened(tiny_checkpoint: Path) -> DraftCheckpoint:
    return DraftCheckpoint.open(tiny_checkpoint, Checkpoint.open(tiny_checkpoint).config)


@pytest.fixture(scope="module")
def reference(opened: DraftCheckpoint) -> ReferenceDraft:
    return ReferenceDraft(opened.shape, {name: value.float() for name, value in opened.tensors()})


def make(opened: DraftCheckpoint, dtype: torch.dtype = torch.float32) -> Draft:
    """A loaded draft with pages full of NaN."""
    shape = opened.shape
    pages = [
        torch.full((8, shape.num_kv_heads, PAGE, 2 * shape.head_dim), float("nan")) for _ in range(shape.num_layers)
    ]
    cache: Any = [SimpleNamespace(view=lambda page=page: page) for page in pages]
    draft = Draft(shape, dtype, cache).eval()
    draft.load(opened)
    return draft


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_block_and_confidence(opened: DraftCheckpoint, reference: ReferenceDraft, dtype: torch.dtype) -> None:
    """The checkpoint's weights are bfloat16, so both dtypes hold the same numbers."""
    draft = make(opened, dtype)
    outputs, embedded = rand(LENGTH, 256, seed=1), rand(7, 128, seed=2)
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, p // PAGE]) * PAGE + p % PAGE for p in range(LENGTH)])
    # In two steps, as a prompt in chunks; a padded row is not stored.
    draft.store_context(outputs[:20], torch.arange(20), slots[:20])
    rest = torch.cat([outputs[20:], outputs[:1]])
    positions = torch.cat([torch.arange(20, LENGTH), torch.zeros(1, dtype=torch.int64)])
    draft.store_context(rest, positions, torch.cat([slots[20:], torch.tensor([-1])]))
    hidden = draft.hidden(embedded, Blocks(torch.tensor([LENGTH]), table))
    expected = reference.hidden(embedded, reference.context(outputs), LENGTH)
    assert (hidden - expected).abs().max() < 2e-5
    assert draft.confidence_head is not None
    tokens = torch.tensor([65, 3, 3, 499, 0, 10, 200])
    found = draft.confidence_head(hidden, draft.markov_head.embed(tokens))
    wanted = torch.stack([reference.confidence(int(t), row) for t, row in zip(tokens, expected, strict=True)])
    assert (found - wanted).abs().max() < 1e-5
    assert found.max() - found.min() > 1e-3


def test_a_tensor_that_never_comes_is_named(opened: DraftCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = dict(opened.tensors())
    del tensors["markov_head.joint_proj.bias"]
    monkeypatch.setattr(DraftCheckpoint, "tensors", lambda self: iter(tensors.items()))
    with pytest.raises(CheckpointError, match=r"the draft's markov_head\.joint_proj\.bias; it does not"):
        make(opened)


def test_dummy_weights_need_no_files(opened: DraftCheckpoint) -> None:
    cache: Any = [None] * opened.shape.num_layers
    draft = Draft(opened.shape, torch.float32, cache)
    for parameter in draft.parameters():
        parameter.fill_(float("nan"))
    draft.fill(SimpleNamespace(load_config=SimpleNamespace(load_format="dummy")))
    assert all(bool(parameter.isfinite().all()) for parameter in draft.parameters())
    assert draft.version == 0 and draft.versions is None
