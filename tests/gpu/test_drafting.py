"""Drafting on a GPU through vLLM's V2 runner: what is drafted, and that what comes out is what came without a draft.

On the shipped model and its trained draft, whose blocks are often right, and on a random model, whose are not. Figures
with `pytest -s`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl import byte_tokenizer
from inkling_rl.checkpoint.reader import resolve
from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.engine_args import DRAFT_WORKER
from lora.files import write_adapter
from tests.gpu.engines import Watched, engine, gpu_oracle, is_second_runner, step_through
from tests.gpu.test_engine import ALPHA, RANK, adapter_state
from tests.rollout.drafting import Drafted, chi_square, counter, switch_draft, write_version
from tests.rollout.engines import completion_of, differences, engine_logprobs, generate, oracle, random_prompts
from tests.rollout.test_drafting import Reference, check_blocks
from tests.rollout.test_drafting_distribution import ALLOWED, DIGITS, LEVEL, PREFIXES, TESTED, marginals
from tests.rollout.test_engine_bf16 import task_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = resolve("builtin:tiny-arithmetic")
NUM_TOKENS = 7
TIE = 1e-4
"""Where the two best log-probabilities are closer, another order of a sum may choose the other."""

BF16_TIE = 0.1
ARGUMENTS: dict[str, Any] = {"cudagraph_capture_sizes": [8, 16, 32, 64, 128], "max_num_seqs": 16}
MANY: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 64, "max_num_batched_tokens": 4096, "dtype": "float32"}
TOKENS = 40
ACCEPTED = ("num_accepted_tokens", "num_drafts")


def speculative(path: str | Path, sampling: str = "probabilistic", num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """vLLM's `speculative_config` for a draft on a GPU."""
    return {
        "method": "dspark", "model": str(path), "num_speculative_tokens": num_tokens, "draft_sample_method": sampling,
        "disable_eagle_block_drop": True,
    }  # fmt: skip


def drafting(path: Path, sampling: str = "probabilistic", num_tokens: int = NUM_TOKENS, **arguments: Any) -> Any:
    arguments = ARGUMENTS | arguments | {"worker_extension_cls": DRAFT_WORKER}
    return engine(path, **arguments, speculative_config=speculative(path, sampling, num_tokens))


@contextlib.contextmanager
def drafted_eagerly(gpu: Watched) -> Iterator[None]:
    """No CUDA graph of a draft inside."""
    graphs = gpu.runner.speculator.query_cudagraph_manager
    candidates, graphs._candidates = graphs._candidates, {}
    try:
        yield
    finally:
        graphs._candidates = candidates


def addresses(gpu: Watched) -> dict[str, int]:
    """Where a draft's parameters lie."""
    return {name: value.data_ptr() for name, value in gpu.runner.speculator.model.named_parameters()}


