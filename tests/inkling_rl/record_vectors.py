"""Records what the two references of Four Over Six store, as small files that tests compare with.

Neither can be installed here: Transformer Engine wants its CUDA library, fouroversix is a source distribution that
builds CUDA. Their references are plain torch, so this script imports those modules alone, from the unpacked archives:

    pip download --no-deps transformer-engine==2.20.2 && unzip -d TE transformer_engine-2.20.2-*.whl
    pip download --no-deps --no-binary :all: fouroversix==1.0.5 && tar xf fouroversix-1.0.5.tar.gz
    python -m tests.inkling_rl.record_vectors TE fouroversix-1.0.5/src

(pip runs fouroversix's setup.py to read its metadata, which wants torch and its `cpp_extension` importable.) Each file
is a numpy archive whose `header` names library, version, call and seed; a case has `weight` (bfloat16 as its bits, or
float32), `amax`, `codes`, `scales`. Also counts, over large tensors, where our reference differs from the live ones.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from inkling_rl.formats.reference import nvfp4 as reference

FOLDER = Path(__file__).parent / "vectors"
SEED = 20261129
Stored = tuple[torch.Tensor, torch.Tensor]
Quantize = Callable[[torch.Tensor, torch.Tensor, int, str], Stored]


def transformer_engine(root: Path) -> Quantize:
    """`NVFP4QuantizerRef._quantize_blockwise_reference` of the unpacked wheel."""
    package = "transformer_engine.pytorch"
    for name in ("transformer_engine", package, f"{package}.custom_recipes", f"{package}.tensor"):
        _package(name, root / name.replace(".", "/"))
    base = type("Base", (), {"__init__": lambda self, **_: None})
    _package(f"{package}.quantized_tensor").__dict__.update(QuantizedTensorStorage=object, Quantizer=base)
    _package(f"{package}.tensor.utils").__dict__.update(is_custom=lambda _: False)
    quantizer = importlib.import_module(f"{package}.custom_recipes.reference_nvfp4").NVFP4QuantizerRef

    def quantize(weight: torch.Tensor, amax: torch.Tensor, scale_max: int, rule: str) -> Stored:
        codes, scales = quantizer._quantize_blockwise_reference(
            weight,
            amax,
            16,
            1,
            pow_2_scales=False,
            nvfp4_use_4over6=True,
            nvfp4_e4m3_max=scale_max,
            nvfp4_4over6_err_mode=rule,
            eps=0.0,
        )
        return codes.view(torch.uint8), scales.view(torch.uint8)

    return quantize


def fouroversix(root: Path) -> Quantize:
    """`quantize.pytorch.reference.quantize_to_fp4` of the unpacked source."""
    for name in ("fouroversix", "fouroversix.quantize", "fouroversix.quantize.pytorch"):
        _package(name, root / name.replace(".", "/"))
    module = importlib.import_module("fouroversix.quantize.pytorch.reference")
    rules = importlib.import_module("fouroversix.utils").ScaleRule

    def quantize(weight: torch.Tensor, amax: torch.Tensor, scale_max: int, rule: str) -> Stored:
        assert scale_max == 256
        codes, scales, _ = module.quantize_to_fp4(
            weight, amax, scale_rule=rules[rule.lower()], use_blackwell_scale_layout=False
        )
        return codes, scales.view(torch.uint8).reshape(len(weight), -1)

    return quantize


def cases(live: Mapping[str, Quantize]) -> dict[str, tuple[torch.Tensor, torch.Tensor, int, str]]:
    """Weight `[N, K]`, anchor, E4M3 maximum and rule by name."""
    g = torch.Generator().manual_seed(SEED)
    gauss, large = torch.randn(16, 32, generator=g), torch.randn(8, 128, generator=g).bfloat16()
    largest = lambda w: w.float().abs().max()
    small = gauss * torch.logspace(-8, 0, 16)[:, None]
    holes = gauss.clone()
    holes[::2, :16], holes[1, 16:32], holes[1, 8] = 0.0, -0.0, -0.0
    return {
        "gaussian bfloat16": (large, largest(large), 256, "MAE"),
        "gaussian float32": (gauss, largest(gauss), 256, "MAE"),
        "gaussian bfloat16, maximum 448": (large, largest(large), 448, "MAE"),
        "where the order of the sum decides": (_disputed(live), torch.tensor(5.0), 256, "MAE"),
        "small blocks": (small.bfloat16(), largest(small.bfloat16()), 256, "MAE"),
        "zero blocks and minus zeros": (holes.bfloat16(), largest(holes.bfloat16()), 256, "MAE"),
        "saturating anchor": (large[:8], largest(large[:8]) / 3, 256, "MAE"),
        "squared error": (large, largest(large), 256, "MSE"),
    }


def _disputed(live: Mapping[str, Quantize]) -> torch.Tensor:
    """`[96, 16]` multiples of 1/8 under the anchor 5: of the first 64 the two libraries, which differ in the order of
    the sum only, store other bytes."""
    g = torch.Generator().manual_seed(SEED + 1)
    weight = (torch.randint(-40, 41, (65536, 16), generator=g) / 8).bfloat16()
    scales = [quantize(weight, torch.tensor(5.0), 256, "MAE")[1] for quantize in live.values()]
    differ = (scales[0] != scales[1]).flatten()
    return torch.cat([weight[differ][:64], weight[~differ][:32]])


def record(name: str, version: str, call: str, live: Mapping[str, Quantize], supported: Callable[[int], bool]) -> None:
    arrays: dict[str, np.ndarray] = {}
    listed = {}
    for case, (weight, amax, scale_max, rule) in cases(live).items():
        if not supported(scale_max):
            continue
        codes, scales = live[name](weight, amax, scale_max, rule)
        bits = weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight
        for part, value in (("weight", bits), ("amax", amax), ("codes", codes), ("scales", scales)):
            arrays[f"{case}/{part}"] = value.numpy()
        listed[case] = {"scale_max": scale_max, "rule": rule}
    header = {"library": name, "version": version, "call": call, "seed": SEED, "torch": torch.__version__}
    header["cases"] = listed
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, header=np.array(json.dumps(header)), **arrays)
    print(f"{path.name}: {len(listed)} cases, {path.stat().st_size} bytes")


def count_differences(name: str, quantize: Quantize) -> None:
    """Where our reference differs on two million random and a quarter of a million low-entropy blocks."""
    g = torch.Generator().manual_seed(SEED)
    eighths = torch.randint(-40, 41, (2048, 2048), generator=g) / 8
    for case, weight in {"gaussian": torch.randn(8192, 4096, generator=g).bfloat16(), "eighths": eighths}.items():
        amax = weight.float().abs().max()
        codes, scales, _ = reference.quantize(weight[None], amax[None], 1536, None)
        other_codes, other_scales = quantize(weight, amax, 256, "MAE")
        other = (codes[0] != other_codes).unflatten(-1, (-1, 8)).any(-1)
        other_scale = scales[0] != other_scales
        print(
            f"{name}, {case}: {other.numel()} blocks, other codes {int(other.sum())}, scales {int(other_scale.sum())}"
        )


def _package(name: str, path: Path | None = None) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []
    sys.modules[name] = module
    return module


def main(te: str, four: str) -> None:
    live = {"transformer_engine": transformer_engine(Path(te)), "fouroversix": fouroversix(Path(four))}
    record(
        "transformer_engine",
        "2.20.2",
        "NVFP4QuantizerRef._quantize_blockwise_reference(w, amax, 16, 1, pow_2_scales=False, nvfp4_use_4over6=True, "
        "nvfp4_e4m3_max=scale_max, nvfp4_4over6_err_mode=rule, eps=0.0)",
        live,
        lambda _: True,
    )
    record(
        "fouroversix",
        "1.0.5",
        "quantize.pytorch.reference.quantize_to_fp4(w, amax, scale_rule=rule, use_blackwell_scale_layout=False)",
        live,
        lambda scale_max: scale_max == 256,
    )
    for name, quantize in live.items():
        count_differences(name, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
