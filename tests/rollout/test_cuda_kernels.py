"""The trial of a GPU's kernels at the start: what passes, what falls back, what stops the start.

Triton's interpreter must be chosen before Triton is imported, so its part runs in a process of its own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.native import KERNELS_ENV
from rollout.kernels import cuda, fallback, trials
from rollout.kernels.cuda import FALLBACKS, KernelError, Kernels
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.expert_trials import EXPERT_TRIALS
from rollout.kernels.trials import TRIALS, AttentionSizes, DraftSizes, Sizes, worst_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
SKINNY = ("skinny_inputs", "skinny_linear", "skinny_logits")
SIZES = Sizes(
    dtype=torch.float32, state_dtype=torch.float32, hidden=64, experts=16, top_k=4, expert_width=32, d_rel=16,
    conv_page=4, gate_cap=4.0, up_cap=25.0, expert_formats=("mxfp8", "nvfp4"), max_tokens=300, attention=tuple(
        AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=16, extent=16, window=window, page=16)
        for window in (None, 16)
    ), draft=DraftSizes(
        num_heads=12, num_kv_heads=2, head_dim=16, page=16, block_rows=7, rank=16, vocab=512, norm_eps=1e-6
    ),
)  # fmt: skip
WAITING = ("decode", "prefill", "draft_attention")


@pytest.fixture(autouse=True)
def all_are_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch, value in (("SKINNY_ROWS", 16), ("VECTOR_ROWS", 8), ("MIN_PAIRS", 48)):
        monkeypatch.setattr(cuda, switch, value)
    cuda._load.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on Hopper alone is tried as well, on the host."""
    monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))


