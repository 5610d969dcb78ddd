"""Fused experts in the layout that vLLM's Marlin kernels hold after loading, and back.

A layer's experts on Hopper, after vLLM's `process_weights_after_loading`, are these parameters of the fused-experts
module; the functions here return them under the same names, ready to be copied over the engine's own tensors:

| name | NVFP4 | MXFP8 |
|---|---|---|
| `w13_weight` | int32 `[E, H/16, 4 P]` | int32 `[E, H/16, 8 P]` |
| `w13_weight_scale` | float8_e4m3fn `[E, H/16, 2 P]` | float8_e8m0fnu `[E, H/32, 2 P]` |
| `w13_weight_scale_2` | float32 `[E]` | - |
| `w2_weight` | int32 `[E, P/16, 2 H]` | int32 `[E, P/16, 4 H]` |
| `w2_weight_scale` | float8_e4m3fn `[E, P/16, H]` | float8_e8m0fnu `[E, P/32, H]` |
| `w2_weight_scale_2` | float32 `[E]` | - |

E are the local experts (an expert-parallel rank passes its own), H the hidden size and P the local expert width
`F / tp_size`, padded with zeros as `padded_width` says. The E4M3 type of the NVFP4 scales is a container: their bytes
have five exponent bits and no sign. `w13_input_scale` and `w2_input_scale` are None there: activations stay bfloat16.

NVFP4 scales of one matrix are moved up by a power of two that depends on the largest scale of *all local experts*, so
ranks with different experts or slices may differ in it, and one expert alone must not be rewritten without it. Scales
too small for the format become zero, and their weights with them (`flushed_blocks` counts them).

Not an arithmetic of its own: `inkling_rl.formats.mixed` quantises, `reference.marlin` defines the bytes. Source: vLLM
0.30, `fused_moe/oracle/{nvfp4,fp8}.py` and `quantization/utils/marlin_utils_fp{4,8}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inkling_rl.formats import ExpertFormat, kernels, mixed, nvfp4
from inkling_rl.formats.errors import FormatError, check_weight, refuse_non_finite
from inkling_rl.formats.kernels import marlin as marlin_kernels
from inkling_rl.formats.marlin_inverse import dequantize, to_release
from inkling_rl.formats.marlin_layout import (
    BITS,
    BLOCK_SIZES,
    SCALE_DTYPES,
    SHARDS,
    check_format,
    check_sizes,
    padded_width,
    shapes,
    slice_matrix,
    slice_source,
    slice_tensor,
)
from inkling_rl.formats.reference import marlin as reference

__all__ = [
    "dequantize",
    "flushed_blocks",
    "from_release",
    "from_weights",
    "matrices_from_release",
    "padded_width",
    "shapes",
    "to_release",
]

_EXPERTS_AT_ONCE = 16


def from_release(
    stored: Mapping[str, torch.Tensor],
    expert_format: ExpertFormat,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    name: str = "experts",
) -> dict[str, torch.Tensor]:
    """The engine's tensors of a layer from those a release stores.

    Args:
        stored: `w13_weight`, `w2_weight` and their companions as `mixed.quantize_layer` returns them, local experts
            only; any device.
        expert_format: `nvfp4` or `mxfp8`.
        tp_rank: of the tensor-parallel slice: gate and up rows of w13, columns of w2.
        tp_size: 1 for none.
        name: prefix of tensor names in errors.

    Raises:
        FormatError: companions missing, another format, sizes that Marlin or the slice cannot take, scales that are
            negative or NaN, an outer scale that the engine's float32 cannot hold.
    """
    engine: dict[str, torch.Tensor] = {}
    for tensors in matrices_from_release(stored, expert_format, tp_rank=tp_rank, tp_size=tp_size, name=name):
        engine |= tensors
    return engine


def matrices_from_release(
    stored: Mapping[str, torch.Tensor],
    expert_format: ExpertFormat,
    *,
    device: torch.device | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    name: str = "experts",
) -> Iterator[dict[str, torch.Tensor]]:
    """`from_release`, one matrix after the other.

    With a `device` other than that of the stored tensors, it converts: some experts at a time are moved there, so that
    it holds one matrix of the result and little else.
    """
    hidden, width, parts = _checked_parts(stored, expert_format, tp_rank, tp_size, name)
    shifts = _checked_shifts(parts, expert_format, name)
    for matrix, part in parts.items():
        sizes = hidden, width // tp_size, shifts.get(matrix)
        if device is None or device == part[matrix].device:
            yield _engine_matrix(part, matrix, expert_format, *sizes)
        else:
            yield _moved_matrix(part, matrix, expert_format, *sizes, device)


def from_weights(
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_format: ExpertFormat,
    source: Mapping[str, torch.Tensor] | None = None,
    *,
    anchors: Mapping[str, torch.Tensor] | None = None,
    scale_max: int = 256,
    tp_rank: int = 0,
    tp_size: int = 1,
    name: str = "experts",
) -> dict[str, torch.Tensor]:
    """The engine's tensors of a layer straight from its weights; arguments as `mixed.quantize_layer` has them.

    The weights are whole experts; with `tp_size` only the slice is quantised, under the anchor of the whole expert
    unless one is given.

    Raises:
        FormatError: as `mixed.quantize_layer` and `from_release`.
    """
    check_format(expert_format, name)
    _, hidden, width = mixed.layer_sizes(w13, w2, 8, name)
    check_sizes(hidden, width, expert_format, tp_size, tp_rank, name)
    if tp_size > 1:
        whole = {"w13_weight": w13, "w2_weight": w2}
        if expert_format == "nvfp4":
            anchors = {**_largest(whole, source, anchors or {}, name), **(anchors or {})}
        w13, w2 = (slice_tensor(whole[m], m, width, tp_rank, tp_size, 1) for m in mixed.MATRICES)
        source = None if source is None else slice_source(source, width, expert_format, tp_rank, tp_size)
    if source is None and (implementation := marlin_kernels.fused(w13.device)) is not None:
        weights = {"w13_weight": w13, "w2_weight": w2}
        engine = _fused(implementation, weights, expert_format, anchors or {}, scale_max, name)
        if engine is not None:
            return engine
    stored = mixed.quantize_layer(w13, w2, expert_format, source, anchors=anchors, scale_max=scale_max, name=name)
    return from_release(stored, expert_format, name=name)


def flushed_blocks(
    stored: Mapping[str, torch.Tensor],
    expert_format: ExpertFormat,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    name: str = "experts",
) -> dict[str, torch.Tensor]:
    """Blocks with values that Marlin drops because it takes their scale for zero: int64 `[E]` for each matrix.

    NVFP4: scales below `2^(-6 - shift)`, for shift 0 the E4M3 subnormals; MXFP8: scale byte 0 (2^-127).

    Raises:
        FormatError: as `from_release`.
    """
    _, _, parts = _checked_parts(stored, expert_format, tp_rank, tp_size, name)
    shifts = _checked_shifts(parts, expert_format, name)
    counts = {}
    for matrix, part in parts.items():
        codes, scales = part[matrix].view(torch.uint8), part[f"{matrix}_scale"].view(torch.uint8)
        magnitudes = codes & (0x77 if expert_format == "nvfp4" else 0x7F)
        alive = (magnitudes != 0).unflatten(-1, (scales.shape[-1], -1)).any(-1)
        if expert_format == "nvfp4":
            lost = (scales != 0) & (reference.scale_bytes(scales, shifts[matrix][0]) == 0)
        else:
            lost = scales == 0
        counts[matrix] = (alive & lost).sum((1, 2))
    return counts


def _fused(
    implementation: Any,
    weights: Mapping[str, torch.Tensor],
    expert_format: ExpertFormat,
    anchors: Mapping[str, torch.Tensor],
    scale_max: int,
    name: str,
) -> dict[str, torch.Tensor] | None:
    """`from_weights` in one pass; None where the scales turn out to need another shift than 0."""
    scale_max = nvfp4.check_scale_max(scale_max)
    block = BLOCK_SIZES[expert_format]
    hidden, width = weights["w2_weight"].shape[1:]
    padded = padded_width(width, hidden, expert_format)
    engine, found, amax = {}, {}, {}
    for matrix, weight in weights.items():
        label = f"{name}.{matrix}"
        check_weight(weight, block, label)
        shape = (SHARDS[matrix], *((padded, hidden) if matrix == "w13_weight" else (hidden, padded)))
        if expert_format == "mxfp8":
            engine[matrix], scales, found[matrix] = implementation.mxfp8(weight, *shape)
        else:
            given = anchors.get(f"{matrix}_amax")
            largest = kernels.nvfp4(weight.device).largest
            amax[matrix] = largest(weight) if given is None else nvfp4.given_anchor(weight, given, label)
            words = implementation.nvfp4(weight, amax[matrix], 6 * scale_max, *shape)
            engine[matrix], scales, top, counts = words
            found[matrix] = torch.cat([counts, top[:, None].long()], 1)
        engine[f"{matrix}_scale"] = scales.view(SCALE_DTYPES[expert_format])
    for matrix, counts in found.items():
        label, numbers = f"{name}.{matrix}", counts.reshape(len(counts), -1).T.tolist()
        refuse_non_finite(numbers[0], 3, label)
        if expert_format == "nvfp4":
            nvfp4.refuse_zero_anchors(numbers[2], label)
            _check_anchors(amax[matrix], 6 * scale_max, label)
            if reference.scale_shift(max(numbers[3])):
                return None
            engine[f"{matrix}_scale_2"] = reference.outer_scale(amax[matrix], 6 * scale_max, 0)
    return engine


def _checked_parts(
    stored: Mapping[str, torch.Tensor], expert_format: ExpertFormat, tp_rank: int, tp_size: int, name: str
) -> tuple[int, int, dict[str, dict[str, torch.Tensor]]]:
    """Hidden size, expert width and a rank's part of each stored matrix, shapes and names checked."""
    check_format(expert_format, name)
    for matrix in mixed.MATRICES:
        if matrix not in stored:
            raise FormatError(f"{name} must hold {', '.join(mixed.MATRICES)}; got no {matrix}. Pass the whole layer")
        found = mixed.stored_format(stored, matrix, name)
        if found != expert_format:
            raise FormatError(f"{name}.{matrix} must be {expert_format}; got {found}. Pass the format of this layer")
    _, hidden, width = mixed.layer_sizes(stored["w13_weight"], stored["w2_weight"], BITS[expert_format], name)
    check_sizes(hidden, width, expert_format, tp_size, tp_rank, name)
    for matrix in mixed.MATRICES:
        _check_companions(stored, matrix, expert_format, f"{name}.{matrix}")
    bits = BITS[expert_format]
    return hidden, width, {m: slice_matrix(stored, m, width, bits, tp_rank, tp_size) for m in mixed.MATRICES}


