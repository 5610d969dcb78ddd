"""bfloat16: how far the engine is from the float32 model, against how far transformers' own bfloat16 is.

The bar: over 2,000 generated positions, mean |difference| at most 1.2 times transformers' own and below
5e-3, 99th percentile at most 1.5 times. Run with -s to see the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inkling_rl import arithmetic
from inkling_rl.chat import Renderer
from inkling_rl.checkpoint.reader import resolve
from tests.rollout.engines import completion_of, engine, generate, oracle, oracle_logprobs, random_prompts

NUM_POSITIONS = 2000


def measure(checkpoint: Path, prompts: list[list[int]], ignore_eos: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """|difference from float32| of sampled tokens' log-probabilities: the engine's and transformers' in bfloat16."""
    with engine(checkpoint, dtype="bfloat16", max_num_batched_tokens=256, max_num_seqs=32) as llm:
        outputs = generate(llm, prompts, temperature=1.0, seed=3, max_tokens=64, logprobs=0, ignore_eos=ignore_eos)
    exact_model, half_model = oracle(checkpoint), oracle(checkpoint, torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = completion_of(output)
        rows = [oracle_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1] for model in (exact_model, half_model)]
        exact, rounded = (row.gather(1, torch.tensor(tokens)[:, None])[:, 0] for row in rows)
        got = torch.tensor([row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens, strict=True)])
        ours.append((got - exact).abs())
        theirs.append((rounded - exact).abs())
    return torch.cat(ours), torch.cat(theirs)


def task_prompts(checkpoint: Path, number: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(checkpoint))
    rows = arithmetic.rows("heldout", number)
    return [renderer.render([{"role": "user", "content": row["prompt"]}], effort=0.2) for row in rows]


@pytest.mark.parametrize("kind", [pytest.param("random", marks=pytest.mark.slow), "shipped"])
def test_bf16_is_closer_to_float32_than_transformers_is(tiny_checkpoint: Path, kind: str) -> None:
    if kind == "random":
        ours, theirs = measure(tiny_checkpoint, random_prompts([10 + 2 * i for i in range(32)], seed=8), True)
    else:
        base = resolve("builtin:tiny-arithmetic")
        ours, theirs = measure(base, task_prompts(base, 96), False)
    for name, error in (("engine", ours), ("transformers", theirs)):
        p99 = float(error.quantile(0.99))
        print(
            f"{kind} {name}: {error.numel()} positions, mean {error.mean():.2e}, p99 {p99:.2e}, max {error.max():.2e}"
        )
    assert ours.numel() == theirs.numel() >= NUM_POSITIONS
    assert float(ours.mean()) < 5e-3
    assert float(ours.mean()) <= 1.2 * float(theirs.mean())
    assert float(ours.quantile(0.99)) <= 1.5 * float(theirs.quantile(0.99))
