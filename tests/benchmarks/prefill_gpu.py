"""Prefill attention at the release's sizes on a GPU, against FlexAttention, in the same run.

    python -m tests.benchmarks.prefill_gpu [--sweep] [--no-alternative] [--once NAME] [--variants [ROWS]]

Rows are as an engine has them, prepared, but for one. The first two are checked against float64. TFLOP/s count two
products of 128 channels for every key that a query sees, and nothing else: neither masked halves of tiles nor the bias.
A time is the median of many runs by device events, the L2 cache overwritten between them; the first two rows are
measured twice. Everything is compiled ahead, on all cores. FlexAttention gets keys and values without pages and the
table of biases ready made, and neither sink nor gate is in its time. "matrix" is the rate of a large bfloat16 matrix
product, measured here. Launch shapes are `Tiles` as they are written. `--once` is for a profiler.
`--variants` compares those of the specialized kernel only, each by replays of a captured graph, so that launches are
not in the time: milliseconds twice, TFLOP/s of the better, difference from the plain one; the rows named, separated by
semicolons, or most of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rollout.kernels import triton_prefill
from rollout.kernels.compile_ahead import compile_ahead
from rollout.kernels.prefill_tiles import Tiles
from tests.rollout.decode_cases import Case, Inputs, exact, make, relative_error

BF16 = torch.bfloat16
FULL = Case(
    step=((0, 8192),), heads=(48, 8), head_dim=128, extent=1024, page=128, q_clip=22.627417, dtype=BF16,
    proj_dtype=BF16, log_scaling=(0.1, 128000), prepared=True, device="cuda",
)  # fmt: skip
SLIDING = replace(FULL, window=1024, log_scaling=None, page=16, layers_per_page=5)
ROWS: dict[str, tuple[Case, float | None]] = {
    # name: case, TFLOP/s that we ask for
    "8K, window 1024": (SLIDING, 350),
    "8K, full": (FULL, 400),
    "8K, window 1024, raw": (replace(SLIDING, prepared=False), None),
    "8K, window 1024, pages of 64": (replace(SLIDING, page=64), None),
    "8K, full, pages of 32": (replace(FULL, page=32), None),
    "2K after 30K, window 1024": (replace(SLIDING, step=((30720, 2048),)), None),
    "2K after 30K, full": (replace(FULL, step=((30720, 2048),)), None),
    "16 prompts of 500, full": (replace(FULL, step=((0, 500),) * 16), None),
}
COMPARED = tuple(ROWS)[:2]
SPECIALIZED = Tiles(64, 2, 64, 12, 3, specialized=True)
SWEEP = (
    SPECIALIZED, SPECIALIZED._replace(stages=2), SPECIALIZED._replace(lazy=False),
    SPECIALIZED._replace(held=True, turns=True), Tiles(64, 2, 64, 8, 3), Tiles(32, 2, 64, 4, 2),
)  # fmt: skip
VARIANTS = {
    "plain": SPECIALIZED,
    "in turn": SPECIALIZED._replace(turns=True),
    "held": SPECIALIZED._replace(held=True),
    "held, in turn": SPECIALIZED._replace(held=True, turns=True),
}
VARIED = ("8K, window 1024", "8K, full", "2K after 30K, window 1024", "2K after 30K, full", "16 prompts of 500, full")
ALTERNATIVE_SECONDS = 60.0


def milliseconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=10, rep=80, return_mode="median"))


def matrix_rate() -> float:
    """TFLOP/s of a bfloat16 product of 8192 cubed on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def operations(case: Case) -> float:
    """Floating-point operations of scores and values for the keys that queries see."""
    pairs = 0
    for past, new in case.step:
        for p in range(past, past + new):
            pairs += min(p + 1, case.window or p + 1)
    return 4.0 * case.head_dim * case.heads[0] * pairs


def call(inputs: Inputs, tiles: Tiles | None = None) -> torch.Tensor:
    return triton_prefill.attention(*inputs.arguments(), out_dtype=BF16, tiles=tiles)


def flex(inputs: Inputs) -> Callable[[], object]:
    """FlexAttention on the same keys, values and queries of one prompt."""
    case = inputs.case
    num_heads, rows = case.heads[0], case.step[0][1]
    stored = inputs.keys[0].transpose(0, 1)[None]
    k, v = (x.contiguous() for x in stored.split(case.head_dim, dim=-1))
    q_dtype = inputs.q.dtype
    heads_first = lambda x, size: x.view(1, rows, num_heads, size).transpose(1, 2).contiguous()
    q, r = heads_first(inputs.q, case.head_dim), heads_first(inputs.r.to(q_dtype), 16)
    table = (r @ inputs.proj).contiguous()
    window = case.window or rows

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = i - j
        return s + torch.where(distance < case.extent, table[b, h, i, distance.clamp(0, case.extent - 1)], 0.0)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < window)

    blocks = create_block_mask(mask, None, None, rows, rows, device=inputs.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, return_lse=True)


