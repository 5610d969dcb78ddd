"""Names, shapes and dtypes of a release checkpoint, as tables.

What a directory with a given config.json and hf_quant_config.json must hold, and what each text tensor is called in
transformers' `Inkling2ForCausalLM`. Not here: reading, writing, arithmetic; nothing imports torch, so that a recipe can
be validated before anything heavy is loaded.

Source: transformers 5.24 `conversion_mapping` for `inkling2` and `inkling2_text` (proved by a test against
save_pretrained), the public description of the quantised release. The draft's names are not public: they are those of
DeepSpec under the prefix `model.dspark.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inkling_rl.formats import ExpertFormat

Config = Mapping[str, Any]
EXPERT_MATRICES = ("w13_weight", "w2_weight")
TEXT_PREFIX = "model.llm."
_QUANT_ALGOS: dict[str, ExpertFormat] = {"NVFP4": "nvfp4", "MXFP8": "mxfp8"}
_GROUP_SIZES = {"nvfp4": 16, "mxfp8": 32}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file or tensor, the requirement, what was got."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is stored under one name."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name: bfloat16, float32, uint8, float8_e4m3fn."""


# Release suffix -> suffix in transformers' text class. `embed` and the rest of the top level, then one layer.
TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "embed_norm.weight": "model.embed_tokens.embed_norm.weight",
    "norm.weight": "model.norm.weight",
    "unembed.weight": "lm_head.weight",
    "attn_res.output_query": "model.final_input.query",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "q_input_norm.weight": "q_input_layernorm.weight",
    "k_input_norm.weight": "k_input_layernorm.weight",
    "v_input_norm.weight": "v_input_layernorm.weight",
    "attn.wq_du.weight": "self_attn.q_proj.linear.weight",
    "attn.q_l2_clip.scale": "self_attn.q_proj.norm.scale",
    "attn.wk_dv.weight": "self_attn.k_proj.linear.weight",
    "attn.k_sconv.weight": "self_attn.k_proj.sconv.conv1d.weight",
    "attn.k_sconv.static_w": "self_attn.k_proj.sconv.static_weight",
    "attn.k_sconv.weight_proj": "self_attn.k_proj.sconv.weight_proj.weight",
    "attn.wv_dv.weight": "self_attn.v_proj.linear.weight",
    "attn.v_sconv.weight": "self_attn.v_proj.sconv.conv1d.weight",
    "attn.v_sconv.static_w": "self_attn.v_proj.sconv.static_weight",
    "attn.v_sconv.weight_proj": "self_attn.v_proj.sconv.weight_proj.weight",
    "attn.wr_du.weight": "self_attn.relative_position_bias.linear.weight",
    "attn.rel_l2_clip.scale": "self_attn.relative_position_bias.norm.scale",
    "attn.rel_logits_proj.proj": "self_attn.relative_position_bias.proj",
    "attn.attn_sink_proj.weight": "self_attn.sink_proj.weight",
    "attn.gate_attn.weight": "self_attn.o_proj.gate_proj.weight",
    "attn.wo_ud.weight": "self_attn.o_proj.linear.weight",
    "attn_sconv.weight": "post_attention_convolution.conv1d.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
    "mlp.experts.w13_weight": "mlp.experts.gate_up_proj",
    "mlp.experts.w2_weight": "mlp.experts.down_proj",
    "mlp_sconv.weight": "post_mlp_convolution.conv1d.weight",
}
# Kept in float32 whatever the model's dtype: routing, residual queries and the static convolutions.
_FLOAT32 = re.compile(r"attn_res\.|mlp\.gate\.|sconv\.weight$")


def hf_name(release_name: str) -> str:
    """Name of a text tensor in transformers' `Inkling2ForCausalLM`.

    Raises:
        CheckpointError: the name is no text tensor of the release (a companion, the draft, the vision tower).
    """
    suffix = release_name.removeprefix(TEXT_PREFIX)
    if suffix != release_name:
        if suffix in TOP_NAMES:
            return TOP_NAMES[suffix]
        if match := re.fullmatch(r"attn_res\.attn_queries\.(\d+)", suffix):
            return f"model.layers.{int(match[1]) + 1}.attention_input.query"
        if match := re.fullmatch(r"attn_res\.mlp_queries\.(\d+)", suffix):
            return f"model.layers.{match[1]}.mlp_input.query"
        if (match := re.fullmatch(r"layers\.(\d+)\.(.+)", suffix)) and match[2] in LAYER_NAMES:
            return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}"
    raise CheckpointError(f"{release_name} must be a text tensor of the release; got another name. Rename or drop it")


