"""Prefill attention on a CUDA device against the equations in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout.kernels import reference
from tests.rollout.decode_cases import Case, Inputs, exact, make, relative_error
from tests.rollout.test_triton_prefill import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels import triton_prefill
    from rollout.kernels.prefill_tiles import Tiles

BF16, F32 = torch.bfloat16, torch.float32
# Queries, weights and values are rounded to bfloat16 (2^-9); float32 is exact products in float32.
TOLERANCE = {F32: 1e-5, BF16: 1e-2}
RELEASE = Case(step=(), heads=(48, 8), head_dim=128, extent=1024, page=128, q_clip=22.627417, dtype=BF16)
FULL = replace(RELEASE, log_scaling=(0.1, 1024))
SLIDING = replace(RELEASE, window=1024, page=16, layers_per_page=5)
SIZES = {
    "first chunk": replace(FULL, step=((0, 1300),)),
    "later chunk": replace(FULL, step=((2500, 700),)),
    "around the extent": replace(FULL, step=((950, 150), (1023, 1), (1024, 1), (1087, 2), (960, 64))),
    "many prompts": replace(FULL, step=tuple((0, 17 * n + 1) for n in range(20)), padding=30),
    "small pages": replace(FULL, step=((1500, 300),), page=8),
    "sliding": replace(SLIDING, step=((0, 1300),)),
    "sliding, later chunks": replace(SLIDING, step=((3000, 200), (1000, 100), (0, 70), (1023, 1))),
    "sliding, pages of 64": replace(SLIDING, step=((3000, 200),), page=64),
    "prepared": replace(FULL, step=((1200, 300),), prepared=True),
}


def run(inputs: Inputs, **options: object) -> torch.Tensor:
    """On a device whose free memory holds NaN, so that nothing is read or left that was not written."""
    torch.full((2**26,), torch.nan, device="cuda")
    return triton_prefill.attention(*inputs.arguments(), **options)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", CASES)
def test_tiny(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(CASES[name], dtype=dtype, device="cuda"))
    expected = exact(inputs)
    assert relative_error(run(inputs), expected) < TOLERANCE[dtype]
    if not inputs.case.padding and not inputs.case.prepared:
        assert relative_error(reference.attention(*inputs.arguments()), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", SIZES)
def test_release_sizes(name: str) -> None:
    inputs = make(replace(SIZES[name], device="cuda"))
    got, expected = run(inputs), exact(inputs)
    assert relative_error(got, expected) < TOLERANCE[BF16]
    # No single row may hide behind the others.
    rows = (got.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
    assert float(rows.max()) < 3 * TOLERANCE[BF16], int(rows.argmax())
    assert torch.equal(got, run(inputs))
    assert torch.equal(got.to(BF16), run(inputs, out_dtype=BF16))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [(12, 2), (3, 1), (4, 4)])
def test_head_layouts(head_dim: int, heads: tuple[int, int]) -> None:
    inputs = make(replace(FULL, step=((130, 200), (0, 65)), heads=heads, head_dim=head_dim, extent=100, device="cuda"))
    assert relative_error(run(inputs), exact(inputs)) < TOLERANCE[BF16]


def test_float32_at_release_sizes() -> None:
    inputs = make(replace(FULL, step=((1100, 100),), dtype=F32, device="cuda"))
    assert relative_error(run(inputs), exact(inputs)) < TOLERANCE[F32]


def test_the_ring_in_shared_memory_gives_what_the_ring_in_global_memory_gives() -> None:
    """Same products, same order: only how biases travel differs."""
    tiles = Tiles(64, 2, 64, 8, 3)
    for case in (FULL, SLIDING):
        inputs = make(replace(case, step=((1500, 300), (0, 500)), device="cuda"))
        plain = run(inputs, tiles=tiles._replace(shared=False))
        assert relative_error(run(inputs, tiles=tiles), plain.double()) < 1e-6


@pytest.mark.parametrize(
    "shape",
    [
        (64, 2, 64, 12, 2, True, True), (64, 2, 64, 12, 3, True, True), (64, 2, 64, 12, 4, True, True),
        (64, 2, 64, 12, 3, True, True, False), (64, 2, 64, 8, 2), (64, 2, 64, 8, 3), (64, 2, 64, 8, 4),
        (32, 2, 64, 4, 2), (64, 1, 64, 4, 2), (64, 2, 32, 8, 4), (32, 2, 32, 4, 3),
    ],
)  # fmt: skip
def test_every_shape_of_a_launch(shape: tuple[int, ...]) -> None:
    for case in (FULL, SLIDING):
        inputs = make(replace(case, step=((1200, 150), (0, 300)), device="cuda"))
        assert relative_error(run(inputs, tiles=Tiles(*shape)), exact(inputs)) < TOLERANCE[BF16]


@pytest.mark.parametrize("name", ["first chunk", "sliding, later chunks"])
def test_many_runs_agree(name: str) -> None:
    """What one warpgroup loads and others compute with must not depend on who is faster."""
    inputs = make(replace(SIZES[name], device="cuda"))
    expected = run(inputs)
    others = [triton_prefill.attention(*inputs.arguments()) for _ in range(50)]
    assert all(torch.equal(other, expected) for other in others)


SPECIALIZED = (64, 2, 64, 12, 3, True, True)
VARIANTS = {
    "held": (*SPECIALIZED, True, False, True),
    "many": (*SPECIALIZED, True, True, False),
    "both": (*SPECIALIZED, True, True, True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SIZES)
def test_variants_give_what_the_plain_kernel_gives(name: str, variant: str) -> None:
    """Small sizes, so that programs have a tile or two; one program for many of them: the test after this."""
    inputs, tiles = make(replace(SIZES[name], device="cuda")), Tiles(*VARIANTS[variant])
    for out_dtype in (F32, BF16) if name == "first chunk" else (BF16,):
        expected = run(inputs, tiles=Tiles(*SPECIALIZED), out_dtype=out_dtype)
        got = run(inputs, tiles=tiles, out_dtype=out_dtype)
        assert relative_error(got, expected.double()) < 1e-3
        assert all(torch.equal(run(inputs, tiles=tiles, out_dtype=out_dtype), got) for _ in range(5))


@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("variant", ["many", "both"])
def test_how_many_programs_share_the_tiles_changes_no_bit(
    variant: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, tiles = make(replace(SLIDING, step=((900, 300), (0, 500)), device="cuda")), Tiles(*VARIANTS[variant])
    expected = run(inputs, tiles=tiles)
    monkeypatch.setattr(triton_prefill, "_multiprocessors", lambda device: programs)
    assert torch.equal(run(inputs, tiles=tiles), expected)


@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_extreme_sinks_and_logits(sink: float) -> None:
    inputs = make(replace(FULL, step=((1500, 100),), scale=40.0, q_clip=45.0, device="cuda"))
    inputs.sink.fill_(sink)
    got = run(inputs)
    assert bool(got.isfinite().all())
    # Logits reach 180 here, so that rounding a query moves them most.
    assert relative_error(got, exact(inputs)) < 0.05


def test_biases_are_not_rounded_to_bfloat16() -> None:
    inputs = make(replace(FULL, step=((1100, 200),), device="cuda"))
    inputs.q.zero_()
    inputs.r.mul_(4)
    assert relative_error(run(inputs), exact(inputs)) < 4e-3


def test_a_captured_graph_follows_the_lengths() -> None:
    shared = make(replace(FULL, step=((700, 300),), device="cuda"))
    graph = torch.cuda.CUDAGraph()
    run(shared)
    with torch.cuda.graph(graph):
        out = triton_prefill.attention(*shared.arguments())
    shared.batch.seq_lens.fill_(950)  # the same pages, the chunk 50 positions earlier
    graph.replay()
    assert torch.equal(out, run(shared))
