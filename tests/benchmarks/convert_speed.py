"""Seconds and memory of `inkling-rl convert` on a release checkpoint of about 1 GB, beside a copy of the same bytes.

    python -m tests.benchmarks.convert_speed [--directory DIR] [--experts 160] [--hidden 1024] [--threads 2]

The checkpoint is made of random codes and scales in the shapes of the tiny model with hidden size 1024, expert width
512 and many experts. Every conversion is a process of its own; `peak` is the kernel's count of its largest resident
size (VmHWM, libraries included), `anonymous` the largest of samples of RssAnon, every 10 ms. `copy` writes the bytes of
the result from its files and waits for the disk, as the conversion does. `cpu` counts the
start of Python and torch too. Prints one JSON line per measurement; fails if a conversion takes 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.tiny import tiny_config, tiny_quant_config
from inkling_rl.checkpoint.writer import write_checkpoint

ALLOWED = 2 * 2**30


def write_release(path: Path, experts: int, hidden: int = 1024, width: int = 512) -> Path:
    """A release checkpoint of random bytes that a release could hold."""
    config, quant = tiny_config(), tiny_quant_config()
    config["text_config"] |= {"hidden_size": hidden, "moe_intermediate_size": width, "n_routed_experts": experts}
    config["vision_config"]["text_hidden_size"] = hidden
    return write_checkpoint(path, config, quant, _tensors(config, quant))


def _tensors(config: dict[str, Any], quant: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    for name, spec in layout.release_tensors(config, quant).items():
        if name.endswith("_outer_scale_denominator"):
            yield name, torch.tensor(1536.0)
        elif name.endswith("_amax"):
            yield name, 0.1 + torch.rand(spec.shape, generator=generator)
        elif name.endswith("_scale"):
            # E4M3 from 2 to 256, or powers of two around 2^-10.
            is_e4m3 = spec.dtype == "float8_e4m3fn"
            yield (
                name,
                integers(*((0x40, 0x78) if is_e4m3 else (112, 122)), spec.shape).view(getattr(torch, spec.dtype)),
            )
        elif spec.dtype == "float8_e4m3fn":
            codes = integers(0, 127, spec.shape) | (integers(0, 2, spec.shape) << 7)  # 127 is NaN
            yield name, codes.view(torch.float8_e4m3fn)
        elif spec.dtype == "uint8":
            yield name, integers(0, 256, spec.shape)
        else:
            yield name, torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def measure(arguments: list[str], threads: int) -> dict[str, float]:
    """Seconds of the whole command and of the conversion in it, and its memory."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "inkling_rl.cli", "convert", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )
    anonymous = peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            break
        found = {key: int(value) * 1024 for key, value in re.findall(r"(RssAnon|VmHWM):\s+(\d+) kB", status)}
        anonymous, peak = max(anonymous, found.get("RssAnon", 0)), max(peak, found.get("VmHWM", 0))
        time.sleep(0.01)
    output = process.communicate()[0]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"convert {arguments} ended with status {process.returncode}")
    seconds = re.search(r"result: .* in ([\d.]+) s .*?(?:checked in ([\d.]+) s)?$", output.strip().splitlines()[-1])
    assert seconds, output
    return {
        "seconds": round(time.monotonic() - started, 2),
        "converting": float(seconds[1]),
        "checking": float(seconds[2] or 0),
        "cpu": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "peak_mib": peak / 2**20,
        "anonymous_mib": anonymous / 2**20,
    }


def copy(source: Path, target: Path) -> float:
    """Seconds to write a directory's files anew, through memory, and to bring them to the disk."""
    started = time.monotonic()
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            while block := reader.read(16 * 2**20):
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to work, on the disk to measure; the system's else")
    parser.add_argument("--experts", type=int, default=160)
    parser.add_argument("--hidden", type=int, default=1024, help="experts are half as wide")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        root = Path(scratch)
        release = write_release(root / "release", args.experts, args.hidden, args.hidden // 2)
        size = {"release": _size(release)}
        for number in range(args.repeats):
            for check in ([], ["--check"]):
                for to, source in (("bf16", release), ("release", root / "bf16")):
                    target = root / ("again" if to == "release" else "bf16")
                    figures = measure([str(source), str(target), "--to", to, *check], args.threads)
                    size[to] = _size(target)
                    figures["copy"] = round(copy(target, root / "copy"), 2)
                    shutil.rmtree(root / "copy")
                    row = {"repeat": number, "to": to, "check": bool(check), "gb": size[to] / 1e9} | figures
                    print(
                        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True
                    )
                    worst = max(worst, figures["peak_mib"] * 2**20)
                shutil.rmtree(root / "bf16")
                shutil.rmtree(root / "again")
    if worst >= ALLOWED:
        raise SystemExit(f"a conversion took {worst / 2**30:.2f} GiB; 2 are allowed")


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


if __name__ == "__main__":
    main()
