"""Speed of the routed experts of few tokens on a GPU: `rollout.kernels.triton_moe_vector` against Marlin's path.

    python -m tests.benchmarks.experts_vector_gpu [--formats nvfp4,mxfp8] [--rows 1,2,4,8,16] [--sweep] [--alone]

One layer of Inkling 2 Small (384 experts of 2304, hidden 4608) with dummy weights, without its router. A time is the
median over replays of a CUDA graph, per call; eight inputs take turns in it, so that experts come from memory. The
bound is the bytes of the experts that a step touches over 4,283 GB/s, what a copy reaches. The error is that against
Marlin's path, which rounds more often. Other launches are compiled ahead, on all cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from inkling_rl.formats import ExpertFormat
from rollout.kernels import triton_moe_vector
from rollout.kernels.compile_ahead import compile_ahead
from rollout.kernels.triton_moe_vector import SHAPES, Shape
from rollout.kernels.triton_router import route
from rollout.plugin.experts import SparseMoe
from rollout.plugin.marlin_experts import MarlinExperts
from tests.benchmarks.experts_gpu import SIZE, microseconds
from tests.gpu.expert_cases import dummy_moe, inputs, relative_error

BYTES_PER_US = 4283e3
INPUTS = 8
# None of them spills registers.
UP: dict[ExpertFormat, tuple[Shape, ...]] = {
    "nvfp4": (Shape(4), Shape(4, 4, registers=136), Shape(2), Shape(4, registers=255)),
    "mxfp8": (Shape(4, 4), Shape(2, 4), Shape(8, 4), Shape(4, 4, registers=255)),
}
DOWN: dict[ExpertFormat, tuple[Shape, ...]] = {
    "nvfp4": (
        Shape(4, registers=96), Shape(4, 4, 2, 128), Shape(2, registers=96), Shape(2, 8, 2, 184),
        Shape(4, registers=128), Shape(4, 8, 2, 184),
    ),
    "mxfp8": (Shape(4, 4, registers=96), Shape(2, 4, registers=96), Shape(4, 4, 2), Shape(4, 4, registers=128)),
}  # fmt: skip


class Step(NamedTuple):
    """One input of the experts, and how to call them on it."""

    layer: MarlinExperts
    parameters: dict[str, torch.Tensor]
    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor

    def marlin(self) -> torch.Tensor:
        return self.layer(self.x, self.weights, self.chosen)

    def vector(self, up: Shape | None = None, down: Shape | None = None, early: bool = True) -> torch.Tensor:
        return triton_moe_vector.experts(
            self.x, self.weights, self.chosen, self.parameters, self.layer.caps, torch.empty_like(self.x), up, down,
            early,
        )  # fmt: skip


def make_step(moe: SparseMoe, rows: int, seed: int) -> Step:
    assert isinstance(moe.experts, MarlinExperts)
    x, shape = inputs(rows, moe, torch.bfloat16, seed), moe.shape
    gate = moe.gate.weight, moe.gate.e_score_correction_bias
    choice = route(x, *gate, shape.experts_per_token, shape.route_scale)
    return Step(moe.experts, {name: p.data for name, p in moe.experts.named_parameters()}, x, *choice)


def bound_us(steps: Sequence[Step]) -> float:
    expert = sum(tensor.nbytes for tensor in steps[0].parameters.values()) / SIZE[0]
    return sum(len(step.chosen.unique()) for step in steps) / len(steps) * expert / BYTES_PER_US


def timed(steps: Sequence[Step], call: Callable[[Step], object]) -> float:
    return microseconds([partial(call, step) for step in steps], 2 * len(steps))


def measure(steps: Sequence[Step], name: str, with_marlin: bool) -> None:
    bound, vector = bound_us(steps), timed(steps, Step.vector)
    apart = timed(steps, lambda step: step.vector(early=False))
    line = f"{name}: bound {bound:6.1f} us; vector {vector:6.1f} ({bound / vector:4.0%}), not early {apart:6.1f}"
    if with_marlin:
        error, marlin = relative_error(steps[0].vector(), steps[0].marlin()), timed(steps, Step.marlin)
        line += f"; Marlin {marlin:6.1f} ({bound / marlin:4.0%}); differ {error:.0e}"
    print(line, flush=True)


def sweep(steps: Sequence[Step], expert_format: ExpertFormat, name: str) -> None:
    """First kernel with the second as chosen, then the second with the first as chosen."""
    bits, bound = (4 if expert_format == "nvfp4" else 8), bound_us(steps)
    chosen = SHAPES[bits, "up"], SHAPES[bits, "down"]
    for part, pairs in (
        ("up", [(shape, chosen[1]) for shape in UP[expert_format]]),
        ("down", [(chosen[0], shape) for shape in DOWN[expert_format]]),
    ):
        times = []
        for pair in pairs:
            time = timed(steps, lambda step, pair=pair: step.vector(*pair))
            times.append(f"{tuple(pair[0 if part == 'up' else 1])} {time:.1f}")
        print(f"{name} {part}: bound {bound:.1f}; " + ", ".join(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="nvfp4,mxfp8")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--sweep", action="store_true", help="also other launches, for the first and last of rows")
    parser.add_argument("--alone", action="store_true", help="without Marlin, which a driver compiles for a minute")
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    formats: list[ExpertFormat] = arguments.formats.split(",")
    for expert_format in formats:
        moe = dummy_moe(expert_format, SIZE, torch.bfloat16)
        steps = {count: [make_step(moe, count, seed) for seed in range(INPUTS)] for count in rows}
        first = steps[rows[0]][0]
        calls = [partial(first.vector, early=early) for early in (True, False)]
        if arguments.sweep:
            calls += [partial(first.vector, up=up) for up in UP[expert_format]]
            calls += [partial(first.vector, down=down) for down in DOWN[expert_format]]
        compile_ahead(calls)
        for count in rows:
            measure(steps[count], f"{expert_format} {count:2} rows", not arguments.alone)
        for count in sorted({rows[0], rows[-1]}) if arguments.sweep else ():
            sweep(steps[count], expert_format, f"{expert_format} {count:2} rows")
        del moe, steps, first, calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
