"""Names, shapes and dtypes of the release, against what transformers itself writes and against the published size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec
from inkling_rl.checkpoint.tiny import tiny_config, tiny_quant_config


def test_names_shapes_and_dtypes_are_those_that_transformers_writes(tmp_path: Path) -> None:
    from transformers import Inkling2Config, Inkling2ForConditionalGeneration

    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Inkling2ForConditionalGeneration(Inkling2Config.from_dict(tiny_config()))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(tmp_path)
    written = {}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118  (not a mapping)
            header = shard.get_slice(name)
            written[name] = (tuple(header.get_shape()), {"BF16": "bfloat16", "F32": "float32"}[header.get_dtype()])
    ours = layout.release_tensors(tiny_config(), None)
    expected = {n: (s.shape, s.dtype) for n, s in ours.items() if not n.startswith("model.dspark.")}
    assert expected == written


def test_names_in_transformers_are_those_of_its_text_class(hf_config: Any) -> None:
    from transformers import Inkling2ForCausalLM

    state = Inkling2ForCausalLM(hf_config).state_dict()
    specs = layout.text_tensors(tiny_config())
    assert {layout.hf_name(name) for name in specs} == set(state)
    for name, spec in specs.items():
        if not name.endswith("unembed.weight"):
            assert tuple(state[layout.hf_name(name)].shape) == spec.shape


def test_inkling_2_small_has_its_published_number_of_parameters() -> None:
    from transformers import Inkling2Config

    config = Inkling2Config().to_dict()
    count = lambda specs: sum(math.prod(spec.shape) for spec in specs.values())
    assert count(layout.text_tensors(config)) == 593_722_948_608
    assert count(layout.release_tensors(config, None)) == 594_050_641_920


def test_stored_tensors_follow_the_layers_format() -> None:
    specs = layout.release_tensors(tiny_config(), tiny_quant_config())
    nvfp4, mxfp8 = "model.llm.layers.4.mlp.experts.w13_weight", "model.llm.layers.5.mlp.experts.w2_weight"
    assert specs[nvfp4] == TensorSpec((16, 128, 64), "uint8")
    assert specs[f"{nvfp4}_scale"] == TensorSpec((16, 128, 8), "float8_e4m3fn")
    assert specs[f"{nvfp4}_amax"] == TensorSpec((16,), "float32")
    assert specs[f"{nvfp4}_outer_scale_denominator"] == TensorSpec((), "float32")
    assert specs[mxfp8] == TensorSpec((16, 128, 64), "float8_e4m3fn")
    assert specs[f"{mxfp8}_scale"] == TensorSpec((16, 128, 2), "uint8")
    assert f"{mxfp8}_amax" not in specs


def test_one_algorithm_for_all_layers() -> None:
    quant = {"quantization": {"quant_algo": "MXFP8"}}
    assert layout.expert_formats(quant, tiny_config()) == ["mxfp8"] * 6
    assert layout.expert_formats(None, tiny_config()) == ["bf16"] * 6


def quant_with(prefix: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {prefix: entry}}}


PREFIX = "model.llm.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo must be MIXED_PRECISION, NVFP4 or MXFP8; got 'FP8'"),
        (quant_with(PREFIX, {"quant_algo": "W4A8"}), r"layers\.1\.mlp\.experts\.quant_algo must be NVFP4 or MXFP8"),
        (quant_with(PREFIX, {"quant_algo": "NVFP4", "group_size": 32}), "group_size must be 16 for NVFP4; got 32"),
        (quant_with("model.llm.layers.6.mlp.experts", {"quant_algo": "NVFP4"}), "layers 0-5"),
        (quant_with("model.llm.layers.1.attn.wq_du", {"quant_algo": "NVFP4"}), "Only routed experts are quantised"),
    ],
)
def test_wrong_format_tags_are_refused(quant: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        layout.expert_formats(quant, tiny_config())


def changed(**text: Any) -> dict[str, Any]:
    config = tiny_config()
    config["text_config"] |= text
    return config


def test_configs_that_decide_no_shape_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layer_types must be 6 of hybrid_sliding and hybrid"):
        layout.text_tensors(changed(layer_types=["sliding_attention"] * 6))
    incomplete = tiny_config()
    del incomplete["text_config"]["d_rel"]
    with pytest.raises(CheckpointError, match=r"config.json:text_config.d_rel must be set"):
        layout.text_tensors(incomplete)
    for wrong in ("six", None, -1, True, [6]):
        with pytest.raises(CheckpointError, match=r"text_config\.num_hidden_layers must be a number above 0; got"):
            layout.expert_formats(None, changed(num_hidden_layers=wrong))
    with pytest.raises(CheckpointError, match=r"text_config\.layer_types must be a list; got 6"):
        layout.text_tensors(changed(layer_types=6))
    with pytest.raises(CheckpointError, match=r"dtype must be bfloat16 or float32; got 'float16'"):
        layout.text_tensors(tiny_config() | {"dtype": "float16"})
    with pytest.raises(CheckpointError, match=r"w2_weight must have a multiple of 16 columns"):
        layout.release_tensors(changed(moe_intermediate_size=40), tiny_quant_config())
    with pytest.raises(CheckpointError, match=r"model\.visual\.proj_in\.weight must be a text tensor"):
        layout.hf_name("model.visual.proj_in.weight")
