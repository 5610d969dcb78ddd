"""Routed experts in NVFP4 or MXFP8 on an NVIDIA GPU: vLLM's Marlin products with our activation and weighted sum.

On Hopper steps of few tokens and of many leave Marlin for kernels of ours on the same parameters: which steps, and
whether at all, `use` is told (`rollout.kernels.cuda.VECTOR_ROWS` and `MIN_PAIRS`).

Weights stay as they are stored, four or eight bits; Marlin decodes them on the way to the matrix units, and activations
stay bfloat16. The parameters are those of `inkling_rl.formats.marlin` under its names, so what is published for them is
copied over them as it is.

The operators are called one by one rather than through vLLM's `fused_marlin_moe`: one token needs no sorting at all,
few tokens one launch, nothing is cleared between calls, and the routing weights are applied in float32 by our sum.
Nothing waits for the device.

For GPUs before Blackwell. There, FlashInfer's TRT-LLM experts would take this module's place in
`rollout.plugin.experts` (not written, not run).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm import _custom_ops as vllm_ops
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.scalar_type import scalar_types

from inkling_rl.formats import ExpertFormat, marlin
from inkling_rl.formats.errors import FormatError
from inkling_rl.formats.marlin_layout import check_sizes
from rollout.kernels.triton_activation import expert_activation
from rollout.kernels.triton_moe_align import BLOCK_SIZES, MAX_PAIRS, Blocks, align, block_size, single_token
from rollout.kernels.triton_moe_sum import weighted_sum
from rollout.plugin.shape import ModelShape

if TYPE_CHECKING:
    from rollout.kernels.cuda import Kernels

WEIGHT_TYPES: dict[ExpertFormat, Any] = {"nvfp4": scalar_types.float4_e2m1f, "mxfp8": scalar_types.float8_e4m3fn}


class Tile(NamedTuple):
    """Of a weight, what a thread block takes at a time, and thread blocks per multiprocessor; Marlin's choice if -1."""

    inputs: int = -1
    outputs: int = -1
    blocks: int = -1


class Standing(NamedTuple):
    """What every call on a device shares."""

    locks: torch.Tensor
    """Of Marlin's thread blocks; zero before and after every call."""

    rows: torch.Tensor
    num_rows: torch.Tensor
    """Blocks of a single token, see `single_token`."""


# Made by the first step, not while the model is loaded: vLLM's sleep throws away what was allocated then.
_STANDING: dict[tuple[torch.device, int], Standing] = {}


def standing(device: torch.device, top_k: int) -> Standing:
    """Zeroed locks and the blocks of one token for a device."""
    key = device, top_k
    if key in _STANDING:
        return _STANDING[key]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=device)
    made = Standing(locks, *single_token(top_k, BLOCK_SIZES[0], device))
    if not torch.cuda.is_current_stream_capturing():
        # What is made during a capture holds its values in that graph only.
        _STANDING[key] = made
    return made


