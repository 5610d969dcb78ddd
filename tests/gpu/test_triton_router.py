"""The router on the device: precision of its logits, its choice, and equal bits whatever the number of tokens."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels.triton_router import route
    from tests.rollout import around_attention_cases as cases

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(16, 4, 128), (384, 8, 4608), (128, 8, 2304)])
@pytest.mark.parametrize("rows", [1, 8, 65, 3000])
def test_route(dtype: torch.dtype, rows: int, experts: int, top_k: int, hidden: int) -> None:
    cases.check_route("cuda", dtype, rows, experts, top_k, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_alone(dtype: torch.dtype) -> None:
    for rows in (1, 40, 200, 2000):
        cases.check_route_plans("cuda", dtype, rows, 384, 4608)
    cases.check_route_plans("cuda", dtype, 18, 16, 128)


def test_ties() -> None:
    cases.check_route_ties("cuda")


@pytest.mark.parametrize("rows", [1, 100])
def test_a_captured_step_sees_new_inputs(rows: int) -> None:
    """As an engine's: nothing that is launched waits for the device."""
    x, router = torch.randn(rows, 4608, device="cuda").bfloat16(), torch.randn(384, 4608, device="cuda")
    bias = torch.zeros(384, device="cuda")
    route(x, router, bias, 8, 8.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(x, router, bias, 8, 8.0)
    x.neg_()
    graph.replay()
    one_after_another = route(x, router, bias, 8, 8.0, early=False)
    assert all(torch.equal(got, new) for got, new in zip(captured, one_after_another, strict=True))
