"""Marlin's layouts: implementations against the definition, what a layer becomes, the way back, refusals.

The definition itself is held against vLLM in `tests/rollout/test_marlin_vllm.py` and on a GPU in
`tests/gpu/marlin_against_vllm.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from inkling_rl import native
from inkling_rl.formats import ExpertFormat, marlin, mixed
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.kernels import cpu_marlin, torch_marlin
from inkling_rl.formats.kernels.marlin import MarlinKernels, choose
from inkling_rl.formats.reference import marlin as reference
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4
from tests.inkling_rl import marlin_cases
from tests.inkling_rl.marlin_cases import scale_cases, weight_cases

ROOT = Path(__file__).parents[2]
FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")
# Hidden size, expert width: even tiles; a width that Marlin pads; a hidden size that pads NVFP4 to 128.
SIZES = ((128, 64), (128, 96), (64, 64), (192, 160))


def layer(hidden: int, width: int, experts: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * width, hidden, generator=g) * 0.02
    w2 = torch.randn(experts, hidden, width, generator=g) * 0.02
    return w13.bfloat16(), w2.bfloat16()


def assert_same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    for key, tensor in wanted.items():
        assert (got[key].dtype, got[key].shape) == (tensor.dtype, tensor.shape), key
        if tensor.itemsize == 1:
            assert torch.equal(got[key].view(torch.uint8), tensor.view(torch.uint8)), key
        else:
            assert torch.equal(got[key], tensor), key


def skip_without_compiler() -> None:
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    if os.environ.get(native.KERNELS_ENV) == "torch":
        pytest.skip(f"{native.KERNELS_ENV}=torch")


def implementation(name: str) -> MarlinKernels:
    if name == "torch":
        return torch_marlin
    if cpu_marlin.functions() is None:
        skip_without_compiler()
        pytest.fail("there is a C++ compiler, and Marlin's kernels did not build")
    return cpu_marlin


def test_the_first_words_are_what_the_closed_form_says() -> None:
    codes = torch.arange(64)[:, None] * 3 + torch.arange(16)[None, :] * 5
    nvfp4 = (codes % 16).byte()
    word = reference.pack_weight(reference_nvfp4.pack(nvfp4)[None], 4, 1, 64, 16)[0, 0, 1].item() & 0xFFFFFFFF
    # Word 1: i = 0, j = 1, so rows 16 and 24; nibbles (row, k) from the low end.
    places = ((16, 0), (16, 8), (24, 0), (24, 8), (16, 1), (16, 9), (24, 1), (24, 9))
    assert word == sum(int(nvfp4[n, k]) << (4 * t) for t, (n, k) in enumerate(places))
    word = reference.pack_weight(codes.byte()[None], 8, 1, 64, 16)[0, 0, 11].item() & 0xFFFFFFFF
    # Word 11: i = 1, j = 1, half 1, so row 24 and k from 2.
    assert word == sum(int(codes[24, k]) % 256 << (8 * t) for t, k in enumerate((2, 10, 3, 11)))


@pytest.mark.parametrize("name", ["torch", "C++"])
def test_implementations_give_the_bytes_of_the_definition(name: str) -> None:
    kernels = implementation(name)
    for label, arguments in weight_cases().items():
        assert torch.equal(kernels.pack_weight(*arguments), reference.pack_weight(*arguments)), label
    for label, scales in scale_cases().items():
        assert torch.equal(kernels.permute_scales(*scales), reference.permute_scales(*scales)), label
        assert torch.equal(kernels.largest_scales(scales[0]), reference.largest_scales(scales[0])), label


def test_threads_do_not_change_bytes() -> None:
    kernels, threads = implementation("C++"), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for label, arguments in weight_cases().items():
            assert torch.equal(kernels.pack_weight(*arguments), reference.pack_weight(*arguments)), label
    finally:
        torch.set_num_threads(threads)


def test_triton_gives_the_bytes_of_the_definition_under_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.inkling_rl.marlin_cases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.split()[-1] == str(len(weight_cases()) + len(scale_cases()))


def test_triton_moves_sixteen_bytes_per_lane_on_hopper() -> None:
    """Compiled for sm_90 without a device, with the alignment that the shapes of Inkling 2 Small have."""
    pytest.importorskip("triton")
    for kernel, text in marlin_cases.hopper_ptx().items():
        loads, stores = (re.findall(rf"{op}\.global\.(?:v(\d)\.)?b(\d+)", text) for op in ("ld", "st"))
        widths = [{int(v or 1) * int(bits) for v, bits in found} for found in (loads, stores)]
        expected = {"scales": [{64}, {128}], "largest": [{128}, set()]}.get(kernel, [{128}, {128}])
        assert widths == expected, (kernel, widths)


def test_the_cpu_takes_the_compiled_kernels() -> None:
    assert choose(torch.device("cpu")) is implementation("C++")
    assert choose(torch.device("meta")) is torch_marlin


def test_scale_bytes_hold_the_shifted_values_or_nothing() -> None:
    """Every shift that occurs, every scale that may occur with it: value times 2^(7 + shift), flushed below 2."""
    for shift in range(18):
        largest = max(c for c in range(0x7F) if c == 0 or reference.scale_shift(c) >= shift)
        scales = torch.arange(largest + 1, dtype=torch.uint8)
        wanted = reference_nvfp4.e4m3_values(scales) * 2.0 ** (7 + shift)
        wanted[wanted < 2] = 0
        made = reference.scale_bytes(scales, shift)
        assert torch.equal(reference.scale_values(made), wanted)
        assert bool(((made >= 0x80) | (made == 0)).all())  # the kernel takes the top bit for granted


def test_the_shift_leaves_the_largest_scale_below_448() -> None:
    assert [reference.scale_shift(c) for c in (0, 0x7E, 0x77, 0x76, 0x6F, 0x6E, 8, 7, 1)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        14,
        15,
        17,
    ]


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer_has_the_shapes_it_says_and_comes_back(expert_format: ExpertFormat, sizes: tuple[int, int]) -> None:
    hidden, width = sizes
    stored = mixed.quantize_layer(*layer(hidden, width), expert_format)
    engine = marlin.from_release(stored, expert_format)
    expected = marlin.shapes(expert_format, 3, hidden, width)
    assert {key: (tuple(t.shape), t.dtype) for key, t in engine.items()} == expected
    assert_same(marlin.to_release(engine, expert_format, width, stored), stored)


def test_widths_are_padded_as_vllm_pads_them() -> None:
    assert [marlin.padded_width(w, 128, "nvfp4") for w in (16, 64, 288)] == [64, 64, 320]
    assert [marlin.padded_width(w, 192, "nvfp4") for w in (16, 64, 288)] == [128, 128, 384]
    assert [marlin.padded_width(w, 192, "mxfp8") for w in (32, 64, 288)] == [64, 64, 320]


@pytest.mark.parametrize("expert_format", FORMATS)
def test_gate_rows_come_before_up_rows(expert_format: ExpertFormat) -> None:
    """Of two layers whose up rows differ, the first halves of every row of words are the same."""
    w13, w2 = layer(128, 64)
    w13[:, 0, 0] = 0.5  # the maximum, so that the anchor stays
    other = w13.clone()
    other[:, 1::2] *= -1
    words = [marlin.from_weights(x, w2, expert_format)["w13_weight"] for x in (w13, other)]
    half = words[0].shape[-1] // 2
    assert torch.equal(words[0][..., :half], words[1][..., :half])
    assert not torch.equal(words[0][..., half:], words[1][..., half:])


@pytest.mark.parametrize("expert_format", FORMATS)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_slice_is_what_the_sliced_weights_would_give(expert_format: ExpertFormat, tp_size: int) -> None:
    width, hidden = 128, 128
    w13, w2 = layer(hidden, width)
    stored = mixed.quantize_layer(w13, w2, expert_format)
    local = width // tp_size
    slices = [marlin.from_release(stored, expert_format, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
    back = [marlin.to_release(s, expert_format, local, stored) for s in slices]
    for key, axis in (("w13_weight", 1), ("w13_weight_scale", 1), ("w2_weight", 2), ("w2_weight_scale", 2)):
        whole = torch.cat([b[key].view(torch.uint8) for b in back], axis)
        assert torch.equal(whole, stored[key].view(torch.uint8)), key
    for rank, wanted in enumerate(slices):
        made = marlin.from_weights(w13, w2, expert_format, tp_rank=rank, tp_size=tp_size)
        assert_same(made, wanted)
        made = marlin.from_weights(w13, w2, expert_format, stored, tp_rank=rank, tp_size=tp_size)
        assert_same(made, wanted)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_strided_input_and_experts_in_other_places(expert_format: ExpertFormat) -> None:
    """Local experts are an index: views of a larger tensor give what copies give."""
    stored = mixed.quantize_layer(*layer(128, 96, experts=4), expert_format)
    part = {key: t[1::2] if t.ndim else t for key, t in stored.items()}
    copies = {key: t.contiguous() for key, t in part.items()}
    assert_same(marlin.from_release(part, expert_format), marlin.from_release(copies, expert_format))


@pytest.mark.parametrize("factor", [1, 2, 4, 64])
def test_anchors_that_became_too_large_shift_the_scales(factor: int) -> None:
    """The largest scale of all experts decides; values stay, and smaller scales survive."""
    w13, w2 = layer(128, 64)
    anchors = {"w13_weight_amax": w13.abs().amax((1, 2)).float() * factor}
    stored = mixed.quantize_layer(w13, w2, "nvfp4", anchors=anchors)
    engine = marlin.from_release(stored, "nvfp4")
    plain = stored["w13_weight_amax"] / 1536 * 2.0**119
    assert torch.equal(engine["w13_weight_scale_2"], plain / factor)
    assert engine["w13_weight_scale"].view(torch.uint8).max() >= 0xEC  # 224 and more, after the shift
    assert_same(marlin.to_release(engine, "nvfp4", 64, stored), stored)
    wanted, _ = mixed.dequantize_layer(stored, torch.float32)
    assert torch.equal(marlin.dequantize(engine, "w13_weight", "nvfp4", 64), wanted)


def test_one_experts_large_scale_keeps_the_others_from_shifting() -> None:
    w13, w2 = layer(128, 64)
    amax = w13.abs().amax((1, 2)).float()
    anchors = {"w13_weight_amax": amax * torch.tensor([4.0, 1.0, 4.0])}
    engine = marlin.from_release(mixed.quantize_layer(w13, w2, "nvfp4", anchors=anchors), "nvfp4")
    assert torch.equal(engine["w13_weight_scale_2"], anchors["w13_weight_amax"] / 1536 * 2.0**119)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_zero_experts_are_normal(expert_format: ExpertFormat) -> None:
    w13, w2 = layer(128, 96)
    w13[1], w2[1] = 0, 0
    for weights in ((w13, w2), (w13 * 0, w2 * 0)):
        stored = mixed.quantize_layer(*weights, expert_format)
        engine = marlin.from_release(stored, expert_format)
        assert not engine["w2_weight"][1].any()
        if expert_format == "nvfp4":
            assert engine["w13_weight_scale_2"][1] == 0
        assert_same(marlin.to_release(engine, expert_format, 96, stored), stored)
        assert torch.equal(marlin.dequantize(engine, "w2_weight", expert_format, 96)[1], torch.zeros(128, 96))


def test_flushed_scales_are_lost_counted_and_what_marlin_computes() -> None:
    """Blocks 2^-14 below the expert's maximum have subnormal scales: codes stay, the scale and the value do not."""
    w13, w2 = layer(128, 64)
    w2[:, ::2] *= 2.0**-15
    stored = mixed.quantize_layer(w13, w2, "nvfp4")
    scales = stored["w2_weight_scale"].view(torch.uint8)
    lost = (scales < 8) & (scales > 0)
    assert int(lost.sum()) > 100
    counts = marlin.flushed_blocks(stored, "nvfp4")
    assert torch.equal(counts["w2_weight"], lost.sum((1, 2)))
    assert not counts["w13_weight"].any()
    engine = marlin.from_release(stored, "nvfp4")
    back = marlin.to_release(engine, "nvfp4", 64, stored)
    assert torch.equal(back["w2_weight"], stored["w2_weight"])
    assert torch.equal(back["w2_weight_scale"].view(torch.uint8), torch.where(lost, 0, scales))
    _, wanted = mixed.dequantize_layer(stored, torch.float32)
    wanted = torch.where(lost.repeat_interleave(16, -1), 0.0, wanted)
    assert torch.equal(marlin.dequantize(engine, "w2_weight", "nvfp4", 64), wanted)


