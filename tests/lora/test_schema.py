"""The table of targets: shapes from a configuration, and clear answers to what is not in it."""

from __future__ import annotations

import re

import pytest

from lora.schema import AdapterError, check_targets, module_pattern, plan, text_config
from tests.lora.conftest import SIZES, tiny_model

FULL = {"model_type": "inkling2", "text_config": SIZES, "vision_config": {"hidden_size": 32}}


def test_shapes_are_those_of_the_model() -> None:
    changes = {"swa_num_attention_heads": 8, "swa_head_dim": 8}
    model = tiny_model(**changes)
    modules = plan(SIZES | changes, ("q", "k", "v", "r", "gate", "o"))
    assert len(modules) == 18
    for name, shape in modules.items():
        assert tuple(model.get_submodule(name).weight.shape) == (shape.out_features, shape.in_features), name


def test_the_full_configuration_and_default_layer_types_give_the_same_plan() -> None:
    assert plan(FULL, ("q", "r")) == plan(SIZES, ("r", "q"))
    assert text_config(FULL) is SIZES
    bare = SIZES | {"layer_types": None, "num_hidden_layers": 6, "head_dim": 32}
    assert [shape.out_features for shape in plan(bare, ("q",)).values()] == [64] * 5 + [128]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q", "must be a list of names"),
        ([], "must name at least one"),
        (["q", "linear"], "got 'linear'. Correct the name"),
        (["w1"], r"got 'w1' \(mlp.experts .*not supported yet"),
        (["lm_head"], "not supported yet"),
    ],
)
def test_targets_that_mean_nothing_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        check_targets(targets)


def test_the_pattern_matches_whole_names_only() -> None:
    pattern = module_pattern(("o", "k"))
    names = [name for name, _ in tiny_model().named_modules() if re.fullmatch(pattern, name)]
    assert names == [
        f"model.layers.{layer}.self_attn.{part}" for layer in range(3) for part in ("k_proj.linear", "o_proj.linear")
    ]


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"text_config\.d_rel must be given"):
        plan({key: value for key, value in SIZES.items() if key != "d_rel"}, ("r",))
