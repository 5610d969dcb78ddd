"""Straight-through fake quantisation: the trainer's forward pass on the values that the engine will hold.

Forward is `dequantize(quantize(weight))` by the very code that exports; backward is the identity. The estimator is the
plain one: the gradient of a saturated or underflowed value is not masked, because a masked weight could never come
back, and the choice between the two candidates of Four Over Six is taken as constant.

Not a module and not a cache: each call quantises anew, keeps neither codes nor scales and saves nothing for backward,
so gradient checkpointing costs a second quantisation and no memory. Source: straight-through estimation as in SkyRL's
and Kimi K2's INT4 training, with our formats.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from inkling_rl.formats import ExpertFormat, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError, as_experts
from inkling_rl.formats.reference import marlin

Target = Literal["release", "marlin"]
"""Whose values: `release` is what the stored tensors mean; `marlin` is what Marlin's kernels, the engine's choice on
Hopper, make of them: a few smallest block scales become zero."""


def fake_quantize(
    weight: torch.Tensor,
    expert_format: ExpertFormat,
    *,
    anchor: torch.Tensor | float | None = None,
    scales: torch.Tensor | None = None,
    scale_max: int = 256,
    target: Target = "release",
    name: str = "weight",
) -> torch.Tensor:
    """Values that `weight` has after a round trip through `expert_format`, with the gradient of the identity.

    Args:
        weight: `[K]`, `[N, K]` or `[E, N, K]`, bfloat16 or float32 (a master), any strides.
        expert_format: of the layer; `bf16` rounds to bfloat16.
        anchor: NVFP4's `amax`, scalar or `[E]`, as the engine holds it. Freeze it: one that follows the weights moves
            by an ulp and with it about 5 % of all codes. None takes the maximum of `weight`, gate and up together.
        scales: block scales to keep, uint8; for NVFP4 only together with their anchor.
        scale_max: 256 or 448, for NVFP4.
        target: `marlin` zeroes the blocks that Marlin loses. `weight` must then be all experts that one engine rank
            holds of this matrix, because they share the power of two by which their scales are shifted.
        name: how errors name the tensor.

    Returns:
        A new tensor of the shape and dtype of `weight`. Values of a bfloat16 weight are rounded once more, as they are
        in the engine. Differentiable any number of times (the second derivative is zero).

    Raises:
        FormatError: what `nvfp4.quantize` and `mxfp8.quantize` refuse, arguments that the format does not take.
    """
    if target not in ("release", "marlin"):
        raise FormatError(f"target must be release or marlin; got {target!r}. Use the kernels that the engine runs")
    if expert_format != "nvfp4" and anchor is not None:
        raise FormatError(f"{name}_amax must not be given for {expert_format}; got {anchor}. Only NVFP4 has an anchor")
    if scales is not None and (expert_format == "bf16" or (expert_format == "nvfp4" and anchor is None)):
        raise FormatError(
            f"{name}_scale must come with an anchor and a quantised format; got {expert_format}, anchor {anchor}. "
            "Pass the amax stored beside these scales"
        )
    rounded: torch.Tensor = _StraightThrough.apply(weight, expert_format, anchor, scales, scale_max, target, name)
    return rounded


def flushed_scales(scales: torch.Tensor, expert_format: ExpertFormat) -> torch.Tensor:
    """Which block scales Marlin's kernels read as zero although they are not: bool, of the shape of `scales`.

    NVFP4: scales that stay below 2^-6 after the shift that all given scales share (the subnormal ones, unless the
    largest scale is 224 or less). MXFP8: byte 0, because 2^-127 is written into the exponent bits of a bfloat16.
    """
    if expert_format == "mxfp8":
        return scales == 0
    shift = marlin.scale_shift(int(scales.max()))
    return (scales != 0) & (marlin.scale_bytes(scales, shift) == 0)


class _StraightThrough(torch.autograd.Function):
    """Round the first argument, pass its gradient through."""

    @staticmethod
    def forward(
        weight: torch.Tensor,
        expert_format: ExpertFormat,
        anchor: torch.Tensor | float | None,
        scales: torch.Tensor | None,
        scale_max: int,
        target: Target,
        name: str,
    ) -> torch.Tensor:
        if expert_format == "bf16":
            return weight.to(torch.bfloat16).to(weight.dtype, copy=weight.dtype == torch.bfloat16)
        quantized: nvfp4.NVFP4Tensor | mxfp8.MXFP8Tensor
        if expert_format == "nvfp4":
            quantized = nvfp4.quantize(weight, anchor, scales, scale_max, name=name)
        else:
            quantized = mxfp8.quantize(weight, scales, name=name)
        values = quantized.dequantize(weight.dtype)
        if target == "marlin":
            lost = as_experts(flushed_scales(quantized.scales, expert_format))
            blocks = as_experts(values).unflatten(-1, (*lost.shape[-1:], -1))
            blocks.masked_fill_(lost[..., None], 0.0)
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Nothing is needed backward."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None, None, None, None, None
