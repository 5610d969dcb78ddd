"""Runs a Gluon kernel of ours on the CPU: Triton's interpreter does not know Gluon.

A stand-in for as much of the language as `rollout.kernels.gluon_*` use: their source is executed with
tensors of torch for Gluon's, bytes for the memory that PTX declares, and Python's threads for warpgroups. What it
shows is arithmetic, addresses, and what the barriers promise: a copy is NaN until it is reported, a product reads its
operands as late as it may, and a wait that nobody ends is an error. What it does not show is layouts, races within a
warpgroup, and what the compiler makes of it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

SOURCES = tuple(f"rollout.kernels.gluon_{name}" for name in ("ring", "items", "softmax", "prefill"))
PATIENCE = 10.0


@dataclass(frozen=True)
class Pointer:
    """Elements of a storage; `at` is a tensor of indices."""

    storage: torch.Tensor
    at: torch.Tensor

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.storage.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.at + offset)


def pointer(x: torch.Tensor) -> Pointer:
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return Pointer(storage, torch.tensor(x.storage_offset()))


@dataclass
class Shared:
    """A tensor in shared memory, or a part or view of one."""

    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, n: Any) -> Shared:
        return Shared(self.data[int(n)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        return Shared(self.data.view(dtype).view(shape))


@dataclass
class Product:
    """A product that was issued: computed when waited for."""

    a: Any
    b: Shared
    acc: torch.Tensor
    use_acc: bool
    result: torch.Tensor | None = None

    def finish(self) -> torch.Tensor:
        if self.result is None:
            a = self.a.data if isinstance(self.a, Shared) else self.a
            self.result = a.float() @ self.b.data.float()
            if self.use_acc:
                self.result = self.result + self.acc
        return self.result


@dataclass
class Barrier:
    expected: int
    arrived: int = 0
    phase: int = 0


@dataclass
class Program:
    """State of one program: `memory` is what PTX declares, `barriers` by their address."""

    number: int
    programs: int
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(33792, dtype=torch.uint8))
    barriers: dict[int, Barrier] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)

    def arrive(self, address: Any, count: int) -> None:
        with self.changed:
            barrier = self.barriers[int(address)]
            barrier.arrived += count
            assert barrier.arrived <= barrier.expected, "more arrivals than one phase has"
            if barrier.arrived == barrier.expected:
                barrier.arrived, barrier.phase = 0, barrier.phase + 1
                self.changed.notify_all()

    def wait(self, address: Any, parity: Any) -> None:
        with self.changed:
            barrier = self.barriers[int(address)]
            over = lambda: barrier.phase % 2 != int(parity) or bool(self.failed)
            assert self.changed.wait_for(over, PATIENCE), f"nobody ends the wait at {int(address)}"
            assert not self.failed, "another warpgroup failed"


class Warpgroup(threading.local):
    """What belongs to the thread of one warpgroup."""

    def __init__(self) -> None:
        self.program: Program = Program(0, 1)
        self.copies: list[tuple[Shared, torch.Tensor]] = []
        self.products: list[Product] = []


HERE = Warpgroup()


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def load(place: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    at = place.at if mask is None else torch.where(*torch.broadcast_tensors(mask, place.at, torch.tensor(0)))
    value = place.storage[at]
    return value if mask is None else torch.where(torch.broadcast_to(mask, at.shape), value, torch.tensor(other))


def store(place: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    at, kept = torch.broadcast_tensors(place.at, mask)
    place.storage[at[kept]] = value[kept]


def copy(target: Shared, source: Pointer) -> None:
    value = load(source)
    assert value.shape == target.data.shape
    target.data.fill_(math.nan)
    HERE.copies.append((target, value))


def multiply(a: Any, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    HERE.products.append(Product(a, b, acc, use_acc))
    return HERE.products[-1]


def wait_for_products(pending: int, results: Sequence[Product]) -> Any:
    while len(HERE.products) > pending:
        HERE.products.pop(0).finish()
    assert all(product.result is not None for product in results), "used before it was waited for"
    return results[0].result if len(results) == 1 else tuple(product.result for product in results)


def warp_specialize(parts: Sequence[tuple[Callable[..., None], Any]], warps: object, registers: object) -> None:
    program = HERE.program

    def run(part: Callable[..., None], arguments: Any) -> None:
        HERE.__init__()  # type: ignore[misc]
        HERE.program = program
        try:
            part(*arguments)
            assert not HERE.copies and not HERE.products
        except BaseException as error:
            with program.changed:
                program.failed.append(error)
                program.changed.notify_all()

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if program.failed:
        raise program.failed[0]


def _move(places: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """Read or write the ring: the address of a thread's first element serves two columns of rows m and m + 8."""
    memory = HERE.program.memory.view(torch.int16)
    first = places.view(4, 2, 8, 32, 2)[:, 0, :, :, 0]
    assert bool((first % 4 == 0).all()) and int(first.max()) + 2048 < 32768 and int(first.min()) >= 0
    at = torch.stack([first, first + 2048], 1)[..., None] // 2 + torch.tensor([0, 1])
    if values is not None:
        assert at.unique().numel() == at.numel()
        memory[at] = values.view(torch.int16).view(at.shape)
    return memory[at].view(torch.float16).view(places.shape)


def inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    program, module = HERE.program, ASM
    if asm == module["OPEN"]:
        return torch.tensor(0)
    if asm == module["INIT"]:
        program.barriers[int(args[0])] = Barrier(int(args[1]))
    elif asm == module["WAIT"]:
        program.wait(*args)
    elif asm == module["ARRIVE"]:
        program.arrive(args[0], 4 * int(args[1]))
    elif asm == module["LOADED"]:
        for target, value in HERE.copies:
            target.data.copy_(value)
        HERE.copies.clear()
        program.arrive(args[0], 128)
    elif asm in (module["PUT"], module["TAKE"]):
        word = program.memory.view(torch.int32)[int(args[0]) // 4]
        return word.clone() if asm == module["TAKE"] else word.copy_(args[1])
    elif asm == module["READ"]:
        return _move(args[0], None)
    elif asm == module["WRITE"]:
        return _move(args[0], args[1])
    elif asm == module["SCALE"]:
        return args[0] * args[1]
    elif asm == module["UNMOVED"]:
        return args[0]
    elif asm == module["SIGMOID"]:
        return torch.sigmoid(args[0])
    else:
        assert asm == module["MEET"], asm
    return torch.tensor(0)


ASM: dict[str, Any] = {}


class _Layout:
    """Any layout: nothing depends on it here."""

    value = property(lambda self: self)


def _language() -> ModuleType:
    gl = ModuleType("language")
    layout = lambda *args, **kwargs: _Layout()
    reduced = {"max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis)}
    either = {
        "maximum": lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        "minimum": lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
    }
    names: dict[str, Any] = {
        **reduced, **either, "exp2": torch.exp2, "constexpr": lambda value: value, "static_range": range, "load": load,
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"), layout),
        "NVMMASharedLayout": layout, "where": lambda c, a, b: torch.where(_tensor(c), _tensor(a), _tensor(b)),
        "zeros_like": torch.zeros_like, "store": store, "inline_asm_elementwise": inline_asm,
        "warp_specialize": warp_specialize,
        "arange": lambda low, high, layout: torch.arange(low, high),
        "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        "broadcast": torch.broadcast_tensors, "convert_layout": lambda x, layout, assert_trivial=False: x,
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(torch.full(shape, math.nan, dtype=dtype)),
        "program_id": lambda axis: torch.tensor(HERE.program.number),
        "num_programs": lambda axis: torch.tensor(HERE.program.programs),
        **{name: getattr(torch, name) for name in ("float16", "float32", "int32", "int64")}, "uint32": torch.int64,
    }  # fmt: skip
    gl.__dict__.update(names)
    return gl


def kernel(name: str) -> Callable[..., None]:
    """The kernel `name` of the module, to be called with tensors for pointers, and `programs=` how many."""
    gluon, hopper, experimental = ModuleType("gluon"), ModuleType("hopper"), ModuleType("experimental")
    gluon.__dict__.update(jit=lambda f=None, **_: f or (lambda g: g), language=_language())
    hopper.__dict__.update(
        async_copy=SimpleNamespace(async_copy_global_to_shared=copy),
        warpgroup_mma=multiply, warpgroup_mma_wait=wait_for_products,
    )  # fmt: skip
    experimental.__dict__.update(gluon=gluon)
    root = "triton.experimental"
    stand_ins = {root: experimental, f"{root}.gluon": gluon, f"{root}.gluon.language.nvidia.hopper": hopper}
    modules = []
    with mock.patch.dict(sys.modules, stand_ins):
        for source in SOURCES:
            found = importlib.util.find_spec(source)
            assert found and found.loader
            module = sys.modules[source] = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            ASM.update(vars(module))
            modules.append(module)
    function = next(getattr(module, name) for module in modules if hasattr(module, name))

    def run(*arguments: Any, programs: int, **constants: Any) -> None:
        arguments = tuple(pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        for number in range(programs):
            HERE.program = Program(number, programs)
            function(*arguments, **constants)

    return run
