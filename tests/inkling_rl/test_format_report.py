"""Reports against brute force, and the change rates that delta sync is planned with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inkling_rl.formats import mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.report import Changes, changed, quantization_report
from tests.inkling_rl.format_cases import mxfp8_cases, nvfp4_cases


def nibbles(codes: torch.Tensor) -> np.ndarray:
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).numpy()


@pytest.mark.parametrize("case", ["gaussian", "small blocks bfloat16", "zero experts, zero blocks, minus zero", "ties"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 300.0])
def test_nvfp4_report_equals_counting_block_by_block(case: str, factor: float) -> None:
    weight = nvfp4_cases()[case]
    t = nvfp4.quantize(weight, weight.abs().amax((1, 2)).float() * factor)
    report = quantization_report(weight, t)
    values, codes, w = t.dequantize().double().numpy(), nibbles(t.codes), weight.double().numpy()
    # The engine shifts all scales by one power of two, the largest that keeps them at 448 or below.
    largest = t.scales.view(torch.float8_e4m3fn).float().max()
    shift = int(np.floor(np.log2(448 / float(largest))))
    saturated, underflowed, flushed = np.zeros((3, len(w)), dtype=int)
    for e, row, b in np.ndindex(t.scales.shape):
        block = slice(16 * b, 16 * b + 16)
        encode = np.float32(1536) / np.float32(t.amax[e]) if t.amax[e] else np.float32(0)
        saturated[e] += np.float32(np.abs(w[e, row, block]).max()) / np.float32(6) * encode > 448
        is_zero = not (codes[e, row, block] & 7).any()
        underflowed[e] += is_zero and w[e, row, block].any()
        scale = float(t.scales[e, row, b].view(torch.float8_e4m3fn))
        flushed[e] += not is_zero and scale * 2.0**shift < 2.0**-6
    assert report.saturated.tolist() == saturated.tolist()
    assert report.underflowed.tolist() == underflowed.tolist() and report.flushed.tolist() == flushed.tolist()
    for e in range(len(w)):
        size = np.linalg.norm(w[e])
        expected = np.linalg.norm(values[e] - w[e]) / size if size else 0.0
        assert float(report.relative_error[e]) == pytest.approx(expected, rel=1e-12)
    assert int(report.saturated.sum()) == t.saturated
    assert report.num_blocks == t.scales[0].numel()


def test_every_kind_of_loss_is_met_above() -> None:
    """The parameters of the test above must not compare zeros with zeros."""
    report = lambda case, factor: (
        w := nvfp4_cases()[case],
        quantization_report(w, nvfp4.quantize(w, w.abs().amax((1, 2)).float() * factor)),
    )[1]
    assert report("gaussian", 0.3).saturated.sum() > 10
    small = report("small blocks bfloat16", 1.0)
    assert small.underflowed.sum() > 10 and small.flushed.sum() > 10 and not small.saturated.any()
    assert report("gaussian", 300.0).flushed.sum() == 0  # shifted up
    assert quantization_report(torch.zeros(1, 16), nvfp4.quantize(torch.zeros(1, 16))).relative_error.tolist() == [0.0]


@pytest.mark.parametrize("case", ["gaussian", "small blocks", "subnormal maximum", "at the boundary"])
def test_mxfp8_report_equals_counting_block_by_block(case: str) -> None:
    weight = mxfp8_cases()[case]
    own = mxfp8.quantize(weight)
    for m in (own, mxfp8.quantize(weight, (own.scales.int() - 1).clamp(min=0).to(torch.uint8))):
        report = quantization_report(weight, m)
        codes, w = m.codes.numpy(), weight.double().numpy()
        saturated, underflowed, flushed = np.zeros((3, len(w)), dtype=int)
        for e, row, b in np.ndindex(m.scales.shape):
            block = slice(32 * b, 32 * b + 32)
            is_zero = not (codes[e, row, block] & 0x7F).any()
            saturated[e] += np.abs(w[e, row, block]).max() > 448 * 2.0 ** (int(m.scales[e, row, b]) - 127)
            underflowed[e] += is_zero and w[e, row, block].any()
            flushed[e] += not is_zero and m.scales[e, row, b] == 0
        assert report.saturated.tolist() == saturated.tolist()
        assert report.underflowed.tolist() == underflowed.tolist() and report.flushed.tolist() == flushed.tolist()
        error = np.linalg.norm(m.dequantize().double().numpy() - w) / np.linalg.norm(w)
        if len(w) == 1:
            assert float(report.relative_error[0]) == pytest.approx(error, rel=1e-12)
    assert quantization_report(weight, own).saturated.sum() == 0
    assert case != "gaussian" or quantization_report(weight, m).saturated.sum() > 0


def test_report_of_a_matrix_and_its_metrics() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[0, :16] = 1e-9
    report = quantization_report(weight, nvfp4.quantize(weight))
    assert report.relative_error.shape == (1,) and report.num_blocks == 32
    metrics = report.to_metrics()
    assert metrics["quantization/underflowed_fraction"] == 1 / 32
    assert 0.05 < metrics["quantization/relative_error_mean"] == metrics["quantization/relative_error_max"] < 0.12
    assert metrics["quantization/saturated_fraction"] == metrics["quantization/flushed_fraction"] == 0
    with pytest.raises(FormatError, match=r"shape that was quantised, \[8, 64\]; got \[4, 64\]"):
        quantization_report(weight[:4], nvfp4.quantize(weight))


def brute_force(previous: nvfp4.NVFP4Tensor | mxfp8.MXFP8Tensor, current: nvfp4.NVFP4Tensor | mxfp8.MXFP8Tensor):
    """Changed elements, scales and block indices per expert, one element at a time."""
    packed = isinstance(current, nvfp4.NVFP4Tensor)
    old, new = ((nibbles(q.codes) if packed else q.codes.numpy()) for q in (previous, current))
    size = 16 if packed else 32
    rows = []
    for e in range(len(new)):
        blocks = []
        for index, (row, b) in enumerate(np.ndindex(tuple(current.scales.shape[1:]))):
            block = slice(size * b, size * b + size)
            other_scale = previous.scales[e, row, b] != current.scales[e, row, b]
            if other_scale or (old[e, row, block] != new[e, row, block]).any():
                blocks.append(index)
        rows.append((int((old[e] != new[e]).sum()), int((previous.scales[e] != current.scales[e]).sum()), blocks))
    return rows


def listed(changes: Changes) -> list[tuple[int, int, list[int]]]:
    return [(int(c), int(s), b.tolist()) for c, s, b in zip(changes.codes, changes.scales, changes.blocks, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_changes_equal_counting_element_by_element(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    old = torch.randn(3, 8, 64, generator=g)
    new = old.clone()
    new[1] += 0.02 * torch.randn(8, 64, generator=g) * (torch.rand(8, 64, generator=g) < 0.1)
    new[2] *= 1.5
    anchor = old.abs().amax((1, 2))
    previous, current = nvfp4.quantize(old, anchor), nvfp4.quantize(new, anchor * torch.tensor([1.0, 1.0, 1.5]))
    changes = changed(previous, current)
    assert listed(changes) == brute_force(previous, current)
    assert changes.anchors.tolist() == [False, False, True] and changes.blocks[0].numel() == 0
    assert 0 < changes.blocks[1].numel() < 32 and changes.blocks[1].dtype == torch.int64
    m_old, m_new = mxfp8.quantize(old), mxfp8.quantize(new)
    changes = changed(m_old, m_new)
    assert listed(changes) == brute_force(m_old, m_new)
    assert not changes.anchors.any() and changes.block_size == 32 and changes.num_blocks == 16


def test_one_nibble_one_scale_and_nothing() -> None:
    t = nvfp4.quantize(torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)))
    assert listed(changed(t, t)) == [(0, 0, []), (0, 0, [])]
    for nibble, count in ((0x10, 1), (0x01, 1), (0x11, 2)):
        codes = t.codes.clone()
        codes[1, 2, 9] ^= nibble
        assert listed(changed(t, replace(t, codes=codes))) == [(0, 0, []), (count, 0, [9])]
    scales = t.scales.clone()
    scales[0, 3, 3] ^= 1
    assert listed(changed(t, replace(t, scales=scales))) == [(0, 1, [15]), (0, 0, [])]
    metrics = changed(t, replace(t, scales=scales, codes=codes)).to_metrics()
    assert metrics == {
        "sync/changed_codes_fraction": 2 / 512,
        "sync/changed_scales_fraction": 1 / 32,
        "sync/changed_blocks_fraction": 2 / 32,
        "sync/num_changed_anchors": 0,
    }


def test_bytes_that_lie_anywhere_in_memory() -> None:
    """Views into a receive buffer start at any byte and leave gaps."""
    t = nvfp4.quantize(torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)))
    buffer = torch.zeros(3, 4, 37, dtype=torch.uint8)
    buffer[..., 3:35] = t.codes
    buffer[2, 1, 20] ^= 0x80
    assert listed(changed(t, replace(t, codes=buffer[..., 3:35]))) == [(0, 0, []), (0, 0, []), (1, 0, [6])]
    flat = torch.zeros(3 + t.codes.numel(), dtype=torch.uint8)
    flat[3:] = t.codes.flatten()
    assert listed(changed(replace(t, codes=flat[3:].view(3, 4, 32)), t)) == [(0, 0, [])] * 3


def test_a_matrix_is_one_expert() -> None:
    old = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    new = old.clone()
    new[2, 20] = -new[2, 20]
    changes = changed(nvfp4.quantize(old, 8.0), nvfp4.quantize(new, 8.0))
    assert listed(changes) == [(1, 0, [5])] and changes.anchors.tolist() == [False]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mxfp8.quantize, r"got MXFP8Tensor \[2, 4, 64\] after NVFP4Tensor \[2, 4, 32\]"),
        (lambda w: nvfp4.quantize(w[:1]), "must have the format and shape of previous"),
        (lambda w: nvfp4.quantize(w, scale_max=448), "outer_scale_denominator 1536 of previous; got 2688"),
    ],
)
def test_versions_that_share_no_meaning_are_refused(other, message: str) -> None:
    weight = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(FormatError, match=message):
        changed(nvfp4.quantize(weight), other(weight))


def test_a_step_of_adam_changes_about_one_code_in_a_thousand() -> None:
    """The order of magnitude that delta sync is planned with: 0.07 % of codes and 0.09 % of scales at rate 1e-6."""
    g = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(1, 512, 2048, generator=g)
    anchor = weight.abs().amax((1, 2))
    # Adam's update is the rate times a number of about the size of a sign.
    moved = weight - 1e-6 * torch.tanh(torch.randn(weight.shape, generator=g) * 2)
    metrics = changed(nvfp4.quantize(weight, anchor), nvfp4.quantize(moved, anchor)).to_metrics()
    assert 2e-4 < metrics["sync/changed_codes_fraction"] < 2e-3
    assert 2e-4 < metrics["sync/changed_scales_fraction"] < 2e-3
    assert metrics["sync/changed_blocks_fraction"] < 1e-2 and metrics["sync/num_changed_anchors"] == 0
    finer = changed(mxfp8.quantize(weight), mxfp8.quantize(moved)).to_metrics()
    assert 5e-4 < finer["sync/changed_codes_fraction"] < 1e-2


def test_an_anchor_that_moves_by_an_ulp_rewrites_far_more() -> None:
    weight = 0.02 * torch.randn(1, 512, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    anchor = weight.abs().amax((1, 2)).float()
    drift = changed(nvfp4.quantize(weight, anchor), nvfp4.quantize(weight, anchor * (1 + 2.0**-7))).to_metrics()
    assert drift["sync/changed_codes_fraction"] > 0.02 and drift["sync/num_changed_anchors"] == 1
