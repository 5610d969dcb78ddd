"""Tokens per second of the tiny Inkling 2 against vLLM's own Qwen3-MoE of the same size, on one CPU thread.

    python -m tests.benchmarks.engine_speed [--repeats 5] [--model DIR] [--reference-kernels]

Every (model, dtype) pair is a process of its own, so that neither inherits the other's warm caches; within it the first
pass warms up and the best of the repeats counts. Rates are given per second of wall clock and per second of the
process's own CPU time: on one thread they agree on an idle machine, and only the second one means anything on a busy
one. Prints one JSON line per pair and the ratio of the faster dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_REQUESTS, PROMPT_LENGTH, NEW_TOKENS = 64, 40, 64
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

TARGET = 0.6  # of the reference's tokens per second: what we ask for


def write_qwen3_moe(path: Path) -> Path:
    """Random Qwen3-MoE with the tiny Inkling 2's hidden size, layers, experts and vocabulary."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def measure(path: str, dtype: str, repeats: int) -> dict[str, float]:
    """Tokens per second of the best repeat, by wall clock and by CPU time."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        path,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        max_num_seqs=NUM_REQUESTS,
        enable_prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 490, (PROMPT_LENGTH,), generator=generator).tolist() for _ in range(NUM_REQUESTS)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    best = {"wall": 0.0, "cpu": 0.0}
    for repeat in range(repeats + 1):
        start = {"wall": time.perf_counter(), "cpu": time.process_time()}
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        end = {"wall": time.perf_counter(), "cpu": time.process_time()}
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if repeat:
            best = {clock: max(best[clock], tokens / (end[clock] - start[clock])) for clock in best}
    return best


def run_all(model: str | None, repeats: int, environment: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """Rates by model, one entry per dtype, each measured in its own process, the two models alternating."""
    rates: dict[str, list[dict[str, float]]] = {"inkling2": [], "qwen3_moe": []}
    with tempfile.TemporaryDirectory() as root:
        from inkling_rl.checkpoint.tiny import write_tiny

        paths = {
            "inkling2": model or str(write_tiny(Path(root) / "inkling2", seed=0)),
            "qwen3_moe": str(write_qwen3_moe(Path(root) / "qwen3_moe")),
        }
        for dtype in ("float32", "bfloat16"):
            for name, path in paths.items():
                command = [sys.executable, "-m", "tests.benchmarks.engine_speed", "--one", path, dtype, str(repeats)]
                output = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
                rates[name].append(json.loads(output.stdout.splitlines()[-1]))
                shown = {f"tokens_per_{clock}_s": round(rate) for clock, rate in rates[name][-1].items()}
                print(json.dumps({"model": name, "dtype": dtype} | shown), flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="an Inkling 2 checkpoint; a random tiny one unless given")
    parser.add_argument("--reference-kernels", action="store_true", help="torch instead of the C++ kernels")
    parser.add_argument("--at-least", type=float, help="fail below this ratio (wall clock); 0.6, 0 for torch kernels")
    parser.add_argument("--one", nargs=3, metavar=("PATH", "DTYPE", "REPEATS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        path, dtype, repeats = arguments.one
        print(json.dumps(measure(path, dtype, int(repeats))))
        return
    environment = ENVIRONMENT | ({"INKLING_RL_KERNELS": "torch"} if arguments.reference_kernels else {})
    rates = run_all(arguments.model, arguments.repeats, environment)
    ratios = {}
    for clock in ("wall", "cpu"):
        best = {name: max(by_dtype[clock] for by_dtype in found) for name, found in rates.items()}
        ratios[clock] = best["inkling2"] / best["qwen3_moe"]
        print(json.dumps({"clock": clock, "ratio_of_faster_dtypes": round(ratios[clock], 3)}))
    least = arguments.at_least if arguments.at_least is not None else 0.0 if arguments.reference_kernels else TARGET
    if ratios["wall"] < least:
        sys.exit(f"the engine must reach {least:g} of vLLM's own Qwen3-MoE; got {ratios['wall']:.3f}")


if __name__ == "__main__":
    main()