def text_config(config: Config) -> Config:
    """The text part of a full config, or the config itself when it is a text config."""
    return config.get("text_config") or config


def is_float32(release_name: str) -> bool:
    """Whether the release keeps this text tensor in float32."""
    return release_name.startswith(TEXT_PREFIX) and _FLOAT32.search(release_name) is not None


def layer_of_experts(release_name: str) -> int | None:
    """Layer whose experts (weights or companions) a tensor belongs to, or None."""
    match = re.match(r"model\.llm\.layers\.(\d+)\.mlp\.experts\.", release_name)
    return int(match[1]) if match else None


def experts_prefix(layer: int) -> str:
    return f"{TEXT_PREFIX}layers.{layer}.mlp.experts"


def text_tensors(config: Config) -> dict[str, TensorSpec]:
    """Release name -> shape and dtype of the text model with experts in the model's dtype (the BF16 view).

    Raises:
        CheckpointError: a key that decides a shape is missing from the config, or a layer type is unknown.
    """
    text = text_config(config)
    hidden, layers, vocab = (_get(text, key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, hidden), "embed_norm.weight": (hidden,)}
    types = _layer_types(text, layers)
    for layer in range(1, layers):
        sources = (hidden,) if types[layer] == "hybrid_sliding" else (3, hidden)
        shapes[f"attn_res.attn_queries.{layer - 1}"] = sources
    shapes |= {f"attn_res.mlp_queries.{layer}": (hidden,) for layer in range(layers)}
    for layer, layer_type in enumerate(types):
        shapes |= {f"layers.{layer}.{k}": v for k, v in _layer_shapes(text, layer_type == "hybrid_sliding").items()}
    shapes |= {"attn_res.output_query": (hidden,), "norm.weight": (hidden,), "unembed.weight": (vocab, hidden)}
    ordinary = _ordinary_dtype(config)
    return {
        (name := TEXT_PREFIX + suffix): TensorSpec(shape, "float32" if is_float32(name) else ordinary)
        for suffix, shape in shapes.items()
    }


def expert_formats(quant: Config | None, config: Config) -> list[ExpertFormat]:
    """Format of every layer's experts, from hf_quant_config.json (`None`: no quantisation).

    Raises:
        CheckpointError: an unknown algorithm or group size, or an entry that is no layer's experts.
    """
    layers = _get(text_config(config), "num_hidden_layers")
    formats: list[ExpertFormat] = ["bf16"] * layers
    if quant is None:
        return formats
    section = quant.get("quantization", quant)
    where = "hf_quant_config.json:quantization"
    algo = section.get("quant_algo")
    if algo in _QUANT_ALGOS:
        entries = {experts_prefix(layer): section for layer in range(layers)}
    elif algo == "MIXED_PRECISION":
        entries = section.get("quantized_layers") or {}
    else:
        raise CheckpointError(
            f"{where}.quant_algo must be MIXED_PRECISION, NVFP4 or MXFP8; got {algo!r}. Convert the checkpoint"
        )
    for prefix, entry in entries.items():
        layer = layer_of_experts(f"{prefix}.")
        if layer is None or layer >= layers or prefix != experts_prefix(layer):
            raise CheckpointError(
                f"{where}.quantized_layers must name the experts of layers 0-{layers - 1} ({experts_prefix(0)}); "
                f"got {prefix!r}. Only routed experts are quantised"
            )
        formats[layer] = _format_tag(entry, f"{where}.quantized_layers.{prefix}")
    return formats


def quantized_layers(formats: Sequence[ExpertFormat]) -> dict[str, dict[str, Any]]:
    """The entries of hf_quant_config.json for these formats, one per layer; the inverse of `expert_formats`."""
    algos = {tag: algo for algo, tag in _QUANT_ALGOS.items()}
    return {
        experts_prefix(layer): {"quant_algo": algos[tag], "group_size": _GROUP_SIZES[tag]}
        for layer, tag in enumerate(formats)
        if tag != "bf16"
    }


