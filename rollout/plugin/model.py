"""Inkling 2's text model inside vLLM: `Inkling2ForCausalLM` and, text only, `Inkling2ForConditionalGeneration`.

Not the vision tower and not the draft model (`rollout.plugin.draft`): their tensors are skipped knowingly when a
checkpoint is loaded. For a draft this model gives out what some of its layers give, and registers its pages. Module
tree and parameter names equal transformers' `Inkling2ForCausalLM` (5.24), so adapters made there fit here; for names
with `model.language_model.` there is a mapper. On the CPU every value between layers is float32, see docs/engine.md; on
CUDA the layers run in `rollout.plugin.fused`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.interfaces import SupportsEagle3, SupportsLoRA
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from inkling_rl.draft.shape import DraftShape
from rollout.kernels import cuda, ops
from rollout.kernels.cuda import Kernels
from rollout.kernels.layout import consecutive
from rollout.plugin import drafting, fused, loader
from rollout.plugin.attention import Attention
from rollout.plugin.attn_residual import BlockStates, ResidualQuery, RMSNormWeight
from rollout.plugin.conv_state import ConvStream, ShortConvolution
from rollout.plugin.draft_config import draft_shape, warn_of_room
from rollout.plugin.experts import SparseMoe
from rollout.plugin.linear import Weight
from rollout.plugin.options import strict_kernels
from rollout.plugin.paging import CachePlan, PagedMetadata
from rollout.plugin.registration import check_active
from rollout.plugin.shape import ModelShape, check_engine


class NormedEmbedding(nn.Module):
    """Token embedding followed by an RMSNorm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size), requires_grad=False)
        self.embed_norm = RMSNormWeight(shape.hidden_size)
        self.eps = shape.norm_eps

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, H]: float32 on the CPU, else in the model's dtype."""
        rows_TH = F.embedding(input_ids_T, self.weight)
        if rows_TH.is_cuda:
            return fused.rms_norm(rows_TH, self.embed_norm.weight, self.eps)
        rows_TH = rows_TH.float()
        return ops.mix_norm(rows_TH[:0], rows_TH, None, self.embed_norm.weight[None], 0.0, self.eps)[0]


class DecoderLayer(nn.Module):
    """Attention and experts, each between a mixture of residual blocks and a short convolution."""

    def __init__(self, shape: ModelShape, layer: int, prefix: str) -> None:
        super().__init__()
        full = shape.is_full[layer]
        kind = shape.attention(layer)
        self.norm_eps = shape.norm_eps
        self.opens_block = layer % shape.layers_per_block == 0
        self.attention_input = ResidualQuery(shape.hidden_size, 3 if full else 1) if layer > 0 else None
        self.mlp_input = ResidualQuery(shape.hidden_size)
        self.self_attn = Attention(shape, layer, f"{prefix}.self_attn")
        self.mlp = SparseMoe(shape, layer)
        self.input_norm_names = ("q_input", "k_input", "v_input") if full else ("input",)
        for name in self.input_norm_names:
            self.add_module(f"{name}_layernorm", RMSNormWeight(shape.hidden_size))
        norms = [norm.weight for norm in self.input_norms]
        self.shared_norms = None if norms[0].is_cpu else consecutive(*norms).view(-1, shape.hidden_size)
        self.post_attention_layernorm = RMSNormWeight(shape.hidden_size)
        kv = 2 * kind.num_kv_heads * kind.head_dim
        self.post_attention_convolution = ShortConvolution(shape.hidden_size, shape.conv_taps, kv)
        self.post_mlp_convolution = ShortConvolution(shape.hidden_size, shape.conv_taps, kv + shape.hidden_size)

    @property
    def input_norms(self) -> tuple[RMSNormWeight, ...]:
        """Norms of the attention's inputs: q, k, v in full layers, one in sliding layers."""
        return tuple(getattr(self, f"{name}_layernorm") for name in self.input_norm_names)

    def forward(
        self,
        running_TH: torch.Tensor,
        blocks: BlockStates,
        stream: ConvStream,
        kv_BKNC: torch.Tensor,
        kv: PagedMetadata,
    ) -> torch.Tensor:
        """Running block after this layer, float32 [T, H]; closes the previous block where a new one opens."""
        inputs_QTH = blocks.mix(running_TH, self.attention_input, self.input_norms, self.norm_eps)
        attended_TH = self.self_attn(inputs_QTH, stream, kv_BKNC, kv.batch)
        if self.opens_block:
            blocks.append(running_TH)
            running_TH = self.post_attention_convolution(attended_TH, stream)
        else:
            running_TH = self.post_attention_convolution(attended_TH, stream, running_TH)
        mixed_QTH = blocks.mix(running_TH, self.mlp_input, (self.post_attention_layernorm,), self.norm_eps)
        return self.post_mlp_convolution(self.mlp(mixed_QTH[0]), stream, running_TH)


