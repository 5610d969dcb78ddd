"""Small float32 projections and the softcapped logits on the device."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.rollout import linear_cases as cases

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("jobs", "outputs", "hidden"), [(1, 48, 4608), (2, 32, 4608), (1, 4, 128), (2, 8, 136)])
@pytest.mark.parametrize("rows", [1, 8, 64, 65, 1000])
def test_project(dtype: torch.dtype, jobs: int, outputs: int, hidden: int, rows: int) -> None:
    cases.check_project("cuda", dtype, jobs, rows, outputs, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33, 600])
def test_softcap(dtype: torch.dtype, rows: int) -> None:
    cases.check_softcap("cuda", dtype, rows, vocabulary=5003, padded=5120, hidden=4608)
    cases.check_softcap("cuda", dtype, rows, vocabulary=96, padded=96, hidden=128)
