"""Speed of the fused kernels around attention on a GPU, against torch.compile of the same arithmetic in the same run.

    python -m tests.benchmarks.conv_mix_gpu [--sweep] [--no-alternative] [--only conv_mix,router,...]

At Inkling 2 Small's shapes. Few rows are launched early where the engine does so: what is timed is what a kernel adds
after the one before it, here itself.

Kernels are compiled first, all at once; then every row is checked against the reference and timed as it is printed; the
alternatives, which compile one after the other, come last. A time is the median over replays of a CUDA graph, per call.
The bound is the least bytes that the work must move (each activation read once, each output written once) over the rate
of a copy. Router weights take turns, for an engine's would not stay in the L2 cache.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton

from rollout.kernels import composed, reference, triton_activation, triton_router
from rollout.kernels.compile_ahead import compile_ahead
from rollout.kernels.triton_conv_mix import Tile, conv_mix
from rollout.kernels.triton_preparation import prepare
from rollout.kernels.triton_router import route
from rollout.kernels.triton_taps import tap_sources
from rollout.kernels.units import mixture_dtype
from tests.rollout import around_attention_cases as cases

BF16 = torch.bfloat16
HIDDEN, EXPERTS, TOP_K, WIDTH, PAGE = 4608, 384, 8, 2304, 32
HEADS, KV_HEADS, DIM, REL_DIM = 48, 8, 128, 16
FEW = 256
"""Up to so many rows are a decode step, with more they are one prompt."""
ALTERNATIVE_SECONDS = 75.0

# Those of one block and number of warps give the same bits.
MANY_TILES = {
    1: (Tile(512, 4, 2, False, 2, False), Tile(512, 4, 2, True, 2), Tile(512, 4, 1, False, 2), Tile(512, 4, 1, True, 3),
        Tile(512, 8, 2, False, 2)),
    3: (Tile(512, 4, 1, True, 2, False), Tile(512, 4, 2, True, 2)),
}  # fmt: skip
PREPARATION_SHAPES = ((1024, 2), (1024, 4), (4096, 8))
ACTIVATION_SHAPES = ((1024, 2), (1024, 4), (2048, 8), (4096, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    name: str
    rows: int
    bytes_moved: float
    runs: Sequence[Callable[[], object]]
    """The same work on inputs that take turns."""
    error: Callable[[], float] | None = None
    """Of the first run's outputs."""
    instead: Callable[[], Callable[[], object]] | None = None
    target: float | None = None


