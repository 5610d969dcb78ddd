"""Wrapping binds exactly the planned modules, and an adapter changes log-probabilities as W + (alpha / rank) B A."""

from __future__ import annotations

import pytest
import torch
from transformers import Inkling2Config, Inkling2ForCausalLM, Inkling2ForConditionalGeneration

from lora.model import adapter_parameters, adapter_state, load_adapter_state, wrap
from lora.schema import TARGETS, AdapterError, plan, tensor_names
from tests.lora.conftest import SIZES, logprobs, tiny_model

ALL = tuple(TARGETS)


def randomised(model: Inkling2ForCausalLM, targets: tuple[str, ...] = ALL, rank: int = 4, alpha: float = 6.0):
    wrapped = wrap(model, rank=rank, alpha=alpha, dropout=0.0, targets=targets, seed=3)
    with torch.no_grad():
        for parameter in adapter_parameters(wrapped).values():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    return wrapped


@pytest.mark.parametrize("targets", [(name,) for name in ALL] + [ALL], ids="-".join)
def test_an_adapter_is_w_plus_scaled_b_a(targets: tuple[str, ...]) -> None:
    base = tiny_model()
    before = logprobs(base)
    wrapped = randomised(tiny_model(), targets)
    state = adapter_state(wrapped)
    with torch.no_grad():
        for module in plan(SIZES, targets):
            name_a, name_b = tensor_names(module)
            base.get_submodule(module).weight += (6.0 / 4) * state[name_b] @ state[name_a]
    assert (logprobs(base) - before).abs().max() > 0.01, (
        "the adapter must change something for the test to mean anything"
    )
    torch.testing.assert_close(logprobs(wrapped), logprobs(base), rtol=0, atol=1e-5)


def test_wrapping_trains_exactly_the_planned_tensors_and_starts_as_the_base(model: Inkling2ForCausalLM) -> None:
    before = logprobs(model)
    wrapped = wrap(model, rank=8, alpha=16, dropout=0.0, targets=ALL, seed=0)
    trainable = [name for name, value in wrapped.named_parameters() if value.requires_grad]
    assert len(trainable) == 2 * 6 * 3
    assert {name.replace(".default.", ".") for name in trainable} == {
        name for module in plan(SIZES, ALL) for name in tensor_names(module)
    }
    assert torch.equal(logprobs(wrapped), before)


def test_starting_values_follow_from_the_seed_alone() -> None:
    torch.manual_seed(11)
    first = adapter_state(wrap(tiny_model(), rank=4, alpha=8, dropout=0.0, targets=("q", "o"), seed=7))
    model = tiny_model(seed=2)
    torch.manual_seed(12)
    generator_before = torch.random.get_rng_state()
    second = adapter_state(wrap(model, rank=4, alpha=8, dropout=0.0, targets=("o", "q"), seed=7))
    assert torch.equal(torch.random.get_rng_state(), generator_before)
    other = adapter_state(wrap(tiny_model(), rank=4, alpha=8, dropout=0.0, targets=("q", "o"), seed=8))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    name_a, name_b = tensor_names("model.layers.2.self_attn.q_proj.linear")
    assert not torch.equal(first[name_a], other[name_a])
    assert first[name_a].abs().max() <= 1 / 8 and first[name_a].std() > 0.05
    assert not first[name_b].any()


def test_factors_are_float32_on_a_bfloat16_base(model: Inkling2ForCausalLM) -> None:
    for name, parameter in model.named_parameters():
        if not any(kept in name for kept in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.bfloat16()
    wrapped = randomised(model)
    assert {value.dtype for value in adapter_parameters(wrapped).values()} == {torch.float32}
    assert wrapped.get_base_model().lm_head.weight.dtype == torch.bfloat16
    loss = wrapped(input_ids=torch.arange(12)[None], use_cache=False).logits.float().square().mean()
    loss.backward()
    assert all(value.grad is not None and value.grad.any() for value in adapter_parameters(wrapped).values())


def test_state_round_trips_and_a_foreign_state_changes_nothing(model: Inkling2ForCausalLM) -> None:
    wrapped = randomised(model)
    state = adapter_state(wrapped)
    fresh = wrap(tiny_model(), rank=4, alpha=6, dropout=0.0, targets=ALL, seed=0)
    load_adapter_state(fresh, state)
    assert torch.equal(logprobs(fresh), logprobs(wrapped))
    name = next(iter(state))
    with pytest.raises(AdapterError, match="must have exactly the 36 tensors"):
        load_adapter_state(fresh, {key: value for key, value in state.items() if key != name})
    with pytest.raises(AdapterError, match=f"{name} must have shape"):
        load_adapter_state(fresh, state | {name: torch.zeros(5, 64)})
    assert all(torch.equal(value, state[key]) for key, value in adapter_state(fresh).items())


def test_the_full_class_is_refused() -> None:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "text_hidden_size": 64,
    }
    config = Inkling2Config(text_config=SIZES, vision_config=vision)
    with torch.device("meta"):
        full = Inkling2ForConditionalGeneration(config)
    with pytest.raises(AdapterError, match=r"must have the module model.layers.0.* lacks 3 of 3 modules"):
        wrap(full, rank=4, alpha=8, dropout=0.0, targets=("q",), seed=0)
