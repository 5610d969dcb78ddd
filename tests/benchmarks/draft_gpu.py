"""A draft's kernels at Inkling 2 Small's sizes on a GPU, against the bytes bound and torch, in the same run.

    python -m tests.benchmarks.draft_gpu [--sweep] [--flex]

Every row is checked against float64 or the torch function first. A time is the median over replays of a captured graph,
per call, with `early` off and on; several sets of inputs take turns where one fits the L2 cache. The bound is the bytes
that must be read and written over the bandwidth of a copy, measured here. What stands beside it, on the same inputs:

* attention: `scaled_dot_product_attention` on keys and values gathered beforehand into one tensor per request, without
  pages, so that gathering is not in its time; with --flex FlexAttention on the same (it compiles for long).
* norm with rotation, context into pages, the cell: eager torch in a captured graph, as one would write it.
* logits: `addmm` with float32 result where torch has it, else a product and a sum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from rollout.kernels import draft_fallback, triton_draft, triton_draft_head
from rollout.kernels.draft import Angles
from rollout.kernels.triton_decode import Tiles
from rollout.kernels.triton_draft_head import Tile
from tests.benchmarks.decode_gpu import L2_BYTES, bandwidth_of_memory, microseconds
from tests.rollout import draft_cases as cases
from tests.rollout.draft_cases import Case, Inputs, exact, make, relative_error

BF16 = torch.bfloat16
REQUESTS = (1, 8, 32)
CONTEXTS = (1024, 32768, 102400)
TILES = (
    Tiles(32, 4, 4, 2), Tiles(32, 4, 3, 2), Tiles(16, 4, 6, 2), Tiles(64, 4, 2, 1), Tiles(64, 4, 3, 1),
    Tiles(64, 8, 4, 1),
)  # fmt: skip
LOGIT_TILES = (
    Tile(64, 4, 4, 2), Tile(64, 4, 3, 2), Tile(64, 4, 2, 2), Tile(64, 4, 5, 1), Tile(32, 4, 5, 2), Tile(32, 4, 6, 2),
    Tile(64, 8, 3, 1), Tile(128, 8, 2, 1),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a draft; the release's unless said."""

    heads: tuple[int, int] = (48, 8)
    size: int = 128
    page: int = 64
    block: int = 7
    rank: int = 256
    hidden: int = 4608
    vocabulary: int = 201024
    device: str = "cuda"


class Work(NamedTuple):
    """One set of inputs: ours (which takes `early`), torch's, and the bytes of one call."""

    ours: Callable[..., Any]
    other: Callable[[], Any] | None
    num_bytes: int
    error: Callable[..., float]
    """Of ours, with options of its own, against `limit`."""

    limit: float


class Row(NamedTuple):
    """A row of the table, and a maker of its sets of inputs."""

    name: str
    make: Callable[[int], Work]
    shapes: tuple[Any, ...] = ()
    """To sweep, as the option `tiles` or `tile`."""


def rows(shape: Shape, contexts: tuple[int, ...] = CONTEXTS, requests: tuple[int, ...] = REQUESTS) -> Iterator[Row]:
    for context in contexts:
        for count in requests:
            of, name = (context,) * count, f"attention, {context:,}, batch {count}"
            yield Row(name, lambda seed, of=of: attention(shape, of, seed), TILES)
    skewed = (contexts[-1], *(contexts[0],) * (requests[-1] - 1))
    name = f"attention, one of {skewed[0]:,} and {len(skewed) - 1} of {contexts[0]:,}"
    yield Row(name, lambda seed: attention(shape, skewed, seed), TILES)
    for count in requests:
        yield Row(f"norm and rotation of queries, batch {count}", lambda seed, of=count: norm(shape, of, seed))
    for count in (*(8 * count for count in requests), 8192):
        yield Row(f"context of {count:,} rows", lambda seed, of=count: store(shape, of, seed))
    for count in (*requests, 256):
        yield Row(f"cell, batch {count}", lambda seed, of=count: cell(shape, of, seed))
    for count in (*requests, 64, 256):
        yield Row(f"logits, batch {count}", lambda seed, of=count: logits(shape, of, seed), LOGIT_TILES)


