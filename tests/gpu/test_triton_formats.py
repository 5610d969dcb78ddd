"""Triton kernels of the number formats against the reference on the CPU: equal bytes and counts on everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inkling_rl.formats import marlin, mixed, nvfp4, report
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.fake_quantize import fake_quantize
from inkling_rl.formats.reference import marlin as reference_marlin
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference
from tests.inkling_rl import format_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from inkling_rl.formats.kernels import triton_engine, triton_mxfp8, triton_nvfp4


def on_gpu(weight: torch.Tensor) -> torch.Tensor:
    """The same values and strides on the device."""
    base = torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage())
    return base.cuda().as_strided(weight.shape, weight.stride(), weight.storage_offset())


def assert_nvfp4_equal(
    weight: torch.Tensor, anchor: torch.Tensor, denominator: int, scales: torch.Tensor | None, label: str
) -> None:
    expected = reference.quantize(weight, anchor, denominator, scales)
    given = None if scales is None else scales.cuda()
    got = triton_nvfp4.quantize(on_gpu(weight), anchor.cuda(), denominator, given)
    meaningful = (expected[2][:, 0] == 0) & (expected[2][:, 2] == 0)
    for what, a, b in zip(("codes", "scales"), expected, got, strict=False):
        assert b.cpu()[meaningful].equal(a[meaningful]), (label, what, int((b.cpu() != a).sum()))
    assert got[2].cpu().equal(expected[2]), (label, got[2].tolist(), expected[2].tolist())


def nvfp4_variants() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for case, weight in cases.nvfp4_cases().items():
        for anchor_name, anchor in cases.nvfp4_anchors(weight).items():
            yield f"{case}, anchor {anchor_name}", weight, anchor


@pytest.mark.parametrize("denominator", [1536, 2688])
def test_nvfp4_bytes(denominator: int) -> None:
    for label, weight, anchor in nvfp4_variants():
        assert_nvfp4_equal(weight, anchor, denominator, None, label)


def test_nvfp4_bytes_under_given_scales() -> None:
    for case, weight in cases.nvfp4_cases().items():
        for name, scales in cases.given_nvfp4_scales(weight).items():
            anchor = cases.nvfp4_anchors(weight)["own"]
            assert_nvfp4_equal(weight, anchor, 1536, scales, f"{case}, scales {name}")


def test_nvfp4_views_and_what_is_not_finite() -> None:
    weight = torch.randn(3, 24, 96, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        for name, view in cases.strided_views(weight.to(dtype)).items():
            assert_nvfp4_equal(view, view.abs().amax((1, 2)).float(), 1536, None, name)
            assert triton_nvfp4.largest(on_gpu(view)).cpu().equal(reference.largest(view)), name
    for name, bad in cases.non_finite_cases().items():
        assert_nvfp4_equal(bad, torch.full((3,), 2.0), 1536, None, name)
        assert_nvfp4_equal(bad, torch.full((3,), 2.0), 1536, torch.full((3, 4, 4), 0x70, dtype=torch.uint8), name)
    zero = torch.ones(2, 4, 32)
    zero[0] = 0
    assert_nvfp4_equal(zero, torch.zeros(2), 1536, None, "zero anchors")


def test_nvfp4_largest_and_dequantise() -> None:
    for case, weight in cases.nvfp4_cases().items():
        assert triton_nvfp4.largest(on_gpu(weight)).cpu().equal(reference.largest(weight)), case
        anchor = reference.largest(weight)
        for denominator in (1536, 2688):
            codes, scales, _ = reference.quantize(weight, anchor, denominator, None)
            for dtype in (torch.float32, torch.bfloat16):
                expected = reference.dequantize(codes, scales, anchor, denominator, dtype)
                got = triton_nvfp4.dequantize(codes.cuda(), scales.cuda(), anchor.cuda(), denominator, dtype).cpu()
                assert got.view(torch.uint8).equal(expected.view(torch.uint8)), (case, denominator, dtype)


def test_every_code_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1).reshape(1, 127, 256)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).reshape(1, 127, 32).contiguous()
    for value in (1.0, 3.14159, 1e-38, 3e38, 1e-45):
        anchor = torch.tensor([value])
        expected = reference.dequantize(codes, scales, anchor, 1536, torch.float32)
        got = triton_nvfp4.dequantize(codes.cuda(), scales.cuda(), anchor.cuda(), 1536, torch.float32).cpu()
        assert got.view(torch.int32).equal(expected.view(torch.int32)), value


def assert_mxfp8_equal(weight: torch.Tensor, scales: torch.Tensor | None, label: str) -> None:
    expected = reference_mxfp8.quantize(weight, scales)
    got = triton_mxfp8.quantize(on_gpu(weight), None if scales is None else scales.cuda())
    finite = expected[2] == 0
    for what, a, b in zip(("codes", "scales"), expected, got, strict=False):
        assert b.cpu()[finite].equal(a[finite]), (label, what, int((b.cpu() != a).sum()))
    assert got[2].cpu().equal(expected[2]), label


def test_mxfp8_bytes() -> None:
    for case, weight in cases.mxfp8_cases().items():
        assert_mxfp8_equal(weight, None, case)
        for name, scales in cases.given_mxfp8_scales(weight).items():
            assert_mxfp8_equal(weight, scales, f"{case}, scales {name}")
    for name, view in cases.strided_views(torch.randn(3, 24, 96).bfloat16()).items():
        assert_mxfp8_equal(view, None, name)
    for name, bad in cases.non_finite_cases().items():
        assert_mxfp8_equal(bad, None, name)


def test_mxfp8_dequantise() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F][:252].reshape(1, 1, 252)[..., :224].expand(1, 256, 224).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(1, 256, 7).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        expected = reference_mxfp8.dequantize(codes, scales, dtype)
        got = triton_mxfp8.dequantize(codes.cuda(), scales.cuda(), dtype).cpu()
        number = ~expected.isnan()
        assert got.isnan().equal(expected.isnan())
        assert got[number].view(torch.uint8).equal(expected[number].view(torch.uint8)), dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_shapes_in_bulk(dtype: torch.dtype) -> None:
    """64 M elements each, through the reference on the device (which the first test holds to the CPU's)."""
    g = torch.Generator("cuda").manual_seed(0)
    for kind in ("gaussian", "quarters", "requantised", "laplace"):
        weight = torch.randn(4, 2304, 4608, generator=g, device="cuda")
        if kind == "quarters":
            weight = (weight * 4).round() / 4
        elif kind == "laplace":
            weight = weight.sign() * torch.empty_like(weight).exponential_(generator=g)
        weight = weight.to(dtype)
        anchor = reference.largest(weight)
        expected = reference.quantize(weight, anchor, 1536, None)
        if kind == "requantised":
            weight = reference.dequantize(*expected[:2], anchor, 1536, dtype)
            expected = reference.quantize(weight, anchor, 1536, None)
        got = triton_nvfp4.quantize(weight, anchor, 1536, None)
        assert all(a.equal(b) for a, b in zip(expected, got, strict=True)), kind
        expected = reference_mxfp8.quantize(weight, None)
        assert all(a.equal(b) for a, b in zip(expected, triton_mxfp8.quantize(weight, None), strict=True)), kind


def engine_sizes() -> Iterator[tuple[int, int, int, int, int]]:
    """Shards, stored rows per shard, stored columns, padded rows, padded columns."""
    yield from [(2, 96, 128, 128, 128), (1, 128, 96, 128, 128), (2, 64, 4608, 64, 4608), (1, 320, 288, 320, 320)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_words(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for shards, stored_rows, stored_columns, rows, columns in engine_sizes():
        weight = torch.randn(3, shards * stored_rows, stored_columns, generator=g).to(dtype)
        weight[1, 3] *= 1e-4  # scales that are subnormal
        weight[2, 5:40] = 0
        anchor = reference.largest(weight) * torch.tensor([1.0, 1.01, 0.3])  # the last one saturates
        codes, scales, counts = reference.quantize(weight, anchor, 1536, None)
        words, moved, largest, found = triton_engine.nvfp4(weight.cuda(), anchor.cuda(), 1536, shards, rows, columns)
        assert words.cpu().equal(reference_marlin.pack_weight(codes, 4, shards, rows, columns))
        assert moved.cpu().equal(reference_marlin.permute_scales(scales, 0, shards, rows, columns // 16))
        assert largest.cpu().equal(reference_marlin.largest_scales(scales).int()) and found.cpu().equal(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_words(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    for shards, stored_rows, stored_columns, rows, columns in engine_sizes():
        weight = (torch.randn(3, shards * stored_rows, stored_columns, generator=g) * torch.rand(3, 1, 1)).to(dtype)
        weight[0, 7] = 0
        codes, scales, _ = reference_mxfp8.quantize(weight, None)
        words, moved, found = triton_engine.mxfp8(weight.cuda(), shards, rows, columns)
        assert words.cpu().equal(reference_marlin.pack_weight(codes, 8, shards, rows, columns))
        assert moved.cpu().equal(reference_marlin.permute_scales(scales, None, shards, rows, columns // 32))
        assert not found.any()


@pytest.mark.parametrize(("value", "anchor"), [(1.40625, 2.25), (1.3125, 2.1), (1.90625, 3.05)])
def test_ties_do_not_decide_the_shift(value: float, anchor: float) -> None:
    """Constant blocks that both candidates meet equally well: the fast step may see the larger scale, map-4's."""
    w13, w2 = (torch.full((1, rows, 64), value).bfloat16() for rows in (128, 64))
    anchors = {f"{matrix}_amax": torch.tensor([anchor]) for matrix in mixed.MATRICES}
    expected = marlin.from_weights(w13, w2, "nvfp4", anchors=anchors)
    got = marlin.from_weights(w13.cuda(), w2.cuda(), "nvfp4", anchors=anchors)
    for name, value_ in expected.items():
        assert got[name].cpu().view(-1).view(torch.uint8).equal(value_.view(-1).view(torch.uint8)), name


def test_codes_at_odd_places_are_read() -> None:
    anchor = torch.full((2,), 4.0)
    codes, scales, _ = reference.quantize(torch.randn(2, 8, 64), anchor, 1536, None)
    arena = torch.zeros(codes.numel() + 1, dtype=torch.uint8, device="cuda")
    arena[1:] = codes.cuda().flatten()
    got = triton_nvfp4.dequantize(
        arena[1:].view(codes.shape), scales.cuda(), torch.full((2,), 4.0).cuda(), 1536, torch.float32
    )
    assert got.cpu().equal(reference.dequantize(codes, scales, torch.full((2,), 4.0), 1536, torch.float32))


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_layers_on_the_device_are_those_of_the_host(expert_format: mixed.ExpertFormat) -> None:
    g = torch.Generator().manual_seed(2)
    w13, w2 = torch.randn(4, 192, 128, generator=g).bfloat16(), torch.randn(4, 128, 96, generator=g).bfloat16()
    stored = mixed.quantize_layer(w13, w2, expert_format)
    on_device = mixed.quantize_layer(w13.cuda(), w2.cuda(), expert_format)
    for name, value in stored.items():
        assert on_device[name].cpu().view(-1).view(torch.uint8).equal(value.view(-1).view(torch.uint8)), name
    anchors = {"w13_weight_amax": torch.full((4,), 40.0), "w2_weight_amax": torch.full((4,), 4.0)}  # the first: shift 3
    for options in ({}, {"anchors": anchors} if expert_format == "nvfp4" else {}, {"tp_size": 3, "tp_rank": 1}):
        expected = marlin.from_weights(w13, w2, expert_format, **options)
        got = marlin.from_weights(w13.cuda(), w2.cuda(), expert_format, **options)
        for name, value in expected.items():
            assert got[name].cpu().view(-1).view(torch.uint8).equal(value.view(-1).view(torch.uint8)), (options, name)
    w2[3, 5, 7] = float("nan")
    with pytest.raises(FormatError, match=r"w2_weight must be finite.*expert 3: 1"):
        marlin.from_weights(w13.cuda(), w2.cuda(), expert_format)


def test_fake_quantisation_and_reports_on_the_device() -> None:
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 64, 128, generator=g)
    moved = weight + 1e-3 * torch.randn(weight.shape, generator=g)
    anchor = weight.abs().amax((1, 2)) * 1.01
    for dtype in (torch.float32, torch.bfloat16):
        expected = fake_quantize(weight.to(dtype), "nvfp4", anchor=anchor, target="marlin")
        leaf = weight.to(dtype).cuda().requires_grad_()
        got = fake_quantize(leaf, "nvfp4", anchor=anchor.cuda(), target="marlin")
        assert got.detach().cpu().equal(expected)
        got.backward(got.detach())
        assert leaf.grad is not None and leaf.grad.equal(got.detach())
    versions = [
        [nvfp4.quantize(w.to(device), anchor.to(device)) for w in (weight, moved)] for device in ("cpu", "cuda")
    ]
    on_host, on_device = (report.changed(*pair) for pair in versions)
    assert on_device.codes.cpu().equal(on_host.codes) and on_device.scales.cpu().equal(on_host.scales)
    assert all(a.cpu().equal(b) for a, b in zip(on_device.blocks, on_host.blocks, strict=True))
    error = report.quantization_report(weight.cuda(), versions[1][0]).relative_error.cpu()
    torch.testing.assert_close(error, report.quantization_report(weight, versions[0][0]).relative_error)
