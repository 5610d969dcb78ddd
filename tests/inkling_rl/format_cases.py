"""Weights made to part implementations of the number formats; every fast path is compared with the reference on them.

Not tests: tables of inputs, shared by the tests of the kernels, the layouts and the oracles. All are `[E, N, K]`,
bfloat16 or float32, seeded and small enough for the slow reference; finite but for `non_finite_cases`.
"""

from __future__ import annotations

import torch

SMALLEST_SUBNORMAL = 1e-45
FLOAT_MAX = torch.finfo(torch.float32).max


def nvfp4_cases() -> dict[str, torch.Tensor]:
    """Weights `[E, N, K]`, K % 16 == 0. The NVFP4 maximum of an expert is its anchor unless a test gives another."""
    g = torch.Generator().manual_seed(0)
    gauss = torch.randn(2, 24, 32, generator=g)
    outlier = gauss.clone()
    outlier[0, 3, 5] = 1e30
    holes = gauss.clone()
    holes[0] = 0
    holes[1, ::2, :16] = 0
    holes[1, 1, :16] = -0.0
    return {
        "gaussian": gauss,
        "gaussian bfloat16": gauss.bfloat16(),
        "rows that fill no vector": torch.randn(3, 5, 16 * 21, generator=g).bfloat16(),
        "one block": torch.randn(1, 1, 16, generator=g),
        "low entropy": low_entropy(4),
        "low entropy eighths": low_entropy(8),
        "low entropy bfloat16": low_entropy(4).bfloat16(),
        "one huge outlier": outlier,
        "zero experts, zero blocks, minus zero": holes,
        "only zeros": torch.zeros(2, 3, 32),
        "only minus zeros": torch.full((1, 3, 32), -0.0).bfloat16(),
        "ties": e2m1_ties(),
        "ties of the scale": e4m3_ties(),
        "small blocks": gauss * torch.logspace(-8, 0, 24)[None, :, None],  # scales that are subnormal or zero
        "small blocks bfloat16": (gauss * torch.logspace(-8, 0, 24)[None, :, None]).bfloat16(),
        "subnormal maximum": gauss * 1e-39,
        "subnormal maximum bfloat16": (gauss * 1e-39).bfloat16(),
        "barely normal maximum": gauss * 1e-36,
        "near the largest float": gauss / gauss.abs().max() * FLOAT_MAX,
        "smallest subnormal": torch.full((1, 1, 16), SMALLEST_SUBNORMAL),
        "largest float": torch.full((1, 1, 16), FLOAT_MAX),
        "every bfloat16": every_bfloat16(),
        "every bfloat16 maximum": every_bfloat16_maximum(),
        "random bits": random_bits(),
        "random bits bfloat16": random_bits().bfloat16().nan_to_num(0.0, 0.0, 0.0),
    }


def mxfp8_cases() -> dict[str, torch.Tensor]:
    """Weights `[E, N, K]`, K % 32 == 0."""
    edges = torch.zeros(1, 256, 32)
    powers = torch.exp2(torch.arange(-126, 128).float())
    edges[0, :254, 0], edges[0, :254, 1] = powers * 1.75, -powers  # the largest value that keeps the scale
    above = torch.nextafter(powers * 1.75, torch.full_like(powers, torch.inf))
    bumped = edges.clone()
    bumped[0, :254, 0] = torch.where(torch.isfinite(above), above, 0)
    ladder = torch.arange(0, 512).float().reshape(1, 16, 32) * 2.0**-11  # E4M3's subnormals, their ties and beyond
    ladder[..., 0] = 448.0
    mantissas = (1 + torch.arange(0, 64).float() / 64).reshape(1, 2, 32)
    fine = torch.cat([mantissas * 2.0**k for k in range(-10, 8)], 1)
    fine[..., 0] = 448.0
    return {name: w for name, w in nvfp4_cases().items() if w.shape[-1] % 32 == 0} | {
        "every bfloat16": every_bfloat16().reshape(255, 8, 32),
        "every bfloat16 maximum": every_bfloat16_maximum().reshape(255, 64, 32),
        "rows that fill no vector": torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(6)).bfloat16(),
        "at the boundary": edges,
        "one step above the boundary": bumped,
        "subnormal codes and their ties": ladder,
        "ties of the codes": fine,
    }


