"""From Marlin's layouts back to stored tensors and to values: proofs, checksums and an oracle of what Marlin computes.

Not for speed, and not a way into the engine: `inkling_rl.formats.marlin` is that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inkling_rl.formats import ExpertFormat, mixed
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.kernels import torch_marlin
from inkling_rl.formats.marlin_layout import BITS, BLOCK_SIZES, check_format, shapes
from inkling_rl.formats.reference import marlin as reference
from inkling_rl.formats.reference import mxfp8, nvfp4

_MAX_SHIFT = 17  # of the smallest E4M3 scale, 2^-9


def to_release(
    engine: Mapping[str, torch.Tensor],
    expert_format: ExpertFormat,
    width: int,
    companions: Mapping[str, torch.Tensor] | None = None,
    *,
    name: str = "experts",
) -> dict[str, torch.Tensor]:
    """Stored tensors of the engine's local experts and slice: for checksums and proofs, not for speed.

    Codes come back whole. NVFP4 scales that the engine flushed come back as byte 0, whatever they were. Anchors cannot
    come back (`amax / denominator` was rounded), so for NVFP4 they are taken from `companions` and checked.

    Args:
        engine: as `from_release` returns.
        expert_format: of the layer.
        width: the local expert width without padding.
        companions: for NVFP4, a mapping that holds `w13_weight_amax`, `w13_weight_outer_scale_denominator` and the
            same of w2.
        name: prefix of tensor names in errors.

    Raises:
        FormatError: companions missing, or of other weights; tensors of other shapes.
    """
    _check_engine(engine, expert_format, width, name)
    stored: dict[str, torch.Tensor] = {}
    for matrix in mixed.MATRICES:
        codes, scales = _unpacked(engine, matrix, expert_format, width)
        if expert_format == "mxfp8":
            stored |= {matrix: codes.view(torch.float8_e4m3fn), f"{matrix}_scale": scales}
            continue
        kept = {}
        for suffix in ("_amax", "_outer_scale_denominator"):
            if companions is None or matrix + suffix not in companions:
                raise FormatError(
                    f"{name}.{matrix} must come with its stored companions; got no {matrix}{suffix}. Pass them"
                )
            kept[matrix + suffix] = companions[matrix + suffix]
        shift = _shift_of(engine[f"{matrix}_scale_2"], kept, f"{name}.{matrix}")
        scales = _backward_table(shift).to(scales.device)[scales.int()].view(torch.float8_e4m3fn)
        stored |= {matrix: codes, f"{matrix}_scale": scales, **kept}
    return stored


def dequantize(
    engine: Mapping[str, torch.Tensor],
    matrix: str,
    expert_format: ExpertFormat,
    width: int,
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "experts",
) -> torch.Tensor:
    """What Marlin multiplies activations with: `[E, 2F, H]` (interleaved) or `[E, H, F]`, F the local `width`.

    NVFP4: code times scale is exact in the kernel's bfloat16 and the outer scale multiplies float32 sums, so the weight
    is their exact product, rounded here once to float32: where no scale was flushed, the value of
    `nvfp4.NVFP4Tensor.dequantize`. MXFP8: code times scale rounded to bfloat16 (exact but for results below its
    smallest normal number), where scale byte 0 counts as 0 and not as 2^-127.

    Args:
        engine: as `from_release` returns.
        matrix: `w13_weight` or `w2_weight`.
        expert_format: of the layer.
        width: the local expert width without padding.
        dtype: of the result, rounded to from float32 (NVFP4) or bfloat16 (MXFP8).
        name: prefix of tensor names in errors.

    Raises:
        FormatError: tensors of other shapes.
    """
    _check_engine(engine, expert_format, width, name)
    codes, scales = _unpacked(engine, matrix, expert_format, width)
    return _values(codes, scales, engine.get(f"{matrix}_scale_2"), expert_format).to(dtype)


def matrix_values(
    weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None, expert_format: ExpertFormat
) -> torch.Tensor:
    """`dequantize` of one matrix, float32 `[E, N, K]` in the engine's own rows: gate, up, padding included."""
    codes = torch_marlin.unpack_weight(weight, BITS[expert_format])
    return _values(codes, torch_marlin.unpermute_scales(scale.view(torch.uint8)), scale_2, expert_format)


