"""Small projections and the softcap under Triton's interpreter; `test_triton_around_attention` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from tests.rollout import linear_cases as cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_project(dtype: torch.dtype) -> None:
    cases.check_project("cpu", dtype, jobs=2, rows=3, outputs=6, hidden=600)
    cases.check_project("cpu", dtype, jobs=1, rows=1, outputs=4, hidden=128)


def test_softcap() -> None:
    cases.check_softcap("cpu", torch.float32, rows=258, vocabulary=3, padded=4, hidden=16)
    cases.check_softcap("cpu", torch.float32, rows=2, vocabulary=70, padded=96, hidden=32)
