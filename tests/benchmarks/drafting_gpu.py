"""What drafting costs and gives on one GPU: a slice of Inkling 2 Small at full width in the real engine, and a draft.

    HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 python -m tests.benchmarks.drafting_gpu [--layers N] [--small]

Two engines one after the other, without and with a draft of the proposed size (`slice_model.draft_config`), all with
dummy weights: what they say is noise, and how much of it is accepted means nothing. So the rejection sampler is then
told to accept at the rates of the shipped tiny draft, whatever the draft says: the work of a step is the same, only how
many tokens it gives is not the draft's merit.

Steps: device time of the captured graphs (median of replays) at contexts set by hand, on random pages: the target's of
one row per request and of eight, the draft's, and between them the context that a step hands to the draft. End to end:
whole requests through vLLM, its Python included, prompts of 1,024 tokens. The slice has 12 of 48 layers; the last
column is the draft's share of a target four times as deep.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import slice_model
from tests.benchmarks.slice_gpu import ENVIRONMENT
from tests.benchmarks.slice_timing import median_us

KI = 1024
BATCHES = (1, 8, 32)
CONTEXTS = (1 * KI, 32 * KI, 100 * KI)
PROMPT, NEW = 1 * KI, 192
NUM_TOKENS = 7
RATES = (0.88, 0.83, 0.93, 0.92, 0.89, 0.83, 0.84)
"""Of the shipped draft: that a token is accepted where those before it were. 5.3 tokens a step, were there no ends."""

TOKENS = 400
"""Of prompts, from so many different ones: the tiny model has no more."""

RELEASE_LAYERS = 48
REPLAYS = 30


@contextmanager
def engine(path: Path, draft: Path | None, arguments: argparse.Namespace) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    speculative = draft and {
        "method": "dspark", "model": str(draft), "num_speculative_tokens": NUM_TOKENS,
        "draft_sample_method": "probabilistic", "disable_eagle_block_drop": True,
    }  # fmt: skip
    rows = NUM_TOKENS + 1 if draft else 1
    began = time.monotonic()
    llm = LLM(
        str(path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=max(CONTEXTS) + 4 * KI, max_num_seqs=max(BATCHES), max_num_batched_tokens=8 * KI,
        gpu_memory_utilization=arguments.utilization, block_size=128, enable_prefix_caching=False,
        speculative_config=speculative,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [rows * batch for batch in BATCHES],
        },
        additional_config={"inkling2": {"strict_kernels": True}}, disable_log_stats=False,
        **({"kv_cache_memory_bytes": 2 << 30} if arguments.small else {}),
    )  # fmt: skip
    print(f"[engine {'with' if draft else 'without'} a draft: {time.monotonic() - began:.0f} s]", flush=True)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def end_to_end(llm: Any, batch: int) -> tuple[float, float]:
    """Tokens per second of requests that are decoding, and tokens per step of a request."""
    from vllm import SamplingParams

    draw, seconds = torch.Generator().manual_seed(1), []
    counters = lambda: {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    before = counters()
    for new in (8, 1, NEW):
        sampling = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False)
        ids = torch.randint(0, TOKENS, (batch, PROMPT), generator=draw).tolist()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    after = counters()
    change = {name: after[name] - before.get(name, 0) for name in after}
    drafts = change.get("vllm:spec_decode_num_drafts", 0)
    accepted = change.get("vllm:spec_decode_num_accepted_tokens", 0)
    rate, length = batch * (NEW - 1) / (seconds[2] - seconds[1]), 1 + accepted / drafts if drafts else 1.0
    print(f"batch {batch}: {rate:.0f} tokens/s, {length:.2f} tokens a step", flush=True)
    return rate, length


def graph_of(manager: Any, tokens: int) -> torch.cuda.CUDAGraph:
    return next(graph for desc, graph in manager.graphs.items() if desc.num_tokens == tokens)


def pose(runner: Any, batch: int, context: int, rows: int) -> None:
    """Put so many requests of a context into the runner's buffers, on pages dealt at random."""
    draw = torch.Generator(runner.device).manual_seed(0)
    buffers, tables = runner.input_buffers, runner.block_tables
    starts = torch.arange(batch + 1, device=runner.device) * rows
    buffers.query_start_loc[: batch + 1] = starts.int()
    buffers.seq_lens[:batch] = context + rows
    buffers.positions[: batch * rows] = (context + torch.arange(rows, device=runner.device)).repeat(batch)
    buffers.input_ids[: batch * rows].random_(0, TOKENS, generator=draw)
    for table in tables.input_block_tables:
        table[:batch].random_(1, runner.kv_cache_config.num_blocks, generator=draw)
    tables.slot_mappings[:, : batch * rows].random_(0, runner.kv_cache_config.num_blocks, generator=draw)
    if runner.speculator is not None:
        own = runner.speculator.input_buffers
        own.seq_lens[:batch] = context + NUM_TOKENS
        own.positions[: batch * NUM_TOKENS] = context
        own.input_ids[: batch * NUM_TOKENS].random_(0, TOKENS, generator=draw)
        runner.speculator.sample_idx_mapping[: batch * NUM_TOKENS] = (
            torch.arange(batch, device=runner.device).repeat_interleave(NUM_TOKENS).int()
        )


