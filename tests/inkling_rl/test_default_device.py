"""Formats and checkpoints work where their tensors are, whatever torch's default device.

vLLM constructs a model, and some of its hooks run, with the GPU as the default device: a tensor made without naming a
device would land there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.formats import ExpertFormat, fake_quantize, marlin, mixed

BASE = Path(__file__).parents[2] / "recipes" / "models" / "tiny-arithmetic"


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_formats(expert_format: ExpertFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(3, 192, 128, generator=generator).bfloat16()
    w2 = torch.randn(3, 128, 96, generator=generator).bfloat16()
    with torch.device("meta"):
        stored = mixed.quantize_layer(w13, w2, expert_format)
        engine = marlin.from_release(stored, expert_format)
        straight = marlin.from_weights(w13, w2, expert_format)
        back = marlin.to_release(engine, expert_format, 96, companions=stored)
        values = [
            *stored.values(), *engine.values(), *straight.values(), *back.values(),
            mixed.dequantize_matrix(stored, "w2_weight", torch.bfloat16),
            marlin.dequantize(engine, "w13_weight", expert_format, 96, torch.bfloat16),
            fake_quantize.fake_quantize(w13, expert_format),
        ]  # fmt: skip
    assert all(value.is_cpu for value in values)
    again = mixed.quantize_layer(w13, w2, expert_format)
    assert all(
        torch.equal(stored[key].reshape(-1).view(torch.uint8), again[key].reshape(-1).view(torch.uint8))
        for key in again
    )


def test_checkpoint() -> None:
    with torch.device("meta"):
        checkpoint = Checkpoint.open(BASE)
        checkpoint.check()
        tensors = dict(checkpoint.iter_hf(torch.bfloat16))
    assert all(tensor.is_cpu for tensor in tensors.values())
