"""A slice of Inkling 2 Small as a directory that vLLM starts from with dummy weights: config files and no tensors.

At the release's width (hidden 4608, 48/8 heads of 128, 384 experts of 2304, its whole vocabulary) with 12 of its 48
layers, in its proportions: one full layer after five sliding ones, ten layers of NVFP4 experts and then two of MXFP8.
Not the release: two blocks of residuals instead of eight, so mixtures have at most 3 sources instead of 9.

Source of the numbers: transformers 5.24's defaults for the class named after the release; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inkling_rl.checkpoint.layout import expert_formats, quantized_layers
from inkling_rl.checkpoint.tiny import tiny_config
from inkling_rl.draft.shape import STANDALONE_MODEL_TYPE
from inkling_rl.formats import ExpertFormat
from rollout.plugin.shape import ModelShape

NUM_LAYERS = 12
LAYERS_PER_FULL = 6
MXFP8_SHARE = 6
"""One layer in so many has MXFP8 experts: the release's last 8 of 48."""

_HEADS = {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}
RELEASE: dict[str, Any] = {
    "model_type": "inkling2_text",
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "hidden_size": 4608,
    "n_layers_per_attn_res_block": 6,
    **_HEADS,
    **{f"swa_{key}": value for key, value in _HEADS.items()},
    "sliding_window_size": 1024,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "qk_l2_clip_threshold": 22.627416997969522,
    "rel_l2_clip_threshold": 8.0,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "conv_kernel_size": 4,
    "hidden_act": "silu",
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "route_scale": 8.0,
    "scoring_func": "sigmoid",
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
    "final_logit_softcapping": 30.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 200006,
    "pad_token_id": None,
    "use_cache": True,
}
"""The release's text config but for its layers."""


def layer_types(num_layers: int) -> list[str]:
    """The last of every six attends to everything; a slice of fewer layers ends with one that does."""
    is_full = [(layer + 1) % LAYERS_PER_FULL == 0 for layer in range(num_layers)]
    is_full[-1] = True
    return ["hybrid" if full else "hybrid_sliding" for full in is_full]


def formats(num_layers: int) -> list[ExpertFormat]:
    """NVFP4, and for the last sixth of the layers (at least one) MXFP8."""
    eight_bit = max(1, num_layers // MXFP8_SHARE)
    return ["nvfp4"] * (num_layers - eight_bit) + ["mxfp8"] * eight_bit


def slice_config(num_layers: int = NUM_LAYERS, small: bool = False) -> dict[str, Any]:
    """config.json of the text model; `small`: the tiny model's width, for trying the scripts themselves."""
    text = dict(tiny_config()["text_config"]) if small else dict(RELEASE)
    text |= {"num_hidden_layers": num_layers, "layer_types": layer_types(num_layers)}
    if small:
        # Room for contexts that cross the window many times.
        text |= {"max_position_embeddings": 1 << 20, "n_layers_per_attn_res_block": min(3, num_layers)}
    return {"architectures": ["Inkling2ForCausalLM"], "dtype": "bfloat16", **text}


def slice_quant_config(num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """hf_quant_config.json, in ModelOpt's form for mixed precision."""
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["model.llm.embed", "model.llm.unembed"],
            "quantized_layers": quantized_layers(formats(num_layers)),
        },
    }


def write_slice(path: Path, num_layers: int = NUM_LAYERS, small: bool = False) -> Path:
    """Write both files into a directory, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    files = {"config.json": slice_config(num_layers, small), "hf_quant_config.json": slice_quant_config(num_layers)}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def draft_config(text: dict[str, Any]) -> dict[str, Any]:
    """config.json of a draft for a slice: of the size that is proposed for the release, with five taps.

    Source: nothing is public but five layers, seven tokens and the RNN; the rest follows DSpark's and the target's.
    """
    layers, heads = text["num_hidden_layers"], ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["Inkling2DSparkModel"],
        "model_type": STANDALONE_MODEL_TYPE,
        "dtype": "bfloat16",
        **{key: text[key] for key in ("hidden_size", "vocab_size", "rms_norm_eps", *heads)},
        "num_target_layers": layers,
        "num_hidden_layers": 5,
        "intermediate_size": text["hidden_size"],
        "rope_theta": 1e6,
        "block_size": 7,
        "mask_token_id": text["unpadded_vocab_size"],
        "markov_rank": 256 if text["hidden_size"] > 1024 else 16,
        "markov_head_type": "rnn",
        "target_layer_ids": sorted({round((layers - 1) * place / 5) for place in range(1, 6)}),
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def write_draft(path: Path, num_layers: int = NUM_LAYERS, small: bool = False) -> Path:
    """Write a draft's config.json for a slice into a directory, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    config = draft_config(slice_config(num_layers, small))
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return path


def slice_shape(path: Path) -> ModelShape:
    """Sizes of a written slice, as the engine reads them."""
    from transformers import Inkling2TextConfig

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    quant = json.loads((path / "hf_quant_config.json").read_text(encoding="utf-8"))
    return ModelShape.from_config(Inkling2TextConfig(**config), expert_formats(quant, config))
