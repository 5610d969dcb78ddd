"""PEFT on transformers' Inkling 2: wrapping, starting values, and the adapter's tensors under PEFT's names.

PEFT does the arithmetic (`W x + (alpha / rank) B A x`). What this adds: module names checked against a plan, because
PEFT is content with a pattern that matches nothing useful; starting values that follow from a seed and not from the
state of the global generator; float32 factors on a base of any dtype.

Not here: files (`lora.files`), experts, merging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from lora.files import Adapter
from lora.schema import PEFT_PREFIX, AdapterError, Shape, check_targets, module_pattern, plan, tensor_shapes

DEFAULT = "default"  # PEFT's own name for the only adapter; it is part of parameter names inside the model


def wrap(
    model: torch.nn.Module, *, rank: int, alpha: float, dropout: float, targets: Iterable[str], seed: int
) -> PeftModel:
    """Adds a trainable adapter to a frozen `Inkling2ForCausalLM`, in place.

    A starts uniform in +-1/sqrt(in_features) (PEFT's own start) drawn in plan order from `seed`, B starts at zero, so
    the wrapped model computes what the bare one does. Factors are float32; the base keeps its dtype.

    Args:
        model: transformers' `Inkling2ForCausalLM`.
        rank: columns of B and rows of A.
        alpha: the update is scaled by alpha / rank.
        dropout: probability, before A, in training mode only.
        targets: names of `lora.schema.TARGETS`.
        seed: every starting value follows from it.

    Raises:
        AdapterError: a target is unknown, or the modules that PEFT bound are not those of the plan.
    """
    names = check_targets(targets)
    expected = plan(model.config.to_dict(), names)  # type: ignore[operator, union-attr]
    _check_modules(model, expected)
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=module_pattern(names),
        bias="none",
        task_type="CAUSAL_LM",
    )
    # PEFT draws its own starting values; fork so that wrapping does not move the caller's generator.
    with torch.random.fork_rng(devices=[]):
        wrapped: PeftModel = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            assert ".lora_" in name, f"{name} is trainable and no part of the adapter"
    _compare(tensor_shapes(expected, rank), adapter_parameters(wrapped))
    _start(wrapped, seed)
    return wrapped


def attach(model: torch.nn.Module, adapter: Adapter) -> PeftModel:
    """A model with an adapter that was read from disk, in evaluation mode; PEFT does the arithmetic.

    Raises:
        AdapterError: the model lacks a module of the adapter.
    """
    modules = sorted({name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in adapter.state})
    settings = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=modules, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        wrapped: PeftModel = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for parameter in adapter_parameters(wrapped).values():
        parameter.data = parameter.data.float()
    load_adapter_state(wrapped, adapter.state)
    return wrapped.eval()


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """PEFT's file names -> the live parameters of the adapter, in module order. Copies nothing."""
    return {
        name.replace(f".{DEFAULT}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def adapter_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """PEFT's file names -> tensors of the adapter on the CPU, detached copies that later steps do not change.

    A is [rank, in_features], B is [out_features, rank].
    """
    return {name: value.detach().to("cpu", copy=True) for name, value in adapter_parameters(model).items()}


def load_adapter_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Writes an adapter's tensors into a wrapped model, in place.

    Raises:
        AdapterError: names or shapes are not those of the model's adapter; nothing is written then.
    """
    parameters = adapter_parameters(model)
    _compare({name: tuple(value.shape) for name, value in parameters.items()}, state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _check_modules(model: torch.nn.Module, expected: Mapping[str, Shape]) -> None:
    there = {name for name, _ in model.named_modules()}
    if missing := [name for name in expected if name not in there]:
        raise AdapterError(
            f"the model must have the module {missing[0]}; {type(model).__name__} lacks {len(missing)} of "
            f"{len(expected)} modules. Use the text class Inkling2ForCausalLM"
        )


def _compare(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, torch.Tensor]) -> None:
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        raise AdapterError(
            f"the adapter must have exactly the {len(expected)} tensors of its targets; got {len(got)}, "
            f"missing {missing[:3]}, unexpected {extra[:3]}. Use the text class Inkling2ForCausalLM and its own adapter"
        )
    for name, shape in expected.items():
        if tuple(got[name].shape) != tuple(shape):
            raise AdapterError(
                f"{name} must have shape {tuple(shape)}; got {tuple(got[name].shape)}. "
                "Use an adapter of this model and rank"
            )


def _start(model: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_A." in name:
                bound = 1.0 / math.sqrt(parameter.shape[1])
                start = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
                parameter.copy_(start)
            else:
                parameter.zero_()
