"""What the experts' kernels are compared with at the start, on a CPU: the layers drawn, and the torch functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_rl.formats import ExpertFormat, marlin
from rollout.kernels import expert_trials
from rollout.kernels.expert_trials import EXPERTS, layer
from rollout.kernels.fallback import Blocks
from tests.rollout import moe_vector_cases as cases
from tests.rollout.test_cuda_kernels import SIZES

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")


@pytest.mark.parametrize("expert_format", FORMATS)
def test_random_layers_have_the_size_of_a_models(expert_format: ExpertFormat) -> None:
    sizes = replace(SIZES, hidden=256, expert_width=160)
    drawn = layer(sizes, expert_format)
    expected = marlin.shapes(expert_format, EXPERTS, 256, 160)
    assert {key: (tuple(t.shape), t.dtype) for key, t in drawn.items()} == expected
    for matrix, inputs in (("w13_weight", 256), ("w2_weight", marlin.padded_width(160, 256, expert_format))):
        values = expert_trials.matrix_values(
            drawn[matrix], drawn[f"{matrix}_scale"], drawn.get(f"{matrix}_scale_2"), expert_format
        )
        # NaN or infinity would be seen here; some codes are zero, all scales count.
        deviation = values.flatten(1).std(1) * inputs**0.5
        assert bool(((deviation > 0.4) & (deviation < 2.5)).all())
        assert len(values.unique()) > 100 and 0.01 < float((values == 0).float().mean()) < 0.2
        assert not torch.equal(values[0], values[1])
    assert all(torch.equal(a, b) for a, b in zip(layer(sizes, expert_format).values(), drawn.values(), strict=True))


@pytest.mark.parametrize("expert_format", FORMATS)
def test_few_tokens_are_compared_with_the_codes_values(expert_format: ExpertFormat) -> None:
    drawn = cases.make_layer("cpu", expert_format, (6, 3, 128, 96))
    x, weights, chosen = cases.draw(drawn, 4)
    out = torch.full(x.shape, float("nan"))
    got = expert_trials.vector_experts(x, weights, chosen, drawn.parameters, cases.CAPS, out)
    assert got is out and cases.relative_error(got, cases.expected(drawn, x, weights, chosen)) < 1e-6


@pytest.mark.parametrize("expert_format", FORMATS)
def test_many_tokens_are_compared_with_the_codes_values(expert_format: ExpertFormat) -> None:
    """Both matrices; blocks that are not full, and one that nobody may look at."""
    from rollout.kernels.grouped_product import Tile

    drawn = cases.make_layer("cpu", expert_format, (3, 2, 128, 64))
    rows = torch.tensor([0, 3, 5, 1, 2, 6, 4, 6, 6, 9, 9, 9], dtype=torch.int32)
    owner = torch.tensor([2, 2, 2, 2, 0, 2])
    blocks = Blocks(rows, torch.tensor([2, 2, 0, 7], dtype=torch.int32), torch.tensor([9], dtype=torch.int32))
    for matrix, top_k, values in (("w13_weight", 2, drawn.gate_up), ("w2_weight", 1, drawn.down)):
        x = torch.randn(-(-6 // top_k), values.shape[2], generator=torch.Generator().manual_seed(1)).bfloat16()
        out = torch.full((6, values.shape[1]), float("nan"))
        scale_2 = drawn.parameters.get(f"{matrix}_scale_2")
        got = expert_trials.grouped_product(
            x, drawn.parameters[matrix], drawn.parameters[f"{matrix}_scale"], scale_2, out, blocks, Tile(2, 1), top_k,
            expert_format,
        )  # fmt: skip
        wanted = torch.einsum("ph,poh->po", x[torch.arange(6) // top_k].double(), values[owner].double())
        assert got is out and cases.relative_error(got, wanted) < 1e-6
