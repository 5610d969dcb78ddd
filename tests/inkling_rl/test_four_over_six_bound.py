"""The argument behind the Triton kernel's fast form, in numbers: its codes are exact, its errors within the bound.

The kernel itself runs on a GPU (tests/gpu); here its arithmetic is repeated operation by operation in torch, a fused
multiply-add as a float64 operation rounded once to float32.
"""

from __future__ import annotations

import pytest
import torch

from inkling_rl.formats.reference import nvfp4 as reference
from tests.inkling_rl import format_cases as cases

UNIT_ROUNDOFF = 2.0**-24
FLOOR = torch.tensor((1 + 2.0**-21) / 64)
SMALLEST_ANCHOR, LARGEST_ANCHOR = 2.0**-80, 2.0**100
SIXTH = torch.tensor(1 / 6)
SIXTH_REST = torch.tensor(1 / 6 - SIXTH.double().item())


def fused(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * (b.double() if isinstance(b, torch.Tensor) else b) + c.double()).float()


def fast_codes_and_error(
    blocks: torch.Tensor, scale: torch.Tensor, anchor: torch.Tensor, denominator: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes of the codes' values and the error of `_round1`, under scale bytes `[N, K / 16]`."""
    value = reference.e4m3_values(scale)
    inverse = (1 / (value * reference.decode_scale(anchor, denominator))) / 64
    unit = value * reference.outer_scale(anchor, denominator) * 64
    y = blocks.abs() * inverse[..., None]
    z = torch.maximum(y, FLOOR)
    q = fused(z, 2.0**22, -fused(z, 2.0**22, -y))
    distance, error = (y - q).abs(), torch.zeros_like(unit)
    for i in range(reference.BLOCK_SIZE):
        error = error + distance[..., i]
    return q * 64, error * unit


def weights() -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    bulk = torch.randn(2, 256, 2048, generator=g)
    return [*cases.nvfp4_cases().items(), ("much", bulk), ("much bfloat16", bulk.bfloat16())]


@pytest.mark.parametrize("denominator", [1536, 2688])
def test_codes_are_exact_and_errors_within_the_bound(denominator: int) -> None:
    closest, checked = 0.0, 0
    for name, weight in weights():
        for anchor_name, anchors in cases.nvfp4_anchors(weight).items():
            if weight.numel() > 500_000 and anchor_name not in ("own", "barely saturating", "too large"):
                continue
            for expert, anchor in zip(weight.float(), anchors, strict=True):
                if not SMALLEST_ANCHOR <= float(anchor) <= LARGEST_ANCHOR:
                    continue
                blocks = expert.unflatten(-1, (-1, 16))
                base = reference.base_scale(blocks, anchor, denominator)
                largest, errors = blocks.abs().amax(-1), []
                for factor in (1.0, 1.5):
                    scale = reference._e4m3(base * torch.tensor(factor))
                    here = (reference._e4m3(base) >= 8) & (base <= 448)
                    codes = reference._codes(blocks, scale, reference.decode_scale(anchor, denominator))
                    exact = reference._error(blocks, scale, codes, anchor, denominator)
                    magnitude, error = fast_codes_and_error(blocks, scale, anchor, denominator)
                    expected = torch.tensor(reference.E2M1_VALUES)[codes.long()].abs()
                    assert magnitude[here].equal(expected[here]), (name, anchor_name)
                    bound = UNIT_ROUNDOFF * (7 * 16 * largest + 42 * exact)
                    used = ((error - exact).abs() / bound)[here & (largest > 0)]
                    closest, checked = max([closest, *used.tolist()]), checked + len(used)
                    errors.append(exact)
                both = (errors[0] + errors[1])[here]
                assert bool((both <= 6.1 * largest[here]).all()), (name, anchor_name)
    assert checked > 100_000
    assert 0.02 < closest < 0.6, closest  # tight enough to mean something, far enough to be believed


def test_a_sixth_in_two_parts_divides_by_six_for_every_mantissa() -> None:
    value = (torch.arange(1 << 23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    quotient = fused(value, SIXTH.expand_as(value), value * SIXTH_REST)
    assert quotient.equal(value / torch.full_like(value, 6.0))


@pytest.mark.parametrize("denominator", [1536, 2688])
def test_the_remainder_step_divides_by_the_denominator_for_every_mantissa(denominator: int) -> None:
    """`_exact1` where nothing is subnormal."""
    value = (torch.arange(1 << 23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    reciprocal = torch.tensor(1 / denominator)
    estimate = value * reciprocal
    remainder = fused(estimate, -float(denominator), value)
    assert fused(remainder, reciprocal.expand_as(value), estimate).equal(value / torch.full_like(value, denominator))
