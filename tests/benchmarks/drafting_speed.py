"""Tokens per second of an engine with a draft against one without, on the quick start's task, on one CPU thread.

    python -m tests.benchmarks.drafting_speed [--model DIR] [--draft DIR] [--batches 1,2,4,8] [--repeats 5]

Prompts are held-out sums, temperature 1, completions end at their stop token. Both engines are processes of their own
and give every prompt of a batch at once. What counts is the best repeat per second of wall clock and of the process's
own CPU time (the second is what means anything on a busy machine); tokens per verification step are counted over all
repeats, the first token of a completion left out because it needs none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.engine_speed import ENVIRONMENT

TARGET = 1.5
EFFORT, MAX_TOKENS = 0.2, 64


def prompts(model: str, number: int) -> list[list[int]]:
    """Token ids of held-out sums."""
    from transformers import PreTrainedTokenizerFast

    from inkling_rl.arithmetic import rows
    from inkling_rl.chat import Renderer

    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(model))
    return [
        renderer.render([{"role": "user", "content": row["prompt"]}], effort=EFFORT) for row in rows("heldout", number)
    ]


def counter(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_{name}")


def measure(model: str, draft: str | None, batches: list[int], repeats: int) -> list[dict[str, float]]:
    """Rates and tokens per step, one entry per batch size."""
    import torch
    from vllm import LLM, SamplingParams

    from tests.rollout.drafting import speculative

    torch.set_num_threads(1)
    arguments = {"speculative_config": speculative(draft)} if draft else {}
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
        enforce_eager=True,
        max_num_seqs=max(batches),
        disable_log_stats=False,
        **arguments,
    )
    stop = json.loads((Path(model) / "config.json").read_text())["eos_token_id"]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, logprobs=0, stop_token_ids=[stop], detokenize=False)
    texts, found = prompts(model, 64), []
    for batch in batches:
        best, tokens_in_all, before = {"wall": 0.0, "cpu": 0.0}, 0, counter(llm, "num_drafts")
        for repeat in range(repeats + 1):
            tokens, start = 0, {"wall": time.perf_counter(), "cpu": time.process_time()}
            for first in range(0, len(texts), batch):
                inputs = [{"prompt_token_ids": text} for text in texts[first : first + batch]]
                outputs = llm.generate(inputs, params, use_tqdm=False)
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            end = {"wall": time.perf_counter(), "cpu": time.process_time()}
            tokens_in_all += tokens - len(texts)
            if repeat:
                best = {clock: max(best[clock], tokens / (end[clock] - start[clock])) for clock in best}
        steps = counter(llm, "num_drafts") - before
        found.append(best | {"tokens_per_step": tokens_in_all / steps if steps else 1.0})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="an Inkling 2 checkpoint; the shipped base unless given")
    parser.add_argument("--draft", help="a draft of its own; the model's unless given")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-least", type=float, default=TARGET, help="fail below this ratio (CPU time)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model or str(Path(__file__).parents[2] / "recipes/models/tiny-arithmetic")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.one is not None:
        print(json.dumps(measure(model, arguments.one or None, batches, arguments.repeats)))
        return
    results = []
    for draft in ("", arguments.draft or model):
        command = [sys.executable, "-m", "tests.benchmarks.drafting_speed", "--model", model, "--one", draft]
        command += ["--batches", arguments.batches, "--repeats", str(arguments.repeats)]
        output = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, check=True)
        results.append(json.loads(output.stdout.splitlines()[-1]))
    worst = float("inf")
    for batch, without, drafted in zip(batches, *results, strict=True):
        ratio = {clock: drafted[clock] / without[clock] for clock in ("wall", "cpu")}
        worst = min(worst, ratio["cpu"])
        rates = f"{without['cpu']:.0f} -> {drafted['cpu']:.0f} tokens per CPU second"
        times = f"{ratio['cpu']:.2f}x; {ratio['wall']:.2f}x by wall clock"
        print(f"batch {batch}: {rates} ({times}), {drafted['tokens_per_step']:.2f} tokens per step", flush=True)
    if worst < arguments.at_least:
        raise SystemExit(f"drafting must give {arguments.at_least} times the tokens; got {worst:.2f}")


if __name__ == "__main__":
    main()
