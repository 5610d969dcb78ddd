"""The C++ kernels of the number formats against the reference: every byte, every count, every instruction set."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_rl import native
from inkling_rl.formats import kernels, mxfp8, nvfp4
from inkling_rl.formats.kernels import cpu_library, cpu_mxfp8, cpu_nvfp4
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference_nvfp4
from tests.inkling_rl import format_cases


def have_compiler() -> bool:
    try:
        return bool(native.find_compiler())
    except native.BuildError:
        return False


pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler on this machine")

INSTRUCTION_SETS = ("native", "haswell", "x86-64")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Builds = Callable[[], Iterator[str]]


def runs(instruction_set: str) -> bool:
    if instruction_set != "haswell":
        return instruction_set == "native" or os.uname().machine == "x86_64"
    return (
        "avx2" in torch.backends.cpu.get_cpu_capability().lower() or "AVX512" in torch.backends.cpu.get_cpu_capability()
    )


@pytest.fixture
def each_build(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[str]]:
    """Iterates over the kernels compiled for 512-bit, 256-bit and bare vectors, each in force while it is the turn."""

    def builds() -> Iterator[str]:
        for name in filter(runs, INSTRUCTION_SETS):
            flags = tuple(f"-march={name}" if flag == "-march=native" else flag for flag in native.FLAGS)
            loaded = cpu_library.functions(replace(cpu_library.KERNELS, name=f"formats_{name}", flags=flags))
            assert loaded is not None
            for module in (cpu_nvfp4, cpu_mxfp8):
                monkeypatch.setattr(module, "functions", lambda loaded=loaded: loaded)
            yield name

    return builds


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def flushed() -> Iterator[None]:
    """The caller's thread treats denormals as zero, in and out."""
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit, signs of zero included; any NaN is as good as another."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one, dtype=torch.bool)
    return one.dtype is other.dtype and bool(((one.view(integers) == other.view(integers)) | nan).all())


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: object) -> None:
    for name, one, other in zip(("codes", "scales", "counts"), got, expected, strict=True):
        assert one.shape == other.shape and same_bits(one, other), (what, name, int((one != other).sum()))


@pytest.mark.parametrize("case", format_cases.nvfp4_cases())
def test_nvfp4_bytes_and_counts_under_every_anchor(case: str, each_build: Builds) -> None:
    weight = format_cases.nvfp4_cases()[case]
    anchors = format_cases.nvfp4_anchors(weight)
    small = weight.numel() < 50_000
    for name, anchor in anchors.items():
        for denominator in (1536, 2688) if small or name == "own" else (1536,):
            expected = reference_nvfp4.quantize(weight, anchor, denominator, None)
            for build in each_build():
                got = cpu_nvfp4.quantize(weight, anchor, denominator, None)
                assert_same(got, expected, (name, denominator, build))
                assert name != "own" or cpu_nvfp4.largest(weight).equal(anchor)


@pytest.mark.parametrize("case", format_cases.nvfp4_cases())
def test_nvfp4_with_given_scales_and_back(case: str, each_build: Builds) -> None:
    weight = format_cases.nvfp4_cases()[case]
    if "every" in case:
        weight = weight[::5]
    anchors = format_cases.nvfp4_anchors(weight)
    for name, scales in format_cases.given_nvfp4_scales(weight).items():
        for anchor in ("own", "subnormal", "huge"):
            expected = reference_nvfp4.quantize(weight, anchors[anchor], 1536, scales)
            for build in each_build():
                got = cpu_nvfp4.quantize(weight, anchors[anchor], 1536, scales)
                assert_same(got, expected, (name, anchor, build))
        for dtype in DTYPES:
            stored = (expected[0], scales, anchors["own"], 2688, dtype)
            values = reference_nvfp4.dequantize(*stored)
            for build in each_build():
                assert same_bits(cpu_nvfp4.dequantize(*stored), values), (name, dtype, build)


@pytest.mark.parametrize("case", format_cases.mxfp8_cases())
def test_mxfp8_bytes_and_counts_and_back(case: str, each_build: Builds) -> None:
    weight = format_cases.mxfp8_cases()[case]
    if "every" in case:
        weight = weight[::3]
    choices = {"none": None} | format_cases.given_mxfp8_scales(weight)
    for name, scales in choices.items():
        expected = reference_mxfp8.quantize(weight, scales)
        values = [reference_mxfp8.dequantize(*expected[:2], dtype) for dtype in DTYPES]
        for build in each_build():
            assert_same(cpu_mxfp8.quantize(weight, scales), expected, (name, build))
            for value in values:
                assert same_bits(cpu_mxfp8.dequantize(*expected[:2], value.dtype), value), (name, value.dtype, build)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_stored_byte_is_decoded(dtype: torch.dtype, each_build: Builds) -> None:
    """All codes under all scale bytes, NaN and negative ones too."""
    g = torch.Generator().manual_seed(0)
    scales = torch.arange(256, dtype=torch.uint8).repeat(2).reshape(1, 256, 2)
    codes = torch.randint(0, 256, (1, 256, 16), generator=g, dtype=torch.uint8)
    every = torch.arange(256, dtype=torch.uint8).repeat(1, 256, 1)
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 1, 8)
    for build in each_build():
        for amax in (3.7, 1e-39, 3e38, 0.0):
            stored = (codes, scales, torch.tensor([amax]), 1536, dtype)
            assert same_bits(cpu_nvfp4.dequantize(*stored), reference_nvfp4.dequantize(*stored)), (amax, build)
        got = cpu_mxfp8.dequantize(every, bytes_, dtype)
        assert same_bits(got, reference_mxfp8.dequantize(every, bytes_, dtype)), build


