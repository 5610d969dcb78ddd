"""The trial of the kernels on a CUDA device, and their fallbacks there: what they give, and that graphs hold them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from rollout.kernels import cuda
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.trials import TRIALS, AttentionSizes, DraftSizes, Sizes, Trial

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16
SMALL = Sizes(
    dtype=BF16, state_dtype=BF16, hidden=4608, experts=384, top_k=8, expert_width=2304, d_rel=16, conv_page=8,
    gate_cap=4.0, up_cap=25.0, max_queries=(1, 8), attention=(
        AttentionSizes(num_heads=48, num_kv_heads=8, head_dim=128, extent=1024, window=None, page=64),
        AttentionSizes(num_heads=48, num_kv_heads=8, head_dim=128, extent=1024, window=1024, page=16),
    ), draft=DraftSizes(
        num_heads=48, num_kv_heads=8, head_dim=128, page=64, block_rows=7, rank=256, vocab=201024, norm_eps=1e-6
    ),
)  # fmt: skip
TINY = replace(
    SMALL, hidden=128, experts=16, top_k=4, expert_width=64, expert_formats=("mxfp8", "nvfp4"), max_tokens=300,
    attention=tuple(
        AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=16, extent=16, window=window, page=16)
        for window in (None, 16)
    ), draft=DraftSizes(
        num_heads=12, num_kv_heads=2, head_dim=16, page=16, block_rows=7, rank=16, vocab=512, norm_eps=1e-6
    ),
)  # fmt: skip
ALL = TRIALS | DRAFT_TRIALS
SIZES = {
    "small": SMALL,
    "tiny": TINY,
    "tiny, float32": replace(TINY, dtype=torch.float32, state_dtype=torch.float32, expert_formats=()),
    "tiny, float32 over bfloat16": replace(TINY, dtype=torch.float32, expert_formats=()),
}


@pytest.fixture(autouse=True)
def all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch, value in (("SKINNY_ROWS", 32), ("VECTOR_ROWS", 8), ("MIN_PAIRS", 48)):
        monkeypatch.setattr(cuda, switch, value)
    cuda._load.cache_clear()


@pytest.mark.parametrize("name", SIZES)
def test_every_kernel_passes(name: str) -> None:
    started = time.perf_counter()
    kernels = cuda.load(torch.device("cuda", 0), SIZES[name], strict=True)
    print(f"{name}: {time.perf_counter() - started:.1f} s")
    assert kernels.fell_back == () and kernels.capturable
    if SIZES[name].expert_formats and torch.cuda.get_device_capability() == (9, 0):
        assert (kernels.vector_rows, kernels.min_pairs) == (8, 48)


def check_fallback(name: str, trial: Trial) -> None:
    """The fallback on the device, for once in the kernel's place."""
    slow = cuda._FALLBACKS[name]
    assert cuda._error(slow, slow, trial, torch.device("cuda")) <= max(trial.limit, 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_fallback_gives_the_same_on_the_device(name: str) -> None:
    for trial in ALL[name](SIZES["tiny, float32"]):
        check_fallback(name, trial)
    for trial in ALL[name](SMALL):
        check_fallback(name, trial)


@pytest.mark.parametrize("name", [name for name in ALL if name not in cuda._WAITING])
def test_a_graph_holds_a_fallback(name: str) -> None:
    """Captured, and replayed after what it wrote was spoiled."""
    slow, device = cuda._FALLBACKS[name], torch.device("cuda")
    trial = next(iter(ALL[name](TINY)))
    given = trial.to(device)
    trial.call(slow, given)
    again = trial.to(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = trial.call(slow, again)
    expected = trial.to(torch.device("cpu"))
    wanted = trial.call(slow, expected)
    graph.replay()
    host = torch.device("cpu")
    pairs = [(trial.kept(cuda.moved(result, host)), trial.kept(wanted))]
    pairs += [(cuda.moved(again[place], host), expected[place]) for place in trial.written]
    assert max(cuda.worst_error(got, want) for got, want in pairs) <= max(trial.limit, 1e-6)
