"""Speed of the fused kernels around attention on a GPU, against torch.compile of the same arithmetic in the same run.

    python -m tests.benchmarks.conv_mix_gpu [--sweep] [--only conv_mix,preparation,router,activation]

At Inkling 2 Small's shapes. First every kernel is checked against its reference. Bytes are the least that the work must
move: each activation read once, each output written once. Many rows: median by device events, the L2 cache overwritten
in between. Few rows: a CUDA graph of many launches, divided by their number, as an engine's decode step would run them.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from rollout.kernels import composed, triton_activation, triton_router
from rollout.kernels.triton_conv_mix import TILES, Tile, conv_mix
from rollout.kernels.triton_preparation import prepare
from rollout.kernels.triton_taps import tap_sources
from tests.rollout import around_attention_cases as cases

HIDDEN, EXPERTS, TOP_K, WIDTH = 4608, 384, 8, 2304
HEADS, KV_HEADS, DIM, REL_DIM = 48, 8, 128, 16
FEW = 256
"""Up to so many rows are timed in a graph."""

TILE_SWEEP = {
    1: (
        Tile(512, 4, 1, False), Tile(512, 4, 2, True, 168), Tile(512, 4, 1, True, 128), Tile(512, 4, 4, False),
        Tile(1024, 4, 1, False), Tile(1024, 4, 2, False), Tile(1024, 8, 1, False), Tile(1024, 8, 2, False),
        Tile(1024, 8, 4, False), Tile(1024, 16, 4, False), Tile(512, 8, 2, False),
    ),
    3: (
        Tile(512, 4, 1, True), Tile(512, 4, 2, True), Tile(512, 8, 1, True, 128), Tile(1024, 8, 1, True, 128),
        Tile(1024, 8, 2, True), Tile(1024, 16, 2, False),
    ),
}  # fmt: skip


class Work(NamedTuple):
    name: str
    rows: int
    bytes_moved: float
    run: Callable[[], object]
    instead: Callable[[], object] | None
    target_us: float | None = None


def microseconds(work: Work, run: Callable[[], object]) -> float:
    if work.rows > FEW:
        return 1e3 * float(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"))
    launches = 50
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read plus written."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.nbytes / float(milliseconds) / 1e6


def eager_mix(
    x: torch.Tensor, residual: torch.Tensor, taps: torch.Tensor, blocks: torch.Tensor, query: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What a user would write, for one sequence without a paged state."""
    rows = F.pad(x.float(), (0, 0, 3, 0))
    convolved = rows[3:] + sum(rows[3 - lag : rows.shape[0] - lag] * taps[3 - lag] for lag in range(4))
    running = (residual.float() + convolved / math.sqrt(5.0)).to(x.dtype)
    sources = torch.cat([blocks, running[None]]).float()
    sources = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + 1e-6)
    scores = (sources * query).sum(-1, keepdim=True) / math.sqrt(HIDDEN)
    mixed = (scores.softmax(0) * sources).sum(0)
    return running, (mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def conv_mix_works(sweep: bool) -> Iterator[Work]:
    compiled = torch.compile(eager_mix, dynamic=False)
    for rows, queries, num_blocks, target in ((8192, 1, 8, 280.0), (8, 1, 8, 6.0), (8192, 3, 8, None), (8, 3, 8, None),
                                              (1, 1, 8, None), (32, 1, 8, None), (256, 1, 8, None),
                                              (8192, 1, 2, None)):  # fmt: skip
        past = 0 if rows > FEW else 100
        step = ((0, rows),) if rows > FEW else ((past, 1),) * rows
        case = cases.ConvMixCase(step, HIDDEN, num_blocks, queries, True, torch.bfloat16, "cuda")
        sources, out = tap_sources(case.batch, rows, 4), torch.empty(queries, rows, HIDDEN, dtype=torch.bfloat16).cuda()
        running = torch.empty_like(case.x)

        def run(
            tile: Tile | None = None, slots: torch.Tensor = case.batch.slots, case: cases.ConvMixCase = case,
            sources: torch.Tensor = sources, running: torch.Tensor = running, out: torch.Tensor = out,
        ) -> None:  # fmt: skip
            conv_mix(
                case.x, case.state(case.pool), sources, slots, case.weight, case.residual, case.blocks, case.queries,
                case.weights, 1e-6, 1e-6, running, out, tile,
            )  # fmt: skip

        size = 2.0 * rows * HIDDEN
        instead = None
        if queries == 1 and num_blocks == 8 and rows in (8, 8192):
            arguments = (case.x, case.residual, case.weight[:, 0].t(), case.blocks, case.queries[0], case.weights[0])
            instead = lambda arguments=arguments: compiled(*arguments)
        name = f"conv_mix, {num_blocks + 1} sources, {queries} out"
        yield Work(name, rows, size * (num_blocks + 3 + 1 + queries), run, instead, target)
        if rows > FEW:
            # What is ever read again of a long chunk: the last positions before a page of attention ends.
            thinned = torch.where(torch.arange(rows, device="cuda") % 32 >= 29, case.batch.slots, -1)
            moved = size * (num_blocks + 3 + queries + 3 / 32)
            yield Work(f"{name}, state thinned", rows, moved, lambda: run(None, thinned), None, target)  # noqa: B023
        if sweep and num_blocks == 8 and rows in (8, 8192):
            for tile in TILE_SWEEP[queries]:
                if tile != TILES[queries]:
                    moved = size * (num_blocks + 4 + queries)
                    yield Work(f"  {tuple(tile)}", rows, moved, lambda tile=tile: run(tile), None)


def preparation_works(sweep: bool) -> Iterator[Work]:
    for rows, dynamic in ((8192, False), (8192, True), (8, False), (8, True)):
        step = ((0, rows),) if rows > FEW else ((100, 1),) * rows
        conv, paged = cases.make_batch(step, 4, "cuda"), cases.make_batch(step, 32, "cuda", seed=5)
        channels, make = KV_HEADS * DIM, lambda *shape: torch.randn(*shape, device="cuda")
        widths = (HEADS * DIM, channels, channels, HEADS * REL_DIM)
        q, k, v, r = make(rows, sum(widths)).bfloat16().split(widths, dim=1)
        taps = [make(4, channels) if dynamic else make(4, channels).t()[:, None] for _ in range(2)]
        own = [make(rows, KV_HEADS, 4) if dynamic else None for _ in range(2)]
        state = make(cases.num_blocks(step, 4), 4, 2 * channels + 2 * HIDDEN).bfloat16()[..., : 2 * channels]
        cache = make(cases.num_blocks(step, 32), KV_HEADS, 32, 2 * DIM).bfloat16()
        scales = make(HEADS, DIM), make(HEADS, REL_DIM)
        outs = torch.empty(rows, HEADS, DIM).bfloat16().cuda(), torch.empty(rows, HEADS, REL_DIM).bfloat16().cuda()
        positions, sources = torch.arange(rows, device="cuda"), tap_sources(conv, rows, 4)

        def run(elements: int = 2048, warps: int = 4, values: tuple = (q, k, v, r, *scales, *taps, *own, state, sources,
                conv.slots, cache, paged.slots, positions, 22.6, 8.0, 1e-6, (0.1, 128000) if dynamic else None,
                *outs)) -> None:  # fmt: skip
            prepare(*values, elements, warps)

        moved = 2.0 * rows * (2 * (HEADS * (DIM + REL_DIM)) + 6 * channels) + (
            8.0 * rows * KV_HEADS * 4 if dynamic else 0
        )
        compiled = torch.compile(composed.prepare_queries, dynamic=False)
        arguments = (q, scales[0], 22.6, positions, (0.1, 128000) if dynamic else None)
        name = f"preparation, {'full' if dynamic else 'sliding'} (instead: queries only)"
        yield Work(name, rows, moved, run, lambda c=compiled, a=arguments: c(*a))
        for elements, warps in ((1024, 2), (1024, 4), (4096, 8), (8192, 8)) if sweep and not dynamic else ():
            yield Work(f"  {(elements, warps)}", rows, moved, lambda e=elements, w=warps: run(e, w), None)


def router_works(sweep: bool) -> Iterator[Work]:
    router, bias = torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.02, torch.randn(EXPERTS, device="cuda") * 0.1

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), router))
        chosen = torch.topk(scores + bias, TOP_K, dim=-1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) * 8.0, chosen

    compiled = torch.compile(eager, dynamic=False)
    for rows in (8192, 1024, 32, 8):
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        moved = 2.0 * rows * HIDDEN + 4.0 * EXPERTS * HIDDEN
        run = lambda plan=None, x=x: triton_router.route(x, router, bias, TOP_K, 8.0, plan=plan)
        yield Work("router", rows, moved, run, lambda x=x: compiled(x))
        if sweep:
            spans = ("segment", "group") if rows <= 64 else ("group", "row")
            for tile in (triton_router.Tile(16, 64, 4, 4), triton_router.Tile(64, 64, 3, 4),
                         triton_router.Tile(64, 128, 3, 4), triton_router.Tile(128, 64, 3, 8)):  # fmt: skip
                for span in spans:
                    name = f"  {tuple(tile)}, {span}"
                    yield Work(name, rows, moved, lambda p=(tile, span), run=run: run(p), None)


