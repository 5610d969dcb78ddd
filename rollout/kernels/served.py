"""Calls that an engine makes beyond those of the trials, where a batch's size makes other code: for the compiler alone.

They are on tensors without memory, and change nothing that a trial could find: how many lengths are read at once, how
many pieces are merged at a time. Without them an engine would compile when it first meets such a batch, in the middle
of serving. Which batches those are, the kernels' own modules say. All other kernels are the same code for any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rollout.kernels.draft import Blocks
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.paged import PagedBatch
from rollout.kernels.trials import TRIALS, Sizes

Calls = Iterator[Callable[[], object]]


def _decode(kernel: Callable[..., Any], sizes: Sizes, device: torch.device) -> Calls:
    from rollout.kernels.triton_decode import distinct_batches

    for trial in TRIALS["decode"](sizes):
        *rows_TC, kv_BKNC, _, q_scale, r_scale, proj_MR = trial.to(torch.device("meta"))[:9]
        programs, batches = distinct_batches(
            sizes.max_requests, trial.options["max_queries"], rows_TC[2].shape[1], kv_BKNC.shape[1], kv_BKNC.dtype,
            device,
        )  # fmt: skip
        new = partial(torch.empty, dtype=torch.int32, device="meta")
        for requests, rows in batches:
            batch = PagedBatch(new(requests + 1), new(requests), new(requests, 16), new(rows, dtype=torch.int64))
            given = (*(x.new_empty(rows, x.shape[1]) for x in rows_TC), kv_BKNC, batch, q_scale, r_scale, proj_MR)
            yield partial(kernel, *given, *trial.arguments[9:], **trial.options, programs=programs)


def _draft_attention(kernel: Callable[..., Any], sizes: Sizes, device: torch.device) -> Calls:
    from rollout.kernels.triton_draft import distinct_batches

    shape, meta = sizes.draft, torch.device("meta")
    if shape is None:
        return
    programs, batches = distinct_batches(
        sizes.max_requests, shape.block_rows, shape.num_heads, shape.num_kv_heads, sizes.state_dtype, device
    )
    *rows_TXD, kv_PKNC, _ = next(DRAFT_TRIALS["draft_attention"](sizes)).to(meta)
    for requests in batches:
        blocks = Blocks(
            torch.empty(requests, dtype=torch.int64, device=meta),
            torch.empty(requests, 16, dtype=torch.int32, device=meta),
        )
        given = (x.new_empty(requests * shape.block_rows, *x.shape[1:]) for x in rows_TXD)
        yield partial(kernel, *given, kv_PKNC, blocks, programs=programs)


def _align(kernel: Callable[..., Any], sizes: Sizes, _device: torch.device) -> Calls:
    from rollout.kernels.triton_moe_align import MAX_PAIRS, block_size, tile_of

    found = {}
    for tokens in range(1, MAX_PAIRS // sizes.top_k + 1) if sizes.expert_formats else ():
        pairs = tokens * sizes.top_k
        size = block_size(pairs, sizes.experts)
        found[tile_of(pairs), size] = (tokens, size)
    for tokens, size in found.values():
        experts_TK = torch.empty(tokens, sizes.top_k, dtype=torch.int32, device="meta")
        yield partial(kernel, experts_TK, sizes.experts, size)


SERVED: dict[str, Callable[[Callable[..., Any], Sizes, torch.device], Calls]] = {
    "decode": _decode,
    "draft_attention": _draft_attention,
    "align": _align,
}
