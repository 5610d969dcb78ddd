"""Straight-through rounding: the exporter's values forward, the identity backward, nothing kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from inkling_rl.formats import ExpertFormat, marlin, mixed, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.fake_quantize import fake_quantize, flushed_scales
from tests.inkling_rl.format_cases import mxfp8_cases, nvfp4_cases, strided_views

FORMATS: list[ExpertFormat] = ["nvfp4", "mxfp8", "bf16"]


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("case", nvfp4_cases())
def test_forward_is_the_exporters_round_trip_nvfp4(case: str) -> None:
    weight = nvfp4_cases()[case]
    own = weight.abs().amax((1, 2)).float()
    for anchor in (None, own, (own * 0.5).clamp(min=1e-45).where(own > 0, 0)):
        for scale_max in (256, 448):
            t = nvfp4.quantize(weight, anchor, scale_max=scale_max)
            values = fake_quantize(weight, "nvfp4", anchor=anchor, scale_max=scale_max)
            assert values.dtype == weight.dtype and same(values, t.dequantize(weight.dtype))
    t = nvfp4.quantize(weight)
    assert same(fake_quantize(weight, "nvfp4", anchor=t.amax, scales=t.scales), t.dequantize(weight.dtype))


@pytest.mark.parametrize("case", mxfp8_cases())
def test_forward_is_the_exporters_round_trip_mxfp8(case: str) -> None:
    weight = mxfp8_cases()[case]
    m = mxfp8.quantize(weight)
    assert same(fake_quantize(weight, "mxfp8"), m.dequantize(weight.dtype))
    coarse = (m.scales.int() + 3).clamp(max=254).to(torch.uint8)
    assert same(fake_quantize(weight, "mxfp8", scales=coarse), mxfp8.quantize(weight, coarse).dequantize(weight.dtype))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits: the sign of zero counts."""
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def test_bf16_layers_round_to_bfloat16() -> None:
    weight = weights(2, 4, 32)
    assert fake_quantize(weight, "bf16").equal(weight.bfloat16().float())
    half = weight.bfloat16()
    assert fake_quantize(half, "bf16").equal(half) and fake_quantize(half, "bf16").data_ptr() != half.data_ptr()


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64,), (6, 64), (3, 6, 64)])
def test_backward_is_the_identity(expert_format: ExpertFormat, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also where values saturate (the anchor is a quarter of the maximum) or vanish: nothing is masked."""
    weight = weights(*shape, dtype=dtype)
    weight.view(-1)[:16] *= 1e-6
    weight.requires_grad_()
    small = weight.detach().float().abs().amax((1, 2) if weight.ndim == 3 else None) / 4
    values = fake_quantize(weight, expert_format, anchor=small if expert_format == "nvfp4" else None)
    upstream = weights(*shape, dtype=dtype, seed=1)
    values.backward(upstream)
    assert weight.grad is not None and weight.grad.dtype == dtype and weight.grad.equal(upstream)


def test_the_gradient_of_a_loss_is_taken_at_the_rounded_weight_and_the_second_derivative_is_zero() -> None:
    weight = weights(4, 32).requires_grad_()
    values = fake_quantize(weight, "nvfp4", anchor=4.0)
    (grad,) = torch.autograd.grad(values.pow(3).sum(), weight, create_graph=True)
    assert grad.equal(3 * values.detach() ** 2)
    # d(3 Q(w)^2)/dw = 6 Q(w) Q'(w) with Q' = 1; the rounding itself adds no curvature.
    (second,) = torch.autograd.grad(grad.sum(), weight)
    assert second.equal(6 * values.detach())
    linear = torch.autograd.grad(fake_quantize(weight, "nvfp4", anchor=4.0).sum(), weight, create_graph=True)[0]
    assert linear.equal(torch.ones_like(weight)) and not linear.requires_grad


def test_only_the_weight_gets_a_gradient() -> None:
    anchor = torch.tensor([4.0, 4.0], requires_grad=True)
    fake_quantize(weights(2, 4, 32).requires_grad_(), "nvfp4", anchor=anchor).sum().backward()
    assert anchor.grad is None
    assert not fake_quantize(weights(2, 4, 32), "nvfp4").requires_grad


def test_checkpointing_gives_the_same_gradients() -> None:
    x, weight = weights(5, 32, seed=2), weights(8, 32).requires_grad_()
    layer = lambda w: torch.tanh(x @ fake_quantize(w, "nvfp4", anchor=4.0).T).sum()
    (plain,) = torch.autograd.grad(layer(weight), weight)
    (again,) = torch.autograd.grad(checkpoint(layer, weight, use_reentrant=False), weight)
    assert plain.equal(again) and plain.abs().max() > 0


@pytest.mark.parametrize("expert_format", FORMATS)
def test_nothing_is_saved_for_backward(expert_format: ExpertFormat) -> None:
    saved: list[torch.Tensor] = []
    weight = weights(4, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        values = fake_quantize(weight, expert_format)
    assert not saved
    gc.collect()
    reachable = {id(o) for o in gc.get_referents(values.grad_fn) if isinstance(o, torch.Tensor)}
    assert not reachable and not [v for v in vars(values.grad_fn or object).values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("expert_format", FORMATS)
def test_a_second_round_changes_nothing(expert_format: ExpertFormat) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = weights(3, 32, 64, dtype=dtype)
        anchor = weight.float().abs().amax((1, 2)) if expert_format == "nvfp4" else None
        once = fake_quantize(weight, expert_format, anchor=anchor)
        assert same(fake_quantize(once, expert_format, anchor=anchor), once)


def test_an_optimiser_step_of_rate_zero_changes_no_byte() -> None:
    weight = torch.nn.Parameter(weights(2, 16, 32))
    anchor = weight.detach().abs().amax((1, 2))
    before, bytes_before = fake_quantize(weight, "nvfp4", anchor=anchor), nvfp4.quantize(weight.detach(), anchor)
    optimizer = torch.optim.AdamW([weight], lr=0.0, weight_decay=0.1)
    before.pow(2).sum().backward()
    optimizer.step()
    after, bytes_after = fake_quantize(weight, "nvfp4", anchor=anchor), nvfp4.quantize(weight.detach(), anchor)
    assert same(after.detach(), before.detach())
    assert bytes_after.codes.equal(bytes_before.codes) and bytes_after.scales.equal(bytes_before.scales)


def test_a_frozen_anchor_does_not_follow_the_weights() -> None:
    """One weight grows; only its block may move. Without the anchor the whole expert does."""
    weight = weights(32, 64)
    anchor = weight.abs().max()
    before, moved = fake_quantize(weight, "nvfp4", anchor=anchor), weight.clone()
    moved[3, 20] = anchor * 1.2
    after = fake_quantize(moved, "nvfp4", anchor=anchor)
    touched = (after != before).unflatten(-1, (-1, 16)).any(-1).nonzero().tolist()
    assert touched == [[3, 1]]
    assert (fake_quantize(moved, "nvfp4") != before).float().mean() > 0.5


@pytest.mark.parametrize("expert_format", FORMATS)
def test_strides_do_not_matter(expert_format: ExpertFormat) -> None:
    for name, view in strided_views(weights(2, 8, 64)).items():
        leaf = view.clone().requires_grad_()
        values = fake_quantize(view.requires_grad_(), expert_format)
        assert same(values, fake_quantize(leaf, expert_format)), name
        values.sum().backward()


def test_marlin_zeroes_the_blocks_whose_scale_it_cannot_hold() -> None:
    weight = torch.zeros(2, 3, 32)
    weight[:, :, 0], weight[:, :, 16] = 6.0, torch.tensor([[1e-3, 3e-4, 1e-4], [1.0, 0.0, 4e-4]])
    t = nvfp4.quantize(weight, torch.tensor([6.0, 6.0]))
    assert t.scales[..., 1].tolist() == [[19, 10, 2], [104, 0, 13]]  # below 8: a subnormal scale
    release = fake_quantize(weight, "nvfp4", anchor=torch.tensor([6.0, 6.0]))
    served = fake_quantize(weight, "nvfp4", anchor=torch.tensor([6.0, 6.0]), target="marlin")
    assert (release != served).nonzero().tolist() == [[0, 2, 16]] and served[0, 2, 16] == 0


def test_marlin_holds_smaller_scales_once_all_have_shrunk() -> None:
    """With a largest scale of 224 or less the engine shifts all scales up by a power of two, and fewer are lost."""
    scales = torch.tensor([0x7E, 0x78, 8, 7, 4, 3, 0], dtype=torch.uint8)  # 448, 256, ...
    assert flushed_scales(scales, "nvfp4").tolist() == [False] * 3 + [True] * 3 + [False]
    assert flushed_scales(scales[1:], "nvfp4").tolist() == [False] * 2 + [True] * 3 + [False]
    scales[:2] = 0x76  # 224
    assert flushed_scales(scales, "nvfp4").tolist() == [False] * 5 + [True, False]
    assert flushed_scales(scales, "mxfp8").tolist() == [False] * 6 + [True]


def test_marlin_reads_the_smallest_power_of_two_as_zero() -> None:
    weight = torch.ones(1, 2, 32)
    weight[0, 1] = 2.0**-125
    served = fake_quantize(weight, "mxfp8", target="marlin")
    assert served[0, 0].equal(weight[0, 0]) and not served[0, 1].any()
    assert fake_quantize(weight, "mxfp8").equal(weight)


def test_marlin_loses_nothing_ordinary() -> None:
    weight = weights(3, 32, 64)
    for expert_format in FORMATS:
        assert fake_quantize(weight, expert_format, target="marlin").equal(fake_quantize(weight, expert_format))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: fake_quantize(w * torch.nan, "nvfp4", name="w2"), "w2 must be finite; got 128 non-finite values"),
        (lambda w: fake_quantize(w, "nvfp4", anchor=0.0), "weight_amax must be positive"),
        (lambda w: fake_quantize(w, "mxfp8", anchor=1.0), "weight_amax must not be given for mxfp8; got 1.0"),
        (lambda w: fake_quantize(w, "nvfp4", scales=torch.ones(4, 2, dtype=torch.uint8)), "must come with an anchor"),
        (lambda w: fake_quantize(w, "bf16", scales=torch.ones(4, 2, dtype=torch.uint8)), "must come with an anchor"),
        (lambda w: fake_quantize(w, "nvfp4", target="cutlass"), "target must be release or marlin; got 'cutlass'"),
        (lambda w: fake_quantize(w[:, :24], "mxfp8"), "multiple of 32"),
        (lambda w: fake_quantize(w.half(), "nvfp4"), "bfloat16 or float32; got torch.float16"),
    ],
)
def test_what_cannot_be_rounded_is_refused(call, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call(weights(4, 32))


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("shrunk", [1.0, 0.6])
def test_marlin_values_are_those_of_its_layout(expert_format: ExpertFormat, shrunk: float) -> None:
    """Through the engine's own bytes: with blocks that are flushed, and with anchors that let the scales shift."""
    w13, w2 = weights(2, 128, 64), weights(2, 64, 64, seed=1)
    for w in (w13, w2):
        w *= torch.logspace(-7, 0, w.shape[1])[:, None] if expert_format == "nvfp4" else 1.0
    w13[1, 3] = 1e-37
    anchors = {f"{n}_weight_amax": w.abs().amax((1, 2)) / shrunk for n, w in (("w13", w13), ("w2", w2))}
    stored = mixed.quantize_layer(w13, w2, expert_format, anchors=anchors)
    engine = marlin.from_release(stored, expert_format)
    num_flushed = 0
    for matrix, weight in (("w13_weight", w13), ("w2_weight", w2)):
        anchor = anchors[f"{matrix}_amax"] if expert_format == "nvfp4" else None
        served = fake_quantize(weight, expert_format, anchor=anchor, target="marlin")
        assert served.equal(marlin.dequantize(engine, matrix, expert_format, 64))
        num_flushed += int((served != fake_quantize(weight, expert_format, anchor=anchor)).sum())
    assert num_flushed > 0
