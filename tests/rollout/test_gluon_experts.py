"""Products with experts in Gluon without a GPU: values by a stand-in for the language, and machine code for sm_90.

On a device: tests/gpu/test_experts_wgmma.py.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from inkling_rl.formats import ExpertFormat, marlin  # noqa: E402
from rollout.kernels import cuda, gluon_experts, grouped_product  # noqa: E402
from rollout.kernels.grouped_product import TILES, Tile, tile_for  # noqa: E402
from rollout.kernels.triton_moe_align import Blocks  # noqa: E402
from tests.rollout import gluon_experts_on_torch  # noqa: E402
from tests.rollout.test_cuda_kernels import SIZES  # noqa: E402
from tests.rollout.test_triton_prefill import count, loops  # noqa: E402

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
GARBAGE = 1_000_000_007


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gluon_experts_on_torch.kernel()

    class Launcher:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, num_warps, **constants: kernel(*arguments, programs=grid[0], **constants)

    monkeypatch.setattr(grouped_product, "product_kernel", Launcher())
    monkeypatch.setattr(torch.cuda, "device_of", _NoDevice)


class _NoDevice:
    def __init__(self, tensor: torch.Tensor) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def blocks_for(counts: list[int], size: int) -> tuple[Blocks, torch.Tensor]:
    """Blocks of pairs in random order, with blocks that nobody may look at behind; and the expert of each pair."""
    pairs = sum(counts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    owner = owner[torch.randperm(pairs, generator=torch.Generator().manual_seed(pairs))]
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(len(counts)):
        own = (owner == expert).nonzero().flatten().tolist()
        filled = -(-len(own) // size) * size
        rows += own + [pairs] * (filled - len(own))
        experts += [expert] * (filled // size)
    used = torch.tensor([len(rows)], dtype=torch.int32)
    rows += [GARBAGE] * size
    experts += [GARBAGE]
    return Blocks(torch.tensor(rows, dtype=torch.int32), torch.tensor(experts, dtype=torch.int32), used), owner


def layer(expert_format: ExpertFormat, experts: int, hidden: int, width: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(hidden + width)
    shapes = {"w13": (experts, 2 * width, hidden), "w2": (experts, hidden, width)}
    weights = [torch.randn(*shape, generator=g) for shape in shapes.values()]
    # Scales that differ between blocks, by up to 2^5, and codes of every kind.
    for weight in weights:
        weight *= (
            2.0 ** torch.randint(-3, 3, (*weight.shape[:2], weight.shape[2] // 16), generator=g)
        ).repeat_interleave(16, -1)
    return marlin.from_weights(weights[0].bfloat16(), weights[1].bfloat16(), expert_format)


# Experts' pairs, hidden size, expert width, tile. Sizes of outputs are 128, 64 or 192 more than whole programs; blocks
# have tokens for both products, for the first or for the second alone.
CASES: dict[str, tuple[list[int], int, int, Tile]] = {
    "tiny": ([5, 0, 1, 66], 128, 64, TILES[0]),
    "two products": ([97, 96, 0, 3], 192, 128, TILES[1]),
    "odd sizes": ([0, 130, 1], 320, 192, TILES[2]),
    "whole programs": ([161, 4], 256, 128, TILES[3]),
    "largest": ([193, 0, 71], 192, 192, TILES[4]),
    "nobody": ([0, 1, 0], 128, 128, TILES[4]),
}


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, expert_format: ExpertFormat, on_torch: None) -> None:
    counts, hidden, width, tile = CASES[name]
    engine = layer(expert_format, len(counts), hidden, width)
    blocks, owner = blocks_for(counts, tile.tokens)
    pairs, g = len(owner), torch.Generator().manual_seed(1)
    padded = marlin.padded_width(width, hidden, expert_format)
    unused = padded - width
    for matrix, top_k in (("w13_weight", 3), ("w2_weight", 1)):
        size, inputs = (2 * padded, hidden) if top_k > 1 else (hidden, padded)
        x = torch.randn(-(-pairs // top_k), inputs, generator=g).bfloat16()
        out = torch.full((pairs, size), float("nan"), dtype=torch.bfloat16)
        grouped_product.grouped_product(
            x, engine[matrix], engine[f"{matrix}_scale"], engine.get(f"{matrix}_scale_2"), out, blocks, tile, top_k,
            expert_format,
        )  # fmt: skip
        weights = marlin.dequantize(engine, matrix, expert_format, width).double()
        if matrix == "w13_weight":  # gate and up alternate there; in the engine up rows follow gate rows
            weights = torch.cat([F.pad(weights[:, n::2], (0, 0, 0, unused)) for n in (0, 1)], 1)
        else:
            weights = F.pad(weights, (0, unused))
        exact = torch.einsum("ph,poh->po", x[torch.arange(pairs) // top_k].double(), weights[owner])
        error = (out.double() - exact).norm() / exact.norm()
        # One rounding to bfloat16: 2^-9 at most, and at most as much again where sums of float32 sit on an edge.
        assert error < 2**-9 and bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4 * exact.std()).all())


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_of_many_tokens(expert_format: ExpertFormat, dtype: torch.dtype, on_torch: None) -> None:
    """All of the engine's own way between router and sum, with the fallbacks of its other kernels."""
    from rollout.kernels import composed, fallback
    from rollout.plugin.marlin_experts import MarlinExperts, Standing
    from tests.rollout.test_marlin_experts import shape_of

    shape = shape_of([expert_format] * 6, n_routed_experts=6, num_experts_per_tok=3)
    experts = MarlinExperts(shape, expert_format)
    experts.align, experts.activation = fallback.align, fallback.expert_activation
    experts.weighted_sum, experts.grouped_product = fallback.weighted_sum, grouped_product.grouped_product
    engine = layer(expert_format, 6, shape.hidden_size, shape.expert_width)
    for key, tensor in engine.items():
        experts.get_parameter(key).data.copy_(tensor)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(150, shape.hidden_size, generator=g).to(dtype)
    chosen = torch.rand(150, 6, generator=g).topk(3).indices.sort(1).values.int()
    weights = torch.rand(150, 3, generator=g)
    nothing = torch.zeros(1, dtype=torch.int32)
    got = experts._many(x, weights, chosen, Standing(nothing, nothing, nothing))
    w13, w2 = (
        marlin.dequantize(engine, m, expert_format, shape.expert_width).float() for m in ("w13_weight", "w2_weight")
    )
    gate_up = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1)
    expected = torch.zeros(150, shape.hidden_size)
    for rank in range(3):
        own = chosen[:, rank].long()
        hidden = composed.expert_activation(torch.einsum("th,toh->to", x.float(), gate_up[own]), *experts.caps)
        expected += torch.einsum("ti,thi->th", hidden, w2[own]) * weights[:, rank, None]
    assert got.dtype == dtype and got.shape == x.shape
    assert (got.float() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("expert_format", FORMATS)
def test_the_trial_at_the_start(expert_format: ExpertFormat, on_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes; and a scale that is taken from the row beside it does not."""
    cpu = torch.device("cpu")
    sizes = replace(SIZES, expert_formats=(expert_format,), least_pairs=48, max_tokens=500)
    kernel, reason = cuda._try("grouped_product", cpu, sizes)
    assert kernel is grouped_product.grouped_product and reason is None
    launch = grouped_product.grouped_product
    monkeypatch.setattr(
        grouped_product, "grouped_product", lambda x, weight, scale, *rest: launch(x, weight, scale.roll(1, 2), *rest)
    )
    _, reason = cuda._try("grouped_product", cpu, sizes)
    assert reason is not None and "it computes something else, relative error" in reason


def test_tiles() -> None:
    assert tile_for(8192 * 8, 384) == Tile(128, 64)  # 171 each
    assert tile_for(4096 * 8, 384) == Tile(64, 32)  # 85 each
    assert tile_for(16384 * 8, 384).tokens == 192  # 341 each: two
    assert tile_for(48 * 16, 16).second == 64  # of which only the second product is computed
    assert tile_for(120 * 16, 16) == Tile(128, 32)


# From here on: what becomes of it for a Hopper GPU.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiled_only = pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
TYPES = {
    "x": "*bf16", "out": "*bf16", "words": "*i32", "scales": "*u8", "outer": "*fp32", "rows": "*i32",
    "experts": "*i32", "num_rows": "*i32",
}  # fmt: skip
KERNELS = [(expert_format, tile) for expert_format in FORMATS for tile in TILES]


@cache
def compiled(expert_format: ExpertFormat, tile: Tile) -> tuple[str, str, int]:
    """SASS, resource usage and dynamic shared memory for sm_90, of the release's first product."""
    kernel, (k, stages) = gluon_experts.product_kernel, grouped_product.STAGES[expert_format]
    constants = {
        "INPUTS": 4608, "SIZE": 4608, "TOP_K": 8, "BITS": marlin.BITS[expert_format], "FIRST": tile.first,
        "SECOND": tile.second, "K": k, "STAGES": stages, "REGISTERS": grouped_product.REGISTERS,
        "LOADER": grouped_product.LOADER,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*")},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert result.metadata.num_warps == 12
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sass, resources = run(TOOLS / "nvdisasm", "-c", file.name), run(TOOLS / "cuobjdump", "-res-usage", file.name)
    return sass, resources, result.metadata.shared


@compiled_only
@pytest.mark.parametrize(("expert_format", "tile"), KERNELS, ids=str)
def test_everything_stays_in_registers_and_fits(expert_format: ExpertFormat, tile: Tile) -> None:
    sass, resources, dynamic = compiled(expert_format, tile)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert "STACK:0" in resources and "LOCAL:0" in resources
    reported = re.search(r"SHARED:(\d+)", resources)
    assert reported and int(reported[1]) % 1024 == 0  # where Triton's tiles, swizzled by address, begin
    assert 48 * 1024 < dynamic <= 227 * 1024 - (int(reported[1]) - 1024)


@compiled_only
@pytest.mark.parametrize(("expert_format", "tile"), KERNELS, ids=str)
def test_products_run_while_the_next_weights_are_decoded(expert_format: ExpertFormat, tile: Tile) -> None:
    """Weights come from registers; all products of 16 columns are issued before the one wait, and no barrier is met."""
    sass, steps = compiled(expert_format, tile)[0], grouped_product.STAGES[expert_format][0] // 16
    per_step = 4 if tile.second else 2
    inner = [loop for loop in loops(sass) if count(loop, "HGMMA") == steps * per_step and len(loop) < 400]
    assert len(inner) == 2 and not any(count(loop, "BAR") for loop in inner)
    for loop in inner:
        text = "\n".join(loop)
        found = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16 R\d+, R\d+, gdesc|(DEPBAR\.LE gsb0, 0x\d)", text)
        sizes = [str(tile.first)] * 2 + [str(tile.second)] * 2
        assert [a or b for a, b in found] == [*sizes[:per_step], "DEPBAR.LE gsb0, 0x0"] * steps
        # 8 codes of NVFP4 in 19 instructions, 4 of MXFP8 in 11, and their scales; half of what the products take.
        assert len(loop) <= steps * 85 + 30
        assert count(loop, "LDS") == 2 * steps and count(loop, "STS") == 0


@compiled_only
@pytest.mark.parametrize("expert_format", FORMATS)
def test_memory_is_moved_in_wide_pieces(expert_format: ExpertFormat) -> None:
    sass = compiled(expert_format, TILES[-1])[0]
    assert set(re.findall(r"\b(STG[.\w]*)", sass)) == {"STG.E.128"}
    assert set(re.findall(r"\b(LDGSTS\.[.\w]*)", sass)) == {"LDGSTS.E.BYPASS.128"}
    assert "STSM.16.MT88.4" in sass  # outputs of a token side by side