def activation_works(sweep: bool) -> Iterator[Work]:
    compiled = torch.compile(lambda x: composed.expert_activation(x, 4.0, 25.0).to(x.dtype), dynamic=False)
    for rows in (8192 * TOP_K, 64):
        x = torch.randn(rows, 2 * WIDTH, device="cuda").bfloat16()
        run = lambda block=2048, warps=4, x=x: triton_activation.expert_activation(x, 4.0, 25.0, None, block, warps)
        yield Work("expert activation", rows, 6.0 * rows * WIDTH, run, lambda x=x: compiled(x))
        for block, warps in ((1024, 2), (1024, 4), (2048, 8), (4096, 8)) if sweep else ():
            name = f"  {(block, warps)}"
            yield Work(name, rows, 6.0 * rows * WIDTH, lambda b=block, w=warps, run=run: run(b, w), None)


def check() -> None:
    for queries in (1, 3):
        cases.check_conv_mix("cuda", torch.bfloat16, 8, queries, hidden=HIDDEN, tile=None)
        cases.check_conv_mix_batches("cuda", torch.bfloat16, HIDDEN, queries, TILES[queries])
    cases.check_conv_mix_chunks("cuda", torch.bfloat16, HIDDEN, None)
    for dynamic in (False, True):
        cases.check_prepare("cuda", torch.bfloat16, dynamic, heads=(HEADS, KV_HEADS), head_dim=DIM)
    cases.check_route("cuda", torch.bfloat16, 300, EXPERTS, TOP_K, HIDDEN)
    cases.check_route_plans("cuda", torch.bfloat16, 100, EXPERTS, HIDDEN)
    cases.check_activation("cuda", torch.bfloat16, 300, WIDTH)


WORKS = {
    "conv_mix": conv_mix_works,
    "preparation": preparation_works,
    "router": router_works,
    "activation": activation_works,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="other shapes of the programs too")
    parser.add_argument("--only", default=",".join(WORKS), help="comma-separated")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: all checks passed")
    print(f"copy {bandwidth:,.0f} GB/s; times in us; bound: bytes over the copy's rate")
    print(f"{'':50}{'rows':>7}{'bound':>9}{'time':>9}{'of bound':>9}{'instead':>9}{'target':>8}")
    for name in options.only.split(","):
        for work in WORKS[name](options.sweep):
            bound, time = work.bytes_moved / bandwidth / 1e3, microseconds(work, work.run)
            instead = f"{microseconds(work, work.instead):9.1f}" if work.instead else " " * 9
            target = f"{work.target_us:8.0f}" if work.target_us else ""
            print(f"{work.name:50}{work.rows:7}{bound:9.1f}{time:9.1f}{bound / time:9.0%}{instead}{target}", flush=True)


if __name__ == "__main__":
    main()
