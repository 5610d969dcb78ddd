"""The fused short convolution and mixture on the device, at full width too."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels.compile_ahead import compile_ahead
    from rollout.kernels.triton_conv_mix import TILES
    from tests.rollout import around_attention_cases as cases

DTYPES = (torch.float32, torch.bfloat16)
# Whole chunks, a last one that is not full, one that is the only one; the widest first, for they compile longest.
WIDTHS = (
    (4608, torch.float32),
    (4608, torch.bfloat16),
    (2304, torch.bfloat16),
    (128, torch.float32),
    (128, torch.bfloat16),
)
FEW = ((0, 3), (7, 1), (1, 1), (2, 4), (31, 2))
STEP = ((0, 70), (7, 1), (1, 1), (2, 4), (31, 2), (0, 1), (64, 17), (1000, 8))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Widest and most outputs first: they take longest."""
    calls = []
    for queries, (hidden, dtype) in product((3, 1), WIDTHS):
        make = partial(cases.ConvMixCase, ((7, 1),), hidden, 2, queries, dtype=dtype, device="cuda")
        for early in (True, False):
            calls += [partial(make(residual=residual).run, None, early=early) for residual in (True, False)]
        if hidden != 2304:
            calls += [partial(make(residual=True).run, tile) for tile in cases.same_bits(TILES[queries], queries)]
        if dtype is torch.bfloat16 and queries == 1 and hidden != 2304:
            mixed = cases.ConvMixCase(((7, 1),), hidden, 2, 1, True, torch.float32, "cuda", torch.bfloat16)
            calls.append(partial(mixed.run, None))
    compile_ahead(calls)


@pytest.mark.parametrize("tokens_per_block", [1, 4, 64])
def test_tap_sources(tokens_per_block: int) -> None:
    cases.check_tap_sources("cuda", STEP, tokens_per_block)
    cases.check_tap_sources("cuda", ((5, 3000), (0, 0), (2, 1)), tokens_per_block)
    cases.check_shared_prefix("cuda")


@pytest.mark.parametrize(("hidden", "dtype"), WIDTHS)
@pytest.mark.parametrize("queries", [1, 3])
def test_conv_mix(dtype: torch.dtype, hidden: int, queries: int) -> None:
    for blocks in (0, 1, 2, 5, 8):
        for step in (STEP, FEW):
            cases.check_conv_mix(
                "cuda", dtype, blocks, queries, hidden=hidden, residual=blocks != 2, step=step, tile=None
            )


@pytest.mark.parametrize("hidden", [128, 4608])
def test_conv_mix_of_two_dtypes(hidden: int) -> None:
    cases.check_conv_mix_of_two_dtypes("cuda", hidden, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [128, 4608])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype, hidden: int) -> None:
    cases.check_conv_mix_chunks("cuda", dtype, hidden, None)
    for queries in (1, 3):
        cases.check_conv_mix_batches("cuda", dtype, hidden, queries, TILES[queries])
        # More rows than programs, and fewer.
        whole = cases.ConvMixCase(((0, 600),), hidden, 3, queries, True, dtype, "cuda")
        many = whole.run(None)
        part = whole.rows(570, 600).run(None)
        assert torch.equal(part[0], many[0][570:]) and torch.equal(part[1], many[1][:, 570:])


def test_many_rows() -> None:
    """Offsets beyond 2^31 elements: 9 sources of 60,000 rows."""
    cases.check_conv_mix("cuda", torch.bfloat16, 8, 1, hidden=4608, step=((3, 60_000),), tile=None)


def test_a_captured_step_sees_new_inputs_and_lengths() -> None:
    """As an engine's: nothing that is launched waits for the device or is made from what the host read."""
    case = cases.ConvMixCase(((7, 1), (100, 1), (2, 1)), 4608, 3, 1, True, torch.bfloat16, "cuda")
    first = case.run(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run(None)
    case.x.neg_()  # and not flipped, as the slots are: the same inputs would be stored at the same slots
    case.batch.seq_lens.sub_(1)
    case.batch.slots.copy_(case.batch.slots.flip(0))
    graph.replay()
    for got, expected, before in zip(captured, case.run(None), first, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(got.nan_to_num(), before.nan_to_num())
