"""What every number format refuses, and how it says so.

Not a format: the checks that NVFP4 and MXFP8 share. Non-finite weights are refused rather than canonicalised because
public implementations disagree on what they become (a NaN is stored as 6, as 0 or as a NaN scale), so any choice would
be a silent difference between trainer and engine.
"""

from __future__ import annotations

import torch


class FormatError(ValueError):
    """Weights or stored tensors that a number format cannot represent or read."""


def check_weight(weight: torch.Tensor, block_size: int, name: str) -> None:
    """Refuse what cannot be quantised along its last dimension; zeros of any amount are fine.

    Args:
        weight: `[K]`, `[N, K]` or `[E, N, K]`, bfloat16 or float32, K a multiple of `block_size`.
        name: how the error names the tensor.

    Raises:
        FormatError: wrong dtype, rank or K, or a non-finite value (with the expert and how many).
    """
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise FormatError(f"{name} must be bfloat16 or float32; got {weight.dtype}. Convert it first")
    if not 1 <= weight.ndim <= 3:
        raise FormatError(f"{name} must be [K], [N, K] or [E, N, K]; got shape {list(weight.shape)}. Reshape it")
    if weight.numel() == 0:
        raise FormatError(f"{name} must not be empty; got shape {list(weight.shape)}. Leave it out")
    if weight.shape[-1] % block_size:
        raise FormatError(
            f"{name} must have a last dimension that is a multiple of {block_size}; got shape {list(weight.shape)}. "
            "Pad it with zeros"
        )
    bad = ~torch.isfinite(weight)
    if not bool(bad.any()):
        return
    if weight.ndim < 3:
        raise FormatError(
            f"{name} must be finite; got {int(bad.sum())} non-finite values. Find where training diverged"
        )
    counts = bad.flatten(1).sum(1)
    experts = counts.nonzero().flatten().tolist()
    shown = ", ".join(f"expert {e}: {int(counts[e])}" for e in experts[:4])
    more = f" and {len(experts) - 4} more experts" if len(experts) > 4 else ""
    raise FormatError(f"{name} must be finite; got non-finite values ({shown}{more}). Find where training diverged")


def check_scales(scales: torch.Tensor, weight: torch.Tensor, block_size: int, name: str) -> None:
    """Refuse given block scales that do not belong to `weight`: `uint8 [..., K / block_size]`."""
    expected = (*weight.shape[:-1], weight.shape[-1] // block_size)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected:
        raise FormatError(
            f"{name}_scale must be uint8 {list(expected)}; got {scales.dtype} {list(scales.shape)}. "
            "Pass the scales stored beside this tensor"
        )
