"""The fused kernels around attention without a GPU: their parity under Triton's interpreter, and their machine code.

Machine code for a Hopper GPU: that everything stays in registers, loads and stores are wide, the matrix unit is used,
and that what is bound by memory has few enough instructions to be so. Speed itself: tests/benchmarks/conv_mix_gpu.
"""

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

from rollout.kernels import (  # noqa: E402
    triton_activation,
    triton_conv_mix,
    triton_preparation,
    triton_router,
    triton_taps,
)

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, which the interpreter cannot; the run without it does", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HERE = Path(__file__).parent


@pytest.mark.slow
def test_parity_under_the_interpreter() -> None:
    files = [f"{HERE}/test_triton_{noun}.py" for noun in ("conv_mix", "preparation", "router", "activation", "linear")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        check=False, capture_output=True, text=True, cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


SCALARS = ("per_hidden", "score_scale", "conv_scale", "mix_eps", "norm_eps", "q_clip", "r_clip", "per_dim", "alpha",
           "per_floor", "route_scale")  # fmt: skip
TYPES: dict[str, str] = {
    **dict.fromkeys(("x", "state", "residual", "blocks", "running", "out", "q", "k", "v", "r", "kv"), "*bf16"),
    **dict.fromkeys(("q_out", "gate_up"), "*bf16"),
    "r_out": "*fp16",
    **dict.fromkeys(("taps", "queries", "weights", "q_scale", "r_scale", "k_taps", "v_taps"), "*fp32"),
    **dict.fromkeys(("k_dynamic", "v_dynamic", "router", "parts", "bias"), "*fp32"),
    **dict.fromkeys(("sources", "slots", "conv_slots", "kv_slots", "positions"), "*i64"),
    **dict.fromkeys(("query_start", "seq_lens", "block_table", "experts"), "*i32"),
    **dict.fromkeys(SCALARS, "fp32"),
}
ALIGNED = ("size", "num_experts")


def conv_mix(queries: int) -> dict[str, Any]:
    tile = triton_conv_mix.TILES[queries]
    return {
        "TOKENS_PER_BLOCK": 8, "HIDDEN": 4608, "BLOCK": tile.block, "QUERIES": queries, "BATCH": tile.batch,
        "RELOAD": tile.reload, "stride_tap": 1, "WAIT": True, "PINNED": tile.pinned,
    }  # fmt: skip


def prepare(dynamic: bool) -> dict[str, Any]:
    absent = {} if dynamic else {"k_dynamic": None, "v_dynamic": None, "positions": None}
    return {
        "CONV_TOKENS": 8, "KV_TOKENS": 64, "HEADS": 48, "KV_HEADS": 8, "DIM": 128, "REL_DIM": 16, "KV_TILE": 8,
        "TILE": triton_preparation.ELEMENTS // 128, "REL_TILE": 64, "LOG_SCALING": dynamic, "EARLY": True,
        "stride_tap": 1, **absent,
    }  # fmt: skip


def logits(index: int) -> tuple[Any, dict[str, Any], int, int]:
    _, tile, span = triton_router.PLANS[index]
    groups, segments = {"segment": (1, 1), "group": (1, 6), "row": (3, 6)}[span]
    constants = {
        "HIDDEN": 4608, "GROUPS": groups, "SEGMENTS": segments, "SEGMENT": triton_router.SEGMENT, "stride_column": 1,
        "TOKENS": tile.tokens, "COLUMNS": triton_router.COLUMNS, "EARLY": True,
    }  # fmt: skip
    return triton_router._logits_kernel, constants, tile.warps, tile.stages


CHOOSE = {
    "NUM_EXPERTS": 384, "TILE": triton_router.CHUNK, "GROUPS": 3, "INNER": 6, "TOP_K": 8, "EARLY": True,
}  # fmt: skip
ACTIVATION = {"WIDTH": 2304, "GATE_CAP": 4.0, "UP_CAP": 25.0, "BLOCK": triton_activation.BLOCK}
# What changes from step to step: not to be made a constant where it is 1, or other code where 16 divides it.
COUNTS = {"num_rows", "num_blocks", "num_slots", "num_conv_slots", "num_kv_slots", "stride_table"}
KERNELS: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "mix, a block opens": (
        triton_conv_mix._conv_mix_kernel, {**conv_mix(1), "residual": None}, triton_conv_mix.TILES[1].warps, 3,
    ),
    "mix, few rows early": (triton_conv_mix._early_kernel, conv_mix(1), triton_conv_mix.TILES[1].warps, 3),
    "mix, three outputs of few rows early": (
        triton_conv_mix._early_kernel, conv_mix(3), triton_conv_mix.TILES[3].warps, 3,
    ),
    "mix, one output": (triton_conv_mix._conv_mix_kernel, conv_mix(1), triton_conv_mix.TILES[1].warps, 3),
    "mix, three outputs": (triton_conv_mix._conv_mix_kernel, conv_mix(3), triton_conv_mix.TILES[3].warps, 3),
    "preparation, sliding": (triton_preparation._prepare_kernel, prepare(False), triton_preparation.WARPS, 3),
    "preparation, full": (triton_preparation._prepare_kernel, prepare(True), triton_preparation.WARPS, 3),
    "logits, few tokens": logits(0),
    "logits, some tokens": logits(1),
    "logits, many tokens": logits(2),
    "logits, few tokens, float32": logits(0),
    "logits, some tokens, float32": logits(1),
    "logits, few tokens, early": (triton_router._segment_kernel, logits(0)[1], triton_router.PLANS[0][1].warps, 3),
    "choice": (triton_router._choose_kernel, CHOOSE, 1, 3),
    "activation": (triton_activation._activation_kernel, ACTIVATION, triton_activation.WARPS, 3),
    "tap sources": (triton_taps._sources_kernel, {"TOKENS_PER_BLOCK": 8, "TILE": triton_taps.TILE}, 4, 3),
}  # fmt: skip


