"""The engine against transformers, on one checkpoint: do both give the same log-probabilities?

The engine completes prompts greedily, as it serves them: batched, base model and adapter mixed in one batch. The
reference then scores the same tokens in float32, one sequence at a time. Compared are the log-probabilities of the five
likeliest tokens and of the real one, at every prompt and generated position, and with an adapter the change that it
makes on both sides: two engines that both ignore an adapter agree perfectly.

In bfloat16 the yardstick is transformers' own bfloat16 run: the engine may be little further from float32 than that.
Not here: speed, sampling, anything on the way between engine and user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.engine_args import UNSET, check_memory, engine_environment, installed_device, serving_arguments
from inkling_rl.recipe import Dtype

TOP = 5
MAX_PROMPT = 512  # the reference materialises [heads, length, length] scores and is slow
FLOAT32_MAX = 1e-4
BFLOAT16_MEAN_RATIO, BFLOAT16_P99_RATIO = 1.2, 1.5  # of transformers' own distance from float32
# Standard output is for the report; what vLLM and transformers have to say in passing is not.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "TRANSFORMERS_VERBOSITY": "error"}
NO_CHANGE = 1e-6  # mean |change| below which an adapter does nothing

_lora_ids = count(1)  # the engine keeps an adapter by its number


class VerifyError(ValueError):
    """Prompts or settings with which nothing can be compared."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of one request, and what the engine gave for each of them but the first."""

    token_ids: list[int]
    num_prompt: int
    rows: list[dict[int, float]]
    """Row i: token -> log-probability for position i + 1; holds the real token and the likeliest."""

    adapted: bool


def verify(
    checkpoint_path: str | Path,
    adapter_path: str | Path | None = None,
    prompts: Sequence[str] | None = None,
    *,
    dtype: Dtype = "float32",
    num_prompts: int = 8,
    max_tokens: int = 24,
    seed: int = 0,
    effort: float = 0.2,
    tolerance: float | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compares, and returns a report whose `ok` is the verdict and whose `line` says it.

    Args:
        checkpoint_path: directory or `builtin:NAME`.
        adapter_path: PEFT directory.
        prompts: user messages, rendered in the chat format with `effort`; random token ids of lengths up to four
            windows unless given.
        dtype: of the engine.
        num_prompts: number of random prompts.
        max_tokens: greedy tokens per prompt.
        seed: of the random prompts.
        tolerance: largest |difference| allowed in float32 (1e-4 unless given), or largest mean |difference| in
            bfloat16, beside the limits relative to transformers' own.
        engine_args: further vLLM arguments, merged last.

    Raises:
        CheckpointError, AdapterError: what is to be compared cannot be used.
        VerifyError: no prompts.
    """
    from lora.base import fingerprint
    from lora.files import read_adapter

    checkpoint = Checkpoint.open(checkpoint_path)
    checkpoint.check()
    adapter = None
    if adapter_path:
        adapter = read_adapter(adapter_path, checkpoint.config, fingerprint=fingerprint(checkpoint))
    with _engine(checkpoint, dtype, adapter.rank if adapter else None, engine_args or {}) as llm:
        ids = _chat_ids(llm, prompts, effort) if prompts is not None else _random_ids(checkpoint, num_prompts, seed)
        if not ids:
            raise VerifyError("prompts must hold at least one; got none. Give a file with one prompt a line")
        lora = _lora_request(adapter_path) if adapter_path else None
        sequences, base_rows = _run(llm, ids, lora, max_tokens)
    report = {
        "checkpoint": str(checkpoint.path),
        "adapter": str(adapter_path) if adapter_path else None,
        "dtype": dtype,
        "num_prompts": len(ids),
        **_compare(checkpoint, adapter, sequences, base_rows, dtype),
    }
    return _with_verdict(report, tolerance)


@contextmanager
def _engine(checkpoint: Checkpoint, dtype: Dtype, rank: int | None, extra: Mapping[str, Any]) -> Iterator[Any]:
    """A vLLM engine in this process (on a GPU, as its child), gone afterwards."""
    arguments = serving_arguments(str(checkpoint.path), max_lora_rank=rank or 1)
    arguments |= {"dtype": dtype, "enable_lora": rank is not None, "use_tqdm_on_load": False} | dict(extra)
    check_memory(arguments)
    os.environ.pop(UNSET, None)
    os.environ.update(engine_environment())
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import torch

    if installed_device() == "cpu":
        torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late where torch is already loaded
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _run(
    llm: Any, prompts: Sequence[list[int]], lora: Any, max_tokens: int
) -> tuple[list[Scored], list[list[dict[int, float]]]]:
    """Completions, and for those of the adapter what the base model gives for the same tokens (in the same order)."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True, detokenize=False
    )
    # With an adapter every prompt is asked for twice, interleaved, so that batches mix base model and adapter.
    requests = [(prompt, wanted) for prompt in prompts for wanted in ([None, lora] if lora else [None])]
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(inputs, greedy, lora_request=[wanted for _, wanted in requests], use_tqdm=False)
    sequences = []
    for (prompt, wanted), output in zip(requests, outputs, strict=True):
        completion = output.outputs[0]
        rows = _rows(output.prompt_logprobs[1:]) + _rows(completion.logprobs)
        sequences.append(Scored([*prompt, *completion.token_ids], len(prompt), rows, wanted is not None))
    adapted = [{"prompt_token_ids": sequence.token_ids} for sequence in sequences if sequence.adapted]
    if not adapted:
        return sequences, []
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    scored = llm.generate(adapted, scoring, use_tqdm=False)
    return sequences, [_rows(output.prompt_logprobs[1:]) for output in scored]


