"""Prefill attention on a CUDA device against the equations in float64.

Each test compiles what it is about on all cores before anything runs (`compile_ahead`): most of its time. Rows as an
engine has them, prepared, go through `gluon_prefill`; raw ones, and other sizes and dtypes, through Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch

from rollout.kernels import reference
from tests.rollout.decode_cases import Case, Inputs, exact, make, relative_error
from tests.rollout.test_triton_prefill import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels import triton_prefill
    from rollout.kernels.compile_ahead import compile_ahead
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
    "sliding, many prompts": replace(SLIDING, step=tuple((0, 17 * n + 1) for n in range(20)), padding=30),
    "sliding, pages of 64": replace(SLIDING, step=((3000, 200),), page=64),
}
RAW = ("first chunk", "around the extent", "sliding, later chunks")
PLAIN = (64, 2, 64, 12, 3, True, True)
VARIANTS = {
    # ..., lazy, held, turns
    "in turn": (*PLAIN, True, False, True),
    "held": (*PLAIN, True, True, False),
    "held, in turn": (*PLAIN, True, True, True),
}
Call = tuple[Inputs, dict[str, object]]


def run(inputs: Inputs, **options: object) -> torch.Tensor:
    """On a device whose free memory holds NaN, so that nothing is read or left that was not written."""
    torch.full((2**26,), torch.nan, device="cuda")
    return triton_prefill.attention(*inputs.arguments(), **options)


def compiled(calls: Iterable[Call]) -> list[Call]:
    """The calls, their kernels compiled."""
    calls = list(calls)
    compile_ahead([partial(triton_prefill.attention, *inputs.arguments(), **options) for inputs, options in calls])
    return calls


def worst_row(got: torch.Tensor, expected: torch.Tensor) -> float:
    """No single row may hide behind the others."""
    rows = (got.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
    return float(rows.max())


def test_release_sizes() -> None:
    """As an engine calls it, and a few with raw rows."""
    cases = [replace(case, prepared=True) for case in SIZES.values()] + [SIZES[name] for name in RAW]
    inputs = [make(replace(case, device="cuda")) for case in cases]
    for one, options in compiled((one, {"out_dtype": BF16}) for one in inputs):
        got, expected = run(one, **options), exact(one)
        assert relative_error(got, expected) < TOLERANCE[BF16], one.case
        assert worst_row(got, expected) < 3 * TOLERANCE[BF16], one.case
        assert torch.equal(got, run(one, **options)), one.case


@pytest.mark.parametrize("name", ["first chunk", "sliding, later chunks", "sliding, many prompts", "sliding"])
def test_variants_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with few programs, so that each has many tiles, and whoever is faster: what one warpgroup loads and others
    compute with, in turn or not, must not depend on it."""
    inputs = make(replace(SIZES[name], prepared=True, device="cuda"))
    shapes = {"plain": PLAIN, **VARIANTS}
    dtypes = (F32, BF16) if name == "sliding, later chunks" else (BF16,)
    calls = [{"tiles": Tiles(*shape), "out_dtype": dtype} for dtype in dtypes for shape in shapes.values()]
    for _, options in compiled((inputs, options) for options in calls):
        expected = run(inputs, tiles=Tiles(*PLAIN), out_dtype=options["out_dtype"])
        got = run(inputs, **options)
        assert relative_error(got, expected.double()) < 1e-3, options
        assert all(torch.equal(run(inputs, **options), got) for _ in range(10)), options
        for programs in (1, 3, 132):
            with monkeypatch.context() as patch:
                patch.setattr(triton_prefill, "_multiprocessors", lambda device, programs=programs: programs)
                assert torch.equal(run(inputs, **options), got), (options, programs)


