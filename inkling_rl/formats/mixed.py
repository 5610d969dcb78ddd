"""One layer's experts between the BF16 view and the tensors that a release checkpoint stores, by the layer's format.

The BF16 view is `w13 [E, 2F, H]` with interleaved rows (gate 0, up 0, gate 1, up 1, ...) and `w2 [E, H, F]`. The stored
tensors are named by what follows `mlp.experts.`: `w13_weight`, `w13_weight_scale`, and for NVFP4 `w13_weight_amax`
(float32 `[E]`) and `w13_weight_outer_scale_denominator` (float32 scalar). Gate and up of an expert share one anchor
because they are one tensor here.

Not a file format: `inkling_rl.checkpoint` reads and writes. Source: transformers' `conversion_mapping` for `inkling2`
and the dequantisation of `inkling2_loop`, Megatron-Bridge's description of the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from inkling_rl.formats import ExpertFormat, kernels, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError

MATRICES = ("w13_weight", "w2_weight")


def companions(expert_format: ExpertFormat) -> tuple[str, ...]:
    """Suffixes of the tensors stored beside a weight of this format."""
    return {"nvfp4": ("_scale", "_amax", "_outer_scale_denominator"), "mxfp8": ("_scale",), "bf16": ()}[expert_format]


def quantize_layer(
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_format: ExpertFormat,
    source: Mapping[str, torch.Tensor] | None = None,
    *,
    anchors: Mapping[str, torch.Tensor] | None = None,
    scale_max: int = 256,
    name: str = "experts",
) -> dict[str, torch.Tensor]:
    """Stored tensors of a layer's experts, in the order in which the release lists them.

    Args:
        w13: `[E, 2F, H]` interleaved, bfloat16 or float32, any strides.
        w2: `[E, H, F]`.
        expert_format: of this layer.
        source: stored companions to keep (`w13_weight_scale`, `w13_weight_amax`, ...). Weights that came out of them
            get their old bytes back. A matrix of which it holds nothing gets new scales.
        anchors: `w13_weight_amax`, `w2_weight_amax` to quantise against, for NVFP4, instead of the weights' maxima.
        scale_max: 256 or 448, for NVFP4 without a source.
        name: prefix of tensor names in errors.

    Raises:
        FormatError: an unknown format, matrices of two layers, weights that the format cannot hold, or a source with
            some companions of a matrix only.
    """
    if expert_format not in get_args(ExpertFormat):
        known = ", ".join(get_args(ExpertFormat))
        raise FormatError(f"{name} must be stored as one of {known}; got {expert_format}. Correct the layer's format")
    layer_sizes(w13, w2, 8, name)
    tensors: dict[str, torch.Tensor] = {}
    for matrix, weight in zip(MATRICES, (w13, w2), strict=True):
        tensors |= _quantize_matrix(weight, matrix, expert_format, source, anchors or {}, scale_max, name)
    return tensors


def dequantize_matrix(
    tensors: Mapping[str, torch.Tensor], matrix: str, dtype: torch.dtype, *, name: str = "experts"
) -> torch.Tensor:
    """`[E, rows, columns]` in `dtype` from the stored tensors of `w13_weight` or `w2_weight`; w13 stays interleaved.

    The format is recognised by the companions. The kernels write the result and nothing else; torch's float32
    intermediates are those of one expert.

    Raises:
        FormatError: a quantised weight without all its companions, or companions of two formats or other shapes.
    """
    weight = tensors[matrix]
    expert_format = stored_format(tensors, matrix, name)
    if expert_format == "bf16":
        return weight.to(dtype, copy=True)
    scale = tensors[f"{matrix}_scale"].view(torch.uint8)
    codes = weight.view(torch.uint8)
    columns, block_size = (2 * weight.shape[-1], 16) if expert_format == "nvfp4" else (weight.shape[-1], 32)
    _check_shape(scale, (*weight.shape[:-1], columns // block_size), f"{name}.{matrix}_scale")
    denominator, amax = 0, codes
    if expert_format == "nvfp4":
        denominator = read_denominator(tensors[f"{matrix}_outer_scale_denominator"], f"{name}.{matrix}")
        amax = tensors[f"{matrix}_amax"].float()
        _check_shape(amax, weight.shape[:1], f"{name}.{matrix}_amax")

    def stored(experts: slice) -> nvfp4.NVFP4Tensor | mxfp8.MXFP8Tensor:
        if expert_format == "mxfp8":
            return mxfp8.MXFP8Tensor(codes[experts], scale[experts])
        return nvfp4.NVFP4Tensor(codes[experts], scale[experts], amax[experts], denominator)

    if kernels.have_fast(weight.device):
        return stored(slice(None)).dequantize(dtype)
    values = torch.empty(*weight.shape[:-1], columns, dtype=dtype, device=weight.device)
    for e in range(len(weight)):
        values[e : e + 1] = stored(slice(e, e + 1)).dequantize(dtype)
    return values


def dequantize_layer(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, *, name: str = "experts"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`w13` (interleaved) and `w2` of a layer from its stored tensors, see `dequantize_matrix`."""
    w13, w2 = (dequantize_matrix(tensors, matrix, dtype, name=name) for matrix in MATRICES)
    return w13, w2


