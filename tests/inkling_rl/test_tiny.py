"""The tiny model has every mechanism alive, is calm enough for bfloat16, and comes with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import random_tensors, text_state, tiny_config


@pytest.fixture(scope="module")
def model(hf_config: Any) -> Any:
    from transformers import Inkling2ForCausalLM

    return Inkling2ForCausalLM(hf_config).eval()


@torch.no_grad()
def logprobs(model: Any, state: dict[str, torch.Tensor], token_ids: torch.Tensor) -> torch.Tensor:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = state[name].clone()
    return model(token_ids).logits.float().log_softmax(-1)


def test_size() -> None:
    count = sum(value.numel() for value in text_state(random_tensors(0)).values())
    assert 3.0e6 < count < 3.5e6


# Every tensor of these names is set to what switches the mechanism off.
SWITCHES: dict[str, tuple[str, float]] = {
    "residual queries": (".query", 0.0),
    "sink": ("sink_proj.weight", 0.0),
    "gate": ("gate_proj.weight", 0.0),
    "relative bias": ("relative_position_bias.proj", 0.0),
    "static taps of the dynamic conv": ("static_weight", 0.0),
    "dynamic taps": ("weight_proj.weight", 0.0),
    "static conv of keys and values": ("sconv.conv1d.weight", 0.0),
    "conv after attention": ("post_attention_convolution.conv1d.weight", 0.0),
    "conv after experts": ("post_mlp_convolution.conv1d.weight", 0.0),
    "router bias": ("e_score_correction_bias", 0.0),
    "router": ("mlp.gate.weight", 0.0),
    "experts": ("down_proj", 0.0),
    "scale of queries": ("q_proj.norm.scale", 1.0),
    "scale of the bias": ("relative_position_bias.norm.scale", 1.0),
    "embedding norm": ("embed_norm.weight", 1.0),
    "layer norms": ("layernorm.weight", 1.0),
    "final norm": ("model.norm.weight", 1.0),
}


@pytest.mark.parametrize("mechanism", SWITCHES)
def test_every_mechanism_moves_the_output(mechanism: str, model: Any, token_ids: torch.Tensor) -> None:
    state = text_state(random_tensors(0))
    before = logprobs(model, state, token_ids)
    ending, value = SWITCHES[mechanism]
    names = [name for name in state if name.endswith(ending)]
    assert names
    after = logprobs(model, {k: torch.full_like(v, value) if k in names else v for k, v in state.items()}, token_ids)
    assert (after - before).abs().mean() > 1e-3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_scaling_alpha", 0.0),
        ("qk_l2_clip_threshold", 1e9),
        ("rel_l2_clip_threshold", 1e9),
        ("mlp_gate_softcap", 1e9),
        ("mlp_up_softcap", 1e9),
        ("final_logit_softcapping", 1e9),
        ("sliding_window_size", 64),
        ("num_experts_per_tok", 3),
        ("n_layers_per_attn_res_block", 6),
    ],
)
def test_every_number_of_the_config_moves_the_output(
    key: str, value: float, model: Any, token_ids: torch.Tensor
) -> None:
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    text = dict(tiny_config()["text_config"]) | {key: value}
    other = Inkling2TextConfig(**{k: v for k, v in text.items() if k != "model_type"})
    other._attn_implementation = "eager"
    state = text_state(random_tensors(0))
    changed = dict(state)
    if key == "sliding_window_size":  # the bias table of sliding layers has the window's width
        changed |= {
            name: torch.nn.functional.pad(v, (0, 64 - v.shape[1]))
            for name, v in state.items()
            if name.endswith("relative_position_bias.proj") and v.shape[1] == 8
        }
    after = logprobs(Inkling2ForCausalLM(other).eval(), changed, token_ids)
    assert (after - logprobs(model, state, token_ids)).abs().max() > 1e-3


def test_bfloat16_noise_is_modest(tiny: Checkpoint, hf_config: Any, model: Any, token_ids: torch.Tensor) -> None:
    from transformers import Inkling2ForCausalLM

    exact = logprobs(model, dict(tiny.iter_hf(torch.float32)), token_ids)
    rounded = logprobs(Inkling2ForCausalLM(hf_config).eval(), dict(tiny.iter_hf(torch.bfloat16)), token_ids)
    entropy = -(exact.exp() * exact).sum(-1).mean()
    assert (exact - rounded).abs().mean() < 0.03
    assert 4.5 < entropy < 6.0


def test_quantisation_changes_the_output_little(tiny: Checkpoint, model: Any, token_ids: torch.Tensor) -> None:
    exact = logprobs(model, text_state(random_tensors(0)), token_ids)
    quantised = logprobs(model, dict(tiny.iter_hf(torch.float32)), token_ids)
    assert 1e-4 < (exact - quantised).abs().mean() < 0.1


def test_the_directory_is_a_whole_model(tiny_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_path)
    assert type(config).__name__ == "Inkling2Config" and config.architectures == ["Inkling2ForConditionalGeneration"]
    assert config.dspark_target_layer_ids == [2, 5] and config.text_config.unpadded_vocab_size == 500
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    assert tokenizer.eos_token_id == config.text_config.eos_token_id
    assert tokenizer.encode("1+1=") == [*b"1+1="]
    names = {path.name for path in tiny_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names


def test_the_draft_has_every_part() -> None:
    names = layout.draft_shapes(tiny_config())
    assert names["model.dspark.fc.weight"] == (128, 256)
    assert names["model.dspark.markov_head.joint_proj.weight"] == (48, 160)
    assert names["model.dspark.confidence_head.proj.weight"] == (1, 144)
    assert sum("layers.1." in name for name in names) == sum("layers.0." in name for name in names) == 11
