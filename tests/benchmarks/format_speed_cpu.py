"""Conversions per second of the number formats on a CPU, against copying memory and against public implementations.

    python -m tests.benchmarks.format_speed_cpu [--repeats 3] [--threads 1,2] [--alone] [--fouroversix SOURCE]

One weight of 42 million bfloat16 values, larger than the caches. All candidates of an operation take turns, so that
what else the machine does hits them alike; the median counts. Ours are the public functions with checks, counts and
results in fresh memory. GB/s counts the bytes that must be read and written; "of copy" compares with `Tensor.copy_` of
the same weight on the same threads (both directions counted). Public implementations come from `make oracles` and from
the stack, and find the anchor themselves; those that cannot be imported are left out and named. ModelOpt, torchao and
compressed-tensors write plain NVFP4, which tries one scale per block where Four Over Six tries two. fouroversix wants
its unpacked source, see `tests.inkling_rl.record_vectors`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inkling_rl.formats import mxfp8, nvfp4
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4
from tests.inkling_rl import oracles

ROWS, COLUMNS = 9216, 4608
TARGET = 10.0  # times the fastest public implementation, two threads: what we ask of ourselves
OUR_TORCH = "our reference"
Call = Callable[[], object]
Public = Callable[[torch.Tensor], Call]


@dataclass(frozen=True)
class Operation:
    name: str
    bytes_per_value: float
    ours: Call
    public: dict[str, Call]


def compressed_tensors_nvfp4(weight: torch.Tensor) -> Call:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16, dynamic=False
    )

    def convert() -> object:
        blocks = weight.unflatten(-1, (-1, 16))
        low, high = blocks.amin(-1), blocks.amax(-1)
        outer = generate_gparam(low.min(), high.max())
        scale, zero = calculate_qparams(low, high, arguments, global_scale=outer)
        return pack_fp4_to_uint8(quantize(weight, scale, zero, arguments, global_scale=outer)), scale

    return convert


def vllm_mxfp8(weight: torch.Tensor) -> Call:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    return lambda: _mxfp8_e4m3_quantize_torch(weight)


def fouroversix_nvfp4(source: Path) -> Public:
    def prepare(weight: torch.Tensor) -> Call:
        from tests.inkling_rl.record_vectors import fouroversix

        convert = fouroversix(source)
        return lambda: convert(weight, weight.float().abs().max(), 256, "MAE")

    return prepare


def torchao_dequantize_mxfp8(weight: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    scales, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return lambda: to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.bfloat16)


def modelopt_dequantize_mxfp8(weight: torch.Tensor) -> Call:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    quantized, scales = MXFP8QTensor.quantize(weight)
    return lambda: quantized.dequantize(torch.bfloat16, scale=scales)


def modelopt_dequantize_nvfp4(weight: torch.Tensor) -> Call:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, scales, outer = NVFP4QTensor.quantize(weight.clone(), 16)
    return lambda: quantized.dequantize(torch.bfloat16, scale=scales, double_scale=outer, block_sizes={-1: 16})


def available(candidates: dict[str, Public], weight: torch.Tensor) -> dict[str, Call]:
    """Those that can be imported and run, each tried once."""
    found = {}
    for name, prepare in candidates.items():
        try:
            call = prepare(weight)
            call()
        except Exception as error:  # whatever a missing or foreign library does, the others are measured
            print(f"left out: {name} ({type(error).__name__}: {str(error).splitlines()[0][:120]})")
        else:
            found[name] = call
    return found


def operations(weight: torch.Tensor, fouroversix: Path | None) -> list[Operation]:
    """What is measured; public implementations where there are some."""
    oracle = lambda name: lambda w: lambda: oracles.ORACLES[name](w)
    four: dict[str, Public] = {
        "ModelOpt": oracle("modelopt-nvfp4"),
        "torchao": oracle("torchao-nvfp4"),
        "compressed-tensors": compressed_tensors_nvfp4,
    }
    if fouroversix:
        four["fouroversix (4/6)"] = fouroversix_nvfp4(fouroversix)
    eight: dict[str, Public] = {
        "ModelOpt": oracle("modelopt-mxfp8"),
        "torchao": oracle("torchao-mxfp8-rceil"),
        "vLLM": vllm_mxfp8,
    }
    from_four: dict[str, Public] = {"ModelOpt": modelopt_dequantize_nvfp4}
    from_eight: dict[str, Public] = {"ModelOpt": modelopt_dequantize_mxfp8, "torchao": torchao_dequantize_mxfp8}
    stack = weight[None]
    anchor = reference_nvfp4.largest(stack)
    t, m = nvfp4.quantize(stack), mxfp8.quantize(stack)
    full = weight.float()[None]
    public4 = available(four, weight) | {OUR_TORCH: lambda: reference_nvfp4.quantize(stack, anchor, 1536, None)}
    public8 = available(eight, weight) | {OUR_TORCH: lambda: reference_mxfp8.quantize(stack, None)}
    back4, back8 = available(from_four, weight), available(from_eight, weight)
    return [
        Operation("NVFP4, anchor given", 2.5625, lambda: nvfp4.quantize(stack, anchor), {}),
        Operation("NVFP4, anchor found", 4.5625, lambda: nvfp4.quantize(stack), public4),
        Operation("NVFP4, source scales", 2.625, lambda: nvfp4.quantize(stack, anchor, t.scales), {}),
        Operation("NVFP4, anchor given, float32", 4.5625, lambda: nvfp4.quantize(full, anchor), {}),
        Operation("MXFP8", 3.03125, lambda: mxfp8.quantize(stack), public8),
        Operation("MXFP8, float32", 5.03125, lambda: mxfp8.quantize(full), {}),
        Operation("NVFP4 to bfloat16", 2.5625, lambda: t.dequantize(torch.bfloat16), back4),
        Operation("NVFP4 to float32", 4.5625, t.dequantize, {}),
        Operation("MXFP8 to bfloat16", 3.03125, lambda: m.dequantize(torch.bfloat16), back8),
        Operation("MXFP8 to float32", 5.03125, m.dequantize, {}),
    ]


def medians(calls: dict[str, Call], public: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call, in turns after a warm-up; public ones, which are slow, once a turn, ours thrice."""
    seconds: dict[str, list[float]] = {name: [] for name in calls | public}
    for repeat in range(repeats + 1):
        for name, call in [*(list(calls.items()) * 3), *public.items()]:
            start = time.perf_counter()
            call()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class Measured:
    seconds: float
    times_public: float | None
    """Of the fastest public implementation's time."""


