"""Experts of few tokens under Triton's interpreter; `test_triton_moe_vector_compiled` runs this file.

Against the codes' values times float32 inputs, for both formats, with widths that the layout pads, chains that end in
the middle, experts that several tokens chose. What stands in for the matrix instruction there is tested beside it.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from inkling_rl.formats import ExpertFormat
from rollout.kernels import triton_moe_vector
from rollout.kernels.cuda import FALLBACKS
from rollout.kernels.triton_moe_vector import Shape
from rollout.plugin.marlin_experts import MarlinExperts
from tests.rollout import moe_vector_cases as cases
from tests.rollout.test_marlin_experts import shape_of

# Experts, chosen, hidden size, expert width: the tiny model; padding of the width, chains that K does not fill.
SMALL, ODD = (6, 4, 128, 64), (5, 3, 192, 96)


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("tiles", [8, 4])
def test_equals_the_reference(expert_format: ExpertFormat, tiles: int) -> None:
    layer = cases.make_layer("cpu", expert_format, SMALL)
    cases.check(layer, 1 if tiles == 4 else 4, torch.float32, Shape(1, tiles), Shape(1, tiles, blocks=2))
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


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_the_sublayer_takes_them_for_few_tokens(expert_format: ExpertFormat) -> None:
    shape = shape_of([expert_format] * 6)
    sublayer = MarlinExperts(shape, expert_format)
    sublayer.use(replace(FALLBACKS, vector_experts=triton_moe_vector.experts, vector_rows=2))
    size = shape.num_experts, shape.experts_per_token, shape.hidden_size, shape.expert_width
    layer = cases.make_layer("cpu", expert_format, size)
    for name, tensor in layer.parameters.items():
        sublayer.get_parameter(name).data.copy_(tensor)
    x, weights, chosen = cases.draw(layer, 2)
    got = sublayer(x, weights, chosen)
    assert got.dtype == x.dtype and cases.relative_error(got, cases.expected(layer, x, weights, chosen)) < 6e-3
