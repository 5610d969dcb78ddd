"""Products of few rows on a GPU: one launch of ours against what the engine runs without it, in the same run.

    python -m tests.benchmarks.linear_gpu [--rows 1,4,8,16,32] [--no-sweep]

At Inkling 2 Small's shapes: all projections of a sliding and of a full attention sublayer, its output, the logits. A
time is per call, the median over replays of a CUDA graph, with weights that take turns so that the L2 cache holds none
of them. The bound is the bytes of weights and activations over the rate of a copy. Alternatives are torch's products
with `triton_linear.project` and `triton_softcap`. Errors are against float64, of one call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
import triton

from rollout.kernels import triton_linear, triton_skinny, triton_softcap
from rollout.kernels.compile_ahead import compile_ahead
from rollout.kernels.triton_skinny import Tile
from tests.benchmarks.conv_mix_gpu import copy_bandwidth, microseconds

BF16 = torch.bfloat16
HIDDEN, WIDTH, OTHERS, KEYS, SINKS, TAPS = 4608, 6144, 15104, 1024, 48, 32
VOCABULARY, PADDED = 200_058, 201_024
TURNS = {"sliding": 4, "full": 4, "output": 8, "logits": 1}

# Beside the one in use: up to 8 rows, up to 16, up to 32.
TILES = {
    ("sliding", 8): (Tile(64, 128, 4, 4), Tile(64, 256, 3, 4), Tile(128, 64, 5, 4)),
    ("output", 8): (
        Tile(32, 256, 4, 4), Tile(32, 256, 6, 4), Tile(32, 128, 8, 4), Tile(16, 256, 6, 2), Tile(64, 128, 8, 4),
    ),
    ("logits", 8): (Tile(64, 128, 4, 4), Tile(64, 128, 6, 4), Tile(64, 256, 3, 4), Tile(32, 256, 4, 4)),
    ("sliding", 16): (Tile(64, 128, 4, 4), Tile(128, 64, 5, 4)),
    ("output", 16): (Tile(32, 256, 4, 4), Tile(16, 256, 6, 2), Tile(64, 128, 8, 4)),
    ("logits", 16): (Tile(64, 128, 4, 4), Tile(128, 64, 5, 4)),
    ("sliding", 32): (Tile(128, 64, 5, 4),),
    ("output", 32): (Tile(32, 256, 4, 4), Tile(64, 128, 6, 4)),
    ("logits", 32): (Tile(128, 64, 5, 4),),
}  # fmt: skip
SWEPT = (1, 16, 32)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, or the head's; what a product does not have is None."""

    main: torch.Tensor
    keys_values: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    taps: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in (self.main, self.keys_values, self.sinks, self.taps) if w is not None)


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype) / shape[-1] ** 0.5


def weights(kind: str) -> Weights:
    if kind == "logits":
        return Weights(normal(VOCABULARY, HIDDEN))
    if kind == "output":
        return Weights(normal(HIDDEN, WIDTH))
    sinks = normal(SINKS, HIDDEN, dtype=torch.float32)
    if kind == "sliding":
        return Weights(normal(OTHERS, HIDDEN), None, sinks)
    taps = normal(2, TAPS, HIDDEN, dtype=torch.float32)
    return Weights(normal(OTHERS - 2 * KEYS, HIDDEN), normal(2, KEYS, HIDDEN), sinks, taps)


def ours(kind: str, x: torch.Tensor, w: Weights, tile: Tile | None = None, early: bool = True) -> torch.Tensor:
    if kind == "logits":
        return triton_skinny.softcap_logits(x[0], w.main, 30.0, PADDED, tile, early)
    if kind == "output":
        return triton_skinny.linear(x[0], w.main, tile, early)
    assert w.sinks is not None
    return triton_skinny.attention_inputs(x, w.main, w.keys_values, w.sinks, w.taps, tile, early)[0]


def theirs(kind: str, x: torch.Tensor, w: Weights) -> torch.Tensor:
    """What the engine runs otherwise."""
    if kind == "logits":
        return triton_softcap.softcap_logits(x[0], w.main, 30.0, PADDED)
    out = F.linear(x[0], w.main)
    if w.keys_values is not None and w.taps is not None:
        torch.bmm(x[1:], w.keys_values.transpose(1, 2))
        triton_linear.project(x[1:], w.taps)
    if w.sinks is not None:
        triton_linear.project(x[:1], w.sinks[None])
    return out


def error(kind: str, x: torch.Tensor, w: Weights) -> float:
    """Of the first thousand outputs."""
    some = w.main[:1000].double()
    wanted = x[0].double() @ some.t()
    wanted = 30 * torch.tanh(wanted / 30) if kind == "logits" else wanted
    return float((ours(kind, x, w)[:, : len(some)].double() - wanted).norm() / wanted.norm())


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    rows: int
    run: Callable[[torch.Tensor, Weights], object]
    inputs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        columns = WIDTH if self.kind == "output" else HIDDEN
        x = torch.randn(3 if self.kind == "full" else 1, self.rows, columns, device="cuda").to(BF16)
        object.__setattr__(self, "inputs", x)


def table(all_rows: list[int], sweep: bool) -> Iterator[Row]:
    for kind in TURNS:
        for rows in all_rows:
            yield Row(f"{kind}", kind, rows, partial(ours, kind))
            yield Row("  torch", kind, rows, partial(theirs, kind))
            if not sweep or rows not in SWEPT or kind == "full":
                continue
            yield Row("  not early", kind, rows, partial(ours, kind, early=False))
            for tile in TILES[kind, max(8, triton.next_power_of_2(rows))]:
                yield Row(f"  {tuple(tile)}", kind, rows, partial(ours, kind, tile=tile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16,32", help="comma-separated, up to 32")
    parser.add_argument("--no-sweep", action="store_true", help="not other shapes of the programs")
    options, began = parser.parse_args(), time.monotonic()
    torch.manual_seed(0)
    rows = list(table([int(count) for count in options.rows.split(",")], not options.no_sweep))
    made = {kind: [weights(kind) for _ in range(turns)] for kind, turns in TURNS.items()}
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}; copy {bandwidth:,.0f} GB/s", flush=True)
    ready = time.monotonic()
    compile_ahead([partial(row.run, row.inputs, made[row.kind][0]) for row in rows])
    print(f"inputs {ready - began:.0f} s, compiled in {time.monotonic() - ready:.0f} s", flush=True)
    print(f"{'us':24}{'rows':>5}{'bound':>8}{'time':>8}{'of it':>6}{'error':>9}", flush=True)
    for row in rows:
        runs = [partial(row.run, row.inputs, w) for w in made[row.kind]]
        moved = made[row.kind][0].nbytes + row.inputs.nbytes + row.rows * (4 * PADDED if row.kind == "logits" else 0)
        try:
            taken = microseconds(runs, 4 if row.kind == "logits" else 16)
        except triton.runtime.errors.OutOfResources as problem:
            print(f"{row.name:24}{row.rows:5}  {problem}", flush=True)
            continue
        wrong = f"{error(row.kind, row.inputs, made[row.kind][0]):9.1e}" if row.name == row.kind else ""
        bound = moved / bandwidth / 1e3
        print(f"{row.name:24}{row.rows:5}{bound:8.1f}{taken:8.1f}{bound / taken:6.0%}{wrong}", flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
