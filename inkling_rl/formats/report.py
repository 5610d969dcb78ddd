"""Reports on quantised weights: what was lost, and what changed since the version before.

`quantization_report` compares weights with their quantised form; `changed` compares two quantised versions, byte for
byte, and is what delta sync sends by. Both go expert by expert: beside their inputs they hold about one expert in
float32, respectively one bit-sized flag per block.

Not a metric sink: `to_metrics` gives names and numbers, the caller logs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_rl.formats.errors import FormatError, as_experts
from inkling_rl.formats.fake_quantize import flushed_scales
from inkling_rl.formats.mxfp8 import MXFP8Tensor
from inkling_rl.formats.nvfp4 import NVFP4Tensor
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What a tensor lost, per expert; a tensor without an expert dimension counts as one expert. On the CPU."""

    relative_error: torch.Tensor
    """float64 `[E]`: Frobenius norm of (dequantised - weight) over that of the weight; 0 for an all-zero expert."""

    saturated: torch.Tensor
    """int64 `[E]`, blocks whose largest value is clipped: NVFP4 with a map-to-6 scale above 448, MXFP8 (under given
    scales only) with a scaled value above 448. Many of them: re-anchor."""

    underflowed: torch.Tensor
    """int64 `[E]`, blocks that are not all zero and are stored as all zero."""

    flushed: torch.Tensor
    """int64 `[E]`, blocks that are not stored as all zero and become so in Marlin's kernels, see
    `fake_quantize.flushed_scales`."""

    num_blocks: int
    """Blocks per expert."""

    def to_metrics(self, prefix: str = "quantization") -> dict[str, float]:
        """Mean and largest relative error over experts, and blocks as fractions of all blocks."""
        total = self.num_blocks * len(self.relative_error)
        return {
            f"{prefix}/relative_error_mean": float(self.relative_error.mean()),
            f"{prefix}/relative_error_max": float(self.relative_error.max()),
            f"{prefix}/saturated_fraction": int(self.saturated.sum()) / total,
            f"{prefix}/underflowed_fraction": int(self.underflowed.sum()) / total,
            f"{prefix}/flushed_fraction": int(self.flushed.sum()) / total,
        }


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two versions of a quantised tensor, per expert. Counts on the CPU, blocks on its device."""

    codes: torch.Tensor
    """int64 `[E]`, elements whose code differs."""

    scales: torch.Tensor
    """int64 `[E]`, block scales whose byte differs."""

    anchors: torch.Tensor
    """bool `[E]`, whether the anchor differs: then every value of the expert does, whatever its bytes, and the outer
    scale must be sent. Always false for MXFP8, which has none."""

    blocks: tuple[torch.Tensor, ...]
    """One int64 tensor per expert: ascending indices, in the flattened `[N, K / block]` of the expert, of the blocks of
    which a code or the scale differs."""

    num_blocks: int
    """Blocks per expert."""

    block_size: int
    """Elements per block."""

    def to_metrics(self, prefix: str = "sync") -> dict[str, float]:
        """Changed elements, scales and blocks as fractions of all, and the number of experts with another anchor."""
        total = self.num_blocks * len(self.blocks)
        return {
            f"{prefix}/changed_codes_fraction": int(self.codes.sum()) / (total * self.block_size),
            f"{prefix}/changed_scales_fraction": int(self.scales.sum()) / total,
            f"{prefix}/changed_blocks_fraction": sum(map(len, self.blocks)) / total,
            f"{prefix}/num_changed_anchors": int(self.anchors.sum()),
        }


def quantization_report(weight: torch.Tensor, quantized: NVFP4Tensor | MXFP8Tensor) -> QuantizationReport:
    """Compare `weight` (`[K]`, `[N, K]` or `[E, N, K]`, bfloat16 or float32) with what it was quantised to.

    Norms in double precision: about 55 million weights per second and core, so a big model is sampled by layer.

    Raises:
        FormatError: `quantized` has another shape.
    """
    columns = quantized.codes.shape[-1] * (2 if isinstance(quantized, NVFP4Tensor) else 1)
    if tuple(weight.shape) != (*quantized.codes.shape[:-1], columns):
        raise FormatError(
            f"weight must have the shape that was quantised, {[*quantized.codes.shape[:-1], columns]}; "
            f"got {list(weight.shape)}. Compare a tensor with its own bytes"
        )
    experts, scales = as_experts(weight), as_experts(quantized.scales)
    lost = flushed_scales(scales, "nvfp4" if isinstance(quantized, NVFP4Tensor) else "mxfp8")
    rows = [_report_expert(experts[e], _expert(quantized, e), lost[e]) for e in range(len(experts))]
    counts = torch.tensor([row[1:] for row in rows], dtype=torch.int64).T
    errors = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    return QuantizationReport(errors, counts[0], counts[1], counts[2], scales[0].numel())


def changed[T: (NVFP4Tensor, MXFP8Tensor)](previous: T, current: T) -> Changes:
    """What of `current` a holder of `previous` lacks. Equal blocks cost nothing but their comparison.

    Raises:
        FormatError: other shapes, formats or denominators: such versions share no meaning and are sent whole.
    """
    if type(previous) is not type(current) or previous.codes.shape != current.codes.shape:
        raise FormatError(
            f"current must have the format and shape of previous; got {_describe(current)} after "
            f"{_describe(previous)}. Send the tensor whole"
        )
    anchors = torch.zeros(len(as_experts(current.codes)), dtype=torch.bool)
    if isinstance(previous, NVFP4Tensor) and isinstance(current, NVFP4Tensor):
        if previous.denominator != current.denominator:
            raise FormatError(
                f"current must have the outer_scale_denominator {previous.denominator} of previous; got "
                f"{current.denominator}. Send the tensor whole"
            )
        anchors = (previous.amax != current.amax).reshape(-1).cpu()
    old_codes, new_codes = as_experts(previous.codes), as_experts(current.codes)
    old_scales, new_scales = as_experts(previous.scales), as_experts(current.scales)
    codes, scales, blocks = [], [], []
    for e in range(len(new_codes)):
        other_scale = (old_scales[e] != new_scales[e]).flatten()
        old, new = (_blocks(tensor[e], other_scale.numel()) for tensor in (old_codes, new_codes))
        touched = ((old.view(torch.int64) != new.view(torch.int64)).any(-1) | other_scale).nonzero().flatten()
        codes.append(_differing_codes(old[touched], new[touched], isinstance(current, NVFP4Tensor)))
        scales.append(int(other_scale.sum()))
        blocks.append(touched)
    per_expert = old_scales[0].numel()
    block_size = 16 if isinstance(current, NVFP4Tensor) else 32
    return Changes(torch.tensor(codes), torch.tensor(scales), anchors, tuple(blocks), per_expert, block_size)


def _expert(quantized: NVFP4Tensor | MXFP8Tensor, e: int) -> NVFP4Tensor | MXFP8Tensor:
    codes, scales = as_experts(quantized.codes)[e], as_experts(quantized.scales)[e]
    if isinstance(quantized, NVFP4Tensor):
        return NVFP4Tensor(codes, scales, quantized.amax.reshape(-1)[e], quantized.denominator)
    return MXFP8Tensor(codes, scales)


def _report_expert(
    weight: torch.Tensor, stored: NVFP4Tensor | MXFP8Tensor, lost: torch.Tensor
) -> tuple[float, int, int, int]:
    values = stored.dequantize(torch.float32)
    size = torch.linalg.vector_norm(weight, dtype=torch.float64)
    error = torch.linalg.vector_norm(values - weight, dtype=torch.float64) / size if size else size
    count = lost.numel()
    largest = weight.reshape(count, -1).abs().amax(-1).float().reshape(lost.shape)
    if isinstance(stored, NVFP4Tensor):
        base = reference_nvfp4.base_scale(largest[..., None], stored.amax, stored.denominator)
        saturated = base > reference_nvfp4.E4M3_MAX
        magnitudes = stored.codes & 0x77
    else:
        scaled = largest * reference_mxfp8.e8m0_values(254 - stored.scales)
        saturated = scaled > reference_mxfp8.E4M3_MAX
        magnitudes = stored.codes & 0x7F
    kept = magnitudes.reshape(count, -1).any(-1).reshape(lost.shape)
    return float(error), int(saturated.sum()), int((~kept & (largest > 0)).sum()), int((kept & lost).sum())


def _blocks(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Bytes of an expert `[N, C]` as `[count, bytes of a block]`, fit to be read as int64."""
    blocks = codes.reshape(count, -1)
    return blocks if blocks.is_contiguous() and blocks.storage_offset() % 8 == 0 else blocks.clone()


def _differing_codes(old: torch.Tensor, new: torch.Tensor, packed: bool) -> int:
    difference = old ^ new
    if not packed:
        return int((difference != 0).sum())
    return int(((difference & 0xF) != 0).sum() + ((difference >> 4) != 0).sum())


def _describe(quantized: NVFP4Tensor | MXFP8Tensor) -> str:
    return f"{type(quantized).__name__} {list(quantized.codes.shape)}"
