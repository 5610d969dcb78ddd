"""The fused short convolution and mixture on the device, at full width too."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from rollout.kernels.triton_conv_mix import TILES
    from tests.rollout import around_attention_cases as cases

DTYPES = (torch.float32, torch.bfloat16)
STEP = ((0, 70), (7, 1), (1, 1), (2, 4), (31, 2), (0, 1), (64, 17), (1000, 8))


@pytest.mark.parametrize("tokens_per_block", [1, 4, 64])
def test_tap_sources(tokens_per_block: int) -> None:
    cases.check_tap_sources("cuda", STEP, tokens_per_block)
    cases.check_tap_sources("cuda", ((5, 3000), (0, 0), (2, 1)), tokens_per_block)
    cases.check_shared_prefix("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [128, 2304, 4608])
@pytest.mark.parametrize("queries", [1, 3])
def test_conv_mix(dtype: torch.dtype, hidden: int, queries: int) -> None:
    for blocks in (0, 1, 2, 5, 8):
        cases.check_conv_mix("cuda", dtype, blocks, queries, hidden=hidden, residual=blocks != 2, step=STEP, tile=None)


@pytest.mark.parametrize("hidden", [128, 4608])
def test_conv_mix_of_two_dtypes(hidden: int) -> None:
    cases.check_conv_mix_of_two_dtypes("cuda", hidden, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [128, 4608])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype, hidden: int) -> None:
    cases.check_conv_mix_chunks("cuda", dtype, hidden, None)
    for queries in (1, 3):
        cases.check_conv_mix_batches("cuda", dtype, hidden, queries, TILES[queries])


def test_many_rows() -> None:
    """Offsets beyond 2^31 elements: 9 sources of 60,000 rows."""
    cases.check_conv_mix("cuda", torch.bfloat16, 8, 1, hidden=4608, step=((3, 60_000),), tile=None)