@cache
def compiled(name: str) -> tuple[str, list[str], int]:
    """PTX, machine instructions and registers for sm_90."""
    kernel, constants, warps, stages = KERNELS[name]
    names = kernel.arg_names
    constants = {n: value for n, value in constants.items() if n in names}
    types = TYPES | ({"x": "*fp32"} if "float32" in name else {})
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [
        n for n in names if signature[n] != "constexpr" and (signature[n][0] == "*" or "stride" in n or n in ALIGNED)
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if name.startswith("mix"):
        options["maxnreg"] = triton_conv_mix.TILES[constants["QUERIES"]].registers
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
        resources = run(TOOLS / "cuobjdump", "-res-usage", file.name)
    assert "LOCAL:0" in resources, resources
    registers = re.search(r"REG:(\d+)", resources)
    assert registers is not None
    labelled = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/|\.L_x_\d+:", line)]
    assert labelled
    return result.asm["ptx"], [re.sub(r"^\s+/\*[0-9a-f]+\*/\s+", "", line) for line in labelled], int(registers[1])


def loops(sass: list[str]) -> list[list[str]]:
    """Instructions of every loop, from a label to a branch back to it; the longest first."""
    labels = {line[:-1]: i for i, line in enumerate(sass) if line.startswith(".L_x_")}
    found = []
    for i, line in enumerate(sass):
        branch = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if branch and labels[branch[1]] < i:
            found.append([body for body in sass[labels[branch[1]] : i + 1] if not body.startswith(".L_x_")])
    return sorted(found, key=len, reverse=True)


needs_tools = pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton brings no disassembler")


# Half a minute of the compiler's time for the two largest.
LONG = pytest.mark.slow
NAMES = [pytest.param(name, marks=LONG) if "three" in name or "opens" in name else name for name in KERNELS]


@pytest.mark.parametrize("name", KERNELS)
def test_no_number_of_rows_makes_other_code(name: str) -> None:
    """An engine would stop to compile in the middle of serving."""
    assert not [p.name for p in KERNELS[name][0].params if p.name in COUNTS and not p.do_not_specialize]


@needs_tools
@pytest.mark.parametrize("name", NAMES)
def test_everything_stays_in_registers(name: str) -> None:
    """But for a handful of three mixtures, whose programs are held to as many registers as two of them have."""
    _, sass, _ = compiled(name)
    spilled = [line for line in sass if re.search(r"\b(LDL|STL)\b", line)]
    assert len(spilled) <= (16 if "three" in name else 0)


@needs_tools
@pytest.mark.parametrize(("name", "bits"), [
    ("mix, one output", 64), pytest.param("mix, three outputs", 64, marks=LONG), ("preparation, sliding", 128),
    ("preparation, full", 128), ("activation", 128),
])  # fmt: skip
def test_activations_move_in_wide_pieces(name: str, bits: int) -> None:
    """A warp's accesses are whole lines of 128 bytes either way; wider ones are fewer instructions."""
    suffix = "" if bits == 32 else rf"\.{bits}"
    _, sass, _ = compiled(name)
    for kind in (r"LDG\.E{}\.STRONG\.GPU", r"STG\.E{}\b"):
        wanted = sum(bool(re.search(kind.format(suffix), line)) for line in sass)
        assert wanted > 0
        narrow = [line for line in sass if re.search(kind.format(r"\.(U16|S16|U8)"), line)]
        assert not narrow


@needs_tools
@pytest.mark.parametrize("name", ["logits, few tokens", "logits, some tokens", "logits, many tokens"])
def test_the_router_uses_the_matrix_unit(name: str) -> None:
    ptx, sass, _ = compiled(name)
    assert len(re.findall(r"wgmma\.mma_async\S*bf16\.bf16", ptx)) == 3 * triton_router.COLUMNS // 16
    assert any("HGMMA" in line for line in sass) and any("LDGSTS" in line for line in sass)


@needs_tools
def test_the_mixture_is_bound_by_memory() -> None:
    """Instructions of a row at nine sources, against what the multiprocessors issue while its bytes come in."""
    _, sass, registers = compiled("mix, one output")
    tile = triton_conv_mix.TILES[1]
    of_row, of_batch = loops(sass)[:2]
    per_row = tile.warps * (len(of_row) + (8 // tile.batch - 1) * len(of_batch))
    issued = per_row / (132 * 4 * 1.7e9)
    moved = 12 * 2 * 4608 / 4.25e12
    print(f"{registers} registers, row {len(of_row)}, batch {len(of_batch)}: issue {issued / moved:.2f} of its bytes")
    assert issued < 0.65 * moved and registers <= tile.registers


@needs_tools
@pytest.mark.parametrize("name", [name for name in KERNELS if "early" in name])
def test_what_starts_early_writes_nothing_before_the_end_of_the_kernel_before(name: str) -> None:
    _, sass, _ = compiled(name)
    place = lambda word: [i for i, line in enumerate(sass) if word in line]
    (wait,) = place("ACQBULK")
    assert min(place("STG")) > wait and place("PREEXIT") and place("CCTL")
    if name.startswith("logits"):
        # The weights are there and split when the tokens come.
        assert len([i for i in place("LDG.E.128") if i < wait]) == 32 and min(place("HGMMA")) > wait
    else:
        assert min(place("PREEXIT")) < min(place("LDG")) and wait > 0.4 * len(sass) - 120


@needs_tools
def test_the_activation_is_bound_by_memory() -> None:
    _, sass, _ = compiled("activation")
    per_output = sum(not line.startswith(".L_x_") for line in sass) / (
        ACTIVATION["BLOCK"] / 32 / triton_activation.WARPS
    )
    print(f"{per_output:.0f} instructions per output")
    assert per_output < 40 and sum("MUFU" in line for line in sass) <= 3 * ACTIVATION["BLOCK"] // 128
