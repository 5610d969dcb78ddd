"""Checks of the products of few rows, for any device."""

from __future__ import annotations

import torch

from rollout.kernels import triton_skinny
from rollout.kernels.triton_skinny import Tile

BF16 = torch.bfloat16


class Draw:
    """Normal numbers; weights keep the size of their input."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def rows(self, *shape: int) -> torch.Tensor:
        """Activations whose rows and planes lie apart; what lies between is NaN."""
        wide = torch.full((*shape[:-2], shape[-2] + 1, shape[-1] + 8), torch.nan, device=self.device, dtype=BF16)
        x = wide[..., 1:, : shape[-1]]
        x.copy_(torch.randn(shape, generator=self.generator, device=self.device))
        return x

    def weight(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        weight = torch.randn(shape, generator=self.generator, device=self.device)
        return (weight / shape[-1] ** 0.5).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().transpose(-1, -2)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the worst row."""
    return float(((got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def rounding(device: str) -> float:
    """Relative error of one rounding to bfloat16; the interpreter truncates instead."""
    return 2**-7 if device == "cpu" else 2**-8


def check_linear(device: str, rows: int, outputs: int, hidden: int, tile: Tile | None = None) -> None:
    draw = Draw(device, rows + outputs)
    x_TC, weight_OC = draw.rows(rows, hidden), draw.weight(outputs, hidden)
    got = triton_skinny.linear(x_TC, weight_OC, tile)
    assert got.dtype is BF16 and got.shape == (rows, outputs) and got.is_contiguous()
    wanted = exact(x_TC, weight_OC)
    assert bool(((got.double() - wanted).abs() <= rounding(device) * wanted.abs() + 1e-4).all())


def check_inputs(
    device: str, rows: int, outputs: int, hidden: int, sinks: int, later: int = 0, taps: int = 0,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Of a full layer where there are `later` outputs of the second and the third input each."""
    draw, full = Draw(device, rows + outputs), later > 0
    x_QTH, weight_OH = draw.rows(3 if full else 1, rows, hidden), draw.weight(outputs, hidden)
    keys_values = draw.weight(2, later, hidden) if full else None
    sinks_NH = draw.weight(sinks, hidden, dtype=torch.float32)
    taps_weight = draw.weight(2, taps, hidden, dtype=torch.float32) if full else None
    got = triton_skinny.attention_inputs(x_QTH, weight_OH, keys_values, sinks_NH, taps_weight, tile)
    wanted = [exact(x_QTH[0], weight_OH)]
    if keys_values is not None:
        wanted += exact(x_QTH[1:], keys_values)
    assert got[0].dtype is BF16 and error(got[0], torch.cat(wanted, 1)) < rounding(device)
    assert got[1].dtype is torch.float32 and error(got[1], exact(x_QTH[0], sinks_NH)) < 3e-6
    if taps_weight is None:
        assert got[2] is None
        return
    assert got[2] is not None and got[2].is_contiguous() and got[2].shape == (2, rows, taps)
    assert max(error(*pair) for pair in zip(got[2], exact(x_QTH[1:], taps_weight), strict=True)) < 3e-6


def check_logits(device: str, rows: int, vocabulary: int, padded: int, hidden: int, tile: Tile | None = None) -> None:
    """Values about 0, where a careless tanh cancels, and beyond the cap."""
    draw = Draw(device, rows)
    x_TH, weight_VH = draw.rows(rows, hidden), draw.weight(vocabulary, hidden)
    weight_VH[::3] *= 1e-3
    weight_VH[1::3] *= 100
    logits_TP = triton_skinny.softcap_logits(x_TH, weight_VH, 20.0, padded, tile)
    assert logits_TP.dtype is torch.float32 and logits_TP.shape == (rows, padded)
    assert bool((logits_TP[:, vocabulary:] == float("-inf")).all())
    wanted = 20 * torch.tanh(exact(x_TH, weight_VH) / 20)
    # The matrix unit truncates its sums every 16 columns; a sum may be much smaller than they were.
    size = exact(x_TH.double().square(), weight_VH.double().square()).sqrt()
    difference = (logits_TP[:, :vocabulary].double() - wanted).abs()
    limit = 5e-5 * size + 2e-5 * wanted.abs()
    assert bool((difference <= limit).all()), float((difference / limit).max())


def check_rows_stand_alone(device: str, outputs: int, hidden: int) -> None:
    """The bits of a row do not depend on the others."""
    draw = Draw(device, 3)
    x_TC, weight_OC = draw.rows(32, hidden), draw.weight(outputs, hidden)
    for least, most in ((1, 8), (9, 16), (17, 32)):
        whole = triton_skinny.linear(x_TC[:most], weight_OC)
        assert torch.equal(triton_skinny.linear(x_TC[:least], weight_OC), whole[:least])
        assert torch.equal(triton_skinny.linear(x_TC[:most].flip(0), weight_OC).flip(0), whole)
