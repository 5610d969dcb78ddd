"""The engine against transformers, float32: cold, prefix hits, chunked prefill, preemption, block sizes, batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.kernels import ops
from tests.rollout.engines import (
    PROMPT_LENGTHS,
    completion_of,
    differences,
    engine,
    generate,
    largest_change,
    random_prompts,
)

TOLERANCE = 1e-4
# Composition of a batch, chunking and cached prefixes must not matter: 1e-5 would do, the C++ kernels promise
# equal bits.
INVARIANCE = 0.0 if ops.have_native() else 1e-5


def preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


class TestLargePages:
    """One engine, pages of 32 tokens, everything of a prompt in one step."""

    @pytest.fixture(scope="class")
    def llm(self, tiny_checkpoint: Path) -> Iterator[Any]:
        with engine(tiny_checkpoint, block_size=32) as llm:
            yield llm

    def test_prompts_and_completions_have_the_oracles_logprobs(self, llm: Any, tiny_oracle: Any) -> None:
        prompts = random_prompts(PROMPT_LENGTHS)
        outputs = generate(llm, prompts, max_tokens=24, prompt_logprobs=5)
        found = differences(tiny_oracle, prompts, outputs)
        assert len(found) > 5 * (sum(PROMPT_LENGTHS) - len(prompts) + 24 * len(prompts)) - 1
        assert max(found) < TOLERANCE

    def test_a_prefix_hit_changes_nothing(self, llm: Any, tiny_oracle: Any) -> None:
        llm.reset_prefix_cache()
        prompts = random_prompts(PROMPT_LENGTHS, seed=1)
        cold = generate(llm, prompts)
        warm = generate(llm, prompts)
        assert [o.num_cached_tokens for o in cold] == [0] * len(prompts)
        assert [o.num_cached_tokens for o in warm] == [0, 0, 0, 32, 96, 0, 32, 128]
        assert largest_change(cold, warm) <= INVARIANCE
        longer = [[*prompt, 7, 8, 9] for prompt in prompts]
        outputs = generate(llm, longer)
        assert sum(o.num_cached_tokens for o in outputs) == 32 + 96 + 32 + 128
        assert max(differences(tiny_oracle, longer, outputs)) < TOLERANCE

    def test_requests_that_share_a_prefix_in_one_step(self, llm: Any, tiny_oracle: Any) -> None:
        """vLLM gives a request the pages of a prefix that another one fills in the same step."""
        llm.reset_prefix_cache()
        [shared] = random_prompts((70,), seed=11)
        prompts = [shared[:n] + [tail] * 6 for n in (70, 64, 40, 33, 32) for tail in (3, 4)]
        outputs = generate(llm, prompts, max_tokens=24)
        assert sum(o.num_cached_tokens for o in outputs) > 0
        assert max(differences(tiny_oracle, prompts, outputs)) < TOLERANCE
        llm.reset_prefix_cache()
        alone = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            alone += generate(llm, [prompt], max_tokens=24)
        assert largest_change(outputs, alone) <= INVARIANCE

    def test_batch_composition_changes_nothing(self, llm: Any) -> None:
        prompts = random_prompts((5, 40, 77, 12), seed=2)
        llm.reset_prefix_cache()
        together = generate(llm, prompts, max_tokens=32)
        llm.reset_prefix_cache()
        alone = [generate(llm, [prompt], max_tokens=32)[0] for prompt in prompts]
        assert largest_change(together, alone) <= INVARIANCE

    def test_allowed_token_ids_work_with_a_padded_vocabulary(self, llm: Any) -> None:
        [output] = generate(llm, random_prompts((9,)), allowed_token_ids=[3, 4, 499])
        assert set(completion_of(output)) <= {3, 4, 499}

    def test_padding_tokens_are_never_sampled(self, llm: Any) -> None:
        bias = {500: 100.0, 511: 100.0}
        outputs = generate(llm, random_prompts((9,) * 4, seed=3), temperature=2.0, logit_bias=bias, seed=0)
        assert max(token for output in outputs for token in completion_of(output)) < 500

    def test_three_groups_of_pages(self, llm: Any) -> None:
        """The scheduler pays per group, request and step."""
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        assert [len(group.layer_names) for group in groups] == [2, 2, 2]


def test_chunked_prefill_and_preemption(tiny_checkpoint: Path, tiny_oracle: Any) -> None:
    prompts = random_prompts((70, 33, 90, 5, 6, 7, 41, 12), seed=4)
    with engine(tiny_checkpoint, enable_prefix_caching=False) as llm:
        reference = generate(llm, prompts, max_tokens=100)
    with engine(tiny_checkpoint, max_num_batched_tokens=16, max_num_seqs=8, num_gpu_blocks_override=56) as llm:
        outputs = generate(llm, prompts, max_tokens=100)
        assert preemptions(llm) > 0
    assert max(differences(tiny_oracle, prompts, outputs)) < TOLERANCE
    assert largest_change(reference, outputs) <= INVARIANCE


@pytest.mark.parametrize("block_size", [16, 128])
def test_block_sizes(tiny_checkpoint: Path, tiny_oracle: Any, block_size: int) -> None:
    prompts = random_prompts((200, 130, 260, 64), seed=5)
    with engine(tiny_checkpoint, block_size=block_size, max_num_batched_tokens=128) as llm:
        for cached in ([0, 0, 0, 0], [n // block_size * block_size for n in (199, 129, 259, 63)]):
            outputs = generate(llm, prompts, max_tokens=24)
            assert [o.num_cached_tokens for o in outputs] == cached
            assert max(differences(tiny_oracle, prompts, outputs)) < TOLERANCE


def test_the_torch_kernels_serve_the_same_model(
    tiny_checkpoint: Path, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a machine without a compiler."""
    monkeypatch.setattr(ops, "have_native", lambda: False)
    prompts = random_prompts((20, 45, 3), seed=12)
    with engine(tiny_checkpoint, max_num_batched_tokens=32) as llm:
        assert max(differences(tiny_oracle, prompts, generate(llm, prompts, max_tokens=8))) < TOLERANCE
