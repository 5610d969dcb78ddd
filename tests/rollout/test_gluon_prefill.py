"""Prefill attention in Gluon without a GPU: its values by a stand-in for the language, and its machine code for sm_90.

The first half runs in a process of its own, in which Triton's interpreter makes the table of profiles
(tests/rollout/test_triton_prefill.py does the same). On a device: tests/gpu/test_triton_prefill.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from rollout.kernels import gluon_prefill, prefill_tiles, triton_prefill  # noqa: E402
from rollout.kernels.prefill_tiles import Tiles, choose_tiles  # noqa: E402
from tests.rollout import gluon_on_torch  # noqa: E402
from tests.rollout.decode_cases import Case, exact, make, relative_error  # noqa: E402
from tests.rollout.test_triton_prefill import count, loops  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
BF16 = torch.bfloat16
SPECIALIZED = Tiles(64, 2, 64, 12, 3, specialized=True)
# With a window and without.
CHOSEN = [choose_tiles(128, 6, BF16, hopper=True, window=window) for window in (1024, None)]

BASE = Case(step=(), heads=(2, 1), head_dim=128, extent=100, page=16, q_clip=22.6, dtype=BF16, prepared=True)
CASES = {
    "first chunk": replace(BASE, step=((0, 150),), log_scaling=(0.1, 16)),
    "one token": replace(BASE, step=((0, 1),)),
    "later chunks": replace(BASE, step=((300, 70), (63, 65), (64, 1)), log_scaling=(0.1, 16)),
    "far keys": replace(BASE, step=((700, 64),), page=64),
    "sliding": replace(BASE, step=((300, 130), (0, 40)), window=100),
    "sliding, a whole number of tiles": replace(BASE, step=((320, 64), (320, 3)), window=128, extent=128),
    "window smaller than extent": replace(BASE, step=((200, 70),), window=30),
    "window larger than extent": replace(BASE, step=((400, 70),), window=200, extent=65),
    "window 1": replace(BASE, step=((130, 70),), window=1),
    "extent larger than everything": replace(BASE, step=((60, 70),), extent=400),
    "small pages, several layers": replace(BASE, step=((150, 70),), page=4, layers_per_page=3),
    "large pages": replace(BASE, step=((250, 70),), page=256, window=100),
    "rows and requests of padding": replace(BASE, step=((37, 66), (20, 18)), padding=81),
    "whole tiles": replace(BASE, step=((128, 64),)),
    "several heads": replace(BASE, step=((10, 65),), heads=(12, 2)),
}


class Launcher:
    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, num_warps, **constants: self.kernel(*arguments, programs=grid[0], **constants)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_prefill, "prefill_kernel", Launcher(gluon_on_torch.kernel("prefill_kernel")))


@on_interpreter
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, on_torch: None) -> None:
    inputs = make(CASES[name])
    for tiles in (CHOSEN[CASES[name].window is None], SPECIALIZED._replace(stages=2, lazy=False)):
        got = triton_prefill.attention(*inputs.arguments(), tiles=tiles)
        assert relative_error(got, exact(inputs)) < 6e-3


@on_interpreter
@pytest.mark.parametrize("name", CASES)
def test_variants_change_no_bit(name: str, on_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter which items come one after the other in a program."""
    inputs = make(CASES[name])
    variants = (
        (1, SPECIALIZED._replace(turns=True)), (2, SPECIALIZED._replace(held=True, turns=True)),
        (5, SPECIALIZED._replace(stages=2, turns=True)), (2, SPECIALIZED._replace(stages=2, held=True)),
    )  # fmt: skip
    for out_dtype in (torch.float32, BF16):
        # As many programs as items, or more.
        monkeypatch.setattr(triton_prefill, "_multiprocessors", lambda device: 1000)
        expected = triton_prefill.attention(*inputs.arguments(), tiles=SPECIALIZED, out_dtype=out_dtype)
        assert relative_error(expected, exact(inputs)) < 6e-3
        for programs, tiles in variants:
            monkeypatch.setattr(triton_prefill, "_multiprocessors", lambda device, programs=programs: programs)
            got = triton_prefill.attention(*inputs.arguments(), tiles=tiles, out_dtype=out_dtype)
            assert torch.equal(got, expected)


