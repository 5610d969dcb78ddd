"""Sorting by expert and the weighted sum under Triton's interpreter; `test_triton_moe_compiled` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from tests.rollout import moe_cases as cases


@pytest.mark.parametrize("block_size", [8, 48, 64])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 16, 4), (2, 16, 16), (33, 16, 4), (17, 40, 8)])
def test_align(tokens: int, num_experts: int, top_k: int, block_size: int) -> None:
    cases.check_align("cpu", tokens, num_experts, top_k, block_size)


def test_align_of_many_experts() -> None:
    cases.check_align("cpu", 40, 384, 8, 8)


def test_a_single_token_needs_no_sorting() -> None:
    cases.check_single_token("cpu", 16, 4, 8)
    cases.check_single_token("cpu", 384, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_sum(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for tokens, top_k, hidden in ((1, 8, 520), (3, 4, 128), (5, 1, 1024)):
        cases.check_sum("cpu", dtype, out_dtype, tokens, top_k, hidden)