def test_zero_codes_under_a_flushed_scale_are_no_loss() -> None:
    stored = mixed.quantize_layer(*layer(128, 64), "nvfp4")
    stored["w2_weight_scale"].view(torch.uint8)[0, 0, 0] = 3
    stored["w2_weight"][0, 0, :8] = torch.tensor([0x80, 0x08, 0x88, 0], dtype=torch.uint8).repeat(2)  # no values
    assert not marlin.flushed_blocks(stored, "nvfp4")["w2_weight"].any()
    stored["w2_weight"][0, 0, 3] = 0x10
    assert marlin.flushed_blocks(stored, "nvfp4")["w2_weight"].tolist() == [1, 0, 0]


def test_scale_byte_zero_of_mxfp8_counts_as_zero() -> None:
    w13, w2 = layer(128, 64)
    w2[0, 5, :32] = 2.0**-125
    stored = mixed.quantize_layer(w13, w2, "mxfp8")
    assert stored["w2_weight_scale"][0, 5, 0] == 0
    assert marlin.flushed_blocks(stored, "mxfp8")["w2_weight"].tolist() == [1, 0, 0]
    engine = marlin.from_release(stored, "mxfp8")
    assert_same(marlin.to_release(engine, "mxfp8", 64), stored)
    _, wanted = mixed.dequantize_layer(stored, torch.float32)
    wanted[0, 5, :32] = 0
    assert torch.equal(marlin.dequantize(engine, "w2_weight", "mxfp8", 64), wanted)


