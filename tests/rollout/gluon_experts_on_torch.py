"""Runs `rollout.kernels.gluon_experts` on the CPU, by the stand-in for Gluon of `tests.rollout.gluon_on_torch`.

Added here: shared memory by address, copies into it that are there when they are reported, and the PTX that decodes
weights, which is executed instruction by instruction for the 128 threads of a warpgroup; what is a scalar in Gluon but
differs by thread is a tensor of 128. Registers become a matrix by the fragment of `wgmma`'s operand A in PTX.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.rollout import gluon_on_torch as base

SOURCES = ("rollout.kernels.gluon_ring", "rollout.kernels.gluon_codes", "rollout.kernels.gluon_experts")
SHARED_BYTES = 43008
THREADS = torch.arange(128)
NAMES: dict[str, Any] = {}


class Shared(base.Shared):
    """Parts of parts too."""

    def index(self, n: Any) -> Shared:
        return Shared(self.data[int(n)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert start % length == 0 and start + length <= self.data.shape[dim]
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


def execute(text: str, operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Registers, as unsigned 32-bit values in int64, after the instructions of `text`."""
    values = dict(operands)
    for line in re.sub(r"[{}]", "", text).split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = [part.strip() for part in rest.split(",")]
        read = [values[s] if s in values else _constant(s) for s in sources]
        values[target] = OPERATIONS[name](*read) & 0xFFFFFFFF
    return values


def _constant(text: str) -> torch.Tensor:
    return THREADS if text == "%tid.x" else torch.tensor(int(text, 0))


def _permuted(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both, result = (a & 0xFFFFFFFF) | (b << 32), torch.zeros_like(a)
    for n in range(4):
        byte = int(selector) >> 4 * n & 15
        assert byte < 8
        result = result | (both >> 8 * byte & 255) << 8 * n
    return result


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two bfloat16 in each register, rounded once: the product of two has 16 bits."""
    low = _bits((_numbers(a, 0) * _numbers(b, 0)).to(torch.bfloat16))
    return low | _bits((_numbers(a, 16) * _numbers(b, 16)).to(torch.bfloat16)) << 16


def _numbers(register: torch.Tensor, shift: int) -> torch.Tensor:
    return (register >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16).long() & 0xFFFF


def _chosen(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert int(table) == 0xEA
    return a & b | c


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.u32": lambda a: a, "mov.b32": lambda a: a, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n, "shr.u32": lambda a, n: a >> n, "prmt.b32": _permuted, "lop3.b32": _chosen,
    "mul.rn.bf16x2": _multiplied,
}  # fmt: skip


def words_at(places: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` words from each thread's place on, which must be aligned to all of them."""
    assert places.shape == (128,) and bool((places % (4 * count) == 0).all())
    memory = base.HERE.program.memory.view(torch.int32)
    return [memory[places // 4 + n].long() & 0xFFFFFFFF for n in range(count)]


def operand(registers: Sequence[torch.Tensor]) -> torch.Tensor:
    """[128, 16] bfloat16 from eight registers: two instructions of 64 rows, of which warp q has 16 q to 16 q + 15."""
    warp, group, within = THREADS // 32, THREADS % 32 // 4, THREADS % 4
    matrix = torch.full((128, 16), float("nan"))
    for n, register in enumerate(registers):
        row = 64 * (n // 4) + 16 * warp + group + 8 * (n % 2)
        for half in range(2):
            matrix[row, 2 * within + half + 8 * (n % 4 // 2)] = _numbers(register, 16 * half).float()
    return matrix.to(torch.bfloat16)


def copy(target: torch.Tensor, source: base.Pointer, wanted: torch.Tensor | None) -> None:
    size = source.storage.element_size()
    at = source.at if wanted is None else source.at[wanted.bool()]
    places = target if wanted is None else target[wanted.bool()]
    assert bool((places % 16 == 0).all()) and bool((at * size % 16 == 0).all())
    value = source.storage[at[:, None] + torch.arange(16 // size)].contiguous().view(torch.uint8)
    into = places[:, None] + torch.arange(16)
    assert into.unique().numel() == into.numel()
    base.HERE.program.memory[into] = 0x7E
    base.HERE.copies.append((into, value))


def inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    program = base.HERE.program
    if asm == NAMES["INIT"]:
        program.barriers[int(args[0])] = base.Barrier(int(args[1]))
    elif asm == NAMES["WAIT"]:
        program.wait(*args)
    elif asm == NAMES["ARRIVE"]:
        program.arrive(args[0], 4 * int(args[1]))
    elif asm == NAMES["LOADED"]:
        for target, value in base.HERE.copies:
            if isinstance(target, torch.Tensor):
                program.memory[target] = value
            else:
                target.data.copy_(value)
        base.HERE.copies.clear()
        program.arrive(args[0], 128)
    elif asm in (NAMES["COPY"], NAMES["COPY_IF"]):
        copy(args[0], args[1], args[2] if len(args) > 2 else None)
    elif asm in (NAMES["PLACE"], NAMES["SCALE_PLACE"]):
        return execute(asm, {})["$0"]
    elif asm in (NAMES["READ_1"], NAMES["READ_2"], NAMES["READ_4"]):
        read = words_at(args[0], asm.count("$") - 1)
        return read[0] if len(read) == 1 else tuple(read)
    elif asm in (NAMES["DECODE_4"], NAMES["DECODE_8"]):
        assert pack == 16 and constraints.count("r") == 16 + 16 * (len(args) - 1)
        values = execute(asm, {f"${16 * n}": word for n, word in enumerate(args) if n})
        return operand([values[f"${n}"] for n in range(8)])
    else:
        assert asm in (NAMES["OPEN"], NAMES["ZERO"]), asm
    return torch.tensor(0)


def _language() -> ModuleType:
    gl = base._language()
    allocate = lambda dtype, shape, layout: Shared(torch.full(shape, float("nan"), dtype=dtype))
    gl.__dict__.update(inline_asm_elementwise=inline_asm, allocate_shared_memory=allocate, bfloat16=torch.bfloat16)
    return gl


def kernel() -> Callable[..., None]:
    """`product_kernel`, to be called with tensors for pointers, and `programs=` how many."""
    gluon, hopper, experimental = ModuleType("gluon"), ModuleType("hopper"), ModuleType("experimental")
    gluon.__dict__.update(jit=lambda f=None, **_: f or (lambda g: g), language=_language())
    hopper.__dict__.update(
        async_copy=SimpleNamespace(async_copy_global_to_shared=base.copy), warpgroup_mma=base.multiply,
        warpgroup_mma_wait=base.wait_for_products,
    )  # fmt: skip
    experimental.__dict__.update(gluon=gluon)
    root = "triton.experimental"
    stand_ins = {root: experimental, f"{root}.gluon": gluon, f"{root}.gluon.language.nvidia.hopper": hopper}
    with mock.patch.dict(sys.modules, stand_ins):
        for source in SOURCES:
            found = importlib.util.find_spec(source)
            assert found and found.loader
            module = sys.modules[source] = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            NAMES.update(vars(module))

    def run(*arguments: Any, programs: int, **constants: Any) -> None:
        arguments = tuple(base.pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        for number in range(programs):
            memory = torch.full((SHARED_BYTES,), 0x7E, dtype=torch.uint8)
            base.HERE.program = base.Program(number, programs, memory)
            module.product_kernel(*arguments, **constants)

    return run
