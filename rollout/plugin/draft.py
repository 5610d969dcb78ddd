"""The DSpark draft inside the engine, on a CPU: backbone over paged context, RNN head, confidence head.

Parameter names are those of the draft's tensors. Equations and their source: `inkling_rl.draft.reference`, which this
is tested against. Keys and values of the context are stored once per token that the target has computed, rejected ones
included (they are written again); those of a block are never stored, so no page is needed beyond the target's.
Embedding and logits are the target's own. Arithmetic is float32 whatever the dtype of the weights.

Not a vLLM attention layer: pages come from `rollout.plugin.paging.CachePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.shape import DraftShape
from rollout.kernels import ops
from rollout.plugin.attn_residual import RMSNormWeight
from rollout.plugin.linear import Weight
from rollout.plugin.paging import CacheSlice

MAX_GATHERED = 1 << 16
"""Tokens of context that are copied out of the pages at a time."""


class Angles(NamedTuple):
    """Cosine and sine of the rotary positions of some rows, [T, 1, D/2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Blocks(NamedTuple):
    """The blocks of a step, one per request that drafts."""

    lengths: torch.Tensor
    """int64 [R]: tokens of context, which is also the anchor's position."""

    block_table: torch.Tensor
    """int32 [R, blocks per request]: physical pages in the draft's group."""


class BiasedWeight(Weight):
    """A weight with a float32 bias [out]."""

    def __init__(self, out: int, width: int, *, dtype: torch.dtype) -> None:
        super().__init__(out, width, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(out, dtype=torch.float32), requires_grad=False)


class DraftAttention(nn.Module):
    """Grouped-query attention of a block over the context's pages and the block itself, without a mask inside it."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Weight(width, shape.hidden_size, dtype=dtype)
        self.k_proj = Weight(kv_width, shape.hidden_size, dtype=dtype)
        self.v_proj = Weight(kv_width, shape.hidden_size, dtype=dtype)
        self.o_proj = Weight(shape.hidden_size, width, dtype=dtype)
        self.q_norm = RMSNormWeight(shape.head_dim)
        self.k_norm = RMSNormWeight(shape.head_dim)

    def keys_values(self, x_TH: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, turned) and values of rows of context or block, float32 [T, K, D] each."""
        k_TKD = ops.linear(x_TH, self.k_proj.weight).unflatten(-1, (self.shape.num_kv_heads, -1))
        v_TKD = ops.linear(x_TH, self.v_proj.weight).unflatten(-1, (self.shape.num_kv_heads, -1))
        return self._turned(k_TKD, self.k_norm, angles), v_TKD

    def store(self, context_TH: torch.Tensor, angles: Angles, kv_BKNC: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write keys and values of context at their slots; negative slots are not stored."""
        k_TKD, v_TKD = self.keys_values(context_TH, angles)
        page = kv_BKNC.shape[2]
        stored = slots_T >= 0
        slots = slots_T[stored]
        kv_BKNC[slots // page, :, slots % page] = torch.cat([k_TKD, v_TKD], dim=-1)[stored].to(kv_BKNC.dtype)

    def forward(self, x_TH: torch.Tensor, angles: Angles, kv_BKNC: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Attend, float32 [T, H]; rows are those of the requests' blocks one after another."""
        num_requests = len(blocks.lengths)
        q_TND = self._turned(
            ops.linear(x_TH, self.q_proj.weight).unflatten(-1, (self.shape.num_heads, -1)), self.q_norm, angles
        )
        split = (num_requests, -1)
        q_RTND, k_RTKD, v_RTKD = (x.unflatten(0, split) for x in (q_TND, *self.keys_values(x_TH, angles)))
        longest = max(1, int(blocks.lengths.max()))
        at_once = max(1, MAX_GATHERED // longest)
        attended = [
            attend(q_RTND[some], k_RTKD[some], v_RTKD[some], kv_BKNC, Blocks(*(x[some] for x in blocks)))
            for some in (slice(first, first + at_once) for first in range(0, num_requests, at_once))
        ]
        return ops.linear(torch.cat(attended).flatten(0, 1).flatten(1), self.o_proj.weight)

    def _turned(self, x_TND: torch.Tensor, norm: RMSNormWeight, angles: Angles) -> torch.Tensor:
        first, second = F.rms_norm(x_TND, norm.weight.shape, norm.weight, self.shape.norm_eps).chunk(2, dim=-1)
        cos, sin = angles
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q_RTND: torch.Tensor, k_RTKD: torch.Tensor, v_RTKD: torch.Tensor, kv_BKNC: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """Attention of each request's T rows to its context's pages and to one another, [R, T, N, D]."""
    num_requests, num_rows, num_heads, head_dim = q_RTND.shape
    kv_heads, page = kv_BKNC.shape[1:3]
    num_pages = -(-int(blocks.lengths.max()) // page)
    pages_RPKNC = kv_BKNC[blocks.block_table[:, :num_pages].long()].float()
    past_RKSC = pages_RPKNC.permute(0, 2, 1, 3, 4).flatten(2, 3)
    unseen_RS = torch.arange(num_pages * page) >= blocks.lengths[:, None]
    # What a query may not see is zeroed, not only masked: pages hold whatever was left there, and 0 * NaN is NaN.
    past_RKSC = past_RKSC.masked_fill(unseen_RS[:, None, :, None], 0.0)
    k_RKSD, v_RKSD = (
        torch.cat([past, own.transpose(1, 2)], dim=2)
        for past, own in zip(past_RKSC.chunk(2, dim=-1), (k_RTKD, v_RTKD), strict=True)
    )
    # The query heads of one key/value head are rows of one product.
    grouped = (kv_heads, num_heads // kv_heads)
    q_RKMD = q_RTND.unflatten(2, grouped).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores_RKMS = q_RKMD @ k_RKSD.transpose(-1, -2) * head_dim**-0.5
    unseen_RS = F.pad(unseen_RS, (0, num_rows))
    scores_RKMS = scores_RKMS.masked_fill(unseen_RS[:, None, None], float("-inf"))
    attended = (scores_RKMS.softmax(-1) @ v_RKSD).unflatten(2, (grouped[1], num_rows))
    return attended.permute(0, 3, 1, 2, 4).reshape(num_requests, num_rows, num_heads, head_dim)


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Weight(shape.mlp_width, shape.hidden_size, dtype=dtype)
        self.up_proj = Weight(shape.mlp_width, shape.hidden_size, dtype=dtype)
        self.down_proj = Weight(shape.hidden_size, shape.mlp_width, dtype=dtype)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate, up = ops.linear(x_TH, self.gate_proj.weight), ops.linear(x_TH, self.up_proj.weight)
        return ops.linear(F.silu(gate) * up, self.down_proj.weight)


class DraftLayer(nn.Module):
    """One layer of the backbone."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.input_layernorm = RMSNormWeight(shape.hidden_size)
        self.self_attn = DraftAttention(shape, dtype)
        self.post_attention_layernorm = RMSNormWeight(shape.hidden_size)
        self.mlp = DraftMlp(shape, dtype)

    def forward(self, x_TH: torch.Tensor, angles: Angles, kv_BKNC: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Residual stream after this layer, float32 [T, H]."""
        x_TH = x_TH + self.self_attn(rms_norm(x_TH, self.input_layernorm, self.eps), angles, kv_BKNC, blocks)
        return x_TH + self.mlp(rms_norm(x_TH, self.post_attention_layernorm, self.eps))


class RnnHead(nn.Module):
    """What makes the tokens of a block depend on one another."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank = shape.rank
        self.markov_w1 = Weight(shape.vocab_size, rank, dtype=dtype)
        self.markov_w2 = Weight(shape.vocab_size, rank, dtype=dtype)
        self.joint_proj = BiasedWeight(3 * rank, 2 * rank + shape.hidden_size, dtype=dtype)

    def embed(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Embedding of the previous token, float32 [R, rank]."""
        return F.embedding(tokens_R, self.markov_w1.weight).float()

    def prepare(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The hidden states' share of `joint_proj` and its bias, for all rows at once, [T, 3 rank]."""
        return ops.linear(hidden_TH, self.joint_proj.weight[:, 2 * self.rank :]) + self.joint_proj.bias

    def forward(
        self, state_RS: torch.Tensor, embedded_RS: torch.Tensor, prepared_RJ: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New state [R, rank], and what is added to the logits [R, vocabulary]."""
        weight = self.joint_proj.weight[:, : 2 * self.rank]
        joint = ops.linear(torch.cat([state_RS, embedded_RS], dim=-1), weight) + prepared_RJ
        gate, candidate, output = joint.chunk(3, dim=-1)
        state_RS = torch.lerp(torch.tanh(candidate), state_RS, torch.sigmoid(gate))
        return state_RS, ops.linear(torch.tanh(output), self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Probability that a drafted token is accepted, given that those before it are."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.sees_token = shape.confidence_sees_token
        self.proj = BiasedWeight(1, shape.hidden_size + self.sees_token * shape.rank, dtype=dtype)

    def forward(self, hidden_TH: torch.Tensor, embedded_TS: torch.Tensor) -> torch.Tensor:
        """Float32 [T], from the rows' hidden states and the embeddings of the tokens before theirs."""
        features = torch.cat([hidden_TH, embedded_TS], dim=-1) if self.sees_token else hidden_TH
        return torch.sigmoid(ops.linear(features, self.proj.weight) + self.proj.bias)[:, 0]


class Draft(nn.Module):
    """The whole draft but for the target's embedding and head."""

    def __init__(self, shape: DraftShape, dtype: torch.dtype, cache: Sequence[CacheSlice]) -> None:
        super().__init__()
        self.shape = shape
        self.cache = cache
        self.fc = Weight(shape.hidden_size, len(shape.target_layers) * shape.hidden_size, dtype=dtype)
        self.hidden_norm = RMSNormWeight(shape.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(shape, dtype) for _ in range(shape.num_layers))
        self.norm = RMSNormWeight(shape.hidden_size)
        self.markov_head = RnnHead(shape, dtype)
        self.confidence_head = ConfidenceHead(shape, dtype) if shape.has_confidence else None

    def store_context(self, outputs_TC: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write the context of a step's tokens into the pages of every layer.

        Args:
            outputs_TC: outputs of the target's layers side by side, float32.
            positions_T: int64, of the rows in their sequences.
            slots_T: int64, in the draft's group of pages; negative ones are not stored.
        """
        context_TH = rms_norm(ops.linear(outputs_TC, self.fc.weight), self.hidden_norm, self.shape.norm_eps)
        angles = self.angles(positions_T)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.self_attn.store(context_TH, angles, cache.view(), slots_T)  # type: ignore[operator, union-attr]

    def hidden(self, embedded_TH: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Final hidden states of the blocks' rows, float32 [R * block_size, H], from their embedded tokens."""
        positions_RB = blocks.lengths[:, None] + torch.arange(self.shape.block_size)
        angles = self.angles(positions_RB.flatten())
        for layer, cache in zip(self.layers, self.cache, strict=True):
            embedded_TH = layer(embedded_TH, angles, cache.view(), blocks)
        return rms_norm(embedded_TH, self.norm, self.shape.norm_eps)

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """Rotary angles, in float64 until their cosine: at position 10^6 a float32 angle is off by 0.06."""
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = positions_T.double()[:, None, None] * rates
        return Angles(angles.cos().float(), angles.sin().float())

    def load(self, draft: DraftCheckpoint) -> None:
        """Read every tensor from a draft's files."""
        parameters, written = dict(self.named_parameters()), set()
        for name, tensor in draft.tensors():
            default_weight_loader(parameters[name], tensor)
            written.add(name)
        if missing := sorted(parameters.keys() - written):
            raise CheckpointError(f"{draft.source.path} must hold the draft's {missing[0]}; it does not. Copy it again")


def rms_norm(x_TH: torch.Tensor, norm: RMSNormWeight, eps: float) -> torch.Tensor:
    """Float32 [T, H]."""
    return ops.mix_norm(x_TH[:0], x_TH, None, norm.weight[None], 0.0, eps)[0]
