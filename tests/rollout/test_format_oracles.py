"""vLLM's own formats, in torch, against ours: the other half of `tests/inkling_rl/test_oracles.py`."""

from __future__ import annotations

import pytest
import torch

from inkling_rl.formats import mxfp8, nvfp4
from tests.inkling_rl.format_cases import mxfp8_cases


def bits_of_maximum(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().unflatten(-1, (-1, 32)).abs().amax(-1).view(torch.int32)


@pytest.mark.parametrize("stacked", [False, True])
def test_bytes_equal_vllms_but_where_a_logarithm_misses_a_step(stacked: bool) -> None:
    """Scale and codes, zero blocks and subnormals included; the difference is the one of ModelOpt and torchao."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    num_blocks = num_above = 0
    for case, weight in mxfp8_cases().items():
        weight = (weight if stacked else weight.flatten(0, 1)).contiguous()
        m = mxfp8.quantize(weight)
        codes, scales = _mxfp8_e4m3_quantize_torch(weight)
        other = scales != m.scales
        # One float32 step above 1.75 * 2^k their log2 rounds down; their largest value then saturates.
        assert not (other & ((bits_of_maximum(weight) & 0x7FFFFF) != 0x600001)).any(), case
        assert (m.scales[other] == scales[other] + 1).all()
        differ = (codes.view(torch.uint8) != m.codes).unflatten(-1, (-1, 32)).any(-1)
        assert (differ == other).all(), case
        num_blocks, num_above = num_blocks + other.numel(), num_above + int(other.sum())
    assert num_blocks > 20_000 and num_above == 239


def test_values_equal_vllms() -> None:
    """What the engine's emulation makes of our bytes is what we say they mean; its scale for byte 0 included."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

    for case, weight in mxfp8_cases().items():
        m = mxfp8.quantize(weight.flatten(0, 1))
        theirs = dequant_mxfp8_to_bf16(m.codes.view(torch.float8_e4m3fn), m.scales)
        assert theirs.equal(m.dequantize(torch.bfloat16)), case


def test_nvfp4_values_are_vllms_but_for_the_last_bit() -> None:
    """Same code order, same scales. Its emulation multiplies scale and outer scale first; we multiply value and scale,
    exactly, so only the values 1.5, 3 and 6 can be rounded otherwise, by one bit of float32."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    weight = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    t = nvfp4.quantize(weight)
    ours = t.dequantize()
    theirs = dequantize_to_dtype(t.codes, t.scales, t.amax / t.denominator, torch.float32, 16, swizzle=False)
    apart = theirs.view(torch.int32) - ours.view(torch.int32)
    three = torch.isin(torch.stack((t.codes & 7, (t.codes >> 4) & 7), -1).flatten(-2), torch.tensor([3, 5, 7]))
    assert not apart[~three].any() and apart.abs().max() == 1
    assert (theirs.bfloat16() != ours.bfloat16()).sum() < 1e-4 * weight.numel()
