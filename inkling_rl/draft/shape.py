"""Sizes and constants of a DSpark draft, from the config.json that holds it.

Two forms are read. A draft bundled with its target has `dspark_*` keys in the target's config.json; a draft in a
directory of its own has a flat config.json (DeepSpec's key names) with the target's sizes beside its own:

| bundled | of its own |
|---|---|
| `dspark_num_hidden_layers`, `dspark_head_dim`, ... (`_OWN_KEYS`) | the same without `dspark_` |
| `dspark_noise_token_id` | `mask_token_id` |
| `text_config.num_hidden_layers` | `num_target_layers` |
| `text_config.hidden_size`, `.vocab_size`, `.rms_norm_eps` | the same at the top |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError

STANDALONE_MODEL_TYPE = "inkling2_dspark"
PREFIX = "model.dspark."
_OWN_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "target_layer_ids",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_SAME_KEYS = ("hidden_size", "vocab_size", "rms_norm_eps", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Everything that the draft's modules need to know."""

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    target_layers: tuple[int, ...]
    """Target layers whose outputs the draft sees; 0 is the first layer."""

    block_size: int
    """Tokens of a block: the draft was trained to predict so many at once."""

    mask_token_id: int
    rank: int
    has_confidence: bool
    confidence_sees_token: bool
    """The confidence head sees the previous token's embedding beside the hidden state."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DraftShape:
        """Read either form.

        Raises:
            CheckpointError: a key is missing or has a value that no draft can have.
        """
        release = as_release(config)
        text = layout.text_config(release)
        own: dict[str, Any] = {key: release.get(f"dspark_{key}") for key in (*_OWN_KEYS, "noise_token_id")}
        layout.draft_shapes(release)  # says which key is missing
        shape = cls(
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            num_target_layers=text["num_hidden_layers"],
            num_layers=own["num_hidden_layers"],
            num_heads=own["num_attention_heads"],
            num_kv_heads=own["num_key_value_heads"],
            head_dim=own["head_dim"],
            mlp_width=own["intermediate_size"],
            rope_theta=float(own["rope_theta"] or 1e6),
            norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            target_layers=tuple(own["target_layer_ids"]),
            block_size=own["block_size"],
            mask_token_id=own["noise_token_id"],
            rank=own["markov_rank"],
            has_confidence=bool(own["enable_confidence_head"]),
            confidence_sees_token=bool(own["confidence_head_with_markov"]),
        )
        _check(shape, own["markov_head_type"])
        return shape


def as_release(config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's config in the bundled form, whichever form it has.

    Raises:
        CheckpointError: it describes no draft.
    """
    if "dspark_block_size" in config:
        return dict(config)
    if config.get("model_type") != STANDALONE_MODEL_TYPE:
        raise CheckpointError(
            f"config.json must describe a draft: dspark_* keys, or model_type {STANDALONE_MODEL_TYPE}; it does not. "
            "Take a checkpoint with a draft, or name one in rollout.draft.path"
        )
    release = {f"dspark_{key}": config[key] for key in _OWN_KEYS if key in config}
    release |= {key: config[key] for key in _SAME_KEYS if key in config}
    for theirs, ours in (("mask_token_id", "dspark_noise_token_id"), ("num_target_layers", "num_hidden_layers")):
        if theirs in config:
            release[ours] = config[theirs]
    return release


def standalone_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same draft in a directory of its own, from the config that it is bundled with.

    Raises:
        CheckpointError: the config describes no draft.
    """
    release = as_release(config)
    text = layout.text_config(release)
    own = {key: release[f"dspark_{key}"] for key in _OWN_KEYS if f"dspark_{key}" in release}
    return {
        "architectures": ["Inkling2DSparkModel"],
        "model_type": STANDALONE_MODEL_TYPE,
        "dtype": release.get("dtype", "bfloat16"),
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "num_target_layers": text["num_hidden_layers"],
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "mask_token_id": release["dspark_noise_token_id"],
        **own,
    }


def _check(shape: DraftShape, head_type: object) -> None:
    layers, taps = shape.num_target_layers, shape.target_layers
    _require("markov_head_type", head_type == "rnn", "rnn", head_type)
    _require("block_size", type(shape.block_size) is int and shape.block_size > 0, "1 or more", shape.block_size)
    _require(
        "num_attention_heads",
        shape.num_heads % shape.num_kv_heads == 0,
        f"a multiple of the {shape.num_kv_heads} key/value heads",
        shape.num_heads,
    )
    _require("head_dim", shape.head_dim % 2 == 0, "even (rotary positions)", shape.head_dim)
    inside = bool(taps) and all(type(tap) is int and 0 <= tap < layers for tap in taps)
    _require(
        "target_layer_ids",
        inside and list(taps) == sorted(set(taps)),
        f"increasing layers of the target's 0-{layers - 1}",
        list(taps),
    )
    mask = shape.mask_token_id
    _require(
        "noise_token_id (mask_token_id)",
        type(mask) is int and 0 <= mask < shape.vocab_size,
        f"a row of the embedding, 0-{shape.vocab_size - 1}",
        mask,
    )


def _require(key: str, holds: bool, requirement: str, value: object) -> None:
    if not holds:
        raise CheckpointError(
            f"config.json: the draft's {key} must be {requirement}; got {value!r}. Take a draft trained for this target"
        )
