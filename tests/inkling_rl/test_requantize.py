"""Dequantise, quantise again: what comes back as the same bytes, as the same values, and what does not, and why.

With the scales that a weight was stored with, its bytes come back. With the anchor alone its values do, except in two
kinds of blocks whose scale is one of the smallest E4M3 subnormals; bytes may change where both candidates hold the
block exactly.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from inkling_rl.formats import kernels
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4
from tests.inkling_rl.format_cases import mxfp8_cases, nvfp4_anchors, nvfp4_cases

CPU = torch.device("cpu")
# The reference is slow and meets the large cases in the comparison with the kernels: here a few anchors do for it.
NVFP4 = {"chosen for the CPU": kernels.nvfp4(CPU), "reference": reference_nvfp4}
MXFP8 = {"chosen for the CPU": kernels.mxfp8(CPU), "reference": reference_mxfp8}
DTYPES = (torch.float32, torch.bfloat16)
DENOMINATORS = (1536, 2688)
# Codes whose scale and outer scale stay normal; beyond, the decoded values themselves lose bits.
ORDINARY = (1e-28, 1e34)


@pytest.mark.parametrize("implementation", NVFP4.values(), ids=NVFP4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_source_scales_give_the_source_bytes(implementation: ModuleType, dtype: torch.dtype) -> None:
    num_blocks = 0
    for denominator, (name, weight, anchor) in ((d, c) for d in DENOMINATORS for c in ordinary_cases(implementation)):
        codes, scales, _ = implementation.quantize(weight, anchor, denominator, None)
        values = implementation.dequantize(codes, scales, anchor, denominator, dtype)
        again, kept, _ = implementation.quantize(values, anchor, denominator, scales)
        assert again.equal(codes) and kept.equal(scales), name
        num_blocks += scales.numel()
    assert num_blocks > (50_000 if implementation is reference_nvfp4 else 500_000)


def ordinary_cases(implementation: ModuleType) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Weights and anchors of the adversarial table, without the experts whose anchor is not ordinary."""
    cases = []
    for name, weight in nvfp4_cases().items():
        for kind, anchor in nvfp4_anchors(weight).items():
            if implementation is reference_nvfp4 and kind not in ("own", "saturating", "too large"):
                continue
            usable = (anchor > ORDINARY[0]) & (anchor < ORDINARY[1])
            if usable.any():
                cases.append((f"{name}, anchor {kind}", weight[usable], anchor[usable]))
    return cases