class MarlinExperts(nn.Module):
    """All experts of one layer, as `inkling_rl.formats.marlin` lays them out."""

    w13_weight: nn.Parameter
    w13_weight_scale: nn.Parameter
    w2_weight: nn.Parameter
    w2_weight_scale: nn.Parameter

    def __init__(self, shape: ModelShape, expert_format: ExpertFormat, name: str = "experts") -> None:
        super().__init__()
        self.expert_format = expert_format
        self.device = torch.empty(0).device  # parameters are on `meta` while vLLM reloads them
        self.expert_width = shape.expert_width
        self.caps = shape.gate_cap, shape.up_cap
        self.activation: Any = expert_activation
        self.align: Any = align
        self.weighted_sum: Any = weighted_sum
        self.vector_experts: Any = None
        self.grouped_product: Any = None
        self.vector_rows = 0
        self.min_pairs: int | None = None
        self.tiles = {"w13_weight": Tile(), "w2_weight": Tile()}
        hidden, width = shape.hidden_size, shape.expert_width
        check_sizes(hidden, width, expert_format, 1, 0, name)
        if hidden % 128 and marlin.padded_width(width, hidden, expert_format) % 128:
            # Marlin's smallest tiles: 64 by 128 or 128 by 64 of a weight.
            raise FormatError(
                f"{name}: hidden size must be a multiple of 128 for Marlin where the expert width, up to the next "
                f"multiple of 64, is none; got {hidden} and {width}. Use a float32 model"
            )
        for key, (size, dtype) in marlin.shapes(expert_format, shape.num_experts, hidden, width).items():
            self.register_parameter(key, nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False))

    def use(self, kernels: Kernels) -> None:
        """Run on these kernels, of which some may be fallbacks."""
        self.activation, self.align, self.weighted_sum = kernels.activation, kernels.align, kernels.weighted_sum
        self.vector_experts, self.vector_rows = kernels.vector_experts, kernels.vector_rows
        self.grouped_product, self.min_pairs = kernels.grouped_product, kernels.min_pairs

    def forward(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts [T, H] in x's dtype; weights float32 and numbers int32, [T, top_k], contiguous."""
        num_rows, hidden = x_TH.shape
        if num_rows == 0:
            return torch.empty_like(x_TH)
        num_experts, top_k = self.w13_weight.shape[0], experts_TK.shape[1]
        if num_rows <= self.vector_rows:
            return self._few(x_TH, weights_TK, experts_TK)
        constants = standing(x_TH.device, top_k)
        pairs, padded = num_rows * top_k, self.w2_weight.shape[1] * 16
        if self.min_pairs is not None and pairs >= self.min_pairs * num_experts and _fits(x_TH, padded, top_k):
            return self._many(x_TH, weights_TK, experts_TK, constants)
        size = block_size(pairs, num_experts)
        blocks = blocks_of(experts_TK, num_experts, size, constants, self.align)
        new = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=x_TH.device)
        # The first product is dead before the second is written, so the allocator uses its memory again.
        gate_up_NC = self._product(x_TH.to(torch.bfloat16), new(pairs, 2 * padded), "w13_weight", top_k, size,
                                   blocks, weights_TK, constants.locks)  # fmt: skip
        hidden_NI = self.activation(gate_up_NC, *self.caps, new(pairs, padded))
        del gate_up_NC
        down_NH = self._product(hidden_NI, new(pairs, hidden), "w2_weight", 1, size, blocks, weights_TK,
                                constants.locks)  # fmt: skip
        return self.weighted_sum(down_NH.view(num_rows, top_k, hidden), weights_TK, torch.empty_like(x_TH))

    def _few(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """`forward` for few tokens: products with single rows."""
        out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
        parameters = {name: parameter.data for name, parameter in self.named_parameters()}
        x_TH = x_TH.to(torch.bfloat16).contiguous()
        result: torch.Tensor = self.vector_experts(x_TH, weights_TK, experts_TK, parameters, self.caps, out_TH)
        return result

    def _many(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor, constants: Standing
    ) -> torch.Tensor:
        """`forward` for many tokens: the same but for who multiplies, in blocks of more rows."""
        from rollout.kernels.grouped_product import tile_for

        (num_rows, hidden), top_k = x_TH.shape, experts_TK.shape[1]
        num_experts, pairs, padded = self.w13_weight.shape[0], num_rows * top_k, self.w2_weight.shape[1] * 16
        tile = tile_for(pairs, num_experts)
        blocks = blocks_of(experts_TK, num_experts, tile.tokens, constants, self.align)
        new = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=x_TH.device)
        x_TH, dtype = x_TH.to(torch.bfloat16).contiguous(), x_TH.dtype
        gate_up_NC = self.grouped_product(x_TH, *self._matrix("w13_weight"), new(pairs, 2 * padded), blocks, tile,
                                          top_k, self.expert_format)  # fmt: skip
        hidden_NI = self.activation(gate_up_NC, *self.caps, new(pairs, padded))
        del gate_up_NC
        down_NH = self.grouped_product(hidden_NI, *self._matrix("w2_weight"), new(pairs, hidden), blocks, tile, 1,
                                       self.expert_format)  # fmt: skip
        out_TH = torch.empty(num_rows, hidden, dtype=dtype, device=x_TH.device)
        return self.weighted_sum(down_NH.view(num_rows, top_k, hidden), weights_TK, out_TH)

    def _matrix(self, matrix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_2 = getattr(self, f"{matrix}_scale_2", None)
        return getattr(self, matrix), getattr(self, f"{matrix}_scale"), scale_2

    def _product(
        self, x: torch.Tensor, out: torch.Tensor, matrix: str, top_k: int, size: int, blocks: Blocks,
        weights_TK: torch.Tensor, locks: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of `blocks` times their experts; pair i reads row `i // top_k` of x."""
        tile = self.tiles[matrix]
        return vllm_ops.moe_wna16_marlin_gemm(
            x, out, getattr(self, matrix), None, getattr(self, f"{matrix}_scale"), None,
            getattr(self, f"{matrix}_scale_2", None), None, locks, blocks.rows, blocks.experts, blocks.num_rows,
            weights_TK, moe_block_size=size, top_k=top_k, mul_topk_weights=False,
            b_q_type=WEIGHT_TYPES[self.expert_format], size_m=x.shape[0], size_n=out.shape[1], size_k=x.shape[1],
            use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False, thread_k=tile.inputs, thread_n=tile.outputs,
            blocks_per_sm=tile.blocks,
        )  # fmt: skip


def _fits(x_TH: torch.Tensor, padded: int, top_k: int) -> bool:
    from rollout.kernels.grouped_product import fits  # whose Triton elsewhere may be without Gluon

    return fits(x_TH.shape[0], x_TH.shape[1], padded, top_k)


def blocks_of(
    experts_TK: torch.Tensor, num_experts: int, size: int, constants: Standing, align: Callable[..., Blocks]
) -> Blocks:
    """The pairs by expert, by the cheapest way for their number."""
    if experts_TK.shape[0] == 1 and size == BLOCK_SIZES[0]:
        return Blocks(constants.rows, experts_TK.view(-1), constants.num_rows)
    if experts_TK.numel() <= MAX_PAIRS:
        return align(experts_TK, num_experts, size)
    return Blocks(*moe_align_block_size(experts_TK, size, num_experts))
