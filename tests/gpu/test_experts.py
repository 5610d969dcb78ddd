"""Routed experts on the device: both formats through Marlin and the dense path, against the torch reference.

    python -m pytest -q -s tests/gpu/test_experts.py

Needs vLLM 0.30 built for CUDA, no engine.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from inkling_rl.formats import ExpertFormat, marlin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.plugin import loader, marlin_experts
    from rollout.plugin.experts import Experts
    from rollout.plugin.marlin_experts import MarlinExperts
    from tests.gpu import expert_cases as cases
    from tests.gpu.marlin_against_vllm import stored_layer
    from tests.rollout import moe_cases

Size = tuple[int, int, int, int]
FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
# Experts, chosen, hidden size, expert width: the tiny model, odd sizes (padded expert width), the release's width.
SIZES: tuple[Size, ...] = ((16, 4, 128, 64), (24, 3, 256, 160), (16, 8, 4608, 2304))


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_marlin_equals_the_reference(expert_format: ExpertFormat, size: Size) -> None:
    moe = cases.make_moe(expert_format, size, torch.bfloat16)
    assert isinstance(moe.experts, MarlinExperts)
    weights = cases.weights_of(moe)
    seen: list[torch.Tensor] = []
    moe.capture_fn = seen.append
    # 1100 rows sort by vLLM's operator.
    for rows in (1, 2, 8, 33, 300, 1100):
        for dtype in (torch.bfloat16, torch.float32):
            x = cases.inputs(rows, moe, torch.bfloat16).to(dtype)
            got = moe(x)
            assert got.dtype == dtype and got.shape == x.shape and seen[-1].shape == (rows, size[1])
            same = cases.same_choice(moe, x, seen[-1])
            error = cases.relative_error(got[same], cases.expected_of(moe, weights, x)[same])
            print(f"{expert_format} {size} {rows} rows {dtype}: relative error {error:.1e}")
            # Three roundings to bfloat16 on the way, one at the end: 2^-9 / sqrt(3) each.
            assert error < 5e-3


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_all_experts_on_all_tokens_equal_the_reference(size: Size) -> None:
    moe = cases.make_moe("nvfp4", size, torch.float32)
    assert isinstance(moe.experts, Experts)
    seen: list[torch.Tensor] = []
    moe.capture_fn = seen.append
    for rows in (1, 33, 300):
        x = cases.inputs(rows, moe, torch.float32)
        got = moe(x)
        same = cases.same_choice(moe, x, seen[-1])
        error = cases.relative_error(got[same], cases.expected_of(moe, cases.weights_of(moe), x)[same])
        print(f"dense {size} {rows} rows: relative error {error:.1e}")
        assert got.dtype == torch.float32 and error < 2e-6
    moe = cases.make_moe("bf16", size, torch.bfloat16)
    x = cases.inputs(33, moe, torch.bfloat16)
    got, expected = moe(x), cases.expected_of(moe, cases.weights_of(moe), x)
    assert got.dtype == torch.bfloat16 and cases.relative_error(got, expected) < 3e-3


CASES: list[Any] = [("nvfp4", SIZES[0], torch.float32), *((f, SIZES[2], torch.bfloat16) for f in FORMATS)]


@pytest.mark.parametrize(("expert_format", "size", "dtype"), CASES, ids=str)
def test_a_graph_replays_the_same_bits(expert_format: ExpertFormat, size: Size, dtype: torch.dtype) -> None:
    moe = cases.make_moe(expert_format, size, dtype)
    record = torch.full((40, size[1]), -1, dtype=torch.int32, device="cuda")
    moe.capture_fn = lambda ids: record[: len(ids)].copy_(ids)
    for rows in (1, 8, 33):
        x = cases.inputs(rows, moe, dtype)
        moe(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moe(x)
        for seed in (1, 2, 3):
            x.copy_(cases.inputs(rows, moe, dtype, seed))
            captured.fill_(float("nan"))
            record.fill_(-1)
            graph.replay()
            replayed, ids = captured.clone(), record.clone()
            if dtype == torch.bfloat16:
                assert torch.equal(moe(x), replayed)
            else:  # cuBLAS, whose choice may differ
                assert cases.relative_error(moe(x), replayed) < 2e-6
            assert torch.equal(ids, record) and bool((ids[:rows] >= 0).all()) and bool((ids[rows:] == -1).all())


@pytest.mark.parametrize("expert_format", FORMATS)
def test_a_row_of_nan_stays_alone(expert_format: ExpertFormat) -> None:
    """What a captured graph finds in the rows that fill a batch up."""
    moe = cases.make_moe(expert_format, SIZES[2], torch.bfloat16)
    x = cases.inputs(8, moe, torch.bfloat16)
    expected = moe(x)[:7]
    x[7] = float("nan")
    got = moe(x)
    assert bool(got[7].isnan().all()) and cases.relative_error(got[:7], expected) < 3e-3


def test_the_first_call_may_be_captured() -> None:
    """The locks are made in the graph then, and again outside."""
    moe = cases.make_moe("nvfp4", SIZES[0], torch.bfloat16)
    x = cases.inputs(1, moe, torch.bfloat16)
    expected = moe(x)
    marlin_experts._STANDING.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(x)
    assert not marlin_experts._STANDING
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected) and torch.equal(moe(x), expected)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_loading_converts_on_the_device_in_little_memory(expert_format: ExpertFormat) -> None:
    size = (256, 4, 1024, 512)
    model = cases.Part(cases.make_moe(expert_format, size, torch.bfloat16))
    stored = stored_layer(expert_format, size[0], size[2], size[3], "cpu")
    pairs = [(f"model.llm.layers.0.mlp.experts.{key}", tensor) for key, tensor in stored.items()]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loader.load(model, [*pairs, ("norm.weight", torch.ones(4))])
    layer = sum(tensor.nbytes for tensor in stored.values())
    more = torch.cuda.max_memory_allocated() - before
    print(f"{expert_format}: {more / layer:.2f} layers of memory beside the model")
    assert more < 0.8 * layer and torch.cuda.memory_allocated() == before
    for key, expected in marlin.from_release(stored, expert_format).items():
        got = model.get_parameter(f"model.layers.0.mlp.experts.{key}")
        assert got.dtype == expected.dtype and torch.equal(got.view(torch.uint8).cpu(), expected.view(torch.uint8))


@pytest.mark.parametrize("expert_format", FORMATS)
def test_dummy_weights_of_a_whole_layer(expert_format: ExpertFormat) -> None:
    cases.dummy_moe(expert_format, SIZES[2], torch.bfloat16)  # compiles what fills
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    moe = cases.dummy_moe(expert_format, (384, 8, 4608, 2304), torch.bfloat16)
    torch.cuda.synchronize()
    took, held = time.perf_counter() - start, torch.cuda.memory_allocated() - before
    more = (torch.cuda.max_memory_allocated() - before - held) / 1e9
    seen: list[torch.Tensor] = []
    moe.capture_fn = seen.append
    out = moe(cases.inputs(32, moe, torch.bfloat16))
    distinct, size = len(seen[0].unique()), float(out.float().square().mean().sqrt())
    print(f"{expert_format}: {took:.2f} s, {held / 1e9:.1f} GB and {more:.1f} more, {distinct} experts, rms {size:.2f}")
    assert distinct >= 150 and bool(out.isfinite().all()) and 0.1 < size < 10 and more < 4


@pytest.mark.parametrize("block_size", [8, 16, 48, 64])
def test_align(block_size: int) -> None:
    for tokens, experts, top_k in ((1, 16, 4), (33, 16, 4), (512, 16, 4), (2, 384, 8), (32, 384, 8), (256, 384, 8)):
        moe_cases.check_align("cuda", tokens, experts, top_k, block_size)
        moe_cases.check_single_token("cuda", experts, top_k, block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_sum(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for tokens, top_k, hidden in ((1, 8, 4608), (33, 8, 4608), (3, 4, 128), (3000, 8, 512)):
        moe_cases.check_sum("cuda", dtype, out_dtype, tokens, top_k, hidden)