@pytest.mark.parametrize("expert_format", FORMATS)
def test_straight_from_weights_keeps_a_source(expert_format: ExpertFormat) -> None:
    w13, w2 = layer(128, 96)
    stored = mixed.quantize_layer(w13, w2, expert_format)
    weights = mixed.dequantize_layer(stored, torch.bfloat16)
    assert_same(marlin.from_weights(*weights, expert_format, stored), marlin.from_release(stored, expert_format))
    smaller = (w13 / 2, w2 / 2)
    if expert_format == "nvfp4":
        anchors = {key: t for key, t in stored.items() if key.endswith("_amax")}
        wanted = marlin.from_release(mixed.quantize_layer(*smaller, "nvfp4", anchors=anchors), "nvfp4")
        assert_same(marlin.from_weights(*smaller, "nvfp4", anchors=anchors), wanted)
        wanted = marlin.from_release(mixed.quantize_layer(*smaller, "nvfp4", scale_max=448), "nvfp4")
        assert_same(marlin.from_weights(*smaller, "nvfp4", scale_max=448), wanted)


def change(stored: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**stored, key: value}


def without(stored: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in stored.items() if k != key}


def damaged(scales: torch.Tensor, byte: int) -> torch.Tensor:
    out = scales.clone()
    out.view(torch.uint8)[1, 2, 3] = byte
    return out


