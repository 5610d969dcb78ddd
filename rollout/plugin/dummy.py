"""Random weights that behave like a model's, for `load_format=dummy`: timing large shapes needs no checkpoint.

vLLM fills floating-point parameters with numbers up to 0.001 and leaves integers as they are: scales would be
negative, norms nothing, and routing always the same. Here every parameter is drawn by its kind in place: norms near 1,
projections that keep the size of their input, a router that spreads its tokens, and experts quantised by the exporter's
own rules. Hidden states stay finite and of ordinary size through any number of layers.

Not a trained model: its text is noise. In memory every expert is its own, so that each is read as in a real model; in
values a few are repeated, because quantising a hundred gigabytes takes minutes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from inkling_rl.formats import ExpertFormat, marlin
from rollout.plugin.loader import kept_layers

DISTINCT_EXPERTS = 8
# First match wins. `fan`: deviation of the output for inputs of deviation 1; `std`: of the tensor itself; `near`: 1
# plus so much noise. What matches none is a projection if it has two dimensions, else near 1.
_RULES: tuple[tuple[str, str, float], ...] = (
    (r"e_score_correction_bias$", "std", 0.0),
    (r"embed_tokens\.weight$", "std", 1.0),
    (r"\.query$", "std", 1.0),
    (r"norm\d?\.(weight|scale)$", "near", 0.1),
    (r"relative_position_bias\.proj$", "std", 0.15),
    (r"weight_proj\.weight$", "fan", 0.3),
    (r"conv1d\.weight$", "std", 0.3),
    (r"static_weight$", "std", 0.3),
    (r"bias$", "std", 0.0),
)


def install() -> None:
    """Make vLLM's loader of dummy weights call `fill` for Inkling 2, and nothing else for other models."""
    original = DummyModelLoader.load_weights
    if is_installed():
        return

    def load_weights(self: DummyModelLoader, model: nn.Module, model_config: ModelConfig) -> None:
        if type(model).__name__.startswith("Inkling2"):
            fill(model)
        else:
            original(self, model, model_config)

    load_weights.is_inkling2 = True  # type: ignore[attr-defined]
    DummyModelLoader.load_weights = load_weights


def is_installed() -> bool:
    return getattr(DummyModelLoader.load_weights, "is_inkling2", False)


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter of the model, in place; the same values on every start.

    Raises:
        AssertionError: a parameter of a kind that is unknown here.
    """
    kept = {place.module: place.expert_format for place in kept_layers(model).values()}
    few: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 1)[0] not in kept:
            _draw(name, parameter, seed)
    for name, expert_format in kept.items():
        module = model.get_submodule(name)
        engine = dict(module.named_parameters())
        width: int = module.expert_width  # type: ignore[assignment]
        key = engine["w2_weight"].shape, width, expert_format
        if key not in few:
            few[key] = _some_experts(engine, width, expert_format, seed)
        _repeat(few[key], engine)
    model.is_loaded = True  # type: ignore[assignment]


def _draw(name: str, parameter: nn.Parameter, seed: int) -> None:
    assert parameter.dtype in (torch.float32, torch.bfloat16), f"{name} is {parameter.dtype}"
    default = ("fan", 1.0) if parameter.ndim > 1 else ("near", 0.1)
    kind, size = next(((kind, size) for pattern, kind, size in _RULES if re.search(pattern, name)), default)
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) ^ seed)
    if kind == "fan":
        size /= parameter.shape[-1] ** 0.5
    parameter.normal_(1.0 if kind == "near" else 0.0, size, generator=generator)


def _some_experts(
    engine: Mapping[str, torch.Tensor], width: int, expert_format: ExpertFormat, seed: int
) -> dict[str, torch.Tensor]:
    """Marlin's tensors of a few experts of normal weights, of the shapes of a layer's."""
    num, device = min(DISTINCT_EXPERTS, len(engine["w2_weight"])), engine["w2_weight"].device
    hidden = engine["w2_weight_scale"].shape[-1]
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    return marlin.from_weights(random(num, 2 * width, hidden), random(num, hidden, width), expert_format)


def _repeat(some: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Copy a few experts over all of a layer."""
    for key, parameter in engine.items():
        for first in range(0, len(parameter), len(some[key])):
            part = parameter[first : first + len(some[key])]
            part.copy_(some[key][: len(part)])
