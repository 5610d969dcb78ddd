"""The draft's reference against transformers' Qwen3 layers, in float64, and its RNN against a second writing of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.tiny import random_tensors, tiny_config
from inkling_rl.draft.reference import ReferenceDraft, rotate
from inkling_rl.draft.shape import PREFIX, DraftShape

CONTEXT = 37
ANCHOR_TOKEN = 65


@pytest.fixture(scope="module")
def draft() -> ReferenceDraft:
    tensors = {name: value.double() for name, value in random_tensors(3).items() if name.startswith(PREFIX)}
    return ReferenceDraft(
        DraftShape.from_config(tiny_config()), {name.removeprefix(PREFIX): v for name, v in tensors.items()}
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qwen3(draft: ReferenceDraft) -> tuple[Any, Any]:
    """transformers' decoder layers with the draft's weights, and their rotary embedding."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding

    shape = draft.shape
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attn_implementation="eager",
    )
    layers = []
    for index in range(shape.num_layers):
        layer = Qwen3DecoderLayer(config, index).double().eval()
        own = f"layers.{index}."
        layer.load_state_dict({n.removeprefix(own): v for n, v in draft.weights.items() if n.startswith(own)})
        layers.append(layer)
    return layers, Qwen3RotaryEmbedding(config)


def test_the_backbone_is_qwen3s_with_the_context_as_keys_and_values(draft: ReferenceDraft) -> None:
    context, block = random(CONTEXT, 128, seed=1), random(7, 128, seed=2)
    layers, rotary = qwen3(draft)
    hidden = block
    with torch.no_grad():
        for layer in layers:
            # Every row as a query, too; the context's results are dropped.
            rows = torch.cat([context, layer.input_layernorm(hidden)])[None]
            angles = rotary(rows, torch.arange(CONTEXT + 7)[None])
            attended = layer.self_attn(rows, angles, attention_mask=None)[0][0, CONTEXT:]
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    variance = hidden.square().mean(-1, keepdim=True) + draft.shape.norm_eps
    expected = hidden / variance.sqrt() * draft.weights["norm.weight"]
    found = draft.hidden(block, context, CONTEXT)
    # Qwen3's norm and angles are float32 inside whatever the dtype.
    assert (found - expected).abs().max() < 2e-5
    # The order of rows is in their positions only, and every row sees those after it.
    other = draft.hidden(torch.cat([block[:6], block[:1]]), context, CONTEXT)
    assert (found[:6] - other[:6]).abs().amax(-1).min() > 1e-3


def test_the_context_is_a_normed_projection_of_the_layers_outputs(draft: ReferenceDraft) -> None:
    outputs = random(5, 256, seed=3)
    found = draft.context(outputs)
    weight, norm = draft.weights["fc.weight"], draft.weights["hidden_norm.weight"]
    for row in range(5):
        projected = torch.stack([(weight[i] * outputs[row]).sum() for i in range(128)])
        expected = norm * projected / math.sqrt(float(projected.square().mean()) + 1e-6)
        assert torch.allclose(found[row], expected, rtol=1e-12, atol=1e-12)


def test_a_block_follows_the_published_recurrence(draft: ReferenceDraft) -> None:
    table, head = random(512, 128, seed=4), random(512, 128, seed=5)
    outputs = random(CONTEXT, 256, seed=6)
    block = draft.block(
        lambda ids: table[ids], lambda hidden: 3 * torch.tanh(hidden @ head.T / 3), outputs, ANCHOR_TOKEN
    )
    w = {name.removeprefix("markov_head."): value for name, value in draft.weights.items()}
    ids = torch.tensor([ANCHOR_TOKEN] + [draft.shape.mask_token_id] * 6)
    hidden = draft.hidden(table[ids], draft.context(outputs), CONTEXT)
    assert torch.equal(hidden, block.hidden)
    rank, previous, state = 16, ANCHOR_TOKEN, torch.zeros(16, dtype=torch.float64)
    joint, bias = w["joint_proj.weight"], w["joint_proj.bias"]
    for k in range(7):
        e = w["markov_w1.weight"][previous]
        # Split by columns: the old state, the token, the hidden state.
        z = joint[:, :rank] @ state + joint[:, rank : 2 * rank] @ e + joint[:, 2 * rank :] @ hidden[k] + bias
        forget = 1 / (1 + torch.exp(-z[:rank]))
        logits = 3 * torch.tanh(head @ hidden[k] / 3) + w["markov_w2.weight"] @ torch.tanh(z[2 * rank :])
        assert torch.allclose(block.logits[k], logits, rtol=1e-11, atol=1e-11)
        score = draft.weights["confidence_head.proj.weight"][0] @ torch.cat([hidden[k], e])
        expected = 1 / (1 + torch.exp(-score - draft.weights["confidence_head.proj.bias"][0]))
        assert block.confidence is not None and abs(float(block.confidence[k] - expected)) < 1e-12
        state = forget * state + (1 - forget) * torch.tanh(z[rank : 2 * rank])
        previous = int(logits.argmax())
        assert block.tokens[k] == previous


def test_the_rnn_carries_state_from_row_to_row(draft: ReferenceDraft) -> None:
    hidden = random(128, seed=7)
    state, first = draft.step(torch.zeros(16, dtype=torch.float64), 3, hidden)
    _, second = draft.step(state, 3, hidden)
    assert (first - second).abs().max() > 1e-3


def test_rotary_positions_are_relative_and_exact_far_out() -> None:
    x = random(1, 1, 16, seed=8)
    y = random(1, 1, 16, seed=9)

    def score(at: int, distance: int) -> float:
        here, there = torch.tensor([at]), torch.tensor([at + distance])
        return float((rotate(x, here, 1e6) * rotate(y, there, 1e6)).sum())

    assert abs(score(0, 5) - score(1_000_000, 5)) < 1e-9
    assert abs(score(0, 5) - score(0, 6)) > 1e-3
