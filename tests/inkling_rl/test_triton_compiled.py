"""What the Triton kernels become for a Hopper GPU, read from the machine code: no GPU is needed to compile.

Their bytes are tested on a GPU (tests/gpu). Here: that they compile, keep everything in registers, load and store in
wide pieces, flush no denormals, and that the kernel that is bound by instructions stays as short as it was made.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inkling_rl.formats.errors import FormatError  # noqa: E402
from inkling_rl.formats.kernels import (  # noqa: E402
    triton_engine,
    triton_four_over_six,
    triton_mxfp8,
    triton_nvfp4,
)
from inkling_rl.formats.kernels.triton_blocks import pointers  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
if not (TOOLS / "nvdisasm").exists():
    pytest.skip("this Triton brings no disassembler", allow_module_level=True)

LISTS = {"SPAN": triton_four_over_six.SPAN, "LISTED": triton_four_over_six.LISTED}
ROWS = {"BLOCKS_PER_ROW": 288, "FLAT": True}
TYPES = {
    "anchors": "*fp32", "expert_scales": "*fp32", "outers": "*fp32", "table": "*i64", "counts": "*i64",
    "codes": "*i32", "words": "*i32", "lists": "*i32", "largest": "*i32", "bits": "*i32", "scales": "*u8",
    "word_bytes": "*u8", "values": "*bf16", "stride_e": "i64",
}  # fmt: skip
FAST = {**ROWS, **LISTS, "EVEN": True, "TILE": 128, "TILES": triton_nvfp4.TILES, "UNROLL": triton_nvfp4.UNROLL}
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, str], int]] = {
    "NVFP4, bfloat16": (triton_nvfp4._fast_kernel, FAST, {"weight": "*i32"}, 4),
    "NVFP4, float32": (triton_nvfp4._fast_kernel, FAST, {"weight": "*fp32"}, 4),
    "NVFP4, rows apart": (triton_nvfp4._fast_kernel, {**FAST, "FLAT": False, "EVEN": False}, {"weight": "*i32"}, 4),
    "NVFP4, exact": (
        triton_nvfp4._exact_kernel, {**ROWS, **LISTS, "GIVEN": False, "TILE": 32}, {"weight": "*i32"}, 1,
    ),
    "NVFP4 in Marlin's layout": (
        triton_engine._nvfp4_kernel, {**LISTS, "SHARDS": 2, "TILES": triton_engine.TILES}, {"weight": "*i32"}, 4,
    ),
    "MXFP8": (
        triton_mxfp8._quantize_kernel, {**ROWS, "GIVEN": False, "TILE": 64, "TILES": 2},
        {"weight": "*bf16", "codes": "*u8"}, 4,
    ),
    "MXFP8, rows apart": (
        triton_mxfp8._quantize_kernel, {**ROWS, "FLAT": False, "GIVEN": True, "TILE": 64, "TILES": 2},
        {"weight": "*fp32", "codes": "*u8"}, 4,
    ),
    "MXFP8 in Marlin's layout": (triton_engine._mxfp8_kernel, {"SHARDS": 2}, {"weight": "*i32"}, 4),
    "largest": (triton_nvfp4._largest_kernel, {**ROWS, "TILE": 256, "TILES": 8}, {"weight": "*i32"}, 8),
}  # fmt: skip


@cache
def compiled(name: str) -> tuple[str, str, str]:
    """PTX, SASS and resource usage for sm_90."""
    kernel, constants, types, warps = KERNELS[name]
    names = kernel.arg_names
    known = {**TYPES, **types}
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") or n.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return result.asm["ptx"], *_disassembled(result.asm["cubin"])


def _disassembled(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)


@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers_and_no_denormal_is_flushed(name: str) -> None:
    ptx, sass, resources = compiled(name)
    assert "STACK:0" in resources and "LOCAL:0" in resources
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert ".ftz" not in ptx and "div.full" not in ptx and "approx" not in ptx


@pytest.mark.parametrize("name", [n for n in KERNELS if n != "NVFP4, exact"])
def test_weights_are_read_sixteen_bytes_at_a_time(name: str) -> None:
    loads = re.findall(r"\b(LDG\.E[.\w]*)", compiled(name)[1])
    assert any(".128" in load for load in loads), loads
    if "largest" not in name:
        assert re.search(r"STG\.E\.(64|128)", compiled(name)[1])


def test_the_kernel_that_is_bound_by_instructions_is_short() -> None:
    """Per element in the loop; 20 at the most leave 4.3 TB/s within reach of 132 multiprocessors at 1.98 GHz."""
    body = loop(compiled("NVFP4, bfloat16")[1])
    floating = sum(bool(re.search(r"\b(FFMA|FADD|FMUL)\b", line)) for line in body)
    assert floating > 150 * triton_nvfp4.UNROLL  # it is the loop over blocks
    rare = sum(15 for line in body if "ATOMG" in line)  # what appends to a list, behind a branch
    assert len(body) - rare < 20 * 16 * triton_nvfp4.UNROLL


def loop(sass: str) -> list[str]:
    """Instructions of the first loop: between a label and the first branch back to it."""
    lines = [line.strip() for line in sass.splitlines()]
    labels: dict[str, int] = {}
    for i, line in enumerate(lines):
        if re.fullmatch(r"\.L_x_\d+:", line):
            labels[line[:-1]] = i
        elif (branch := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and branch[1] in labels:
            return [line for line in lines[labels[branch[1]] : i + 1] if line.startswith("/*")]
    raise AssertionError("no loop")


def test_weights_are_copied_only_where_a_row_is_not_one_aligned_piece() -> None:
    buffer = torch.randn(4, 70, 136).bfloat16()
    for view in (buffer[:, :64, :128], buffer[:, 1::2, :128], buffer[1:], buffer.requires_grad_()):
        source, stride_e, stride_n, flat = pointers(view)
        assert source.data_ptr() == view.data_ptr() and source.dtype == torch.int32
        assert (2 * stride_e, 2 * stride_n, flat) == (*view.stride()[:2], view.stride(1) == view.shape[2])
    flat_buffer = torch.randn(2 * 8 * 32 + 1)
    for view in (flat_buffer[1:].view(2, 8, 32), flat_buffer[1:].bfloat16()[0:].view(2, 8, 32).transpose(1, 2)):
        source, stride_e, stride_n, flat = pointers(view)
        assert source.data_ptr() % 16 == 0 and flat and source.view(view.dtype).equal(view)
    odd = torch.randn(2 * 8 * 32 + 1).bfloat16()[1:].view(2, 8, 32)
    source, *_ = pointers(odd)
    assert source.data_ptr() % 16 == 0 and source.view(torch.bfloat16).equal(odd)


def test_what_the_kernels_cannot_count_is_refused() -> None:
    with pytest.raises(FormatError, match=r"fewer than 65536 experts .* got 70000 of 16"):
        pointers(torch.empty(70_000, 1, 16))
    with pytest.raises(FormatError, match=r"got 1 of 2147483648"):
        pointers(torch.empty(1, 1, 1).expand(1, 2**27, 16))