def microseconds(runs: Sequence[Callable[[], object]], calls: int, replays: int = 11) -> float:
    """Per call, out of a captured graph in which at least `calls` of them follow each other."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), max(1, calls // len(runs))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return 1e3 * times[replays // 2] / (repeats * len(runs))


def copy_bandwidth() -> float:
    """GB/s of a kernel that reads and writes 2 GiB each, bytes read plus written.

    Not of `copy_`: inside a graph that is the copy engine's, which is slower than the multiprocessors are.
    """
    source = torch.randn(1 << 30, device="cuda", dtype=BF16)
    target = torch.empty_like(source)
    return 2e-3 * source.nbytes / microseconds([lambda: torch.neg(source, out=target)], 4)


def step_of(rows: int) -> cases.Step:
    return ((0, rows),) if rows > FEW else ((100, 1),) * rows


def worst(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(cases.relative_error(got, expected) for got, expected in pairs)


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
    targets = {(8192, 1, 8): 280.0, (8, 1, 8): 6.0}
    for rows, queries, blocks in ((8192, 1, 8), (8, 1, 8), (8192, 3, 8), (8, 3, 8), (1, 1, 8), (32, 1, 8), (256, 1, 8),
                                  (8192, 1, 2)):  # fmt: skip
        case = cases.ConvMixCase(step_of(rows), HIDDEN, blocks, queries, True, BF16, "cuda")
        sources, running = tap_sources(case.batch, rows, 4), torch.empty_like(case.x)
        out, size = case.x.new_empty(queries, rows, HIDDEN), 2.0 * rows * HIDDEN

        def run(
            tile: Tile | None = None, slots: torch.Tensor = case.batch.slots, early: bool = True,
            case: cases.ConvMixCase = case, sources: torch.Tensor = sources, running: torch.Tensor = running,
            out: torch.Tensor = out,
        ) -> None:  # fmt: skip
            conv_mix(
                case.x, case.state(case.pool), sources, slots, case.weight, case.residual, case.blocks, case.queries,
                case.weights, 1e-6, 1e-6, running, out, tile, early,
            )  # fmt: skip

        def error(case: cases.ConvMixCase = case, running: torch.Tensor = running, out: torch.Tensor = out) -> float:
            state = case.state(case.pool)
            expected = reference.short_conv(case.x, state, case.batch, case.weight, residual_TC=case.residual)
            mixed = reference.mix_norm(case.blocks, running, case.queries, case.weights, 1e-6, 1e-6)
            return worst(iter(((running, expected), (out, mixed))))

        name, moved = f"conv_mix, {blocks + 1} sources, {queries} out", size * (blocks + 4 + queries)
        alike: dict[str, Any] = {"rows": rows, "bytes_moved": moved, "error": error}
        instead = partial(compiled_mix, case) if (rows, queries, blocks) in targets else None
        yield Work(name=name, runs=[run], instead=instead, target=targets.get((rows, queries, blocks)), **alike)
        if (rows, queries, blocks) == (8192, 1, 8):
            # What is ever read again of a long chunk: the last positions before a page of attention ends.
            thinned = torch.where(torch.arange(rows, device="cuda") % PAGE >= PAGE - 3, case.batch.slots, -1)
            moved -= size * (PAGE - 3) / PAGE
            yield Work(name="  state thinned", rows=rows, bytes_moved=moved, runs=[partial(run, None, thinned)])
        if sweep and rows in (1, 8):
            yield Work(name="  not early", runs=[partial(run, early=False)], **alike)
        if sweep and blocks == 8 and rows == 8192:
            for tile in MANY_TILES[queries]:
                yield Work(name=f"  {tuple(tile)}", runs=[partial(run, tile)], **alike)


def compiled_mix(case: cases.ConvMixCase) -> Callable[[], object]:
    compiled, taps = torch.compile(eager_mix, dynamic=False), case.weight[:, 0].t()
    return lambda: compiled(case.x, case.residual, taps, case.blocks, case.queries[0], case.weights[0])


def tap_works(sweep: bool) -> Iterator[Work]:
    for rows in (1, 8, 32, 8192):
        batch, out = cases.make_batch(step_of(rows), 4, "cuda"), torch.empty(rows, 3, dtype=torch.int64, device="cuda")
        error = lambda batch=batch, out=out, rows=rows: float((composed.tap_sources(batch, rows, 4) != out).sum())
        run = lambda batch=batch, out=out, rows=rows: tap_sources(batch, rows, 4, out)
        # Sources and slots, and of a request two starts, a length and up to three blocks.
        moved = 24.0 * rows + 8.0 * rows + 24.0 * batch.seq_lens.shape[0]
        yield Work(name="tap sources", rows=rows, bytes_moved=moved, runs=[run], error=error)


def preparation_works(sweep: bool) -> Iterator[Work]:
    for rows, dynamic in ((8192, False), (8192, True), (1, True), (8, True), (32, True)):
        step, scaling = step_of(rows), (0.1, 128000) if dynamic else None
        conv, paged = cases.make_batch(step, 4, "cuda"), cases.make_batch(step, PAGE, "cuda", seed=5)
        channels, make = KV_HEADS * DIM, lambda *shape: torch.randn(*shape, device="cuda")
        widths = (HEADS * DIM, channels, channels, HEADS * REL_DIM)
        q, k, v, r = make(rows, sum(widths)).to(BF16).split(widths, dim=1)
        taps = [make(4, channels) if dynamic else make(4, channels).t()[:, None] for _ in range(2)]
        own = [make(rows, KV_HEADS, 4) if dynamic else None for _ in range(2)]
        state = make(cases.num_blocks(step, 4), 4, 2 * channels + 2 * HIDDEN).to(BF16)[..., : 2 * channels]
        cache = make(cases.num_blocks(step, PAGE), KV_HEADS, PAGE, 2 * DIM).to(BF16)
        scales, positions = (make(HEADS, DIM), make(HEADS, REL_DIM)), torch.arange(rows, device="cuda")
        outs = [
            q.new_empty(rows, HEADS, size, dtype=dtype) for size, dtype in ((DIM, BF16), (REL_DIM, mixture_dtype(BF16)))
        ]
        run = partial(
            prepare, q, k, v, r, *scales, *taps, *own, state, tap_sources(conv, rows, 4), conv.slots, cache,
            paged.slots, positions, 22.6, 8.0, 1e-6, scaling, *outs,
        )  # fmt: skip
        wanted = (
            partial(composed.prepare_queries, q, scales[0], 22.6, positions, scaling),
            partial(composed.prepare_mixtures, r, scales[1], 8.0, positions, scaling),
        )
        # Keys and values go through the oracle of tests/gpu; here what is asked of the larger part.
        error = lambda outs=outs, wanted=wanted: worst(
            (out, prepared()) for out, prepared in zip(outs, wanted, strict=True)
        )
        moved = 4.0 * rows * (HEADS * (DIM + REL_DIM) + 3 * channels) + 8.0 * rows * KV_HEADS * 4 * dynamic
        name = f"preparation, {'full' if dynamic else 'sliding'}"
        yield Work(name=name, rows=rows, bytes_moved=moved, runs=[run], error=error)
        for shape in PREPARATION_SHAPES if sweep and rows == 8192 and not dynamic else ():
            yield Work(name=f"  {shape}", rows=rows, bytes_moved=moved, runs=[partial(run, *shape)], error=error)


def eager_route(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(F.linear(x.float(), router))
    chosen = torch.topk(scores + bias, TOP_K, dim=-1).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) * 8.0, chosen


def router_works(sweep: bool) -> Iterator[Work]:
    """Twelve weights are 85 MB, more than the L2 cache holds."""
    routers = [torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.02 for _ in range(12)]
    bias = torch.randn(EXPERTS, device="cuda") * 0.1
    for rows in (1, 8, 32, 1024, 8192):
        x = torch.randn(rows, HIDDEN, device="cuda").to(BF16)
        runs = [
            partial(route, x, router, bias, TOP_K, 8.0, constant=True) for router in routers[: 12 if rows <= FEW else 1]
        ]

        def error(x: torch.Tensor = x, **plan: tuple[triton_router.Tile, str]) -> float:
            return cases.relative_error(
                triton_router.logits(x, routers[0], **plan), x.double() @ routers[0].double().t()
            )

        moved = 2.0 * rows * HIDDEN + 4.0 * EXPERTS * HIDDEN + 8.0 * rows * TOP_K
        instead = lambda x=x: partial(torch.compile(eager_route, dynamic=False), x, routers[0], bias)
        instead = instead if rows in (8, 8192) else None
        yield Work(name="router", rows=rows, bytes_moved=moved, runs=runs, error=error, instead=instead)
        many = rows > FEW
        if sweep:
            late = [partial(run, constant=False) for run in runs]
            yield Work(name="  the sums not launched early", rows=rows, bytes_moved=moved, runs=late)
            sums = [partial(triton_router._logits, x, router, None) for router in routers[: len(runs)]]
            yield Work(name="  sums alone", rows=rows, bytes_moved=moved, runs=sums)
        for tokens, stages, span in (
            ((64, 3, "row"), (64, 3, "group")) if many and sweep else ((16, 4, "segment"),) if sweep else ()
        ):  # fmt: skip
            plan = (triton_router.Tile(tokens, stages, 4), span)
            yield Work(
                name=f"  {(tokens, stages, span)}", rows=rows, bytes_moved=moved,
                runs=[partial(run, plan=plan) for run in runs], error=partial(error, plan=plan),
            )  # fmt: skip


def activation_works(sweep: bool) -> Iterator[Work]:
    for rows in (8192 * TOP_K, 32 * TOP_K, 8 * TOP_K, TOP_K):
        x = torch.randn(rows, 2 * WIDTH, device="cuda", dtype=BF16)
        out, moved = x.new_empty(rows, WIDTH), 6.0 * rows * WIDTH
        error = lambda x=x, out=out: worst(
            (o, composed.expert_activation(part, 4.0, 25.0))
            for part, o in zip(x.split(8192), out.split(8192), strict=True)
        )
        run = partial(triton_activation.expert_activation, x, 4.0, 25.0, out)
        eager = lambda given: composed.expert_activation(given, 4.0, 25.0).to(given.dtype)
        instead = (lambda x=x, eager=eager: partial(torch.compile(eager, dynamic=False), x)) if rows > 8192 else None
        yield Work(name="activation", rows=rows, bytes_moved=moved, runs=[run], error=error, instead=instead)
        for shape in ACTIVATION_SHAPES if sweep and rows > 8192 else ():
            yield Work(name=f"  {shape}", rows=rows, bytes_moved=moved, runs=[partial(run, *shape)], error=error)


WORKS = {
    "conv_mix": conv_mix_works,
    "taps": tap_works,
    "preparation": preparation_works,
    "router": router_works,
    "activation": activation_works,
}


def measure(work: Work, bandwidth: float) -> float:
    try:
        taken = microseconds(work.runs, 4 if work.rows > FEW else 48)
    except triton.runtime.errors.OutOfResources as problem:
        print(f"{work.name:34}{work.rows:7}  {problem}", flush=True)
        return math.nan
    error = "" if work.error is None else f"{work.error():10.1e}"
    bound, target = work.bytes_moved / bandwidth / 1e3, work.target or ""
    print(f"{work.name:34}{work.rows:7}{bound:9.1f}{taken:9.1f}{bound / taken:6.0%}{target:>8}{error}", flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other shapes of the programs too")
    parser.add_argument("--no-alternative", action="store_true")
    parser.add_argument("--only", default=",".join(WORKS), help="comma-separated")
    options, began = parser.parse_args(), time.monotonic()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    nothing = torch.empty(8, device="cuda")
    floor = microseconds([lambda: nothing.fill_(1.0)], 48)
    print(f"copy {bandwidth:,.0f} GB/s; a launch of next to nothing in a graph {floor:.1f} us", flush=True)
    works = [work for name in options.only.split(",") for work in WORKS[name](options.sweep)]
    made = time.monotonic()
    compile_ahead([run for work in works for run in work.runs[:1]])
    print(f"inputs {made - began:.0f} s, compiled in {time.monotonic() - made:.0f} s", flush=True)
    print(f"{'us':34}{'rows':>7}{'bound':>9}{'time':>9}{'of it':>6}{'wanted':>8}{'error':>10}", flush=True)
    times = [measure(work, bandwidth) for work in works]
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    for work, taken in zip(works, times, strict=True):
        if work.instead is None or options.no_alternative or time.monotonic() - began > ALTERNATIVE_SECONDS:
            continue
        instead = microseconds([work.instead()], 4 if work.rows > FEW else 48)
        print(
            f"{work.name:34}{work.rows:7}{'torch.compile':>18}{instead:9.1f}, {instead / taken:.2f} times", flush=True
        )


if __name__ == "__main__":
    main()
