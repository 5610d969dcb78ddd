"""The inputs that tests.benchmarks.draft_gpu builds, on the CPU: torch functions in the kernels' places, tiny sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rollout.kernels import draft_fallback, triton_draft, triton_draft_head
from tests.benchmarks import draft_gpu
from tests.rollout.draft_cases import relative_error

SHAPE = draft_gpu.Shape(
    heads=(6, 2), size=16, page=16, block=3, rank=16, hidden=32, vocabulary=100, device="cpu"
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_place_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (triton_draft, ("norm_rotate", "store_context", "attention")),
        (triton_draft_head, ("rnn_step", "token_logits")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(draft_fallback, name))


def test_every_row_can_be_built_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(draft_gpu.rows(SHAPE, contexts=(20, 50), requests=(1, 3)))
    assert len({row.name for row in rows}) == len(rows) == 4 + 1 + 2 + 3 + 3 + 4
    for row in rows:
        work = row.make(0)
        assert work.error() < work.limit and work.num_bytes > 0, row.name
        assert (work.other is None) == ("one of" in row.name)
        options = {"tiles" if row.shapes is draft_gpu.TILES else "tile": row.shapes[0]} if row.shapes else {}
        work.ours(early=True, **options)
    # A check that cannot fail is none.
    monkeypatch.setattr(triton_draft, "attention", lambda *given, **options: given[0] * 0.0)
    assert rows[0].make(0).error() == pytest.approx(1.0)


def test_torch_s_attention_is_given_the_same() -> None:
    work = draft_gpu.attention(SHAPE, (20, 20), 0)
    assert work.other is not None
    rows = work.other().transpose(1, 2).flatten(0, 1)
    assert relative_error(rows, work.ours(out_dtype=torch.float32).double()) < 1e-2


def test_torch_s_logits_are_given_the_same() -> None:
    work = draft_gpu.logits(SHAPE, 3, 0)
    assert work.other is not None and relative_error(work.other(), work.ours().double()) < 1e-2
