"""Prefill attention in Triton without a GPU: its values on Triton's interpreter, and its machine code for sm_90.

The interpreter must be chosen before Triton is imported, so the first half of this file runs in a process of its own,
which `test_values_on_the_interpreter` starts. There the ring of biases lies in global memory, at the addresses that it
has in shared memory; the three lines of PTX that move it are all that only a device can test
(tests/gpu/test_triton_prefill.py).
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

from rollout.kernels import reference, triton_prefill  # noqa: E402
from rollout.kernels.prefill_tiles import Tiles, choose_tiles, ring_sizes  # noqa: E402
from tests.rollout.decode_cases import Case, exact, make, relative_error  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
BF16, F32 = torch.bfloat16, torch.float32
SMALL = Tiles(16, 2, 16, 2, 2)

CASES = {
    "first chunk": Case(step=((0, 37),), log_scaling=(0.1, 16)),
    "later chunks, with decoding": Case(heads=(4, 2), step=((40, 20), (0, 1), (33, 1), (7, 18)), log_scaling=(0.1, 16)),
    "whole tiles": Case(heads=(4, 2), step=((32, 16), (0, 32))),
    "sliding": Case(heads=(4, 2), step=((45, 20), (3, 19)), window=16),
    "window smaller than extent": Case(heads=(4, 2), step=((37, 20), (0, 18)), window=8, extent=24),
    "window smaller than a tile": Case(heads=(4, 2), step=((37, 20),), window=5, extent=5),
    "extent smaller than window": Case(heads=(4, 2), step=((50, 20), (3, 19)), window=40, extent=3),
    "extent larger than everything": Case(heads=(4, 2), step=((20, 19),), extent=100),
    "window 1": Case(heads=(4, 2), step=((17, 18),), window=1),
    "small pages, several layers": Case(
        heads=(4, 2), step=((37, 20), (2, 3)), page=4, layers_per_page=3, window=32, extent=32
    ),
    "a page of many tiles": Case(heads=(4, 2), step=((37, 20),), page=64),
    "rows and requests of padding": Case(heads=(4, 2), step=((37, 5), (20, 18)), padding=19),
    "prepared": Case(heads=(4, 2), step=((37, 20),), prepared=True, log_scaling=(0.1, 16)),
    "no groups": Case(step=((37, 3),), heads=(3, 3), head_dim=32),
    "wide heads": Case(step=((20, 5),), heads=(6, 1), head_dim=128, q_clip=22.6),
}


IN_BF16 = ("first chunk", "sliding", "small pages, several layers", "wide heads")


@on_interpreter
@pytest.mark.parametrize("name,dtype", [*((name, F32) for name in CASES), *((name, BF16) for name in IN_BF16)])
def test_values(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(CASES[name], dtype=dtype))
    heads = inputs.case.heads
    tiles = SMALL if heads[0] > heads[1] else Tiles(32, 1, 16, 2, 2)
    got = triton_prefill.attention(*inputs.arguments(), tiles=tiles)
    assert got.dtype is F32
    assert relative_error(got, exact(inputs)) < (2e-6 if dtype is F32 else 6e-3)
    if not inputs.case.padding and not inputs.case.prepared:
        expected = reference.attention(*inputs.arguments())
        assert relative_error(got, expected.double()) < (2e-6 if dtype is F32 else 6e-3)


@on_interpreter
@pytest.mark.parametrize("tiles", [Tiles(64, 2, 64, 8, 3), Tiles(32, 2, 16, 4, 2), Tiles(16, 2, 64, 2, 2)])
@pytest.mark.parametrize("window", [None, 48])
def test_the_shape_of_tiles_does_not_matter(tiles: Tiles, window: int | None) -> None:
    """The ring holds one block of new columns (64 x 64), several old ones (32 x 16), or more than needed (16 x 64)."""
    inputs = make(Case(step=((75, 67),), window=window, extent=48, heads=(2, 1), page=32))
    got = triton_prefill.attention(*inputs.arguments(), tiles=tiles)
    assert relative_error(got, exact(inputs)) < 2e-6


@on_interpreter
def test_chunks_give_what_the_whole_gives() -> None:
    whole = make(Case(step=((0, 50),), heads=(2, 1)))
    expected = triton_prefill.attention(*whole.arguments(), tiles=SMALL)
    for past, new in ((33, 17), (1, 49)):
        rows = [x[past : past + new] for x in (whole.q, whole.r, whole.sink, whole.gate)]
        batch = replace(whole.batch, query_start=torch.tensor([0, new], dtype=torch.int32))
        got = triton_prefill.attention(*rows, whole.kv, batch, *whole.arguments()[6:], tiles=SMALL)
        assert relative_error(got, expected[past : past + new]) < 1e-6


@on_interpreter
@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_extreme_sinks_and_logits(sink: float) -> None:
    """Logits of +-45 and more, a far position that takes all weight, a sink that lets nothing or everything through."""
    inputs = make(Case(step=((40, 18),), heads=(2, 1), scale=40.0, q_clip=45.0))
    inputs.sink.fill_(sink)
    got = triton_prefill.attention(*inputs.arguments(), tiles=SMALL)
    assert relative_error(got, exact(inputs)) < 1e-5
    assert bool(got.isfinite().all())


@on_interpreter
def test_the_bias_adds_no_error_of_its_own() -> None:
    """With keys and queries of nothing, what remains of the error is that of weights and values in bfloat16."""
    inputs = make(Case(step=((40, 18),), heads=(2, 1), dtype=BF16, extent=64))
    inputs.q.zero_()
    inputs.r.mul_(4)
    assert relative_error(triton_prefill.attention(*inputs.arguments(), tiles=SMALL), exact(inputs)) < 3e-3


@on_interpreter
def test_rows_apart_and_output_in_bfloat16() -> None:
    inputs = make(Case(step=((20, 17),), heads=(2, 1), dtype=BF16))
    fused = torch.cat([inputs.q, inputs.gate, inputs.r], dim=1)
    width = inputs.q.shape[1]
    apart = (fused[:, :width], fused[:, 2 * width :], inputs.sink, fused[:, width : 2 * width])
    got = triton_prefill.attention(*apart, *inputs.arguments()[4:], tiles=SMALL, out_dtype=BF16)
    assert got.dtype is BF16 and relative_error(got, exact(inputs)) < 8e-3


@on_interpreter
def test_what_it_does_not_cover_is_refused() -> None:
    inputs = make(Case(step=((3, 1),)))
    arguments = list(inputs.arguments())
    with pytest.raises(ValueError, match=r"head_dim must be one of 16, 32, .* got 48"):
        triton_prefill.attention(inputs.q.repeat(1, 3), *arguments[1:])
    with pytest.raises(ValueError, match=r"tokens per block must be one of 1, 2, .* got 12"):
        triton_prefill.attention(*arguments[:4], inputs.kv[:, :, :12], *arguments[5:])
    arguments[11] = 0
    with pytest.raises(ValueError, match=r"window must be at least 1 .* got 0"):
        triton_prefill.attention(*arguments)


@on_interpreter
def test_a_step_without_rows() -> None:
    inputs = make(Case(step=((3, 1),)))
    arguments = [x[:0] if i < 4 else x for i, x in enumerate(inputs.arguments())]
    arguments[5] = replace(inputs.batch, query_start=torch.zeros(2, dtype=torch.int32))
    assert triton_prefill.attention(*arguments).shape == (0, 192)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_values_on_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= len(CASES) + len(IN_BF16), run.stdout[-2000:]


# From here on: what becomes of it for a Hopper GPU.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiled_only = pytest.mark.skipif(INTERPRETED or not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
TYPES = {
    "sink": "*fp32", "q_scale": "*fp32", "r_scale": "*fp32", "query_start": "*i32", "seq_lens": "*i32",
    "block_table": "*i32", "q_clip": "fp32", "r_clip": "fp32", "alpha": "fp32", "floor": "fp32",
}  # fmt: skip
RELEASE = {"HEADS": 48, "GROUP": 6, "DIM": 128, "EXTENT": 1024, "PAGE": 128, "WINDOW": 0}
TINY = {"HEADS": 12, "GROUP": 6, "DIM": 16, "EXTENT": 16, "PAGE": 32, "WINDOW": 0}
KERNELS: dict[str, tuple[dict[str, int], torch.dtype]] = {
    "full": (RELEASE, BF16),
    "sliding": (RELEASE | {"WINDOW": 1024, "PAGE": 16}, BF16),
    "float32": (RELEASE, F32),
    "tiny": (TINY, BF16),
    "tiny, sliding": (TINY | {"WINDOW": 8, "EXTENT": 8, "PAGE": 16}, BF16),
    "tiny, float32": (TINY, F32),
    "heads of 64": (RELEASE | {"DIM": 64}, BF16),
    "no groups": (RELEASE | {"GROUP": 1}, BF16),
    "heads of 64, no groups": (RELEASE | {"GROUP": 1, "DIM": 64}, BF16),
}


@cache
def compiled(name: str) -> tuple[str, str, str, int]:
    """Triton's last representation, SASS, resource usage and dynamic shared memory for sm_90."""
    sizes, dtype = KERNELS[name]
    tiles = choose_tiles(sizes["DIM"], sizes["GROUP"], dtype)
    constants: dict[str, Any] = {**sizes, **ring_sizes(tiles, dtype is F32), "REL": 16, "LOG_SCALING": True}
    constants["PADDING"] = 2 * (tiles.positions + tiles.keys)
    data, table = ("*bf16", "*fp16") if dtype is BF16 else ("*fp32", "*fp32")
    types = TYPES | dict.fromkeys(("q", "r", "gate", "kv", "out"), data) | {"table": table, "scratch": table}
    kernel = triton_prefill._prefill_kernel
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") or n.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass, resources = run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)
    return result.asm["ttgir"], sass, resources, result.metadata.shared