class TextModel(nn.Module):
    """Embedding, layers and the final mixture."""

    def __init__(self, shape: ModelShape, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = NormedEmbedding(shape)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, f"{prefix}.layers.{layer}") for layer in range(shape.num_layers)
        )
        self.norm = RMSNormWeight(shape.hidden_size)
        self.final_input = ResidualQuery(shape.hidden_size)
        self.draft = draft_shape(vllm_config)
        """Of the draft that sees some of the layers, None without one."""
        if self.draft is not None:
            warn_of_room(vllm_config)

        self.cache = CachePlan.create(shape, vllm_config, prefix, self.draft)
        self.max_requests: int = vllm_config.scheduler_config.max_num_seqs
        """Of a step."""
        self.kernels: Kernels | None = None
        """On CUDA only."""

    def use(self, kernels: Kernels) -> None:
        """Run on these kernels from now on."""
        self.kernels = kernels
        for layer in self.layers:
            layer.mlp.use(kernels)  # type: ignore[operator, union-attr]

    def forward(
        self, hidden_TH: torch.Tensor, positions_T: torch.Tensor, outputs: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Final hidden states of the step's rows [T, H] in the dtype of `hidden`, from embedded tokens.

        `outputs` gets what the layers that are its keys give, [T, H].
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # Profiling without pages. On the CPU nothing here allocates more than a real step.
            if hidden_TH.is_cuda:
                return fused.reserve(self, hidden_TH, outputs)
            outputs |= dict.fromkeys(outputs, hidden_TH)
            return torch.zeros_like(hidden_TH)
        if hidden_TH.is_cuda:
            assert self.kernels is not None
            return fused.forward(self, self.kernels, hidden_TH, positions_T, metadata, outputs)
        num_blocks = -(-self.shape.num_layers // self.shape.layers_per_block)
        blocks = BlockStates(num_blocks, hidden_TH)
        caches = zip(self.cache.attention, self.cache.conv, strict=True)
        for index, (layer, (attention, conv)) in enumerate(zip(self.layers, caches, strict=True)):
            stream = ConvStream(conv.view(), metadata[conv.key].batch)
            hidden_TH = layer(hidden_TH, blocks, stream, attention.view(), metadata[attention.key])
            if index in outputs:
                outputs[index] = hidden_TH
        return blocks.mix(hidden_TH, self.final_input, (self.norm,), self.shape.norm_eps)[0]


def load_kernels(vllm_config: VllmConfig, shape: ModelShape, draft: DraftShape | None) -> Kernels:
    """The kernels of this GPU; CUDA graphs of whole decode steps, or none where a kernel cannot be captured."""
    from rollout.plugin.device import kernel_sizes

    device = torch.device("cuda", torch.cuda.current_device())
    sizes = kernel_sizes(vllm_config, shape, draft)
    kernels = cuda.load(device, sizes, strict=strict_kernels(vllm_config))
    compilation = vllm_config.compilation_config
    # Nothing here is compiled by torch, so a graph is never cut into pieces.
    mode = (compilation.cudagraph_mode or CUDAGraphMode.NONE).without_piecewise()
    compilation.cudagraph_mode = mode if kernels.capturable else CUDAGraphMode.NONE
    return kernels


class Inkling2ForCausalLM(nn.Module, SupportsLoRA, SupportsEagle3):
    """What vLLM instantiates for both architecture names."""

    # Adapter keys of the full (vision) class carry one more level.
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."})
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check_active()
        check_engine(vllm_config)
        drafting.check_installed(vllm_config)
        loader.check_source(vllm_config.model_config.model, vllm_config.load_config.load_format)
        if current_platform.is_cpu():
            ops.have_native()  # build now rather than in the first request
        self.config = vllm_config.model_config.hf_text_config
        self.shape = ModelShape.from_config(self.config, loader.expert_formats(vllm_config))
        self.model = TextModel(self.shape, vllm_config, f"{prefix}.model".lstrip("."))
        if not current_platform.is_cpu():
            self.model.use(load_kernels(vllm_config, self.shape, self.model.draft))
        self.tapped: tuple[int, ...] = ()
        """Layers whose outputs a draft sees."""
        dtype = vllm_config.model_config.dtype
        self.lm_head = Weight(self.shape.unpadded_vocab_size, self.shape.hidden_size, dtype=dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Normed embeddings [T, H]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, H], float32 on the CPU; with a draft, the outputs of the layers that it sees beside them.

        Positions follow from the page tables on a CPU and are not used.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        outputs = dict.fromkeys(self.tapped, inputs_embeds)
        hidden_states = self.model(inputs_embeds, positions, outputs)
        return (hidden_states, list(outputs.values())) if outputs else hidden_states

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Part of vLLM's interface for drafts: layer n + 1 there stands for the output of layer n."""
        self.tapped = tuple(layer - 1 for layer in layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """A draft always names its layers."""
        raise AssertionError("the draft's config names no target layers")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Softcapped float32 logits [T, vocab_size]; the columns of padding tokens are -inf."""
        shape, kernels = self.shape, self.model.kernels
        arguments = (hidden_states, self.lm_head.weight, shape.logit_cap, shape.vocab_size)
        return ops.softcap_logits(*arguments) if kernels is None else fused.logits(kernels, *arguments)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load release or transformers names; see `rollout.plugin.loader`."""
        return loader.load(self, weights)
