"""Drafting with DSpark in vLLM's V2 runner: what that runner calls a speculator, for a GPU.

vLLM 0.30's own `DSparkSpeculator` has the plain Markov head only; of it stay the preparation of inputs, the context of
a step's tokens, the graph over a whole draft and the sampler with its cache of logits. Replaced is what is drafted: the
block's rows, their hidden states and the RNN through which tokens are drawn (`rollout.plugin.draft_cuda`).

Lossless by vLLM's rejection sampler, to which goes what tokens were drawn from: the cache is float32, as the logits are
(vLLM would round them to the model's dtype after drawing from the unrounded).

vLLM 0.33 has a hook for the loop (`sample_sequential`); there this file loses `_generate_draft`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dspark import speculator as dspark

from rollout.kernels.draft import Blocks
from rollout.plugin import draft_config
from rollout.plugin.draft_cuda import CudaDraft
from rollout.plugin.draft_watch import DeviceWatch
from rollout.plugin.paging import draft_owners


class DSparkSpeculator(dspark.DSparkSpeculator):
    """Drafts `num_speculative_tokens` tokens per request and step."""

    model: CudaDraft
    vllm_config: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        shape = draft_config.draft_shape(vllm_config)
        assert shape is not None
        self.shape = shape
        super().__init__(vllm_config, device)
        # vLLM lays out as many rows per request as tokens are drafted; ours are always a block, see `_generate_draft`.
        self.block_ids = torch.full(
            (self.max_num_reqs, shape.block_size), shape.mask_token_id, dtype=torch.int64, device=device
        )
        self.target: Any = None
        self.watch = DeviceWatch(self.num_speculative_steps)

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """Dtype and filling of the cache of logits."""
        return torch.float32, 0.0

    def load_model(self, target_model: Any) -> None:
        """Build the draft on the target's pages, kernels, embedding and head, and read its weights."""
        config = self.vllm_config
        with self.device:
            self.model = CudaDraft(
                self.shape, config.model_config.dtype, target_model.model.cache.draft, target_model.model.kernels
            ).eval()
        self.model.fill(config)
        self.target = target_model
        self.draft_attn_layer_names = draft_owners(config)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """A graph for as many requests as the target has one for.

        vLLM rounds the target's counts of rows up to the draft's, which makes other numbers of requests of them, and
        leaves the largest batch without a graph.
        """
        config, rows = self.vllm_config, self.num_speculative_steps + 1
        compilation = copy.copy(config.compilation_config)
        counts = {-(-size // rows) for size in compilation.cudagraph_capture_sizes or ()}
        sizes = sorted(count * self.num_query_per_req for count in counts if count <= self.max_num_reqs)
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = max(sizes, default=0)
        self.vllm_config = copy.copy(config)
        self.vllm_config.compilation_config = compilation
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = config

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """A look at what became of the last drafts."""
        self.watch.observe(self.model.version, num_sampled, num_rejected)

    @torch.inference_mode()
    def propose(self, input_batch: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """vLLM's, and a count of the blocks that a version of the draft has drafted."""
        drafted: torch.Tensor = super().propose(input_batch, *arguments, **options)
        if self.model.versions is not None and not options.get("dummy_run"):
            self.model.versions.num_blocks += input_batch.num_reqs
        return drafted

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """A whole draft, captured in one graph: block, hidden states, tokens. The parameters are vLLM's."""
        shape, num_tokens, buffers = self.shape, self.num_speculative_steps, self.input_buffers
        # A whole block whatever is asked for: its rows see one another, and it was trained so.
        ids_RB = self.block_ids[:num_reqs]
        places_R = self._anchor_idx[:num_reqs]
        ids_RB[:, 0] = buffers.input_ids[places_R]
        # Requests that pad a graph have no tokens, and where they once were is still written there.
        lengths_R = torch.where(buffers.seq_lens[:num_reqs] > 0, buffers.positions[places_R], 0)
        blocks = Blocks(lengths_R, self._block_table(num_reqs))
        if attn_metadata is None:  # no pages yet
            blocks = Blocks(torch.zeros_like(lengths_R), blocks.block_table)
        hidden_TH = self.model.hidden(self.target.embed_input_ids(ids_RB.flatten()), blocks)
        rows_TH = hidden_TH.unflatten(0, (num_reqs, shape.block_size))[:, :num_tokens].flatten(0, 1)
        logits_RNV = self.target.compute_logits(rows_TH).unflatten(0, (num_reqs, num_tokens))
        places = num_reqs * num_tokens
        states_RN = self.sample_idx_mapping[:places].view(num_reqs, num_tokens)
        positions_RN = self.sample_pos[:places].view(num_reqs, num_tokens)

        def sample(logits_RV: torch.Tensor, place: int) -> torch.Tensor:
            drawn_R = self._sample_logits(logits_RV, states_RN[:, place], positions_RN[:, place], place)
            self.draft_tokens[:num_reqs, place] = drawn_R
            return drawn_R

        self.model.draw(logits_RNV, rows_TH, ids_RB[:, 0].contiguous(), sample)

    def _block_table(self, num_reqs: int) -> torch.Tensor:
        """Pages of the draft's group, int32 [R, pages per request]; one null page before there are any."""
        if self.draft_kv_cache_group_id < 0:
            return torch.zeros(num_reqs, 1, dtype=torch.int32, device=self.device)
        return self.block_tables.input_block_tables[self.draft_kv_cache_group_id][:num_reqs]
