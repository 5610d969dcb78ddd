"""The kernels between router and Marlin without a GPU: parity under Triton's interpreter, machine code for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rollout.kernels import triton_moe_align, triton_moe_sum  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, which the interpreter cannot; the run without it does", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HERE = Path(__file__).parent


@pytest.mark.slow
def test_parity_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{HERE}/test_triton_moe.py"],
        check=False, capture_output=True, text=True, cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


INT32 = dict.fromkeys(("experts", "rows", "block_experts", "num_rows"), "*i32") | {"pairs": "i32"}
ALIGN = {"EXPERTS": 384, "BINS": 512, "BLOCK": 8, "LANES": 8}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "sum": (
        triton_moe_sum._sum_kernel,
        {"outputs": "*bf16", "weights": "*fp32", "out": "*bf16"},
        {"HIDDEN": 4608, "TOP_K": 8, "BLOCK": triton_moe_sum.BLOCK},
        triton_moe_sum.WARPS,
    ),
    "align, 2 tokens": (triton_moe_align._align_kernel, INT32, {**ALIGN, "TILE": 128}, triton_moe_align.WARPS),
    "align, 256 tokens": (triton_moe_align._align_kernel, INT32, {**ALIGN, "TILE": 2048}, triton_moe_align.WARPS),
    "align, few experts": (
        triton_moe_align._align_kernel,
        INT32,
        {"EXPERTS": 16, "BINS": 32, "BLOCK": 48, "LANES": 64, "TILE": 1024},
        triton_moe_align.WARPS,
    ),
}


@cache
def compiled(name: str) -> list[str]:
    """Machine instructions for sm_90."""
    kernel, types, constants, warps = KERNELS[name]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n][0] == "*"},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
        resources = run(TOOLS / "cuobjdump", "-res-usage", file.name)
    assert "STACK:0" in resources and "LOCAL:0" in resources, resources
    return [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]


needs_tools = pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton brings no disassembler")


@needs_tools
@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers(name: str) -> None:
    assert not [line for line in compiled(name) if re.search(r"\b(LDL|STL)\b", line)]


@needs_tools
def test_the_sum_has_all_experts_in_flight() -> None:
    """Every load is on its way before the first is used, so that one token costs one latency."""
    sass = compiled("sum")
    loads = [i for i, line in enumerate(sass) if "LDG.E R" in line]
    assert len(loads) == 2 * 8 and sum("STG.E" in line for line in sass) == 1
    first_sum = next(i for i, line in enumerate(sass) if re.search(r"\b(FFMA|FMUL|FADD)\b", line))
    assert loads[-1] < first_sum and len(sass) < 150


@needs_tools
def test_sorting_is_short() -> None:
    """Of the order of a launch: no loop over pairs, a few hundred instructions."""
    print({name: len(compiled(name)) for name in KERNELS})
    assert len(compiled("align, 2 tokens")) < 600
