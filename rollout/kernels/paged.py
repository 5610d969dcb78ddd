"""What one engine step runs on: which rows belong to which request, and where its pages are.

Every cache of the model (attention, sliding attention, short-convolution state) is paged by vLLM. A kernel sees a page
pool as a 4-D view `[blocks, heads, tokens per block, channels]` and one `PagedBatch` per KV-cache group.

Suffixes used in this package: T tokens of the step, H hidden size, N query heads, K key/value heads, D head size,
E experts, I expert width, R relative extent, C channels, S attention-residual sources, Q residual queries, L conv taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class RequestRows(NamedTuple):
    """One request in the step: rows `first` to `last - 1` hold the positions from `start` on."""

    request: int
    first: int
    last: int
    start: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Rows and pages of one step in one KV-cache group. All tensors live where the caches live."""

    query_start: torch.Tensor
    """int32 [requests + 1]: first row of each request, and the number of rows at the end."""

    seq_lens: torch.Tensor
    """int32 [requests]: tokens of each request after this step."""

    block_table: torch.Tensor
    """int32 [requests, blocks per request]: physical block of each logical block."""

    slots: torch.Tensor
    """int64 [T]: `block * tokens per block + offset` of each row; negative rows are not stored."""

    native: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    """The batch as the C++ kernels want it, by tokens per block; filled by them, once per step."""

    def requests(self) -> Iterator[RequestRows]:
        """Rows and first position of every request that has rows."""
        starts, lengths = self.query_start.tolist(), self.seq_lens.tolist()
        for index, (first, last, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
            if last > first:
                yield RequestRows(index, first, last, length - (last - first))

    def first(self, requests: int, rows: int) -> PagedBatch:
        """The first requests, which hold the first rows."""
        return PagedBatch(
            self.query_start[: requests + 1], self.seq_lens[:requests], self.block_table[:requests], self.slots[:rows]
        )

    def slots_of(self, request: int, positions: torch.Tensor, tokens_per_block: int) -> torch.Tensor:
        """Slots of absolute `positions` (int64 [P]) of one request."""
        blocks = self.block_table[request].long()[positions // tokens_per_block]
        return blocks * tokens_per_block + positions % tokens_per_block
