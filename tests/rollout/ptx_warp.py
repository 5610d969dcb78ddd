"""A warp that executes the few PTX instructions of `triton_moe_words`, written from the manual of the instruction set.

Registers are uint32 numpy arrays of 32 lanes. Floating-point registers hold the bits of float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint32]


def _lop3(a: Register, b: Register, c: Register, table: int) -> Register:
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            bits = [value if row >> place & 1 else ~value for value, place in ((a, 2), (b, 1), (c, 0))]
            result |= bits[0] & bits[1] & bits[2]
    return result


def _funnel(low: Register, high: Register, amount: int, *, left: bool) -> Register:
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    moved = both << np.uint64(amount % 32) >> np.uint64(32) if left else both >> np.uint64(amount % 32)
    return (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _halves(register: Register) -> NDArray[np.float32]:
    """[32, 2]: the lower half of a register first."""
    return register.copy().view(np.float16).reshape(32, 2).astype(np.float32)


def mma_m16n8k16(a: list[Register], b: list[Register], c: list[Register]) -> list[Register]:
    """Fragments as the manual has them; lane = 4 group + member."""
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    group, member = np.arange(32) // 4, np.arange(32) % 4
    for i in range(8):
        row = group + (8 if i // 2 % 2 else 0)
        left[row, member * 2 + i % 2 + (8 if i >= 4 else 0)] = _halves(a[i // 2])[:, i % 2]
    for i in range(4):
        right[member * 2 + i % 2 + (8 if i >= 2 else 0), group] = _halves(b[i // 2])[:, i % 2]
    product = left @ right
    places = [(group + 8 * (i // 2), member * 2 + i % 2) for i in range(4)]
    return [
        (product[at] + old.view(np.float32)).astype(np.float32).view(np.uint32)
        for at, old in zip(places, c, strict=True)
    ]


OPERATIONS: dict[str, Callable[..., Register]] = {
    "lop3.b32": lambda a, b, c, table: _lop3(a, b, c, int(table[0])),
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda low, high, amount: _funnel(low, high, int(amount[0]), left=True),
    "shf.r.wrap.b32": lambda low, high, amount: _funnel(low, high, int(amount[0]), left=False),
}


def run(code: str, inputs: dict[str, Register]) -> dict[str, Register]:
    """All registers after straight-line `code`; `inputs` by name, such as `$4`."""
    registers = dict(inputs)

    def value(name: str) -> Register:
        name = name.strip()
        return registers[name] if name in registers else np.full(32, int(name, 0), np.uint32)

    for line in code.strip().strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, operands = line.split(None, 1)
        if name.startswith("mma."):
            assert name == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            out, *fragments = [group.split(",") for group in re.findall(r"{([^}]*)}", operands)]
            results = mma_m16n8k16(*([value(n) for n in fragment] for fragment in fragments))
            registers.update(zip((n.strip() for n in out), results, strict=True))
        else:
            target, *sources = operands.split(",")
            registers[target.strip()] = OPERATIONS[name](*map(value, sources))
    return registers
