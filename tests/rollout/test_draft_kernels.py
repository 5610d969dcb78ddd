"""The draft's kernels: C++ against torch, torch against the slow reference, and tokens against their distributions."""

from __future__ import annotations

import pytest
import torch

from inkling_rl.draft.reference import rotate
from rollout.kernels import draft, ops
from rollout.kernels.draft import Angles, Blocks, Choice, Head
from rollout.kernels.layout import k_major
from tests.rollout.drafting import chi_square

pytestmark = pytest.mark.skipif(not ops.have_native(), reason="no C++ compiler on this machine")

ROWS = 7
DTYPES = (torch.float32, torch.bfloat16)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def angles(positions: torch.Tensor, size: int) -> Angles:
    rates = 1e6 ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    turned = positions.double()[:, None] * rates
    return Angles(turned.cos().float(), turned.sin().float())


@pytest.mark.parametrize("size", [16, 24, 128])
def test_norm_and_rotation(size: int) -> None:
    x, weight, positions = rand(9, 3 * size), 1 + 0.1 * rand(size), torch.tensor([0, 1, 2, 70, 71, 999, 5, 5, 10**6])
    found = draft.norm_rotate(x, weight, angles(positions, size), 1e-6)
    slow = draft.norm_rotate_reference(x, weight, angles(positions, size), 1e-6)
    torch.testing.assert_close(found, slow, rtol=2e-6, atol=2e-6)
    vectors = x.double().unflatten(-1, (3, size))
    normed = vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(found.double(), rotate(normed, positions, 1e6), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(12, 2, 16, 32), (4, 4, 32, 16), (6, 2, 24, 8)])
def test_attention_over_pages(heads: int, kv_heads: int, size: int, page: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 1, page, page + 1, 77, 5, 3, 64, 130, 2])
    requests, width = len(lengths), -(-int(lengths.max()) // page)
    order = torch.randperm(requests * width, generator=torch.Generator().manual_seed(1)).int()
    blocks = Blocks(lengths, order.view(requests, width))
    # A slice of a wider page, as owners of several layers have, full of what must not matter.
    pages = rand(requests * width, kv_heads, page, 2 * size + 8)
    for request, length in enumerate(lengths.tolist()):
        for place in range(width * page):
            if place >= length:
                pages[blocks.block_table[request, place // page], :, place % page] = float("nan")
    kv = pages.to(dtype)[..., 8:]
    q, k, v = rand(requests * ROWS, heads, size), *(rand(requests * ROWS, kv_heads, size, seed=s) for s in (1, 2))
    found = draft.attention(q, k, v, kv, blocks)
    torch.testing.assert_close(found, draft.attention_reference(q, k, v, kv, blocks), rtol=2e-5, atol=2e-5)


def head(rank: int, vocabulary: int, dtype: torch.dtype) -> Head:
    joint = k_major(0.5 * rand(3 * rank, 2 * rank + 40).to(dtype))[:, : 2 * rank]
    return Head(k_major(rand(vocabulary, rank).to(dtype)), joint, k_major(rand(vocabulary, rank, seed=1).to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "vocabulary"), [(16, 512), (20, 333)])
def test_blocks_are_drawn_alike(rank: int, vocabulary: int, dtype: torch.dtype) -> None:
    requests = 6
    logits = 3 * rand(requests, ROWS, vocabulary)
    logits[..., vocabulary - 12 :] = float("-inf")
    prepared, anchors = rand(requests, ROWS, 3 * rank), torch.arange(requests) * 7
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(requests, ROWS, dtype=torch.float64, generator=generator)
    forbidden = torch.rand(requests, vocabulary, generator=generator) < 0.5
    forbidden[:3] = False
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.0, 2.0])
    for choice in (
        Choice(temperature, uniform, forbidden),
        Choice(temperature, uniform, None),
        Choice(torch.zeros(requests), None, forbidden),
    ):
        arguments = (logits, prepared, anchors, head(rank, vocabulary, dtype), choice)
        tokens, probs = draft.draw_blocks(*arguments)
        slow, slow_probs = draft.draw_blocks_reference(*arguments)
        # A number between two sums that differ in their last bits may give another token, and then all that follow.
        same = (tokens == slow).all(-1)
        assert same.sum() >= requests - 1
        assert tokens.max() < vocabulary - 12
        if choice.forbidden is not None:
            assert not choice.forbidden.gather(1, tokens).any()
        if choice.uniform is None:
            assert probs is None and slow_probs is None
            continue
        assert probs is not None and slow_probs is not None
        torch.testing.assert_close(probs[same], slow_probs[same], rtol=1e-4, atol=1e-7)
        assert (probs[..., vocabulary - 12 :] == 0).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(requests, ROWS), rtol=1e-5, atol=1e-5)


def test_tokens_follow_the_distributions_that_are_handed_on() -> None:
    """What losslessness rests on. The second token's distribution hangs on the first, so it is averaged."""
    requests, vocabulary, rank = 40_000, 24, 16
    logits = rand(1, 2, vocabulary).expand(requests, -1, -1)
    prepared = rand(1, 2, 3 * rank).expand(requests, -1, -1)
    uniform = torch.rand(requests, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    choice = Choice(torch.full((requests,), 0.7), uniform, None)
    anchors = torch.zeros(requests, dtype=torch.int64)
    tokens, probs = draft.draw_blocks(logits, prepared, anchors, head(rank, vocabulary, torch.float32), choice)
    assert probs is not None
    for index in range(2):
        counts = torch.bincount(tokens[:, index], minlength=vocabulary)
        assert chi_square(counts, probs[:, index].double().mean(0)) > 0.005
    first = int(tokens[:, 0].mode().values)
    after = tokens[:, 0] == first
    assert chi_square(torch.bincount(tokens[after, 1], minlength=vocabulary), probs[after, 1][0]) > 0.005
    wrong = probs[~after, 1][0]
    assert chi_square(torch.bincount(tokens[after, 1], minlength=vocabulary), wrong) < 1e-6
