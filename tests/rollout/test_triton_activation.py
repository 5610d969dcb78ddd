"""The activation of the experts under Triton's interpreter; `test_triton_around_attention` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from tests.rollout import around_attention_cases as cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(7, 64), (1, 16), (40, 72)])
def test_activation(dtype: torch.dtype, rows: int, width: int) -> None:
    cases.check_activation("cpu", dtype, rows, width)
