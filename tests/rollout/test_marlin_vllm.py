"""Marlin's layouts against vLLM's own loading code on a CPU.

vLLM's functions run as they are, but for the operator that exists on CUDA alone: `gptq_marlin_repack` is replaced by
vLLM's own python description of it (`marlin_utils_test`), and the workspace, which holds no weights, by nothing.
`tests/gpu/marlin_against_vllm.py` runs the same on a GPU with the real operator.
"""

from __future__ import annotations

import pytest
import torch

from inkling_rl.formats import ExpertFormat, mixed
from inkling_rl.formats.reference import marlin as reference
from tests.gpu import marlin_against_vllm as against

pytest.importorskip("vllm")
from vllm.model_executor.layers.quantization.utils import (
    marlin_utils,
    marlin_utils_fp4,
    marlin_utils_fp8,
    marlin_utils_test,
)

SIZES = ((2, 128, 64), (3, 128, 96), (3, 64, 96), (2, 192, 160), (1, 128, 288), (2, 320, 32))


def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> torch.Tensor:
    """vLLM's description of the operator, from the same input: int32 `[K * bits / 32, N]`, codes along k."""
    assert not is_a_8bit
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)[None, :, None]
    codes = ((b_q_weight[:, None] >> shifts) & (2**num_bits - 1)).reshape(size_k, size_n)
    return marlin_utils_test.marlin_weights(
        codes, size_k, size_n, num_bits, marlin_utils_test.get_weight_perm(num_bits)
    )


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (marlin_utils_fp4, marlin_utils_fp8):
        monkeypatch.setattr(module.ops, "gptq_marlin_repack", repack)
        monkeypatch.setattr(module, "marlin_make_workspace_new", lambda *arguments, **keywords: None)


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bytes_dtypes_and_padding(expert_format: ExpertFormat, sizes: tuple[int, int, int]) -> None:
    against.assert_equals_vllm(against.stored_layer(expert_format, *sizes, "cpu"), expert_format)


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
def test_slices(expert_format: ExpertFormat) -> None:
    stored = against.stored_layer(expert_format, 2, 128, 256, "cpu")
    for tp_size in (2, 4, 8):
        for rank in {0, tp_size // 2, tp_size - 1}:
            against.assert_equals_vllm(stored, expert_format, rank, tp_size)


def test_shifts_zero_experts_and_zero_layers() -> None:
    against.check_shifts("cpu")


def test_the_shift_of_every_scale() -> None:
    against.check_scale_factors("cpu")


def test_the_release_of_weights_with_frozen_anchors() -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(3, *shape, generator=g).bfloat16() for shape in ((192, 128), (128, 96)))
    for factor in (1.0, 1.1, 1.25, 2.0, 4.0, 5.3):
        anchors = {"w13_weight_amax": w13.abs().amax((1, 2)).float() * factor}
        stored = mixed.quantize_layer(w13, w2, "nvfp4", anchors=anchors)
        against.assert_equals_vllm(stored, "nvfp4")


def test_padding_rules() -> None:
    from inkling_rl.formats import marlin

    for width in range(32, 513, 32):
        assert marlin.padded_width(width, 128, "mxfp8") == marlin_utils.marlin_moe_padded_intermediate(width, 32)


def test_processed_scales_byte_by_byte() -> None:
    """vLLM's own scale functions on every byte and shift, without the layer around them."""
    for shift in (0, 1, 2, 5):
        limit = 0x7F - 8 * shift
        scales = (torch.arange(64 * 4) % limit).byte().reshape(64, 4)
        columns = marlin_utils.marlin_permute_scales(
            scales.view(torch.float8_e4m3fn).bfloat16().T, size_k=64, size_n=64, group_size=16
        )
        theirs, _ = marlin_utils_fp4.nvfp4_marlin_process_scales(columns, scale_factor=2.0**shift)
        ours = reference.permute_scales(scales[None], shift, 1, 64, 4)[0]
        assert torch.equal(theirs.view(torch.uint8), ours)