def attention(shape: Shape, lengths: tuple[int, ...], seed: int) -> Work:
    case = Case(
        lengths=lengths, heads=shape.heads, size=shape.size, page=shape.page, block=shape.block, dtype=BF16,
        device=shape.device, seed=seed,
    )  # fmt: skip
    inputs = make(case)
    positions, rows = sum(lengths), shape.block * len(lengths)
    num_bytes = 2 * shape.size * (2 * shape.heads[1] * (positions + rows) + 2 * shape.heads[0] * rows)
    ours = lambda **options: triton_draft.attention(*inputs.arguments(), **options)
    other = _attention_of_torch(inputs) if len(set(lengths)) == 1 else None
    return Work(ours, other, num_bytes, lambda **options: relative_error(ours(**options), exact(inputs)), 1e-2)


def gathered(inputs: Inputs) -> list[torch.Tensor]:
    """Queries, keys and values of requests that are equally long, [R, heads, rows or positions, D]."""
    case = inputs.case
    requests = len(case.lengths)
    rows = (inputs.q, inputs.k, inputs.v)
    q, *own = (x.unflatten(0, (requests, case.block)).transpose(1, 2).contiguous() for x in rows)
    past = torch.stack(inputs.context).transpose(1, 2).chunk(2, dim=-1)
    return [q, *(torch.cat(pair, dim=2) for pair in zip(past, own, strict=True))]


