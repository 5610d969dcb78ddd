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

from rollout.kernels import cuda, triton_decode, triton_draft, triton_draft_head, triton_moe_align
from rollout.kernels.draft import Angles, Blocks
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.paged import PagedBatch
from rollout.plugin.device import kernel_sizes
from rollout.plugin.shape import ModelShape
from tests.rollout.engines import engine, generate, random_prompts
from tests.rollout.hopper_compiler import META, Compiler, pretend
from tests.rollout.test_compile_ahead import SIZES
from tests.rollout.test_fused import Calls, calls  # noqa: F401

RUN = JITFunction.run
OF_DRAFTS = tuple(DRAFT_TRIALS)
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
    names, ran = [name for name in cuda._TRITON if name not in ON_HOST + OF_DRAFTS], Counter[str]()

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_batch_compiles_a_drafts_kernels(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Rows and pages as an engine has them: columns of wider tensors, several layers in a page, a place of a block."""
    sizes = replace(SIZES, dtype=dtype, state_dtype=dtype, max_requests=300)
    shape = sizes.draft
    assert shape is not None
    cuda._compile(list(OF_DRAFTS), META, sizes)
    asked = Counter(compiler.asked)
    # Sizes of a batch, beside shapes of the merge; of the cell three and of the logits four.
    assert asked["_attention_kernel"] == 3 and asked["_merge_kernel"] > 3
    assert asked["_rnn_kernel"] == 3 and asked["_token_logits_kernel"] == 4
    unlaunched(monkeypatch)
    heads, kv_heads, size, rank, vocabulary = 12, 2, 128, shape.rank, shape.vocab
    new = lambda *of, dtype=dtype: torch.empty(of, dtype=dtype, device=META)
    float32, int64 = torch.float32, torch.int64
    kv, weight = new(50, kv_heads, 16, 3 * 2 * size)[..., 2 * size : 4 * size], new(size, dtype=float32)
    for requests in (*range(1, 40), 64, 65, 127, 128, 129, 256, 299, 300):
        rows = 7 * requests
        angles = Angles(new(rows, size // 2, dtype=float32), new(rows, size // 2, dtype=float32))
        wide = new(rows, (heads + 2 * kv_heads) * size)
        q, k = (
            triton_draft.norm_rotate(x, weight, angles, 1e-6)
            for x in (wide[:, : heads * size], wide[:, heads * size : (heads + kv_heads) * size])
        )
        triton_draft.store_context(wide[:, heads * size :], weight, angles, 1e-6, kv, new(rows, dtype=int64))
        v, blocks = wide[:, (heads + kv_heads) * size :], Blocks(new(requests, dtype=int64), new(requests, 900).int())
        triton_draft.attention(q, k, v.unflatten(1, (kv_heads, size)), kv, blocks)
        prepared, base = (new(requests, 7, width, dtype=float32)[:, 1] for width in (3 * rank, vocabulary))
        joint, state = new(3 * rank, 2 * rank + sizes.hidden)[:, : 2 * rank], new(requests, rank, dtype=float32)
        tokens = new(requests, 7, dtype=int64)[:, 2]
        triton_draft_head.rnn_step(prepared, state, tokens, new(vocabulary, rank), joint, state, state)
        triton_draft_head.token_logits(base, state, new(vocabulary, rank), base)
    assert Counter(compiler.asked) == asked
