"""The experts of few tokens without a GPU: parity under the interpreter, their PTX on a warp of numpy, Hopper code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inkling_rl.formats.reference import marlin, nvfp4  # noqa: E402
from rollout.kernels import triton_moe_vector, triton_moe_words  # noqa: E402
from rollout.kernels.triton_moe_vector import SHAPES, Shape  # noqa: E402
from tests.rollout import ptx_warp  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, which the interpreter cannot; the run without it does", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HERE = Path(__file__).parent
LANE = np.arange(32)


@pytest.mark.slow
def test_parity_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{HERE}/test_triton_moe_vector.py"],
        check=False, capture_output=True, text=True, cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def tile(bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The words of 64 columns at one tile of 16 k with all codes in them, by lane, and their values [64, 16]."""
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (64, 16), generator=g, dtype=torch.uint8)
    if bits == 4:
        values, stored = nvfp4.e2m1_values(codes[:, ::2] | codes[:, 1::2] << 4), codes[:, ::2] | codes[:, 1::2] << 4
    else:
        codes[(codes & 0x7F) == 0x7F] = 1  # not a number
        values, stored = codes.view(torch.float8_e4m3fn).float(), codes
    words = marlin.pack_weight(stored[None], bits, 1, 64, 16).flatten().numpy().view(np.uint32)
    return words.reshape(32, bits), values.numpy()


