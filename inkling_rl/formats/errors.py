"""What every number format refuses, and how it says so.

Not a format: the checks that NVFP4 and MXFP8 share. Non-finite weights are refused rather than canonicalised because
public implementations disagree on what they become (a NaN is stored as 6, as 0 or as a NaN scale), so any choice would
be a silent difference between trainer and engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FormatError(ValueError):
    """Weights or stored tensors that a number format cannot represent or read."""


def check_weight(weight: torch.Tensor, block_size: int, name: str) -> None:
    """Refuse what cannot be quantised along its last dimension; zeros of any amount are fine.

    Args:
        weight: `[K]`, `[N, K]` or `[E, N, K]`, bfloat16 or float32, K a multiple of `block_size`.
        name: how the error names the tensor.

    Raises:
        FormatError: wrong dtype, rank or K.
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


def check_scales(scales: torch.Tensor, weight: torch.Tensor, block_size: int, name: str) -> None:
    """Refuse given block scales that do not belong to `weight`: `uint8 [..., K / block_size]`."""
    expected = (*weight.shape[:-1], weight.shape[-1] // block_size)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected:
        raise FormatError(
            f"{name}_scale must be uint8 {list(expected)}; got {scales.dtype} {list(scales.shape)}. "
            "Pass the scales stored beside this tensor"
        )


def as_experts(tensor: torch.Tensor) -> torch.Tensor:
    """`[E, N, K]` view of `[K]`, `[N, K]` or `[E, N, K]`."""
    return tensor if tensor.ndim == 3 else tensor.reshape(1, -1, tensor.shape[-1])


def refuse_non_finite(counts: Sequence[int], ndim: int, name: str) -> None:
    """Refuse weights of which `counts[e]` values of expert e are not finite.

    Raises:
        FormatError: names the first experts (for `ndim` 3) and how many values.
    """
    experts = [e for e, count in enumerate(counts) if count]
    if not experts:
        return
    shown = ", ".join(f"expert {e}: {counts[e]}" for e in experts[:4])
    more = f" and {len(experts) - 4} more experts" if len(experts) > 4 else ""
    got = f"non-finite values ({shown}{more})" if ndim == 3 else f"{sum(counts)} non-finite values"
    raise FormatError(f"{name} must be finite; got {got}. Find where training diverged")
