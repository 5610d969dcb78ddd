"""Breaks the number formats on purpose, one place at a time, and sees whether the tests notice.

`python -m tests.mutations [--only WORD]` copies the packages and tests to a temporary folder, applies each mutation
there as a replacement of text (which must occur, so that the list cannot go stale), runs the tests of the formats and
prints what killed it. Exits with 1 if one survives. Not part of the suite: about fifteen minutes, much of it compiling.

The reference is tested with `INKLING_RL_KERNELS=torch`, where nothing but independent statements judges it: numpy
scalars, exact rationals, other libraries. The C++ is judged by the reference as well.
"""

# ruff: noqa: E501 - the table of replacements is easier to compare with the sources unbroken

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE_TESTS = ("test_nvfp4.py", "test_mxfp8.py", "test_mixed.py", "test_fake_quantize.py", "test_oracles.py")
CPU_TESTS = (
    "test_native_rounding.py",
    "test_nvfp4.py",
    "test_mxfp8.py",
    "test_mixed.py",
    "test_format_kernels_cpu.py",
    "test_oracles.py",
)
FORMATS = "inkling_rl/formats"
REFERENCE, REFERENCE_MX = f"{FORMATS}/reference/nvfp4.py", f"{FORMATS}/reference/mxfp8.py"
CPP, CPP_MX, VECTORS = (f"{FORMATS}/kernels/cpp/{name}.h" for name in ("nvfp4", "mxfp8", "vectors"))


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault."""

    fault: str
    path: str
    replacements: tuple[tuple[str, str], ...]

    @property
    def native(self) -> bool:
        return "/cpp/" in self.path or self.path.endswith("native.py")


def mutation(fault: str, path: str, *texts: str) -> Mutation:
    return Mutation(fault, path, tuple(zip(texts[::2], texts[1::2], strict=True)))


SEQUENTIAL = """    error = torch.zeros_like(distance[..., 0])
    for i in range(BLOCK_SIZE):
        error = error + distance[..., i]
    return error
"""
TREE = """    while distance.shape[-1] > 1:
        distance = distance[..., 0::2] + distance[..., 1::2]
    return distance[..., 0]
"""
SEPARATE = """    if weight.shape[1] % 2 == 0 and matrix.startswith("w13") and amax is None and scales is None:
        g, u = (nvfp4.quantize(weight[:, i::2], None, None, scale_max, name=label) for i in (0, 1))
        both = lambda a, b: torch.stack((a, b), 2).flatten(1, 2)
        t = nvfp4.NVFP4Tensor(both(g.codes, u.codes), both(g.scales, u.scales), g.amax, g.denominator)
    else:
        t = nvfp4.quantize(weight, amax, scales, scale_max, name=label)
"""
CPP_ERROR = "error = error + (vf)((vu)(value - magnitude) & ABS);"
CPP_LEVELS = """    level = (scale.value * anchor.amax) / anchor.denominator;
    const vf level15 = ((1.5f * scale.value) * anchor.amax) / anchor.denominator;
