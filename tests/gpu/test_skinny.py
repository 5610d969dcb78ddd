"""Products of few rows on the device, and that what is fetched early is never what is computed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels import triton_skinny
    from rollout.kernels.compile_ahead import compile_ahead
    from rollout.kernels.triton_conv_mix import conv_mix
    from rollout.kernels.triton_router import route
    from rollout.kernels.triton_taps import tap_sources
    from tests.rollout import around_attention_cases
    from tests.rollout import skinny_cases as cases

BF16, HIDDEN, WIDTH = torch.bfloat16, 4608, 6144
ROWS = (1, 2, 4, 8, 9, 16, 17, 32)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All at once."""
    x_QTH, sinks = torch.empty(3, 32, HIDDEN, device="cuda", dtype=BF16), torch.empty(48, HIDDEN, device="cuda")
    weight, taps = torch.empty(64, HIDDEN, device="cuda", dtype=BF16), torch.empty(2, 32, HIDDEN, device="cuda")
    wide, keys_values = torch.empty(64, WIDTH, device="cuda", dtype=BF16), torch.stack([weight, weight])
    calls: list[Callable[[], Any]] = []
    for rows in (8, 16, 32):
        x = x_QTH[:, :rows]
        calls += [
            lambda x=x: triton_skinny.attention_inputs(x[:1], weight, None, sinks, None),
            lambda x=x: triton_skinny.attention_inputs(x, weight, keys_values, sinks, taps),
            lambda x=x: triton_skinny.linear(torch.empty_like(wide)[: x.shape[1]], wide),
            lambda x=x: triton_skinny.linear(x[0], weight),
            lambda x=x: triton_skinny.softcap_logits(x[0], weight, 30.0, 128),
        ]
    compile_ahead(calls)


@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int) -> None:
    cases.check_linear("cuda", rows, 4608, WIDTH)
    cases.check_linear("cuda", rows, 1003, HIDDEN)


@pytest.mark.parametrize("rows", ROWS)
def test_inputs_of_attention(rows: int) -> None:
    cases.check_inputs("cuda", rows, 15104, HIDDEN, sinks=48)
    cases.check_inputs("cuda", rows, 13056, HIDDEN, sinks=48, later=1024, taps=32)


@pytest.mark.parametrize("rows", ROWS)
def test_logits(rows: int) -> None:
    cases.check_logits("cuda", rows, 30011, 30208, HIDDEN)


@pytest.mark.parametrize("hidden", [328, 64])
def test_other_sizes(hidden: int) -> None:
    """A last step that is not full, or the only one; rows that do not fill a program."""
    for rows in (1, 13, 32):
        cases.check_linear("cuda", rows, 77, hidden)
    cases.check_inputs("cuda", 5, 101, hidden, sinks=17, later=37, taps=8)
    cases.check_logits("cuda", 5, 150, 400, hidden)


def test_rows_stand_alone() -> None:
    cases.check_rows_stand_alone("cuda", 4608, WIDTH)


def test_no_count_compiles_again() -> None:
    """Within 8, 16 or 32 rows."""
    weight, x_TC = torch.randn(64, HIDDEN, device="cuda").to(BF16), torch.randn(32, HIDDEN, device="cuda").to(BF16)
    kernels = lambda: len(triton_skinny._skinny_kernel.device_caches[torch.cuda.current_device()][0])
    for rows in (8, 16, 32):
        triton_skinny.linear(x_TC[:rows], weight)
    before = kernels()
    for rows in range(1, 33):
        triton_skinny.linear(x_TC[:rows], weight[: 1 + rows])
    assert kernels() == before


@pytest.mark.parametrize("captured", [False, True])
def test_what_the_kernel_before_wrote_is_what_is_read(captured: bool) -> None:
    """Inputs and weights that change right before; products that feed each other, as in a step."""
    draw = cases.Draw("cuda", 1)
    there, back = draw.weight(WIDTH, HIDDEN), draw.weight(HIDDEN, WIDTH)
    start, x_TC = draw.weight(4, HIDDEN) * 50, torch.empty(4, HIDDEN, device="cuda", dtype=BF16)
    source = there.clone()

    def chain(early: bool) -> torch.Tensor:
        x_TC.copy_(start)
        torch.mul(source, 1.5, out=there)
        for _ in range(4):
            y_TC = triton_skinny.linear(x_TC, there, early=early)
            x_TC.copy_(triton_skinny.linear(y_TC, back, early=early))
        return x_TC.clone()

    wanted = chain(early=False)
    graph, run = torch.cuda.CUDAGraph(), lambda: chain(early=True)
    if captured:
        run()
        with torch.cuda.graph(graph):
            out = chain(early=True)

        def run() -> torch.Tensor:
            graph.replay()
            return out

    assert torch.equal(run(), wanted)
    for _ in range(5):
        start.mul_(-0.5)
        source.mul_(-1.25)
        there.zero_()
        got = run().clone()
        assert torch.equal(got, chain(early=False)) and bool(got.abs().sum() > 0)


def chain(
    case: around_attention_cases.ConvMixCase, weights: dict[str, torch.Tensor], early: bool
) -> list[torch.Tensor]:
    """Four sublayers as a decode step has them, without attention and experts: each kernel reads what others wrote."""
    assert case.residual is not None
    rows, pool, running = len(case.x), case.pool.clone(), case.residual.clone()
    sources, out, y_TC = tap_sources(case.batch, rows, 4), torch.empty_like(case.x)[None], case.x.new_empty(rows, WIDTH)
    found: list[torch.Tensor] = [running, out, pool]
    y_TC.copy_(case.x.repeat(1, 2)[:, :WIDTH])
    for _ in range(4):
        x_TH = triton_skinny.linear(y_TC, weights["out"], early=early)
        conv_mix(
            x_TH, case.state(pool), sources, case.batch.slots, case.weight, running, case.blocks, case.queries,
            case.weights, 1e-6, 1e-6, running, out, early=early,
        )  # fmt: skip
        chosen = route(out[0], weights["router"], weights["bias"], 8, 8.0, early=early, constant=early)
        y_TC, *_ = triton_skinny.attention_inputs(out, weights["in"], None, weights["sinks"], None, early=early)
        found += [*chosen, y_TC]
    return found


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_step_of_kernels_that_all_start_early(rows: int, captured: bool) -> None:
    draw = cases.Draw("cuda", 2)
    weights = {
        "out": draw.weight(HIDDEN, WIDTH), "in": draw.weight(WIDTH, HIDDEN), "bias": torch.zeros(384, device="cuda"),
        "router": torch.randn(384, HIDDEN, device="cuda"), "sinks": torch.randn(48, HIDDEN, device="cuda"),
    }  # fmt: skip
    case = around_attention_cases.ConvMixCase(((100, 1),) * rows, HIDDEN, 3, 1, True, BF16, "cuda")
    compile_ahead([lambda early=early: chain(case, weights, early) for early in (False, True)])
    run = lambda: chain(case, weights, True)
    graph = torch.cuda.CUDAGraph()
    if captured:
        run()
        with torch.cuda.graph(graph):
            found = run()

        def run() -> list[torch.Tensor]:
            graph.replay()
            return found

    for _ in range(5):
        case.x.mul_(-0.75)
        got = [tensor.nan_to_num(7.0) for tensor in run()]  # the null block
        wanted = [tensor.nan_to_num(7.0) for tensor in chain(case, weights, False)]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert 0 < float(got[0].float().norm()) < 1e6 and float((got[0] == 7.0).float().mean()) < 1e-3