def _values(
    codes: torch.Tensor, scales: torch.Tensor, scale_2: torch.Tensor | None, expert_format: ExpertFormat
) -> torch.Tensor:
    if expert_format == "mxfp8":
        factors = torch.where(scales == 0, 0.0, mxfp8.e8m0_values(scales))
        blocks = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, mxfp8.BLOCK_SIZE))
        return (blocks * factors[..., None]).flatten(-2).to(torch.bfloat16).float()
    assert scale_2 is not None
    blocks = nvfp4.e2m1_values(codes).unflatten(-1, (-1, nvfp4.BLOCK_SIZE))
    values = (blocks * reference.scale_values(scales)[..., None]).flatten(-2)
    # The product is exact in float64: 30 significant bits, and 2^126 = 2^7 of the scales and 2^119 of the outer scale.
    outer = scale_2.double() * 2.0**-126
    return (values.double() * outer[:, None, None]).float()


def _check_engine(engine: Mapping[str, torch.Tensor], expert_format: ExpertFormat, width: int, name: str) -> None:
    check_format(expert_format, name)
    missing = [m for m in mixed.MATRICES if m not in engine]
    if missing:
        raise FormatError(f"{name} must hold {', '.join(mixed.MATRICES)}; got no {missing[0]}. Pass the whole layer")
    experts, hidden = len(engine["w2_weight"]), engine["w2_weight"].shape[-1] * 2 // BITS[expert_format]
    for key, (shape, dtype) in shapes(expert_format, experts, hidden, width).items():
        tensor = engine.get(key)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise FormatError(f"{name}.{key} must be {dtype} {list(shape)}; got {got}. Pass the layer's own format")


def _unpacked(
    engine: Mapping[str, torch.Tensor], matrix: str, expert_format: ExpertFormat, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored bytes and scale bytes (still as the engine has them) of one matrix, rows and padding as stored."""
    codes = torch_marlin.unpack_weight(engine[matrix], BITS[expert_format])
    scales = torch_marlin.unpermute_scales(engine[f"{matrix}_scale"].view(torch.uint8))
    if matrix == "w13_weight":
        codes, scales = (mixed.interleave(t.unflatten(1, (2, -1))[:, :, :width].flatten(1, 2)) for t in (codes, scales))
        return codes, scales
    block = BLOCK_SIZES[expert_format]
    return codes[..., : width * BITS[expert_format] // 8].contiguous(), scales[..., : width // block].contiguous()


def _shift_of(scale_2: torch.Tensor, companions: Mapping[str, torch.Tensor], label: str) -> int:
    """The shift that the engine's outer scales were made with."""
    matrix = label.rsplit(".", 1)[-1]
    amax = companions[f"{matrix}_amax"].float()
    denominator = mixed.read_denominator(companions[f"{matrix}_outer_scale_denominator"], label)
    for shift in range(_MAX_SHIFT + 1):
        if torch.equal(reference.outer_scale(amax, denominator, shift), scale_2):
            return shift
    raise FormatError(
        f"{label}_scale_2 must follow from the companions' amax and denominator; it does not for any power of two. "
        "Pass the companions of these weights"
    )


def _backward_table(shift: int) -> torch.Tensor:
    """E4M3 byte of each of the engine's bytes; those that `shift` never makes become 0."""
    table = torch.zeros(256, dtype=torch.uint8, device="cpu")
    scales = torch.arange(0x7F, dtype=torch.uint8, device="cpu")
    made = reference.scale_bytes(scales, shift).int()
    table[made[made > 0]] = scales[made > 0]
    return table