def test_negative_scales_are_kept_as_the_reference_keeps_them(each_build: Builds) -> None:
    """Every byte but the two NaN, whose sign is nobody's."""
    weight = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    weight[0, :, ::5] = 0
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 64, 4)
    scales[scales & 0x7F == 0x7F] -= 1
    expected = reference_nvfp4.quantize(weight, torch.tensor([2.0]), 1536, scales)
    for build in each_build():
        assert_same(cpu_nvfp4.quantize(weight, torch.tensor([2.0]), 1536, scales), expected, build)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite_are_counted(dtype: str, each_build: Builds) -> None:
    weight = format_cases.non_finite_cases()[dtype]
    largest = reference_nvfp4.largest(weight)
    for build in each_build():
        for anchor in (largest, torch.tensor([1.0, 2.0, 0.0])):
            for scales in (None, torch.full((3, 4, 4), 0x38, dtype=torch.uint8)):
                codes, chosen, counts = cpu_nvfp4.quantize(weight, anchor, 1536, scales)
                expected = reference_nvfp4.quantize(weight, anchor, 1536, scales)
                assert counts.equal(expected[2]) and counts[:, 0].tolist() == [0, 3, 2], build
                assert codes[0].equal(expected[0][0]) and chosen[0].equal(expected[1][0])
        got = cpu_mxfp8.quantize(weight, None)
        assert got[2].equal(reference_mxfp8.quantize(weight, None)[2]) and got[2].tolist() == [0, 3, 2]
        assert same_bits(cpu_nvfp4.largest(weight), largest) and largest[1].isnan() and largest[2].isinf()


@pytest.mark.parametrize("case", ["gaussian", "small blocks bfloat16", "random bits", "rows that fill no vector"])
def test_strides(case: str, each_build: Builds) -> None:
    for name, view in format_cases.strided_views(format_cases.nvfp4_cases()[case]).items():
        anchor = reference_nvfp4.largest(view)
        expected = reference_nvfp4.quantize(view, anchor, 1536, None)
        scales = expected[1].transpose(1, 2).contiguous().transpose(1, 2)
        kept = reference_nvfp4.quantize(view, anchor, 1536, scales)
        mx = reference_mxfp8.quantize(view, None) if view.shape[-1] % 32 == 0 else None
        for build in each_build():
            assert cpu_nvfp4.largest(view).equal(anchor), (name, build)
            assert_same(cpu_nvfp4.quantize(view, anchor, 1536, None), expected, (name, build))
            assert_same(cpu_nvfp4.quantize(view, anchor, 1536, scales), kept, (name, build))
            if mx is not None:
                assert_same(cpu_mxfp8.quantize(view, None), mx, (name, build))


def test_threads_change_nothing(two_threads: None) -> None:
    """Chunks of one expert and of several, on two threads and more than one pass over them."""
    g = torch.Generator().manual_seed(5)
    for shape in [(1, 300, 1504), (7, 130, 512), (3, 1, 65600)]:
        weight = torch.randn(shape, generator=g).bfloat16()
        weight[-1, 0, 5] = 40.0
        anchor = reference_nvfp4.largest(weight) * 0.5
        expected = reference_nvfp4.quantize(weight, anchor, 1536, None)
        assert expected[2][:, 1].sum() > 0
        sparse = reference_nvfp4.quantize(weight[:, ::2], anchor, 1536, None)
        mx = reference_mxfp8.quantize(weight, None)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert cpu_nvfp4.largest(weight).equal(reference_nvfp4.largest(weight))
            assert_same(cpu_nvfp4.quantize(weight, anchor, 1536, None), expected, (shape, threads))
            assert_same(cpu_nvfp4.quantize(weight[:, ::2], anchor, 1536, None), sparse, (shape, threads))
            assert_same(cpu_mxfp8.quantize(weight, None), mx, (shape, threads))
            for dtype in DTYPES:
                stored = (*expected[:2], anchor, 1536, dtype)
                assert same_bits(cpu_nvfp4.dequantize(*stored), reference_nvfp4.dequantize(*stored))
                assert same_bits(cpu_mxfp8.dequantize(*mx[:2], dtype), reference_mxfp8.dequantize(*mx[:2], dtype))


