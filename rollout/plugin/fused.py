"""The decoder on CUDA: the parameters of `rollout.plugin.model`'s modules in as few passes over memory as can be.

Every sublayer is the same chain: projections (one product for those of one input; all in one launch where rows are
few), preparation of queries, keys, values and relative mixtures with the short convolutions and the pages, attention,
output projection; then one pass for convolution, residual, mixture of blocks and norm, whose output is the next
sublayer's input. Values between kernels have the model's dtype, as in transformers; sums within them are float32. The
modules' own `forward` is the CPU's path and what this is tested against.

Nothing here waits for the device, and which kernels run depends only on what the step's metadata says on the host, so a
step of few rows per request can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rollout.kernels import fallback
from rollout.kernels.cuda import Kernels
from rollout.kernels.units import mixture_dtype
from rollout.plugin.attention import Attention
from rollout.plugin.attn_residual import MIX_EPS
from rollout.plugin.conv_state import DynamicShortConvolution, ShortConvolution
from rollout.plugin.linear import Projection
from rollout.plugin.paging import PagedMetadata

if TYPE_CHECKING:
    from rollout.plugin.model import DecoderLayer, TextModel


class ConvStep:
    """Convolution pages of one layer in this step, and where its rows' earlier inputs lie."""

    def __init__(self, state_BNC: torch.Tensor, sources_TL: torch.Tensor, slots_T: torch.Tensor) -> None:
        self.state, self.sources, self.slots = state_BNC, sources_TL, slots_T


class Residuals:
    """Residual stream of one step: finished blocks and, in the plane after them, the running one."""

    def __init__(self, num_blocks: int, first_TH: torch.Tensor) -> None:
        self.planes = first_TH.new_empty(num_blocks + 1, *first_TH.shape)
        self.planes[0] = first_TH
        self.finished = 0

    def close(self) -> None:
        """Finish the running block; the next one starts in its own plane."""
        self.finished += 1


