"""Decode attention at the release's sizes on a GPU, against the bytes bound and FlexAttention, in the same run.

    python -m tests.benchmarks.decode_gpu [--sweep] [--all] [--alternative]

Every row is checked against float64 first, with --sweep for every launch shape. A time is the median over replays of a
captured graph, per call; several sets of pages take turns where one fits the L2 cache. The bound is bytes of keys and
values that the queries see over the bandwidth of memory, measured here. FlexAttention gets keys and values without
pages and the table of biases ready made, and neither sink nor gate is in its time.

Shapes: positions per tile, warps, stages, programs per multiprocessor. They are compiled ahead, by as many processes as
there are cores, into Triton's cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton

from rollout.kernels import triton_decode
from rollout.kernels.triton_decode import Tiles
from tests.rollout.decode_cases import Case, Inputs, exact, make, relative_error

BF16 = torch.bfloat16
FULL = Case(
    step=(), heads=(48, 8), head_dim=128, extent=1024, page=64, q_clip=22.627417, dtype=BF16, proj_dtype=BF16,
    log_scaling=(0.1, 128000), device="cuda",
)  # fmt: skip
SLIDING = replace(FULL, window=1024, log_scaling=None)
ROWS: dict[str, tuple[Case, float | None]] = {
    # name: case, microseconds that we ask for
    "decode, 100K, batch 1": (replace(FULL, step=((102399, 1),)), 130),
    "verify 8, 100K, batch 1": (replace(FULL, step=((102392, 8),)), 160),
    "decode, 32K, batch 8": (replace(FULL, step=((32767, 1),) * 8), 330),
    "sliding, batch 32": (replace(SLIDING, step=((5000, 1),) * 32), 50),
    "sliding, batch 32, 5 layers per page": (
        replace(SLIDING, step=((5000, 1),) * 32, page=8, layers_per_page=5), None,
    ),
    "sliding, batch 1": (replace(SLIDING, step=((5000, 1),)), None),
    "sliding, verify 8, batch 32": (replace(SLIDING, step=((5000, 8),) * 32), None),
    "decode, 1K, batch 1": (replace(FULL, step=((1023, 1),)), None),
    "decode, 1K, batch 32": (replace(FULL, step=((1023, 1),) * 32), None),
    "decode, one of 100K and 31 of 1K": (replace(FULL, step=((102399, 1), *[(1023, 1)] * 31)), None),
    "verify 4, 32K, batch 8": (replace(FULL, step=((32764, 4),) * 8), None),
}  # fmt: skip
ASKED = tuple(name for name, (_, wanted) in ROWS.items() if wanted)
SHAPES = {
    # query rows: shapes that fit a multiprocessor that many times
    16: (
        Tiles(64, 4, 4, 2), Tiles(64, 4, 3, 2), Tiles(32, 4, 4, 3), Tiles(32, 4, 3, 3), Tiles(32, 2, 4, 4),
        Tiles(32, 2, 3, 4), Tiles(16, 2, 6, 4), Tiles(16, 2, 4, 5), Tiles(16, 1, 3, 8), Tiles(16, 1, 4, 7),
        Tiles(16, 1, 3, 6), Tiles(64, 8, 4, 1),
    ),
    64: (
        Tiles(32, 4, 4, 2), Tiles(32, 4, 3, 2), Tiles(16, 4, 6, 2), Tiles(64, 4, 2, 1), Tiles(64, 4, 4, 1),
        Tiles(64, 8, 4, 1),
    ),
}  # fmt: skip
L2_BYTES = 60e6
ALTERNATIVE_SECONDS = 60.0


def microseconds(runs: list[Callable[[], object]], replays: int = 15) -> float:
    """Per call, out of a captured graph in which the calls follow each other."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 8 // len(runs))
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
    return 1000 * times[replays // 2] / (repeats * len(runs))


def bandwidth_of_memory() -> float:
    """GB/s: the better of a copy, bytes read plus written, and a sum, of 4 GiB."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / microseconds([lambda: target.copy_(source)], 5)
    return max(copied, source.nbytes / microseconds([source.sum], 5)) / 1e3


def visible_bytes(case: Case) -> int:
    """Bytes of keys and values that at least one query of a request sees."""
    positions = sum(min(past, case.window - 1) if case.window else past for past, _ in case.step)
    return 2 * case.head_dim * case.heads[1] * 2 * (positions + sum(new for _, new in case.step))


def input_sets(case: Case) -> list[Inputs]:
    count = max(1, min(8, round(3 * L2_BYTES / visible_bytes(case) + 0.5)))
    return [make(replace(case, seed=seed)) for seed in range(count)]


def call(inputs: Inputs, **options: Any) -> torch.Tensor:
    return triton_decode.attention(
        *inputs.arguments(), max_queries=inputs.case.max_queries, out_dtype=BF16, **options
    )  # fmt: skip


def measure(sets: list[Inputs], **options: Any) -> float:
    return microseconds([lambda inputs=inputs: call(inputs, **options) for inputs in sets])


def flex(inputs: Inputs) -> Callable[[], object]:
    """FlexAttention on the same keys, values and queries; requests are equally long."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # long to import

    case = inputs.case
    num_heads, kv_heads = case.heads
    batch, new, past = len(case.step), case.max_queries, case.step[0][0]
    stored = torch.stack(inputs.keys).transpose(1, 2)
    k, v = (x.contiguous() for x in stored.split(case.head_dim, dim=-1))
    heads_first = lambda x, size: x.view(batch, new, num_heads, size).transpose(1, 2)
    q = heads_first(inputs.q, case.head_dim).contiguous()
    table = (heads_first(inputs.r, 16) @ inputs.proj).contiguous()
    window = case.window or past + new

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = past + i - j
        return s + torch.where(distance < case.extent, table[b, h, i, distance.clamp(0, case.extent - 1)], 0.0)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (past + i >= j) & (past + i - j < window)

    blocks = create_block_mask(mask, None, None, new, past + new, device=inputs.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    assert num_heads % kv_heads == 0
    return lambda: compiled(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, return_lse=True)


def alternative(inputs: Inputs, deadline: float) -> str:
    if time.monotonic() > deadline:
        return "no time"
    try:
        torch._dynamo.reset()
        return f"{1000 * triton.testing.do_bench(flex(inputs), 10, 50, return_mode='median'):.0f}"
    except Exception as error:  # the other library's; the table goes on
        return type(error).__name__


def rows_of(case: Case) -> int:
    return max(16, triton.next_power_of_2(case.max_queries * case.heads[0] // case.heads[1]))


def compile_ahead(names: list[str], sweep: bool) -> int:
    """Fill Triton's cache; before this process has touched the device, because it forks. Returns the number of jobs."""
    jobs: dict[tuple[object, ...], tuple[Case, Tiles, bool]] = {}
    for name in names:
        case = ROWS[name][0]
        new, count, rows = case.max_queries, len(case.step), rows_of(case)
        few = case if case.window else replace(case, step=((1024 - new, new),) * count)
        shapes = (triton_decode.choose_tiles(rows, case.dtype), *(SHAPES.get(rows, ()) if sweep else ()))
        for tiles, early in product(shapes, (False, True)):
            jobs[case.window, case.page, new, count, tiles, early] = few, tiles, early
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        pool.map(_compile, jobs.values(), chunksize=1)
    return len(jobs)


def _compile(job: tuple[Case, Tiles, bool]) -> None:
    case, tiles, early = job
    try:
        call(make(case), tiles=tiles, early_merge=early)
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources:
        pass


def sweep(sets: list[Inputs], expected: torch.Tensor) -> list[str]:
    """The best five shapes and, of the best, what each kernel takes."""
    results = []
    for tiles in SHAPES[rows_of(sets[0].case)]:
        try:
            error = relative_error(call(sets[0], tiles=tiles), expected)
            results.append((measure(sets, tiles=tiles, early_merge=True), tiles, "" if error < 1e-2 else " WRONG"))
        except triton.runtime.errors.OutOfResources:
            continue
    results.sort()
    best = results[0][1]
    return [
        "early, best: " + "; ".join(f"{took:.1f} {tuple(tiles)}{wrong}" for took, tiles, wrong in results[:5]),
        f"early, others: {'; '.join(f'{took:.0f} {tuple(tiles)}{wrong}' for took, tiles, wrong in results[5:])}",
        f"{tuple(best)}: {kernel_times(sets[0], tiles=best, early_merge=False)}",
    ]


def kernel_times(inputs: Inputs, **options: Any) -> str:
    """Microseconds of each kernel of a call alone, by the profiler."""
    call(inputs, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(5):
            call(inputs, **options)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if "kernel" in event.key]
    return " + ".join(f"{event.key} {event.device_time_total / event.count:.1f}" for event in events)


def report(name: str, bandwidth: float, swept: bool, instead: Callable[[Inputs], str] | None) -> None:
    case, wanted = ROWS[name]
    sets = input_sets(case)
    expected = exact(sets[0])
    error = relative_error(call(sets[0]), expected)
    taken = measure(sets)
    bound = visible_bytes(case) / bandwidth / 1e3
    other = instead(sets[0]) if instead else ""
    print(f"{name:38}{taken:8.1f}{bound:8.1f}{100 * bound / taken:6.0f}%{wanted or '':>8}{error:10.1e}{other:>10}")
    shape = tuple(triton_decode.choose_tiles(rows_of(case), case.dtype))
    late = measure(sets, early_merge=False)
    print(f"    {shape}: {kernel_times(sets[0], early_merge=False)}; in a graph {late:.1f}, merge early {taken:.1f}")
    for line in sweep(sets, expected) if swept else ():
        print(f"    {line}", flush=True)
    assert error < 1e-2, (name, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="every launch shape on every row that has a target")
    parser.add_argument("--all", action="store_true", help="rows without a target, too")
    parser.add_argument("--alternative", action="store_true", help="FlexAttention, too: it compiles for long")
    arguments = parser.parse_args()
    began = time.monotonic()
    names = list(ROWS if arguments.all else ASKED)
    jobs = compile_ahead(names, arguments.sweep)
    print(f"{jobs} kernels compiled in {time.monotonic() - began:.0f} s")
    deadline = time.monotonic() + ALTERNATIVE_SECONDS
    instead = (lambda inputs: alternative(inputs, deadline)) if arguments.alternative else None
    bandwidth = bandwidth_of_memory()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"memory: {bandwidth:.0f} GB/s", flush=True)
    print(f"{'work':38}{'us':>8}{'bound':>8}{'of it':>7}{'wanted':>8}{'error':>10}{'instead':>10}")
    for name in names:
        asked = name in ASKED
        report(name, bandwidth, asked and arguments.sweep, instead if asked else None)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
