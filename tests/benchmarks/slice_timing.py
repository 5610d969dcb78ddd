"""Clocks of the slice benchmark: of the host, of the device, of every kernel; and where figures are kept."""

from __future__ import annotations

import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import slice_bounds


class Report:
    """Figures by section, written whenever one ends, and what failed."""

    def __init__(self, folder: str | None, seconds: float) -> None:
        self.folder = Path(folder) if folder else None
        self.began = time.monotonic()
        self.seconds = seconds
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []

    def write(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "slice.json").write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")

    def attempt(self, section: str, work: Callable[[dict[str, Any]], None]) -> None:
        """Let a section fill in its figures unless time is up; its failure does not take the others with it."""
        began = time.monotonic()
        if began - self.began > self.seconds:
            self.failed.append(f"{section}: no time")
            return
        try:
            work(self.figures.setdefault(section, {}))
        except Exception as error:
            traceback.print_exc(limit=-6)
            self.failed.append(f"{section}: {type(error).__name__}: {str(error)[:200]}")
        self.write()
        print(f"[{section}: {time.monotonic() - began:.1f} s]", flush=True)


class Clock:
    """Seconds of named functions, inclusive."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        function = getattr(owner, attribute, None)
        if function is None:
            self.seconds[f"{name} (not found)"] = 0.0
            return

        # vLLM reads the signature of a model's constructor.
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                result = function(*arguments, **options)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                return result

        setattr(owner, attribute, timed)


def median_us(run: Callable[[], object], repeats: int) -> float:
    """Microseconds of device time per call, called back to back."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1000 * sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def measure_rates() -> dict[str, float]:
    """Bytes per microsecond of a copy of 4 GiB and operations per microsecond of a large bfloat16 product."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / max(median_us(partial(target.copy_, source), 7) for _ in range(2))
    a, b = source[: 1 << 27].bfloat16().view(2, 8192, 8192)
    out = torch.empty_like(a)
    product = partial(torch.mm, a, b, out=out)
    median_us(product, 5)
    rate = 2 * 8192**3 / median_us(product, 25)
    # The engine measures free memory.
    del source, target, a, b, out, product
    torch.cuda.empty_cache()
    return {"bytes_per_us": bandwidth, "operations_per_us": rate}


def timeline(
    run: Callable[[], object], num_layers: int, replays: int = 5
) -> tuple[dict[str, float], dict[str, int], list[tuple[str, str, int, float]]]:
    """Microseconds and kernels per part of a step, and every kernel as (part, name, launches, microseconds).

    Of kernels that overlap, the later one counts from the end of the earlier one.
    """
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(replays):
            run()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_device = [event for event in on_device if not getattr(event, "is_user_annotation", False)]
    on_device.sort(key=lambda event: event.time_range.start)
    pieces = slice_bounds.split_steps([event.name for event in on_device], replays)
    names = [on_device[i].name for i in pieces[0]]
    alone = slice_bounds.lengths_alone([(event.time_range.start, event.time_range.end) for event in on_device])
    times = dict.fromkeys(slice_bounds.PARTS, 0.0)
    launches = dict.fromkeys(slice_bounds.PARTS, 0)
    kernels: dict[tuple[str, str], list[float]] = {}
    for place, part in enumerate(slice_bounds.parts_of(names, num_layers)):
        lengths = sorted(alone[piece[place]] for piece in pieces)
        times[part] += lengths[replays // 2]
        launches[part] += 1
        kernels.setdefault((part, names[place][:120]), []).append(lengths[replays // 2])
    found = [(part, name, len(lengths), sum(lengths)) for (part, name), lengths in kernels.items()]
    return times, launches, sorted(found, key=lambda row: -row[3])
