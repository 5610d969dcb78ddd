"""What an adapter may touch: a table from target name to module and shape, and the names of its tensors.

Module names are those of transformers' text class `Inkling2ForCausalLM` (`model.layers.N.self_attn...`), which the
engine's module tree repeats, so one key serves PEFT, the trainer and the engine. Every module is addressed by its full
suffix: `linear` alone would also bind the projections of targets that nobody asked for.

Not here: expert targets, the head, and anything that holds tensors. The table names what is not supported yet, so that
a recipe that asks for it gets an answer instead of an adapter that does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

PEFT_PREFIX = "base_model.model."
TEXT_PREFIX = "model.layers."
FULL_PREFIX = "model.language_model.layers."


class AdapterError(ValueError):
    """An adapter, or a request for one, that cannot be used. The message names the key and says what to do."""


class Shape(NamedTuple):
    """Features of one linear module: `weight` is [out_features, in_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One row of the table: where the module is in a decoder layer, and its sides in terms of the configuration."""

    suffix: str
    in_side: str
    out_side: str


# Sides: `hidden`, or a product of head count and head size that differs between sliding and full layers.
TARGETS: dict[str, Target] = {
    "q": Target(suffix="self_attn.q_proj.linear", in_side="hidden", out_side="heads"),
    "k": Target(suffix="self_attn.k_proj.linear", in_side="hidden", out_side="kv_heads"),
    "v": Target(suffix="self_attn.v_proj.linear", in_side="hidden", out_side="kv_heads"),
    "r": Target(suffix="self_attn.relative_position_bias.linear", in_side="hidden", out_side="rel_heads"),
    "gate": Target(suffix="self_attn.o_proj.gate_proj", in_side="hidden", out_side="heads"),
    "o": Target(suffix="self_attn.o_proj.linear", in_side="heads", out_side="hidden"),
}

NOT_YET: dict[str, str] = {
    "w1": "mlp.experts (gate rows)",
    "w3": "mlp.experts (up rows)",
    "w2": "mlp.experts (down projection)",
    "lm_head": "lm_head",
}


def check_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """The targets in the table's order, without repetition.

    Raises:
        AdapterError: the argument is a bare string, is empty, or names a target that is unknown or not supported yet.
    """
    if isinstance(targets, str):
        # A string iterates by character: "gate" would bind nothing, and "kv" two modules by accident.
        raise AdapterError(f"lora.targets must be a list of names; got the string {targets!r}. Write [{targets}]")
    asked = list(targets)
    supported = ", ".join(TARGETS)
    for name in asked:
        if name in NOT_YET:
            raise AdapterError(
                f"lora.targets must be among {supported}; got {name!r} ({NOT_YET[name]}), which is not supported yet. "
                "Leave it out"
            )
        if name not in TARGETS:
            raise AdapterError(f"lora.targets must be among {supported}; got {name!r}. Correct the name")
    if not asked:
        raise AdapterError(f"lora.targets must name at least one of {supported}; got an empty list. Add a target")
    return tuple(name for name in TARGETS if name in asked)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a `config.json`, whether it is of the full class or of the text class."""
    return config.get("text_config") or config


def plan(config: Mapping[str, Any], targets: Iterable[str]) -> dict[str, Shape]:
    """Every module that an adapter of these targets has, in layer order: module name -> shape.

    Args:
        config: `config.json` of the full or of the text class, as a dictionary.
        targets: target names.

    Raises:
        AdapterError: see `check_targets`; or the configuration lacks a size.
    """
    names = check_targets(targets)
    text = text_config(config)
    modules: dict[str, Shape] = {}
    for layer in range(_size(text, "num_hidden_layers")):
        sides = _sides(text, _is_sliding(text, layer))
        for name in names:
            target = TARGETS[name]
            modules[f"{TEXT_PREFIX}{layer}.{target.suffix}"] = Shape(sides[target.in_side], sides[target.out_side])
    return modules


def module_pattern(targets: Iterable[str]) -> str:
    """Regular expression that matches the modules of these targets in full, as PEFT's `target_modules` takes it."""
    suffixes = "|".join(re.escape(TARGETS[name].suffix) for name in check_targets(targets))
    return rf"model\.layers\.\d+\.(?:{suffixes})"


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of the two factors of a module: A [rank, in_features] and B [out_features, rank]."""
    return f"{PEFT_PREFIX}{module}.lora_A.weight", f"{PEFT_PREFIX}{module}.lora_B.weight"


def tensor_shapes(modules: Mapping[str, Shape], rank: int) -> dict[str, tuple[int, int]]:
    """PEFT tensor name -> shape, for an adapter of this rank on these modules."""
    shapes: dict[str, tuple[int, int]] = {}
    for module, shape in modules.items():
        name_a, name_b = tensor_names(module)
        shapes[name_a] = (rank, shape.in_features)
        shapes[name_b] = (shape.out_features, rank)
    return shapes


def _size(text: Mapping[str, Any], key: str) -> int:
    if key not in text:
        raise AdapterError(f"config.json: text_config.{key} must be given; got nothing. Use a complete checkpoint")
    return int(text[key])


def _is_sliding(text: Mapping[str, Any], layer: int) -> bool:
    kinds = text.get("layer_types")
    # Where the list is absent, transformers makes every sixth layer a full-attention layer.
    return bool(kinds[layer] == "hybrid_sliding" if kinds else (layer + 1) % 6)


def _sides(text: Mapping[str, Any], is_sliding: bool) -> dict[str, int]:
    # Sliding layers have head counts of their own; where they are absent they equal those of the full layers.
    def size(key: str) -> int:
        own = f"swa_{key}"
        return _size(text, own if is_sliding and own in text else key)

    heads, head_dim = size("num_attention_heads"), size("head_dim")
    return {
        "hidden": _size(text, "hidden_size"),
        "heads": heads * head_dim,
        "kv_heads": size("num_key_value_heads") * head_dim,
        "rel_heads": heads * _size(text, "d_rel"),
    }
