"""Experts of many tokens by `wgmma` on the device: against the torch reference and against Marlin's own products.

    python -m pytest -q -s tests/gpu/test_experts_wgmma.py

Needs Hopper and vLLM 0.30 built for CUDA, no engine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_rl.formats import ExpertFormat, marlin

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

if HOPPER:
    from rollout.kernels import cuda, grouped_product
    from rollout.plugin.marlin_experts import MarlinExperts
    from tests.gpu import expert_cases as cases
    from tests.gpu import wgmma_ahead
    from tests.gpu.test_cuda_kernels import TINY

    TRIED = replace(TINY, least_pairs=48, max_tokens=300)

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
        padded = marlin.padded_width(TRIED.expert_width, TRIED.hidden, expert_format)
        for tile in grouped_product.tiles_for(TRIED.least_pairs, TRIED.max_tokens, TRIED.top_k, TRIED.experts):
            products += wgmma_ahead.of_layer(expert_format, TRIED.hidden, padded, TRIED.top_k, tile)
    wgmma_ahead.compile_products(products)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_the_trial(expert_format: ExpertFormat) -> None:
    trials = list(cuda.EXPERT_TRIALS["grouped_product"](replace(TRIED, expert_formats=(expert_format,))))
    kernel, slow = grouped_product.grouped_product, cuda._FALLBACKS["grouped_product"]
    errors = [cuda._error(kernel, slow, trial, torch.device("cuda", 0)) for trial in trials]
    print(f"{expert_format}: largest errors of the trials", *(f"{error:.1e}" for error in errors))
    # Both are rounded to bfloat16, by a bit of difference at most.
    assert len(errors) == 4 and all(error < trial.limit for error, trial in zip(errors, trials, strict=True))


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize(("size", "rows"), CASES, ids=str)
def test_the_sublayer_equals_the_reference_and_marlin(expert_format: ExpertFormat, size: Size, rows: int) -> None:
    moe = cases.make_moe(expert_format, size, torch.bfloat16)
    assert isinstance(moe.experts, MarlinExperts)
    weights, seen = cases.weights_of(moe), []
    moe.capture_fn = seen.append
    launches: list[grouped_product.Tile] = []

    def counted(*arguments: object) -> torch.Tensor:
        launches.append(arguments[6])
        return grouped_product.grouped_product(*arguments)

    x = cases.inputs(rows, moe, torch.bfloat16)
    moe.use(replace(cases.kernels(), grouped_product=counted))
    by_marlin = moe(x)
    assert not launches
    moe.use(replace(cases.kernels(min_pairs=1), grouped_product=counted))
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