def alternative(inputs: Inputs, deadline: float) -> str:
    """TFLOP/s, or why there are none."""
    if time.monotonic() > deadline:
        return "no time"
    try:
        torch._dynamo.reset()
        return f"{operations(inputs.case) / milliseconds(flex(inputs)) / 1e9:.0f}"
    except Exception as error:  # the other library's; the table goes on
        return type(error).__name__


def sweep(inputs: Inputs) -> str:
    results = []
    for tiles in SWEEP:
        try:
            results.append((milliseconds(partial(call, inputs, tiles)), tiles))
        except Exception as error:  # a shape that does not fit this device or does not compile
            print(f"{tuple(tiles)}: {type(error).__name__}")
    return "; ".join(f"{taken:.3f} ms {tuple(map(int, tiles))}" for taken, tiles in sorted(results))


def kernel_times(inputs: Inputs) -> str:
    """Microseconds of each kernel of one call, by the profiler."""
    call(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call(inputs)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if "kernel" in event.key]
    return ", ".join(f"{event.key} {event.device_time_total / event.count:.1f}" for event in events)


def replayed(run: Callable[[], object]) -> float:
    """Milliseconds of a captured call; kernels must have been compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def compiled(names: tuple[str, ...], shapes: tuple[Tiles | None, ...]) -> None:
    """Compile what the rows take: one position of each row's layer will do."""
    cases = dict.fromkeys(replace(ROWS[name][0], step=((0, 1),)) for name in names)
    compile_ahead([partial(call, inputs, tiles) for inputs in map(make, cases) for tiles in shapes])


def variants(names: tuple[str, ...], *, timed: bool) -> None:
    began = time.monotonic()
    compiled(names, tuple(VARIANTS.values()))
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for name in names:
        inputs = make(ROWS[name][0])
        expected = call(inputs, SPECIALIZED).double()
        runs = {variant: partial(call, inputs, tiles) for variant, tiles in VARIANTS.items()}
        errors = {variant: relative_error(run(), expected) for variant, run in runs.items()}
        times = [{variant: replayed(run) for variant, run in runs.items()} for _ in range(2 * timed)]
        for variant, error in errors.items():
            taken = [column[variant] for column in times]
            rate = f"{operations(inputs.case) / min(taken) / 1e9:6.0f}" if taken else ""
            shown = "".join(f"{one:8.3f}" for one in taken)
            print(f"{name:28}{variant:22}{shown}{rate}{error:10.1e}", flush=True)
        del inputs, runs, expected
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="every launch shape on the rows that have a target")
    parser.add_argument("--no-alternative", action="store_true")
    parser.add_argument("--once", choices=tuple(ROWS), help="compute this twice and nothing else")
    parser.add_argument("--variants", nargs="?", const=";".join(VARIED), help="rows, separated by semicolons")
    parser.add_argument("--compile", action="store_true", help="with --variants: no times, only values")
    arguments = parser.parse_args()
    if arguments.variants:
        return variants(tuple(arguments.variants.split(";")), timed=not arguments.compile)
    if arguments.once:
        inputs = make(ROWS[arguments.once][0])
        call(inputs), call(inputs)
        return torch.cuda.synchronize()
    began = time.monotonic()
    compiled(tuple(ROWS), (None,))
    if arguments.sweep:
        compiled(COMPARED, SWEEP)
    rate = matrix_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"matrix: {rate:.0f} TFLOP/s", flush=True)
    print(f"{'work':32}{'ms':>8}{'again':>8}{'TFLOP/s':>9}{'of rate':>9}{'wanted':>8}{'error':>10}{'instead':>9}")
    notes = []
    for name, (case, wanted) in ROWS.items():
        inputs = make(case)
        run = partial(call, inputs)
        error = relative_error(run(), exact(inputs)) if name in COMPARED else None
        assert error is None or error < 1e-2, (name, error)
        taken = milliseconds(run)
        again = f"{milliseconds(run):.3f}" if name in COMPARED else ""
        got = operations(case) / taken / 1e9
        compare = name in COMPARED and not arguments.no_alternative
        instead = alternative(inputs, began + ALTERNATIVE_SECONDS) if compare else ""
        shown = "" if error is None else f"{error:.1e}"
        print(
            f"{name:32}{taken:8.3f}{again:>8}{got:9.0f}{100 * got / rate:8.0f}%{wanted or '':>8}{shown:>10}"
            f"{instead:>9}",
            flush=True,
        )
        if name in COMPARED:
            notes.append(f"{name}: {kernel_times(inputs)}")
            if arguments.sweep:
                notes.append(f"{name}, launch shapes: {sweep(inputs)}")
        del inputs, run
        torch.cuda.empty_cache()
    print("\n".join(notes))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
