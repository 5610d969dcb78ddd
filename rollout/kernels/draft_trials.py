"""Trials of a draft's kernels, see `rollout.kernels.trials`; where a model has no draft there are none."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch

from rollout.kernels.draft import Angles, Blocks
from rollout.kernels.trials import ATTENTION_LIMITS, LIMITS, DraftSizes, Sizes, Trial, _Draw

ROWS = 9
VOCABULARY = 300
"""At most, of a trial: its size is no constant of a kernel."""


def _angles(num_rows: int, size: int) -> Angles:
    """Of the positions of a long context."""
    rates = 1e6 ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    turned = torch.arange(num_rows, dtype=torch.float64)[:, None] * 100_003 * rates
    return Angles(turned.cos().float(), turned.sin().float())


def _of(sizes: Sizes) -> DraftSizes:
    assert sizes.draft is not None
    return sizes.draft


def _norm_rotate(sizes: Sizes) -> Iterator[Trial]:
    shape = _of(sizes)
    for what, heads in (("queries", shape.num_heads), ("keys", shape.num_kv_heads)):
        draw, size = _Draw(), shape.head_dim
        arguments = (
            draw(ROWS, heads * size, dtype=sizes.dtype), draw(size), _angles(ROWS, size), shape.norm_eps,
        )  # fmt: skip
        yield Trial(what, arguments, LIMITS[sizes.dtype])


def _store(sizes: Sizes) -> Iterator[Trial]:
    shape, draw = _of(sizes), _Draw()
    heads, size = shape.num_kv_heads, shape.head_dim
    slots = torch.randperm(2 * shape.page, generator=torch.Generator().manual_seed(0))[:ROWS]
    slots[2] = -1
    arguments = (
        draw(ROWS, 2 * heads * size, dtype=sizes.dtype), draw(size), _angles(ROWS, size), shape.norm_eps,
        draw(2, heads, shape.page, 2 * size, dtype=sizes.state_dtype), slots,
    )  # fmt: skip
    yield Trial(f"{ROWS} rows", arguments, LIMITS[sizes.state_dtype], (4,))


def _attention(sizes: Sizes) -> Iterator[Trial]:
    """Without context, over several tiles and pages, and so many requests that lines are merged together."""
    from rollout.kernels.triton_draft import MERGE_PROGRAMS

    shape = _of(sizes)
    many = MERGE_PROGRAMS // (shape.num_heads * shape.block_rows) + 1
    steps = [(0, 130, shape.page + 1)[: sizes.max_requests]]
    if many <= sizes.max_requests:
        steps.append(tuple(5 + request % 3 for request in range(many)))
    for lengths in steps:
        draw, rows, size = _Draw(), len(lengths) * shape.block_rows, shape.head_dim
        pages = [-(-length // shape.page) for length in lengths]
        table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
        free = sum(pages)
        for request, count in enumerate(pages):
            table[request, :count] = torch.arange(free, free - count, -1)
            free -= count
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        pool = (sum(pages) + 1, shape.num_kv_heads, shape.page, 2 * size)
        arguments = (
            *(draw(rows, n, size, dtype=sizes.dtype) for n in heads), draw(*pool, dtype=sizes.state_dtype),
            Blocks(torch.tensor(lengths), table),
        )  # fmt: skip
        limit = max(ATTENTION_LIMITS[sizes.dtype], ATTENTION_LIMITS[sizes.state_dtype])
        yield Trial(f"{len(lengths)} requests", arguments, limit)


def _first_of_each(kind: Callable[[int], Hashable], most: int) -> list[int]:
    """The least number of requests for each kind of launch, of all up to `most`."""
    found: dict[Hashable, int] = {}
    for requests in range(1, most + 1):
        found.setdefault(kind(requests), requests)
    return list(found.values())


def _rnn(sizes: Sizes) -> Iterator[Trial]:
    from rollout.kernels.triton_draft_head import cell_shape

    rank = _of(sizes).rank
    for requests in _first_of_each(cell_shape, sizes.max_requests):
        draw, tokens, new = _Draw(), torch.arange(requests) * 7 % VOCABULARY, torch.zeros(2, requests, rank)
        joint = draw(3 * rank, 2 * rank, dtype=sizes.dtype) * rank**-0.5
        w1 = draw(VOCABULARY, rank, dtype=sizes.dtype)
        arguments = (draw(requests, 3 * rank), draw(requests, rank), tokens, w1, joint, *new)
        yield Trial(f"{requests} requests", arguments, LIMITS[torch.float32], (5, 6))


def _logits(sizes: Sizes) -> Iterator[Trial]:
    from rollout.kernels.triton_draft_head import tokens_at_once

    shape = _of(sizes)
    for requests in _first_of_each(tokens_at_once, sizes.max_requests):
        draw, vocabulary = _Draw(), min(shape.vocab, VOCABULARY)
        base = draw(requests, vocabulary) * 10
        base[:, 5] = -torch.inf
        out, w2 = torch.tanh(draw(requests, shape.rank)), draw(vocabulary, shape.rank, dtype=sizes.dtype)
        yield Trial(f"{requests} requests", (base, out, w2), LIMITS[torch.float32])


DRAFT_TRIALS: dict[str, Callable[[Sizes], Iterator[Trial]]] = {
    "draft_norm_rotate": _norm_rotate,
    "draft_store": _store,
    "draft_attention": _attention,
    "draft_rnn": _rnn,
    "draft_logits": _logits,
}