def test_a_caller_that_flushes_denormals_gets_the_same_bytes_and_keeps_its_mode(
    flushed: None, two_threads: None
) -> None:
    cases = format_cases.nvfp4_cases()
    torch.set_flush_denormal(False)
    inputs = [cases[name] for name in ("subnormal maximum", "smallest subnormal", "small blocks", "every bfloat16")]
    large = torch.cat([cases["subnormal maximum"]] * 60)  # enough for a second thread
    expected = []
    for weight in [*inputs, large]:
        anchor = reference_nvfp4.largest(weight)
        nv = reference_nvfp4.quantize(weight, anchor, 1536, None)
        values = reference_nvfp4.dequantize(*nv[:2], anchor, 1536, torch.float32)
        mx = reference_mxfp8.quantize(weight.reshape(1, -1, 32), None) if weight.numel() % 32 == 0 else None
        expected.append((weight, anchor, nv, values, mx))
    torch.set_flush_denormal(True)
    for weight, anchor, nv, values, mx in expected:
        assert same_bits(cpu_nvfp4.largest(weight), anchor)
        assert_same(cpu_nvfp4.quantize(weight, anchor, 1536, None), nv, weight.shape)
        assert same_bits(cpu_nvfp4.dequantize(*nv[:2], anchor, 1536, torch.float32), values)
        if mx is not None:
            assert_same(cpu_mxfp8.quantize(weight.reshape(1, -1, 32), None), mx, weight.shape)
    assert float(torch.tensor([1e-39]) * torch.tensor([0.5])) == 0  # still flushing


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 4),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 40),
    half=st.booleans(),
    step=st.integers(1, 2),
    power=st.floats(-44, 37),
    seed=st.integers(0, 1000),
)
def test_any_shape(experts: int, rows: int, blocks: int, half: bool, step: int, power: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, rows * step, 32 * blocks, generator=g) * torch.rand(
        experts, rows * step, 1, generator=g
    )
    weight = (weight * 10.0**power).nan_to_num(0.0, 0.0, 0.0).to(torch.bfloat16 if half else torch.float32)
    weight = weight.nan_to_num(0.0, 0.0, 0.0)[:, ::step]
    narrow = weight[..., : 32 * blocks - 16] if blocks > 1 else weight
    anchor = reference_nvfp4.largest(narrow)
    assert cpu_nvfp4.largest(narrow).equal(anchor)
    nv = reference_nvfp4.quantize(narrow, anchor, 1536, None)
    assert_same(cpu_nvfp4.quantize(narrow, anchor, 1536, None), nv, "nvfp4")
    mx = reference_mxfp8.quantize(weight, None)
    assert_same(cpu_mxfp8.quantize(weight, None), mx, "mxfp8")


def fast_level(scale: torch.Tensor, amax: torch.Tensor, magnitude: float) -> torch.Tensor:
    return ((magnitude * scale) * amax) / 1536.0


def test_levels_are_powers_of_two_times_two_of_them() -> None:
    """The shortcut of the error: for all scales and anchors of any size that the kernel takes it for, exact."""
    scales = reference_nvfp4.e4m3_values(torch.arange(0x7F, dtype=torch.uint8))[:, None]
    g = torch.Generator().manual_seed(0)
    amax = torch.cat([torch.exp2(torch.rand(4000, generator=g) * 215 - 100), torch.tensor([2.0**-100, 2.0**115])])
    one, half_more = fast_level(scales, amax, 1.0), fast_level(scales, amax, 1.5)
    half = (half_more - one) * 2
    for magnitude, power in [(0.5, 0.5), (2, 2), (4, 4)]:
        assert fast_level(scales, amax, magnitude).equal(one * power)
    for magnitude, power in [(1.5, 1), (3, 2), (6, 4)]:
        exact = fast_level(scales, amax, magnitude)
        assert exact.equal(half_more * power) and exact.equal(power * one + (magnitude - power) * half)


def test_a_machine_without_a_compiler_converts_on_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(2))
    fast = nvfp4.quantize(weight), mxfp8.quantize(weight)
    monkeypatch.setenv(native.CACHE_ENV, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native.forget()
    cpu_library.functions.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="inkling_rl.native"):
            slow = nvfp4.quantize(weight), mxfp8.quantize(weight)
        assert kernels.nvfp4(weight.device) is reference_nvfp4 and kernels.mxfp8(weight.device) is reference_mxfp8
    finally:
        native.forget()
        cpu_library.functions.cache_clear()
    [message] = [r.getMessage() for r in caplog.records]
    assert "no C++ compiler" in message and "number formats" in message.lower() and "times slower" in message
    for one, other in zip(fast, slow, strict=True):
        assert one.codes.equal(other.codes) and one.scales.equal(other.scales)


def test_the_kernels_are_built_by_a_command_and_switched_off_by_the_environment(tmp_path: Path) -> None:
    env = os.environ | {native.CACHE_ENV: str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "inkling_rl.formats.kernels"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    built = {str(path) for path in (tmp_path / "kernels").glob("*.so")}
    assert len(built) == 2 and set(done.stdout.split()) == built and done.stderr == ""
    program = (
        "import torch; from inkling_rl.formats import kernels; print(kernels.nvfp4(torch.device('cpu')).__name__, "
        "kernels.mxfp8(torch.device('cpu')).__name__)"
    )
    for value, package in (("torch", "reference."), ("", "kernels.cpu_")):
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, env=env | {native.KERNELS_ENV: value}, capture_output=True, text=True, check=True)
        assert done.stdout.count(package) == 2
