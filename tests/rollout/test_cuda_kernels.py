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
from rollout.kernels import cuda, fallback
from rollout.kernels.cuda import FALLBACKS, KernelError, Kernels
from rollout.kernels.trials import TRIALS, AttentionSizes, Sizes, worst_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
SKINNY = ("skinny_inputs", "skinny_linear", "skinny_logits")
SIZES = Sizes(
    dtype=torch.float32, state_dtype=torch.float32, hidden=64, experts=16, top_k=4, expert_width=32, d_rel=16,
    conv_page=4, gate_cap=4.0, up_cap=25.0, attention=tuple(
        AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=16, extent=16, window=window, page=16)
        for window in (None, 16)
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def all_are_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SKINNY_ROWS", 16)
    cuda._load.cache_clear()


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
def test_triton_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.kernels import triton_decode
    from tests.rollout.test_triton_router import products_of_bfloat16

    monkeypatch.setattr(triton_decode, "_multiprocessors", lambda device: 2)
    # Without this the interpreter multiplies bfloat16 numbers as integers, and the trial says so.
    kernel, reason = cuda._try("route", CPU, SIZES)
    assert kernel is not None and reason is not None and "computes something else" in reason
    products_of_bfloat16.__wrapped__(monkeypatch)
    kernels = cuda.load(CPU, SIZES, strict=True)
    assert kernels.fell_back == () and kernels.capturable and kernels.few_rows == 0
    assert kernels.decode is triton_decode.attention
    for name in SKINNY:
        kernel, reason = cuda._try(name, CPU, SIZES)
        assert kernel is not None and reason is None


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
    assert set(kernels.fell_back) == set(TRIALS) - {"project"} and not kernels.capturable
    assert kernels.softcap_logits is fallback.softcap_logits and kernels.few_rows == 0
    assert len(caplog.records) == len(TRIALS) - 1
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
        last = [x for x in arguments if isinstance(x, torch.Tensor)][-1] if result is None else result
        target = last[0] if isinstance(last, tuple) else last
        last_row = target.reshape(-1, target.shape[-1])[-1]
        last_row[1] += 0.2 * last_row.abs().nan_to_num(posinf=0).max() if target.is_floating_point() else 1
        return result

    return kernel


def no_room(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of resource: shared memory, Required: 300000,\n  Hardware limit: 232448")


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_computes_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, dtype: torch.dtype
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
    assert kernels.capturable == (name not in ("decode", "prefill"))
    [record] = caplog.records
    assert f"the kernel {name} does not run on cpu" in record.message and "something else" in record.message
    assert f"about {cuda.SLOWDOWNS[name]} times slower" in record.message
    assert ("without CUDA graphs" in record.message) == (not kernels.capturable)


def test_a_new_block_is_tried_as_well(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a running block to add to, `conv_mix` is other code."""

    def kernel(*arguments: Any) -> None:
        (spoiled("conv_mix") if arguments[5] is None else fallback.conv_mix)(*arguments)

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
    message = r"the kernel conv_mix must run on cpu .*out of resource.* Set rollout\.strict_kernels: false .* 10 times"
    with pytest.raises(KernelError, match=message):
        cuda.load(CPU, SIZES, strict=True)


def test_the_kernels_for_few_rows_are_off_where_no_row_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SKINNY_ROWS", 0)
    with_kernel(monkeypatch, "skinny_linear", no_room)
    kernels = cuda.load(CPU, replace(SIZES, dtype=torch.bfloat16), strict=True)
    assert kernels.few_rows == 0 and kernels.fell_back == ()


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