def _rows(rows: Sequence[Mapping[int, Any]]) -> list[dict[int, float]]:
    return [{int(token): value.logprob for token, value in row.items()} for row in rows]


def _compare(
    checkpoint: Checkpoint,
    adapter: Any,
    sequences: Sequence[Scored],
    base_rows: Sequence[list[dict[int, float]]],
    dtype: Dtype,
) -> dict[str, Any]:
    import torch

    from rollout.agreement import Change, Differences
    from rollout.oracle import Oracle

    oracle = Oracle.load(checkpoint, torch.float32, adapter)
    peer = Oracle.load(checkpoint, torch.bfloat16, adapter) if dtype == "bfloat16" else None
    engine, own, change = Differences(), Differences(), Change()
    unscored = iter(base_rows)
    for sequence in sequences:
        expected = oracle.logprobs(sequence.token_ids, adapted=sequence.adapted)
        engine.add(sequence.rows, expected, sequence.token_ids, sequence.num_prompt)
        if peer:
            other = peer.logprobs(sequence.token_ids, adapted=sequence.adapted)
            rows = [{token: float(other[i, token]) for token in row} for i, row in enumerate(sequence.rows)]
            own.add(rows, expected, sequence.token_ids, sequence.num_prompt)
        if sequence.adapted:
            plain = oracle.logprobs(sequence.token_ids)
            change.add(sequence.rows, next(unscored), expected, plain, sequence.token_ids)
    report = asdict(engine.report())
    if peer:
        report["transformers_bfloat16"] = asdict(own.report())
    if adapter:
        report["adapter_change"] = asdict(change.report())
    return report


def _with_verdict(report: dict[str, Any], tolerance: float | None) -> dict[str, Any]:
    """Adds `ok`, `reasons`, `tolerance` and `line`. Comparisons are written so that NaN fails them."""
    if report["dtype"] == "float32":
        limit, shown, reasons = _float32_verdict(report, tolerance)
    else:
        limit, shown, reasons = _bfloat16_verdict(report, tolerance)
    if change := report.get("adapter_change"):
        shown += (
            f", adapter changes {change['engine_mean']:.2g} (engine) and {change['oracle_mean']:.2g} (transformers)"
        )
        if not min(change["engine_mean"], change["oracle_mean"]) > NO_CHANGE:
            reasons.append("the adapter changes nothing on one side")
    verdict = "FAILED: " + "; ".join(reasons) if reasons else "ok"
    positions = report["prompt"]["num_values"] + report["generated"]["num_values"]
    line = f"{verdict} - engine against transformers in {report['dtype']}, {positions} positions: {shown}"
    return report | {"tolerance": limit, "ok": not reasons, "reasons": reasons, "line": line}


