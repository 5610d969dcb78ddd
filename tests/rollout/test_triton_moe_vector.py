"""Experts of few tokens under Triton's interpreter; `test_triton_moe_vector_compiled` runs this file.

Against the codes' values times float32 inputs, for both formats, with widths that the layout pads, chains that end in
the middle, experts that several tokens chose. What stands in for the matrix instruction there is tested beside it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from inkling_rl.formats import ExpertFormat
from rollout.kernels import triton_moe_vector
from rollout.kernels.triton_moe_vector import Shape
from rollout.plugin import vector_experts
from tests.rollout import moe_vector_cases as cases

# Experts, chosen, hidden size, expert width: the tiny model; padding of the width, chains that K does not fill.
SMALL, ODD = (6, 4, 128, 64), (5, 3, 192, 96)


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("tiles", [8, 4])
def test_equals_the_reference(expert_format: ExpertFormat, tiles: int) -> None:
    layer = cases.make_layer("cpu", expert_format, SMALL)
    cases.check(layer, 1 if tiles == 4 else 8, torch.float32, Shape(1, tiles), Shape(1, tiles, blocks=2))
    # Three blocks of columns: one per program.
    layer = cases.make_layer("cpu", expert_format, ODD)
    cases.check(layer, 3, torch.float32 if tiles == 4 else torch.bfloat16, Shape(2, tiles), Shape(4, tiles, blocks=2))


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_a_row_of_nan_stays_alone(expert_format: ExpertFormat) -> None:
    cases.check_nan(cases.make_layer("cpu", expert_format, SMALL))


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_small_and_large_inputs(expert_format: ExpertFormat) -> None:
    layer = cases.make_layer("cpu", expert_format, SMALL)
    for size in (1e-2, 1e5):
        cases.check(layer, 1, torch.float32, scale=size)


class Sublayer:
    """Of `MarlinExperts` what the switch asks for; calls give what the reference gives, times `factor`."""

    def __init__(self, layer: cases.Layer, expert_format: ExpertFormat, factor: float = 1.0) -> None:
        self.layer, self.expert_format, self.factor = layer, expert_format, factor
        self.caps, self.w2_weight, self.asked = cases.CAPS, layer.parameters["w2_weight"], 0

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, tensor in self.layer.parameters.items():
            yield name, torch.nn.Parameter(tensor, requires_grad=False)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return self.factor * cases.expected(self.layer, x, weights, chosen).to(x.dtype)


def test_the_kernels_are_tried_once_and_against_marlin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = cases.make_layer("cpu", "nvfp4", SMALL)
    x, weights, chosen = cases.draw(layer, 2)
    runs = lambda sublayer: vector_experts.runs(sublayer, x, layer.top_k)
    monkeypatch.setattr(vector_experts, "_RUNS", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sublayer = Sublayer(layer, "nvfp4")
    assert not runs(sublayer) and not sublayer.asked and not vector_experts._RUNS
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert runs(sublayer) and runs(sublayer) and sublayer.asked == 1 and not caplog.records
    got = vector_experts.forward(sublayer, x, weights, chosen)
    assert got.dtype == x.dtype and cases.relative_error(got, cases.expected(layer, x, weights, chosen)) < 6e-3
    with caplog.at_level(logging.WARNING):
        vector_experts._RUNS.clear()
        assert not runs(Sublayer(layer, "nvfp4", factor=1.02)) and "relative error 2." in caplog.text
        vector_experts._RUNS.clear()
        monkeypatch.setattr(triton_moe_vector, "experts", None)
        assert not runs(sublayer) and "'NoneType' object is not callable" in caplog.text