def inputs_of(x: np.ndarray[Any, Any]) -> tuple[ptx_warp.Register, ptx_warp.Register]:
    """Lower and upper pairs of eight columns of 16 inputs, [16, 8]."""
    pairs = np.ascontiguousarray(x.T.astype(np.float16)).view(np.uint32)  # [8, 8]
    return pairs[LANE // 4, LANE % 4], pairs[LANE // 4, LANE % 4 + 4]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_instructions_multiply_a_tile(bits: int) -> None:
    words, values = tile(bits)
    x, c = np.random.default_rng(0).integers(-8, 9, (2, 16, 8)).astype(np.float32)
    low, high = inputs_of(x)
    for j in range(4):
        before = [c[LANE // 4 + 8 * (i // 2), LANE % 4 * 2 + i % 2].view(np.uint32) for i in range(4)]
        if bits == 4:
            given = [words[:, j], low, high, *before]
            out = ptx_warp.run(triton_moe_words.MULTIPLY_4, {f"${4 + i}": r for i, r in enumerate(given)})
            results = [out[f"${i}"] for i in range(4)]
        else:
            # Two elements of a lane: rows g and g + 8.
            order = [words[:, 2 * j], words[:, 2 * j + 1], low, low, high, high, *(before[i] for i in (0, 2, 1, 3))]
            out = ptx_warp.run(triton_moe_words.MULTIPLY_8, {f"${4 + i}": r for i, r in enumerate(order)})
            results = [out[f"${i}"] for i in (0, 2, 1, 3)]
        wanted = c + values[16 * j : 16 * j + 16] * 2.0 ** (-14 if bits == 4 else -8) @ x
        got = np.empty((16, 8), np.float32)
        for i, result in enumerate(results):
            got[LANE // 4 + 8 * (i // 2), LANE % 4 * 2 + i % 2] = result.view(np.float32)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


class Compiled(NamedTuple):
    ttgir: str
    sass: list[str]
    registers: int


TYPES = {
    "x": "*i32", "words": "*i32", "scales": "*i64", "outer": "*fp32", "experts": "*i32", "weights": "*fp32",
    "partial": "*fp32", "arrived": "*i32",
}  # fmt: skip
SIZES = {"HIDDEN": 4608, "PADDED": 2304, "TOP_K": 8, "EARLY": True}
KERNELS: dict[str, tuple[int, Shape]] = {
    **{f"{name}, {bits} bits": (bits, shape) for (bits, name), shape in SHAPES.items()},
    "up, 4 bits, short chains": (4, Shape(4, 4)),
    "down, 4 bits, two blocks": (4, Shape(4, 8, 2, 184)),
}


@cache
def compiled(name: str) -> Compiled:
    """For sm_90, at the release's sizes."""
    bits, shape = KERNELS[name]
    constants = SIZES | {"BITS": bits, "TILES": shape.tiles, "WARPS": shape.warps}
    if name.startswith("up"):
        kernel, types = triton_moe_vector._expert_up_kernel, TYPES | {"out": "*fp16"}
        constants |= {"PARTS": 72 // shape.blocks, "PARTS_2": 128, "GATE_CAP": 4.0, "UP_CAP": 25.0}
    else:
        kernel, types = triton_moe_vector._expert_down_kernel, TYPES | {"out": "*bf16"}
        constants |= {"BLOCKS": shape.blocks}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n][0] == "*"},
    )
    options = {"num_warps": shape.warps, "maxnreg": shape.registers}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
        resources = run(TOOLS / "cuobjdump", "-res-usage", file.name)
    assert "STACK:0" in resources and "LOCAL:0" in resources, resources
    used = re.search(r"REG:(\d+)", resources)
    assert used is not None
    return Compiled(result.asm["ttgir"], [line.strip() for line in sass.splitlines()], int(used[1]))


def loop(sass: list[str]) -> list[str]:
    """Instructions of the longest loop."""
    labels: dict[str, int] = {}
    longest: list[str] = []
    for i, line in enumerate(sass):
        if re.fullmatch(r"\.L_x_\d+:", line):
            labels[line[:-1]] = i
        elif (branch := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and branch[1] in labels:
            body = [line for line in sass[labels[branch[1]] : i + 1] if line.startswith("/*")]
            longest = max(longest, body, key=len)
    return longest


needs_tools = pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton brings no disassembler")


@needs_tools
@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers(name: str) -> None:
    """And the programs of one token fit the multiprocessors together, see `Shape.registers`."""
    assert not [line for line in compiled(name).sass if re.search(r"\b(LDL|STL)\b", line)]
    assert compiled(name).registers <= KERNELS[name][1].registers


@needs_tools
@pytest.mark.parametrize("name", KERNELS)
def test_lanes_are_laid_out_as_the_matrix_instruction_needs_them(name: str) -> None:
    """Nothing in Triton's language promises it, so it is looked up."""
    ttgir, (_, shape) = compiled(name).ttgir, KERNELS[name]
    right = (
        rf"sizePerThread = \[1, 4\], threadsPerWarp = \[32, 1\], warpsPerCTA = \[{shape.warps}, 1\], order = \[1, 0\]"
    )
    aliases = re.findall(rf"(#\w+) = #ttg.blocked<{{{right}}}>", ttgir)
    products = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line and "mma.sync" in line]
    types = re.findall(r"mma\.sync.*?-> (?:\()?(tensor<[^>]*>)", ttgir, flags=re.S)
    wanted = {f"tensor<{32 * shape.warps}x4xf32, {alias}>" for alias in aliases}
    assert len(aliases) == 1 and products and len(types) == len(products) and set(types) == wanted


@needs_tools
@pytest.mark.parametrize("name", KERNELS)
def test_the_loop_is_short_and_loads_early(name: str) -> None:
    """Per code an H200 has 3.9 instructions, and 1.9 of the integer unit, for NVFP4; twice as many for MXFP8."""
    bits, shape = KERNELS[name]
    body = loop(compiled(name).sass)
    counts = Counter(re.sub(r"^/\*\w+\*/\s+(@!?U?P\w+\s+)?", "", line).split()[0].split(".")[0] for line in body)
    codes = shape.tiles * 4 * 8 * (2 if name.startswith("up") else shape.blocks)
    integer = sum(counts[op] for op in ("LOP3", "SHF", "PRMT", "SEL", "ISETP", "IADD3", "LEA"))
    print(f"{name}: {compiled(name).registers} registers, {len(body) / codes:.2f} instructions per code, "
          f"{integer / codes:.2f} of the integer unit")  # fmt: skip
    assert len(body) / codes < (2.7 if bits == 4 else 3.2) and integer / codes < (1.5 if bits == 4 else 1.8)
    assert counts["HMMA"] == codes // 8 and not counts["BAR"] and not counts["LDS"] and not counts["STS"]
    loads = [i for i, line in enumerate(body) if re.search(r"LDG\.E\.EF\.128", line)]
    assert len(loads) == codes * bits // 8 // 16
    # Had the assembler its way, all were behind the arithmetic.
    assert loads[len(loads) // 2 - 1] < 0.65 * len(body)
