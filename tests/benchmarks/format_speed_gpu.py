"""Speed of the number formats on a GPU, against a copy and public implementations in the same run.

    python -m tests.benchmarks.format_speed_gpu [--sweep]

Bytes are the least that the work must move: each input read once, each output written once. Every figure is the median
of many runs by device events, the L2 cache overwritten between them; the whole table is measured twice. fouroversix
(its Triton path) takes part where it can be imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import triton

from inkling_rl.formats.kernels import triton_engine, triton_marlin, triton_mxfp8, triton_nvfp4
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference

Row = tuple[str, int, float, Callable[[], object]]
"""Name, elements, bytes per element, what to run."""

SHAPES = ((48, 4608, 4608), (48, 4608, 2304))
SWEEP = ((128, 4, 4), (128, 8, 2), (128, 8, 4), (128, 8, 8), (128, 16, 2), (128, 16, 4), (128, 32, 4), (256, 4, 2))
NVFP4_BYTES, MXFP8_BYTES = 2.5625, 3.03125


def milliseconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=25, rep=150, return_mode="median"))


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read plus written."""
    source = torch.randn(1 << 30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


def kernels(weight: torch.Tensor) -> Iterator[Row]:
    size, (_, rows, columns) = weight.numel(), weight.shape
    anchor = triton_nvfp4.largest(weight)
    codes, scales, _ = triton_nvfp4.quantize(weight, anchor, 1536, None)
    yield "NVFP4, anchor given", size, NVFP4_BYTES, lambda: triton_nvfp4.quantize(weight, anchor, 1536, None)
    yield (
        "NVFP4, no anchor", size, 2 + NVFP4_BYTES,
        lambda: triton_nvfp4.quantize(weight, triton_nvfp4.largest(weight), 1536, None),
    )  # fmt: skip
    yield "NVFP4, scales given", size, 2.625, lambda: triton_nvfp4.quantize(weight, anchor, 1536, scales)
    yield (
        "NVFP4 in Marlin's layout",
        size,
        NVFP4_BYTES,
        lambda: triton_engine.nvfp4(weight, anchor, 1536, 1, rows, columns),
    )
    yield "NVFP4 codes to Marlin's", size, 1.0, lambda: triton_marlin.pack_weight(codes, 4, 1, rows, columns)
    yield (
        "NVFP4 to bfloat16",
        size,
        NVFP4_BYTES,
        lambda: triton_nvfp4.dequantize(codes, scales, anchor, 1536, torch.bfloat16),
    )
    yield "largest magnitude", size, 2, lambda: triton_nvfp4.largest(weight)
    m_codes, m_scales, _ = triton_mxfp8.quantize(weight, None)
    yield "MXFP8", size, MXFP8_BYTES, lambda: triton_mxfp8.quantize(weight, None)
    yield "MXFP8, scales given", size, MXFP8_BYTES, lambda: triton_mxfp8.quantize(weight, m_scales)
    yield "MXFP8 in Marlin's layout", size, MXFP8_BYTES, lambda: triton_engine.mxfp8(weight, 1, rows, columns)
    yield "MXFP8 codes to Marlin's", size, 2.0, lambda: triton_marlin.pack_weight(m_codes, 8, 1, rows, columns)
    yield "MXFP8 to bfloat16", size, MXFP8_BYTES, lambda: triton_mxfp8.dequantize(m_codes, m_scales, torch.bfloat16)


def others(weight: torch.Tensor) -> Iterator[Row]:
    """Public implementations and the torch reference, on as many experts as fit their temporaries."""
    part = weight[:16]
    anchor = reference.largest(part)
    yield "torch reference, NVFP4", part.numel(), NVFP4_BYTES, lambda: reference.quantize(part, anchor, 1536, None)
    yield "torch reference, MXFP8", part.numel(), MXFP8_BYTES, lambda: reference_mxfp8.quantize(part, None)
    try:
        from fouroversix import QuantizationConfig, quantize_to_fp4
    except ImportError as error:
        print(f"fouroversix left out: {error}")
        return
    matrix = part.reshape(-1, part.shape[-1])
    config = QuantizationConfig(backend="triton", scale_rule="mae")
    yield "fouroversix, Triton (no anchor)", matrix.numel(), 2 + NVFP4_BYTES, lambda: quantize_to_fp4(matrix, config)
    yield (
        "ours on the same matrix", matrix.numel(), 2 + NVFP4_BYTES,
        lambda: triton_nvfp4.quantize(matrix[None], triton_nvfp4.largest(matrix[None]), 1536, None),
    )  # fmt: skip


def report(rows: Iterator[Row], copy: float) -> None:
    for name, elements, bytes_per_element, run in rows:
        time = milliseconds(run)
        rate = elements * bytes_per_element / time / 1e6
        print(f"  {name:34s} {time * 1e3:9.1f} us {rate:7.0f} GB/s {rate / copy:7.1%} of a copy", flush=True)


def sweep(weight: torch.Tensor) -> Iterator[Row]:
    """Tiles per program of the NVFP4 kernel."""
    anchor = triton_nvfp4.largest(weight)
    for tile, tiles, unroll in SWEEP:
        triton_nvfp4.TILE, triton_nvfp4.TILES, triton_nvfp4.UNROLL = tile, tiles, unroll
        run = lambda: triton_nvfp4.quantize(weight, anchor, 1536, None)
        yield f"NVFP4 tile {tile} x {tiles}, unrolled {unroll}", weight.numel(), NVFP4_BYTES, run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="tiles per program")
    parser.add_argument("--others", action="store_true", help="public implementations only")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for shape in SHAPES:
        weight = (torch.randn(shape, device="cuda") * 0.02).bfloat16()
        for _ in range(0 if arguments.others else 2):
            copy = copy_bandwidth()
            print(f"{list(shape)}, copy {copy:.0f} GB/s")
            report(kernels(weight), copy)
        copy = copy_bandwidth()
        print(f"{list(shape)}, copy {copy:.0f} GB/s")
        report(others(weight), copy)
        if arguments.sweep:
            report(sweep(weight), copy)


if __name__ == "__main__":
    main()
