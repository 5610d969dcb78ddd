"""A draft's CUDA kernels without a GPU: their values on Triton's interpreter, and their machine code for sm_90.

The interpreter must be chosen before Triton is imported, so the first half of this file runs in a process of its own,
which `test_values_on_the_interpreter` starts. The same cases run on a device in tests/gpu/test_triton_draft.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from rollout.kernels import draft, triton_decode, triton_draft, triton_draft_head  # noqa: E402
from rollout.kernels.draft import Angles, Blocks  # noqa: E402
from rollout.kernels.triton_decode import Tiles  # noqa: E402
from tests.rollout import draft_cases as cases  # noqa: E402
from tests.rollout.draft_cases import CASES, GROUPS_AND_BLOCKS, Case, exact, make, relative_error  # noqa: E402
from tests.rollout.hopper_compiler import META, pretend  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16)
LIMITS = {torch.float32: 2e-6, BF16: 1e-2}


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes programs one after the other, so there are few."""
    if INTERPRETED:
        monkeypatch.setattr(triton_decode, "_multiprocessors", lambda device: 2)
        monkeypatch.setattr(triton_draft, "MERGE_PROGRAMS", 16)


@on_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "beside"), [(12, 16, 16), (3, 128, 3), (48, 128, 0), (5, 32, 8)])
def test_norm_and_rotation(dtype: torch.dtype, heads: int, size: int, beside: int) -> None:
    cases.check_norm_rotate("cpu", dtype, 4, heads, size, beside)
    cases.check_norm_rotate("cpu", dtype, 3, heads, size, beside, torch.float32)
    assert triton_draft.norm_rotate(torch.zeros(0, 16), torch.ones(16), cases.angles(torch.arange(0), 16), 1e-6).shape


@on_interpreter
@pytest.mark.parametrize(("dtype", "page_dtype"), [(torch.float32, torch.float32), (BF16, BF16), (torch.float32, BF16)])
@pytest.mark.parametrize(("heads", "size", "layers"), [(2, 16, 1), (8, 128, 1), (3, 32, 3)])
def test_context_is_stored(
    dtype: torch.dtype, page_dtype: torch.dtype, heads: int, size: int, layers: int
) -> None:  # fmt: skip
    for num_rows in (1, 12):
        cases.check_store("cpu", dtype, page_dtype, num_rows, heads, size, layers=layers)


IN_BF16 = ("the release's heads", "several layers, int32 lengths", "one long, some short", "rows at odd distances")


@on_interpreter
@pytest.mark.parametrize(("name", "dtype"), [*((n, None) for n in CASES), *((n, BF16) for n in IN_BF16)])
def test_attention(name: str, dtype: torch.dtype | None) -> None:
    inputs = make(CASES[name] if dtype is None else replace(CASES[name], dtype=dtype))
    limit = LIMITS[inputs.kv.dtype]
    got = triton_draft.attention(*inputs.arguments(), torch.float32, programs=5)
    assert got.shape == inputs.q.shape and relative_error(got, exact(inputs)) < limit
    rows = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    assert relative_error(got, draft.attention_reference(*rows, inputs.kv, inputs.blocks).double()) < limit


@on_interpreter
@pytest.mark.parametrize(("group", "block"), GROUPS_AND_BLOCKS)
def test_every_tile_of_lines(group: int, block: int) -> None:
    inputs = make(Case(lengths=(40, 5), heads=(2 * group, 2), block=block))
    assert relative_error(triton_draft.attention(*inputs.arguments()), exact(inputs)) < 2e-6


