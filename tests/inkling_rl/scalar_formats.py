"""A second, independent statement of the number formats: numpy scalars, one value at a time.

Written from the published pseudo-code, not from `inkling_rl.formats`: rounding to E4M3 and E2M1 is a search over the
table of representable values, so that a mistake in a threshold or a cast cannot be shared.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

F32 = np.float32
FLOAT_MAX = np.finfo(np.float32).max
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _e4m3_table() -> list[float]:
    table = []
    for byte in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = byte >> 3, byte & 7
        table.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return table


E4M3 = _e4m3_table()


def nearest(value: float, table: list[float]) -> int:
    """Index of the nearest entry, ties to the even index, saturating; `value` is not negative."""
    if value >= table[-1]:
        return len(table) - 1
    below = max(i for i, entry in enumerate(table) if entry <= value)
    low, high = Fraction(value) - Fraction(table[below]), Fraction(table[below + 1]) - Fraction(value)
    if low == high:
        return below if below % 2 == 0 else below + 1
    return below if low < high else below + 1


def nvfp4_block(x: np.ndarray, amax: np.float32, maximum: int = 256) -> tuple[int, list[int]]:
    """Scale byte and sixteen codes of one block of float32 values."""
    with np.errstate(all="ignore"):
        denominator = F32(6 * maximum)
        encode = min(denominator / F32(amax), FLOAT_MAX)
        decode = F32(1) / encode
        base = (F32(max(abs(v) for v in x)) / F32(6)) * encode
        candidates = []
        for factor in (F32(1), F32(1.5)):
            scale_byte = nearest(float(min(base * factor, F32(448))), E4M3)
            scale = F32(E4M3[scale_byte])
            codes = codes_under(x, scale, decode)
            error = F32(0)
            for v, code in zip(x, codes, strict=True):
                value = F32(E2M1[code & 7]) * F32(-1 if code & 8 else 1)
                error = error + abs(((value * scale) * F32(amax)) / denominator - v)
            candidates.append((error, scale_byte, codes))
        six, four = candidates
        _, scale_byte, codes = four if four[0] < six[0] else six
    return scale_byte, [0] * 16 if scale_byte == 0 else codes


def codes_under(x: np.ndarray, scale: np.float32, decode: np.float32) -> list[int]:
    with np.errstate(all="ignore"):
        inverse = min(F32(1) / (scale * decode), FLOAT_MAX)
        codes = []
        for v in x:
            scaled = min(max(v * inverse, F32(-6)), F32(6))
            codes.append(nearest(abs(float(scaled)), E2M1) | (8 if math.copysign(1.0, float(scaled)) < 0 else 0))
    return codes


def mxfp8_block(x: np.ndarray) -> tuple[int, list[int]]:
    """Scale byte and thirty-two E4M3 bytes of one block; the scale by exact rational arithmetic."""
    largest = Fraction(float(max(abs(v) for v in x)))
    exponent = -127
    while largest > 448 * Fraction(2) ** exponent:
        exponent += 1
    codes = []
    for v in x:
        scaled = float(Fraction(float(v)) / Fraction(2) ** exponent)
        codes.append(nearest(abs(scaled), E4M3) | (0x80 if math.copysign(1.0, float(v)) < 0 else 0))
    return exponent + 127, codes
