"""NVFP4 bytes against an independent scalar statement, on inputs made to part implementations, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inkling_rl.formats import kernels, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.reference import nvfp4 as reference
from tests.inkling_rl import scalar_formats


def every_bfloat16() -> torch.Tensor:
    """`[255, 16, 16]`: expert e holds every finite bfloat16 with exponent field e, both signs."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exponent = (torch.arange(65536) >> 7) & 0xFF
    return torch.stack([bits[exponent == e].reshape(16, 16) for e in range(255)])


def low_entropy() -> torch.Tensor:
    """`[4, 256, 32]` quarters under the anchor 5: errors of the two candidates are often equal but for rounding."""
    quarters = torch.randint(-12, 13, (4, 256, 32), generator=torch.Generator().manual_seed(1)) / 4
    quarters[:, 0, 0] = 5.0
    return quarters


def adversarial() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    gauss = torch.randn(2, 24, 32, generator=g)
    quarters = low_entropy()
    outlier = gauss.clone()
    outlier[0, 3, 5] = 1e30
    holes = gauss.clone()
    holes[0] = 0
    holes[1, ::2, :16] = 0
    holes[1, 1, :16] = -0.0
    ladder = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)  # E2M1 ties under scale 1
    ties = torch.stack([ladder * (1 + k / 64) for k in range(64)])[None]
    tiny = gauss * torch.logspace(-8, 0, 24)[None, :, None]  # blocks whose scale is subnormal or zero
    return {
        "gaussian": gauss,
        "gaussian bfloat16": gauss.bfloat16(),
        "low entropy": quarters,
        "one huge outlier": outlier,
        "zero experts, zero blocks, minus zero": holes,
        "ties": ties,
        "small blocks": tiny,
        "subnormal maximum": (gauss * 1e-39).float(),
        "smallest subnormal": torch.full((1, 1, 16), 1e-45),
        "largest float": torch.full((1, 1, 16), torch.finfo(torch.float32).max),
        "every bfloat16": every_bfloat16(),
    }


def assert_bytes_equal_scalar(weight: torch.Tensor, amax: torch.Tensor | None, scale_max: int) -> None:
    t = nvfp4.quantize(weight, amax, scale_max=scale_max)
    blocks = weight.float().unflatten(-1, (-1, 16)).numpy()
    codes = torch.stack((t.codes & 0xF, t.codes >> 4), -1).flatten(-2).unflatten(-1, (-1, 16)).numpy()
    scales = t.scales.numpy()
    for e, row, b in np.ndindex(scales.shape):
        if float(t.amax[e]) == 0:
            assert scales[e, row, b] == 0 and not codes[e, row, b].any()
            continue
        scale, expected = scalar_formats.nvfp4_block(blocks[e, row, b], np.float32(t.amax[e]), scale_max)
        assert (scale, expected) == (scales[e, row, b], codes[e, row, b].tolist()), (e, row, b, blocks[e, row, b])


@pytest.mark.parametrize("case", adversarial())
@pytest.mark.parametrize("scale_max", [256, 448])
def test_bytes_equal_the_scalar_reference(case: str, scale_max: int) -> None:
    weight = adversarial()[case]
    if case == "every bfloat16" and scale_max == 448:
        weight = weight[100:160]
    assert_bytes_equal_scalar(weight, None, scale_max)


@pytest.mark.parametrize("factor", [0.25, 0.999, 1.0078125, 3.0, 1e6, 1e-6])
def test_bytes_equal_the_scalar_reference_with_a_given_anchor(factor: float) -> None:
    weight = adversarial()["gaussian bfloat16"]
    assert_bytes_equal_scalar(weight, weight.float().abs().amax((1, 2)) * factor, 256)


def test_low_entropy_data_tells_the_order_of_the_sum() -> None:
    """The case above must discriminate: a pairwise sum of the same errors picks other scales somewhere in it."""
    weight, anchor = low_entropy().reshape(1, -1, 32), torch.tensor([5.0])
    blocks = weight[0].unflatten(-1, (-1, 16))
    base = reference.base_scale(blocks, anchor[0], 1536)
    scale6, scale4 = reference._e4m3(base), reference._e4m3(base * 1.5)
    decode = reference.decode_scale(anchor[0], 1536)

    def tree_sum(scale: torch.Tensor) -> torch.Tensor:
        codes = reference._codes(blocks, scale, decode)
        signed = torch.tensor(reference.E2M1_VALUES)[codes.long()]
        d = ((signed * reference.e4m3_values(scale)[..., None] * anchor[0]) / 1536 - blocks).abs()
        while d.shape[-1] > 1:
            d = d[..., 0::2] + d[..., 1::2]
        return d[..., 0]

    tree = torch.where(tree_sum(scale4) < tree_sum(scale6), scale4, scale6)
    assert 0 < int((tree != nvfp4.quantize(weight, anchor).scales[0]).sum()) < blocks.shape[0] * 0.1