def test_refusals_of_stored_tensors() -> None:
    stored = mixed.quantize_layer(*layer(128, 96), "nvfp4")
    mx = mixed.quantize_layer(*layer(128, 96), "mxfp8")
    for tensors, expert_format, message in (
        (without(stored, "w2_weight_amax"), "nvfp4", r"experts\.w2_weight is nvfp4 and must come with.*w2_weight_amax"),
        (without(stored, "w2_weight"), "nvfp4", r"must hold w13_weight, w2_weight; got no w2_weight"),
        (stored, "mxfp8", r"experts\.w13_weight must be mxfp8; got nvfp4"),
        (mx, "bf16", r"must be nvfp4 or mxfp8 to be held by Marlin; got bf16"),
        (
            change(stored, "w2_weight", stored["w2_weight"][:, :, :-8]),
            "nvfp4",
            r"got \[3, 192, 64\] and \[3, 128, 40\]",
        ),
        (change(stored, "w2_weight_scale", damaged(stored["w2_weight_scale"], 0x81)), "nvfp4", r"expert 1.*0x81"),
        (
            change(stored, "w13_weight_scale", damaged(stored["w13_weight_scale"], 0x7F)),
            "nvfp4",
            r"1 others in expert 1",
        ),
        (
            change(stored, "w13_weight_scale", mx["w13_weight_scale"]),
            "nvfp4",
            r"_scale must be \[3, 192, 8\].*got \[3, 192, 4",
        ),
        (change(stored, "w2_weight_amax", torch.tensor(1.0)), "nvfp4", r"w2_weight_amax must be \[3\] .*got \[\]"),
        (change(mx, "w13_weight_scale", damaged(mx["w13_weight_scale"], 255)), "mxfp8", r"w13_weight_scale.*0xff"),
        (
            change(stored, "w2_weight_amax", torch.tensor([1.0, 8e5, 1.0])),
            "nvfp4",
            r"below 786432.*800000.0 for expert 1",
        ),
        (change(stored, "w2_weight_outer_scale_denominator", torch.tensor(6.0)), "nvfp4", "1536 or 2688; got 6.0"),
    ):
        with pytest.raises(FormatError, match=message):
            marlin.from_release(tensors, expert_format)  # type: ignore[arg-type]