def _float32_verdict(report: Mapping[str, Any], tolerance: float | None) -> tuple[float, str, list[str]]:
    limit, reasons = FLOAT32_MAX if tolerance is None else tolerance, []
    largest = [report[part]["max"] for part in ("prompt", "generated", "likeliest")]
    shown = f"max |difference| {max(largest):.1e} (at most {limit:.0e})"
    if not all(value <= limit for value in largest):
        reasons.append(f"max |difference| of log-probabilities is {max(largest):.3g}, above {limit:.3g}")
    if report["argmax_disagreements"] > report["near_ties"]:
        reasons.append("the likeliest token differs where there is no near-tie")
    return limit, shown, reasons


def _bfloat16_verdict(report: Mapping[str, Any], tolerance: float | None) -> tuple[float, str, list[str]]:
    """Judges generated tokens: rollouts are made of them, and a prompt may hold what no model expects."""
    engine, own, reasons = report["generated"], report["transformers_bfloat16"]["generated"], []
    limit = BFLOAT16_MEAN_RATIO * own["mean"] if tolerance is None else tolerance
    shown = f"mean |difference| {engine['mean']:.1e} (at most {limit:.1e}; transformers' own {own['mean']:.1e})"
    if not engine["mean"] <= limit:
        reasons.append(f"mean |difference| of log-probabilities is {engine['mean']:.3g}, above {limit:.3g}")
    for name, ratio in (("mean", BFLOAT16_MEAN_RATIO), ("p99", BFLOAT16_P99_RATIO)):
        if not engine[name] <= ratio * own[name]:
            reasons.append(f"{name} |difference| is {engine[name]:.3g}, above {ratio} x transformers' {own[name]:.3g}")
    return limit, shown, reasons


def _random_ids(checkpoint: Checkpoint, num_prompts: int, seed: int) -> list[list[int]]:
    """Random tokens; lengths grow from one to four windows, so that every mask and edge is met."""
    import torch

    text = checkpoint.text_config
    longest = min(4 * text["sliding_window_size"], MAX_PROMPT, text["max_position_embeddings"] // 2)
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + (longest - 1) * n // max(1, num_prompts - 1) for n in range(num_prompts)]
    # The last ids are special tokens and image placeholders, which a text engine may treat otherwise.
    high = text["unpadded_vocab_size"] // 2
    return [torch.randint(0, high, (length,), generator=generator).tolist() for length in lengths]


def _chat_ids(llm: Any, prompts: Sequence[str], effort: float) -> list[list[int]]:
    from inkling_rl.chat import Renderer

    renderer = Renderer(llm.get_tokenizer())
    return [renderer.render([{"role": "user", "content": prompt}], effort=effort) for prompt in prompts]


def _lora_request(path: str | Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{next(_lora_ids)}", next(_lora_ids), str(Path(path).absolute()))


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: plain text, or JSON objects with a string `prompt` (.jsonl).

    Raises:
        VerifyError: the file cannot be read, or a line of a .jsonl file is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"prompts must be a readable file of UTF-8 text; got {path}: {error}. Check it") from error
    lines = [line for line in text.split("\n") if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise VerifyError(f"{path}:{number} must be a JSON object with `prompt`; got {line[:60]!r}") from error
        if not isinstance(prompts[-1], str):
            raise VerifyError(f"{path}:{number}: prompt must be a string; got {prompts[-1]!r}. Write plain text")
    return prompts
