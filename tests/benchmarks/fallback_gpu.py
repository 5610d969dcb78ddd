"""How much slower a GPU's kernels are as torch fallbacks, and how long their trial at the start takes.

    python -m tests.benchmarks.fallback_gpu

At Inkling 2 Small's shapes, on the inputs of the trial; attention on longer ones too. Times are the median of ten
calls on the host's clock with the device idle before and after, launches included, as a fallback runs outside of a
graph. What it prints belongs into `rollout.kernels.cuda.SLOWDOWNS`. Of the two kernels that take experts from Marlin it
has the trials only: tests.benchmarks.experts_gpu and experts_vector_gpu have them beside Marlin.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rollout.kernels import cuda, trials
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.expert_trials import EXPERT_TRIALS
from rollout.kernels.trials import TRIALS, Trial
from tests.gpu.test_cuda_kernels import SMALL

DEVICE = torch.device("cuda", 0)


def milliseconds(run: Callable[[], Any], calls: int = 10) -> float:
    run()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def longer() -> Iterator[tuple[str, Trial]]:
    """A decode step of 8 requests and a prompt, of 8,192 tokens each."""
    for kind in SMALL.attention:
        yield "decode", trials._attention(SMALL, kind, ((8191, 1),) * 8, {"max_queries": 1})
        yield "prefill", trials._attention(SMALL, kind, ((0, 8192),), {})


def try_experts() -> None:
    """Time and memory of a trial whose kernels must be compiled, and of one whose kernels are."""
    sizes = replace(SMALL, expert_formats=("mxfp8", "nvfp4"), least_pairs=48)
    for name in EXPERT_TRIALS:
        seconds = []
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            started = time.perf_counter()
            _, reason = cuda._try(name, DEVICE, sizes)
            seconds.append(time.perf_counter() - started)
        most, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        print(f"trial of {name}: {seconds[0]:.1f} s, again {seconds[1]:.1f} s, {most >> 20} MiB at most, {left} bytes "
              f"left, {reason or 'passed'}", flush=True)  # fmt: skip


def main() -> None:
    started = time.perf_counter()
    kernels = cuda.load(DEVICE, SMALL, strict=False)
    print(f"trial: {time.perf_counter() - started:.1f} s, fell back: {kernels.fell_back or 'none'}")
    started = time.perf_counter()
    cuda.load(DEVICE, replace(SMALL, up_cap=26.0), strict=False)
    print(f"trial again, all but one compiled: {time.perf_counter() - started:.1f} s")
    try_experts()
    print(f"{'kernel':14} {'trial':34} {'kernel ms':>10} {'torch ms':>10} {'ratio':>7}")
    calls = [(name, trial) for name, of in (TRIALS | DRAFT_TRIALS).items() for trial in of(SMALL)]
    for name, trial in [*calls, *((name, replace(trial, what=f"{trial.what}, 8K")) for name, trial in longer())]:
        given = trial.to(DEVICE)
        fast, slow = getattr(kernels, name), cuda._FALLBACKS[name]
        ours = milliseconds(lambda: trial.call(fast, given))  # noqa: B023 - called at once
        theirs = milliseconds(lambda: trial.call(slow, given))  # noqa: B023
        print(f"{name:14} {trial.what:34} {ours:10.3f} {theirs:10.3f} {theirs / ours:7.1f}", flush=True)


if __name__ == "__main__":
    main()