@pytest.mark.parametrize(("most_requests", "seen"), [(33, True), (32, False)])
def test_heads_that_are_merged_together_are_tried_where_they_are_reached(
    monkeypatch: pytest.MonkeyPatch, most_requests: int, seen: bool
) -> None:
    triton_decode = pytest.importorskip("rollout.kernels.triton_decode")
    kind = replace(SIZES.attention[1], num_heads=64, num_kv_heads=8)

    def wrong_together(q_TC: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        out_TC = fallback.decode_attention(q_TC, *rest, **options)
        return out_TC * 1.1 if len(q_TC) * kind.num_heads > triton_decode.MERGE_PROGRAMS else out_TC

    monkeypatch.setattr(cuda, "_triton", lambda name: wrong_together)
    reason = cuda._try("decode", CPU, replace(SIZES, attention=(kind,), max_requests=most_requests))[1]
    assert (reason is not None and "33 requests" in reason) == seen and (reason is None) != seen


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
def test_triton_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.kernels import triton_decode
    from tests.rollout.test_triton_router import products_of_bfloat16

    monkeypatch.setattr(triton_decode, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(trials, "LONG_STEP", ((5, 70),))  # its rows one after the other
    # Without this the interpreter multiplies bfloat16 numbers as integers, and the trial says so.
    kernel, reason = cuda._try("route", CPU, SIZES)
    assert kernel is not None and reason is not None and "computes something else" in reason
    products_of_bfloat16.__wrapped__(monkeypatch)
    kernels = cuda.load(CPU, SIZES, strict=True)
    assert kernels.fell_back == () and kernels.capturable and kernels.few_rows == 0
    assert kernels.decode is triton_decode.attention
    for name in (*SKINNY, "vector_experts"):
        kernel, reason = cuda._try(name, CPU, SIZES)
        assert kernel is not None and reason is None


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the process that it is")
def test_triton_kernels_pass_on_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "kernels_pass"],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs them")
def test_on_a_machine_without_a_gpu_every_kernel_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """Real Triton, no driver."""
    with caplog.at_level(logging.WARNING):
        kernels = cuda.load(CPU, replace(SIZES, dtype=torch.bfloat16), strict=False)
    # `project` takes torch by itself for what is on the host.
    assert set(kernels.fell_back) == set(TRIALS | DRAFT_TRIALS) - {"project"} and not kernels.capturable
    assert kernels.softcap_logits is fallback.softcap_logits and kernels.few_rows == 0
    assert len(caplog.records) == len(TRIALS | DRAFT_TRIALS) - 1
    assert "the kernel prefill does not run on cpu (" in caplog.text
    with pytest.raises(
        KernelError, match=r"the kernel tap_sources must run on cpu while rollout\.strict_kernels is tr"
    ):
        cuda.load(CPU, SIZES, strict=True)


Function = Callable[..., Any]


def with_kernel(monkeypatch: pytest.MonkeyPatch, name: str, kernel: Function) -> None:
    """All kernels are sound but one."""
    monkeypatch.setattr(cuda, "_triton", lambda asked: kernel if asked == name else cuda._FALLBACKS[asked])


def spoiled(name: str) -> Function:
    """A kernel that is wrong in one number of what it returns, or of what it writes last, as by a wrong compilation."""

    def kernel(*arguments: Any, **options: Any) -> Any:
        result = cuda._FALLBACKS[name](*arguments, **options)
        tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
        last = tensors[-1] if result is None else result
        target = last[0] if isinstance(last, tuple) else last
        last_row = target.reshape(-1, target.shape[-1])[-1]
        last_row[1] += 0.2 * last_row.abs().nan_to_num(posinf=0).max() if target.is_floating_point() else 1
        return result

    return kernel


def no_room(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of resource: shared memory, Required: 300000,\n  Hardware limit: 232448")


@pytest.mark.parametrize("name", TRIALS | EXPERT_TRIALS | DRAFT_TRIALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_computes_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hopper: None, name: str, dtype: torch.dtype
) -> None:
    sizes = replace(SIZES, dtype=dtype, state_dtype=dtype)
    with_kernel(monkeypatch, name, spoiled(name))
    with caplog.at_level(logging.WARNING):
        kernels = cuda.load(CPU, sizes, strict=False)
        assert cuda.load(CPU, sizes, strict=False) is kernels
    if name in SKINNY and dtype is torch.float32:
        # Nothing that is used there.
        assert kernels.fell_back == () and kernels.few_rows == 0 and not caplog.records
        return
    assert kernels.few_rows == (16 if dtype is torch.bfloat16 and name not in SKINNY else 0)
    assert kernels.fell_back == (name,) and getattr(kernels, name) is cuda._FALLBACKS[name]
    assert kernels.capturable == (name not in WAITING)
    [record] = caplog.records
    assert f"the kernel {name} does not run on cpu" in record.message and "something else" in record.message
    other = "vLLM's Marlin" if name in EXPERT_TRIALS else "torch"
    assert f"it runs on {other}, about {cuda.SLOWDOWNS[name]} times slower" in record.message
    assert kernels.vector_rows == (0 if name == "vector_experts" else 8)
    assert kernels.min_pairs == (None if name == "grouped_product" else 48)
    assert ("without CUDA graphs" in record.message) == (not kernels.capturable)


def test_a_new_block_is_tried_as_well(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a running block to add to, `conv_mix` is other code."""

    def kernel(*arguments: Any, **options: Any) -> None:
        (spoiled("conv_mix") if arguments[5] is None else fallback.conv_mix)(*arguments, **options)

    with_kernel(monkeypatch, "conv_mix", kernel)
    with caplog.at_level(logging.WARNING):
        assert cuda.load(CPU, SIZES, strict=False).fell_back == ("conv_mix",)
    assert "1 outputs, 9 rows, a new block: it computes something else" in caplog.text


def test_a_kernel_that_is_not_launched_falls_back_or_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_kernel(monkeypatch, "conv_mix", no_room)
    with caplog.at_level(logging.WARNING):
        kernels = cuda.load(CPU, SIZES, strict=False)
    assert kernels.fell_back == ("conv_mix",) and kernels.conv_mix is fallback.conv_mix and kernels.capturable
    assert "(RuntimeError: out of resource: shared memory, Required: 300000, Hardware limit: 232448)" in caplog.text
    message = r"the kernel conv_mix must run on cpu .*out of resource.* Set rollout\.strict_kernels: false .* 15 times"
    with pytest.raises(KernelError, match=message):
        cuda.load(CPU, SIZES, strict=True)


def test_the_kernels_for_few_rows_are_off_where_no_row_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SKINNY_ROWS", 0)
    with_kernel(monkeypatch, "skinny_linear", no_room)
    kernels = cuda.load(CPU, replace(SIZES, dtype=torch.bfloat16), strict=True)
    assert kernels.few_rows == 0 and kernels.fell_back == ()


@pytest.mark.parametrize("name", DRAFT_TRIALS)
def test_a_drafts_kernels_are_tried_where_there_is_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_kernel(monkeypatch, name, no_room)
    assert cuda.load(CPU, replace(SIZES, draft=None), strict=True).fell_back == ()
    with pytest.raises(KernelError, match=rf"the kernel {name} must run on cpu .*out of resource.* to run it on torch"):
        cuda.load(CPU, SIZES, strict=True)


def test_a_drafts_kernels_are_tried_for_every_number_of_requests_that_makes_other_code() -> None:
    """As many as the engine takes; lines of attention are merged together from nine on here."""
    counts = lambda name, sizes: [len(trial.arguments[0]) for trial in DRAFT_TRIALS[name](sizes)]
    sizes = replace(SIZES, draft=replace(SIZES.draft, num_heads=36))
    for most, attention, cell, logits in ((1, [1], [1], [1]), (8, [3], [1, 2], [1]), (9, [3, 9], [1, 2], [1, 9])):
        sizes = replace(sizes, max_requests=most)
        assert [count // 7 for count in counts("draft_attention", sizes)] == attention
        assert (counts("draft_rnn", sizes), counts("draft_logits", sizes)) == (cell, logits)
    sizes = replace(sizes, max_requests=300)
    assert counts("draft_rnn", sizes) == [1, 2, 33] and counts("draft_logits", sizes) == [1, 9, 17, 33]


@pytest.mark.parametrize("name", EXPERT_TRIALS)
def test_an_experts_kernel_that_is_not_launched_stops_a_strict_start(
    monkeypatch: pytest.MonkeyPatch, hopper: None, name: str
) -> None:
    with_kernel(monkeypatch, name, no_room)
    message = (
        rf"the kernel {name} must run on cpu while rollout\.strict_kernels is true; RuntimeError: out of resource.* "
        r"Set rollout\.strict_kernels: false to run it on vLLM's Marlin, about [12]\.3 times slower"
    )
    with pytest.raises(KernelError, match=message):
        cuda.load(CPU, SIZES, strict=True)


@pytest.mark.parametrize(("capability", "changes", "rows", "pairs"), [
    ((9, 0), {}, 8, 48),
    ((8, 9), {}, 0, None),
    ((10, 0), {}, 8, None),
    ((9, 0), {"expert_formats": ()}, 0, None),  # dense experts
    ((9, 0), {"max_tokens": 191}, 8, None),  # 47.75 pairs per expert
    ((9, 0), {"max_tokens": 192}, 8, 48),
    ((9, 0), {"up_cap": 16384.0}, 0, 48),
])  # fmt: skip
def test_experts_leave_marlin_where_their_kernels_are_for_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], changes: dict[str, Any], rows: int, pairs: int | None
) -> None:
    """Elsewhere Marlin is what is supported: nothing is tried, nothing is said, strict or not."""
    asked = []
    monkeypatch.setattr(cuda, "_triton", lambda name: asked.append(name) or cuda._FALLBACKS[name])
    monkeypatch.setattr(cuda, "_capability", lambda device: capability)
    kernels = cuda.load(CPU, replace(SIZES, **changes), strict=True)
    assert (kernels.vector_rows, kernels.min_pairs, kernels.fell_back) == (rows, pairs, ())
    tried = {"vector_experts": rows > 0, "grouped_product": pairs is not None}
    assert {name: name in asked for name in EXPERT_TRIALS} == tried


def test_experts_stay_with_marlin_where_the_switches_are_off(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setattr(cuda, "VECTOR_ROWS", 0)
    monkeypatch.setattr(cuda, "MIN_PAIRS", None)
    monkeypatch.setattr(cuda, "_triton", lambda name: cuda._FALLBACKS[name])
    kernels = cuda.load(CPU, SIZES, strict=True)
    assert kernels.vector_rows == 0 and kernels.min_pairs is None


def test_experts_are_tried_with_every_tile_that_a_step_may_choose() -> None:
    from rollout.kernels.grouped_product import tile_for, tiles_for

    sizes = replace(SIZES, least_pairs=48, max_tokens=600)
    chosen = {tile_for(tokens * 4, 16) for tokens in range(192, 601)}
    assert set(tiles_for(48, 600, 4, 16)) == chosen and len(chosen) == 3
    trials = list(EXPERT_TRIALS["grouped_product"](sizes))
    assert {(t.arguments[8], t.arguments[6], t.arguments[7]) for t in trials} == {
        (expert_format, tile, top_k) for expert_format in ("nvfp4", "mxfp8") for tile in chosen for top_k in (1, 4)
    }
    for trial in trials:
        out, blocks, tile = trial.arguments[4:7]
        used = (blocks.rows.view(-1, tile.tokens) < len(out)).sum(1).tolist()
        # All of a block, what its first part has room for, what its second has.
        assert used == [tile.tokens, tile.second + 1, tile.second - 1] and tile.second + 1 <= tile.first


def test_sound_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_triton", lambda name: cuda._FALLBACKS[name])
    for dtype in (torch.float32, torch.bfloat16):
        assert cuda.load(CPU, replace(SIZES, dtype=dtype), strict=True).fell_back == ()


def test_a_model_may_be_under_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM builds models with another default device and dtype."""
    monkeypatch.setattr(cuda, "_triton", lambda name: cuda._FALLBACKS[name])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert cuda.load(CPU, SIZES, strict=True).fell_back == ()
            assert torch.zeros(1).device.type == "meta" and torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_device_that_a_kernel_ruined_stops_the_start_strict_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def ruined(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", ruined)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(
        KernelError, match=r"the kernel decode must leave NVIDIA H200 usable; .*INKLING_RL_KERNELS=torch"
    ):
        cuda._check_device("decode", torch.device("cuda"), "AcceleratorError: an illegal memory access")


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_ENV, "torch")
    assert cuda.load(CPU, SIZES, strict=True) is FALLBACKS
    assert FALLBACKS.few_rows == FALLBACKS.vector_rows == 0 and FALLBACKS.min_pairs is None


def test_errors_are_those_of_the_worst_row() -> None:
    wanted = torch.ones(2, 50, 4)
    got = wanted.clone()
    assert worst_error(got, wanted) == 0.0
    got[1, 3] = 1.5
    assert worst_error(got, wanted) == pytest.approx(0.5)
    got = wanted.clone()
    got[1, 3, 2] = 1.5
    assert worst_error(got, wanted) == pytest.approx(0.5)
    wanted[0, 1, 1] = got[0, 1, 1] = -torch.inf
    assert worst_error(got, wanted) == pytest.approx(0.5)
    got[0, 0, 0] = torch.nan
    assert worst_error(got, wanted) == torch.inf
    assert worst_error((torch.tensor([1]), None), (torch.tensor([1]), None)) == 0.0
    assert worst_error(torch.tensor([1]), torch.tensor([2])) == torch.inf
    assert worst_error(wanted.bfloat16(), wanted) == torch.inf and worst_error(wanted[:1], wanted) == torch.inf


def test_a_table_says_what_can_be_captured() -> None:
    sound: Kernels = replace(FALLBACKS, fell_back=("route", "prepare"))
    assert sound.capturable and not replace(sound, fell_back=("prefill",)).capturable
