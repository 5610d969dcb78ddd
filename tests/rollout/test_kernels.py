"""Every C++ kernel against its torch reference, on random and on hostile inputs, and bit by bit against itself."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollout.kernels import native, ops, reference
from rollout.kernels.layout import k_major
from rollout.kernels.paged import PagedBatch

pytestmark = pytest.mark.skipif(not ops.have_native(), reason="no C++ compiler on this machine")

# (tokens already there, tokens of this step) per request: new, decoding, mid-prompt, across pages, long.
STEP = ((0, 5), (7, 1), (1, 1), (2, 9), (31, 2), (0, 1), (64, 17))
DTYPES = (torch.float32, torch.bfloat16)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_batch(step: Sequence[tuple[int, int]], tokens_per_block: int, num_blocks: int, seed: int = 0) -> PagedBatch:
    """Pages dealt at random; block 0 stays the null block."""
    order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    width = max(-(-(past + new) // tokens_per_block) for past, new in step)
    table = torch.zeros(len(step), width, dtype=torch.int32)
    slots: list[int] = []
    for row, (past, new) in enumerate(step):
        for block in range(-(-(past + new) // tokens_per_block)):
            table[row, block] = order.pop()
        for p in range(past, past + new):
            slots.append(int(table[row, p // tokens_per_block]) * tokens_per_block + p % tokens_per_block)
    counts = torch.tensor([0, *(new for _, new in step)])
    lengths = torch.tensor([past + new for past, new in step], dtype=torch.int32)
    return PagedBatch(counts.cumsum(0).int(), lengths, table, torch.tensor(slots, dtype=torch.int64))


def rows_in(step: Sequence[tuple[int, int]]) -> int:
    return sum(new for _, new in step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 192, 128), (13, 12, 128), (64, 500, 96), (7, 3, 5), (5, 1, 1), (200, 130, 64)])
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = shape
    x, weight = rand(rows, inputs), k_major(rand(outputs, inputs, seed=1).to(dtype))
    got = native.linear(x, weight)
    close(got, reference.linear(x, weight), 1e-4)
    assert torch.equal(got, native.linear(x, weight.contiguous()))
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(native.linear(x[row : row + 1], weight)[0], got[row])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_softcap_logits(scale: float) -> None:
    x, weight = rand(9, 128) * scale, k_major(rand(500, 128, seed=1))
    got = native.softcap_logits(x, weight, 30.0, 512)
    close(got, reference.softcap_logits(x, weight, 30.0, 512), 5e-4)
    assert bool((got[:, 500:] == -math.inf).all()) and float(got[:, :500].abs().max()) <= 30.0


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 8])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_mix_norm(num_blocks: int, num_queries: int) -> None:
    blocks, partial = rand(num_blocks, 70, 128), rand(70, 128, seed=1)
    partial[3] = 0.0  # a zero source has no direction, only epsilon
    partial[4] *= 1e4
    partial[5] *= 1e-6
    queries, weights = rand(num_queries, 128, seed=2), rand(num_queries, 128, seed=3)
    for given in (queries, None):
        got = native.mix_norm(blocks, partial, given, weights, 1e-6, 1e-6)
        close(got, reference.mix_norm(blocks, partial, given, weights, 1e-6, 1e-6), 1e-4)
        one = native.mix_norm(blocks[:, 9:10].contiguous(), partial[9:10], given, weights, 1e-6, 1e-6)
        assert torch.equal(one[:, 0], got[:, 9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_per_block", [1, 2, 16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_short_conv(dtype: torch.dtype, tokens_per_block: int, dynamic: bool) -> None:
    batch = make_batch(STEP, tokens_per_block, 200)
    batch.slots[3] = -1  # a row that vLLM says not to store
    rows, channels = rows_in(STEP), 32
    pool = rand(200, tokens_per_block, channels + 8).to(dtype)
    pool[0] = math.nan
    x, residual = rand(rows, channels), rand(rows, channels, seed=1)
    taps = rand(rows, 2, 4, seed=2) if dynamic else None
    weight = rand(4, channels) if dynamic else rand(4, channels).t()[:, None]
    pools = [pool.clone(), pool.clone()]
    got, expected = (
        kernel.short_conv(x, own[..., 4 : 4 + channels], batch, weight, taps, residual)
        for kernel, own in zip((native, reference), pools, strict=True)
    )
    close(got, expected)
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", [native, reference])
def test_short_conv_reads_a_shared_prefix_that_this_step_computes(kernel: Any) -> None:
    """vLLM lets a request use another's pages in the step that fills them."""
    batch = make_batch(((0, 9), (8, 1)), 4, 20)
    batch.block_table[1, :2] = batch.block_table[0, :2]
    x, weight = rand(10, 32), rand(4, 32).t()[:, None]
    x[9] = x[8]
    out = kernel.short_conv(x, torch.full((20, 4, 32), math.nan), batch, weight)
    assert torch.equal(out[9], out[8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv(dtype: torch.dtype) -> None:
    batch = make_batch(STEP, 4, 100)
    batch.slots[2] = -1
    k, v = rand(rows_in(STEP), 32) * 4, rand(rows_in(STEP), 32, seed=1)
    k[0], v[0], k[1] = 0.0, 0.0, k[1] * 1e-3
    pools = [torch.full((100, 2, 4, 96), 7.0, dtype=dtype) for _ in range(2)]
    for kernel, pool in zip((native, reference), pools, strict=True):
        kernel.store_kv(k, v, pool[..., 32:64], batch, 8.0, 1e-6)
    # bfloat16 may round a value on the edge the other way.
    close(*pools, tolerance=1e-5 if dtype is torch.float32 else 1e-2)


class AttentionCase:
    """Random inputs of one attention call over a pool that holds every request's earlier keys and values."""

    def __init__(
        self,
        step: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (12, 2),
        head_dim: int = 16,
        extent: int = 16,
        tokens_per_block: int = 16,
    ) -> None:
        rows, (num_heads, kv_heads) = rows_in(step), heads
        self.batch = make_batch(step, tokens_per_block, 64)
        self.pool = torch.full((64, kv_heads, tokens_per_block, 6 * head_dim), math.nan, dtype=dtype)
        self.cache = self.pool[..., 2 * head_dim : 4 * head_dim]
        for row, (past, new) in enumerate(step):
            slots = self.batch.slots_of(row, torch.arange(past + new), tokens_per_block)
            values = rand(past + new, kv_heads, 2 * head_dim, seed=row).to(dtype)
            self.cache[slots // tokens_per_block, :, slots % tokens_per_block] = values
        width = num_heads * head_dim
        self.rows = {
            "q": rand(rows, width) * 2,
            "r": rand(rows, num_heads * 16, seed=1) * 3,
            "sink": rand(rows, num_heads, seed=2),
            "gate": rand(rows, width, seed=3),
        }
        scales = (1 + 0.2 * rand(num_heads, head_dim, seed=4), 1 + 0.2 * rand(num_heads, 16, seed=5))
        self.constants = (*scales, rand(16, extent, seed=6) * 0.3, 8.0, 8.0)

    def run(self, kernel: object, window: int | None, log_scaling: tuple[float, int] | None) -> torch.Tensor:
        return kernel.attention(  # type: ignore[attr-defined]
            *self.rows.values(), self.cache, self.batch, *self.constants, window, log_scaling
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 8, 40])
@pytest.mark.parametrize("extent", [3, 16, 48])
def test_attention(dtype: torch.dtype, window: int | None, extent: int) -> None:
    case = AttentionCase(STEP, dtype=dtype, extent=extent)
    log_scaling = None if window else (0.1, 16)
    close(case.run(native, window, log_scaling), case.run(reference, window, log_scaling), 1e-4)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (20, 1), (48, 8)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_attention_head_layouts(heads: tuple[int, int], head_dim: int) -> None:
    case = AttentionCase(STEP[:4], heads=heads, head_dim=head_dim, tokens_per_block=4)
    close(case.run(native, 8, None), case.run(reference, 8, None), 1e-4)


@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_attention_with_extreme_sinks(sink: float) -> None:
    case = AttentionCase(STEP)
    case.rows["sink"].fill_(sink)
    got = case.run(native, None, None)
    close(got, case.run(reference, None, None), 1e-4)
    assert (float(got.abs().max()) < 1e-10) == (sink > 0)


def test_attention_never_reads_what_a_query_may_not_see() -> None:
    """Unused pages hold NaN from the start (see AttentionCase); here, positions outside the window do, too."""
    case = AttentionCase(((40, 1), (20, 3)))
    clean = case.run(native, 8, None)
    hidden = case.batch.slots_of(0, torch.arange(33), 16)
    case.cache[hidden // 16, :, hidden % 16] = math.nan
    assert torch.equal(case.run(native, 8, None), clean)
    close(case.run(reference, 8, None), clean, 1e-4)


def test_attention_of_a_row_does_not_depend_on_its_chunk() -> None:
    whole = AttentionCase(((0, 50),))
    expected = whole.run(native, None, (0.1, 16))
    for past, new in ((49, 1), (33, 17), (1, 49)):
        part = AttentionCase(((past, new),))
        part.cache[:] = whole.cache
        part.rows = {name: value[past : past + new].contiguous() for name, value in whole.rows.items()}
        assert torch.equal(part.run(native, None, (0.1, 16)), expected[past : past + new])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("sizes", [(16, 64, 4), (3, 16, 3), (40, 48, 1)])
def test_experts(dtype: torch.dtype, rows: int, sizes: tuple[int, int, int]) -> None:
    num, width, top_k = sizes
    x, router, bias = rand(rows, 128), k_major(rand(num, 128, seed=1) * 0.2), rand(num, seed=2) * 0.1
    gate_up = k_major((rand(num, 2 * width, 128, seed=3) * 0.5).to(dtype))
    down = k_major((rand(num, 128, width, seed=4) * 0.3).to(dtype))
    constants = (top_k, 8.0, 4.0, 25.0)
    got = native.experts(x, router, bias, gate_up, down, *constants)
    close(got, reference.experts(x, router, bias, gate_up, down, *constants), 2e-4)
    assert torch.equal(native.experts(x[-1:].contiguous(), router, bias, gate_up, down, *constants)[0], got[-1])


def test_expert_ties_go_to_the_lower_number() -> None:
    x, router, bias = rand(6, 128), torch.zeros(16, 128), torch.zeros(16)
    gate_up, down = rand(16, 128, 128) * 0.1, rand(16, 128, 64) * 0.1
    got = native.experts(x, router, bias, gate_up, down, 4, 8.0, 4.0, 25.0)
    close(got, native.experts(x, router[:4], bias[:4], gate_up[:4], down[:4], 4, 8.0, 4.0, 25.0), 0.0)
    close(got, reference.experts(x, router, bias, gate_up, down, 4, 8.0, 4.0, 25.0), 1e-4)
    bias[9] = 1.0  # the bias selects, and does not weigh
    close(
        native.experts(x, router, bias, gate_up, down, 4, 8.0, 4.0, 25.0),
        reference.experts(x, router, bias, gate_up, down, 4, 8.0, 4.0, 25.0),
        1e-4,
    )


def checksums() -> list[str]:
    """Of results that are large enough to be spread over threads."""
    case = AttentionCase(((0, 150), (30, 40)), tokens_per_block=32)
    gate_up, down = rand(16, 128, 128, seed=3) * 0.5, rand(16, 128, 64, seed=4) * 0.3
    results = [
        native.linear(rand(300, 128), rand(192, 128)),
        case.run(native, None, (0.1, 16)),
        native.experts(rand(300, 128), rand(16, 128, seed=1), rand(16), gate_up, down, 4, 8.0, 4.0, 25.0),
        native.mix_norm(rand(2, 300, 128), rand(300, 128), rand(3, 128), rand(3, 128), 1e-6, 1e-6),
    ]
    return [hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in results]


def test_the_number_of_threads_changes_no_bit() -> None:
    program = "from tests.rollout.test_kernels import checksums; print(*checksums())"
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert printed[0] == printed[1] == " ".join(checksums()) + "\n"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 8, 16])
def test_lora_delta(dtype: torch.dtype, rank: int) -> None:
    slots = torch.tensor([-1, 0, 0, 2, -1, 1, 2, 2, 2, -1])
    x, a, b = rand(10, 128), rand(3, rank, 128, seed=1).to(dtype), rand(3, 40, rank, seed=2).to(dtype)
    wide = [rand(10, 100, seed=3) for _ in range(2)]
    before = wide[0].clone()
    for kernel, y in zip((native, reference), wide, strict=True):
        kernel.lora_delta(y[:, 20:60], x, a, b, slots, 0.5)
    close(*wide, tolerance=1e-4)
    assert torch.equal(wide[0][slots < 0], before[slots < 0])
    alone = before[3:4].clone()
    native.lora_delta(alone[:, 20:60], x[3:4], a, b, slots[3:4], 0.5)
    assert torch.equal(alone[0], wide[0][3])