def nvfp4_anchors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Anchors float32 `[E]` for `weight`, positive where an expert is not all zero: too small, too large, extreme."""
    own = weight.abs().amax((1, 2)).float()
    same = lambda value: torch.full_like(own, value)
    scaled = lambda factor: torch.where(own > 0, (own * factor).clamp(SMALLEST_SUBNORMAL, FLOAT_MAX), 0)
    return {
        "own": own,
        "one bfloat16 step up": scaled(1.0078125),
        "barely saturating": scaled(1 / 1.76),
        "saturating": scaled(0.25),
        "hugely saturating": scaled(1e-6),
        "too large": scaled(3.0),
        "far too large": scaled(1e6),
        "one": same(1.0),
        "five": same(5.0),
        "smallest subnormal": same(SMALLEST_SUBNORMAL),
        "subnormal": same(3.3e-40),
        "smallest normal": same(torch.finfo(torch.float32).tiny),
        "tiny": same(1e-31),
        "huge": same(3e34),
        "largest float": same(FLOAT_MAX),
    }


def given_nvfp4_scales(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Block scales uint8 `[E, N, K / 16]` that a caller may ask to keep."""
    shape = (*weight.shape[:-1], weight.shape[-1] // 16)
    g = torch.Generator().manual_seed(7)
    draw = lambda low, high: torch.randint(low, high, shape, generator=g, dtype=torch.uint8)
    return {
        "any number": draw(0, 0x7F),
        "zero": torch.zeros(shape, dtype=torch.uint8),
        "subnormal and zero": draw(0, 8),
        "largest": torch.full(shape, 0x7E, dtype=torch.uint8),
    }


def given_mxfp8_scales(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Block scales uint8 `[E, N, K / 32]` that a caller may ask to keep."""
    shape = (*weight.shape[:-1], weight.shape[-1] // 32)
    g = torch.Generator().manual_seed(8)
    draw = lambda low, high: torch.randint(low, high, shape, generator=g, dtype=torch.uint8)
    return {
        "any number": draw(0, 255),
        "usual": draw(110, 130),
        "smallest": torch.zeros(shape, dtype=torch.uint8),
        "largest": torch.full(shape, 254, dtype=torch.uint8),
    }


def non_finite_cases() -> dict[str, torch.Tensor]:
    """Weights `[3, 4, 64]` of which experts 1 and 2 hold values that are not finite: counted, then refused."""
    base = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(9))
    base[1, 2, 3], base[1, 0, 0], base[1, 0, 17] = float("nan"), float("inf"), -float("nan")
    base[2, 0, 0], base[2, 3, 63] = float("-inf"), float("inf")
    return {"float32": base, "bfloat16": base.bfloat16()}


def strided_views(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values with other strides: every other row, gaps, transposed; in the last one its first row repeated."""
    experts, rows, columns = weight.shape
    interleaved = torch.full((experts, 2 * rows, columns), 7.0, dtype=weight.dtype)
    interleaved[:, 1::2] = weight
    apart = torch.full((2 * experts, rows, columns + 8), 7.0, dtype=weight.dtype)
    apart[::2, :, :columns] = weight
    spread = torch.full((experts, rows, 2 * columns), 7.0, dtype=weight.dtype)
    spread[..., ::2] = weight
    return {
        "interleaved rows": interleaved[:, 1::2],
        "experts and rows apart": apart[::2, :, :columns],
        "columns apart": spread[..., ::2],
        "rows and columns swapped": weight.transpose(1, 2).contiguous().transpose(1, 2),
        "experts and rows swapped": weight.transpose(0, 1).contiguous().transpose(0, 1),
        "one row for all": weight[:, :1].expand(-1, rows, -1),
    }


def every_bfloat16() -> torch.Tensor:
    """`[255, 16, 16]`: expert e holds every finite bfloat16 with exponent field e, both signs."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exponent = (torch.arange(65536) >> 7) & 0xFF
    return torch.stack([bits[exponent == e].reshape(16, 16) for e in range(255)])


def every_bfloat16_maximum() -> torch.Tensor:
    """`[255, 128, 16]`: block n of expert e has the bfloat16 of exponent field e and mantissa n as its maximum."""
    g = torch.Generator().manual_seed(2)
    largest = torch.arange(255 * 128, dtype=torch.int16).view(torch.bfloat16).reshape(255, 128, 1)
    blocks = (largest.float() * (torch.rand(255, 128, 16, generator=g) * 2 - 1)).bfloat16()
    place = torch.randint(16, (255, 128, 1), generator=g)
    sign = torch.randint(0, 2, (255, 128, 1), generator=g) * 2 - 1
    return blocks.scatter(-1, place, largest * sign)


def low_entropy(parts: int) -> torch.Tensor:
    """`[4, 256, 32]` multiples of 1 / parts under the anchor 5: errors of the two candidates often nearly tie."""
    g = torch.Generator().manual_seed(1)
    values = torch.randint(-3 * parts, 3 * parts + 1, (4, 256, 32), generator=g) / parts
    values[:, 0, 0] = 5.0
    return values


def e2m1_ties() -> torch.Tensor:
    """`[1, 64, 32]` rows of E2M1's ties under many scales."""
    ladder = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    return torch.stack([ladder * (1 + k / 64) for k in range(64)])[None]


def e4m3_ties() -> torch.Tensor:
    """`[1, 480, 16]` blocks whose scale, under their largest value 1536, lies at, above and below ties of E4M3."""
    g = torch.Generator().manual_seed(3)
    ties = torch.cat([(torch.arange(8, 16) + 0.5) * 2.0**k for k in range(-9, 5)] + [(torch.arange(8) + 0.5) * 2.0**-9])
    middle = ties * 6  # the anchor 1536 maps v to the scale v / 6 exactly
    near = torch.stack([middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0), middle / 1.5])
    blocks = torch.rand(480, 16, generator=g) * 2 - 1
    blocks[:, 5] = 1.0
    blocks = blocks * near.reshape(-1, 1)
    blocks[0, 5] = 1536.0
    return blocks[None]


def random_bits() -> torch.Tensor:
    """`[16, 8, 64]` float32 of random bits, the exponent of an expert's values within a window of 32 powers of two."""
    g = torch.Generator().manual_seed(4)
    mantissa = torch.randint(0, 1 << 23, (16, 8, 64), generator=g, dtype=torch.int32)
    sign = torch.randint(0, 2, (16, 8, 64), generator=g, dtype=torch.int32) << 31
    start = torch.arange(16, dtype=torch.int32)[:, None, None] * 15
    exponent = (start + torch.randint(0, 32, (16, 8, 64), generator=g, dtype=torch.int32)).clamp(max=254) << 23
    return (mantissa | exponent | sign).view(torch.float32)
