"""Relative attention with gate and sink over vLLM's pages. Parameter names are those of transformers' text class.

Source: transformers 5.24 `Inkling2SlidingAttention`, `Inkling2FullAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rollout.kernels import ops
from rollout.kernels.layout import consecutive
from rollout.kernels.paged import PagedBatch
from rollout.plugin.conv_state import ConvStream, DynamicShortConvolution, ShortConvolution
from rollout.plugin.linear import Projection, Weight
from rollout.plugin.shape import AttentionShape, ModelShape


class HeadScale(nn.Module):
    """Learned scale of a clipped projection, float32 [N, D]; it belongs to the attention kernel."""

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(num_heads, size, dtype=torch.float32), requires_grad=False)


class QueryProjection(nn.Module):
    """`linear` and the scale before the clip."""

    def __init__(self, shape: ModelShape, kind: AttentionShape, prefix: str) -> None:
        super().__init__()
        self.linear = Projection(shape.hidden_size, kind.num_heads * kind.head_dim, f"{prefix}.linear")
        self.norm = HeadScale(kind.num_heads, kind.head_dim)


class KeyValueProjection(nn.Module):
    """`linear` followed by a short convolution: dynamic in full layers, static in sliding ones."""

    def __init__(self, shape: ModelShape, kind: AttentionShape, offset: int, prefix: str) -> None:
        super().__init__()
        channels = kind.num_kv_heads * kind.head_dim
        self.linear = Projection(shape.hidden_size, channels, f"{prefix}.linear")
        self.sconv: ShortConvolution | DynamicShortConvolution
        if kind.window is None:
            self.sconv = DynamicShortConvolution(
                channels, shape.hidden_size, kind.num_kv_heads, shape.conv_taps, offset
            )
        else:
            self.sconv = ShortConvolution(channels, shape.conv_taps, offset)

    def forward(self, x_TH: torch.Tensor, stream: ConvStream) -> torch.Tensor:
        """Convolved projection before norm or clip, float32 [T, C]."""
        projected_TC = self.linear(x_TH)
        if isinstance(self.sconv, DynamicShortConvolution):
            return self.sconv(projected_TC, x_TH, stream)
        return self.sconv(projected_TC, stream)


class RelativePositionBias(nn.Module):
    """Per-token mixture of bias-against-distance profiles: `linear`, scale before the clip, profiles `proj` [M, R]."""

    def __init__(self, shape: ModelShape, kind: AttentionShape, prefix: str) -> None:
        super().__init__()
        self.linear = Projection(shape.hidden_size, kind.num_heads * shape.d_rel, f"{prefix}.linear")
        self.norm = HeadScale(kind.num_heads, shape.d_rel)
        self.proj = nn.Parameter(torch.empty(shape.d_rel, kind.rel_extent, dtype=torch.float32), requires_grad=False)


class GatedOutputProjection(nn.Module):
    """`gate_proj` multiplies the attention output channel by channel before `linear`."""

    def __init__(self, shape: ModelShape, kind: AttentionShape, prefix: str) -> None:
        super().__init__()
        channels = kind.num_heads * kind.head_dim
        self.gate_proj = Projection(shape.hidden_size, channels, f"{prefix}.gate_proj")
        self.linear = Projection(channels, shape.hidden_size, f"{prefix}.linear")


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Memory of the projections on CUDA: those of one input lie together, so that one product does for all of them."""

    inputs: torch.Tensor
    """q, r and gate over one another, [out, H]; in sliding layers k and v after them."""

    keys_values: torch.Tensor | None
    """k and v of a full layer, [2, C, H]: their inputs differ."""

    taps: torch.Tensor | None
    """Projections to the dynamic taps of k and v, [2, K L, H]."""

    @classmethod
    def of(cls, attention: Attention) -> SharedWeights:
        keys, values = attention.k_proj, attention.v_proj
        first = [module.weight for module in attention.projections()[:3]]
        both = [keys.linear.weight, values.linear.weight]
        if not isinstance(keys.sconv, DynamicShortConvolution):
            return cls(consecutive(*first, *both), None, None)
        assert isinstance(values.sconv, DynamicShortConvolution)
        taps = consecutive(keys.sconv.weight_proj.weight, values.sconv.weight_proj.weight)
        return cls(consecutive(*first), consecutive(*both).unflatten(0, (2, -1)), taps.unflatten(0, (2, -1)))


class Attention(nn.Module):
    """One attention sublayer, sliding or full."""

    def __init__(self, shape: ModelShape, layer: int, prefix: str) -> None:
        super().__init__()
        self.kind = kind = shape.attention(layer)
        self.q_clip, self.r_clip, self.norm_eps = shape.q_clip, shape.r_clip, shape.norm_eps
        channels = kind.num_kv_heads * kind.head_dim
        self.q_proj = QueryProjection(shape, kind, f"{prefix}.q_proj")
        self.k_proj = KeyValueProjection(shape, kind, 0, f"{prefix}.k_proj")
        self.v_proj = KeyValueProjection(shape, kind, channels, f"{prefix}.v_proj")
        self.o_proj = GatedOutputProjection(shape, kind, f"{prefix}.o_proj")
        self.sink_proj = Weight(kind.num_heads, shape.hidden_size, dtype=torch.float32)
        self.relative_position_bias = RelativePositionBias(shape, kind, f"{prefix}.relative_position_bias")
        self.shared = None if self.sink_proj.weight.is_cpu else SharedWeights.of(self)

    def projections(self) -> tuple[Projection, ...]:
        """q, r, gate, k and v, or the LoRA wrappers around them."""
        bias, output = self.relative_position_bias, self.o_proj
        return (self.q_proj.linear, bias.linear, output.gate_proj, self.k_proj.linear, self.v_proj.linear)

    def forward(
        self, inputs_QTH: torch.Tensor, stream: ConvStream, kv_BKNC: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Attend, float32 [T, H]. `inputs` are the normed inputs of q, k and v, or one for all three."""
        x_TH, k_input_TH, v_input_TH = inputs_QTH if inputs_QTH.shape[0] == 3 else (inputs_QTH[0],) * 3
        k_TC = self.k_proj(k_input_TH, stream)
        v_TC = self.v_proj(v_input_TH, stream)
        ops.store_kv(k_TC, v_TC, kv_BKNC, batch, self.q_clip, self.norm_eps)
        bias = self.relative_position_bias
        attended_TC = ops.attention(
            self.q_proj.linear(x_TH),
            bias.linear(x_TH),
            ops.linear(x_TH, self.sink_proj.weight),
            self.o_proj.gate_proj(x_TH),
            kv_BKNC,
            batch,
            self.q_proj.norm.scale,
            bias.norm.scale,
            bias.proj,
            self.q_clip,
            self.r_clip,
            self.kind.window,
            self.kind.log_scaling,
        )
        return self.o_proj.linear(attended_TC)