def test_refusals_of_sizes_and_slices() -> None:
    for hidden, width, expert_format, tp, message in (
        (96, 64, "nvfp4", 1, "hidden size must be a multiple of 64 for Marlin; got 96"),
        (128, 96, "nvfp4", 4, "multiples of 16 .*got 4 for 96"),
        (128, 96, "mxfp8", 2, "multiples of 32 .*got 2 for 96"),
        (128, 96, "mxfp8", 0, r"tp_rank must be in \[0, tp_size\); got 0 of 0"),
    ):
        stored = mixed.quantize_layer(*layer(hidden, width), expert_format)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match=message):
            marlin.from_release(stored, expert_format, tp_size=tp)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match=message):
            marlin.flushed_blocks(stored, expert_format, tp_size=tp)  # type: ignore[arg-type]


def test_refusals_of_weights() -> None:
    w13, w2 = layer(128, 64)
    with pytest.raises(FormatError, match="must be nvfp4 or mxfp8"):
        marlin.from_weights(w13, w2, "bf16")
    with pytest.raises(FormatError, match="Take both from the same layer"):
        marlin.from_weights(w13, w2[:, :64], "nvfp4")
    w2[2, 5, 40] = torch.nan
    for tp_size in (1, 2):  # the first slice does not hold the value, and is refused all the same
        with pytest.raises(FormatError, match=r"experts.w2_weight must be finite.*expert 2: 1"):
            marlin.from_weights(w13, w2, "nvfp4", tp_size=tp_size)


def test_refusals_of_the_way_back() -> None:
    stored = mixed.quantize_layer(*layer(128, 64), "nvfp4")
    engine = marlin.from_release(stored, "nvfp4")
    with pytest.raises(FormatError, match="got no w13_weight_amax"):
        marlin.to_release(engine, "nvfp4", 64)
    with pytest.raises(FormatError, match="w13_weight_scale_2 must follow from the companions"):
        marlin.to_release(engine, "nvfp4", 64, {**stored, "w13_weight_amax": stored["w13_weight_amax"] * 3})
    with pytest.raises(FormatError, match=r"experts\.w13_weight must be torch.int32"):
        marlin.to_release(engine, "nvfp4", 128, stored)
    with pytest.raises(FormatError, match="got no w2_weight"):
        marlin.dequantize({"w13_weight": engine["w13_weight"]}, "w13_weight", "nvfp4", 64)
