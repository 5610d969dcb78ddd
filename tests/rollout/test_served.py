"""After a start nothing is compiled: whatever batch comes, its kernels are those that were compiled before the trials.

A real engine runs on the CPU, with torch in place of every kernel; beside it each kernel gets as far as its launch, for
a Hopper GPU that is not there, in float32. What a launch is compiled for is decided before that.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.runtime.jit import JITFunction

from rollout.kernels import cuda, triton_decode, triton_moe_align
from rollout.kernels.paged import PagedBatch
from rollout.plugin.device import kernel_sizes
from rollout.plugin.shape import ModelShape
from tests.rollout.engines import engine, generate, random_prompts
from tests.rollout.hopper_compiler import META, Compiler, pretend
from tests.rollout.test_compile_ahead import SIZES
from tests.rollout.test_fused import Calls, calls  # noqa: F401

RUN = JITFunction.run
ON_HOST = ("project", "skinny_inputs", "skinny_linear", "skinny_logits", "vector_experts", "grouped_product")
"""Kernels that leave what is on a host to torch, or are for bfloat16."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    pretend(monkeypatch)
    return Compiler(monkeypatch)


def unlaunched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JITFunction, "run", lambda self, *args, warmup, **kw: RUN(self, *args, warmup=True, **kw))


def test_an_engine_s_steps_compile_nothing(
    tiny_checkpoint: Path,
    calls: Calls,  # noqa: F811
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, ran = [name for name in cuda._TRITON if name not in ON_HOST], Counter[str]()

    def beside(name: str) -> Any:
        kernel, slow = cuda._triton(name), getattr(calls.kernels, name)

        def call(*arguments: Any, **options: Any) -> Any:
            ran[name] += 1
            kernel(*arguments, **options)
            return slow(*arguments, **options)

        return call

    calls.kernels = replace(calls.kernels, **{name: beside(name) for name in names})
    with engine(tiny_checkpoint, max_num_batched_tokens=96, max_num_seqs=40) as llm:
        config = llm.llm_engine.vllm_config
        cuda._compile(names, META, kernel_sizes(config, ModelShape.from_config(config.model_config.hf_text_config)))
        unlaunched(monkeypatch)
        asked = Counter(compiler.asked)
        assert asked["_decode_kernel"] == 2 * 2 * 2 and asked["_prepare_kernel"] == 2
        generate(llm, random_prompts((3, 1, 9, 64, 8, 17, 40, 70, 2, 30)), max_tokens=12, prompt_logprobs=5)
        generate(llm, random_prompts([3, 5, 7, 33] * 8 + [90, 80]), max_tokens=6)
        generate(llm, random_prompts([1]), max_tokens=3)
    assert calls.max_queries == {1, 8} and calls.mixed > 0
    assert ran.keys() == set(names) - {"route", "activation", "align", "weighted_sum"}
    assert Counter(compiler.asked) == asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_batch_compiles_decode_attention(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    counts = (1, 4, 8)
    sizes = replace(SIZES, dtype=dtype, state_dtype=dtype, max_requests=300, max_queries=counts)
    cuda._compile(["decode"], META, sizes)
    asked = Counter(compiler.asked)
    # Kinds of attention, counts of rows, sizes of a batch.
    assert asked["_decode_kernel"] == 2 * 3 * 3 and asked["merge_kernel"] > asked["_decode_kernel"]
    unlaunched(monkeypatch)
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=META)
    for trial in cuda._TRIALS["decode"](sizes):
        most = trial.options["max_queries"]
        *rows_TC, kv_BKNC = trial.to(META)[:5]
        for requests in (*range(1, 60), 64, 127, 128, 129, 256, 299, 300):
            for rows in {requests, requests + most - 1, requests * most}:
                batch = PagedBatch(new(requests + 1), new(requests), new(requests, 33), new(rows).long())
                given = [torch.empty(rows, x.shape[1], dtype=x.dtype, device=META) for x in rows_TC]
                rest = trial.to(META)[6:]
                triton_decode.attention(*given, kv_BKNC, batch, *rest, **trial.options)
    assert Counter(compiler.asked) == asked


def test_no_number_of_tokens_compiles_the_order_of_pairs(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda._compile(["align"], META, SIZES)
    asked = Counter(compiler.asked)
    unlaunched(monkeypatch)
    for tokens in range(1, triton_moe_align.MAX_PAIRS // SIZES.top_k + 1):
        size = triton_moe_align.block_size(tokens * SIZES.top_k, SIZES.experts)
        triton_moe_align.align(torch.empty(tokens, SIZES.top_k, dtype=torch.int32, device=META), SIZES.experts, size)
    assert Counter(compiler.asked) == asked and asked["_align_kernel"] > 5