def measure(work: list[Operation], weight: torch.Tensor, threads: int, repeats: int) -> dict[str, Measured]:
    """Ours by operation; prints a row for each."""
    torch.set_num_threads(threads)
    target = torch.empty_like(weight)
    values = weight.numel()
    measured = {}
    print(
        f"\n{threads} thread(s)\n| operation | ms | values/s | GB/s | of copy | times as fast as |\n" + "|---" * 6 + "|"
    )
    for operation in work:
        calls: dict[str, Call] = {"ours": operation.ours, "copy": lambda: target.copy_(weight)}
        seconds = medians(calls, operation.public, repeats)
        mine, copy = seconds.pop("ours"), seconds.pop("copy")
        rate, copy_rate = values * operation.bytes_per_value / mine / 1e9, values * 4 / copy / 1e9
        ratios = sorted((value / mine, name) for name, value in seconds.items())
        public = [ratio for ratio, name in ratios if name != OUR_TORCH]
        listed = ", ".join(f"{name} {ratio:.0f}" for ratio, name in ratios)
        print(
            f"| {operation.name} | {mine * 1e3:.2f} | {values / mine / 1e9:.2f}e9 | {rate:.1f} | "
            f"{rate / copy_rate:.2f} x {copy_rate:.1f} | {listed} |",
            flush=True,
        )
        measured[operation.name] = Measured(mine, min(public, default=None))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--fouroversix", type=Path)
    parser.add_argument("--alone", action="store_true", help="ours and the copy only: seconds instead of minutes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.append(str(oracles.DIRECTORY))
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    print(f"load {os.getloadavg()[0]:.2f}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    work = operations(weight, options.fouroversix)
    if options.alone:
        work = [replace(operation, public={}) for operation in work]
    counts = [int(n) for n in options.threads.split(",")]
    rows = {n: measure(work, weight, n, options.repeats) for n in counts}
    print(f"\nspeed on {counts[-1]} threads over that on {counts[0]}, and over the fastest public one there")
    for name, last in rows[counts[-1]].items():
        line = f"{name}: {rows[counts[0]][name].seconds / last.seconds:.2f}"
        if last.times_public is not None:
            verdict = "reached" if last.times_public >= TARGET else "MISSED"
            line += f", {last.times_public:.1f} (at least {TARGET:.0f}: {verdict})"
        print(line)
    print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
