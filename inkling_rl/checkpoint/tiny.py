"""The tiny Inkling 2: every mechanism of the big one in 3.2 M text parameters.

Six layers in two blocks of three, sliding and full attention, a window shorter than a prompt, relative bias beyond it,
log-length scaling from position 16, NVFP4 experts in layers 0-4 and MXFP8 in layer 5, a DSpark draft and a vision
tower. Hidden size and head size also satisfy what GPU kernels need (hidden % 64, head_dim >= 16).

Random weights are chosen to be *alive* (no query, tap, bias or gate is zero, some heads clip, softcaps bend) and *calm*
(experts of a layer share most of their weights), so that bfloat16 noise is not multiplied by experts changing places.
Not a trained model: `trainer.pretrain` makes one from these tensors.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import torch

from inkling_rl import byte_tokenizer
from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.writer import export_release
from inkling_rl.formats import mixed

NUM_LAYERS = 6
NUM_NVFP4_LAYERS = 5
MAX_SHARD_BYTES = 2 * 10**6  # several shards, so that the index is exercised


def tiny_config() -> dict[str, Any]:
    """config.json of the tiny model (full class, draft keys included)."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16}
    text = {
        "model_type": "inkling2_text",
        "vocab_size": byte_tokenizer.VOCAB_SIZE,
        "unpadded_vocab_size": byte_tokenizer.UNPADDED_VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "n_layers_per_attn_res_block": 3,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"] * 2,
        **heads,
        **{f"swa_{key}": value for key, value in heads.items()},
        "sliding_window_size": 8,
        "d_rel": 16,
        "rel_extent": 16,
        "log_scaling_n_floor": 16,
        "log_scaling_alpha": 0.1,
        "qk_l2_clip_threshold": 8.0,
        "rel_l2_clip_threshold": 8.0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "conv_kernel_size": 4,
        "hidden_act": "silu",
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "route_scale": 8.0,
        "scoring_func": "sigmoid",
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "final_logit_softcapping": 30.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": byte_tokenizer.EOS_TOKEN_ID,
        "pad_token_id": byte_tokenizer.PAD_TOKEN_ID,
        "use_cache": True,
    }
    vision = {
        "model_type": "inkling2_vision",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "posemb_grid_size": 4,
        "mlp_ratio": 4.0,
        "intermediate_size": 128,
        "projection_hidden_dim": 64,
        "projector_bias": False,
        "text_hidden_size": 128,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "layer_scale_init_value": 0.1,
    }
    draft = {
        "block_size": 7,
        "num_hidden_layers": 2,
        **heads,
        "intermediate_size": 128,
        "rope_theta": 1e6,
        "target_layer_ids": [2, 5],
        "markov_rank": 16,
        "markov_head_type": "rnn",
        "noise_token_id": byte_tokenizer.MASK_TOKEN_ID,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {
        "architectures": ["Inkling2ForConditionalGeneration"],
        "model_type": "inkling2",
        "dtype": "bfloat16",
        "image_token_id": byte_tokenizer.IMAGE_TOKEN_ID,
        "eos_token_id": byte_tokenizer.EOS_TOKEN_ID,
        "text_config": text,
        "vision_config": vision,
        **{f"dspark_{key}": value for key, value in draft.items()},
    }


def tiny_quant_config() -> dict[str, Any]:
    """hf_quant_config.json of the tiny model, in ModelOpt's form for mixed precision."""
    entries = [("NVFP4", 16)] * NUM_NVFP4_LAYERS + [("MXFP8", 32)] * (NUM_LAYERS - NUM_NVFP4_LAYERS)
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["model.llm.embed", "model.llm.unembed", "model.visual*", "model.dspark*"],
            "quantized_layers": {
                layout.experts_prefix(layer): {"quant_algo": algo, "group_size": group}
                for layer, (algo, group) in enumerate(entries)
            },
        },
    }


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Release name -> float32 tensor of the BF16 view: text (w13 interleaved), vision tower, draft.

    Every tensor is drawn from its own generator, seeded by `seed` and the tensor's name.
    """
    config = tiny_config()
    shapes = {name: spec.shape for name, spec in layout.text_tensors(config).items()}
    shapes |= layout.vision_shapes(config["vision_config"]) | layout.draft_shapes(config)
    tensors = {}
    for name, shape in shapes.items():
        # torch's CPU generator keeps the low 32 bits of a seed only, so both are mixed there (odd factor: bijective).
        mixed_seed = zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)
        generator = torch.Generator().manual_seed(mixed_seed)
        tensors[name] = _draw(name, shape, generator)
    tensors["model.llm.unembed.weight"][byte_tokenizer.UNPADDED_VOCAB_SIZE :] = 0
    return tensors


def text_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text part of `random_tensors` as a state dict of transformers' `Inkling2ForCausalLM`."""
    state = {}
    for name in layout.text_tensors(tiny_config()):
        value = tensors[name]
        if name.endswith("w13_weight"):
            value = mixed.deinterleave(value)
        elif name.endswith("unembed.weight"):
            value = value[: byte_tokenizer.UNPADDED_VOCAB_SIZE]
        state[layout.hf_name(name)] = value
    return state


def write_tiny(path: str | Path, seed: int = 0) -> Path:
    """Write the random tiny model as a release checkpoint with its tokenizer, see `write_checkpoint` for errors."""
    tensors = random_tensors(seed)
    extra = {name: value for name, value in tensors.items() if not name.startswith(layout.TEXT_PREFIX)}
    return export_release(
        path,
        tiny_config(),
        tiny_quant_config(),
        text_state(tensors),
        extra,
        byte_tokenizer.tokenizer_files(),
        max_shard_bytes=MAX_SHARD_BYTES,
    )


EXPERT_SPREAD = 0.3
# First match wins. The number is the standard deviation of the output for inputs of deviation 1 (`fan`), or of the
# tensor itself (`std`); `norm` is 1 plus a tenth of noise; `ramp` is a scale per head from 0.5 to 2.5, so that the
# upper heads meet the clip.
_RULES: tuple[tuple[str, str, float], ...] = (
    (r"embed\.weight$", "std", 0.1),
    (r"attn_res\.", "std", 1.0),
    (r"l2_clip\.scale$", "ramp", 0.1),
    (r"rel_logits_proj\.proj$", "std", 0.15),
    (r"weight_proj$", "fan", 0.3),
    (r"sconv\.(weight|static_w)$", "std", 0.3),
    (r"mlp\.gate\.bias$", "std", 0.1),
    (r"mlp\.gate\.weight$", "fan", 2.0),
    (r"w13_weight$", "expert", 2.0),
    (r"w2_weight$", "expert", 0.02),
    (r"wo_ud\.weight$", "fan", 4.0),
    (r"unembed\.weight$", "fan", 1.5),
    (r"(norm\d?|norms?|ln_pre|ln_\d)\.weight$", "norm", 0.1),
    (r"gamma$", "std", 0.1),
    (r"(bias|class_embedding|position_embedding)$", "std", 0.02),
    (r"", "fan", 1.0),
)


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    kind, size = next((kind, size) for pattern, kind, size in _RULES if re.search(pattern, name))
    noise = torch.randn(shape, generator=generator)
    if kind == "expert":
        common = torch.randn((1, *shape[1:]), generator=generator)
        return (common + EXPERT_SPREAD * noise) * (size / shape[-1] ** 0.5)
    if kind == "fan":
        return noise * (size / shape[-1] ** 0.5)
    if kind == "norm":
        return 1 + size * noise
    if kind == "ramp":
        return torch.linspace(0.5, 2.5, shape[0])[:, None] * (1 + size * noise)
    return size * noise