def test_what_it_does_not_take_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU: raw rows, rows of other dtypes or not aligned, float32 pages."""

    class ChosenError(Exception):
        pass

    def refuse(self: object, grid: object) -> None:
        raise ChosenError(type(self).__name__ if isinstance(self, Launcher) else "triton")

    inputs = make(replace(BASE, step=((20, 9),)))
    monkeypatch.setattr(triton_prefill, "_is_hopper", lambda device: True)
    monkeypatch.setattr(triton_prefill, "profile_table", lambda proj, padding, dtype: proj.new_empty(4, dtype=dtype))
    monkeypatch.setattr(gluon_prefill, "prefill_kernel", Launcher(lambda *arguments: None))
    monkeypatch.setattr(Launcher, "__getitem__", refuse)
    monkeypatch.setattr(type(triton_prefill._prefill_kernel), "__getitem__", refuse)

    def choice(**changed: torch.Tensor) -> str:
        names = ("q", "r", "sink", "gate", "kv", "batch", "q_scale", "r_scale")
        arguments = dict(zip(names, inputs.arguments(), strict=False)) | changed
        with pytest.raises(ChosenError) as chosen:
            triton_prefill.attention(*arguments.values(), *inputs.arguments()[8:])
        return str(chosen.value)

    q, r, _, gate, kv = inputs.arguments()[:5]
    shifted = torch.cat([q, q], dim=1)[:, 1 : q.shape[1] + 1]
    narrow = torch.cat([q, q[:, :8]], dim=1)[:, : q.shape[1]]
    assert choice() == "Launcher"
    for changed in (
        {"q": q.float()}, {"r": r.to(BF16)}, {"gate": gate.float()}, {"kv": kv.float()}, {"q": shifted}, {"q": narrow},
        {"q_scale": torch.ones(2, 128)}, {"q": q.float(), "gate": gate.float(), "kv": kv.float()},
    ):  # fmt: skip
        assert choice(**changed) == "triton", changed.keys()


@on_interpreter
def test_maxima_that_move(on_torch: None) -> None:
    """Logits of +-180, so that accumulated values are scaled by much and often, and rows of a warp differ."""
    inputs = make(replace(BASE, step=((300, 64),), scale=8.0, q_clip=60.0, dtype=torch.float16))
    for sink in (-80.0, 80.0):
        inputs.sink.fill_(sink)
        got = triton_prefill.attention(*inputs.arguments(), tiles=SPECIALIZED)
        assert bool(got.isfinite().all())
        assert relative_error(got, exact(inputs)) < 2e-2


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_values_without_a_device() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= len(CASES) + 1, run.stdout[-2000:]


# From here on: what becomes of it for a Hopper GPU.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiled_only = pytest.mark.skipif(INTERPRETED or not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
TYPES = dict.fromkeys(("q", "gate", "kv", "out"), "*bf16") | {
    "r": "*fp16", "table": "*fp16", "sink": "*fp32", "query_start": "*i32", "seq_lens": "*i32", "block_table": "*i32",
}  # fmt: skip
RELEASE = {
    "HEADS": 48, "GROUP": 6, "DIM": 128, "REL": 16, "EXTENT": 1024, "PAGE": 128, "WINDOW": 0, "PADDING": 256,
    "STAGES": 3, "LAZY": True, "HELD": False, "TURNS": False, **prefill_tiles.REGISTERS,
}  # fmt: skip
WINDOW = {"WINDOW": 1024, "PAGE": 16}
KERNELS: dict[str, dict[str, Any]] = {
    "full, held, turns": RELEASE | {"HELD": True, "TURNS": True},
    "sliding": RELEASE | WINDOW,
    "full": RELEASE,
    "sliding, held, turns": RELEASE | WINDOW | {"HELD": True, "TURNS": True},
    "window larger than extent": RELEASE | {"WINDOW": 2048, "LAZY": False},
}


@cache
def compiled(name: str) -> tuple[str, str, int]:
    """SASS, resource usage and dynamic shared memory for sm_90."""
    kernel, constants = gluon_prefill.prefill_kernel, KERNELS[name]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    fixed = {p.name for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    aligned = [n for n in names if n not in fixed and (signature[n].startswith("*") or n.startswith("stride"))]
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert result.metadata.num_warps == 12
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass, resources = run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)
    return sass, resources, result.metadata.shared


def tile_loops(name: str, loaded: int, products: int) -> list[list[str]]:
    """The loops over tiles of a warpgroup: by how many copies they start and products they issue."""
    short = [loop for loop in loops(compiled(name)[0]) if len(loop) < 1000]
    return [loop for loop in short if (count(loop, "LDGSTS"), count(loop, "HGMMA")) == (loaded, products)]


@pytest.mark.skipif(INTERPRETED, reason="about what is compiled")
def test_part_of_a_step_runs_the_code_of_a_whole_one() -> None:
    """An engine does not compile anew for where prompts begin among requests, nor for the width of its tables."""
    for kernel in (triton_prefill._prefill_kernel, gluon_prefill.prefill_kernel):
        parameters = {parameter.name: parameter for parameter in kernel.params}
        assert all(parameters[name].do_not_specialize for name in ("requests", "num_rows", "stride_table"))
        anywhere = [name for name, parameter in parameters.items() if parameter.do_not_specialize_on_alignment]
        assert anywhere == ["query_start", "seq_lens", "block_table"]


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers_and_fits(name: str) -> None:
    """But for what a loop over items keeps from one to the next: a few words, and none of a loop over many tiles."""
    _, resources, dynamic = compiled(name)
    stack = re.search(r"STACK:(\d+)", resources)
    assert stack and int(stack[1]) <= 96
    for loop in [*tile_loops(name, 0, 12), *tile_loops(name, 0, 14)]:
        assert count(loop, "(LDL|STL)") <= (2 if "held" in name else 0)
    assert "LOCAL:0" in resources
    reported = re.search(r"SHARED:(\d+)", resources)
    assert reported and int(reported[1]) % 1024 == 0  # where Triton's tiles, swizzled by address, begin
    assert 48 * 1024 < dynamic <= 227 * 1024 - (int(reported[1]) - 1024)


@compiled_only
@pytest.mark.parametrize("name", KERNELS)
def test_no_product_waits_for_another(name: str) -> None:
    """Products with keys, of biases and with values are all issued before the first wait, and no barrier is met."""
    near = tile_loops(name, 0, 14)
    assert len(near) in (4, 6) and not any(count(loop, "BAR") for loop in near)
    for loop in near:
        steps = re.findall(r"HGMMA\.64x(\d+)x16|(DEPBAR\.LE gsb0, 0x\d)", "\n".join(loop))
        assert [a or b for a, b in steps] == ["64"] * 10 + ["128"] * 4 + [f"DEPBAR.LE gsb0, 0x{n}" for n in (1, 0)]
        assert count(loop, "STS") == 16 and count(loop, "LDS") == 16  # the ring, and nothing else
        held = re.findall(r"HGMMA\.64x64x16\S* R\d+, R\d+, gdesc", "\n".join(loop))
        assert len(held) == (10 if "held" in name else 2)
    if "full" in name or name == "window larger than extent":
        assert len(tile_loops(name, 0, 12)) == 2


@compiled_only
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "window larger than extent"])
def test_loops_are_short_and_everything_moves_16_bytes_at_a_time(name: str) -> None:
    """Keys, values, profiles, queries, `r` and gates are copied 16 bytes at a time, results leave as such."""
    sass = compiled(name)[0]
    inner = [loop for loop in tile_loops(name, 0, 14) if count(loop, "FSEL") < 32]
    assert len(inner) == 2 and all(len(loop) < 480 for loop in inner)
    (fetching,) = tile_loops(name, 38, 0)  # gates, after the last tile, have left the loop
    assert len(fetching) < 260
    copies = re.findall(r"LDGSTS\.\S*", sass)
    assert len(copies) == 58 and set(copies) == {"LDGSTS.E.BYPASS.128"}
    assert set(re.findall(r"STG\S*", sass)) == {"STG.E.128"}
