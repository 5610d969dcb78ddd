"""NVFP4 with Four Over Six: weights to the bytes of a release, and back.

`inkling_rl.formats.reference.nvfp4` defines the arithmetic; here are the checks and the choice of an implementation by
device. The bytes are the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_rl.formats import kernels
from inkling_rl.formats.errors import FormatError, as_experts, check_scales, check_weight, refuse_non_finite
from inkling_rl.formats.reference.nvfp4 import BLOCK_SIZE

SCALE_MAXIMA = (256, 448)
DENOMINATORS = tuple(6 * m for m in SCALE_MAXIMA)
LARGEST_SCALE = 0x7E
"""448; the bytes above are NaN and the negative numbers."""


@dataclass(frozen=True, slots=True)
class NVFP4Tensor:
    """Quantised weights as the release stores them."""

    codes: torch.Tensor
    """uint8 `[..., K / 2]`; element 2j in the low nibble, 2j + 1 in the high one."""

    scales: torch.Tensor
    """uint8 view of E4M3 `[..., K / 16]`."""

    amax: torch.Tensor
    """float32 anchor: scalar, or `[E]` for a stack of experts."""

    denominator: int
    """1536 or 2688; the outer scale is `amax / denominator`, rounded once."""

    saturated: int = 0
    """Blocks whose map-to-6 scale would exceed 448, counted while quantising (0 for imported tensors)."""

    def __post_init__(self) -> None:
        if self.denominator not in DENOMINATORS:
            raise FormatError(
                f"outer_scale_denominator must be {DENOMINATORS[0]} or {DENOMINATORS[1]}; got {self.denominator}. "
                "The checkpoint was made by another recipe"
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values `[..., K]`, computed in float32 and rounded once more to `dtype`."""
        codes, scales = as_experts(self.codes), as_experts(self.scales)
        values = kernels.nvfp4(codes.device).dequantize(codes, scales, self.amax.reshape(-1), self.denominator, dtype)
        return values.reshape(*self.codes.shape[:-1], -1)


def quantize(
    weight: torch.Tensor,
    amax: torch.Tensor | float | None = None,
    scales: torch.Tensor | None = None,
    scale_max: int = 256,
    *,
    name: str = "weight",
) -> NVFP4Tensor:
    """Quantise `weight` along its last dimension.

    Args:
        weight: `[K]`, `[N, K]` or a stack of experts `[E, N, K]`, bfloat16 or float32, K % 16 == 0; any strides.
        amax: the anchor to use (scalar, or `[E]` for three dimensions); the maximum of the weights unless given.
        scales: uint8 `[..., K / 16]`; keep these block scales and choose codes only. They mean something only together
            with the anchor they were made with.
        scale_max: E4M3 value that the anchor's block gets, 256 (Four Over Six) or 448.
        name: how errors name the tensor.

    Raises:
        FormatError: non-finite values, wrong dtype, K not a multiple of 16, an unusable anchor, foreign scales.
    """
    denominator = 6 * check_scale_max(scale_max)
    check_weight(weight, BLOCK_SIZE, name)
    if scales is not None:
        check_scales(scales, weight, BLOCK_SIZE, name)
        _refuse_no_scales(scales, name)
    weight = weight.detach()  # bytes have no gradient; the reference would record one
    experts, implementation = as_experts(weight), kernels.nvfp4(weight.device)
    anchor = implementation.largest(experts) if amax is None else given_anchor(weight, amax, name)
    given = None if scales is None else as_experts(scales)
    codes, chosen, counts = implementation.quantize(experts, anchor, denominator, given)
    non_finite, saturated, orphaned = counts.T.tolist()
    refuse_non_finite(non_finite, weight.ndim, name)
    refuse_zero_anchors(orphaned, name)
    lead = weight.shape[:-1]
    return NVFP4Tensor(
        codes.reshape(*lead, -1),
        chosen.reshape(*lead, -1),
        anchor.reshape(weight.shape[:1] if weight.ndim == 3 else ()),
        denominator,
        sum(saturated),
    )


def check_scale_max(scale_max: int) -> int:
    """`scale_max` as a plain integer, which is what kernels take."""
    if scale_max not in SCALE_MAXIMA:
        raise FormatError(f"scale_max must be 256 or 448; got {scale_max}. Use 256, the release's recipe")
    return int(scale_max)


def given_anchor(weight: torch.Tensor, amax: torch.Tensor | float, name: str) -> torch.Tensor:
    """float32 `[E]` (one for a tensor that is no stack) from an anchor that a caller gives for `weight`.

    Raises:
        FormatError: wrong shape, or not finite, or negative.
    """
    anchor = torch.as_tensor(amax, dtype=torch.float32, device=weight.device).detach()
    expected = weight.shape[:1] if weight.ndim == 3 else ()
    if anchor.shape != expected:
        raise FormatError(
            f"{name}_amax must have shape {list(expected)}; got {list(anchor.shape)}. Pass one anchor per expert"
        )
    anchor = anchor.reshape(-1)
    usable = torch.isfinite(anchor) & (anchor >= 0)
    if not bool(usable.all()):  # on a GPU the one wait
        bad = (~usable).nonzero().flatten().tolist()
        where = f" for expert {bad[0]} ({len(bad)} in all)" if weight.ndim == 3 else ""
        raise FormatError(
            f"{name}_amax must be finite and not negative; got {float(anchor[bad[0]])}{where}. Recompute the anchor"
        )
    return anchor.abs()  # -0.0 would make the scales of an expert of zeros infinite


def _refuse_no_scales(scales: torch.Tensor, name: str) -> None:
    """Refuse given bytes that are no scale: what negative or NaN ones do to codes is nobody's intention."""
    count = int((scales > LARGEST_SCALE).sum())
    if count:
        raise FormatError(
            f"{name}_scale must hold E4M3 bytes up to 0x{LARGEST_SCALE:02x}; got {count} that are negative or NaN. "
            "The stored tensor is damaged"
        )


def refuse_zero_anchors(orphaned: list[int], name: str) -> None:
    """Refuse experts with `orphaned[e]` blocks that are not zero under an anchor of zero.

    Raises:
        FormatError: names the first.
    """
    dead = [expert for expert, blocks in enumerate(orphaned) if blocks]
    if dead:
        raise FormatError(
            f"{name}_amax must be positive where the expert is not all zero; got 0 for expert {dead[0]} "
            f"({len(dead)} in all). Re-anchor these experts"
        )
