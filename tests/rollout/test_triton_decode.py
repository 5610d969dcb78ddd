"""Decode attention in Triton without a GPU: its values on Triton's interpreter, and its machine code for sm_90.

The interpreter must be chosen before Triton is imported, so the first half of this file runs in a process of its own,
which `test_values_on_the_interpreter` starts. The same cases run on a device in tests/gpu/test_triton_decode.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rollout.kernels import reference, triton_decode, triton_merge  # noqa: E402
from rollout.kernels.triton_decode import Tiles  # noqa: E402
from tests.rollout.decode_cases import CASES, Case, exact, make, relative_error  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
compiled_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
BF16 = torch.bfloat16

# Larger tiles than any block, so that one crosses blocks; few, because the interpreter is slow.
TILES = Tiles(32, 4, 2, 2)


IN_BF16 = ("verify", "sliding", "one long, some short", "small pages, several layers", "prepared")


@on_interpreter
@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.float32) for n in CASES), *((n, BF16) for n in IN_BF16)])
def test_values(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(CASES[name], dtype=dtype))
    got = triton_decode.attention(*inputs.arguments(), max_queries=inputs.case.max_queries, tiles=TILES, programs=5)
    assert got.dtype is torch.float32
    assert relative_error(got, exact(inputs)) < (2e-6 if dtype is torch.float32 else 1e-2)
    if inputs.case.padding or inputs.case.prepared:
        return
    expected = reference.attention(*inputs.arguments())
    assert relative_error(got, expected.double()) < (2e-6 if dtype is torch.float32 else 1e-2)


@on_interpreter
def test_no_division_of_the_work_matters() -> None:
    """From one program for everything to more programs than tiles; tiles within a page, as large, and across pages."""
    inputs = make(Case(step=((37, 2), (0, 1), (90, 1)), page=32, extent=16))
    expected = exact(inputs)
    for tile in (16, 32, 64):
        for programs in (1, 100) if tile == 32 else (3,):
            got = triton_decode.attention(
                *inputs.arguments(), max_queries=2, tiles=Tiles(tile, 4, 2, 2), programs=programs
            )
            assert relative_error(got, expected) < 2e-6, (tile, programs)


@on_interpreter
@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_extreme_sinks_and_logits(sink: float) -> None:
    """Logits of +-45 and more, a far position that takes all weight, a sink that lets nothing or everything through."""
    inputs = make(Case(step=((60, 2),), scale=40.0, q_clip=45.0))
    inputs.sink.fill_(sink)
    got = triton_decode.attention(*inputs.arguments(), max_queries=2, tiles=TILES, programs=5)
    expected = exact(inputs)
    assert relative_error(got, expected) < 1e-5
    assert bool(got.isfinite().all())


@on_interpreter
def test_many_rows_are_merged_a_group_of_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "MERGE_PROGRAMS", 0)
    inputs = make(Case(step=((37, 2), (0, 1), (90, 1)), padding=1))
    got = triton_decode.attention(*inputs.arguments(), max_queries=2, tiles=Tiles(16, 4, 2, 2), programs=30)
    assert relative_error(got, exact(inputs)) < 2e-6


@on_interpreter
def test_more_query_tokens_allowed_than_there_are() -> None:
    inputs = make(Case(step=((37, 2), (5, 1)), window=16))
    got = triton_decode.attention(*inputs.arguments(), max_queries=8, tiles=TILES, programs=5)
    assert relative_error(got, exact(inputs)) < 2e-6


@on_interpreter
def test_the_bias_is_not_rounded_to_bfloat16() -> None:
    """With keys and queries of one, exact in bfloat16, what remains of the error is that of weights and values."""
    inputs = make(Case(step=((60, 1), (31, 3)), dtype=BF16, proj_dtype=torch.float32, extent=64))
    inputs.r.mul_(4)
    inputs.q.zero_()
    got = triton_decode.attention(*inputs.arguments(), max_queries=3, tiles=TILES, programs=5)
    assert relative_error(got, exact(inputs)) < 3e-3


@on_interpreter
def test_what_it_does_not_cover_is_refused() -> None:
    inputs = make(Case(step=((3, 1),)))
    with pytest.raises(ValueError, match=r"max_queries must be 1 to 8 .* got 9"):
        triton_decode.attention(*inputs.arguments(), max_queries=9)
    inputs.kv = inputs.kv.half()
    with pytest.raises(ValueError, match=r"dtype must be float32 or bfloat16"):
        triton_decode.attention(*inputs.arguments(), max_queries=1)


@on_interpreter
def test_a_step_without_rows() -> None:
    inputs = make(Case(step=((3, 1),)))
    arguments = [x[:0] if i < 4 else x for i, x in enumerate(inputs.arguments())]
    assert triton_decode.attention(*arguments, max_queries=1).shape == (0, 192)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_values_on_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > len(CASES) + len(IN_BF16), run.stdout[-2000:]


# From here on: what becomes of it for a Hopper GPU.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiled_only = pytest.mark.skipif(INTERPRETED or not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
TYPES = {
    "table": "*i32", "query_start": "*i32", "seq_lens": "*i32", "pieces": "*fp32", "sums": "*fp32", "sink": "*fp32",
    "q_scale": "*fp32", "r_scale": "*fp32", "q_clip": "fp32", "r_clip": "fp32", "alpha": "fp32", "floor": "fp32",
}  # fmt: skip
RELEASE = {"KV_HEADS": 8, "GROUP": 6, "HEAD_DIM": 128, "EXTENT": 1024, "PAGE": 64, "WINDOW": 0}
TINY = {"KV_HEADS": 2, "GROUP": 6, "HEAD_DIM": 16, "EXTENT": 16, "PAGE": 32, "WINDOW": 0}
SLIDING = {"WINDOW": 1024, "PAGE": 8}
LARGE_PAGES = {"WINDOW": 1024, "PAGE": 64}
KERNELS: dict[str, tuple[dict[str, int], int, torch.dtype]] = {
    "decode": (RELEASE, 1, BF16),
    "verify 2": (RELEASE, 2, BF16),
    "verify 4": (RELEASE, 4, BF16),
    "verify 8": (RELEASE, 8, BF16),
    "sliding": (RELEASE | SLIDING, 1, BF16),
    "sliding, large pages": (RELEASE | LARGE_PAGES, 1, BF16),
    "sliding, verify 8": (RELEASE | SLIDING, 8, BF16),
    "float32": (RELEASE, 1, torch.float32),
    "float32, verify 8": (RELEASE, 8, torch.float32),
    "tiny": (TINY, 1, BF16),
    "tiny, verify 8": (TINY | {"WINDOW": 8, "EXTENT": 8}, 8, BF16),
    "tiny, float32, verify 8": (TINY, 8, torch.float32),
}


@cache
def compiled(name: str) -> tuple[str, str, str, int]:
    """PTX, SASS, resource usage and shared memory of the decode kernel for sm_90."""
    sizes, max_queries, dtype = KERNELS[name]
    rows = max(16, triton.next_power_of_2(max_queries * 6))
    tiles = triton_decode.choose_tiles(rows, dtype)
    constants: dict[str, Any] = {
        **sizes, "REL": 16, "MAX_QUERIES": max_queries, "ROWS": rows, "TILE": tiles.tile, "BATCH": 16,
        "LOG_SCALING": sizes["WINDOW"] == 0, "MODE": triton_decode._mode(dtype), "EARLY": True,
    }  # fmt: skip
    types = TYPES | dict.fromkeys(("q", "r", "proj", "kv"), "*bf16" if dtype is BF16 else "*fp32")
    return _compile(triton_decode._decode_kernel, constants, types, tiles.warps, tiles.stages)


def _compile(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, stages: int
) -> tuple[str, str, str, int]:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") or n.endswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass, resources = run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)
    return result.asm["ptx"], sass, resources, result.metadata.shared


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
def test_the_intended_number_of_programs_fits_and_nothing_is_spilled(name: str) -> None:
    _, sass, resources, shared = compiled(name)
    assert "STACK:0" in resources and not re.search(r"\b(LDL|STL)\b", sass), resources
    registers = int(re.findall(r"REG:(\d+)", resources)[-1])
    tiles = triton_decode.choose_tiles(16 if KERNELS[name][1] <= 2 else 64, KERNELS[name][2])
    programs, threads = tiles.per_multiprocessor, 32 * tiles.warps
    assert programs * threads * registers <= 65536 and programs * (shared + 1024) <= 233472, (registers, shared)


@compiled_only
@pytest.mark.parametrize("name", [name for name in KERNELS if "tiny" not in name])
def test_keys_and_values_are_copied_sixteen_bytes_at_a_time(name: str) -> None:
    sass = compiled(name)[1]
    wide = len(re.findall(r"LDGSTS\.E\.(?:\w+\.)*128", sass))
    assert wide >= 32, wide
    if "float32" not in name:  # there, the table of profiles has wide enough elements to be copied that way, too
        assert len(re.findall(r"\bLDGSTS", sass)) == wide


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
def test_products_of_bfloat16_run_on_the_matrix_unit_and_those_of_float32_do_not(name: str) -> None:
    used = re.search(r"\bH?G?MMA\.", compiled(name)[1])
    expected = None if KERNELS[name][2] is torch.float32 else "HGMMA." if "8" in name else "HMMA."
    assert (used and used[0]) == expected


@compiled_only
@pytest.mark.parametrize(("name", "per_kib"), [("decode", 35), ("verify 8", 84)])
def test_the_loop_without_bias_is_short(name: str, per_kib: int) -> None:
    """Warp instructions per KiB of keys and values; at 4.24 TB/s a multiprocessor may issue some 250 in that time."""
    tile = 64 if name == "decode" else 32
    shortest = min(_loops(compiled(name)[1]))
    assert shortest * 4 < per_kib * tile * 512 / 1024, shortest


def _loops(sass: str) -> list[int]:
    """Lengths of loops that use the matrix unit."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    found = []
    for i, line in enumerate(lines):
        if (branch := re.search(r"BRA.* `\((\.L_x_\d+)\)", line)) and labels.get(branch[1], i) < i:
            body = [x for x in lines[labels[branch[1]] : i + 1] if x.startswith("/*")]
            if any("MMA" in x for x in body):
                found.append(len(body))
    return found


@compiled_only
@pytest.mark.parametrize(("heads", "chunk"), [(1, 64), (8, 4), (8, 8)])
def test_the_merge_spills_nothing_and_reads_wide(heads: int, chunk: int) -> None:
    constants = {
        "KV_HEADS": 8, "GROUP": 6, "HEAD_DIM": 128, "MAX_QUERIES": 1, "WINDOW": 0, "TILE": 64, "BATCH": 16,
        "CHUNK": chunk, "HEADS": heads, "EARLY": True, "PAGE": 64,
    }  # fmt: skip
    types = TYPES | {"gate": "*bf16", "out": "*bf16"}
    ptx, sass, resources, _ = _compile(triton_merge.merge_kernel, constants, types, 4, 2)
    assert "STACK:0" in resources and not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"LDG\.E\.128", sass)) >= heads * chunk // 8
    assert "griddepcontrol.wait" in ptx
