"""Steps of the engine without its scheduler: page tables, metadata and inputs for requests of any length.

A step is built as vLLM's runner builds one: a block table per KV-cache group in which blocks that a sliding group has
given back are the null block 0, slots, lengths and starts, made into the plugin's metadata by vLLM's own
`build_attn_metadata` from the runner's groups. Blocks are dealt from the engine's whole pool in random order, and what
they hold is whatever was there: `fill_pages` puts random numbers into all of them. Nothing is taken from the scheduler,
so no request may be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.benchmarks.slice_bounds import Work


class Group(NamedTuple):
    """Block size of a KV-cache group and the distance up to which it keeps tokens, None for all."""

    block_size: int
    window: int | None

    def first_block(self, past: int) -> int:
        """The first block of a request that is not given back before a step."""
        return 0 if self.window is None else max(0, past - self.window + 1) // self.block_size

    def blocks(self, past: int, new: int) -> int:
        """Blocks that a request holds during a step."""
        return -(-(past + new) // self.block_size) - self.first_block(past)


class Pages(NamedTuple):
    """Block table int32 [requests, width] and slots int64 [rows] of one group."""

    block_table: torch.Tensor
    slots: torch.Tensor


def blocks_needed(groups: Sequence[Group], requests: Sequence[tuple[int, int]]) -> int:
    return sum(group.blocks(past, new) for group in groups for past, new in requests)


def deal(
    groups: Sequence[Group], requests: Sequence[tuple[int, int]], num_blocks: int, max_length: int, seed: int = 0
) -> list[Pages]:
    """Pages of every group, no block twice, in random order.

    Args:
        groups: which share the pool.
        requests: (tokens already there, rows of this step) each.
        num_blocks: of the pool; block 0 stands for blocks that were given back.
        max_length: tokens for which a row of a block table has room.
        seed: of the order.

    Raises:
        ValueError: the pool is too small.
    """
    if (needed := blocks_needed(groups, requests)) >= num_blocks:
        raise ValueError(f"the step must fit {num_blocks - 1} blocks; got one that needs {needed}")
    order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).int()
    dealt = []
    for group in groups:
        table = torch.zeros(len(requests), -(-max_length // group.block_size), dtype=torch.int32)
        slots = []
        for row, (past, new) in enumerate(requests):
            first, count = group.first_block(past), group.blocks(past, new)
            table[row, first : first + count], order = order[:count], order[count:]
            positions = torch.arange(past, past + new)
            blocks = table[row].long()[positions // group.block_size]
            slots.append(blocks * group.block_size + positions % group.block_size)
        dealt.append(Pages(table, torch.cat(slots)))
    return dealt


def groups_of(runner: Any) -> list[Group]:
    """The KV-cache groups of a vLLM model runner."""
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    return [Group(spec.block_size, getattr(spec, "sliding_window", None)) for spec in specs]


@dataclass(frozen=True)
class Step:
    """One call of the model, on the runner's device."""

    runner: Any
    work: Work
    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: dict[str, Any]
    logit_rows: torch.Tensor

    def hidden(self) -> torch.Tensor:
        """Final hidden states [T, H]."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context

        with set_forward_context(
            self.metadata, self.runner.vllm_config, num_tokens=self.work.rows,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        ):  # fmt: skip
            return self.runner.model(input_ids=self.input_ids, positions=self.positions)

    def logits(self) -> torch.Tensor:
        """Logits of the rows that get some, as the runner asks for them."""
        hidden_TH = self.hidden()
        rows_TH = hidden_TH if len(self.logit_rows) == len(hidden_TH) else hidden_TH[self.logit_rows]
        return self.runner.model.compute_logits(rows_TH)


def build(
    runner: Any, requests: Sequence[tuple[int, int]], token_ids: torch.Tensor, seed: int = 0,
    pages: Sequence[Pages] | None = None,
) -> Step:  # fmt: skip
    """A step of these requests, in which the last row of each gets logits.

    Args:
        runner: vLLM's, with its pages allocated.
        requests: (tokens already there, rows of this step) each, longest last, as the runner sorts them.
        token_ids: int [rows].
        seed: of the order of the pages.
        pages: of each group, where they are not to be dealt anew.
    """
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    device, config = runner.device, runner.kv_cache_config
    pages = pages or deal(groups_of(runner), requests, config.num_blocks, runner.max_model_len, seed)
    new = torch.tensor([new for _, new in requests], dtype=torch.int32)
    lengths = torch.tensor([past + new for past, new in requests], dtype=torch.int32)
    starts = torch.cat((new.new_zeros(1), new.cumsum(0).int()))
    positions = torch.cat([torch.arange(past, past + new) for past, new in requests])
    metadata = build_attn_metadata(
        runner.attn_groups,
        num_reqs=len(requests),
        num_tokens=len(positions),
        query_start_loc_gpu=starts.to(device),
        query_start_loc_cpu=starts,
        max_query_len=int(new.max()),
        seq_lens=lengths.to(device),
        max_seq_len=int(lengths.max()),
        block_tables=[page.block_table.to(device) for page in pages],
        slot_mappings=torch.stack([page.slots for page in pages]).to(device),
        kv_cache_config=config,
        seq_lens_cpu_upper_bound=lengths,
    )
    work = Work(tuple(requests), len(requests))
    return Step(
        runner, work, token_ids.int().to(device), positions.to(device), metadata, (starts[1:] - 1).long().to(device)
    )


def fill_pages(runner: Any, seed: int = 0) -> None:
    """Normal random numbers into every page of every cache: keys, values and convolution inputs of deviation 1."""
    generator = torch.Generator(runner.device).manual_seed(seed)
    for owner in runner.compilation_config.static_forward_context.values():
        owner.kv_cache.normal_(generator=generator)