def _attention_of_torch(inputs: Inputs) -> Callable[[], Any]:
    q, k, v = gathered(inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flex(inputs: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import flex_attention  # long to import

    q, k, v = gathered(inputs)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=True)


def _turns(num_rows: int, shape: Shape) -> Angles:
    return cases.angles(torch.arange(num_rows, device=shape.device) + 100_000, shape.size)


def norm(shape: Shape, requests: int, seed: int) -> Work:
    draw, rows, width = cases.Draw(shape.device, seed), requests * shape.block, shape.heads[0] * shape.size
    x = draw(rows, width + 2 * shape.heads[1] * shape.size, dtype=BF16)[:, :width]
    arguments = (x, 1 + 0.2 * draw(shape.size), _turns(rows, shape), 1e-6)
    other = lambda: draft_fallback.norm_rotate(*arguments)
    ours = lambda **options: triton_draft.norm_rotate(*arguments, **options)
    return Work(ours, other, 4 * rows * width, lambda: relative_error(ours(), other().double()), 1e-2)


def store(shape: Shape, num_rows: int, seed: int) -> Work:
    """Into pages in order, as a prompt fills them."""
    draw, width = cases.Draw(shape.device, seed), 2 * shape.heads[1] * shape.size
    pages = torch.zeros(
        -(-num_rows // shape.page), shape.heads[1], shape.page, 2 * shape.size, dtype=BF16, device=shape.device
    )
    rows_TC, slots = draw(num_rows, width, dtype=BF16), torch.arange(num_rows, device=shape.device)
    arguments = (rows_TC, 1 + 0.2 * draw(shape.size), _turns(num_rows, shape), 1e-6, pages, slots)
    other = lambda: draft_fallback.store_context(*arguments)
    ours = lambda **options: triton_draft.store_context(*arguments, **options)

    def error() -> float:
        other()
        wanted = pages.double()
        pages.zero_()
        ours()
        return relative_error(pages, wanted)

    return Work(ours, other, 4 * num_rows * width, error, 1e-2)


def cell(shape: Shape, requests: int, seed: int) -> Work:
    draw, rank = cases.Draw(shape.device, seed), shape.rank
    w1 = draw(min(shape.vocabulary, 20_000), rank, dtype=BF16)
    joint = draw(3 * rank, 2 * rank + shape.hidden, dtype=BF16)[:, : 2 * rank] / rank**0.5
    tokens = torch.randint(0, len(w1), (requests,), device=shape.device, generator=draw.generator)
    found = torch.zeros(2, requests, rank, device=shape.device)
    prepared = draw(requests, shape.block, 3 * rank)[:, 1]
    arguments = (prepared, draw(requests, rank), tokens, w1, joint, *found)
    other = lambda: draft_fallback.rnn_step(*arguments)
    ours = lambda **options: triton_draft_head.rnn_step(*arguments, **options)

    def error() -> float:
        other()
        wanted = found.double()
        found.zero_()
        ours()
        return relative_error(found, wanted)

    return Work(ours, other, joint.numel() * 2 + requests * rank * (3 * 4 + 4 + 2 + 8), error, 1e-4)


def logits(shape: Shape, requests: int, seed: int) -> Work:
    draw = cases.Draw(shape.device, seed)
    base = draw(requests, shape.block, shape.vocabulary)[:, 1]
    out, w2 = torch.tanh(draw(requests, shape.rank)), draw(shape.vocabulary, shape.rank, dtype=BF16)
    result = torch.empty(requests, shape.vocabulary, device=shape.device)
    ours = lambda **options: triton_draft_head.token_logits(base, out, w2, result, **options)
    wanted = lambda: base.double() + out.double() @ w2.double().t()
    num_bytes = w2.numel() * 2 + requests * (8 * shape.vocabulary + 4 * shape.rank)
    other = _logits_of_torch(base, out.to(BF16), w2)
    return Work(ours, other, num_bytes, lambda **options: relative_error(ours(**options), wanted()), 1e-5)


def _logits_of_torch(base: torch.Tensor, out: torch.Tensor, w2: torch.Tensor) -> Callable[[], Any]:
    """With what comes of the cell rounded to bfloat16, which ours is not."""
    if not base.is_cuda:
        return lambda: base + out.float() @ w2.float().t()
    fused = lambda: torch.addmm(base, out, w2.t(), out_dtype=torch.float32)
    try:
        fused()
    except (RuntimeError, TypeError) as error:
        print(f"no addmm with float32 results ({type(error).__name__}), so a product and a sum")
        return lambda: base + torch.mm(out, w2.t(), out_dtype=torch.float32)
    return fused


def timed(runs: list[Callable[[], Any]]) -> str:
    """Microseconds, or the name of what another library raised; the table goes on."""
    try:
        return f"{microseconds(runs):.1f}"
    except Exception as error:
        return type(error).__name__


def report(row: Row, bandwidth: float, swept: bool) -> None:
    first = row.make(0)
    count = max(1, min(8, round(3 * L2_BYTES / first.num_bytes + 0.5)))
    # Little ones are in the cache in an engine, too: the kernel before has just written what they read.
    works = [first, *(row.make(seed) for seed in range(1, count if first.num_bytes > 1e6 else 1))]
    error = first.error()
    late, early = (microseconds([lambda w=w, e=e: w.ours(early=e) for w in works]) for e in (False, True))
    bound = first.num_bytes / bandwidth / 1e3
    other = timed([w.other for w in works if w.other]) if first.other else ""
    of_bound = 100 * bound / min(late, early)
    figures = f"{late:.1f} | {early:.1f} | {bound:.1f} | {of_bound:.0f} % | {other} | {error:.1e}"
    print(f"| {row.name} | {figures} |", flush=True)
    assert error < first.limit, (row.name, error)
    if swept and row.shapes:
        sweep(row, works, first.limit)


def sweep(row: Row, works: list[Work], limit: float) -> None:
    """The best five shapes of a launch, as a row of its own."""
    option, found = "tiles" if row.shapes is TILES else "tile", []
    for tile in row.shapes:
        try:
            wrong = "" if works[0].error(**{option: tile}) < limit else " WRONG"
            found.append((microseconds([lambda w=w, t=tile: w.ours(**{option: t}) for w in works]), tuple(tile), wrong))
        except triton.runtime.errors.OutOfResources:
            continue
    best = "; ".join(f"{took:.1f} {tile}{wrong}" for took, tile, wrong in sorted(found)[:5])
    print(f"| ... | {best} | | | | | |", flush=True)


def with_flex(shape: Shape) -> None:
    print("\n| FlexAttention | us |\n| --- | --- |")
    for context in CONTEXTS:
        inputs = make(Case(
            lengths=(context,), heads=shape.heads, size=shape.size, page=shape.page, block=shape.block, dtype=BF16,
            device=shape.device,
        ))  # fmt: skip
        torch._dynamo.reset()
        print(f"| {context:,}, batch 1 | {timed([flex(inputs)])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other launch shapes of attention and logits, too")
    parser.add_argument("--flex", action="store_true", help="FlexAttention, too: it compiles for long")
    arguments = parser.parse_args()
    began, shape = time.monotonic(), Shape()
    bandwidth = bandwidth_of_memory()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"memory: {bandwidth:.0f} GB/s\n")
    print("| work | us | early | bound | of it | torch | error |\n| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows(shape):
        report(row, bandwidth, arguments.sweep)
    if arguments.flex:
        with_flex(replace(shape))
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
