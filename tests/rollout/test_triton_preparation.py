"""The preparation of attention's inputs under Triton's interpreter; `test_triton_around_attention` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from tests.rollout import around_attention_cases as cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_prepare(dtype: torch.dtype, dynamic: bool, scale: float) -> None:
    cases.check_prepare("cpu", dtype, dynamic, scale=scale)


@pytest.mark.parametrize(("heads", "head_dim"), [((48, 8), 128), ((5, 5), 32), ((3, 1), 64)])
def test_prepare_of_other_shapes(heads: tuple[int, int], head_dim: int) -> None:
    cases.check_prepare("cpu", torch.float32, True, heads=heads, head_dim=head_dim, step=((6, 3), (0, 2)))
