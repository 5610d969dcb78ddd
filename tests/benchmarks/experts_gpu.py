"""Speed of the routed experts on a GPU: the whole sublayer, its parts, vLLM's own way, and other shapes of its kernels.

    python -m tests.benchmarks.experts_gpu [--formats nvfp4,mxfp8] [--rows 1,8,32,8192] [--sweep]
    python -m tests.benchmarks.experts_gpu --wgmma [--tiles 4,1]      products of 8192 rows, against Marlin's

One layer of Inkling 2 Small (384 experts of 2304, hidden 4608) with dummy weights. A time is the median over replays of
a CUDA graph, per call; inputs take turns in it, so that experts come from memory and not from the L2 cache. The bound
is the bytes of the experts that a step touches (for many tokens its operations) over 4,244 GB/s (790 TFLOP/s). vLLM's
own way is `fused_marlin_moe` with its activation and torch's sum, after the same router.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe

from inkling_rl.formats import ExpertFormat
from rollout.kernels.grouped_product import TILES as WGMMA_TILES
from rollout.kernels.grouped_product import Tile as WgmmaTile
from rollout.kernels.grouped_product import grouped_product, tile_for
from rollout.kernels.triton_moe_align import block_size
from rollout.kernels.triton_moe_sum import weighted_sum
from rollout.kernels.triton_router import route
from rollout.plugin import marlin_experts
from rollout.plugin.experts import SparseMoe
from rollout.plugin.marlin_experts import WEIGHT_TYPES, MarlinExperts, Tile, blocks_of, standing
from tests.gpu.expert_cases import dummy_moe, inputs, kernels, relative_error
from tests.gpu.wgmma_ahead import compile_products, of_layer

SIZE = (384, 8, 4608, 2304)
BYTES_PER_US, OPERATIONS_PER_US = 4244e3, 790e6
# Thread blocks of 128 (64 x 128, 128 x 64) or 256 threads, of 128 registers for few rows: four or two are resident.
TILES = (
    Tile(), Tile(64, 128, 2), Tile(64, 128, 3), Tile(64, 128, 4), Tile(128, 64, 3), Tile(128, 64, 4), Tile(128, 128, 1),
    Tile(128, 128, 2), Tile(64, 256, 1),
)  # fmt: skip
Runs = Sequence[Callable[[], object]]


def microseconds(runs: Runs, calls: int, replays: int = 9) -> float:
    """Per call, out of a captured graph in which `calls` of them follow each other, inputs in turn."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            runs[call % len(runs)]()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * sorted(times[2:])[replays // 2] / calls


class Step:
    """What goes in and out of every part for one input."""

    def __init__(self, moe: SparseMoe, rows: int, seed: int) -> None:
        assert isinstance(moe.experts, MarlinExperts)
        self.moe, self.experts, shape = moe, moe.experts, moe.shape
        self.x = inputs(rows, moe, torch.bfloat16, seed)
        gate = moe.gate.weight, moe.gate.e_score_correction_bias
        self.route = partial(route, self.x, *gate, shape.experts_per_token, shape.route_scale)
        self.weights, self.chosen = self.route()
        self.top_k, self.pairs = self.chosen.shape[1], self.chosen.numel()
        self.constants = standing(self.x.device, self.top_k)
        self.size = block_size(self.pairs, shape.num_experts)
        new = lambda width: torch.empty(self.pairs, width, dtype=torch.bfloat16, device="cuda")
        self.gate_up, self.hidden, self.down = new(2 * SIZE[3]), new(SIZE[3]), new(SIZE[2])
        self.sort()
        for part in (self.first, self.activate, self.second):
            part()

    def sort(self) -> None:
        experts, count = self.experts, self.moe.shape.num_experts
        self.blocks = blocks_of(self.chosen, count, self.size, self.constants, experts.align)

    def first(self) -> None:
        self.experts._product(
            self.x, self.gate_up, "w13_weight", self.top_k, self.size, self.blocks, self.weights, self.constants.locks
        )

    def activate(self) -> None:
        self.experts.activation(self.gate_up, *self.experts.caps, self.hidden)

    def second(self) -> None:
        self.experts._product(
            self.hidden, self.down, "w2_weight", 1, self.size, self.blocks, self.weights, self.constants.locks
        )

    def add(self) -> torch.Tensor:
        return weighted_sum(self.down.view(-1, self.top_k, SIZE[2]), self.weights)

    def vllm(self) -> torch.Tensor:
        weights, chosen = self.route()
        experts = self.experts
        scales = {}
        if experts.expert_format == "nvfp4":
            scales = {f"global_scale{i}": experts.get_parameter(f"w{m}_weight_scale_2") for i, m in ((1, 13), (2, 2))}
        return fused_marlin_moe(
            self.x, experts.w13_weight, experts.w2_weight, None, None, experts.w13_weight_scale,
            experts.w2_weight_scale, weights, chosen, WEIGHT_TYPES[experts.expert_format].id,
            activation=MoEActivation.SITU, workspace=self.constants.locks, **scales,
            activation_config=ApplyMoEActivationConfig(
                activation_situ_beta=experts.caps[0], activation_situ_linear_beta=experts.caps[1]
            ),
        )  # fmt: skip


def bound_us(steps: Sequence[Step]) -> float:
    """Of the experts' weights that a step reads, or of its operations; the mean over the inputs."""
    layer = sum(p.nbytes for p in steps[0].experts.parameters()) / SIZE[0]
    touched = sum(len(step.chosen.unique()) for step in steps) / len(steps)
    return max(touched * layer / BYTES_PER_US, steps[0].pairs * 6 * SIZE[2] * SIZE[3] / OPERATIONS_PER_US)


