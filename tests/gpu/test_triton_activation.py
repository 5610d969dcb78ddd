"""The activation of the experts on the device."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.rollout import around_attention_cases as cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(7, 64), (1, 16), (40, 72), (3000, 2304)])
def test_activation(dtype: torch.dtype, rows: int, width: int) -> None:
    cases.check_activation("cuda", dtype, rows, width)
