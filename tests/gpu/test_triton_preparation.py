"""The preparation of attention's inputs on the device."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.rollout import around_attention_cases as cases

STEP = ((0, 70), (7, 1), (1, 1), (2, 4), (31, 2), (0, 1), (64, 17), (1000, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((12, 2), 16), ((48, 8), 128), ((24, 8), 128), ((5, 5), 64)])
def test_prepare(dtype: torch.dtype, dynamic: bool, heads: tuple[int, int], head_dim: int) -> None:
    for scale in (0.05, 3.0):
        cases.check_prepare("cuda", dtype, dynamic, heads=heads, head_dim=head_dim, step=STEP, scale=scale)