"""

MUTATIONS = (
    mutation("<= for < in the pick", REFERENCE, "pick4 = error4 < error6", "pick4 = error4 <= error6"),
    mutation("<= for < in the pick", CPP, "to4.error < to6.error", "to4.error <= to6.error"),
    mutation("tree sum for the sequential one", REFERENCE, SEQUENTIAL, TREE),
    mutation("sum in double precision", REFERENCE, "torch.zeros_like(distance[..., 0])", "torch.zeros_like(distance[..., 0]).double()"),
    mutation(
        "sum in two halves",
        CPP,
        "vf inverse, level, half, error;",
        "vf inverse, level, half, error, other;",
        "error = vf{};",
        "error = other = vf{};",
        CPP_ERROR,
        "std::swap(error, other); " + CPP_ERROR,
        "to4.error < to6.error",
        "(to4.error + to4.other) < (to6.error + to6.other)",
    ),
    mutation("multiply before divide", REFERENCE, "(blocks.abs().amax(-1) / _constant(6.0, blocks)) * encode_scale(amax, denominator)", "(blocks.abs().amax(-1) * encode_scale(amax, denominator)) / _constant(6.0, blocks)"),
    mutation("v * (S / 6), the order of plain NVFP4", REFERENCE, "(blocks.abs().amax(-1) / _constant(6.0, blocks)) * encode_scale(amax, denominator)", "blocks.abs().amax(-1) * (encode_scale(amax, denominator) / _constant(6.0, blocks))"),
    mutation("multiply before divide", CPP, "((vf)top / 6.0f) * anchor.encode", "((vf)top * anchor.encode) / 6.0f"),
    mutation("v * (S / 6), the order of plain NVFP4", CPP, "((vf)top / 6.0f) * anchor.encode", "(vf)top * (anchor.encode / 6.0f)"),
    mutation("decode scale in the error", REFERENCE, "* amax) / _constant(float(denominator), blocks)", ") * decode_scale(amax, denominator)"),
    mutation(
        "decode scale in the error",
        CPP,
        CPP_LEVELS,
        "    level = scale.value * anchor.decode;\n    const vf level15 = (1.5f * scale.value) * anchor.decode;\n",
        "value = ((q * scale.value) * anchor.amax) / anchor.denominator;",
        "value = (q * scale.value) * anchor.decode;",
    ),
    mutation("448 for 256", f"{FORMATS}/nvfp4.py", "scale_max: int = 256,", "scale_max: int = 448,"),
    mutation("448 for 256", f"{FORMATS}/mixed.py", "scale_max: int = 256,", "scale_max: int = 448,"),
    mutation("448 for 256", f"{FORMATS}/fake_quantize.py", "scale_max: int = 256,", "scale_max: int = 448,"),
    mutation("swapped nibbles, packing", REFERENCE, "codes[..., 0::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., 0::2] << 4)"),
    mutation("swapped nibbles, unpacking", REFERENCE, "(codes & 0xF, codes >> 4)", "(codes >> 4, codes & 0xF)"),
    mutation("swapped nibbles, packing", CPP, "const int at = 4 * (i & 7);", "const int at = 4 * ((i & 7) ^ 1);"),
    mutation("swapped nibbles, unpacking", CPP, "shift[l] = 4 * (l & 7)", "shift[l] = 4 * ((l & 7) ^ 1)"),
    mutation("floor for ceiling", REFERENCE_MX, "exponent - 8 + (mantissa > _MANTISSA_OF_1_75).int()", "exponent - 8"),
    mutation("ceiling at 1.75 itself", REFERENCE_MX, "mantissa > _MANTISSA_OF_1_75", "mantissa >= _MANTISSA_OF_1_75"),
    mutation("floor for ceiling", CPP_MX, "((top & 0x7FFFFF) > 0x600000) & 1", "((top & 0x7FFFFF) > 0x600000) & 0"),
    mutation("ceiling at 1.75 itself", CPP_MX, "(top & 0x7FFFFF) > 0x600000", "(top & 0x7FFFFF) >= 0x600000"),
    mutation("no clamp of the encode scale", REFERENCE, "torch.minimum(_constant(float(denominator), amax) / amax, limit)", "_constant(float(denominator), amax) / amax"),
    mutation("no clamp of the inverse step", REFERENCE, "torch.minimum(_constant(1.0, step) / step, _constant(FLOAT_MAX, step))", "_constant(1.0, step) / step"),
    mutation("no clamp of the block scale", REFERENCE, "value.clamp(max=E4M3_MAX).to(", "value.to("),
    mutation("block scale clamped to 256", REFERENCE, "value.clamp(max=E4M3_MAX).to(", "value.clamp(max=256.0).to("),
    mutation("no clamp of MXFP8 values", REFERENCE_MX, ".clamp(-E4M3_MAX, E4M3_MAX).to(", ".to("),
    mutation("no clamp of MXFP8 scales", REFERENCE_MX, ".clamp(0, 254).to(", ".to("),
    mutation("no clamp of the encode scale", CPP, "encode = ratio > FLOAT_MAX ? FLOAT_MAX : ratio;", "encode = ratio;"),
    mutation("no clamp of the inverse step", CPP, "return inverse > FLOAT_MAX ? splat(FLOAT_MAX) : inverse;", "return inverse;"),
    mutation("no clamp of the block scale", CPP, "e4m3(least((vu)base, splat(bits_of(448.0f))))", "e4m3((vu)base)"),
    mutation("no clamp of the values", CPP, "const vu a = least((vu)magnitude, splat(bits_of(6.0f)));", "const vu a = (vu)magnitude;"),
    mutation("no clamp of MXFP8 values", CPP_MX, "e4m3(least(y & ABS, splat(bits_of(448.0f))))", "e4m3(y & ABS)"),
    mutation("no clamp of MXFP8 scales", CPP_MX, "const vi positive = scale > 0 ? scale : vi{};", "const vi positive = scale;"),
    mutation("anchor of the gate rows alone", REFERENCE, "weight.abs().amax(dim=(-2, -1))", "weight[:, 0::2].abs().amax(dim=(-2, -1))"),
    mutation("separate anchors for gate and up", f"{FORMATS}/mixed.py", "    t = nvfp4.quantize(weight, amax, scales, scale_max, name=label)\n", SEPARATE),
    mutation("codes under a zero scale kept", REFERENCE, "torch.where(scale[..., None] == 0, 0, code)", "code"),
    mutation("codes under a zero scale kept", CPP, "const vu keep = (vu)(scale != 0);", "const vu keep = (vu)(scale != 256);"),
    mutation("the sign of -0.0 dropped", REFERENCE, "torch.signbit(value).byte() << 3", "(value < 0).byte() << 3"),
    mutation("contraction on", "inkling_rl/native.py", '"-ffp-contract=off"', '"-ffp-contract=fast"'),
    mutation("contraction: value minus weight in one rounding", REFERENCE, "distance = (value - blocks).abs()", "exact = (table[code.long()] * e4m3_values(scale)[..., None]).double() * amax.double() / denominator\n    distance = (exact - blocks.double()).abs().float()"),
    mutation("contraction: value minus weight in one rounding", CPP, CPP_ERROR, "error = error + (vf)((vu)multiply_add(q, level, -magnitude) & ABS);"),
    mutation("denormals flushed", VECTORS, "_mm_setcsr(0x1F80);", "_mm_setcsr(0x9FC0);"),
    mutation("denormals flushed", REFERENCE, "BLOCK_SIZE = 16\n", "torch.set_flush_denormal(True)\nBLOCK_SIZE = 16\n"),
    mutation("denormals flushed", REFERENCE_MX, "BLOCK_SIZE = 32\n", "torch.set_flush_denormal(True)\nBLOCK_SIZE = 32\n"),
    mutation("Marlin's flush forgotten", f"{FORMATS}/fake_quantize.py", 'if target == "marlin":', "if False:"),
    mutation("gradient masked where saturated", f"{FORMATS}/fake_quantize.py", "return grads[0], None", "return grads[0].clamp(-1, 1), None"),
)  # fmt: skip


def copy(target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "e2e", "benchmarks")
    for folder in ("inkling_rl", "rollout", "lora", "trainer", "recipes", "tests"):
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)


def killer(target: Path, fault: Mutation | None, native: bool) -> str | None:
    """First test that fails with `fault` applied in `target`; None if all pass."""
    path, text = None, ""
    if fault:
        path = target / fault.path
        text = changed = path.read_text()
        for old, new in fault.replacements:
            assert changed.count(old) >= 1, f"{fault.path} no longer has {old!r}: bring {fault.fault!r} up to date"
            changed = changed.replace(old, new)
        path.write_text(changed)
    tests = CPU_TESTS if native else REFERENCE_TESTS
    environment = os.environ | {"INKLING_RL_CACHE": str(target / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["INKLING_RL_KERNELS"] = "" if native else "torch"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    command += [f"tests/inkling_rl/{name}" for name in tests]
    try:
        result = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, check=False)
    finally:
        if path:
            path.write_text(text)
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) tests/inkling_rl/(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    assert found, result.stdout[-3000:] + result.stderr[-3000:]
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="mutations whose fault or file holds this")
    only = parser.parse_args().only
    chosen = [m for m in MUTATIONS if only in m.fault or only in m.path]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        copy(target)
        for native in sorted({m.native for m in chosen}):
            unchanged = killer(target, None, native)
            assert unchanged is None, f"the tests fail without any mutation: {unchanged}"
        print("| fault | file | killed by |\n|---|---|---|")
        for m in chosen:
            started = time.monotonic()
            found = killer(target, m, m.native)
            survivors += found is None
            seconds = time.monotonic() - started
            print(f"| {m.fault} | `{m.path}` | {f'`{found}`' if found else '**survived**'} |", flush=True)
            print(f"  {seconds:.0f} s", file=sys.stderr, flush=True)
    sys.exit(f"{survivors} of {len(chosen)} survived" if survivors else 0)


if __name__ == "__main__":
    main()
