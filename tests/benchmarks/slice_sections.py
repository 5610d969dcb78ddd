"""The sections of the slice benchmark: decode, prefill, where the time goes, end to end. See `slice_gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks import slice_bounds, slice_steps
from tests.benchmarks.slice_bounds import Work, without_unembedding
from tests.benchmarks.slice_timing import median_us, timeline

KI = 1024
BATCHES, CONTEXTS = (1, 8, 32), (1 * KI, 32 * KI, 100 * KI)
CHUNK = 8 * KI
PREFILLS = {"8K": ((0, CHUNK),), "8K after 24K": ((24 * KI, CHUNK),)}
LEAST_DISTINCT = 150 / 384
WANTED = {"1 x 100K": 2400.0}
"""Microseconds with the unembedding that we ask for."""


class Slice:
    """The started engine with what the sections share."""

    def __init__(self, runner: Any, rates: dict[str, float]) -> None:
        self.runner, self.rates = runner, rates
        self.shape = runner.model.shape
        self.distinct: dict[str, list[int]] = {}
        self.step_us: dict[str, float] = {}
        self.faults: list[str] = []
        """What came out wrong. A time is printed all the same, and the benchmark fails at its end."""

    def step(self, requests: Any, seed: int = 0) -> Any:
        rows = sum(new for _, new in requests)
        draw = torch.Generator().manual_seed(seed)
        return slice_steps.build(
            self.runner, requests, torch.randint(0, self.shape.unpadded_vocab_size, (rows,), generator=draw), seed
        )

    def check(self, name: str, step: Any) -> None:
        """One eager step: whether all that comes out is finite, and which experts it used."""
        chosen: list[int] = []
        layers = [layer.mlp for layer in self.runner.model.model.layers]
        for layer in layers:
            layer.capture_fn = lambda ids: chosen.append(int(ids.unique().numel()))
        try:
            hidden_TH, logits_TV = step.hidden(), step.logits()
        finally:
            for layer in layers:
                layer.capture_fn = None
        size = self.shape.unpadded_vocab_size
        assert hidden_TH.shape == (step.work.rows, self.shape.hidden_size)
        for what, values, least in (("hidden states", hidden_TH, 1e-3), ("logits", logits_TV[:, :size], 1e-6)):
            if not bool(torch.isfinite(values).all()):
                self.faults.append(f"{name}: {what} are not finite")
            elif not float(values.float().std()) > least:
                self.faults.append(f"{name}: {what} are all the same")
        self.distinct[name] = chosen[: self.shape.num_layers]

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def bounds(self, name: str, work: Work) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes and operations per part."""
        by_bytes = slice_bounds.bytes_by_part(self.shape, work, self.distinct[name])
        return by_bytes, slice_bounds.operations_by_part(self.shape, work)

    def bound_us(self, name: str, work: Work) -> tuple[float, float]:
        """The bytes bound without and with the unembedding."""
        by_bytes, _ = self.bounds(name, work)
        per_us = self.rates["bytes_per_us"]
        return without_unembedding(by_bytes) / per_us, sum(by_bytes.values()) / per_us


def decode_name(batch: int, context: int) -> str:
    return f"{batch} x {context // KI}K"


def decode_requests(batch: int, context: int) -> tuple[tuple[int, int], ...]:
    """The step after which every request has `context` tokens."""
    return ((context - 1, 1),) * batch


def decode(model: Slice, cells: dict[str, Any]) -> None:
    """Every cell of batch and context."""
    print(f"{'decode, us':12}{'forward':>9}{'bound':>8}{'of it':>7}{'+logits':>9}{'bound':>8}{'of it':>7}{'wanted':>8}"
          f"{'experts':>9}{'apart':>7}")  # fmt: skip
    for context in CONTEXTS:
        for batch in BATCHES:
            name, requests = decode_name(batch, context), decode_requests(batch, context)
            needed = slice_steps.blocks_needed(slice_steps.groups_of(model.runner), requests)
            there = model.runner.kv_cache_config.num_blocks
            if needed >= there:
                print(f"{name:12} does not fit: needs {needed} blocks, the pool has {there - 1}")
                cells[name] = {"blocks_needed": needed, "blocks": there - 1}
                continue
            step = model.step(requests)
            model.check(name, step)
            cells[name] = cell = decode_cell(model, name, step)
            print(
                f"{name:12}{cell['forward_us']:9.0f}{cell['forward_bound_us']:8.0f}"
                f"{100 * cell['forward_bound_us'] / cell['forward_us']:6.0f}%{cell['step_us']:9.0f}"
                f"{cell['step_bound_us']:8.0f}{100 * cell['step_bound_us'] / cell['step_us']:6.0f}%"
                f"{WANTED.get(name) or '':>8}{min(cell['distinct']):5}-{max(cell['distinct']):<3}"
                f"{100 * cell['apart']:6.1f}%", flush=True,
            )  # fmt: skip
            least = LEAST_DISTINCT * model.shape.num_experts
            if batch == max(BATCHES) and min(cell["distinct"]) < least:
                model.faults.append(f"{name}: layers use {cell['distinct']} experts, must be {least:.0f} or more")