class ContextGraph:
    """What a step of as many rows hands to the draft, with what it reads."""

    def __init__(self, speculator: Any, rows: int) -> None:
        self.model, device = speculator.model, speculator.device
        self.outputs = torch.randn(rows, self.model.fc.weight.shape[1], device=device).bfloat16()
        self.places = torch.arange(rows, device=device)
        self.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self.replay = graph.replay

    def run(self) -> None:
        context_TH = self.model.combine_hidden_states(self.outputs)
        self.model.precompute_and_store_context_kv(context_TH, self.places, self.places)


@torch.inference_mode()
def steps(runner: Any, rows: int) -> dict[tuple[int, int], list[float]]:
    """Microseconds of a step's graphs by batch and context: the target's, then the draft's and its context's."""
    found = {}
    for batch in BATCHES:
        graphs: list[Any] = [graph_of(runner.cudagraph_manager, batch * rows)]
        if runner.speculator is not None:
            graphs.append(graph_of(runner.speculator.query_cudagraph_manager, batch * NUM_TOKENS))
            graphs.append(ContextGraph(runner.speculator, batch * rows))
        for context in CONTEXTS:
            pose(runner, batch, context, rows)
            found[batch, context] = [median_us(graph.replay, REPLAYS) for graph in graphs]
    return found


def accept(runner: Any) -> None:
    """From now on so many drafted tokens are accepted, whatever they are."""
    runner.rejection_sampler.synthetic_conditional_rates = torch.tensor(RATES, device=runner.device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=slice_model.NUM_LAYERS)
    parser.add_argument("--small", action="store_true", help="the tiny model's width, to try the script")
    parser.add_argument("--utilization", type=float, default=0.93, help="of the GPU's memory, for weights and pages")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("drafting_gpu must run on a machine with a CUDA GPU; got none")
    os.environ.update(ENVIRONMENT)
    from rollout.plugin import register

    register()  # without an installed distribution vLLM finds no entry point
    with tempfile.TemporaryDirectory() as folder:
        path = slice_model.write_slice(Path(folder) / "slice", arguments.layers, arguments.small)
        draft = slice_model.write_draft(Path(folder) / "draft", arguments.layers, arguments.small)
        with engine(path, None, arguments) as llm:
            plain = {batch: end_to_end(llm, batch)[0] for batch in BATCHES}
            one = steps(runner_of(llm), 1)
        with engine(path, draft, arguments) as llm:
            worst = {batch: end_to_end(llm, batch) for batch in BATCHES}
            accept(runner_of(llm))
            drafted = {batch: end_to_end(llm, batch) for batch in BATCHES}
            eight = steps(runner_of(llm), NUM_TOKENS + 1)
    report(arguments.layers, one, eight)
    print("\n| batch | tokens/s without | with, as dummies accept | as the shipped draft | tokens per step | ratio |")
    print("|---|---|---|---|---|---|")
    for batch in BATCHES:
        rate, length = drafted[batch]
        print(f"| {batch} | {plain[batch]:.0f} | {worst[batch][0]:.0f} ({worst[batch][1]:.2f} a step) | {rate:.0f} | "
              f"{length:.2f} | {rate / plain[batch]:.2f} |")  # fmt: skip


def report(layers: int, one: dict[tuple[int, int], list[float]], eight: dict[tuple[int, int], list[float]]) -> None:
    print(f"\n{torch.cuda.get_device_name()}, {layers} layers, us of device time")
    print("| batch | context | target, 1 row | target, 8 rows | draft | its context | share of the target's 8 rows | "
          f"of {RELEASE_LAYERS} layers |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for (batch, context), (target, draft, stored) in eight.items():
        share = (draft + stored) / target
        print(f"| {batch} | {context // KI}K | {one[batch, context][0]:.0f} | {target:.0f} | {draft:.0f} | "
              f"{stored:.0f} | {100 * share:.0f} % | {100 * share * layers / RELEASE_LAYERS:.0f} % |")  # fmt: skip


if __name__ == "__main__":
    main()