@on_interpreter
def test_no_division_of_the_work_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one program for everything to more programs than tiles; every shape of the merge."""
    inputs = make(Case(lengths=(37, 0, 90), page=32, heads=(4, 2), block=3))
    expected = exact(inputs)
    for tile, programs, most in ((32, 1, 64), (32, 60, 0), (16, 3, 64), (64, 3, 0)):
        monkeypatch.setattr(triton_draft, "MERGE_PROGRAMS", most)
        got = triton_draft.attention(*inputs.arguments(), programs=programs, tiles=Tiles(tile, 4, 2, 2))
        assert relative_error(got, expected) < 2e-6, (tile, programs)


@on_interpreter
def test_a_result_is_rounded_once_and_does_not_depend_on_others() -> None:
    inputs = make(Case(lengths=(37, 5), dtype=BF16, heads=(6, 1)))
    whole = triton_draft.attention(*inputs.arguments(), torch.float32, programs=1)
    rounded = triton_draft.attention(*inputs.arguments(), programs=1)
    assert rounded.dtype is BF16 and cases.worst_row(rounded, whole.double()) < 2**-7
    inputs.q[7:], inputs.k[7:], inputs.v[7:] = torch.nan, torch.nan, torch.nan
    again = triton_draft.attention(*inputs.arguments(), torch.float32, programs=1)
    assert torch.equal(again[:7], whole[:7])


@on_interpreter
def test_scores_of_any_size() -> None:
    """A softmax that is all one position, and positive and negative scores of hundreds."""
    inputs = make(Case(lengths=(60, 0), scale=100.0, heads=(4, 1)))
    assert relative_error(triton_draft.attention(*inputs.arguments(), programs=5), exact(inputs)) < 2e-5


@on_interpreter
def test_pages_far_apart() -> None:
    cases.check_far_pages("cpu")


@on_interpreter
def test_what_it_does_not_cover_is_refused() -> None:
    for changes, message in (
        ({"block": 9, "heads": (8, 1)}, r"query heads x block_size must be at most 64 .* got 72\. Use the reference"),
        ({"size": 24}, r"head_dim must be 16, 32, 64 or 128 .* got 24"),
        ({"dtype": torch.float16}, r"dtype must be float32 or bfloat16 .* got torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_draft.attention(*make(Case(lengths=(3,), **changes)).arguments())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank must be at most 256 .* got 300"):
        cases.check_logits("cpu", torch.float32, 1, 300, 20)
    state = torch.zeros(1, 16)
    with pytest.raises(AssertionError):
        triton_draft_head.rnn_step(
            torch.zeros(1, 48), state, torch.zeros(1).long(), state, torch.zeros(48, 32), state, state.clone()
        )


@on_interpreter
def test_nothing_to_do() -> None:
    inputs = make(Case(lengths=()))
    assert triton_draft.attention(*inputs.arguments()).shape == (0, 12, 16)
    none = torch.zeros(0, 16)
    assert triton_draft_head.token_logits(torch.zeros(0, 9), none, torch.zeros(9, 16)).shape == (0, 9)
    triton_draft_head.rnn_step(torch.zeros(0, 48), none, none[:, 0].long(), none, torch.zeros(48, 32), none, none)


@on_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "rank"), [(1, 16), (2, 20), (9, 24), (40, 16)])
def test_cell(dtype: torch.dtype, num_rows: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 24:  # more than a program takes at once
        monkeypatch.setattr(triton_draft_head, "COLUMNS_AT_ONCE", 16)
    for size in (0.01, 1.0, 100.0) if num_rows == 1 else (1.0,):
        cases.check_rnn("cpu", dtype, num_rows, rank, size)


LOGITS = ((1, 16, 333), (5, 256, 200), (12, 20, 100), (20, 16, 512), (40, 16, 64), (70, 16, 70))


@on_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "rank", "vocabulary"), LOGITS)
def test_logits(dtype: torch.dtype, num_rows: int, rank: int, vocabulary: int) -> None:
    check = lambda place: cases.check_logits("cpu", dtype, num_rows, rank, vocabulary, place)
    check(lambda base: None)
    if num_rows in (1, 70):
        check(lambda base: base)
        check(lambda base: base.new_zeros(num_rows, 600)[:, :vocabulary])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_values_on_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > len(CASES) + len(IN_BF16), run.stdout[-2000:]


# From here on: what becomes of it for a Hopper GPU, as the functions themselves launch it.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiles = pytest.mark.skipif(INTERPRETED or not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
RANK, VOCABULARY = 256, 201024


class Code(NamedTuple):
    """Machine instructions of a kernel, and what a program of it takes."""

    lines: list[str]
    sass: str
    registers: int
    shared: int
    threads: int

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.lines)


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def of_rows(num_rows: int) -> Angles:
    return Angles(new(num_rows, 64, dtype=torch.float32), new(num_rows, 64, dtype=torch.float32))


def attend(requests: int, dtype: torch.dtype, page: int) -> None:
    keys = new(7 * requests, 8192, dtype=dtype).unflatten(1, (64, 128))
    blocks = Blocks(new(requests, dtype=torch.int64), new(requests, 100, dtype=torch.int32))
    kv = new(9, 8, page, 256, dtype=dtype)
    triton_draft.attention(keys[:, :48], keys[:, 48:56], keys[:, 56:], kv, blocks, early=True)


def step(requests: int) -> None:
    wide = new(requests, 7, 3 * RANK, dtype=torch.float32)[:, 1]
    state, ids = new(requests, RANK, dtype=torch.float32), new(requests, dtype=torch.int64)
    joint = new(3 * RANK, 2 * RANK + 4608)[:, : 2 * RANK]
    triton_draft_head.rnn_step(wide, state, ids, new(VOCABULARY, RANK), joint, state, state, early=True)


def add_logits(requests: int, rank: int = RANK) -> None:
    base = new(requests, 7, VOCABULARY, dtype=torch.float32)[:, 1]
    triton_draft_head.token_logits(base, new(requests, rank, dtype=torch.float32), new(VOCABULARY, rank), early=True)


WEIGHT = partial(new, 128, dtype=torch.float32)
CALLS: dict[str, Callable[[], object]] = {
    **{f"attention, {requests} requests": partial(attend, requests, BF16, 64) for requests in (1, 4, 40, 200)},
    "attention, small pages": partial(attend, 1, BF16, 16),
    "norm": lambda: triton_draft.norm_rotate(new(7, 8192)[:, :6144], WEIGHT(), of_rows(7), 1e-6, early=True),
    "store": lambda: triton_draft.store_context(
        new(7, 2048), WEIGHT(), of_rows(7), 1e-6, new(9, 8, 64, 256), new(7, dtype=torch.int64), early=True
    ),
    **{f"cell, {requests} requests": partial(step, requests) for requests in (1, 8, 64)},
    **{f"logits, {requests} requests": partial(add_logits, requests) for requests in (1, 16, 32, 256)},
    "logits, 1 requests, rank 20": partial(add_logits, 1, 20),
}  # fmt: skip


@cache
def compiled(name: str) -> dict[str, Code]:
    """By name of the kernel."""
    found, run = {}, JITFunction.run

    def compile_only(kernel: JITFunction[Any], *arguments: Any, warmup: bool, **options: Any) -> None:
        found[kernel.fn.__name__] = disassembled(run(kernel, *arguments, warmup=True, **options))

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(JITFunction, "run", compile_only)
        CALLS[name]()
    return found


def disassembled(kernel: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass, used = run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)
    assert "STACK:0" in used and "LOCAL:0" in used and not re.search(r"\b(LDL|STL)\b", sass), used
    lines = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    registers = int(re.findall(r"REG:(\d+)", used)[-1])
    return Code(lines, sass, registers, kernel.metadata.shared, 32 * kernel.metadata.num_warps)


@compiles
@pytest.mark.parametrize("name", CALLS)
def test_everything_stays_in_registers_and_as_many_programs_fit_as_are_launched(name: str) -> None:
    for kernel, code in compiled(name).items():
        programs = 1 if kernel == "_rnn_kernel" else 2
        if kernel == "_token_logits_kernel":
            tokens = int(name.split()[1])
            programs = triton_draft_head.choose_tile(min(tokens, 64), BF16).per_multiprocessor
        print(name, kernel, len(code.lines), code.registers, code.shared)
        assert programs * code.threads * code.registers <= 65536 and programs * (code.shared + 1024) <= 233472


@compiles
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_before_the_kernel_before_has_ended(name: str) -> None:
    """But weights of the logits, into a cache, which is a hint; not from where no 16 bytes begin."""
    for kernel, code in compiled(name).items():
        waits = next(i for i, line in enumerate(code.lines) if "ACQBULK" in line)
        assert not [line for line in code.lines[:waits] if re.search(r"\b(LDG|LDGSTS|STG)", line)]
        fetches = [line for line in code.lines[:waits] if "UBLKPF.L2" in line]
        assert len(fetches) == (kernel == "_token_logits_kernel" and "rank 20" not in name)


@compiles
@pytest.mark.parametrize("name", [name for name in CALLS if re.match("(attention|logits).*s$", name)])
def test_pages_and_weights_are_copied_sixteen_bytes_at_a_time(name: str) -> None:
    code = compiled(name).get("_attention_kernel") or compiled(name)["_token_logits_kernel"]
    assert code.count("LDGSTS") == code.count(r"LDGSTS\.E\.(?:\w+\.)*128") >= 24
    assert code.count(r"\bH?G?MMA\.") >= 16


@compiles
def test_attention_runs_on_the_matrix_unit_and_its_loop_is_short() -> None:
    """Warp instructions per KiB of keys and values; at 4.24 TB/s a multiprocessor may issue some 250 in that time."""
    from tests.rollout.test_triton_decode import _loops

    code = compiled("attention, 1 requests")["_attention_kernel"]
    inner = min(_loops(code.sass))
    print(f"{inner} instructions, {inner * 4 / 16:.0f} per KiB")
    assert code.count("HGMMA") > 0 and inner * 4 < 110 * 32 * 512 / 1024
