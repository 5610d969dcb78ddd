"""Cases of the fused kernels around attention, run under Triton's interpreter here and on a GPU in tests/gpu.

Every function checks one kernel against its torch reference on `device` and raises where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rollout.kernels import composed, reference, triton_activation, triton_router
from rollout.kernels.paged import PagedBatch
from rollout.kernels.triton_conv_mix import Tile, conv_mix
from rollout.kernels.triton_preparation import prepare
from rollout.kernels.triton_taps import tap_sources
from rollout.kernels.units import mixture_dtype

Step = Sequence[tuple[int, int]]

# (tokens already there, tokens of this step) per request: new, decoding, second token, across pages, at a page's end.
STEP: Step = ((0, 2), (7, 1), (1, 1), (2, 3), (31, 2))


def rand(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Drawn on the device: a CPU needs minutes for what a GPU is tested with."""
    generator = torch.Generator(device=device).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def rows_in(step: Step) -> int:
    return sum(new for _, new in step)


def make_batch(step: Step, tokens_per_block: int, device: str, seed: int = 0) -> PagedBatch:
    """Pages dealt at random; block 0 stays the null block. Row 3 is not stored."""
    pages = [-(-(past + new) // tokens_per_block) for past, new in step]
    order = (torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = torch.zeros(len(step), max(pages), dtype=torch.int32)
    slots: list[int] = []
    for row, (past, new) in enumerate(step):
        table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
        for p in range(past, past + new):
            slots.append(int(table[row, p // tokens_per_block]) * tokens_per_block + p % tokens_per_block)
    if len(slots) > 3:
        slots[3] = -1
    counts = torch.tensor([0, *(new for _, new in step)])
    lengths = torch.tensor([past + new for past, new in step], dtype=torch.int32)
    tensors = (counts.cumsum(0).int(), lengths, table, torch.tensor(slots, dtype=torch.int64))
    return PagedBatch(*(tensor.to(device) for tensor in tensors))


def num_blocks(step: Step, tokens_per_block: int) -> int:
    return 1 + sum(-(-(past + new) // tokens_per_block) for past, new in step)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor, in the 2-norm; NaN where there is one."""
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def tolerance(got: torch.Tensor) -> float:
    """float32 sums in another order, or one rounding to bfloat16; the interpreter truncates instead."""
    if got.dtype == torch.float32:
        return 2e-6
    return 2.5e-3 if got.is_cuda else 5e-3


class ConvMixCase:
    """Inputs of one fused convolution and mixture, over a page pool wider than the stream."""

    def __init__(
        self,
        step: Step,
        hidden: int,
        blocks: int,
        queries: int,
        residual: bool,
        dtype: torch.dtype,
        device: str,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        rows = rows_in(step)
        make = lambda *shape, seed: rand(*shape, seed=seed, device=device)
        self.batch = make_batch(step, 4, device)
        self.pool = make(num_blocks(step, 4), 4, hidden + 16, seed=1).to(state_dtype or dtype)
        self.pool[0] = math.nan  # the null block is never to be read
        self.x, self.hidden = make(rows, hidden, seed=2).to(dtype), hidden
        self.weight = make(4, hidden, seed=3).t()[:, None]
        self.residual = make(rows, hidden, seed=4).to(dtype) if residual else None
        self.blocks = torch.empty(blocks, rows, hidden, dtype=dtype, device=device)
        for index, block in enumerate(self.blocks):  # one by one: in float32 all of them may be ten gigabytes
            block.copy_(make(rows, hidden, seed=5 + 10 * index))
        if blocks:
            self.blocks[0] *= 1e3
            self.blocks[0, 1:2] = 0.0  # a source without a direction
        self.queries, self.weights = make(queries, hidden, seed=6), make(queries, hidden, seed=7)

    def state(self, pool: torch.Tensor) -> torch.Tensor:
        return pool[..., 8 : 8 + self.hidden]

    def run(
        self, tile: Tile | None, in_place: bool = False, early: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Running block, mixtures and page pool."""
        pool = self.pool.clone()
        residual = None if self.residual is None else self.residual.clone()
        running = residual if in_place and residual is not None else torch.full_like(self.x, math.nan)
        out = self.x.new_full((self.queries.shape[0], *self.x.shape), math.nan)
        sources = tap_sources(self.batch, self.x.shape[0], 4)
        if early and self.x.is_cuda:
            self.x.mul_(1)  # the kernel before, that writes x alone and waits for all others
        conv_mix(
            self.x, self.state(pool), sources, self.batch.slots, self.weight, residual, self.blocks, self.queries,
            self.weights, 1e-6, 1e-6, running, out, tile, early,
        )  # fmt: skip
        return running, out, pool

    def rows(self, first: int, last: int) -> ConvMixCase:
        """The case of one request's rows `first` to `last` alone, the state filled up to them by this case's run."""
        part = object.__new__(ConvMixCase)
        part.__dict__.update(self.__dict__)
        part.batch = PagedBatch(
            torch.tensor([0, last - first], dtype=torch.int32, device=self.x.device),
            torch.tensor([last], dtype=torch.int32, device=self.x.device),
            self.batch.block_table,
            self.batch.slots[first:last],
        )
        part.pool = self.run(TINY_TILE if self.hidden < 1024 else None)[2]
        part.x, part.blocks = self.x[first:last], self.blocks[:, first:last]
        part.residual = None if self.residual is None else self.residual[first:last]
        return part


TINY_TILE = Tile(32, 4, 2, False)


def check_tap_sources(device: str, step: Step = STEP, tokens_per_block: int = 4) -> None:
    batch = make_batch(step, tokens_per_block, device)
    rows = rows_in(step) + 2  # padding of a CUDA graph
    expected = composed.tap_sources(batch, rows, tokens_per_block)
    assert torch.equal(tap_sources(batch, rows, tokens_per_block), expected)


def check_shared_prefix(device: str) -> None:
    """A request is given pages that another one fills in the same step."""
    batch = make_batch(((0, 9), (8, 1)), 4, device)
    batch.slots[3] = batch.block_table[0, 0] * 4 + 3
    batch.block_table[1, :2] = batch.block_table[0, :2]
    sources = tap_sources(batch, 10, 4)
    assert sources[9].tolist() == [7, 6, 5] and torch.equal(sources, composed.tap_sources(batch, 10, 4))


def check_conv_mix(
    device: str, dtype: torch.dtype, blocks: int, queries: int, *, hidden: int = 96, residual: bool = True,
    step: Step = STEP, tile: Tile | None = TINY_TILE,
) -> None:  # fmt: skip
    case = ConvMixCase(step, hidden, blocks, queries, residual, dtype, device)
    running, out, pool = case.run(tile)
    expected_pool = case.pool.clone()
    expected = reference.short_conv(
        case.x, case.state(expected_pool), case.batch, case.weight, residual_TC=case.residual
    )
    assert relative_error(running, expected) < tolerance(running)
    for first in range(0, running.shape[0], 8192):  # the reference holds all sources in float32, several times
        rows = slice(first, first + 8192)
        # From the stored running block, so that a rounding that fell the other way does not count twice.
        mixed = reference.mix_norm(case.blocks[:, rows], running[rows], case.queries, case.weights, 1e-6, 1e-6)
        assert relative_error(out[:, rows], mixed) < tolerance(out)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)
    for again in (case.run(tile, in_place=True), case.run(tile, in_place=True, early=True)):
        assert all(torch.equal(a, b) for a, b in zip((running, out), again[:2], strict=True))
        torch.testing.assert_close(again[2], expected_pool, rtol=0, atol=0, equal_nan=True)


def check_conv_mix_chunks(device: str, dtype: torch.dtype, hidden: int, tile: Tile | None) -> None:
    """A row's bits are the same in a longer or shorter chunk, alone, and when its inputs come out of the state."""
    whole = ConvMixCase(((0, 5),), hidden, 2, 1, True, dtype, device)
    whole.batch.slots[3] = whole.batch.block_table[0, 0] * 4 + 3
    running, out, _ = whole.run(tile)
    for first, last in ((4, 5), (2, 4)):
        part_running, part_out, _ = whole.rows(first, last).run(tile)
        assert torch.equal(part_running, running[first:last]) and torch.equal(part_out, out[:, first:last])


def same_bits(tile: Tile, queries: int) -> list[Tile]:
    """Shapes of a program that give the bits of `tile`."""
    sizes = (1, 4) if queries == 1 else (2,)
    return [tile._replace(batch=size, reload=True) for size in sizes]


def check_conv_mix_batches(device: str, dtype: torch.dtype, hidden: int, queries: int, tile: Tile) -> None:
    """Nor do they depend on how many sources are added at a time."""
    case = ConvMixCase(((3, 1),), hidden, 5, queries, True, dtype, device)
    case.queries *= 6.0  # scores far apart: the largest changes, and some weights vanish
    expected = case.run(tile)
    for other in same_bits(tile, queries):
        got = case.run(other)
        assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))


def check_conv_mix_of_two_dtypes(device: str, hidden: int, tile: Tile | None) -> None:
    """float32 activations over a bfloat16 state: inputs are rounded as the state would round them."""
    case = ConvMixCase(STEP, hidden, 1, 1, True, torch.float32, device, torch.bfloat16)
    running, _, pool = case.run(tile)
    expected_pool = case.pool.clone()
    expected = reference.short_conv(
        case.x, case.state(expected_pool), case.batch, case.weight, residual_TC=case.residual
    )
    rounding = 2**-7 if device == "cpu" else 0.0  # the interpreter truncates
    torch.testing.assert_close(pool, expected_pool, rtol=rounding, atol=0, equal_nan=True)
    assert relative_error(running, expected) < (5e-3 if device == "cpu" else 1e-6)


def check_prepare(
    device: str, dtype: torch.dtype, dynamic: bool, *, heads: tuple[int, int] = (12, 2), head_dim: int = 16,
    step: Step = STEP, scale: float = 3.0,
) -> None:  # fmt: skip
    (num_heads, kv_heads), rel_dim, rows = heads, 16, rows_in(step)
    channels = kv_heads * head_dim
    make = lambda *shape, seed: rand(*shape, seed=seed, device=device)
    conv, paged = make_batch(step, 4, device), make_batch(step, 16, device, seed=5)
    # One projection for all, as a fused weight would give: rows lie apart.
    widths = (num_heads * head_dim, channels, channels, num_heads * rel_dim)
    q, k, v, r = (make(rows, sum(widths) + 8, seed=1) * scale).to(dtype)[:, : sum(widths)].split(widths, dim=1)
    q[1], k[1], v[1] = 0.0, 0.0, 0.0
    scales = make(num_heads, head_dim, seed=2), make(num_heads, rel_dim, seed=3)
    taps: Any = [make(4, channels, seed=seed) for seed in (4, 5)]
    dynamics: Any = [make(rows, kv_heads, 4, seed=seed) for seed in (6, 7)] if dynamic else [None, None]
    if not dynamic:
        taps = [tap.t()[:, None] for tap in taps]
    positions = torch.cat([torch.arange(past, past + new) for past, new in step]).to(device)
    clip, log_scaling = math.sqrt(4 * head_dim), (0.1, 16) if dynamic else None
    pools = [make(num_blocks(step, 4), 4, 2 * channels + 16, seed=8).to(dtype) for _ in range(2)]
    pages = [
        torch.zeros(num_blocks(step, 16), kv_heads, 16, 6 * head_dim, device=device, dtype=dtype) for _ in range(2)
    ]
    caches = [page[..., 2 * head_dim : 4 * head_dim] for page in pages]
    q_out = torch.full((rows, num_heads, head_dim), math.nan, dtype=dtype, device=device)
    r_out = torch.full((rows, num_heads, rel_dim), math.nan, dtype=mixture_dtype(dtype), device=device)
    states = [pool[..., 8 : 8 + 2 * channels] for pool in pools]
    prepare(
        q, k, v, r, *scales, *taps, *dynamics, states[0], tap_sources(conv, rows, 4), conv.slots, caches[0],
        paged.slots, positions if dynamic else None, clip, 8.0, 1e-6, log_scaling, q_out, r_out,
    )  # fmt: skip
    convolved = [
        reference.short_conv(x, states[1][..., first : first + channels], conv, tap, own)
        for x, first, tap, own in zip((k, v), (0, channels), taps, dynamics, strict=True)
    ]
    reference.store_kv(*convolved, caches[1], paged, clip, 1e-6)
    torch.testing.assert_close(*pools, rtol=0, atol=0)
    assert relative_error(*pages) < tolerance(pages[0])
    assert bool((pages[0][..., : 2 * head_dim] == 0).all() and (pages[0][..., 4 * head_dim :] == 0).all())
    expected = composed.prepare_queries(q, scales[0], clip, positions, log_scaling)
    assert relative_error(q_out, expected) < tolerance(q_out)
    expected = composed.prepare_mixtures(r, scales[1], 8.0, positions, log_scaling)
    assert relative_error(r_out, expected) < tolerance(r_out)


def check_route(device: str, dtype: torch.dtype, rows: int, experts: int, top_k: int, hidden: int) -> None:
    x = (rand(rows, hidden, device=device) * torch.logspace(-3, 2, rows, device=device)[:, None]).to(dtype)
    router, bias = rand(experts, hidden, seed=1, device=device) * 0.2, rand(experts, seed=2, device=device) * 0.1
    logits = triton_router.logits(x, router)
    # Also of the worst row: every row has its own scale.
    exact = x.double() @ router.double().t()
    worst_row = float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).max())
    assert worst_row < 5e-7, worst_row
    weights, chosen = triton_router.route(x, router, bias, top_k, 8.0)
    again = triton_router.route(x.mul_(1), router, bias, top_k, 8.0, constant=True)
    assert torch.equal(weights, again[0]) and torch.equal(chosen, again[1])
    expected_weights, expected = composed.route(logits, bias, top_k, 8.0)
    same = (chosen == expected).all(1)
    assert chosen.dtype == torch.int32 and relative_error(weights[same], expected_weights[same]) < 1e-6
    # Where another set is chosen, it is a tie but for the last bits.
    biased = torch.sigmoid(logits) + bias
    worst = [biased.gather(1, numbers.long()).min(1).values for numbers in (chosen, expected)]
    assert bool((worst[0] - worst[1] > -1e-6).all()) and float(same.float().mean()) > 0.98
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())


def check_route_plans(device: str, dtype: torch.dtype, rows: int, experts: int, hidden: int) -> None:
    """A row's bits are the same however the sum is spread over programs, and in any company.

    On a GPU; the interpreter's products come out of a library that does not promise it.
    """
    x, router = rand(rows, hidden, device=device).to(dtype), rand(experts, hidden, seed=1, device=device)
    results = [triton_router.logits(x, router, (tile, span)) for _, tile, span in triton_router.PLANS]
    results = [result[-1] for result in results] + [triton_router.logits(x[-1:], router)[0]]
    if device == "cpu":
        assert all(relative_error(result, results[0]) < 1e-6 for result in results)
    else:
        assert all(torch.equal(result, results[0]) for result in results)


def check_route_ties(device: str) -> None:
    """Ties go to the lower number; the bias selects and does not weigh."""
    x, router, bias = rand(3, 128, device=device), torch.zeros(16, 128, device=device), torch.zeros(16, device=device)
    weights, chosen = triton_router.route(x, router, bias, 4, 8.0)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3 and weights.tolist() == [[2.0] * 4] * 3
    bias[9], bias[0] = 1.0, -1.0
    weights, chosen = triton_router.route(x, router, bias, 4, 8.0)
    assert chosen.tolist() == [[1, 2, 3, 9]] * 3 and weights.tolist() == [[2.0] * 4] * 3


def check_activation(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = (rand(rows, 2 * width + 8, device=device) * 5).to(dtype)[:, : 2 * width]
    special = [
        0.0,
        -0.0,
        1e-38,
        1e-6,
        -1e-6,
        0.39,
        0.41,
        -0.41,
        2.49,
        2.51,
        30.0,
        -90.0,
        -200.0,
        1e30,
        math.inf,
        -math.inf,
    ]
    x[0, :16], x[0, width : width + 16] = (torch.tensor(values).to(x) for values in (special, special[::-1]))
    x[-1, 3], x[-1, width + 4] = 1.0, 1.0
    gate, up = (half.double() for half in x.chunk(2, dim=1))
    for caps in ((4.0, 25.0), (3.0, 7.0)):
        exact = caps[0] * torch.tanh(gate / caps[0]) * torch.sigmoid(gate) * caps[1] * torch.tanh(up / caps[1])
        got = triton_activation.expert_activation(x, *caps, out_TI=torch.empty(rows, width, device=device))
        worst = (got - exact).abs() / exact.abs().clamp(min=1e-9)
        assert float(worst.max()) < 1e-5
        assert relative_error(got, composed.expert_activation(x, *caps)) < 1e-6
        rounded = triton_activation.expert_activation(x, *caps)
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded.float(), got, rtol=2**-7, atol=1e-37)
        x[-1, 3], x[-1, width + 4] = math.nan, math.nan
        lost = triton_activation.expert_activation(x, *caps).isnan()
        assert lost.sum() == 2 and bool(lost[-1, 3:5].all())
        x[-1, 3], x[-1, width + 4] = 1.0, 1.0
