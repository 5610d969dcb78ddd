"""MXFP8 bytes against exact rational arithmetic, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inkling_rl.formats import mxfp8
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.reference import mxfp8 as reference
from tests.inkling_rl import scalar_formats
from tests.inkling_rl.test_nvfp4 import adversarial, record_casts


def cases() -> dict[str, torch.Tensor]:
    edges = torch.zeros(1, 256, 32)
    powers = torch.exp2(torch.arange(-126, 128).float())
    edges[0, :254, 0], edges[0, :254, 1] = powers * 1.75, -powers  # the largest value that keeps the scale
    above = torch.nextafter(powers * 1.75, torch.full_like(powers, torch.inf))
    bumped = edges.clone()
    bumped[0, :254, 0] = torch.where(torch.isfinite(above), above, 0)
    return {name: w for name, w in adversarial().items() if w.shape[-1] % 32 == 0} | {
        "every bfloat16": adversarial()["every bfloat16"].reshape(255, 8, 32),
        "at the boundary": edges,
        "one step above the boundary": bumped,
    }


@pytest.mark.parametrize("case", cases())
def test_bytes_equal_the_scalar_reference(case: str) -> None:
    weight = cases()[case]
    m = mxfp8.quantize(weight)
    blocks, codes = weight.float().unflatten(-1, (-1, 32)).numpy(), m.codes.unflatten(-1, (-1, 32)).numpy()
    step = 4 if case == "every bfloat16" else 1
    for index in list(np.ndindex(m.scales.shape))[::step]:
        scale, expected = scalar_formats.mxfp8_block(blocks[index])
        assert (scale, expected) == (int(m.scales[index]), codes[index].tolist()), index


def test_the_ceiling_never_saturates_and_never_wastes_a_bit() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    m = mxfp8.quantize(weight)
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1) / reference.e8m0_values(m.scales)
    assert float(largest.max()) <= 448 and float(largest.min()) > 224


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_source_scales_give_the_source_bytes(dtype: torch.dtype) -> None:
    for name, weight in cases().items():
        if "subnormal" in name:
            continue  # the decoded values leave the normal range and lose their codes
        if name == "every bfloat16":
            weight = weight[16:250]
        elif "boundary" in name:
            weight = weight[:, 16:250]
        m = mxfp8.quantize(weight)
        again = mxfp8.quantize(m.dequantize(dtype), m.scales)
        assert again.scales.equal(m.scales) and again.codes.equal(m.codes), name


def test_scale_values() -> None:
    values = reference.e8m0_values(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and torch.isnan(values[4])
    big = mxfp8.quantize(torch.full((1, 32), 2.0**127), torch.tensor([[254]], dtype=torch.uint8))
    assert big.dequantize().eq(2.0**127).all()


def test_nothing_above_448_reaches_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under given scales values may exceed it; torch 2.13 saturates when it casts, earlier releases store NaN."""
    largest = record_casts(monkeypatch)
    codes, _, _ = reference.quantize(torch.full((1, 1, 32), 4.0), torch.tensor([[[120]]], dtype=torch.uint8))
    assert largest == [448] and (codes == 0x7E).all()


def test_minus_zero_and_zero_blocks() -> None:
    weight = torch.zeros(2, 32)
    weight[0, 1], weight[0, 2] = -0.0, 448.0
    m = mxfp8.quantize(weight)
    assert m.codes[0, 1] == 0x80 and m.scales.tolist() == [[127], [0]] and not m.codes[1].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mxfp8.quantize(torch.full((2, 1, 32), torch.nan), name="w2"), "w2 must be finite.*expert 0: 32"),
        (lambda: mxfp8.quantize(torch.ones(2, 48)), "multiple of 32"),
        (lambda: mxfp8.quantize(torch.ones(2, 32).double()), "bfloat16 or float32"),
        (lambda: mxfp8.quantize(torch.ones(2, 32), torch.zeros(2, 2, dtype=torch.uint8)), "_scale must be uint8"),
        (lambda: mxfp8.quantize(torch.ones(1, 32), torch.tensor([[255]], dtype=torch.uint8)), "NaN byte 255"),
    ],
)
def test_what_cannot_be_quantised_is_refused(call, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()