@pytest.mark.parametrize("implementation", MXFP8.values(), ids=MXFP8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp8_source_scales_give_the_source_bytes(implementation: ModuleType, dtype: torch.dtype) -> None:
    num_exact = num_blocks = 0
    for name, weight in mxfp8_cases().items():
        codes, scales, _ = implementation.quantize(weight, None)
        values = implementation.dequantize(codes, scales, dtype)
        again, kept, _ = implementation.quantize(values, scales)
        # Smaller scales decode to bfloat16's subnormals; the largest float may round up to 2^128, which no float holds.
        exact = (scales >= (16 if dtype == torch.bfloat16 else 0)) & values.isfinite().unflatten(-1, (-1, 32)).all(-1)
        same = (again == codes).unflatten(-1, (-1, 32)).all(-1)
        assert kept.equal(scales) and same[exact].all(), name
        num_exact, num_blocks = num_exact + int(exact.sum()), num_blocks + exact.numel()
    assert num_exact > 0.8 * num_blocks


def test_mxfp8_alone_gives_the_source_values() -> None:
    """A block's largest code may round down to a power of two below 448 / 2, and then takes the next finer scale."""
    num_finer = 0
    for name, weight in mxfp8_cases().items():
        codes, scales, _ = reference_mxfp8.quantize(weight, None)
        values = reference_mxfp8.dequantize(codes, scales, torch.float32).nan_to_num(0.0, 0.0, 0.0)
        again, chosen, _ = reference_mxfp8.quantize(values, None)
        assert reference_mxfp8.dequantize(again, chosen, torch.float32).equal(values), name
        changed = chosen != scales
        largest = values.unflatten(-1, (-1, 32)).abs().amax(-1) / reference_mxfp8.e8m0_values(scales)
        assert (largest[changed] <= 224).all() and (chosen <= scales).all(), name
        num_finer += int(changed.sum())
    assert num_finer > 0


@pytest.mark.parametrize("implementation", NVFP4.values(), ids=NVFP4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_nvfp4_anchor_alone_gives_the_source_values(
    implementation: ModuleType, dtype: torch.dtype, denominator: int
) -> None:
    """All blocks but those of `cannot_be_chosen_again`; those whose bytes change are exact ties, counted here."""
    num_blocks = num_values = num_bytes = 0
    for name, weight, anchor in ordinary_cases(implementation):
        codes, scales, _ = implementation.quantize(weight, anchor, denominator, None)
        values = implementation.dequantize(codes, scales, anchor, denominator, dtype)
        again, chosen, _ = implementation.quantize(values, anchor, denominator, None)
        back = implementation.dequantize(again, chosen, anchor, denominator, dtype)
        other_values = blocks_differ(back, values, 16)
        assert not (other_values & ~cannot_be_chosen_again(codes, scales)).any(), name
        other_bytes = blocks_differ(again, codes, 8) | (chosen != scales)
        assert_exact_ties(codes, scales, again, chosen, other_bytes & ~other_values)
        num_blocks, num_values = num_blocks + other_bytes.numel(), num_values + int(other_values.sum())
        num_bytes += int((other_bytes & ~other_values).sum())
    assert num_blocks > (25_000 if implementation is reference_nvfp4 else 250_000)
    assert num_values < 1e-2 * num_blocks and num_bytes < 1e-3 * num_blocks


def blocks_differ(a: torch.Tensor, b: torch.Tensor, size: int) -> torch.Tensor:
    return (a != b).unflatten(-1, (-1, size)).any(-1)


def largest_code(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 7, (codes >> 4) & 7), -1).flatten(-2).unflatten(-1, (-1, 16)).amax(-1)


def cannot_be_chosen_again(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks of which neither candidate gets the old scale back.

    Scale byte 1 with 2 as the largest value: the candidates are 1/3 and 1/2 of the smallest subnormal, the second an
    exact tie that goes to zero (or, but for rounding, to 1). Byte 3 with 3 as the largest value: 1.5, a tie that goes
    to 2, and 2.25. Both lie below 1/16384 of the anchor.
    """
    largest = largest_code(codes)
    return ((scales == 1) & (largest == 4)) | ((scales == 3) & (largest == 5))


def assert_exact_ties(
    codes: torch.Tensor, scales: torch.Tensor, again: torch.Tensor, chosen: torch.Tensor, where: torch.Tensor
) -> None:
    """Where map-4 was stored and map-6 is now: both hold every value of the block, so both errors are equal."""
    products = lambda c, s: (
        reference_nvfp4.e2m1_values(c).unflatten(-1, (-1, 16)) * reference_nvfp4.e4m3_values(s)[..., None]
    )
    assert products(codes, scales)[where].equal(products(again, chosen)[where])
    assert (largest_code(codes)[where] == 6).all() and (largest_code(again)[where] == 7).all()
    old, new = reference_nvfp4.e4m3_values(scales)[where], reference_nvfp4.e4m3_values(chosen)[where]
    assert (old == 1.5 * new).all()


def test_blocks_with_a_scale_that_cannot_be_chosen_again() -> None:
    """The exception is real: the first kind vanishes, the second loses a ninth."""
    unit = 2.0**-9  # under the anchor 1536 the outer scale is 1 and this is the smallest E4M3
    weight = torch.zeros(1, 3, 16)
    weight[0, 0, 0], weight[0, 1, 0], weight[0, 2, 0] = 2.04 * unit, 10.2 * unit, 1536.0
    anchor = torch.tensor([1536.0])
    codes, scales, _ = reference_nvfp4.quantize(weight, anchor, 1536, None)
    values = reference_nvfp4.dequantize(codes, scales, anchor, 1536, torch.float32)
    again, chosen, _ = reference_nvfp4.quantize(values, anchor, 1536, None)
    back = reference_nvfp4.dequantize(again, chosen, anchor, 1536, torch.float32)
    assert scales[0, 0] == 1 and values[0, 0, 0] == 2 * unit and chosen[0, 0] == 0 and not back[0, 0].any()
    assert scales[0, 1] == 3 and values[0, 1, 0] == 9 * unit and chosen[0, 1] == 2 and back[0, 1, 0] == 8 * unit
    assert cannot_be_chosen_again(codes, scales).flatten().tolist() == [True, True, False]
    kept, _, _ = reference_nvfp4.quantize(values, anchor, 1536, scales)
    assert kept.equal(codes)


@pytest.mark.parametrize("implementation", NVFP4.values(), ids=NVFP4)
def test_constructed_ties_change_bytes_and_no_value(implementation: ModuleType) -> None:
    """Map-6 first rounds to the scale 7.5 and loses to map-4 with 12; what is decoded is exact under 12 and under 8."""
    g = torch.Generator().manual_seed(0)
    weight = torch.zeros(1, 500, 16)
    pick = torch.randint(0, 2, (500, 15), generator=g) * (torch.randint(0, 2, (500, 15), generator=g) * 2 - 1)
    weight[0, :, 1:] = 24.0 * pick
    weight[0, :, 0] = 46.0 + 0.4 * torch.rand(500, generator=g)  # the map-6 scale before rounding: 7.67 to 7.73
    anchor = torch.tensor([1536.0])
    codes, scales, _ = implementation.quantize(weight, anchor, 1536, None)
    values = implementation.dequantize(codes, scales, anchor, 1536, torch.float32)
    again, chosen, _ = implementation.quantize(values, anchor, 1536, None)
    by_four = reference_nvfp4.e4m3_values(scales) == 12
    assert by_four.sum() > 450
    assert implementation.dequantize(again, chosen, anchor, 1536, torch.float32).equal(values)
    assert ((chosen != scales) == by_four).all() and (reference_nvfp4.e4m3_values(chosen)[by_four] == 8).all()
    assert_exact_ties(codes, scales, again, chosen, by_four)