def _engine_matrix(
    part: Mapping[str, torch.Tensor],
    matrix: str,
    expert_format: ExpertFormat,
    hidden: int,
    width: int,
    shift: tuple[int, int] | None,
) -> dict[str, torch.Tensor]:
    """The engine's tensors of one matrix from the (sliced) stored ones; NVFP4's shift and denominator are given."""
    padded, block, bits = padded_width(width, hidden, expert_format), BLOCK_SIZES[expert_format], BITS[expert_format]
    rows, columns = (padded, hidden) if matrix == "w13_weight" else (hidden, padded)
    codes, scales = part[matrix].view(torch.uint8), part[f"{matrix}_scale"].view(torch.uint8)
    implementation = marlin_kernels.choose(codes.device)
    up = None if shift is None else shift[0]
    moved = implementation.permute_scales(scales, up, SHARDS[matrix], rows, columns // block)
    engine = {
        matrix: implementation.pack_weight(codes, bits, SHARDS[matrix], rows, columns),
        f"{matrix}_scale": moved.view(SCALE_DTYPES[expert_format]),
    }
    if shift is not None:
        engine[f"{matrix}_scale_2"] = reference.outer_scale(part[f"{matrix}_amax"].float(), shift[1], shift[0])
    return engine


def _moved_matrix(
    part: Mapping[str, torch.Tensor],
    matrix: str,
    expert_format: ExpertFormat,
    hidden: int,
    width: int,
    shift: tuple[int, int] | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """`_engine_matrix` on another device."""
    experts = len(part[matrix])
    engine = {
        key: torch.empty(shape, dtype=dtype, device=device)
        for key, (shape, dtype) in shapes(expert_format, experts, hidden, width).items()
        if key.startswith(matrix)
    }
    for first in range(0, experts, _EXPERTS_AT_ONCE):
        some = slice(first, first + _EXPERTS_AT_ONCE)
        moved = {key: tensor[some].to(device) for key, tensor in part.items() if tensor.ndim}
        for key, tensor in _engine_matrix(moved, matrix, expert_format, hidden, width, shift).items():
            engine[key][some] = tensor
    return engine


def _checked_shifts(
    parts: Mapping[str, Mapping[str, torch.Tensor]], expert_format: ExpertFormat, name: str
) -> dict[str, tuple[int, int]]:
    """Shift and denominator of each NVFP4 matrix, after refusing scales and anchors that the engine cannot hold.

    Everything that the host must know comes from the device in one transfer: each one would stall a GPU anew.
    """
    wanted: list[torch.Tensor] = []
    for matrix, part in parts.items():
        scales = part[f"{matrix}_scale"].view(torch.uint8)
        wanted.append(marlin_kernels.choose(scales.device).largest_scales(scales).float())
        if expert_format == "nvfp4":
            wanted += [part[f"{matrix}_amax"].float(), part[f"{matrix}_outer_scale_denominator"].float().reshape(-1)]
    values = iter(torch.cat(wanted).cpu().split([len(t) for t in wanted]))
    shifts = {}
    for matrix, part in parts.items():
        label, largest = f"{name}.{matrix}", next(values)
        _check_scales(part[f"{matrix}_scale"].view(torch.uint8), largest.int().tolist(), expert_format, label)
        if expert_format == "nvfp4":
            amax, denominator = next(values), mixed.read_denominator(next(values), label)
            _check_anchors(amax, denominator, label)
            shifts[matrix] = (reference.scale_shift(int(largest.max())), denominator)
    return shifts


def _check_companions(stored: Mapping[str, torch.Tensor], matrix: str, expert_format: ExpertFormat, label: str) -> None:
    experts, rows, packed = stored[matrix].shape
    columns = packed * 8 // BITS[expert_format]
    expected = {"_scale": [experts, rows, columns // BLOCK_SIZES[expert_format]]}
    if expert_format == "nvfp4":
        expected["_amax"] = [experts]
    for suffix, shape in expected.items():
        found = list(stored[matrix + suffix].shape)
        if found != shape:
            raise FormatError(
                f"{label}{suffix} must be {shape} beside this weight; got {found}. Take both from the same layer"
            )


def _check_anchors(amax: torch.Tensor, denominator: int, label: str) -> None:
    outer = reference.outer_scale(amax, denominator, 0)
    bad = ~(torch.isfinite(outer) & (outer >= 0))
    if bool(bad.any()):
        expert = int(bad.nonzero()[0])
        got = f"{float(amax[expert])} for expert {expert}"
        raise FormatError(
            f"{label}_amax must be at least 0 and below {denominator * 512}, or Marlin's outer scale, 2^119 times "
            f"amax / denominator, overflows; got {got}. Find where training diverged"
        )


def _check_scales(scales: torch.Tensor, largest: list[int], expert_format: ExpertFormat, label: str) -> None:
    """Refuse bytes that are no scale: negative or NaN E4M3 (0x7F and above), NaN E8M0."""
    limit = 0x7E if expert_format == "nvfp4" else 0xFE
    for expert, byte in enumerate(largest):
        if byte > limit:
            count = int((scales[expert] > limit).sum())
            raise FormatError(
                f"{label}_scale must hold positive numbers, bytes up to 0x{limit:02x}; got {count} others in expert "
                f"{expert}, the largest 0x{byte:02x}. The stored tensor is damaged"
            )


def _largest(
    weights: Mapping[str, torch.Tensor],
    source: Mapping[str, torch.Tensor] | None,
    anchors: Mapping[str, torch.Tensor],
    name: str,
) -> dict[str, torch.Tensor]:
    """Anchors of whole experts for the matrices that have neither a given anchor nor a source."""
    found = {}
    for matrix, weight in weights.items():
        key = f"{matrix}_amax"
        if key in anchors or (source is not None and key in source):
            continue
        amax = kernels.nvfp4(weight.device).largest(weight)
        if not bool(torch.isfinite(amax).all()):
            refuse_non_finite((~torch.isfinite(weight)).sum((1, 2)).tolist(), 3, f"{name}.{matrix}")
        found[key] = amax
    return found
