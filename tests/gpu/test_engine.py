"""The engine on a GPU against transformers on the same GPU: float32, bfloat16, adapters. Figures with `pytest -s`.

The checkpoint is the tiny one that ships: NVFP4 and MXFP8 experts, a window of 8, an extent of 16, logarithmic scaling
from position 16. In float32 its experts are dequantised, in bfloat16 they run as stored. What transformers computes is
teacher-forced on the engine's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl import byte_tokenizer
from inkling_rl.checkpoint.reader import Checkpoint, resolve
from lora.files import write_adapter
from lora.schema import PEFT_PREFIX, TARGETS, plan, tensor_shapes
from tests.gpu.engines import Errors, Watched, engine, gpu_oracle, is_second_runner, step_through
from tests.rollout.engines import completion_of, differences, generate, largest_change, random_prompts
from tests.rollout.test_engine_bf16 import task_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = 1e-4
# How many rows a step has decides how sums are split, so float32 changes in its last bits.
INVARIANCE = 1e-4
BF16_MEAN = 5e-3
RANK, ALPHA = 8, 16.0
LAYERS = 6
MODEL = resolve("builtin:tiny-arithmetic")


def check_graphs(watched: Watched) -> None:
    """The V2 runner, with a graph for every size of batch that was asked for."""
    from vllm.config.compilation import CUDAGraphMode

    assert is_second_runner(watched.runner)
    assert watched.runner.cudagraph_manager.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
    assert {1, 2, 4, 8, 16} <= set(watched.runner.cudagraph_manager.captured_token_counts())
    assert not watched.model.model.kernels.fell_back


@pytest.fixture(scope="module")
def exact() -> Any:
    return gpu_oracle(MODEL)


class TestFloat32:
    @pytest.fixture(scope="class")
    def gpu(self) -> Iterator[Watched]:
        with engine(MODEL, dtype="float32") as watched:
            yield watched

    def report(self, what: str, found: Sequence[float]) -> None:
        print(
            f"fp32 {what}: {len(found)} values, max |difference| {max(found):.1e}, mean {sum(found) / len(found):.1e}"
        )
        assert max(found) < TOLERANCE

    def test_runner_and_graphs(self, gpu: Watched) -> None:
        check_graphs(gpu)

    def test_whole_prompts(self, gpu: Watched, exact: Any) -> None:
        prompts = random_prompts((3, 1, 9, 64, 100, 17, 33, 130, 8, 450))
        before = gpu.replays
        outputs = generate(gpu.llm, prompts, max_tokens=24, prompt_logprobs=5)
        assert gpu.replays > before
        self.report("whole prompts", differences(exact, prompts, outputs))

    def test_chunks(self, gpu: Watched, exact: Any) -> None:
        prompts = random_prompts((70, 33, 90, 200, 5, 6, 7, 41), seed=4)
        before = gpu.mixed
        with gpu.in_chunks(24):
            outputs = generate(gpu.llm, prompts, max_tokens=24, prompt_logprobs=5)
        assert gpu.mixed - before >= 5 * LAYERS
        self.report("chunks of 24", differences(exact, prompts, outputs))

    def test_prefix_hits(self, gpu: Watched, exact: Any) -> None:
        gpu.forget()
        prompts = random_prompts((64, 100, 33, 130), seed=1)
        cold = generate(gpu.llm, prompts)
        warm = generate(gpu.llm, prompts)
        assert [output.num_cached_tokens for output in cold] == [0] * 4
        assert [output.num_cached_tokens for output in warm] == [32, 96, 32, 128]
        longer = [[*prompt, 7, 8, 9] for prompt in prompts]
        outputs = generate(gpu.llm, longer)
        assert sum(output.num_cached_tokens for output in outputs) >= 32 + 96 + 32 + 128
        self.report("prefix hits", differences(exact, [*prompts, *longer], [*warm, *outputs]))
        gpu.forget()
        [shared] = random_prompts((70,), seed=11)
        same = [shared[:n] + [tail] * 6 for n in (70, 64, 40, 33) for tail in (3, 4)]
        outputs = generate(gpu.llm, same)
        assert sum(output.num_cached_tokens for output in outputs) > 0
        self.report("prefix of the same step", differences(exact, same, outputs))

    def test_many_requests_with_graphs_and_without(self, gpu: Watched, exact: Any) -> None:
        """More requests than run at once, so that prompts come in beside decoding requests, chunks among them."""
        prompts = random_prompts([3 + 11 * n for n in range(24)], seed=2)
        runs = []
        for context in (gpu.in_chunks(64), gpu.eagerly()):
            gpu.forget()
            mixed, replays = gpu.mixed, gpu.replays
            with context:
                runs.append(generate(gpu.llm, prompts, max_tokens=32, temperature=1.0, seed=5))
            assert gpu.mixed - mixed >= 2 * LAYERS
            assert (gpu.replays > replays) == (len(runs) == 1)
        for what, outputs in zip(("many requests, graphs", "many requests, eager"), runs, strict=True):
            self.report(what, differences(exact, prompts, outputs))
        change = largest_change(*runs) if all(map(same_tokens, *runs)) else float("nan")
        print(f"fp32 graphs against eager: largest change {change:.1e}")
        assert change < INVARIANCE

    def test_aborted_and_preempted_requests(self, gpu: Watched, exact: Any) -> None:
        prompts = random_prompts((60, 20, 90, 11, 5, 40), seed=3)
        core, preempted = gpu.llm.llm_engine, gpu.metric("vllm:num_preemptions")
        at: dict[int, Callable[[list[str]], Any]] = {
            7: lambda ids: core.abort_request([ids[1], ids[2]]),
            12: lambda ids: core.reset_prefix_cache(reset_running_requests=True),
        }
        outputs = step_through(gpu, prompts, at, max_tokens=40)
        left = [prompts[0], *prompts[3:]]
        assert len(outputs) == len(left) and all(len(completion_of(output)) == 40 for output in outputs)
        assert gpu.metric("vllm:num_preemptions") - preempted >= len(left)
        self.report("aborted and preempted", differences(exact, left, outputs))


def same_tokens(first: Any, second: Any) -> bool:
    return completion_of(first) == completion_of(second)


class TestBfloat16:
    @pytest.fixture(scope="class")
    def gpu(self) -> Iterator[Watched]:
        with engine(MODEL, dtype="bfloat16") as watched:
            yield watched

    @pytest.fixture(scope="class")
    def rounded(self) -> Any:
        return gpu_oracle(MODEL, torch.bfloat16)

    def test_runner_graphs_and_experts(self, gpu: Watched) -> None:
        check_graphs(gpu)
        kinds = [layer.mlp.experts.expert_format for layer in gpu.model.model.layers]
        assert kinds == ["nvfp4"] * 5 + ["mxfp8"]

    def test_closer_to_float32_than_transformers(self, gpu: Watched, exact: Any, rounded: Any) -> None:
        """Each mode of running, and all of them together: few tokens make most of a mean, so one mode is noisy."""
        prompts = task_prompts(MODEL, 64)
        sampling = {
            "temperature": 1.0, "logprobs": 0, "max_tokens": 64, "ignore_eos": False,
            "stop_token_ids": [byte_tokenizer.EOS_TOKEN_ID],
        }  # fmt: skip
        turns = [[*prompt, *prompts[-1 - index]] for index, prompt in enumerate(prompts)]
        total = Errors()
        modes = {
            "task prompts": (prompts, gpu.in_chunks(0), 3),
            "chunks of 16": (prompts, gpu.in_chunks(16), 4),
            "prefix hits": (turns, gpu.in_chunks(0), 5),
            "eager": (prompts, gpu.eagerly(), 6),
        }
        for what, (asked, context, seed) in modes.items():
            if what != "prefix hits":
                gpu.forget()
            with context:
                outputs = generate(gpu.llm, asked, seed=seed, **sampling)
            cached = sum(output.num_cached_tokens for output in outputs)
            assert (cached > 0) or what != "prefix hits"
            errors = Errors()
            errors.add(exact, rounded, asked, outputs)
            errors.show(what)
            errors.check(3.0, 3.0)
            total += errors
        total.show("together")
        total.check()
        assert total.summary()[0]["num"] >= 2000
        assert total.summary()[0]["mean"] < BF16_MEAN

    def test_long_prompts(self, gpu: Watched, exact: Any, rounded: Any) -> None:
        """Many windows and extents, whole and in chunks; tokens that a conversation of tasks may hold."""
        long = [token for prompt in task_prompts(MODEL, 24) for token in prompt]
        prompts, total = [long[:700], long[100:400], long[300:900], long[50:177]], Errors()
        for what, tokens in (("long prompts", 0), ("long prompts in chunks", 100)):
            with gpu.in_chunks(tokens):
                outputs = generate(gpu.llm, prompts, max_tokens=16, logprobs=0, prompt_logprobs=0)
            errors = Errors()
            errors.add(exact, rounded, prompts, outputs)
            errors.show(what)
            total += errors
        total.check()


def adapter_state(seed: int, targets: Sequence[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(plan(Checkpoint.open(MODEL).config, targets), RANK)
    return {name: torch.randn(shape, generator=generator) * 0.06 for name, shape in shapes.items()}


def factors(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Module, A and B, on the GPU."""
    for name, a in state.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
            yield module, a.cuda(), state[name.replace("lora_A", "lora_B")].cuda()


