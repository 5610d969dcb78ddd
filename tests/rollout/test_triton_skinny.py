"""Products of few rows: against float64 under Triton's interpreter, and as machine code for Hopper.

Triton's interpreter must be chosen before Triton is imported, so that part runs in a process of its own.
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

from rollout.kernels import triton_skinny  # noqa: E402
from rollout.kernels.triton_skinny import NARROW, SMALL, WIDE, Tile  # noqa: E402
from tests.rollout import skinny_cases as cases  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
compiles = pytest.mark.skipif(
    INTERPRETED or not (TOOLS / "nvdisasm").exists(), reason="the interpreter does not compile; needs a disassembler"
)


@pytest.fixture(autouse=True)
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the interpreter multiplies bfloat16 numbers as integers."""
    if INTERPRETED:
        from tests.rollout.test_triton_router import products_of_bfloat16

        products_of_bfloat16.__wrapped__(monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the process that it is")
def test_parity_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not gpu"],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


SMALL_TILES = (Tile(32, 64, 3, 4), Tile(16, 128, 3, 2), Tile(128, 64, 3, 4))


@interpreted
@pytest.mark.parametrize("rows", [*range(1, 9), 9, 13, 16, 17, 32])
def test_linear(rows: int) -> None:
    cases.check_linear("cpu", rows, outputs=75, hidden=328)
    for tile in SMALL_TILES if rows in (1, 7, 16, 30) else ():
        cases.check_linear("cpu", rows, outputs=97, hidden=256, tile=tile)


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 8, 11, 16, 25])
def test_inputs_of_attention(rows: int) -> None:
    for tile in (None, *SMALL_TILES):
        cases.check_inputs("cpu", rows, outputs=101, hidden=264, sinks=12, tile=tile)
        cases.check_inputs("cpu", rows, outputs=101, hidden=264, sinks=17, later=37, taps=8, tile=tile)
    cases.check_inputs("cpu", rows, outputs=64, hidden=128, sinks=16, later=64, taps=33)
    # As many sums as the model's.
    cases.check_inputs("cpu", rows, outputs=8, hidden=4608, sinks=8)


@interpreted
@pytest.mark.parametrize("rows", [1, 5, 16, 18])
def test_logits(rows: int) -> None:
    cases.check_logits("cpu", rows, vocabulary=150, padded=400, hidden=200)
    cases.check_logits("cpu", rows, vocabulary=128, padded=128, hidden=128, tile=SMALL_TILES[0])


@interpreted
def test_rows_stand_alone_and_none_is_nothing() -> None:
    cases.check_rows_stand_alone("cpu", 70, 264)
    cases.check_linear("cpu", 0, outputs=70, hidden=64)


@interpreted
def test_more_rows_are_refused() -> None:
    with pytest.raises(AssertionError):
        cases.check_linear("cpu", 33, outputs=70, hidden=64)


TYPES = {
    **dict.fromkeys(("x", "weight", "keys_values", "out"), "*bf16"),
    **dict.fromkeys(("sinks", "taps", "sinks_out", "taps_out"), "*fp32"),
    **dict.fromkeys(("cap", "per_cap"), "fp32"),
}
KINDS = {
    # Of what is absent; and of the fixed numbers.
    "sliding": ({"keys_values", "taps", "taps_out"}, 4608),
    "full": (set(), 4608),
    "output": ({"keys_values", "taps", "taps_out", "sinks", "sinks_out"}, 6144),
    "logits": ({"keys_values", "taps", "taps_out", "sinks", "sinks_out"}, 4608),
}
NAMES = [(kind, tokens) for kind in KINDS for tokens in (8, 16, 32)]


def tile_of(kind: str, tokens: int) -> Tile:
    return (NARROW if kind == "output" else WIDE)[tokens > 16]