def forward(
    model: TextModel, kernels: Kernels, hidden_TH: torch.Tensor, positions_T: torch.Tensor,
    metadata: dict[str, PagedMetadata], outputs: dict[int, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Final hidden states of the step's rows [T, H] from embedded tokens, in the model's dtype.

    `outputs` gets what the layers that are its keys give, [T, H].
    """
    layers: list[DecoderLayer] = list(model.layers)  # type: ignore[arg-type]
    residuals = Residuals(-(-len(layers) // model.shape.layers_per_block), hidden_TH)
    sources: dict[int, torch.Tensor] = {}
    inputs_QTH = torch.stack([rms_norm(hidden_TH, norm.weight, layers[0].norm_eps) for norm in layers[0].input_norms])
    for index, (layer, pages, conv) in enumerate(zip(layers, model.cache.attention, model.cache.conv, strict=True)):
        state_BNC, conv_batch = conv.view()[:, 0], metadata[conv.key].batch
        if id(conv_batch) not in sources:
            sources[id(conv_batch)] = kernels.tap_sources(conv_batch, hidden_TH.shape[0], state_BNC.shape[1])
        step = ConvStep(state_BNC, sources[id(conv_batch)], conv_batch.slots)
        if layer.opens_block:
            residuals.close()
        # Under the old name: while the experts run, which takes the most memory, what came before is freed.
        inputs_QTH = conv_mix(
            kernels,
            attend(layer.self_attn, kernels, inputs_QTH, positions_T, step, pages.view(), metadata[pages.key]),
            layer.post_attention_convolution, step, residuals, opens=layer.opens_block,
            queries_QH=layer.mlp_input.query[None], weights_QH=layer.post_attention_layernorm.weight[None],
            eps=layer.norm_eps,
        )  # fmt: skip
        queries_QH, weights_QH = next_input(model, index)
        inputs_QTH = conv_mix(
            kernels, layer.mlp(inputs_QTH[0]), layer.post_mlp_convolution, step, residuals, opens=False,
            queries_QH=queries_QH, weights_QH=weights_QH, eps=layer.norm_eps,
        )  # fmt: skip
        if index in outputs:
            outputs[index] = output(layers, index, residuals.planes[residuals.finished])
    return inputs_QTH[0]


def output(layers: Sequence[DecoderLayer], index: int, running_TH: torch.Tensor) -> torch.Tensor:
    """What a layer gives, to be kept: the last layer of a block leaves its plane to nobody."""
    is_last = index + 1 == len(layers) or layers[index + 1].opens_block
    return running_TH if is_last else running_TH.clone()


def next_input(model: TextModel, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the mixture and weights of the norms [Q, H] of what follows a layer: the next one, or the head."""
    if index + 1 == len(model.layers):
        return model.final_input.query[None], model.norm.weight[None]
    following: DecoderLayer = model.layers[index + 1]  # type: ignore[assignment]
    assert following.attention_input is not None and following.shared_norms is not None
    return following.attention_input.query.view_as(following.shared_norms), following.shared_norms


def conv_mix(
    kernels: Kernels, x_TH: torch.Tensor, conv: ShortConvolution, step: ConvStep, residuals: Residuals, *,
    opens: bool, queries_QH: torch.Tensor, weights_QH: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Inputs of the next sublayer [Q, T, H]; updates the running block, which `x` starts where it `opens` one."""
    out_QTH = x_TH.new_empty(len(queries_QH), *x_TH.shape)
    running_TH = residuals.planes[residuals.finished]
    kernels.conv_mix(
        x_TH, step.state[..., conv.range], step.sources, step.slots, conv.conv1d.weight, None if opens else running_TH,
        residuals.planes[: residuals.finished], queries_QH, weights_QH, MIX_EPS, eps, running_TH, out_QTH, early=True,
    )  # fmt: skip
    return out_QTH


def attend(
    module: Attention, kernels: Kernels, inputs_QTH: torch.Tensor, positions_T: torch.Tensor, step: ConvStep,
    kv_BKNC: torch.Tensor, metadata: PagedMetadata,
) -> torch.Tensor:  # fmt: skip
    """Output of an attention sublayer [T, H] before its short convolution."""
    assert module.shared is not None
    kind, bias = module.kind, module.relative_position_bias
    (q_TC, r_TC, gate_TC, k_TC, v_TC), sink_TN, dynamic = projected(module, kernels, inputs_QTH)
    k_dynamic = v_dynamic = None
    if dynamic is not None:
        k_dynamic, v_dynamic = dynamic.unflatten(-1, (kind.num_kv_heads, -1))
    q_TND = torch.empty(*q_TC.shape[:1], kind.num_heads, kind.head_dim, dtype=q_TC.dtype, device=q_TC.device)
    r_dtype = mixture_dtype(q_TC.dtype)
    r_TNM = torch.empty(*q_TC.shape[:1], *bias.norm.scale.shape, dtype=r_dtype, device=q_TC.device)
    kernels.prepare(
        q_TC, k_TC, v_TC, r_TC, module.q_proj.norm.scale, bias.norm.scale, taps(module.k_proj.sconv),
        taps(module.v_proj.sconv), k_dynamic, v_dynamic, step.state[..., : 2 * k_TC.shape[1]], step.sources,
        step.slots, kv_BKNC, metadata.batch.slots, positions_T, module.q_clip, module.r_clip, module.norm_eps,
        kind.log_scaling, q_TND, r_TNM,
    )  # fmt: skip
    rows = (q_TND.flatten(1), r_TNM.flatten(1), sink_TN, gate_TC)
    attended_TC = over_pages(module, kernels, rows, kv_BKNC, metadata)
    linear = module.o_proj.linear
    if attended_TC.shape[0] <= kernels.few_rows and type(linear) is Projection:
        return kernels.skinny_linear(attended_TC, linear.weight)
    return linear(attended_TC)


def logits(kernels: Kernels, x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int) -> torch.Tensor:
    """Softcapped float32 logits [T, padded_size]; the columns of padding tokens are -inf."""
    few = x_TH.shape[0] <= kernels.few_rows
    return (kernels.skinny_logits if few else kernels.softcap_logits)(x_TH, weight_VH, cap, padded_size)


def taps(conv: ShortConvolution | DynamicShortConvolution) -> torch.Tensor:
    """Static taps as the kernels take them."""
    return conv.static_weight if isinstance(conv, DynamicShortConvolution) else conv.conv1d.weight


def projected(
    module: Attention, kernels: Kernels, inputs_QTH: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]:
    """q, r, gate, k and v, [T, C] each, columns of wider tensors; sinks [T, N]; dynamic taps of k and v [2, T, K L]."""
    modules, shared, sinks_NH = module.projections(), module.shared, module.sink_proj.weight
    assert shared is not None
    adapted = not all(type(linear) is Projection for linear in modules)
    sizes = [linear.output_size for linear in modules]
    if inputs_QTH.shape[1] <= kernels.few_rows and not adapted:
        weights = (shared.inputs, shared.keys_values, sinks_NH, shared.taps)
        whole_TC, sink_TN, dynamic = kernels.skinny_inputs(inputs_QTH, *weights)
        return whole_TC.split(sizes, dim=-1), sink_TN, dynamic
    sink_TN = kernels.project(inputs_QTH[:1], sinks_NH[None])[0]
    dynamic = None if shared.taps is None else kernels.project(inputs_QTH[1:], shared.taps)
    x_TH, k_input_TH, v_input_TH = inputs_QTH if inputs_QTH.shape[0] == 3 else (inputs_QTH[0],) * 3
    if adapted:
        # Each wrapper adds its own product.
        inputs = (x_TH, x_TH, x_TH, k_input_TH, v_input_TH)
        return tuple(linear(x) for linear, x in zip(modules, inputs, strict=True)), sink_TN, dynamic
    whole_TC = F.linear(x_TH, shared.inputs)
    if shared.keys_values is None:
        return whole_TC.split(sizes, dim=-1), sink_TN, dynamic
    keys_values = torch.bmm(inputs_QTH[1:], shared.keys_values.transpose(1, 2))
    return (*whole_TC.split(sizes[:3], dim=-1), *keys_values), sink_TN, dynamic


def over_pages(
    module: Attention, kernels: Kernels, rows: tuple[torch.Tensor, ...], kv_BKNC: torch.Tensor, metadata: PagedMetadata
) -> torch.Tensor:
    """Attention with sink and gate, [T, N D]: requests of few rows through one kernel, those after them the other."""
    kind, dtype = module.kind, rows[0].dtype
    constants = (
        None, None, module.relative_position_bias.proj, module.q_clip, module.r_clip, kind.window, kind.log_scaling,
    )  # fmt: skip
    if metadata.prefill is None:
        queries = metadata.max_queries
        return kernels.decode(*rows, kv_BKNC, metadata.batch, *constants, max_queries=queries, out_dtype=dtype)
    few = metadata.decode_rows
    later = [tensor[few:] for tensor in rows]
    attended_TC = kernels.prefill(*later, kv_BKNC, metadata.prefill, *constants, out_dtype=dtype)
    if few == 0:
        return attended_TC
    first = [tensor[:few] for tensor in rows]
    batch = metadata.batch.first(metadata.decode_requests, few)
    decoded = kernels.decode(*first, kv_BKNC, batch, *constants, max_queries=metadata.max_queries, out_dtype=dtype)
    return torch.cat((decoded, attended_TC))


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight x / rms(x)` in float32, in x's dtype."""
    return F.rms_norm(x_TH.float(), weight_H.shape, weight_H, eps).to(x_TH.dtype)


def reserve(model: TextModel, hidden_TH: torch.Tensor, outputs: dict[int, torch.Tensor]) -> torch.Tensor:
    """What a step of as many rows allocates at once, for vLLM's measurement of memory before there are pages.

    Of attention only memory, for the most requests that a step may have; the experts run. `outputs` are kept, as in a
    step.
    """
    layers: list[DecoderLayer] = list(model.layers)  # type: ignore[arg-type]
    kernels, requests = model.kernels, min(model.max_requests, hidden_TH.shape[0])
    assert kernels is not None
    residuals = Residuals(-(-len(layers) // model.shape.layers_per_block), hidden_TH)
    for layer in {layer.self_attn.kind: layer for layer in layers}.values():
        reserve_attention(layer.self_attn, kernels, hidden_TH, requests)
    mixed_TH = residuals.planes[0].clone()
    outputs |= {index: output(layers, index, residuals.planes[0]) for index in outputs}
    # Rows that Marlin multiplies, of every format: the driver compiles it for most of a minute, now or in a request.
    for layer in dict(zip(model.shape.expert_formats, layers, strict=True)).values():
        layer.mlp(mixed_TH[: kernels.vector_rows + 1])
    return layers[0].mlp(mixed_TH)


def reserve_attention(module: Attention, kernels: Kernels, hidden_TH: torch.Tensor, requests: int) -> None:
    """Hold for a moment what `attend` does at its largest: in a step of requests with few rows and one with many."""
    kind, shared = module.kind, module.shared
    assert shared is not None
    new, rows, channels = hidden_TH.new_empty, hidden_TH.shape[0], kind.num_heads * kind.head_dim
    columns = sum(linear.output_size for linear in module.projections()) - shared.inputs.shape[0]
    float32 = torch.float32
    held = (
        new(1 if shared.taps is None else 3, *hidden_TH.shape),
        F.linear(hidden_TH, shared.inputs), new(rows, columns), new(rows, kind.num_heads, dtype=float32),
        None if shared.taps is None else new(2, rows, shared.taps.shape[1], dtype=float32),
        new(rows, channels), new(rows, channels),
        new(rows, *module.relative_position_bias.norm.scale.shape, dtype=mixture_dtype(hidden_TH.dtype)),
    )  # fmt: skip
    if "decode" not in kernels.fell_back:
        from rollout.kernels.triton_decode import largest_buffers

        largest_buffers(hidden_TH, requests, kind.num_heads, kind.num_kv_heads, kind.head_dim)
    if not kernels.capturable:
        new(4, fallback.SCORES, dtype=float32)
    # Then what few rows and many gave, in one, or the projection of it.
    new(rows, max(channels, hidden_TH.shape[1]))
    del held