def stored_format(tensors: Mapping[str, torch.Tensor], matrix: str, name: str = "experts") -> ExpertFormat:
    """Format of a stored matrix, from its dtype; its companions must be there and no others.

    Raises:
        FormatError: unknown dtype, companions missing or left over.
    """
    by_dtype: dict[torch.dtype, ExpertFormat] = {
        torch.uint8: "nvfp4",
        torch.float8_e4m3fn: "mxfp8",
        torch.bfloat16: "bf16",
        torch.float32: "bf16",
    }
    expert_format = by_dtype.get(tensors[matrix].dtype)
    if expert_format is None:
        raise FormatError(
            f"{name}.{matrix} must be uint8 (NVFP4), float8_e4m3fn (MXFP8), bfloat16 or float32; got "
            f"{tensors[matrix].dtype}. Convert the checkpoint"
        )
    expected = {matrix + suffix for suffix in companions(expert_format)}
    found = {key for key in tensors if key.startswith(f"{matrix}_")}
    if expected != found:
        missing, extra = sorted(expected - found), sorted(found - expected)
        raise FormatError(
            f"{name}.{matrix} is {expert_format} and must come with {sorted(expected) or 'no companions'}; "
            f"missing {missing}, left over {extra}. Take the weight and its companions from the same checkpoint"
        )
    return expert_format


def layer_sizes(w13: torch.Tensor, w2: torch.Tensor, bits: int, name: str) -> tuple[int, int, int]:
    """Experts, hidden size and expert width of a layer from the shapes of its matrices, values of `bits` per weight.

    Raises:
        FormatError: matrices that are not of one layer.
    """
    shape13, shape2 = list(w13.shape), list(w2.shape)
    if len(shape13) == len(shape2) == 3:
        experts, hidden, width = shape13[0], shape2[1], shape13[1] // 2
        if shape13 == [experts, 2 * width, hidden * bits // 8] and shape2 == [experts, hidden, width * bits // 8]:
            return experts, hidden, width
    raise FormatError(
        f"{name}.w13_weight and w2_weight must be [experts, 2 * width, hidden] and [experts, hidden, width]"
        f"{' with two codes per byte' if bits == 4 else ''}; got {shape13} and {shape2}. "
        "Take both from the same layer"
    )


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """`[E, 2F, ...]` with gate rows before up rows, to rows gate 0, up 0, gate 1, ... (weights and scales alike)."""
    return gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def deinterleave(w13: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave`."""
    return w13.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _quantize_matrix(
    weight: torch.Tensor,
    matrix: str,
    expert_format: ExpertFormat,
    source: Mapping[str, torch.Tensor] | None,
    anchors: Mapping[str, torch.Tensor],
    scale_max: int,
    name: str,
) -> dict[str, torch.Tensor]:
    label = f"{name}.{matrix}"
    if expert_format == "bf16":
        return {matrix: weight.to(torch.bfloat16)}
    if source is not None and not any(matrix + suffix in source for suffix in companions(expert_format)):
        source = None
    if source is not None:
        missing = [matrix + suffix for suffix in companions(expert_format) if matrix + suffix not in source]
        if missing:
            raise FormatError(
                f"{label} must be quantised against all its stored companions; got no {missing[0]}. Pass it"
            )
    scales = None if source is None else source[f"{matrix}_scale"].view(torch.uint8)
    if expert_format == "mxfp8":
        m = mxfp8.quantize(weight, scales, name=label)
        return {matrix: m.codes.view(torch.float8_e4m3fn), f"{matrix}_scale": m.scales}
    if source is not None:
        amax: torch.Tensor | None = source[f"{matrix}_amax"]
        scale_max = read_denominator(source[f"{matrix}_outer_scale_denominator"], label) // 6
    else:
        amax = anchors.get(f"{matrix}_amax")
    t = nvfp4.quantize(weight, amax, scales, scale_max, name=label)
    return {
        matrix: t.codes,
        f"{matrix}_scale": t.scales.view(torch.float8_e4m3fn),
        f"{matrix}_amax": t.amax,
        f"{matrix}_outer_scale_denominator": torch.tensor(float(t.denominator), device=weight.device),
    }


def _check_shape(companion: torch.Tensor, expected: tuple[int, ...], label: str) -> None:
    if tuple(companion.shape) != tuple(expected):
        raise FormatError(
            f"{label} must have shape {list(expected)}; got {list(companion.shape)}. "
            "Take the weight and its companions from the same checkpoint"
        )


def read_denominator(stored: torch.Tensor, label: str) -> int:
    """The stored `_outer_scale_denominator` of matrix `label`.

    Raises:
        FormatError: anything but a scalar 1536 or 2688.
    """
    value = float(stored) if stored.numel() == 1 else float("nan")
    if value not in nvfp4.DENOMINATORS:
        got = value if stored.numel() == 1 else f"a tensor of shape {list(stored.shape)}"
        raise FormatError(
            f"{label}_outer_scale_denominator must be the scalar 1536 or 2688; got {got}. "
            "The checkpoint was made by another recipe"
        )
    return int(value)
