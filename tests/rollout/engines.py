"""Real engines in the test's process, and the transformers model they are compared with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.engine_args import engine_environment

PROMPT_LENGTHS = (3, 1, 9, 64, 100, 17, 33, 130)


def random_prompts(lengths: Sequence[int], seed: int = 0, num_tokens: int = 498) -> list[list[int]]:
    """Random token ids below the special tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, num_tokens, (length,), generator=generator).tolist() for length in lengths]


def oracle(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' text model, eager attention, with the dequantised weights of a checkpoint."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    checkpoint = Checkpoint.open(path)
    config = Inkling2TextConfig(**checkpoint.text_config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    # from_config-style construction keeps the strict float32 modules of the class in float32.
    model = Inkling2ForCausalLM._from_config(config, dtype=dtype)
    model.load_state_dict(dict(checkpoint.iter_hf(torch.float32)), strict=True)
    return model.eval()


def oracle_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [len, vocabulary] on the host: row i predicts token i + 1."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids], device=model.device), use_cache=False).logits
        return logits[0].float().log_softmax(-1).cpu()


@contextlib.contextmanager
def engine(path: str | Path, **arguments: Any) -> Iterator[Any]:
    """A vLLM engine in this process, ended with the block; so is its environment, which later tests would inherit."""
    environment = {key: value for key, value in engine_environment("cpu").items() if value}
    with mock.patch.dict(os.environ, environment | {"VLLM_LOGGING_LEVEL": "WARNING"}):
        yield from _engine(path, arguments)


def _engine(path: str | Path, arguments: dict[str, Any]) -> Iterator[Any]:
    torch.set_num_threads(1)
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 27,
        "enforce_eager": True,
        "max_num_seqs": 16,
        "block_size": 32,
        "max_logprobs": -1,
        "disable_log_stats": False,
    }
    llm = LLM(str(path), **(defaults | arguments))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[list[int]], lora: Any = None, **sampling: Any) -> list[Any]:
    """Greedy completions with log-probabilities of the five likeliest tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        **({"max_tokens": 16, "temperature": 0.0, "logprobs": 5, "ignore_eos": True, "detokenize": False} | sampling)
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, lora_request=lora, use_tqdm=False)


def completion_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def engine_logprobs(output: Any) -> list[dict[int, float]]:
    """Log-probabilities of the reported tokens at every generated position."""
    return [{token: entry.logprob for token, entry in row.items()} for row in output.outputs[0].logprobs]


def differences(model: Any, prompts: Sequence[list[int]], outputs: Sequence[Any]) -> list[float]:
    """|engine - oracle| of every reported log-probability, of the prompt (where asked for) and of the completion."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle_logprobs(model, prompt + completion_of(output))
        rows = [(i - 1, row) for i, row in enumerate(output.prompt_logprobs or []) if row]
        rows += [(len(prompt) + i - 1, row) for i, row in enumerate(output.outputs[0].logprobs)]
        for position, row in rows:
            found += [abs(entry.logprob - float(expected[position, token])) for token, entry in row.items()]
    assert all(value == value for value in found), "a log-probability is NaN"
    return found


def largest_change(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Largest difference between the log-probabilities of two runs that produced the same tokens."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        assert completion_of(one) == completion_of(other)
        for row, again in zip(engine_logprobs(one), engine_logprobs(other), strict=True):
            worst = max([worst, *(abs(row[token] - again[token]) for token in row.keys() & again.keys())])
    return worst