def measure(moe: SparseMoe, rows: int, sweep: bool) -> None:
    count = 8 if rows <= 64 else 1
    calls = 2 * count if rows <= 1024 else 2
    steps = [Step(moe, rows, seed) for seed in range(count)]
    time = lambda part: microseconds([getattr(step, part) for step in steps], calls)
    whole = microseconds([partial(moe, step.x) for step in steps], calls)
    bound, vllm = bound_us(steps), time("vllm")
    parts = {part: time(part) for part in ("route", "sort", "first", "activate", "second", "add")}
    error = relative_error(moe(steps[0].x), steps[0].vllm())
    name = f"{steps[0].experts.expert_format:5} {rows:5} rows"
    print(
        f"{name}: {whole:8.1f} us, bound {bound:7.1f} ({bound / whole:4.0%}), vLLM {vllm:8.1f}, differ {error:.0e}; "
        + ", ".join(f"{part} {value:.1f}" for part, value in parts.items()),
        flush=True,
    )
    if sweep:
        sweep_tiles(steps, parts, calls, name)


def sweep_tiles(steps: Sequence[Step], parts: dict[str, float], calls: int, name: str) -> None:
    """The products with other tiles and blocks; times beside Marlin's own choice."""
    experts, standard = steps[0].experts, steps[0].size
    for part, matrix in (("first", "w13_weight"), ("second", "w2_weight")):
        found: list[tuple[float, str]] = []
        for size in marlin_experts.BLOCK_SIZES if len(steps) == 1 else (8, 16):
            for tile in TILES:
                experts.tiles[matrix] = tile
                for step in steps:
                    step.size = size
                    # One token's standing blocks have eight rows.
                    step.sort()
                try:
                    found.append((microseconds([getattr(s, part) for s in steps], calls, 5), f"{size}{tuple(tile)}"))
                except RuntimeError:  # no such kernel, or too much shared memory
                    torch.cuda.synchronize()
        experts.tiles[matrix] = Tile()
        for step in steps:
            step.size = standard
            step.sort()
        best = ", ".join(f"{label} {value:.1f}" for value, label in sorted(found)[:4])
        print(f"{name} {part}: {parts[part]:.1f} as chosen; {best}", flush=True)


def measure_wgmma(moe: SparseMoe, rows: int, tiles: Sequence[WgmmaTile]) -> None:
    """Each product by Marlin and by `grouped_product`, on the same input; rates count no padding."""
    step, experts = Step(moe, rows, 0), moe.experts
    assert isinstance(experts, MarlinExperts)
    operations = {"first": step.pairs * 4 * SIZE[2] * SIZE[3], "second": step.pairs * 2 * SIZE[2] * SIZE[3]}
    cases = {
        "first": ("w13_weight", step.x, step.gate_up, step.top_k), "second": ("w2_weight", step.hidden, step.down, 1),
    }  # fmt: skip
    show = lambda label, part, time, rest="": print(
        f"{experts.expert_format:5} {rows} rows {part:6} {label}: {time:8.1f} us, {operations[part] / time / 1e6:4.0f} "
        f"TFLOP/s{rest}",
        flush=True,
    )
    for part, (matrix, x, wanted, top_k) in cases.items():
        show("Marlin      ", part, microseconds([getattr(step, part)], 2, 3))
        for tile in tiles:
            blocks = blocks_of(step.chosen, SIZE[0], tile.tokens, step.constants, experts.align)
            out = torch.empty_like(wanted)
            run = partial(grouped_product, x, *experts._matrix(matrix), out, blocks, tile, top_k, experts.expert_format)
            time = microseconds([run], 3, 5)
            padding = int(blocks.num_rows) / step.pairs - 1
            show(f"wgmma {tile.tokens:3}   ", part, time,
                 f", padding {padding:.0%}, differ {relative_error(out, wanted):.0e}")  # fmt: skip
    times = []
    for least in (None, 1):
        moe.use(kernels(min_pairs=least))
        times.append(microseconds([partial(moe, step.x)], 2, 3))
    print(
        f"{experts.expert_format:5} {rows} rows sublayer: Marlin {times[0]:.1f} us, wgmma {times[1]:.1f} us", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="nvfp4,mxfp8")
    parser.add_argument("--rows", default="1,8,32,8192")
    parser.add_argument("--sweep", action="store_true", help="also other tiles of Marlin's kernels")
    parser.add_argument("--wgmma", action="store_true", help="the products of 8192 rows alone")
    parser.add_argument("--tiles", help="numbers of grouped_product's tiles, else the one that it chooses")
    arguments = parser.parse_args()
    formats: list[ExpertFormat] = arguments.formats.split(",")
    numbers = map(int, arguments.tiles.split(",")) if arguments.tiles else ()
    tiles = [WGMMA_TILES[n] for n in numbers] or [tile_for(8192 * SIZE[1], SIZE[0])]
    if arguments.wgmma:
        sizes = SIZE[2], SIZE[3], SIZE[1]
        compile_products([p for name in formats for tile in tiles for p in of_layer(name, *sizes, tile)])
    for expert_format in formats:
        moe = dummy_moe(expert_format, SIZE, torch.bfloat16)
        if arguments.wgmma:
            measure_wgmma(moe, 8192, tiles)
            del moe
            torch.cuda.empty_cache()
            continue
        for rows in map(int, arguments.rows.split(",")):
            measure(moe, rows, arguments.sweep)
        del moe
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