def test_tiny() -> None:
    cases = [replace(case, dtype=dtype) for dtype in (F32, BF16) for case in CASES.values()]
    inputs = [make(replace(case, device="cuda")) for case in cases]
    for one, _ in compiled((one, {}) for one in inputs):
        expected, tolerance = exact(one), TOLERANCE[one.case.dtype]
        assert relative_error(run(one), expected) < tolerance, one.case
        if not one.case.padding and not one.case.prepared:
            assert relative_error(reference.attention(*one.arguments()), expected) < tolerance, one.case


def test_head_layouts() -> None:
    """Of every size with pairs of heads that share keys; with heads that do not, of two."""
    sizes = [((12, 2), dim) for dim in (16, 32, 64, 128, 256)] + [((3, 1), 64), ((4, 4), 128)]
    case = replace(FULL, step=((130, 200), (0, 65)), extent=100, device="cuda")
    inputs = [make(replace(case, heads=heads, head_dim=dim)) for heads, dim in sizes]
    for one, _ in compiled((one, {}) for one in inputs):
        assert relative_error(run(one), exact(one)) < TOLERANCE[BF16], one.case


def test_shapes_of_a_launch() -> None:
    """In Gluon with fewer stages, and maxima followed at once; in Triton with the ring in either memory."""
    triton_tiles = Tiles(64, 2, 64, 8, 3)
    shapes = [
        Tiles(*PLAIN[:4], 2, True, True), Tiles(*PLAIN, False), triton_tiles,
        triton_tiles._replace(shared=False), Tiles(32, 2, 64, 4, 2), Tiles(64, 1, 64, 4, 2), Tiles(64, 2, 32, 8, 4),
    ]  # fmt: skip
    cases = [replace(case, step=((1200, 150), (0, 300)), prepared=True, device="cuda") for case in (FULL, SLIDING)]
    inputs = [make(case) for case in cases]
    calls = compiled((one, {"tiles": tiles}) for one in inputs for tiles in shapes)
    got = {(one.case, options["tiles"]): run(one, **options) for one, options in calls}
    for one in inputs:
        expected = exact(one)
        assert all(relative_error(got[one.case, tiles], expected) < TOLERANCE[BF16] for tiles in shapes)
        plain = got[one.case, triton_tiles._replace(shared=False)]
        assert relative_error(got[one.case, triton_tiles], plain.double()) < 1e-6


def test_float32_and_a_captured_graph() -> None:
    exactly = make(replace(FULL, step=((1100, 100),), dtype=F32, device="cuda"))
    shared = [make(replace(case, step=((700, 300),), prepared=True, device="cuda")) for case in (FULL, SLIDING)]
    compiled((one, {}) for one in (exactly, *shared))
    assert relative_error(run(exactly), exact(exactly)) < TOLERANCE[F32]
    for one in shared:
        graph = torch.cuda.CUDAGraph()
        run(one)
        with torch.cuda.graph(graph):
            out = triton_prefill.attention(*one.arguments())
        one.batch.seq_lens.fill_(950)  # the same pages, the chunk 50 positions earlier
        graph.replay()
        assert torch.equal(out, run(one))


def test_extremes() -> None:
    """Sinks that take everything or nothing, logits of 180; and with queries of nothing the bias has no error."""
    inputs = make(replace(FULL, step=((1500, 100),), scale=40.0, q_clip=45.0, device="cuda"))
    sliding = make(replace(SLIDING, step=((1500, 100),), scale=40.0, q_clip=45.0, prepared=True, device="cuda"))
    full = make(replace(inputs.case, prepared=True))
    for one, _ in compiled((one, {}) for one in (inputs, full, sliding)):
        for sink in (-80.0, 80.0):
            one.sink.fill_(sink)
            got = run(one)
            assert bool(got.isfinite().all())
            # Rounding a query moves such logits most, where it is not a prepared one.
            assert relative_error(got, exact(one)) < 0.05
    biased = make(replace(FULL, step=((1100, 200),), device="cuda"))
    biased.q.zero_()
    biased.r.mul_(4)
    assert relative_error(run(biased), exact(biased)) < 4e-3
