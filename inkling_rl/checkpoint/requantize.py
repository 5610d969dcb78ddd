"""A few experts of one matrix from values to the tensors that a release stores, kept as they were where they were kept.

An expert whose values come back bit for bit from codes under its old block scales keeps these scales: it lost nothing.
It is *untouched* when its bytes are the old ones as well, which their digest says. Old block scales are wrong for an
expert that was trained, so that one gets new ones: under its old anchor, which keeps the changes between versions
small, unless its maximum has left the anchor's headroom. Each expert and matrix is judged alone.

Not file access. The rule of the anchor is that of published low-precision weight synchronisation: hysteresis, not a new
anchor each time, because an anchor that moves by one unit in the last place rewrites 5 % of the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from inkling_rl.checkpoint.source import DIGEST, digests
from inkling_rl.formats import ExpertFormat, kernels, mixed, mxfp8, nvfp4
from inkling_rl.formats.errors import FormatError, refuse_non_finite

HEADROOM = {1536: (0.88, 1.16), 2688: (0.88, 1.0)}
"""Denominator -> smallest and largest true maximum, as a part of the anchor, that keep the anchor.

Below 0.88 it may be that no block scale exceeds 224, and then Marlin would rescale; above 1.16 (256 * 1.5 * 1.17 > 448)
the map-to-4 scale of the largest block saturates, and under 2688 the map-to-6 scale does at once.
"""


@dataclass(slots=True)
class Counts:
    """Expert matrices by what became of them, and blocks."""

    converted: int = 0
    untouched: int = 0
    """Old bytes."""
    exact: int = 0
    """Other bytes, but exact under the old scales."""
    requantized: int = 0
    """New scales under the old anchor."""
    reanchored: int = 0
    new: int = 0
    """Without companions: anchored at their maximum."""
    saturated_blocks: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def requantize(
    weight: torch.Tensor,
    matrix: str,
    expert_format: ExpertFormat,
    companions: Mapping[str, torch.Tensor] | None,
    name: str,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, Counts]:
    """Stored tensors of a few experts.

    Args:
        weight: `[G, rows, columns]`, bfloat16 or float32.
        matrix: `w13_weight` or `w2_weight`; the stored tensors' names begin with it.
        expert_format: nvfp4 or mxfp8.
        companions: what the experts were stored with and the digests, a row per expert; None where nothing is known.
        name: how errors name the tensor.

    Returns:
        Stored tensors, bool `[G]` which experts are untouched, and the counts.

    Raises:
        FormatError: values that are not finite, or companions that belong to something else.
    """
    num_experts = weight.shape[0]
    counts = Counts(converted=num_experts)
    if companions is None:
        stored, counts.saturated_blocks = _quantize(weight, matrix, expert_format, None, None, 1536, name)
        counts.new = num_experts
        return stored, torch.zeros(num_experts, dtype=torch.bool), counts
    anchor = companions.get(f"{matrix}_amax")
    denominator = int(companions.get(f"{matrix}_outer_scale_denominator", 1536))
    stored, is_exact = _restore(weight, matrix, expert_format, companions, denominator, name)
    changed = (~is_exact).nonzero()[:, 0]
    if len(changed):
        values, keeps = weight[changed], torch.ones(len(changed), dtype=torch.bool)
        if anchor is not None:
            anchor, keeps = _anchor(values, anchor[changed], denominator)
        fresh, counts.saturated_blocks = _quantize(values, matrix, expert_format, None, anchor, denominator, name)
        for key, value in fresh.items():
            if value.ndim:
                _raw(stored[key])[changed] = _raw(value)
        counts.requantized, counts.reanchored = int(keeps.sum()), int((~keeps).sum())
    untouched = is_exact & (digests(stored, matrix) == companions[matrix + DIGEST]).all(1)
    counts.untouched = int(untouched.sum())
    counts.exact = int(is_exact.sum()) - counts.untouched
    return stored, untouched, counts


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one size hold the same bytes, eight at a time where they can be (four times as fast)."""
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    wide = torch.uint8 if left.numel() % 8 or left.storage_offset() % 8 or right.storage_offset() % 8 else torch.int64
    return torch.equal(left.view(wide), right.view(wide))


def name_non_finite(values: torch.Tensor, first: int, name: str) -> None:
    """Refuse experts `first` on, `[G, rows, columns]`, if one holds values that are not finite, under its own number.

    Raises:
        FormatError: tensor, experts and counts.
    """
    # One pass that finds NaN and infinity alike, before the one that counts.
    low, high = torch.aminmax(values)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    refuse_non_finite([0] * first + (~torch.isfinite(values)).flatten(1).sum(1).tolist(), 3, name)


def _restore(
    weight: torch.Tensor,
    matrix: str,
    expert_format: ExpertFormat,
    companions: Mapping[str, torch.Tensor],
    denominator: int,
    name: str,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors against the old scales, and which experts come out of them bit for bit."""
    scales, anchor = companions[f"{matrix}_scale"].view(torch.uint8), companions.get(f"{matrix}_amax")
    revived = torch.zeros(weight.shape[0], dtype=torch.bool)
    if anchor is not None and not bool(anchor.all()):
        revived = (anchor == 0) & weight.flatten(1).any(1)
        # All zero then, not now: old scales cannot hold it. Any anchor does, the result is not kept.
        anchor = torch.where(revived, 1.0, anchor)
    stored, _ = _quantize(weight, matrix, expert_format, scales, anchor, denominator, name)
    values = mixed.dequantize_matrix(stored, matrix, weight.dtype, name=name.removesuffix(f".{matrix}"))
    if _is_same(weight, values):
        return stored, ~revived
    same = torch.tensor([_is_same(w, v) for w, v in zip(weight, values, strict=True)])
    return stored, same & ~revived


def _is_same(weight: torch.Tensor, values: torch.Tensor) -> bool:
    """Bit for bit; float32 weights may be those values or their bfloat16 rounding, as a BF16 export holds them."""
    if weight.dtype == torch.bfloat16:
        return same_bytes(weight, values)
    return same_bytes(weight, values) or same_bytes(weight, values.bfloat16().float())


def _anchor(values: torch.Tensor, old: torch.Tensor, denominator: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of changed experts, and which of them are the old ones."""
    largest = kernels.nvfp4(values.device).largest(values)
    low, high = HEADROOM[denominator]
    keeps = (largest >= low * old) & (largest <= high * old) & (old > 0)
    return torch.where(keeps, old, largest), keeps


def _quantize(
    weight: torch.Tensor,
    matrix: str,
    expert_format: ExpertFormat,
    scales: torch.Tensor | None,
    anchor: torch.Tensor | None,
    denominator: int,
    name: str,
) -> tuple[dict[str, torch.Tensor], int]:
    if expert_format == "mxfp8":
        m = mxfp8.quantize(weight, scales, name=name)
        return {matrix: m.codes.view(torch.float8_e4m3fn), f"{matrix}_scale": m.scales}, 0
    if expert_format != "nvfp4":
        raise FormatError(f"{name} must be stored as nvfp4 or mxfp8; got {expert_format}. Leave its layer out")
    t = nvfp4.quantize(weight, anchor, scales, denominator // 6, name=name)
    return {
        matrix: t.codes,
        f"{matrix}_scale": t.scales.view(torch.float8_e4m3fn),
        f"{matrix}_amax": t.amax,
        f"{matrix}_outer_scale_denominator": torch.tensor(float(t.denominator)),
    }, t.saturated


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
