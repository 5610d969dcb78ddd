"""Marlin's layouts on a GPU against vLLM's own loading code and operators, what Marlin computes, and speed.

    python -m tests.gpu.marlin_against_vllm            every check, PASS or FAIL each, then timings
    python -m pytest tests/gpu/marlin_against_vllm.py  the checks alone

Needs CUDA and vLLM 0.30 built for it. Not collected by default: it imports vllm, which takes its time. The same loading
code runs on a CPU in `tests/rollout/test_marlin_vllm.py`, with vLLM's python description of the repack operator.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from inkling_rl.formats import ExpertFormat, marlin, mixed
from inkling_rl.formats.kernels import marlin as marlin_kernels
from inkling_rl.formats.kernels import torch_marlin
from inkling_rl.formats.reference import marlin as reference
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Stored = dict[str, torch.Tensor]
FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
HIDDEN, WIDTH = 4608, 2304
# Experts, hidden size, expert width, tensor-parallel size and rank: Inkling 2 Small, its slices, and odd sizes.
SIZES = (
    (4, HIDDEN, WIDTH, 1, 0),
    (4, HIDDEN, WIDTH, 8, 0),
    (4, HIDDEN, WIDTH, 8, 3),
    (2, HIDDEN, WIDTH, 2, 1),
    (3, 128, 96, 1, 0),
    (3, 64, 96, 1, 0),
    (2, 192, 160, 1, 0),
    (2, 320, 512, 4, 2),
)


def stored_layer(
    expert_format: ExpertFormat, experts: int, hidden: int, width: int, device: str, seed: int = 0
) -> Stored:
    """Stored tensors of random bytes: every code, every scale byte that is one (NVFP4 up to 448: no shift)."""
    g = torch.Generator(device).manual_seed(seed)

    def random(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=g, device=device, dtype=torch.uint8)

    stored: Stored = {}
    for matrix, rows, columns in (("w13_weight", 2 * width, hidden), ("w2_weight", hidden, width)):
        if expert_format == "mxfp8":
            stored[matrix] = random(256, experts, rows, columns).view(torch.float8_e4m3fn)
            stored[f"{matrix}_scale"] = random(255, experts, rows, columns // 32)
            continue
        stored[matrix] = random(256, experts, rows, columns // 2)
        stored[f"{matrix}_scale"] = random(0x7F, experts, rows, columns // 16).view(torch.float8_e4m3fn)
        stored[f"{matrix}_amax"] = torch.rand(experts, generator=g, device=device) + 0.01
        stored[f"{matrix}_outer_scale_denominator"] = torch.tensor(1536.0, device=device)
    return stored


def loaded_slice(stored: Stored, expert_format: ExpertFormat, tp_rank: int = 0, tp_size: int = 1) -> Stored:
    """What vLLM's loader leaves in the parameters before it converts them: gate over up rows, one rank's part."""
    width = stored["w13_weight"].shape[1] // 2
    bits, block = marlin.BITS[expert_format], marlin.BLOCK_SIZES[expert_format]
    a, b = width // tp_size * tp_rank, width // tp_size * (tp_rank + 1)
    loaded: Stored = {}
    for suffix, per in (("", 8 // bits), ("_scale", block)):
        w13, w2 = (stored[f"{m}{suffix}"].view(torch.uint8) for m in mixed.MATRICES)
        gate, up = w13[:, 0::2][:, a:b], w13[:, 1::2][:, a:b]
        loaded[f"w13{suffix}"] = torch.cat((gate, up), 1).view(stored[f"w13_weight{suffix}"].dtype)
        loaded[f"w2{suffix}"] = w2[:, :, a // per : b // per].contiguous().view(stored[f"w2_weight{suffix}"].dtype)
    if expert_format == "nvfp4":
        for name, matrix in (("w13", "w13_weight"), ("w2", "w2_weight")):
            amax, denominator = stored[f"{matrix}_amax"], stored[f"{matrix}_outer_scale_denominator"]
            loaded[f"{name}_scale_2"] = amax / denominator
    return loaded


def vllm_convert(loaded: Stored, expert_format: ExpertFormat) -> Stored:
    """vLLM's own conversion of a layer's parameters, under the names that it gives them."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import prepare_mxfp8_moe_layer_for_marlin

    experts, hidden, _ = loaded["w2"].shape
    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=loaded["w13"].shape[1] // 2,
        params_dtype=torch.bfloat16,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM has it while it loads a bfloat16 model
    try:
        if expert_format == "mxfp8":
            parts = prepare_mxfp8_moe_layer_for_marlin(layer, **loaded)
            names: tuple[str, ...] = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        else:
            parts = prepare_nvfp4_moe_layer_for_marlin(layer, **loaded, is_act_and_mul=True)
            kinds = ("", "_scale", "_scale_2")
            names = tuple(f"{matrix}{kind}" for matrix in mixed.MATRICES for kind in kinds)
    finally:
        torch.set_default_dtype(default)
    return dict(zip(names, parts, strict=True))