@cache
def compiled(kind: str, tokens: int) -> tuple[list[str], str, int]:
    """Machine instructions, resources and shared memory for sm_90."""
    tile, (absent, hidden) = tile_of(kind, tokens), KINDS[kind]
    kernel = triton_skinny._skinny_kernel
    names = kernel.arg_names
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "HIDDEN": hidden, "TOKENS": tokens, "ROWS": tile.rows, "COLUMNS": tile.columns, "SMALL_ROWS": SMALL[0],
        "SMALL_COLUMNS": SMALL[1], "HAS_SMALL": kind in ("sliding", "full"), "FULL": kind == "full",
        "CAPPED": kind == "logits", "EARLY": True, "PIECES": max(1, 32 * tile.warps // tile.rows),
        "PREFETCH": tile.fetched,
    }  # fmt: skip
    types = TYPES | ({"out": "*fp32"} if kind == "logits" else {})
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n] != "constexpr" and (signature[n][0] == "*" or n.startswith("stride"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
        resources = run(TOOLS / "cuobjdump", "-res-usage", file.name)
    labelled = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/|\.L_x_\d+:", line)]
    return [re.sub(r"^\s+/\*[0-9a-f]+\*/\s+", "", line) for line in labelled], resources, result.metadata.shared


def loops(sass: list[str]) -> list[list[str]]:
    """Instructions of the loops over columns: of bfloat16 weights, and where there are any of float32 ones."""
    labels = {line[:-1]: i for i, line in enumerate(sass) if line.startswith(".L_x_")}
    found: list[list[str]] = []
    for i, line in enumerate(sass):
        branch = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if branch and labels[branch[1]] < i:
            body = [line for line in sass[labels[branch[1]] : i + 1] if not line.startswith(".L_x_")]
            found += [body] if any("LDGSTS" in line for line in body) else []
    return sorted(found, key=len)


@compiles
@pytest.mark.parametrize(("kind", "tokens"), NAMES)
def test_everything_stays_in_registers_and_all_programs_fit(kind: str, tokens: int) -> None:
    sass, resources, shared = compiled(kind, tokens)
    registers = re.search(r"REG:(\d+)", resources)
    assert "STACK:0" in resources and "LOCAL:0" in resources and registers is not None
    assert not [line for line in sass if re.search(r"\b(LDL|STL)\b", line)]
    # Of the output there are no more than there are multiprocessors.
    programs = 1 if kind == "output" else 2
    assert shared + 1024 <= 227 * 1024 // programs and int(registers[1]) * 128 * programs <= 65536


@compiles
@pytest.mark.parametrize(("kind", "tokens"), NAMES)
def test_weights_come_in_sixteen_bytes_at_a_time_past_the_first_cache(kind: str, tokens: int) -> None:
    sass, _, _ = compiled(kind, tokens)
    assert not [line for line in sass if re.search(r"LDG\.E", line)]
    loads = [line for line in sass if "LDGSTS" in line]
    assert loads and all("BYPASS.128" in line for line in loads)


@compiles
@pytest.mark.parametrize(("kind", "tokens"), NAMES)
def test_the_loop_is_short(kind: str, tokens: int) -> None:
    """Two programs' instructions per lane and weight; 13 would take as long as the weights at 4.3 TB/s."""
    tile = tile_of(kind, tokens)
    body, *small = loops(compiled(kind, tokens)[0])
    weights = tile.rows * tile.columns
    assert sum("LDGSTS" in line for line in body) >= weights * 2 // 16 // (32 * tile.warps)
    assert sum("MMA" in line for line in body) >= tile.columns // 16
    per_weight = len(body) * 32 * tile.warps / weights
    print(f"{kind}, {tokens} tokens: {len(body)} instructions, {per_weight:.2f} per weight")
    assert per_weight < 3
    assert len(small) == (kind in ("sliding", "full"))
    for loop in small:
        # Three chains of products that do not wait for each other: no longer than the loads of a step take.
        if tokens <= 16:
            assert sum("MMA" in line for line in loop) == 3 * SMALL[1] // 16 and len(loop) < 350
            assert sum(bool(re.search(r"\bFFMA\b", line)) for line in loop) == 12


@compiles
def test_the_first_weights_are_fetched_before_the_kernel_before_has_ended() -> None:
    for kind, tokens in NAMES:
        sass, _, _ = compiled(kind, tokens)
        fetch = next(i for i, line in enumerate(sass) if "UBLKPF.L2" in line)
        assert fetch < next(i for i, line in enumerate(sass) if "ACQBULK" in line)
        assert sum("ACQBULK" in line for line in sass) == (2 if kind in ("sliding", "full") else 1)
        waited = next(i for i, line in enumerate(sass) if "ACQBULK" in line)
        assert not [line for line in sass[:waited] if "LDGSTS" in line]


@compiles
def test_no_count_makes_other_code() -> None:
    """An engine would stop to compile in the middle of serving."""
    counts = {"num_rows", "outputs", "later", "num_sinks", "num_taps", "width"}
    assert {p.name for p in triton_skinny._skinny_kernel.params if p.do_not_specialize} == counts
