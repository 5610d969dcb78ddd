"""The draft on CUDA: the parameters of `rollout.plugin.draft` in few launches, as vLLM's V2 speculators call a draft.

The modules' own arithmetic is the CPU's path and what this is tested against. Products take the model's dtype; the
residual stream, norms, the RNN's state and everything behind a softmax are float32. What is drafted changes how fast
tokens come and never which, so nothing here has to be exact. Nothing waits for the device, and the shapes of a step
follow from the number of requests: `hidden` and `draw` are captured in one graph (`rollout.plugin.speculator`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from inkling_rl.draft.shape import DraftShape
from rollout.kernels.cuda import Kernels
from rollout.kernels.draft import Angles, Blocks
from rollout.kernels.layout import consecutive
from rollout.plugin.attn_residual import RMSNormWeight
from rollout.plugin.draft import Draft, DraftAttention, DraftLayer, DraftMlp
from rollout.plugin.paging import CacheSlice

Sample = Callable[[torch.Tensor, int], torch.Tensor]
"""Tokens int64 [R] from float32 logits [R, V] of a place in the block."""


class CudaDraft(Draft):
    """`Draft` with the projections of one input side by side in memory, so that one product does for all of them."""

    layers: Sequence[DraftLayer]  # type: ignore[assignment]

    def __init__(self, shape: DraftShape, dtype: torch.dtype, cache: Sequence[CacheSlice], kernels: Kernels) -> None:
        """Made on the device that is torch's default."""
        super().__init__(shape, dtype, cache)
        self.dtype, self.kernels = dtype, kernels
        self.inputs: list[torch.Tensor] = []
        """q, k and v of every layer over one another, [out, H]."""

        self.gate_up: list[torch.Tensor] = []
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            self.inputs.append(consecutive(*(module.weight for module in projections)))
            self.gate_up.append(consecutive(mlp.gate_proj.weight, mlp.up_proj.weight))
        half = shape.head_dim // 2
        self.rates = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """As on the CPU, in float64 until the cosine."""
        angles = positions_T.double()[:, None] * self.rates
        return Angles(angles.cos().float(), angles.sin().float())

    def combine_hidden_states(self, outputs_TC: torch.Tensor) -> torch.Tensor:
        """Context rows [T, H] from the tapped layers' outputs side by side; vLLM's name."""
        context_TH = F.linear(outputs_TC.to(self.dtype), self.fc.weight)
        return self._normed(context_TH, self.hidden_norm)

    def precompute_and_store_context_kv(
        self, context_TH: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor | None = None
    ) -> None:
        """Write context rows into every layer's pages; without slots, as when vLLM measures, nowhere. vLLM's name."""
        angles, shape = self.angles(positions_T), self.shape
        queries = shape.num_heads * shape.head_dim
        for layer, inputs_CH, cache in zip(self.layers, self.inputs, self.cache, strict=True):
            kv_TC = F.linear(context_TH, inputs_CH[queries:])
            if slots_T is not None:
                k_norm = layer.self_attn.k_norm.weight
                self.kernels.draft_store(kv_TC, k_norm, angles, shape.norm_eps, cache.view(), slots_T)

    def map_draft_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The vocabulary is the target's; vLLM's name."""
        return ids

    def hidden(self, embedded_TH: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Final hidden states of the blocks' rows in the model's dtype [R * block_size, H], from their embedded tokens.

        Before there are pages `blocks` must have no context.
        """
        offsets_B = torch.arange(self.shape.block_size, device=embedded_TH.device)
        angles = self.angles((blocks.lengths[:, None] + offsets_B).flatten())
        stream_TH = embedded_TH.float()
        for index, layer in enumerate(self.layers):
            x_TH = self._normed(stream_TH, layer.input_layernorm)
            stream_TH = stream_TH + self._attend(index, layer.self_attn, x_TH, angles, blocks)
            x_TH = self._normed(stream_TH, layer.post_attention_layernorm)
            stream_TH = stream_TH + self._transform(index, layer.mlp, x_TH)
        return self._normed(stream_TH, self.norm)

    def draw(self, logits_RNV: torch.Tensor, rows_TH: torch.Tensor, anchors_R: torch.Tensor, sample: Sample) -> None:
        """Tokens of every block, left to right, through the RNN.

        Args:
            logits_RNV: the target's head on the blocks' first N rows, float32; overwritten.
            rows_TH: those rows' final hidden states, request after request.
            anchors_R: int64, the token before each block.
            sample: gets the logits of each place, and keeps what it draws.
        """
        head, num_requests, rank = self.markov_head, len(anchors_R), self.shape.rank
        weights, kernels = head.weights(), self.kernels
        prepared_TJ = F.linear(rows_TH, head.joint_proj.weight[:, 2 * rank :]).float() + head.joint_proj.bias
        prepared_RNJ = prepared_TJ.unflatten(0, (num_requests, -1))
        states = torch.zeros(2, num_requests, rank, device=rows_TH.device)
        out_RS, tokens_R = torch.empty_like(states[0]), anchors_R
        for place in range(logits_RNV.shape[1]):
            before_RS, after_RS = states[place % 2], states[1 - place % 2]
            kernels.draft_rnn(prepared_RNJ[:, place], before_RS, tokens_R, weights.w1, weights.joint, after_RS, out_RS)
            logits_RV = logits_RNV[:, place]
            tokens_R = sample(kernels.draft_logits(logits_RV, out_RS, weights.w2, logits_RV), place)

    def _attend(
        self, index: int, module: DraftAttention, x_TH: torch.Tensor, angles: Angles, blocks: Blocks
    ) -> torch.Tensor:
        shape, kernels = self.shape, self.kernels
        sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        q_TC, k_TC, v_TC = F.linear(x_TH, self.inputs[index]).split(sizes, dim=-1)
        q_TND = kernels.draft_norm_rotate(q_TC, module.q_norm.weight, angles, shape.norm_eps)
        k_TKD = kernels.draft_norm_rotate(k_TC, module.k_norm.weight, angles, shape.norm_eps)
        v_TKD = v_TC.unflatten(-1, k_TKD.shape[1:])
        attended_TND = kernels.draft_attention(q_TND, k_TKD, v_TKD, self._pages(index, k_TKD), blocks)
        return F.linear(attended_TND.flatten(1), module.o_proj.weight)

    def _pages(self, index: int, k_TKD: torch.Tensor) -> torch.Tensor:
        cache = self.cache[index]
        if cache.owner.kv_cache.ndim == 4:
            return cache.view()
        return k_TKD.new_zeros(1, k_TKD.shape[1], cache.owner.spec.block_size, 2 * k_TKD.shape[2])

    def _transform(self, index: int, module: DraftMlp, x_TH: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = F.linear(x_TH, self.gate_up[index]).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TI) * up_TI, module.down_proj.weight)

    def _normed(self, x_TH: torch.Tensor, norm: RMSNormWeight) -> torch.Tensor:
        """`weight x / rms(x)` in float32, in the model's dtype."""
        return F.rms_norm(x_TH.float(), norm.weight.shape, norm.weight, self.shape.norm_eps).to(self.dtype)
