"""bfloat16: how far the engine is from the float32 model, against how far transformers' own bfloat16 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.rollout.engines import completion_of, engine, generate, oracle, oracle_logprobs, random_prompts

NUM_PROMPTS, NEW_TOKENS = 32, 64


def test_bf16_is_closer_to_float32_than_transformers_is(tiny_checkpoint: Path, tiny_oracle: Any) -> None:
    """Differences of the sampled tokens' log-probabilities over 2,048 generated positions."""
    prompts = random_prompts([10 + 2 * i for i in range(NUM_PROMPTS)], seed=8)
    with engine(tiny_checkpoint, dtype="bfloat16", max_num_batched_tokens=256) as llm:
        outputs = generate(llm, prompts, temperature=1.0, seed=3, max_tokens=NEW_TOKENS, logprobs=0)
    half = oracle(tiny_checkpoint, torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = completion_of(output)
        rows = [oracle_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1] for model in (tiny_oracle, half)]
        exact, rounded = (row.gather(1, torch.tensor(tokens)[:, None])[:, 0] for row in rows)
        got = torch.tensor([row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens, strict=True)])
        ours.append((got - exact).abs())
        theirs.append((rounded - exact).abs())
    engine_error, transformers_error = torch.cat(ours), torch.cat(theirs)
    assert engine_error.numel() == NUM_PROMPTS * NEW_TOKENS >= 2000
    print(
        f"bfloat16 against float32: engine mean {engine_error.mean():.2e} p99 {engine_error.quantile(0.99):.2e} "
        f"max {engine_error.max():.2e}; transformers mean {transformers_error.mean():.2e} "
        f"p99 {transformers_error.quantile(0.99):.2e} max {transformers_error.max():.2e}"
    )
    assert float(engine_error.mean()) < 5e-3
    assert float(engine_error.mean()) <= 1.2 * float(transformers_error.mean())
    assert float(engine_error.quantile(0.99)) <= 1.5 * float(transformers_error.quantile(0.99))