def test_the_division_comes_before_the_multiplication() -> None:
    """Blocks for which another order of the same three factors rounds to another scale byte (about 1 in 3,000)."""
    g = torch.Generator().manual_seed(0)
    anchor = (torch.rand(400_000, generator=g) + 1).bfloat16().float()
    largest = (anchor * torch.rand(400_000, generator=g)).bfloat16().float()
    encode, six = 1536 / anchor, torch.tensor(6.0)
    right = reference._e4m3((largest / six) * encode)
    for wrong in ((largest * encode) / six, largest * (encode / six)):
        rows = (reference._e4m3(wrong) != right).nonzero().flatten()[:100]
        assert len(rows) > 20
        noise = torch.rand(len(rows), 1, 16, generator=g) * 2 - 1
        noise[..., 3] = 1.0
        assert_bytes_equal_scalar(noise * largest[rows, None, None], anchor[rows], 256)


def test_subnormal_intermediates_are_not_flushed() -> None:
    """Literal bytes, because numpy and torch would flush alike. Under this anchor the encode scale is the largest float
    and its inverse, 2.94e-39, is subnormal: the map-6 scale is (4e-38 / 6) * 3.40e38 = 2.27, stored as 2.25."""
    weight = torch.tensor([[[4e-38, 2e-38, -1e-38, 3e-38, 0.0, 5e-39, 1e-38, 2.5e-38] * 2]])
    codes, scales, _ = reference.quantize(weight, torch.tensor([4e-38]), 1536, None)
    # 2.25 * 2.94e-39 is one step: 6.05, 3.02, -1.51, 4.54, 0, 0.76, 1.51, 3.78 of them.
    assert scales.tolist() == [[[0x41]]] and codes[0, 0].tolist() == [0x57, 0x6B, 0x20, 0x63] * 2
    t = nvfp4.quantize(weight, torch.tensor([4e-38]))
    assert t.scales.equal(scales) and t.codes.equal(codes)


