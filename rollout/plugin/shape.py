"""Sizes and constants of one Inkling 2 text model, read from its transformers config, and what this engine refuses.

Not a config class: transformers 5.24 knows `inkling2` and `inkling2_text`, so vLLM reads config.json itself. Here every
number that the modules need is named once and checked, so that an unsupported model or setting ends in one sentence at
start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inkling_rl.formats import ExpertFormat

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
# The C++ kernels keep one head in registers or on the stack; Triton's dot wants 16, the release uses 128.
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128, 256)
SUPPORTED_CONV_TAPS = 4


class EngineError(ValueError):
    """A model or an engine setting that this engine cannot run. The message is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rel_extent: int
    window: int | None
    log_scaling: tuple[float, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything the modules need to know about a model."""

    hidden_size: int
    num_layers: int
    is_full: tuple[bool, ...]
    layers_per_block: int
    full: AttentionShape
    sliding: AttentionShape
    conv_taps: int
    d_rel: int
    q_clip: float
    r_clip: float
    num_experts: int
    experts_per_token: int
    expert_width: int
    route_scale: float
    gate_cap: float
    up_cap: float
    logit_cap: float
    vocab_size: int
    unpadded_vocab_size: int
    norm_eps: float
    expert_formats: tuple[ExpertFormat, ...]
    """How each layer's experts are stored."""

    def attention(self, layer: int) -> AttentionShape:
        """The attention of a layer."""
        return self.full if self.is_full[layer] else self.sliding

    @classmethod
    def from_config(cls, config: Any, expert_formats: Sequence[ExpertFormat] | None = None) -> ModelShape:
        """Read a transformers `Inkling2TextConfig`; experts are bfloat16 unless their formats are given.

        Raises:
            EngineError: a value that the kernels do not cover.
        """
        full = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rel_extent=config.rel_extent,
            window=None,
            log_scaling=(config.log_scaling_alpha, config.log_scaling_n_floor),
        )
        sliding = AttentionShape(
            num_heads=config.swa_num_attention_heads,
            num_kv_heads=config.swa_num_key_value_heads,
            head_dim=config.swa_head_dim,
            rel_extent=config.sliding_window_size,
            window=config.sliding_window_size,
            log_scaling=None,
        )
        _require("scoring_func", config.scoring_func == "sigmoid", "sigmoid", config.scoring_func)
        _require("conv_kernel_size", config.conv_kernel_size == SUPPORTED_CONV_TAPS, "4", config.conv_kernel_size)
        for name, shape in (("head_dim", full), ("swa_head_dim", sliding)):
            allowed = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
            _require(name, shape.head_dim in SUPPORTED_HEAD_DIMS, f"one of {allowed}", shape.head_dim)
            _require(
                name.replace("head_dim", "num_attention_heads"),
                shape.num_heads % shape.num_kv_heads == 0,
                f"a multiple of the {shape.num_kv_heads} key/value heads",
                shape.num_heads,
            )
        # The kernels run over whole vectors of channels.
        for name in ("d_rel", "moe_intermediate_size"):
            _require(name, getattr(config, name) % 16 == 0, "a multiple of 16", getattr(config, name))
        kinds = set(config.layer_types)
        _require("layer_types", kinds <= {"hybrid", "hybrid_sliding"}, "hybrid or hybrid_sliding", sorted(kinds))
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            is_full=tuple(kind == "hybrid" for kind in config.layer_types),
            layers_per_block=config.n_layers_per_attn_res_block,
            full=full,
            sliding=sliding,
            conv_taps=config.conv_kernel_size,
            d_rel=config.d_rel,
            q_clip=config.qk_l2_clip_threshold,
            r_clip=config.rel_l2_clip_threshold,
            num_experts=config.n_routed_experts,
            experts_per_token=config.num_experts_per_tok,
            expert_width=config.moe_intermediate_size,
            route_scale=config.route_scale,
            gate_cap=config.mlp_gate_softcap,
            up_cap=config.mlp_up_softcap,
            logit_cap=config.final_logit_softcapping,
            vocab_size=config.vocab_size,
            unpadded_vocab_size=config.unpadded_vocab_size,
            norm_eps=config.rms_norm_eps,
            expert_formats=tuple(expert_formats or ["bf16"] * config.num_hidden_layers),
        )


def check_engine(vllm_config: Any) -> None:
    """Refuse engine settings that would compute something else than the model.

    Raises:
        EngineError: dtype, block size, parallelism or GPU that the plugin does not cover.
    """
    from rollout.plugin.device import check_device

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    _require("dtype", model.dtype in SUPPORTED_DTYPES, "float32 or bfloat16", model.dtype)
    _require("kv_cache_dtype", cache.cache_dtype in ("auto", "bfloat16"), "auto or bfloat16", cache.cache_dtype)
    # Experts are dequantised as their format says; anything else that is asked for would be left out without a word.
    _require("quantization", not model.quantization, "left unset (the checkpoint decides)", model.quantization)
    block = cache.block_size
    _require("block_size", block >= 16 and block & (block - 1) == 0, "a power of two of 16 or more", block)
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    _require("tensor_parallel_size x pipeline_parallel_size", sizes == (1, 1), "1 x 1", f"{sizes[0]} x {sizes[1]}")
    check_device(vllm_config)


def _require(name: str, holds: bool, requirement: str, value: object) -> None:
    if not holds:
        raise EngineError(f"{name} must be {requirement} for Inkling 2; got {value}. Change it or use another engine")
