"""Compilation before the trials of a GPU's kernels: all of it, none twice, nothing launched, errors left to the trials.

Triton itself runs up to its compiler, for sm_90; what that would make of it is known elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.runtime._async_compile import active_mode  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from rollout.kernels import compile_ahead as ahead  # noqa: E402
from rollout.kernels import cuda  # noqa: E402
from rollout.kernels.compile_ahead import compile_ahead  # noqa: E402
from rollout.kernels.trials import AttentionSizes, DraftSizes, Sizes  # noqa: E402
from rollout.kernels.triton_activation import expert_activation  # noqa: E402
from tests.rollout.hopper_compiler import META, Compiler, pretend  # noqa: E402

BF16 = torch.bfloat16
SIZES = Sizes(
    dtype=BF16, state_dtype=BF16, hidden=256, experts=16, top_k=4, expert_width=128, d_rel=16, conv_page=4,
    gate_cap=4.0, up_cap=25.0, max_queries=(1, 8), expert_formats=("mxfp8", "nvfp4"), max_tokens=1000,
    few_rows=16, least_pairs=48, attention=tuple(
        AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=128, extent=64, window=window, page=16)
        for window in (None, 64)
    ), draft=DraftSizes(
        num_heads=12, num_kv_heads=2, head_dim=128, page=16, block_rows=7, rank=32, vocab=512, norm_eps=1e-6
    ),
)  # fmt: skip
RUN = JITFunction.run


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def activation(block: int) -> None:
    """A kernel for each size of a block."""
    expert_activation(torch.empty(3, 64, device=META), 4.0, 25.0, block=block)


def everything_is_as_before() -> bool:
    return active_mode.get() is None and JITFunction.run is RUN


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_trials_compile_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, dtype: torch.dtype
) -> None:
    sizes = replace(SIZES, dtype=dtype, state_dtype=dtype, few_rows=16 if dtype is BF16 else 0)
    used = [name for name in cuda.SLOWDOWNS if cuda._is_used(name, META, sizes)]
    assert (set(used) == set(cuda.SLOWDOWNS)) == (dtype is BF16)
    cuda._compile(used, META, sizes)
    assert everything_is_as_before()
    asked = Counter(compiler.asked)
    of_each = {
        "_sources_kernel", "_prepare_kernel", "_conv_mix_kernel", "_early_kernel", "_choose_kernel", "_logits_kernel",
        "_activation_kernel", "_align_kernel", "_sum_kernel", "_project_kernel", "_softcap_kernel",
        "_decode_kernel", "merge_kernel", "_table_kernel", "_expert_up_kernel", "_expert_down_kernel", "product_kernel",
        "_norm_rotate_kernel", "_store_kernel", "_attention_kernel", "_merge_kernel", "_rnn_kernel",
        "_token_logits_kernel",
    }  # fmt: skip
    fast = {"prefill_kernel", "_skinny_kernel", "_segment_kernel"}
    assert asked.keys() == of_each | (fast if dtype is BF16 else {"_prefill_kernel"})
    # As the trials call them, but that none is launched. Unlike `_call_all`, this passes over no error.
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, warmup, **kw: RUN(self, *args, warmup=True, **kw))
    with cuda._plain_defaults():
        for name in used:
            for trial in cuda._TRIALS[name](sizes):
                trial.call(cuda._triton(name), trial.to(META))
    assert Counter(compiler.asked) == asked


def test_nothing_is_launched_and_the_compiler_is_triton_s() -> None:
    compiled = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["fn"].name)
        compile_ahead([lambda: activation(64), lambda: activation(128), lambda: activation(64)], threads=2)
        assert len(compiled) == 2 and "_activation_kernel" in compiled[0]
        # Compiled, and not to be launched without a GPU.
        with pytest.raises(AttributeError, match="_Driver"):
            activation(64)
        assert len(compiled) == 2
    assert everything_is_as_before()


def test_what_does_not_compile_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    made = type(compiler).__call__

    def compile_some(self: Compiler, src: Any, *arguments: Any, **options: Any) -> object:
        if src.constants[(7,)] == 128:
            raise RuntimeError("ptxas: no registers left")
        return made(self, src, *arguments, **options)

    monkeypatch.setattr(Compiler, "__call__", compile_some)
    compile_ahead([lambda block=block: activation(block) for block in (128, 64, 256)], threads=1)
    assert len(compiler.asked) == 2 and everything_is_as_before()
    with pytest.raises(RuntimeError, match="no registers left"):
        activation(128)


def test_a_kernel_that_cannot_be_called_keeps_no_other_from_compiling(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    whole = cuda._triton

    def some(name: str) -> Any:
        if name == "align":
            raise ImportError("no such module")
        return whole(name) if name == "activation" else lambda *_, **__: 1 / 0

    monkeypatch.setattr(cuda, "_triton", some)
    cuda._compile(["conv_mix", "align", "activation"], META, SIZES)
    assert compiler.asked == ["_activation_kernel"]


def test_without_it_a_start_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode")
    cuda._compile(["activation"], META, SIZES)
    assert "kernels are compiled one after the other, about a minute: AttributeError" in caplog.text
    assert everything_is_as_before()


def test_an_interrupt_does_not_wait_for_what_has_not_begun(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    begun, interrupted, made = Event(), Event(), type(compiler).__call__

    def compile_slowly(self: Compiler, *arguments: Any, **options: Any) -> object:
        begun.set()
        interrupted.wait(10)
        return made(self, *arguments, **options)

    class Stop(Event):
        def set(self) -> None:
            super().set()
            interrupted.set()

    def interrupt() -> None:
        begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "__call__", compile_slowly)
    monkeypatch.setattr(ahead, "Event", Stop)
    with pytest.raises(KeyboardInterrupt):
        compile_ahead([*(lambda block=block: activation(block) for block in (64, 128, 256)), interrupt], threads=1)
    assert interrupted.is_set() and len(compiler.asked) == 1 and everything_is_as_before()


def test_a_long_start_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        compile_ahead([lambda: activation(64)])
        assert not caplog.records
        said = Event()
        made = type(compiler).__call__

        def compile_slowly(self: Compiler, *arguments: Any, **options: Any) -> object:
            said.wait(10)
            return made(self, *arguments, **options)

        monkeypatch.setattr(Compiler, "__call__", compile_slowly)
        monkeypatch.setattr(ahead, "PATIENCE", 0.01)
        monkeypatch.setattr(ahead.logger, "info", lambda *words: (said.set(), caplog.handler.records.append(words)))
        compile_ahead([lambda: activation(128), lambda: activation(256)], threads=3)
    assert caplog.records == [("compiling %d kernels on %d threads", 2, 3)]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_it_comes_before_the_first_trial_and_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(cuda, "_compile", lambda used, *_: happened.append(list(used)))
    monkeypatch.setattr(cuda, "_try", lambda name, *_: (happened.append(name) or name, None))
    cuda._load.cache_clear()
    cuda.load(torch.device(kind), SIZES, strict=True)
    cuda._load.cache_clear()
    tried = list(cuda.SLOWDOWNS)
    assert happened == ([tried, *tried] if kind == "cuda" else tried)
