"""Experts of many tokens by `wgmma` on the device: against the torch reference and against Marlin's own products.

    python -m pytest -q -s tests/gpu/test_experts_wgmma.py

Needs Hopper and vLLM 0.30 built for CUDA, no engine.
"""

from __future__ import annotations

import pytest
import torch

from inkling_rl.formats import ExpertFormat, marlin

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

if HOPPER:
    from rollout.kernels import grouped_product
    from rollout.plugin import marlin_experts
    from rollout.plugin.marlin_experts import MarlinExperts
    from tests.gpu import expert_cases as cases
    from tests.gpu import wgmma_ahead

Size = tuple[int, int, int, int]
FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
# Experts, chosen, hidden size, expert width; rows. Tiles of 96, 160, 192 tokens; outputs of half a program; padding.
CASES: tuple[tuple[Size, int], ...] = (
    ((16, 4, 128, 64), 300), ((24, 3, 256, 160), 1100), ((16, 8, 4608, 2304), 350)
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    products: list[wgmma_ahead.Product] = []
    for expert_format in FORMATS:
        for (experts, top_k, hidden, width), rows in CASES:
            tile = grouped_product.tile_for(rows * top_k, experts)
            padded = marlin.padded_width(width, hidden, expert_format)
            products += wgmma_ahead.of_layer(expert_format, hidden, padded, top_k, tile)
    wgmma_ahead.compile_products(products)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_the_trial(expert_format: ExpertFormat) -> None:
    device = torch.device("cuda", 0)
    error = grouped_product.trial(device, expert_format)
    print(f"{expert_format}: relative error of the trial {error:.1e}")
    assert error < 2.5e-3 and grouped_product.runs_on(device, expert_format)


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize(("size", "rows"), CASES, ids=str)
def test_the_sublayer_equals_the_reference_and_marlin(
    expert_format: ExpertFormat, size: Size, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = cases.make_moe(expert_format, size, torch.bfloat16)
    assert isinstance(moe.experts, MarlinExperts)
    weights, seen = cases.weights_of(moe), []
    moe.capture_fn = seen.append
    launches: list[grouped_product.Tile] = []
    launch = grouped_product.grouped_product

    def counted(*arguments: object) -> torch.Tensor:
        launches.append(arguments[6])
        return launch(*arguments)

    monkeypatch.setattr(grouped_product, "grouped_product", counted)
    x = cases.inputs(rows, moe, torch.bfloat16)
    monkeypatch.setattr(marlin_experts, "MIN_PAIRS", None)
    by_marlin = moe(x)
    assert not launches
    monkeypatch.setattr(marlin_experts, "MIN_PAIRS", 1)
    got = moe(x)
    assert len(launches) == 2 and torch.equal(seen[0], seen[1])
    same = cases.same_choice(moe, x, seen[-1])
    error = cases.relative_error(got[same], cases.expected_of(moe, weights, x)[same])
    differ, again = cases.relative_error(got, by_marlin), cases.relative_error(moe(x), got)
    print(
        f"{expert_format} {size} {rows} rows, tile {launches[0].tokens}: error {error:.1e}, Marlin differs {differ:.1e}"
    )
    # Three roundings to bfloat16 on the way, one at the end. Which rows share a block is left to chance, sums are not.
    assert error < 5e-3 and differ < 5e-3 and again == 0
    assert got.dtype == torch.bfloat16 and bool(got.isfinite().all())
