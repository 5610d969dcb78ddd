"""A slice of Inkling 2 Small at full width in the real engine on one GPU: decode, prefill, and where the time goes.

    HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 python -m tests.benchmarks.slice_gpu [--json DIR] [--small]

12 of 48 layers (see `slice_model`), dummy weights, about 100 GB; vLLM's V2 runner in this process, pages as the engine
allocates them, filled with random numbers. Needs an H200, PyTorch, Triton and vLLM 0.30; about five minutes.

In a decode time: one CUDA graph over the model's forward pass (embedding to final norm) and, where said, the
unembedding with its softcap; metadata by vLLM's builder, pages of every request dealt at random. Not in it: scheduler,
preparation of inputs, sampling, copies to the host; they are in the end-to-end rates only. The same tokens run in every
replay, so the same experts are read, but they and the pages are many times the L2 cache. A time is the lower of two
medians over replays by device events; the last column says how far apart the two were.

In a prefill time: the forward pass of one chunk without a graph, as the engine runs it, and the logits of its last row.
TFLOP/s count projections, the chosen experts and the keys that queries see, nothing else; the matrix rate is that of
`torch.mm` in bfloat16, 8192 cubed, in the same process. Bounds: bytes over the bandwidth of a copy measured here. The
experts that a step reads are counted in it, so a bound holds for its tokens.

Tables of parts come from the profiler's timeline of the same graph (prefill: of the same calls). A matrix product has
the part of what runs before it. Kernel times leave out the gaps between kernels, and the profiler adds to some of them.

Fails at its end if a hidden state or logit of any cell is not finite, or if a layer uses less than 150 of 384 experts
at batch 32. `--small` runs the tiny model's width instead, to try the script itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import slice_model
from tests.benchmarks.slice_sections import (
    BATCHES,
    CHUNK,
    CONTEXTS,
    KI,
    PREFILLS,
    Slice,
    decode,
    decode_name,
    decode_requests,
    generate,
    prefill,
    where_time_goes,
)
from tests.benchmarks.slice_steps import fill_pages, groups_of
from tests.benchmarks.slice_timing import Clock, Report, measure_rates

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def start(path: Path, clock: Clock, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The engine and its model runner."""
    with clock.phase("import vllm"):
        from vllm import LLM
        from vllm.v1.worker import gpu_worker
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        from rollout.plugin import dummy, model, register
    # Without an installed distribution vLLM finds no entry point.
    register()
    clock.watch(GPUModelRunner, "load_model", "load: all")
    clock.watch(model.Inkling2ForCausalLM, "__init__", "load: modules")
    clock.watch(model, "load_kernels", "load: kernel check")
    clock.watch(dummy, "fill", "load: dummy weights")
    clock.watch(GPUModelRunner, "profile_run", "memory: profile run")
    clock.watch(GPUModelRunner, "profile_cudagraph_memory", "memory: graphs")
    clock.watch(GPUModelRunner, "initialize_kv_cache", "pages")
    clock.watch(gpu_worker, "kernel_warmup", "warm-up: vLLM's kernels")
    clock.watch(gpu_worker, "warmup_kernels", "warm-up: steps")
    clock.watch(GPUModelRunner, "capture_model", "graphs")
    with clock.phase("engine start"):
        llm = LLM(
            str(path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=max(CONTEXTS) + 4 * KI, max_num_seqs=max(BATCHES), max_num_batched_tokens=CHUNK,
            block_size=arguments.block_size, gpu_memory_utilization=arguments.utilization,
            enable_prefix_caching=False,
            compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(BATCHES),
            },
            additional_config={"inkling2": {"strict_kernels": True}},
            # The rest of the memory would be millions of blocks of a small model.
            **({"kv_cache_memory_bytes": 2 << 30} if arguments.small else {}),
        )  # fmt: skip
    return llm, llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="DIR", help="write slice.json there, section by section")
    parser.add_argument("--layers", type=int, default=slice_model.NUM_LAYERS)
    parser.add_argument("--small", action="store_true", help="the tiny model's width, to try the script")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--utilization", type=float, default=0.95, help="of the GPU's memory, for weights and pages")
    parser.add_argument("--seconds", type=float, default=300, help="no section starts later than this")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("slice_gpu must run on a machine with a CUDA GPU; got none")
    os.environ.update(ENVIRONMENT)
    report, clock = Report(arguments.json, arguments.seconds), Clock()
    with clock.phase("rates"):
        rates = measure_rates()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rates['bytes_per_us'] / 1e3:.0f} GB/s, "
          f"matrix {rates['operations_per_us'] / 1e6:.0f} TFLOP/s", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = slice_model.write_slice(Path(folder) / "slice", arguments.layers, arguments.small)
        try:
            llm, runner = start(path, clock, arguments)
        finally:
            print("start, s: " + ", ".join(f"{name} {taken:.1f}" for name, taken in clock.seconds.items()), flush=True)
    report.figures["start"] = {"seconds": clock.seconds, "rates": rates, "arguments": vars(arguments)}
    with torch.inference_mode():
        measure(llm, Slice(runner, rates), report)
    llm.llm_engine.engine_core.shutdown()
    print(f"{time.monotonic() - report.began:.0f} s in all")
    if report.failed:
        sys.exit("FAILED\n" + "\n".join(report.failed))


def measure(llm: Any, model: Slice, report: Report) -> None:
    free, total = torch.cuda.mem_get_info()
    pool = model.runner.kv_cache_config
    print(f"pages: {pool.num_blocks} blocks of {[group.block_size for group in groups_of(model.runner)]} tokens; "
          f"GPU memory free {free / 2**30:.1f} of {total / 2**30:.1f} GiB", flush=True)  # fmt: skip
    report.attempt("pages", lambda _: fill_pages(model.runner))
    report.attempt("decode", partial(decode, model))
    report.attempt("prefill", partial(prefill, model))
    for batch, context in ((1, 100 * KI), (32, 32 * KI)):
        name, requests = decode_name(batch, context), decode_requests(batch, context)
        report.attempt(f"time of {name}", partial(where_time_goes, model, name, requests, True))
    report.attempt("time of 8K", partial(where_time_goes, model, "8K", PREFILLS["8K"], False))
    report.attempt("generate", partial(generate, llm, model))
    report.failed += model.faults


if __name__ == "__main__":
    main()