def loops(sass: str) -> list[list[str]]:
    """Instructions of each loop: between a label and a branch back to it; the innermost and short ones come first."""
    lines = [line.strip() for line in sass.splitlines()]
    labels: dict[str, int] = {}
    found = []
    for i, line in enumerate(lines):
        if re.fullmatch(r"\.L_x_\d+:", line):
            labels[line[:-1]] = i
        elif (branch := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and branch[1] in labels:
            found.append([line for line in lines[labels[branch[1]] : i + 1] if line.startswith("/*")])
    return found


def count(instructions: list[str], pattern: str) -> int:
    return sum(bool(re.search(rf"\b{pattern}\b", line)) for line in instructions)


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers_and_fits(name: str) -> None:
    _, sass, resources, dynamic = compiled(name)
    if name != "float32":  # without a matrix unit nothing is fast; it has to fit and to be right
        assert not any(count(loop, "(LDL|STL)") for loop in loops(sass))
        assert int(re.findall(r"STACK:(\d+)", resources)[-1]) <= 32 and "LOCAL:0" in resources
    reported = re.search(r"SHARED:(\d+)", resources)
    assert reported
    static = int(reported[1])
    assert dynamic + static <= 227 * 1024
    # Triton raises the limit of dynamic shared memory only where that alone exceeds 48 KiB.
    assert dynamic > 48 * 1024 or dynamic + static <= 48 * 1024


@compiled_only
@pytest.mark.parametrize("name", [name for name, (_, dtype) in KERNELS.items() if dtype is BF16])
def test_products_are_those_of_a_warpgroup_and_loads_are_wide(name: str) -> None:
    _, sass, _, _ = compiled(name)
    assert "HGMMA" in sass and not re.search(r"\bHMMA\b", sass)
    assert "LDGSTS.E.BYPASS.128" in sass
    assert re.search(r"STG\.E\.(64|128)", sass)


@compiled_only
@pytest.mark.parametrize("name", [name for name, (_, dtype) in KERNELS.items() if dtype is BF16])
def test_a_row_belongs_to_one_warp(name: str) -> None:
    """The ring of biases relies on it: rows are written and read between barriers of a warp."""
    ttgir = compiled(name)[0]
    sizes, dtype = KERNELS[name]
    warps = choose_tiles(sizes["DIM"], sizes["GROUP"], dtype).warps
    layouts = re.findall(r"nvidia_mma<.*?warpsPerCTA = (\[[\d, ]+\])", ttgir)
    assert layouts and set(layouts) == {f"[{warps}, 1]"}
    # And neither what goes in nor what comes out changes its layout on the way.
    types = re.findall(r'"(?:st|ld)\.shared\.b32.*? : .*-> tensor<\d+x\d+xf16, #(\w+)>', ttgir)
    assert len(types) >= 3 and set(types) <= set(re.findall(r"#(\w+) = #ttg.nvidia_mma", ttgir))


@compiled_only
@pytest.mark.parametrize("name", ["full", "sliding"])
def test_the_loops_are_as_short_as_they_were_made(name: str) -> None:
    """Per warp and tile of 128 rows by 64 keys. 8 warps on 4 schedulers: twice as many cycles at least."""
    *plain, near = [loop for loop in loops(compiled(name)[1]) if count(loop, "HGMMA") > 4]
    assert count(near, "HGMMA") == 14  # 2 of the bias, 8 with keys, 4 with values
    assert count(near, "STS") == 16  # the ring, in pairs; nothing else changes its layout
    assert count(near, "LDS") - count(near, "LDS RZ") == 16  # the ring again
    assert len(near) - count(near, "FSEL") * 3 < 600  # without what is behind the branch of masked tiles
    if name == "full":
        assert len(plain) == 1 and len(plain[0]) < 380 and count(plain[0], "FSEL") == 0
