"""The DSpark draft inside the engine, on a CPU: backbone over paged context, RNN head, confidence head.

Parameter names are those of the draft's tensors. Equations and their source: `inkling_rl.draft.reference`, which this
is tested against. Keys and values of the context are stored once per token that the target has computed, rejected ones
included (they are written again); those of a block are never stored, so no page is needed beyond the target's.
Embedding and logits are the target's own. Arithmetic is float32 whatever the dtype of the weights.

Not a vLLM attention layer: pages come from `rollout.plugin.paging.CachePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.shape import DraftShape
from rollout.kernels import draft as kernels
from rollout.kernels import ops
from rollout.kernels.draft import Angles, Blocks
from rollout.plugin.attn_residual import RMSNormWeight
from rollout.plugin.draft_config import open_draft
from rollout.plugin.draft_versions import DraftVersions
from rollout.plugin.linear import Weight
from rollout.plugin.paging import CacheSlice


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
        k_TC, v_TC = ops.linear(x_TH, self.k_proj.weight), ops.linear(x_TH, self.v_proj.weight)
        k_TKD = kernels.norm_rotate(k_TC, self.k_norm.weight, angles, self.shape.norm_eps)
        return k_TKD, v_TC.unflatten(-1, k_TKD.shape[1:])

    def store(self, context_TH: torch.Tensor, angles: Angles, kv_BKNC: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write keys and values of context at their slots; negative slots are not stored."""
        k_TKD, v_TKD = self.keys_values(context_TH, angles)
        page = kv_BKNC.shape[2]
        stored = slots_T >= 0
        slots = slots_T[stored]
        kv_BKNC[slots // page, :, slots % page] = torch.cat([k_TKD, v_TKD], dim=-1)[stored].to(kv_BKNC.dtype)

    def forward(self, x_TH: torch.Tensor, angles: Angles, kv_BKNC: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Attend, float32 [T, H]; rows are those of the requests' blocks one after another."""
        q_TC = ops.linear(x_TH, self.q_proj.weight)
        q_TND = kernels.norm_rotate(q_TC, self.q_norm.weight, angles, self.shape.norm_eps)
        attended_TND = kernels.attention(q_TND, *self.keys_values(x_TH, angles), kv_BKNC, blocks)
        return ops.linear(attended_TND.flatten(1), self.o_proj.weight)


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

    def weights(self) -> kernels.Head:
        """What drawing a block needs of this head."""
        joint = self.joint_proj.weight[:, : 2 * self.rank]
        return kernels.Head(self.markov_w1.weight, joint, self.markov_w2.weight)


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
        self.versions: DraftVersions | None = None
        """What serves and how it can be replaced; None without weights from files."""

    @property
    def version(self) -> int:
        """Of the weights; 0 for weights that nobody trained here."""
        return self.versions.version if self.versions else 0

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
        if self.versions is not None:
            self.versions.num_blocks += len(blocks.lengths)
        positions_RB = blocks.lengths[:, None] + torch.arange(self.shape.block_size)
        angles = self.angles(positions_RB.flatten())
        for layer, cache in zip(self.layers, self.cache, strict=True):
            embedded_TH = layer(embedded_TH, angles, cache.view(), blocks)
        return rms_norm(embedded_TH, self.norm, self.shape.norm_eps)

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """Rotary angles, in float64 until their cosine: at position 10^6 a float32 angle is off by 0.06."""
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = positions_T.double()[:, None] * rates
        return Angles(angles.cos().float(), angles.sin().float())

    def fill(self, vllm_config: Any) -> None:
        """Weights from the draft's files, or random ones where dummy weights are asked for."""
        if vllm_config.load_config.load_format == "dummy":
            from rollout.plugin import dummy

            dummy.fill(self)
        else:
            self.load(open_draft(vllm_config))

    def load(self, draft: DraftCheckpoint) -> None:
        """Read every tensor from a draft's files."""
        parameters, written = dict(self.named_parameters()), set()
        for name, tensor in draft.tensors():
            default_weight_loader(parameters[name], tensor)
            written.add(name)
        if missing := sorted(parameters.keys() - written):
            raise CheckpointError(f"{draft.source.path} must hold the draft's {missing[0]}; it does not. Copy it again")
        self.versions = DraftVersions(self, self.shape, draft)


def rms_norm(x_TH: torch.Tensor, norm: RMSNormWeight, eps: float) -> torch.Tensor:
    """Float32 [T, H]."""
    return ops.mix_norm(x_TH[:0], x_TH, None, norm.weight[None], 0.0, eps)[0]
