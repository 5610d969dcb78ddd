"""Real engines on a GPU in the test's process, what ran in them, and transformers' model beside them.

In the test's process, so that a test can see which runner, graphs and steps an engine had, and turn graphs off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from inkling_rl.engine_args import PLUGIN, STRICT_KERNELS, engine_environment
from tests.rollout.engines import completion_of, oracle, oracle_logprobs

DEFAULTS: dict[str, Any] = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.3,
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    "max_logprobs": -1,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
    "additional_config": {PLUGIN: {STRICT_KERNELS: True}},
}


class Watched:
    """An engine and counters of its steps."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.replays = self.mixed = 0
        """Steps that replayed a CUDA graph; layers of steps that held decoding requests and prompts."""

        self._graphs = self.runner.cudagraph_manager
        replay = self._graphs.run_fullgraph

        def counted(*arguments: Any, **options: Any) -> Any:
            self.replays += 1
            return replay(*arguments, **options)

        self._graphs.run_fullgraph = counted

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> Any:
        """Our model, inside what vLLM may have wrapped around it."""
        return self.runner.get_model()

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """No CUDA graph inside."""
        candidates = self._graphs._candidates
        self._graphs._candidates = {}
        try:
            yield
        finally:
            self._graphs._candidates = candidates

    @contextlib.contextmanager
    def in_chunks(self, tokens: int) -> Iterator[None]:
        """At most so many tokens of a prompt per step inside."""
        config = self.llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config
        before, config.long_prefill_token_threshold = config.long_prefill_token_threshold, tokens
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> int:
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == name)


@contextlib.contextmanager
def engine(path: str | Path, **arguments: Any) -> Iterator[Watched]:
    """A vLLM engine on the GPU, ended with the block, and so is its environment."""
    environment = engine_environment("cuda")
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    with mock.patch.dict(os.environ, environment):
        yield from _engine(path, arguments)


def _engine(path: str | Path, arguments: dict[str, Any]) -> Iterator[Watched]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from rollout.plugin import fused

    llm = LLM(str(path), **(DEFAULTS | arguments))
    watched, over_pages = Watched(llm), fused.over_pages

    def counted(module: Any, kernels: Any, rows: Any, pages: Any, metadata: Any) -> torch.Tensor:
        watched.mixed += metadata.prefill is not None and metadata.decode_rows > 0
        return over_pages(module, kernels, rows, pages, metadata)

    setattr(fused, "over_pages", counted)  # noqa: B010 - mypy holds a function to its type
    try:
        yield watched
    finally:
        fused.over_pages = over_pages
        llm.llm_engine.engine_core.shutdown()
        del llm, watched.llm, watched._graphs
        cleanup_dist_env_and_memory()


def is_second_runner(runner: Any) -> bool:
    """Whether it is vLLM's V2 model runner."""
    return type(runner).__module__ == "vllm.v1.worker.gpu.model_runner"


def gpu_oracle(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model on the GPU, in true float32 where it is float32."""
    torch.backends.cudnn.allow_tf32 = False  # on unless told: convolutions would be wrong by 1e-3
    assert not torch.backends.cuda.matmul.allow_tf32
    return oracle(path, dtype).to("cuda")


def step_through(watched: Watched, prompts: Sequence[list[int]], at: dict[int, Any], **sampling: Any) -> list[Any]:
    """Finished requests in the order of the prompts, stepping by hand.

    Args:
        at: step -> function called before it with the ids of all requests; may abort some.
    """
    from vllm import SamplingParams

    core = watched.llm.llm_engine
    params = {"max_tokens": 16, "temperature": 0.0, "logprobs": 5, "ignore_eos": True, "detokenize": False} | sampling
    ids = [f"step-{id(at)}-{number}" for number in range(len(prompts))]
    for name, prompt in zip(ids, prompts, strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**params))
    finished: dict[str, Any] = {}
    step = 0
    while core.has_unfinished_requests():
        if step in at:
            at[step](ids)
        finished |= {output.request_id: output for output in core.step() if output.finished}
        step += 1
    return [finished[name] for name in ids if name in finished]


class Errors:
    """|difference from float32| of the real tokens' log-probabilities: the engine's and transformers' in bfloat16."""

    def __init__(self) -> None:
        self.ours: list[torch.Tensor] = []
        self.theirs: list[torch.Tensor] = []

    def add(self, exact: Any, rounded: Any, prompts: Sequence[list[int]], outputs: Sequence[Any]) -> None:
        """Generated tokens, and the prompt's where the request asked for them."""
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = prompt + completion_of(output)
            rows = [row for row in output.prompt_logprobs or [] if row]
            first = len(prompt) - len(rows)
            rows += output.outputs[0].logprobs
            targets = torch.tensor(tokens[first:])
            got = torch.tensor([row[token].logprob for row, token in zip(rows, targets.tolist(), strict=True)])
            expected, peer = (
                oracle_logprobs(model, tokens)[first - 1 : -1].gather(1, targets[:, None])[:, 0]
                for model in (exact, rounded)
            )
            self.ours.append((got - expected).abs())
            self.theirs.append((peer - expected).abs())

    def __add__(self, other: Errors) -> Errors:
        total = Errors()
        total.ours, total.theirs = self.ours + other.ours, self.theirs + other.theirs
        return total

    def summary(self) -> tuple[dict[str, float], dict[str, float]]:
        """Number, mean, 99th percentile and maximum of both."""
        return tuple(  # type: ignore[return-value]
            {"num": len(e), "mean": float(e.mean()), "p99": float(e.quantile(0.99)), "max": float(e.max())}
            for e in (torch.cat(self.ours), torch.cat(self.theirs))
        )

    def show(self, what: str) -> None:
        """One line on standard output."""
        ours, theirs = self.summary()
        line = "  ".join(f"{key} {ours[key]:.1e}/{theirs[key]:.1e}" for key in ("mean", "p99", "max"))
        print(f"bf16 {what}: {ours['num']} tokens, engine/transformers {line}")

    def check(self, mean_ratio: float = 1.2, p99_ratio: float = 1.5) -> None:
        """The engine is hardly further from float32 than transformers is; NaN fails."""
        ours, theirs = self.summary()
        assert ours["mean"] <= mean_ratio * theirs["mean"]
        assert ours["p99"] <= p99_ratio * theirs["p99"]
