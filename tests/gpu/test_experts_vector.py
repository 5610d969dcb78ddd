"""Experts of few tokens by matrix-vector products on the device: against the reference, Marlin, and themselves.

    python -m pytest -q -s tests/gpu/test_experts_vector.py

Needs vLLM 0.30 built for CUDA, no engine.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from inkling_rl.formats import ExpertFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels import triton_moe_vector
    from rollout.kernels.compile_ahead import compile_ahead
    from rollout.kernels.triton_moe_vector import Shape
    from tests.gpu import expert_cases as cases
    from tests.rollout import moe_vector_cases as vector_cases

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
# Experts, chosen, hidden size, expert width: the tiny model, odd sizes (padding, three blocks of columns), the release.
SMALL = ((16, 4, 128, 64), (24, 3, 192, 96), (24, 3, 256, 160))
RELEASE = (16, 8, 4608, 2304)
ROWS = (1, 3, 8)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_small_layers_equal_the_reference(expert_format: ExpertFormat) -> None:
    layers = [vector_cases.make_layer("cuda", expert_format, size) for size in SMALL]
    other = Shape(2, 4), Shape(2, 4, blocks=2)
    compile_ahead(partial(launch, layer, *shapes) for layer in layers for shapes in ((None, None), other))
    for layer in layers:
        vector_cases.check(layer, 3, torch.float32, *other)
        for tokens in ROWS:
            vector_cases.check(layer, tokens, torch.float32)
    vector_cases.check_nan(layers[0])


def launch(layer: vector_cases.Layer, up: Shape | None, down: Shape | None) -> None:
    x, weights, chosen = vector_cases.draw(layer, 3)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    triton_moe_vector.experts(x, weights, chosen, layer.parameters, vector_cases.CAPS, out, up, down)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_the_sublayer_equals_the_reference_and_marlin(expert_format: ExpertFormat) -> None:
    """Nearer to the reference than Marlin, the same bits every time, launched early or not, in a graph or not."""
    moe = cases.make_moe(expert_format, RELEASE, torch.bfloat16)
    weights, seen = cases.weights_of(moe), []
    moe.capture_fn = seen.append
    x = cases.inputs(1, moe, torch.bfloat16)
    compile_ahead(partial(run_directly, moe, x, *moe._route(x), early=early) for early in (True, False))
    for rows in ROWS:
        x = cases.inputs(rows, moe, torch.bfloat16)
        moe.use(cases.kernels())
        marlin = moe(x)
        moe.use(cases.kernels(vector_rows=max(ROWS)))
        got = moe(x)
        same = cases.same_choice(moe, x, seen[-1])
        expected = cases.expected_of(moe, weights, x)[same]
        errors = [cases.relative_error(y[same], expected) for y in (got, marlin)]
        print(f"{expert_format} {rows} rows: relative error {errors[0]:.1e}, Marlin {errors[1]:.1e}")
        # One rounding to a half on the way, one to bfloat16 at the end.
        assert errors[0] < 2e-3 and errors[0] <= errors[1] and not torch.equal(got, marlin)
        for _ in range(20):
            assert torch.equal(moe(x), got)
        check_graph(moe, x, got)
        check_launches(moe, x, got)


def check_graph(moe: cases.SparseMoe, x: torch.Tensor, expected: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [moe(x) for _ in range(3)]
    for _ in range(5):
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in captured)


def check_launches(moe: cases.SparseMoe, x: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits where the second kernel waits for the first, and for one token alone what it gets in company."""
    inputs = x, *moe._route(x)
    assert torch.equal(run_directly(moe, *inputs, early=False), expected)
    assert torch.equal(run_directly(moe, *(tensor[-1:].clone() for tensor in inputs)), expected[-1:])


def run_directly(
    moe: cases.SparseMoe, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, early: bool = True
) -> torch.Tensor:
    parameters = {name: parameter.data for name, parameter in moe.experts.named_parameters()}
    out = torch.empty_like(x)
    return triton_moe_vector.experts(x, weights, chosen, parameters, moe.experts.caps, out, early=early)
