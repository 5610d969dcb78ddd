"""A layer's experts to stored tensors and back, by format."""

from __future__ import annotations

import pytest
import torch

from inkling_rl.formats import mixed, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 64, 32, generator=g).bfloat16(), torch.randn(3, 32, 32, generator=g).bfloat16()


def test_nvfp4_tensors_are_those_of_the_release() -> None:
    w13, w2 = layer()
    stored = mixed.quantize_layer(w13, w2, "nvfp4")
    suffixes = ("", "_scale", "_amax", "_outer_scale_denominator")
    assert list(stored) == [f"{matrix}{s}" for matrix in ("w13_weight", "w2_weight") for s in suffixes]
    assert [str(stored[f"w13_weight{s}"].dtype) for s in suffixes] == [
        "torch.uint8", "torch.float8_e4m3fn", "torch.float32", "torch.float32"
    ]  # fmt: skip
    assert stored["w13_weight_outer_scale_denominator"].shape == ()
    assert stored["w13_weight_outer_scale_denominator"] == 1536
    direct = nvfp4.quantize(w13)
    assert stored["w13_weight"].equal(direct.codes) and stored["w13_weight_amax"].equal(direct.amax)


def test_gate_and_up_share_one_anchor() -> None:
    w13, w2 = layer()
    w13[1, 0::2] *= 8  # gate rows of expert 1
    stored = mixed.quantize_layer(w13, w2, "nvfp4")
    assert stored["w13_weight_amax"].shape == (3,)
    assert stored["w13_weight_amax"][1] == w13[1].float().abs().max() == w13[1, 0::2].float().abs().max()


def test_mxfp8_tensors_are_those_of_the_release() -> None:
    w13, w2 = layer()
    stored = mixed.quantize_layer(w13, w2, "mxfp8")
    assert list(stored) == ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"]
    assert stored["w2_weight"].dtype == torch.float8_e4m3fn and stored["w2_weight_scale"].dtype == torch.uint8
    assert stored["w2_weight"].view(torch.uint8).equal(mxfp8.quantize(w2).codes)


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8", "bf16"])
def test_layers_come_back_and_go_out_byte_for_byte(expert_format: mixed.ExpertFormat) -> None:
    w13, w2 = layer()
    stored = mixed.quantize_layer(w13, w2, expert_format)
    for dtype in (torch.float32, torch.bfloat16):
        again = mixed.quantize_layer(*mixed.dequantize_layer(stored, dtype), expert_format, source=stored)
        assert list(again) == list(stored)
        for name, value in stored.items():
            assert again[name].dtype == value.dtype
            assert (
                again[name].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))
            )


def test_a_frozen_anchor_is_kept() -> None:
    w13, w2 = layer()
    anchors = {"w13_weight_amax": torch.full((3,), 8.0)}
    stored = mixed.quantize_layer(w13, w2, "nvfp4", anchors=anchors)
    assert stored["w13_weight_amax"].tolist() == [8.0] * 3
    assert stored["w2_weight_amax"].equal(w2.float().abs().amax((1, 2)))


def test_a_strided_view_gives_the_same_bytes() -> None:
    w13, w2 = layer()
    gate_up = mixed.deinterleave(w13)
    assert gate_up[:, 0].equal(w13[:, 0]) and gate_up[:, 32].equal(w13[:, 1]) and gate_up[:, 1].equal(w13[:, 2])
    assert mixed.interleave(gate_up).equal(w13)
    view = w13.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    assert mixed.quantize_layer(view, w2, "nvfp4")["w13_weight"].equal(
        mixed.quantize_layer(w13, w2, "nvfp4")["w13_weight"]
    )


def stored_without(*names: str, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = mixed.quantize_layer(*layer(), "nvfp4") | changed
    return {name: value for name, value in stored.items() if name not in names}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mixed.dequantize_layer(stored_without("w13_weight_amax"), torch.float32, name="layers.3.experts"),
            r"layers\.3\.experts\.w13_weight is nvfp4 .* missing \['w13_weight_amax'\]",
        ),
        (
            lambda: mixed.dequantize_layer(stored_without(w2_weight=layer()[1]), torch.float32),
            r"w2_weight is bf16 and must come with no companions.*left over \['w2_weight_amax'",
        ),
        (
            lambda: mixed.dequantize_layer(
                stored_without(w13_weight_outer_scale_denominator=torch.tensor(1000.0)), torch.float32
            ),
            "w13_weight_outer_scale_denominator must be the scalar 1536 or 2688; got 1000",
        ),
        (
            lambda: mixed.dequantize_layer(
                stored_without(w13_weight_outer_scale_denominator=torch.ones(3)), torch.float32
            ),
            "must be the scalar 1536 or 2688; got a tensor of shape",
        ),
        (
            lambda: mixed.dequantize_layer(stored_without(w13_weight_amax=torch.ones(2)), torch.float32),
            r"w13_weight_amax must have shape \[3\]; got \[2\]",
        ),
        (
            lambda: mixed.dequantize_layer(
                stored_without(w2_weight_scale=torch.zeros(3, 4, 1, dtype=torch.float8_e4m3fn)), torch.float32
            ),
            r"w2_weight_scale must have shape .*; got \[3, 4, 1\]",
        ),
        (
            lambda: mixed.quantize_layer(*layer(), "nvfp4", source=stored_without("w2_weight_scale")),
            "w2_weight must be quantised against all its stored companions; got no w2_weight_scale",
        ),
        (
            lambda: mixed.dequantize_layer(stored_without(w2_weight=layer()[1].half()), torch.float32),
            "got torch.float16",
        ),
        (
            lambda: mixed.quantize_layer(layer()[0] * torch.inf, layer()[1], "mxfp8", name="layers.5.experts"),
            r"layers\.5\.experts\.w13_weight must be finite",
        ),
        (lambda: mixed.quantize_layer(*layer(), "fp4"), "must be stored as one of nvfp4, mxfp8, bf16; got fp4"),  # type: ignore[arg-type]
        (lambda: mixed.quantize_layer(layer()[0][:2], layer()[1], "nvfp4"), r"got \[2, 64, 32\] and \[3, 32, 32\]"),
        (lambda: mixed.quantize_layer(layer()[0][:, :63], layer()[1], "mxfp8"), r"\[experts, 2 \* width, hidden\]"),
        (lambda: mixed.quantize_layer(layer()[0][0], layer()[1], "bf16"), "Take both from the same layer"),
    ],
)
def test_what_does_not_fit_together_is_refused(call, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()