def test_nothing_above_448_reaches_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 saturates when it casts to E4M3, earlier releases store NaN: the bytes must not depend on it."""
    largest = record_casts(monkeypatch)
    reference.quantize(torch.full((1, 1, 16), 4.0), torch.tensor([1.0]), 1536, None)
    assert largest and max(largest) == 448


def record_casts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Largest magnitude of every tensor that is cast to E4M3 from here on."""
    largest: list[float] = []
    cast = torch.Tensor.to

    def to(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if torch.float8_e4m3fn in args:
            largest.append(float(self.abs().max()))
        return cast(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return largest


def test_layout_of_codes_and_signs() -> None:
    weight = torch.zeros(1, 16)
    weight[0, 0], weight[0, 1], weight[0, 2], weight[0, 3] = 6.0, -6.0, -0.0, 0.5
    t = nvfp4.quantize(weight)
    assert t.scales.tolist() == [[0x78]]  # 256: the anchor's own block maps its maximum to 6
    assert t.codes[0].tolist()[:2] == [0xF7, 0x18]
    assert float(t.amax) == 6.0 and t.amax.ndim == 0 and t.denominator == 1536
    assert t.dequantize().equal(weight) and torch.signbit(t.dequantize()[0, 2])


def test_shapes_follow_the_weight() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in [(32,), (5, 32), (3, 5, 32)]:
        weight = torch.randn(shape, generator=g)
        t = nvfp4.quantize(weight)
        assert t.codes.shape == (*shape[:-1], 16) and t.scales.shape == (*shape[:-1], 2)
        assert t.amax.shape == (shape[:1] if len(shape) == 3 else ()) and t.dequantize().shape == shape
    strided = torch.randn(3, 10, 64, generator=g)[:, ::2, ::2]
    assert nvfp4.quantize(strided).codes.equal(nvfp4.quantize(strided.contiguous()).codes)


def test_saturated_blocks_are_counted() -> None:
    weight = torch.zeros(1, 4, 16)
    weight[0, :, 0] = torch.tensor([1.0, 1.75, 1.7578125, 4.0])
    t = nvfp4.quantize(weight, torch.tensor([1.0]))
    assert t.saturated == 2
    assert float(t.dequantize()[0, 3, 0]) == 1.75
    assert nvfp4.quantize(weight).saturated == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_source_scales_give_the_source_bytes(dtype: torch.dtype) -> None:
    for name, weight in adversarial().items():
        if "subnormal" in name or name == "largest float":
            continue  # the decoded values leave the normal range and lose their codes
        if name == "every bfloat16":
            weight = weight[16:250]
        t = nvfp4.quantize(weight)
        again = nvfp4.quantize(t.dequantize(dtype), t.amax, t.scales)
        assert again.codes.equal(t.codes) and again.scales.equal(t.scales), name


def test_anchor_alone_gives_the_source_values() -> None:
    weight = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    t = nvfp4.quantize(weight)
    again = nvfp4.quantize(t.dequantize(), t.amax)
    assert again.dequantize().equal(t.dequantize())


def test_four_over_six_is_at_least_as_good_as_six_alone() -> None:
    weight = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(4))
    t = nvfp4.quantize(weight)
    base = torch.stack([reference.base_scale(weight[e].unflatten(-1, (-1, 16)), t.amax[e], 1536) for e in range(2)])
    six = nvfp4.quantize(weight, t.amax, reference._e4m3(base))
    error = lambda q: (q.dequantize() - weight).abs().mean()
    assert error(t) < 0.96 * error(six)


def non_finite() -> torch.Tensor:
    weight = torch.ones(3, 4, 16)
    weight[1, 2, 3], weight[1, 0, 0], weight[2, 0, 0] = float("nan"), float("inf"), float("-inf")
    return weight


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nvfp4.quantize(non_finite(), name="w13"), r"w13 must be finite.*expert 1: 2, expert 2: 1"),
        (lambda: nvfp4.quantize(torch.ones(2, 24)), r"multiple of 16; got shape \[2, 24\]"),
        (lambda: nvfp4.quantize(torch.ones(2, 16).half()), "bfloat16 or float32; got torch.float16"),
        (lambda: nvfp4.quantize(torch.ones(1, 1, 1, 16)), r"\[K\], \[N, K\] or \[E, N, K\]"),
        (lambda: nvfp4.quantize(torch.ones(0, 4, 16)), "must not be empty"),
        (lambda: nvfp4.quantize(torch.ones(2, 2, 16), torch.tensor([1.0, 0.0])), r"_amax must be positive.*expert 1"),
        (
            lambda: nvfp4.quantize(torch.ones(2, 2, 16), torch.tensor([1.0, -1.0])),
            r"negative; got -1.0 for expert 1 \(1 in",
        ),
        (lambda: nvfp4.quantize(torch.ones(2, 16), float("inf")), "finite and not negative; got inf. Recompute"),
        (lambda: nvfp4.quantize(torch.ones(2, 2, 16), torch.tensor(1.0)), r"_amax must have shape \[2\]"),
        (lambda: nvfp4.quantize(torch.ones(2, 16), scale_max=300), "scale_max must be 256 or 448"),
        (
            lambda: nvfp4.quantize(torch.ones(2, 16), scales=torch.zeros(2, 2, dtype=torch.uint8)),
            r"_scale must be uint8",
        ),
        (
            lambda: nvfp4.quantize(torch.ones(1, 32), scales=torch.tensor([[0x7E, 0x7F]]).byte()),
            "1 that are negative or",
        ),
        (
            lambda: nvfp4.quantize(torch.ones(1, 32), scales=torch.tensor([[0xB0, 0x81]]).byte()),
            "2 that are negative or",
        ),
        (lambda: nvfp4.NVFP4Tensor(*[torch.ones(1)] * 3, 1000), "must be 1536 or 2688; got 1000"),
    ],
)
def test_what_cannot_be_quantised_is_refused(call, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()


def test_a_zero_anchor_is_fine_for_a_zero_expert() -> None:
    t = nvfp4.quantize(torch.zeros(2, 2, 16), torch.zeros(2))
    assert not t.codes.any() and not t.scales.any() and t.dequantize().equal(torch.zeros(2, 2, 16))
    minus = nvfp4.quantize(torch.zeros(2, 2, 16), torch.tensor([-0.0, 0.0]))
    assert not minus.scales.any() and not torch.signbit(minus.amax).any()


def test_anchors_and_maxima_of_other_number_types() -> None:
    weight = torch.randn(2, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
    t = nvfp4.quantize(weight, np.float64(3.0), scale_max=256.0)  # type: ignore[arg-type]
    assert t.codes.equal(nvfp4.quantize(weight.detach(), 3.0).codes) and type(t.denominator) is int
    assert not nvfp4.quantize(weight, weight.abs().max()).amax.requires_grad


def test_bytes_have_no_gradient_in_the_reference_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "have_native", lambda: False)
    weight = torch.randn(2, 2, 32, requires_grad=True)
    t, m = nvfp4.quantize(weight), mxfp8.quantize(weight)
    assert not any(part.requires_grad for part in (t.codes, t.scales, t.amax, m.codes, m.scales))