def merged(state: dict[str, torch.Tensor]) -> Any:
    """transformers in float32, the adapter added to its weights."""
    model = gpu_oracle(MODEL)
    for module, a, b in factors(state):
        model.get_submodule(module).weight.data += ALPHA / RANK * (b @ a)
    return model


def with_adapter(state: dict[str, torch.Tensor]) -> Any:
    """transformers in bfloat16 with the adapter, also in bfloat16, beside its weights."""
    model = gpu_oracle(MODEL, torch.bfloat16)
    for module, a, b in factors(state):
        a, b = a.bfloat16(), b.bfloat16()

        def add(_: Any, inputs: Any, output: Any, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            return output + inputs[0] @ a.t() @ b.t() * (ALPHA / RANK)

        model.get_submodule(module).register_forward_hook(add)
    return model


KINDS = {"all": tuple(TARGETS), "q and o": ("q", "o"), "all again": tuple(TARGETS)}


class TestAdapters:
    """Two slots and three adapters: one is always swapped in while others decode or wait."""

    @pytest.fixture(scope="class")
    def gpu(self) -> Iterator[Watched]:
        with engine(MODEL, dtype="bfloat16", enable_lora=True, max_loras=2, max_lora_rank=RANK) as watched:
            yield watched

    @pytest.fixture(scope="class")
    def adapters(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
        made = {}
        for seed, (name, targets) in enumerate(KINDS.items()):
            path, state = tmp_path_factory.mktemp("adapters") / f"adapter-{seed}", adapter_state(seed, targets)
            write_adapter(path, state, rank=RANK, alpha=ALPHA, targets=targets, base_model=str(MODEL))
            made[name] = (path, state)
        return made

    def test_swapped_adapters_in_mixed_batches(self, gpu: Watched, exact: Any, adapters: Any) -> None:
        from vllm.lora.request import LoRARequest

        check_graphs(gpu)
        names = list(adapters)
        requests = {n: LoRARequest(f"a{i}", i + 1, str(adapters[n][0])) for i, n in enumerate(names)}
        prompts, total, replays = task_prompts(MODEL, 32), Errors(), gpu.replays
        rounds = [[requests[names[k]], None, requests[names[k - 2]], None] * 8 for k in range(3)]
        found: dict[str | None, list[tuple[list[int], Any]]] = {}
        for lora in rounds:
            outputs = generate(gpu.llm, prompts, lora=lora, temperature=1.0, seed=3, logprobs=0, max_tokens=32)
            for prompt, wanted, output in zip(prompts, lora, outputs, strict=True):
                name = next((n for n in names if wanted is requests[n]), None)
                found.setdefault(name, []).append((prompt, output))
        assert gpu.replays > replays
        for name in [None, *names]:
            models = (merged(adapters[name][1]), with_adapter(adapters[name][1])) if name else (exact, gpu_bf16())
            asked, answers = [prompt for prompt, _ in found[name]], [output for _, output in found[name]]
            errors = Errors()
            errors.add(*models, asked, answers)
            errors.show(f"adapter {name}")
            errors.check(3.0, 3.0)
            total += errors
            if name:
                # Further from the base model than rounding is: the adapter does something. A few tokens that chose
                # other experts are most of rounding's mean.
                base = Errors()
                base.add(exact, exact, asked, answers)
                assert base.summary()[0]["mean"] > 4 * errors.summary()[0]["mean"]
        total.show("adapters together")
        total.check()


def gpu_bf16() -> Any:
    return gpu_oracle(MODEL, torch.bfloat16)
