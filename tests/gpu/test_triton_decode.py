"""Decode attention on a CUDA device against the equations in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout.kernels import reference
from tests.rollout.decode_cases import CASES, Case, Inputs, exact, make, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

triton_decode = pytest.importorskip("rollout.kernels.triton_decode", reason="needs Triton")
Tiles = triton_decode.Tiles

BF16 = torch.bfloat16
# Weights and values are rounded to bfloat16 (2^-9), as are queries; the exponentials of float32 are approximate.
TOLERANCE = {torch.float32: 1e-5, BF16: 1e-2}
RELEASE = Case(step=(), heads=(48, 8), head_dim=128, extent=1024, page=64, q_clip=22.627417, dtype=BF16)
FULL = replace(RELEASE, log_scaling=(0.1, 1024))
SLIDING = replace(RELEASE, window=1024, page=8, layers_per_page=5)
SIZES = {
    "decode": replace(FULL, step=((5000, 1),)),
    "decode, bf16 profiles": replace(FULL, step=((5000, 1),), proj_dtype=BF16),
    "verify 8": replace(FULL, step=((5000, 8),)),
    "verify, every count": replace(FULL, step=tuple((600 * n, n) for n in range(1, 9))),
    "around the extent": replace(FULL, step=tuple((past, 1) for past in (1022, 1023, 1024, 1025, 1087, 1088))),
    "one long, many short": replace(FULL, step=((9000, 1), *(((7 * n), 1) for n in range(31)))),
    "many": replace(FULL, step=tuple((11 * n, 1) for n in range(300)), padding=20),
    "sliding": replace(SLIDING, step=tuple((past, 1) for past in (0, 1, 500, 1022, 1023, 1024, 3000))),
    "sliding, verify": replace(SLIDING, step=((3000, 8), (1020, 8), (0, 8))),
    "sliding, large pages": replace(SLIDING, step=((3000, 1), (1022, 1), (70, 1)), page=64, layers_per_page=1),
    "sliding, verify, large pages": replace(SLIDING, step=((3001, 8), (1020, 3), (0, 8)), page=128, layers_per_page=1),
    "large pages": replace(FULL, step=((5000, 2),), page=256),
    "prepared": replace(FULL, step=((5000, 2),), prepared=True),
}


def run(inputs: Inputs, **options: object) -> torch.Tensor:
    """On a device whose free memory holds NaN, so that nothing is read that was not written."""
    torch.full((2**26,), torch.nan, device="cuda")
    return triton_decode.attention(*inputs.arguments(), max_queries=inputs.case.max_queries, **options)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", CASES)
def test_tiny(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(CASES[name], dtype=dtype, device="cuda"))
    expected = exact(inputs)
    for programs in (1, 5, None):
        assert relative_error(run(inputs, programs=programs), expected) < TOLERANCE[dtype], programs
    if not inputs.case.padding and not inputs.case.prepared:
        assert relative_error(reference.attention(*inputs.arguments()), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", SIZES)
def test_release_sizes(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(SIZES[name], dtype=dtype, device="cuda"))
    got = run(inputs)
    assert relative_error(got, exact(inputs)) < TOLERANCE[dtype]
    assert torch.equal(got, run(inputs))
    assert torch.equal(got.to(BF16), run(inputs, out_dtype=BF16))
    for _ in range(5):
        assert torch.equal(got, run(inputs, early_merge=False))


@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_extreme_sinks_and_logits(sink: float) -> None:
    inputs = make(replace(FULL, step=((3000, 1), (10, 3)), scale=40.0, q_clip=45.0, device="cuda"))
    inputs.sink.fill_(sink)
    got = run(inputs)
    assert bool(got.isfinite().all())
    # Logits reach 180 here, so that rounding a query moves them most; 6e-3 on an emulation of these products.
    assert relative_error(got, exact(inputs)) < 0.05
    full = make(replace(inputs.case, dtype=torch.float32))
    full.sink.fill_(sink)
    assert relative_error(run(full), exact(full)) < 1e-4


SHAPES = {
    1: (Tiles(16, 1, 3, 8), Tiles(16, 2, 6, 4), Tiles(32, 2, 4, 4), Tiles(64, 4, 3, 2), Tiles(64, 8, 4, 1)),
    8: (Tiles(16, 4, 6, 2), Tiles(32, 4, 3, 2), Tiles(64, 4, 2, 1), Tiles(64, 8, 4, 1)),
}


@pytest.mark.parametrize(("max_queries", "tiles"), [(n, tiles) for n, shapes in SHAPES.items() for tiles in shapes])
def test_every_shape_of_a_launch(max_queries: int, tiles: Tiles) -> None:
    inputs = make(replace(FULL, step=((1500, max_queries), (70, 1)), device="cuda"))
    assert relative_error(run(inputs, tiles=tiles), exact(inputs)) < TOLERANCE[BF16]


def test_a_captured_graph_follows_the_lengths() -> None:
    """One graph for four requests: longer, shorter and fewer ones come without a new capture."""
    steps = (((100, 1),) * 4, ((5000, 1), (3, 1), (0, 1), (1024, 1)), ((7, 1), (2000, 1)))
    shared = make(replace(FULL, step=((5000, 1),) * 4, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    run(shared)
    with torch.cuda.graph(graph):
        out = triton_decode.attention(*shared.arguments(), max_queries=1)
    for step in steps:
        inputs = make(replace(FULL, step=step, padding=4 - len(step), device="cuda", seed=len(step)))
        blocks = inputs.kv.shape[0]
        shared.kv[:blocks] = inputs.kv
        shared.batch.block_table[:, : inputs.batch.block_table.shape[1]] = inputs.batch.block_table
        for name in ("q", "r", "sink", "gate"):
            getattr(shared, name).copy_(getattr(inputs, name))
        for name in ("q_scale", "r_scale", "proj"):
            getattr(shared, name).copy_(getattr(inputs, name))
        shared.batch.query_start.copy_(inputs.batch.query_start)
        shared.batch.seq_lens.copy_(inputs.batch.seq_lens)
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, exact(inputs)) < TOLERANCE[BF16], step
