"""The fused short convolution and mixture under Triton's interpreter; `test_triton_around_attention` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from tests.rollout import around_attention_cases as cases


@pytest.mark.parametrize("tokens_per_block", [1, 4, 16])
def test_tap_sources(tokens_per_block: int) -> None:
    cases.check_tap_sources("cpu", tokens_per_block=tokens_per_block)


def test_tap_sources_of_a_prefix_that_this_step_computes() -> None:
    cases.check_shared_prefix("cpu")


def test_tap_sources_of_a_request_longer_than_a_tile() -> None:
    cases.check_tap_sources("cpu", ((5, 300), (0, 0), (2, 1)))


@pytest.mark.parametrize(
    ("dtype", "blocks", "queries", "residual"),
    [
        (torch.bfloat16, 0, 1, True),
        (torch.float32, 1, 3, False),
        (torch.bfloat16, 3, 3, True),
        (torch.float32, 8, 1, True),
    ],
)
def test_conv_mix(dtype: torch.dtype, blocks: int, queries: int, residual: bool) -> None:
    cases.check_conv_mix("cpu", dtype, blocks, queries, hidden=64, residual=residual, step=((0, 2), (7, 1), (2, 3)))


def test_conv_mix_of_two_dtypes() -> None:
    cases.check_conv_mix_of_two_dtypes("cpu", 64, cases.TINY_TILE)


def test_conv_mix_of_an_odd_width_in_one_piece() -> None:
    cases.check_conv_mix("cpu", torch.float32, 2, 1, hidden=72, step=((3, 2),), tile=None)


def test_a_row_of_conv_mix_does_not_depend_on_its_chunk() -> None:
    cases.check_conv_mix_chunks("cpu", torch.bfloat16, 64, cases.TINY_TILE)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_row_of_conv_mix_does_not_depend_on_the_batch_of_sources(queries: int) -> None:
    cases.check_conv_mix_batches("cpu", torch.float32, 64, queries, cases.TINY_TILE)