@contextlib.contextmanager
def watched(gpu: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drafted]]:
    """Every block that is drafted inside, without graphs of drafts."""
    from rollout.plugin.draft_cuda import CudaDraft
    from rollout.plugin.speculator import DSparkSpeculator

    seen: list[Drafted] = []
    blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute, propose = CudaDraft.hidden, DSparkSpeculator.propose

    def spy_hidden(self: Any, embedded: torch.Tensor, given: Any) -> torch.Tensor:
        hidden = compute(self, embedded, given)
        blocks.append((given.lengths.cpu(), hidden.float().cpu()))
        return hidden

    def spy(self: Any, input_batch: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        tokens = propose(self, input_batch, *arguments, **options)
        lengths, hidden = blocks.pop()
        states, anchors = hidden.unflatten(0, (len(lengths), -1)), self.block_ids[:, 0].tolist()
        for row, request in enumerate(input_batch.req_ids):
            seen.append(Drafted(request, int(lengths[row]), anchors[row], tokens[row].tolist(), states[row]))
        return tokens

    with monkeypatch.context() as patch, drafted_eagerly(gpu):
        patch.setattr(CudaDraft, "hidden", spy_hidden)
        patch.setattr(DSparkSpeculator, "propose", spy)
        yield seen


def check_same(expected: Sequence[Any], outputs: Sequence[Any], tie: float = TIE) -> str:
    """Greedy tokens are the same up to the first near tie, of which there is one in 1,000 tokens at the most."""
    ties, total = [], 0
    for first, second in zip(expected, outputs, strict=True):
        ours, theirs = completion_of(first), completion_of(second)
        assert len(ours) == len(theirs)
        total += len(ours)
        place = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            best, other = sorted(engine_logprobs(first)[place].values(), reverse=True)[:2]
            assert best - other < tie, f"token {place}: {best - other:.1e} apart"
            ties.append(f"{best - other:.0e}")
    assert len(ties) * 1000 <= total or tie > TIE
    return f"{total} tokens, {len(ties)} near ties {ties}"


def acceptance(gpu: Watched, run: Callable[[], object]) -> float:
    """Tokens per verification step of what is run, those behind a stop token included."""
    before = [counter(gpu.llm, name) for name in ACCEPTED]
    run()
    accepted, drafts = (counter(gpu.llm, name) - b for name, b in zip(ACCEPTED, before, strict=True))
    return 1 + accepted / drafts


class TestFloat32:
    """One engine with a draft, after one without."""

    @pytest.fixture(scope="class")
    def prompts(self) -> list[list[int]]:
        return [*task_prompts(MODEL, 100), *random_prompts([3 + 7 * (n % 40) for n in range(100)], seed=6)]

    @pytest.fixture(scope="class")
    def plain(self, prompts: list[list[int]]) -> list[Any]:
        """Greedy completions without a draft, with log-probabilities."""
        with engine(MODEL, dtype="float32", max_num_seqs=16) as gpu:
            return generate(gpu.llm, prompts, max_tokens=TOKENS)

    @pytest.fixture(scope="class")
    def gpu(self, plain: list[Any]) -> Iterator[Watched]:
        with drafting(MODEL, dtype="float32") as watched:
            yield watched

    @pytest.fixture(scope="class")
    def exact(self) -> Any:
        return gpu_oracle(MODEL)

    def test_runner_and_graphs(self, gpu: Watched) -> None:
        from vllm.config.compilation import CUDAGraphMode

        assert is_second_runner(gpu.runner)
        assert gpu.runner.scheduler_config.async_scheduling
        graphs = gpu.runner.speculator.query_cudagraph_manager
        assert graphs.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        assert graphs.captured_token_counts() == [7 * requests for requests in (1, 2, 4, 8, 16)]
        assert gpu.runner.cudagraph_manager.captured_token_counts() == [8 * requests for requests in (1, 2, 4, 8, 16)]
        assert not gpu.model.model.kernels.fell_back

    def test_greedy_output_is_that_without_a_draft(
        self, gpu: Watched, plain: list[Any], prompts: list[list[int]]
    ) -> None:
        with contextlib.ExitStack() as stack:
            for what in ("cold", "cached", "in chunks", "eagerly"):
                if what == "in chunks":
                    gpu.forget()
                    stack.enter_context(gpu.in_chunks(24))
                if what == "eagerly":
                    gpu.forget()
                    stack.enter_context(gpu.eagerly())
                    stack.enter_context(drafted_eagerly(gpu))
                replays = gpu.replays
                outputs = generate(gpu.llm, prompts, max_tokens=TOKENS)
                assert (gpu.replays > replays) == (what != "eagerly")
                print(f"greedy, {what}: {check_same(plain, outputs)}")
        assert sum(output.num_cached_tokens for output in generate(gpu.llm, prompts[:4])) > 0

    def test_preempted(self, gpu: Watched, plain: list[Any], prompts: list[list[int]]) -> None:
        core = gpu.llm.llm_engine
        at = {step: lambda ids: core.reset_prefix_cache(reset_running_requests=True) for step in (4, 9, 14)}
        outputs = step_through(gpu, prompts[96:112], at, max_tokens=TOKENS)
        print(f"greedy, preempted: {check_same(plain[96:112], outputs)}")

    def test_blocks_are_the_references(self, gpu: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cold, cached, in chunks; after rejections, which leave other tokens' context in the pages."""
        prompts = [*task_prompts(MODEL, 4), *random_prompts((3, 1, 64, 100, 33, 130), seed=20)]
        reference = Reference(MODEL, oracle(MODEL))
        for chunk in (0, 0, 16):
            if chunk:
                gpu.forget()
            with gpu.in_chunks(chunk), watched(gpu, monkeypatch) as seen:
                outputs = generate(gpu.llm, prompts, max_tokens=24)
            assert check_blocks(seen, outputs, prompts, reference) >= len(prompts) * 4

    def test_a_graph_drafts_what_is_drafted_without(self, gpu: Watched) -> None:
        """As many tokens are accepted."""
        prompts, found = task_prompts(MODEL, 64), []
        for context in (contextlib.nullcontext(), drafted_eagerly(gpu)):
            with context:
                found.append(acceptance(gpu, lambda: generate(gpu.llm, prompts, max_tokens=24)))
        print(f"tokens per step with graphs and without, greedy: {found}")
        assert abs(found[0] - found[1]) < 0.02 and found[0] > 2

    def test_sampled_tokens_have_the_models_logprobs(self, gpu: Watched, exact: Any, prompts: list[list[int]]) -> None:
        prompts = prompts[90:110]
        outputs = generate(gpu.llm, prompts, max_tokens=TOKENS, temperature=1.0, seed=1, prompt_logprobs=5)
        found = differences(exact, prompts, outputs)
        print(f"fp32, sampled with a draft: {len(found)} values, max |difference| {max(found):.1e}")
        assert max(found) < TIE

    def test_the_shipped_draft_is_as_good_as_on_a_cpu(self, gpu: Watched) -> None:
        sampling: dict[str, Any] = {
            "temperature": 1.0, "max_tokens": 48, "ignore_eos": False, "stop_token_ids": [byte_tokenizer.EOS_TOKEN_ID],
        }  # fmt: skip
        found = acceptance(gpu, lambda: generate(gpu.llm, task_prompts(MODEL, 256), **sampling))
        print(f"tokens per step, T=1: {found:.2f}")
        assert found > 4.3

    def test_another_draft_takes_over(
        self, gpu: Watched, plain: list[Any], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In graphs, which were captured on the old one's weights, too: parameters stay where they are."""
        [before] = gpu.llm.collective_rpc("draft_status", args=(True,))
        places = addresses(gpu)
        version = before["version"] + 1
        path = write_version(MODEL, tmp_path / "draft", version, before["version"], noise=0.5)
        [staged] = gpu.llm.collective_rpc("stage_draft", args=(str(path), version))
        switch_draft(gpu.llm, version)
        [after] = gpu.llm.collective_rpc("draft_status", args=(True,))
        assert after["memory"] == staged["memory"] != before["memory"]
        held = gpu.runner.speculator.model.versions.held
        assert held is not None and all(value.is_cpu for value in held.tensors.values())
        reference, asked, found = Reference(MODEL, oracle(MODEL), path), prompts[:32], []
        for context in (contextlib.nullcontext(), drafted_eagerly(gpu)):
            with context:
                found.append(acceptance(gpu, lambda: generate(gpu.llm, asked, max_tokens=TOKENS)))
        with watched(gpu, monkeypatch) as seen:
            outputs = generate(gpu.llm, asked, max_tokens=TOKENS)
        print(f"another draft: {check_same(plain[:32], outputs)}, tokens per step in graphs and eagerly {found}")
        assert check_blocks(seen, outputs, asked, reference) >= len(asked) * 4
        assert abs(found[0] - found[1]) < 0.05
        switch_draft(gpu.llm, before["version"])
        restored = acceptance(gpu, lambda: generate(gpu.llm, asked, max_tokens=TOKENS))
        [again] = gpu.llm.collective_rpc("draft_status", args=(True,))
        assert again["memory"] == before["memory"] and restored > found[0] + 0.3
        assert addresses(gpu) == places


def test_a_draft_with_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole block is computed, and the likeliest tokens are its first ones."""
    prompts = [*task_prompts(MODEL, 4), *random_prompts((33, 100), seed=2)]
    with drafting(MODEL, "greedy", 3, dtype="float32") as gpu, watched(gpu, monkeypatch) as seen:
        outputs = generate(gpu.llm, prompts, max_tokens=24)
        assert counter(gpu.llm, "num_draft_tokens") == 3 * counter(gpu.llm, "num_drafts")
    assert all(len(block.tokens) == 3 and len(block.hidden) == 7 for block in seen)

    class First(Reference):
        def block(self, outputs_TC: torch.Tensor, anchor: int) -> Any:
            block = super().block(outputs_TC, anchor)
            return replace(block, tokens=block.tokens[:3])

    assert check_blocks(seen, outputs, prompts, First(MODEL, oracle(MODEL))) >= len(prompts) * 4


class TestBfloat16:
    """As a GPU serves: adapters on the target, whose experts are as stored."""

    def test_with_adapters(self, tmp_path: Path) -> None:
        from vllm.lora.request import LoRARequest

        targets = ("q", "k", "v", "r", "gate", "o")
        state = adapter_state(1, targets)
        write_adapter(tmp_path / "one", state, rank=RANK, alpha=ALPHA, targets=targets, base_model=str(MODEL))
        lora = LoRARequest("one", 1, str(tmp_path / "one"))
        prompts = [*task_prompts(MODEL, 40), *random_prompts([5 + 9 * n for n in range(24)], seed=8)]
        adapters = [lora if index % 2 else None for index in range(len(prompts))]
        arguments: dict[str, Any] = {
            "dtype": "bfloat16", "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK,
            "lora_target_modules": ["linear", "gate_proj"],
        }  # fmt: skip
        with engine(MODEL, max_num_seqs=16, **arguments) as gpu:
            plain = generate(gpu.llm, prompts, adapters, max_tokens=TOKENS)
        with drafting(MODEL, **arguments) as gpu:
            outputs = generate(gpu.llm, prompts, adapters, max_tokens=TOKENS)
            print(f"greedy in bfloat16, half with an adapter: {check_same(plain, outputs, BF16_TIE)}")
            assert counter(gpu.llm, "num_accepted_tokens") > counter(gpu.llm, "num_drafts")


@contextlib.contextmanager
def only(tokens: Sequence[int]) -> Iterator[None]:
    """Target and draft have no other tokens inside."""
    from rollout.plugin.model import Inkling2ForCausalLM

    compute = Inkling2ForCausalLM.compute_logits
    masks: dict[int, torch.Tensor] = {}

    def compute_logits(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute(self, hidden_states)
        if logits.shape[-1] not in masks:
            mask = torch.full((logits.shape[-1],), float("-inf"))
            mask[list(tokens)] = 0
            masks[logits.shape[-1]] = mask.to(logits.device)
        return logits + masks[logits.shape[-1]]

    Inkling2ForCausalLM.compute_logits = compute_logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Inkling2ForCausalLM.compute_logits = compute  # type: ignore[method-assign]


def p_values(gpu: Watched, exact: Sequence[torch.Tensor], prefix: list[int], temperature: float, number: int) -> Any:
    """Of the tested tokens against their exact distributions, and accepted, recovered and bonus tokens."""
    from vllm import SamplingParams

    tokens = ALLOWED if len(exact[0]) == len(ALLOWED) else DIGITS
    params = SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=True, detokenize=False)
    before = [counter(gpu.llm, name) for name in ACCEPTED]
    last = lambda: sum(m.values[-1] for m in gpu.llm.get_metrics() if m.name.endswith("accepted_tokens_per_pos"))
    whole, found = last(), torch.zeros(max(TESTED), len(tokens), dtype=torch.int64)
    for first in range(0, number, 10_000):
        inputs = [{"prompt_token_ids": prefix}] * min(10_000, number - first)
        outputs = gpu.llm.generate(inputs, params, use_tqdm=False)
        drawn = torch.tensor([completion_of(output)[: max(TESTED)] for output in outputs]).T - tokens[0]
        found += torch.stack([torch.bincount(row, minlength=len(tokens)) for row in drawn])
    accepted, drafts = (counter(gpu.llm, name) - b for name, b in zip(ACCEPTED, before, strict=True))
    bonus = last() - whole
    kinds = {"accepted": accepted, "recovered": drafts - bonus, "bonus": bonus}
    return [chi_square(found[place - 1], exact[place - 1]) for place in TESTED], kinds


class TestDistribution:
    """Sampled output against the exact distribution; see tests/rollout/test_drafting_distribution.py."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_a_random_draft(self, tmp_path: Path, temperature: float) -> None:
        path, number = write_tiny(tmp_path / "tiny", seed=1), 100_000
        exact = marginals(oracle(path), PREFIXES[0], temperature, ALLOWED)
        with only(ALLOWED), drafting(path, num_tokens=2, **MANY) as gpu:
            values, kinds = p_values(gpu, exact, PREFIXES[0], temperature, number)
            print(f"T={temperature}: p {values}, {kinds}")
            assert min(values) > LEVEL / 8 and min(kinds.values()) > number // 10
            # The same test finds a sampler that is told of another draft than the tokens were drawn from.
            tokens = gpu.runner.speculator._sample_logits

            def misled(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
                drawn = tokens(logits, *rest)
                gpu.runner.speculator.draft_logits.mul_(0.5)
                return drawn

            gpu.runner.speculator._sample_logits = misled
            with drafted_eagerly(gpu):
                wrong, _ = p_values(gpu, exact, PREFIXES[0], temperature, 20_000)
            print(f"T={temperature}: p {wrong} where the sampler is told of another draft")
            assert min(wrong) < 1e-4

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_the_shipped_draft(self, temperature: float) -> None:
        prefix, number = [*task_prompts(MODEL, 1)[0], 49], 100_000
        exact = marginals(oracle(MODEL), prefix, temperature, DIGITS)
        with only(DIGITS), drafting(MODEL, **MANY) as gpu:
            values, kinds = p_values(gpu, exact, prefix, temperature, number)
            print(f"shipped draft, T={temperature}: p {values}, {kinds}")
            assert min(values) > LEVEL / 8 and kinds["accepted"] > number // 10