def differences(ours: Stored, theirs: Stored) -> list[str]:
    """What differs between two sets of the engine's tensors: names, dtypes, shapes, bytes."""
    found = [] if set(ours) == set(theirs) else [f"names {sorted(ours)} and {sorted(theirs)}"]
    for key in sorted(set(ours) & set(theirs)):
        a, b = ours[key], theirs[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            found.append(f"{key}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
            continue
        x, y = (t.contiguous().view(torch.uint8) for t in (a, b))
        if not torch.equal(x, y):
            found.append(f"{key}: {int((x != y).sum())} of {x.numel()} bytes")
    return found


def assert_equals_vllm(stored: Stored, expert_format: ExpertFormat, tp_rank: int = 0, tp_size: int = 1) -> None:
    """vLLM's bytes, by the device's own kernels and by torch."""
    theirs = vllm_convert(loaded_slice(stored, expert_format, tp_rank, tp_size), expert_format)
    ours = marlin.from_release(stored, expert_format, tp_rank=tp_rank, tp_size=tp_size)
    assert not (found := differences(ours, theirs)), found
    with mock.patch.object(marlin_kernels, "choose", lambda device: torch_marlin):
        ours = marlin.from_release(stored, expert_format, tp_rank=tp_rank, tp_size=tp_size)
    assert not (found := differences(ours, theirs)), found


def check_sizes(device: str) -> None:
    for expert_format in FORMATS:
        for experts, hidden, width, tp_size, tp_rank in SIZES:
            if width // tp_size % marlin.BLOCK_SIZES[expert_format] == 0:
                stored = stored_layer(expert_format, experts, hidden, width, device)
                assert_equals_vllm(stored, expert_format, tp_rank, tp_size)


def check_shifts(device: str) -> None:
    """Scales that were made with anchors up to 2^17 too large, zero experts and zero layers."""
    for largest in (0, 1, 2, 3, 5, 7, 8, 0x2F, 0x66, 0x67, 0x6E, 0x6F, 0x76, 0x77, 0x7E):
        stored = stored_layer("nvfp4", 3, 128, 96, device, seed=largest)
        for matrix in mixed.MATRICES:
            scales = stored[f"{matrix}_scale"].view(torch.uint8)
            scales.clamp_(max=largest)
            scales[2, 0, 0] = largest
            scales[1] = 0
            stored[f"{matrix}_amax"][1] = 0
        assert_equals_vllm(stored, "nvfp4")


def check_scale_factors(device: str) -> None:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import _nvfp4_compute_scale_factor

    for byte in range(0x7F):
        scale = reference_nvfp4.e4m3_values(torch.tensor([[byte]], dtype=torch.uint8, device=device))
        theirs = _nvfp4_compute_scale_factor(scale.bfloat16(), torch.bfloat16)
        assert theirs == 2.0 ** reference.scale_shift(byte), (byte, theirs)


def check_from_weights(device: str) -> None:
    """Straight from BF16, the tiny model's layers and one of real width."""
    g = torch.Generator(device).manual_seed(3)
    for experts, hidden, width, tp_size in ((4, 128, 64, 1), (2, HIDDEN, 256, 2)):
        w13 = (torch.randn(experts, 2 * width, hidden, generator=g, device=device) * 0.02).bfloat16()
        w2 = (torch.randn(experts, hidden, width, generator=g, device=device) * 0.02).bfloat16()
        w2[:, ::3] *= 2.0**-15  # scales that Marlin flushes
        for expert_format in FORMATS:
            stored = mixed.quantize_layer(w13, w2, expert_format)
            theirs = vllm_convert(loaded_slice(stored, expert_format, tp_size - 1, tp_size), expert_format)
            ours = marlin.from_weights(w13, w2, expert_format, tp_rank=tp_size - 1, tp_size=tp_size)
            assert not (found := differences(ours, theirs)), found


def check_outputs(device: str) -> None:
    """Marlin's product with the identity is `marlin.dequantize`, flushed scales and MXFP8's byte 0 included."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import apply_mxfp8_marlin_linear

    hidden, width = 256, 192
    workspace = marlin_make_workspace_new(torch.device(device), 4)
    for expert_format in FORMATS:
        stored = stored_layer(expert_format, 2, hidden, width, device)
        if expert_format == "mxfp8":
            for matrix in mixed.MATRICES:
                # No NaN codes; sums of products of one value with zeros must not be NaN, so no huge scales either.
                codes = stored[matrix].view(torch.uint8)
                codes[(codes & 0x7F) == 0x7F] = 0
                stored[f"{matrix}_scale"].clamp_(max=240)
        engine = marlin.from_release(stored, expert_format)
        for matrix, rows, columns in (("w13_weight", 2 * width, hidden), ("w2_weight", hidden, width)):
            identity = torch.eye(columns, dtype=torch.bfloat16, device=device)
            operands = (identity, engine[matrix][1], engine[f"{matrix}_scale"][1])
            if expert_format == "mxfp8":
                out = apply_mxfp8_marlin_linear(*operands, workspace, rows, columns)
            else:
                outer = engine[f"{matrix}_scale_2"][1:2]
                out = apply_fp4_marlin_linear(*operands, outer, workspace, rows, columns)
            wanted = marlin.dequantize(engine, matrix, expert_format, width, torch.bfloat16)[1]
            if matrix == "w13_weight":
                wanted = torch.cat((wanted[0::2], wanted[1::2]))
            same = (wanted == out.T) | (out.T.isnan() & wanted.isnan())
            assert bool(same.all()), f"{expert_format} {matrix}: {int((~same).sum())} of {same.numel()} differ"


CHECKS: dict[str, Callable[[str], None]] = {
    "scale factors": check_scale_factors,
    "sizes": check_sizes,
    "shifts and zero experts": check_shifts,
    "straight from weights": check_from_weights,
    "what Marlin computes": check_outputs,
}


@pytest.mark.parametrize("name", list(CHECKS))
def test_on_cuda(name: str) -> None:
    CHECKS[name]("cuda")


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median time of `work` on the device, after two calls to warm up."""
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) if i > 1 else float("nan"))
    return sorted(times[2:])[repeats // 2]


def timings(expert_format: ExpertFormat, experts: int = 48) -> Iterator[str]:
    """Lines: each kernel and the whole layer, beside a copy of as many bytes and vLLM's own conversion."""
    bits, block = marlin.BITS[expert_format], marlin.BLOCK_SIZES[expert_format]
    stored = stored_layer(expert_format, experts, HIDDEN, WIDTH, "cuda")
    kernels = marlin_kernels.choose(torch.device("cuda"))
    codes, scales = (stored[k].view(torch.uint8) for k in ("w13_weight", "w13_weight_scale"))
    target = torch.empty_like(codes)
    copied = _rate(2 * codes.numel(), lambda: target.copy_(codes))
    yield f"{expert_format}: copy of w13 {copied:.0f} GB/s"
    shift = 0 if expert_format == "nvfp4" else None
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "pack w13": (codes.numel(), lambda: kernels.pack_weight(codes, bits, 2, WIDTH, HIDDEN)),
        "scales w13": (scales.numel(), lambda: kernels.permute_scales(scales, shift, 2, WIDTH, HIDDEN // block)),
    }
    for label, (moved, work) in works.items():
        rate = _rate(2 * moved, work)
        took = 2 * moved / rate / 1e6
        yield f"{expert_format}: {label} {took:.3f} ms, {rate:.0f} GB/s, {rate / copied:.0%} of the copy"
    everything = 2 * sum(stored[f"{m}{s}"].numel() for m in mixed.MATRICES for s in ("", "_scale"))
    rate = _rate(everything, lambda: marlin.from_release(stored, expert_format))
    ours = everything / rate / 1e6
    yield f"{expert_format}: layer from release {ours:.3f} ms, {rate:.0f} GB/s, {rate / copied:.0%} of the copy"
    loaded = loaded_slice(stored, expert_format)
    theirs = milliseconds(lambda: vllm_convert(loaded, expert_format), repeats=3)
    yield f"{expert_format}: vLLM's conversion {theirs:.1f} ms (gate and up already apart), {theirs / ours:.1f}x ours"


def _rate(bytes_: int, work: Callable[[], object]) -> float:
    """GB/s."""
    return bytes_ / milliseconds(work) / 1e6


def main() -> int:
    failed = 0
    for name, check in CHECKS.items():
        try:
            check("cuda")
            print(f"PASS {name}", flush=True)
        except Exception:  # one fault must not hide the others
            failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    for expert_format in FORMATS:
        for line in timings(expert_format):
            print(line, flush=True)
        torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
