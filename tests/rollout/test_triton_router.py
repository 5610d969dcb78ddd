"""The router under Triton's interpreter; `test_triton_around_attention` runs this file."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.rollout import around_attention_cases as cases

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix unit: exact products, and a float32 sum that is truncated after every 16 columns.

    The interpreter keeps bfloat16 as its 16 bits and multiplies those as integers, and sums as a library likes.
    """

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right, total = values(a).astype(np.float64), values(b).astype(np.float64), d.data.astype(np.float64)
        for first in range(0, left.shape[1], 16):
            mantissa, exponent = np.frexp(total + left[:, first : first + 16] @ right[first : first + 16])
            total = np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)
        return interpreter.TensorHandle(total.astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(16, 4, 128), (384, 8, 600), (16, 16, 64)])
def test_route(dtype: torch.dtype, experts: int, top_k: int, hidden: int) -> None:
    cases.check_route("cpu", dtype, 5, experts, top_k, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_router_does_not_depend_on_the_plan(dtype: torch.dtype) -> None:
    cases.check_route_plans("cpu", dtype, 18, 16, 800)


def test_ties() -> None:
    cases.check_route_ties("cpu")
