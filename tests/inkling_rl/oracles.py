"""Other people's number formats, run in a process of their own.

`make oracles` puts the libraries into `.venv/oracles`, beside the stack and not into it: as a package of the stack,
torchao would be imported by peft and transformers in every process of a run. So this module runs as
`python -m tests.inkling_rl.oracles WEIGHTS ANSWERS` with that directory on its path: the tests save the weights to one
file and load the bytes from the other. Nothing here is ours but the plumbing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
DIRECTORY = Path(sys.prefix) / "oracles"
Bytes = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales, uint8; NVFP4 codes packed."""


def modelopt_mxfp8(weight: torch.Tensor) -> Bytes:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    quantized, scales = MXFP8QTensor.quantize(weight)
    return quantized._quantized_data.view(torch.uint8), scales


def modelopt_nvfp4(weight: torch.Tensor) -> Bytes:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, scales, _ = NVFP4QTensor.quantize(weight.clone(), 16)
    return quantized._quantized_data, scales.view(torch.uint8)


def torchao_mxfp8(mode: str) -> Callable[[torch.Tensor], Bytes]:
    def quantize(weight: torch.Tensor) -> Bytes:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

        scales, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])
        return codes.view(torch.uint8), scales.view(torch.uint8)

    return quantize


def torchao_nvfp4(weight: torch.Tensor) -> Bytes:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    scales, codes = nvfp4_quantize(weight, 16, per_tensor_amax_to_scale(weight.abs().max()))
    return codes, scales.view(torch.uint8)


def ml_dtypes_casts(values: torch.Tensor) -> Bytes:
    """E2M1 codes, one per byte, and E4M3 bytes of float32 values of one dimension."""
    import ml_dtypes
    import numpy as np

    numbers = values.numpy()
    four = np.clip(numbers, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    eight = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(four), torch.from_numpy(eight)


ORACLES: dict[str, Callable[[torch.Tensor], Bytes]] = {
    "modelopt-mxfp8": modelopt_mxfp8,
    "modelopt-nvfp4": modelopt_nvfp4,
    "torchao-mxfp8-rceil": torchao_mxfp8("RCEIL"),
    "torchao-mxfp8-floor": torchao_mxfp8("FLOOR"),
    "torchao-mxfp8-even": torchao_mxfp8("EVEN"),
    "torchao-mxfp8-ceil": torchao_mxfp8("CEIL"),
    "torchao-nvfp4": torchao_nvfp4,
    "ml-dtypes": ml_dtypes_casts,
}


def ask(questions: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> dict[str, dict[str, Bytes]]:
    """Bytes by oracle and case for weights `[N, K]` by oracle and case."""
    weights, answers = folder / "weights.pt", folder / "answers.pt"
    torch.save({oracle: dict(cases) for oracle, cases in questions.items()}, weights)
    command = [sys.executable, "-m", "tests.inkling_rl.oracles", str(weights), str(answers)]
    environment = os.environ | {"PYTHONPATH": f"{DIRECTORY}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    loaded: dict[str, dict[str, Bytes]] = torch.load(answers)
    return loaded


def main(weights: str, answers: str) -> None:
    questions: dict[str, dict[str, torch.Tensor]] = torch.load(weights)
    bytes_ = {oracle: {case: ORACLES[oracle](w) for case, w in cases.items()} for oracle, cases in questions.items()}
    torch.save(bytes_, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