def release_tensors(config: Config, quant: Config | None) -> dict[str, TensorSpec]:
    """Release name -> shape and dtype of everything stored: text, quantised experts, vision tower, draft.

    The vision tower is expected when the config has a `vision_config`, the draft when it has `dspark_*` keys.
    """
    specs: dict[str, TensorSpec] = {}
    formats = expert_formats(quant, config)
    for name, spec in text_tensors(config).items():
        layer = layer_of_experts(name)
        specs |= {name: spec} if layer is None else expert_specs(name, spec, formats[layer])
    ordinary = _ordinary_dtype(config)
    if config.get("vision_config"):
        specs |= {k: TensorSpec(v, ordinary) for k, v in vision_shapes(config["vision_config"]).items()}
    if "dspark_block_size" in config:
        specs |= {k: TensorSpec(v, ordinary) for k, v in draft_shapes(config).items()}
    return specs


def expert_specs(name: str, spec: TensorSpec, expert_format: ExpertFormat) -> dict[str, TensorSpec]:
    """Stored tensors of one expert matrix `[E, N, K]`, by format."""
    experts, rows, columns = spec.shape
    if expert_format == "bf16":
        return {name: spec}
    group = _GROUP_SIZES[expert_format]
    if columns % group:
        raise CheckpointError(
            f"{name} must have a multiple of {group} columns to be stored as {expert_format}; got {columns}. "
            "Change its format in hf_quant_config.json"
        )
    scale = (experts, rows, columns // group)
    if expert_format == "mxfp8":
        return {name: TensorSpec(spec.shape, "float8_e4m3fn"), f"{name}_scale": TensorSpec(scale, "uint8")}
    return {
        name: TensorSpec((experts, rows, columns // 2), "uint8"),
        f"{name}_scale": TensorSpec(scale, "float8_e4m3fn"),
        f"{name}_amax": TensorSpec((experts,), "float32"),
        f"{name}_outer_scale_denominator": TensorSpec((), "float32"),
    }


def vision_shapes(vision: Config) -> dict[str, tuple[int, ...]]:
    """`model.visual.*` of a vision_config."""
    keys = ("hidden_size", "patch_size", "num_channels", "posemb_grid_size", "num_hidden_layers", "spatial_merge_size")
    hidden, patch, channels, grid, layers, merge = (_get(vision, key, "vision_config") for key in keys)
    wide = vision.get("intermediate_size") or int(hidden * _get(vision, "mlp_ratio", "vision_config"))
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.patch_embedding.weight": (hidden, channels * patch**2),
        "backbone.embeddings.position_embedding": (grid**2, hidden),
        "backbone.embeddings.class_embedding": (hidden,),
        "backbone.embeddings.cls_position_embedding": (hidden,),
        "backbone.ln_pre.weight": (hidden,),
        "backbone.ln_pre.bias": (hidden,),
    }
    matrices = {f"self_attn.{p}_proj": (hidden, hidden) for p in ("q", "k", "v", "out")}
    matrices |= {"mlp.c_fc": (wide, hidden), "mlp.c_proj": (hidden, wide)}
    for layer in range(layers):
        prefix = f"backbone.layers.{layer}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{prefix}{norm}.weight": (hidden,), f"{prefix}{norm}.bias": (hidden,)}
        for matrix, (rows, columns) in matrices.items():
            shapes |= {f"{prefix}{matrix}.weight": (rows, columns), f"{prefix}{matrix}.bias": (rows,)}
        shapes |= {f"{prefix}ls_1.gamma": (hidden,), f"{prefix}ls_2.gamma": (hidden,)}
    projection, text_hidden = (_get(vision, k, "vision_config") for k in ("projection_hidden_dim", "text_hidden_size"))
    shapes |= {"proj_in.weight": (projection, merge**2 * hidden), "proj_out.weight": (text_hidden, projection)}
    if vision.get("projector_bias"):
        shapes |= {"proj_in.bias": (projection,), "proj_out.bias": (text_hidden,)}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def draft_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """`model.dspark.*` of the DSpark draft that the config's `dspark_*` keys describe (RNN head)."""
    text = text_config(config)
    hidden, vocab = _get(text, "hidden_size"), _get(text, "vocab_size")
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    layers, heads, kv_heads, head_dim, wide = (_get(config, f"dspark_{key}", "") for key in keys)
    rank, taps = _get(config, "dspark_markov_rank", ""), _get(config, "dspark_target_layer_ids", "")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,)}
    for layer in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads * head_dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (hidden, heads * head_dim),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
        "markov_head.joint_proj.bias": (3 * rank,),
    }
    if config.get("dspark_enable_confidence_head"):
        features = hidden + (rank if config.get("dspark_confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, features), "confidence_head.proj.bias": (1,)}
    return {f"model.dspark.{name}": shape for name, shape in shapes.items()}


def _layer_shapes(text: Config, sliding: bool) -> dict[str, tuple[int, ...]]:
    hidden, wide, experts = (_get(text, k) for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    d_rel, taps = _get(text, "d_rel"), _get(text, "conv_kernel_size")
    swa = "swa_" if sliding else ""
    heads, kv_heads, head_dim = (
        _get(text, swa + k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    extent = _get(text, "sliding_window_size" if sliding else "rel_extent")
    width, kv_width = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("attn_norm",) if sliding else ("q_input_norm", "k_input_norm", "v_input_norm"):
        shapes[f"{norm}.weight"] = (hidden,)
    shapes |= {"attn.wq_du.weight": (width, hidden), "attn.q_l2_clip.scale": (heads, head_dim)}
    for stream in ("k", "v"):
        shapes[f"attn.w{stream}_dv.weight"] = (kv_width, hidden)
        if sliding:
            shapes[f"attn.{stream}_sconv.weight"] = (kv_width, 1, taps)
        else:
            shapes[f"attn.{stream}_sconv.static_w"] = (taps, kv_width)
            shapes[f"attn.{stream}_sconv.weight_proj"] = (kv_heads * taps, hidden)
    return shapes | {
        "attn.wr_du.weight": (heads * d_rel, hidden),
        "attn.rel_l2_clip.scale": (heads, d_rel),
        "attn.rel_logits_proj.proj": (d_rel, extent),
        "attn.attn_sink_proj.weight": (heads, hidden),
        "attn.gate_attn.weight": (width, hidden),
        "attn.wo_ud.weight": (hidden, width),
        "attn_sconv.weight": (hidden, 1, taps),
        "mlp_norm.weight": (hidden,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.bias": (experts,),
        "mlp.experts.w13_weight": (experts, 2 * wide, hidden),
        "mlp.experts.w2_weight": (experts, hidden, wide),
        "mlp_sconv.weight": (hidden, 1, taps),
    }


def _layer_types(text: Config, layers: int) -> list[str]:
    types: list[str] = list(_get(text, "layer_types"))
    unknown = set(types) - {"hybrid_sliding", "hybrid"}
    if unknown or len(types) != layers:
        raise CheckpointError(
            f"config.json:text_config.layer_types must be {layers} of hybrid_sliding and hybrid; got {types}. "
            "Spell them as transformers does"
        )
    return types


def _format_tag(entry: Config, where: str) -> ExpertFormat:
    algo = entry.get("quant_algo")
    if algo not in _QUANT_ALGOS:
        raise CheckpointError(f"{where}.quant_algo must be NVFP4 or MXFP8; got {algo!r}. Convert the checkpoint")
    expert_format = _QUANT_ALGOS[algo]
    group = entry.get("group_size", _GROUP_SIZES[expert_format])
    if group != _GROUP_SIZES[expert_format]:
        raise CheckpointError(
            f"{where}.group_size must be {_GROUP_SIZES[expert_format]} for {algo}; got {group}. Convert the checkpoint"
        )
    return expert_format


def _ordinary_dtype(config: Config) -> str:
    dtype = config.get("dtype") or text_config(config).get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float32"):
        raise CheckpointError(f"config.json:dtype must be bfloat16 or float32; got {dtype!r}. Convert the checkpoint")
    return str(dtype)


def _get(section: Config, key: str, where: str = "text_config") -> Any:
    path = f"{where}.{key}" if where else key
    if key not in section:
        raise CheckpointError(f"config.json:{path} must be set; got nothing. Copy it from the model's config")
    value, is_list = section[key], key in ("layer_types", "dspark_target_layer_ids")
    if not (isinstance(value, list) if is_list else type(value) in (int, float) and value > 0):
        raise CheckpointError(
            f"config.json:{path} must be {'a list' if is_list else 'a number above 0'}; got {value!r}. "
            "Copy it from the model's config"
        )
    return section[key]
