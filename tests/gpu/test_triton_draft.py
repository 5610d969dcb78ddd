"""A draft's kernels on a CUDA device against the equations in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

triton_draft = pytest.importorskip("rollout.kernels.triton_draft", reason="needs Triton")

from rollout.kernels import triton_draft_head  # noqa: E402
from rollout.kernels.triton_decode import Tiles  # noqa: E402
from rollout.kernels.triton_draft_head import Tile  # noqa: E402
from tests.rollout import draft_cases as cases  # noqa: E402
from tests.rollout.draft_cases import (  # noqa: E402
    CASES,
    GROUPS_AND_BLOCKS,
    Case,
    Inputs,
    exact,
    make,
    relative_error,
)

BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16)
# Weights and values are rounded to bfloat16 (2^-9); the exponentials of float32 are approximate.
TOLERANCE = {torch.float32: 1e-5, BF16: 1e-2}
RELEASE = Case(lengths=(), heads=(48, 8), size=128, page=64, dtype=BF16, device="cuda")
SIZES = {
    "1K": replace(RELEASE, lengths=(1023,)),
    "100K": replace(RELEASE, lengths=(102400,)),
    "1M": replace(RELEASE, lengths=(2**20 - 7,), heads=(12, 2)),
    "every length about a tile": replace(RELEASE, lengths=tuple(range(70))),
    "one long, some short": replace(RELEASE, lengths=(50001, *(3 * n for n in range(31)))),
    "many": replace(RELEASE, lengths=tuple(977 * n % 3000 for n in range(256))),
    "small pages": replace(RELEASE, lengths=(5000, 17), page=16, layers=5),
    "large pages": replace(RELEASE, lengths=(5000, 17, 0), page=256),
    "pages of no power of two": replace(RELEASE, lengths=(5000, 47), page=48),
}


def run(inputs: Inputs, **options: object) -> torch.Tensor:
    """On a device whose free memory holds NaN, so that nothing is read that was not written."""
    torch.full((2**26,), torch.nan, device="cuda")
    return triton_draft.attention(*inputs.arguments(), torch.float32, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("early", [False, True])
def test_norm_and_rotation(dtype: torch.dtype, early: bool) -> None:
    for heads, size, beside in ((12, 16, 16), (48, 128, 2048), (8, 128, 3), (5, 32, 8), (1, 64, 0)):
        for num_rows in (1, 7, 1800):
            cases.check_norm_rotate("cuda", dtype, num_rows, heads, size, beside, early=early)
            cases.check_norm_rotate("cuda", dtype, num_rows, heads, size, beside, torch.float32, early=early)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_dtype", DTYPES)
def test_context_is_stored(dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    for heads, size, page, layers in ((2, 16, 16, 1), (8, 128, 64, 1), (8, 128, 16, 5), (3, 32, 48, 2)):
        for num_rows in (1, 8, 5000):
            cases.check_store("cuda", dtype, page_dtype, num_rows, heads, size, page, layers, early=num_rows == 8)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("name", CASES)
def test_tiny(name: str, dtype: torch.dtype | None) -> None:
    case = replace(CASES[name], device="cuda")
    inputs = make(case if dtype is None else replace(case, dtype=dtype))
    expected = exact(inputs)
    for programs in (1, 5, None):
        assert relative_error(run(inputs, programs=programs), expected) < TOLERANCE[inputs.kv.dtype], programs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "block"), GROUPS_AND_BLOCKS)
def test_every_tile_of_lines(group: int, block: int, dtype: torch.dtype) -> None:
    for size in (16, 128):
        inputs = make(
            Case(lengths=(500, 0, 40), heads=(2 * group, 2), block=block, size=size, dtype=dtype, device="cuda")
        )
        assert relative_error(run(inputs), exact(inputs)) < TOLERANCE[dtype], size


@pytest.mark.parametrize("name", SIZES)
def test_release_sizes(name: str) -> None:
    inputs = make(SIZES[name])
    got = run(inputs)
    assert relative_error(got, exact(inputs)) < TOLERANCE[BF16]
    assert torch.equal(got, run(inputs))
    assert torch.equal(got.to(BF16), triton_draft.attention(*inputs.arguments()))
    for _ in range(5):
        assert torch.equal(got, run(inputs, early=True))


@pytest.mark.parametrize("name", ["1K", "every length about a tile", "small pages"])
def test_release_sizes_in_float32(name: str) -> None:
    inputs = make(replace(SIZES[name], dtype=torch.float32))
    assert relative_error(run(inputs), exact(inputs)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tiles", [Tiles(16, 4, 6, 2), Tiles(32, 4, 3, 2), Tiles(64, 4, 3, 1), Tiles(64, 8, 4, 1)])
def test_every_shape_of_a_launch(tiles: Tiles) -> None:
    inputs = make(replace(RELEASE, lengths=(1500, 70)))
    assert relative_error(run(inputs, tiles=tiles), exact(inputs)) < TOLERANCE[BF16]


def test_scores_of_any_size() -> None:
    inputs = make(replace(RELEASE, lengths=(3000, 0), scale=30.0, dtype=torch.float32))
    assert relative_error(run(inputs), exact(inputs)) < 1e-4


def test_pages_far_apart() -> None:
    cases.check_far_pages("cuda")


def test_a_captured_graph_follows_the_lengths() -> None:
    """One graph for four requests: longer, shorter and fewer ones come without a new capture."""
    shared = make(replace(RELEASE, lengths=(5000,) * 4))
    graph = torch.cuda.CUDAGraph()
    run(shared)
    with torch.cuda.graph(graph):
        out = triton_draft.attention(*shared.arguments(), torch.float32, early=True)
    for seed, lengths in enumerate(((100,) * 4, (5000, 3, 0, 1024), (7, 2000, 0, 0), (0, 0, 0, 0))):
        inputs = make(replace(RELEASE, lengths=lengths, seed=seed + 1))
        shared.kv.fill_(torch.nan)
        shared.kv[: len(inputs.kv)] = inputs.kv
        shared.blocks.block_table.fill_(2**30)
        shared.blocks.block_table[:, : inputs.blocks.block_table.shape[1]] = inputs.blocks.block_table
        shared.blocks.lengths.copy_(inputs.blocks.lengths)
        for name in ("q", "k", "v"):
            getattr(shared, name).copy_(getattr(inputs, name))
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, exact(inputs)) < TOLERANCE[BF16], lengths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 32, 33, 40, 256])
def test_cell(num_rows: int, dtype: torch.dtype) -> None:
    for rank in (16, 20, 256, 300):
        for size in (0.01, 1.0, 100.0):
            cases.check_rnn("cuda", dtype, num_rows, rank, size, early=rank == 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 17, 33, 64, 65, 256])
def test_logits(num_rows: int, dtype: torch.dtype) -> None:
    for rank, vocabulary in ((16, 512), (20, 333), (256, 1000)):
        cases.check_logits("cuda", dtype, num_rows, rank, vocabulary)
        cases.check_logits("cuda", dtype, num_rows, rank, vocabulary, lambda base: base, early=True)


@pytest.mark.parametrize("num_rows", [1, 13, 32, 100])
def test_logits_of_the_release(num_rows: int) -> None:
    cases.check_logits("cuda", BF16, num_rows, 256, 201024)
    cases.check_logits("cuda", BF16, num_rows, 256, 201024, lambda base: base, early=True)


@pytest.mark.parametrize("tile", [Tile(64, 4, 2, 2), Tile(64, 4, 3, 2), Tile(32, 4, 6, 2), Tile(128, 8, 3, 1)])
def test_every_shape_of_the_logits_launch(tile: Tile) -> None:
    cases.check_logits("cuda", BF16, 5, 256, 5000, tile=tile)


@pytest.mark.parametrize("requests", [1, 20])
def test_a_block_is_the_same_early_and_late(requests: int) -> None:
    """Norms, context, attention, and seven turns of cell and logits in one graph, bit for bit."""
    inputs = make(replace(RELEASE, lengths=(700,) * requests))
    draw, rank, vocabulary = cases.Draw("cuda", 0), 256, 5000
    rows = 7 * requests
    weight, angles = 1 + 0.2 * draw(128), cases.angles(torch.arange(rows, device="cuda"), 128)
    x, context = draw(rows, 6144, dtype=BF16), draw(rows, 2048, dtype=BF16)
    w1, w2 = draw(vocabulary, rank, dtype=BF16), draw(vocabulary, rank, dtype=BF16)
    joint = draw(3 * rank, 2 * rank + 4608, dtype=BF16)[:, : 2 * rank] / 16
    prepared, base = draw(requests, 7, 3 * rank), 5 * draw(requests, 7, vocabulary)
    slots = torch.arange(rows, device="cuda") + 64 * int(inputs.blocks.block_table[0, 0])
    slots[64:] = -1

    def block(early: bool) -> list[torch.Tensor]:
        q = triton_draft.norm_rotate(x, weight, angles, 1e-6, early=early)
        triton_draft.store_context(context, weight, angles, 1e-6, inputs.kv, slots, early=early)
        attended = triton_draft.attention(q, *inputs.arguments()[1:], early=early)
        states, out = torch.zeros(2, requests, rank, device="cuda"), torch.empty(requests, rank, device="cuda")
        tokens, logits = attended[:requests, 0, 0].abs().long() * 7 % vocabulary, []
        for place in range(7):
            given, made = states[place % 2], states[1 - place % 2]
            triton_draft_head.rnn_step(prepared[:, place], given, tokens, w1, joint, made, out, early=early)
            logits.append(triton_draft_head.token_logits(base[:, place], out, w2, early=early))
            tokens = logits[-1].argmax(-1)
        return [attended, *logits]

    expected = block(False)
    graph = torch.cuda.CUDAGraph()
    block(True)
    with torch.cuda.graph(graph):
        found = block(True)
    for _ in range(20):
        for tensor in found:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