def decode_cell(model: Slice, name: str, step: Any) -> dict[str, Any]:
    times = {}
    apart = 0.0
    for key, run in (("forward_us", step.hidden), ("step_us", step.logits)):
        graph = model.capture(run)
        first, again = median_us(graph.replay, 15), median_us(graph.replay, 15)
        times[key], apart = min(first, again), max(apart, abs(first - again) / again)
        del graph
    model.step_us[name] = times["step_us"]
    bounds = model.bound_us(name, step.work)
    return {**times, "forward_bound_us": bounds[0], "step_bound_us": bounds[1], "apart": apart,
            "distinct": model.distinct[name]}  # fmt: skip


def prefill(model: Slice, cells: dict[str, Any]) -> None:
    """Chunks of prompts, without a graph."""
    rate = model.rates["operations_per_us"]
    print(f"{'prefill':14}{'ms':>9}{'TFLOP/s':>9}{'of rate':>9}{'wanted':>8}{'host ms':>9}{'experts':>9}")
    for name, requests in PREFILLS.items():
        step = model.step(requests)
        model.check(name, step)
        taken = median_us(step.logits, 5)
        began = time.perf_counter()
        step.logits()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        operations = without_unembedding(model.bounds(name, step.work)[1])
        cells[name] = cell = {"us": taken, "tflops": operations / taken / 1e6, "of_rate": operations / taken / rate,
                              "host_us": 1e6 * host, "operations": operations}  # fmt: skip
        model.step_us[name] = taken
        print(f"{name:14}{taken / 1e3:9.1f}{cell['tflops']:9.0f}{100 * cell['of_rate']:8.1f}%{'40%':>8}"
              f"{1e3 * host:9.1f}{min(model.distinct[name]):9}", flush=True)  # fmt: skip


def where_time_goes(model: Slice, name: str, requests: Any, graph: bool, figures: dict[str, Any]) -> None:
    """Kernel times by part against their bounds, from the profiler's timeline."""
    step = model.step(requests)
    if name not in model.distinct:
        model.check(name, step)
    run = model.capture(step.logits).replay if graph else step.logits
    times, launches, kernels = timeline(run, model.shape.num_layers)
    by_bytes, by_operations = model.bounds(name, step.work)
    rows = slice_bounds.table(
        times, launches, by_bytes, by_operations, model.rates["bytes_per_us"], model.rates["operations_per_us"]
    )
    busy = sum(times.values())
    print(f"{name:14}{'us':>9}{'share':>7}{'kernels':>8}{'bytes':>8}{'math':>8}{'of bound':>9}")
    for row in rows:
        print(f"  {row['part']:12}{row['us']:9.1f}{100 * row['us'] / busy:6.1f}%{row['launches']:8}"
              f"{row['bytes_us']:8.1f}{row['operations_us']:8.1f}{100 * row['of_bound']:8.0f}%")  # fmt: skip
    step_us = model.step_us.get(name, float("nan"))
    print(f"  {'all kernels':12}{busy:9.1f}{'':7}{sum(launches.values()):8}{sum(r['bytes_us'] for r in rows):8.1f}"
          f"{sum(r['operations_us'] for r in rows):8.1f}   without profiler {step_us:.0f}", flush=True)  # fmt: skip
    figures |= {"rows": rows, "busy_us": busy, "step_us": step_us, "kernels": kernels}


def generate(llm: Any, model: Slice, rates: dict[str, Any]) -> None:
    """Completions through the whole engine, its Python included."""
    from vllm import SamplingParams

    new, prompt = 64, 32
    draw = torch.Generator().manual_seed(1)
    for batch in (1, 32):
        for tokens in (8, new):
            sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
            ids = torch.randint(0, model.shape.unpadded_vocab_size, (batch, prompt), generator=draw).tolist()
            began = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
            elapsed = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        rates[f"batch {batch}"] = {"tokens_per_s": batch * new / elapsed, "ms_per_step": 1000 * elapsed / new}
        print(f"end to end, batch {batch}, prompt 32, 64 new tokens: {batch * new / elapsed:.0f} tokens/s, "
              f"{1000 * elapsed / new:.2f} ms a step", flush=True)  # fmt: skip
