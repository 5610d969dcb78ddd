"""Adapters on attention projections: against PEFT, in mixed batches, and the ones that must be refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora.files import AdapterError, write_adapter
from lora.model import adapter_parameters, adapter_state, wrap
from lora.schema import TARGETS
from rollout.kernels import ops
from tests.rollout.engines import completion_of, differences, engine, generate, largest_change, oracle, random_prompts

TOLERANCE = 1e-4
INVARIANCE = 0.0 if ops.have_native() else 1e-5
RANK = 8
PROMPTS = random_prompts((20, 33, 7, 64), seed=6)


def make_adapter(checkpoint: Path, directory: Path, seed: int, targets: tuple[str, ...] = tuple(TARGETS)) -> Any:
    """A PEFT model with random factors, written to `directory`."""
    model = wrap(oracle(checkpoint), rank=RANK, alpha=16.0, dropout=0.0, targets=targets, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    write_adapter(directory, adapter_state(model), rank=RANK, alpha=16.0, targets=targets, base_model=str(checkpoint))
    return model.eval()


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": (root / "a", make_adapter(tiny_checkpoint, root / "a", 1)),
        "b": (root / "b", make_adapter(tiny_checkpoint, root / "b", 2, ("q", "o"))),
    }


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[Any]:
    with engine(tiny_checkpoint, enable_lora=True, max_loras=2, max_lora_rank=RANK) as llm:
        yield llm


def request(name: str, number: int, path: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))


def test_only_the_six_targets_are_wrapped(llm: Any) -> None:
    manager = llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    suffixes = {name.split(".", 3)[3] for name in manager.modules}
    assert suffixes == {target.suffix for target in TARGETS.values()}
    assert len(manager.modules) == 6 * 6


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_adapter_has_pefts_logprobs(llm: Any, tiny_oracle: Any, adapters: Any, name: str) -> None:
    path, model = adapters[name]
    outputs = generate(llm, PROMPTS, lora=request(name, 1 + "ab".index(name), path), prompt_logprobs=5)
    assert max(differences(model, PROMPTS, outputs)) < TOLERANCE
    assert max(differences(tiny_oracle, PROMPTS, outputs)) > 0.1  # the adapter is not a no-op


def test_rows_of_a_mixed_batch_get_their_own_adapter_or_none(llm: Any, tiny_oracle: Any, adapters: Any) -> None:
    """Both adapter slots are in use, so the wrong index -1 would be adapter b's."""
    llm.reset_prefix_cache()
    base = generate(llm, PROMPTS)
    llm.reset_prefix_cache()
    requests = [request("a", 1, adapters["a"][0]), None, request("b", 2, adapters["b"][0]), None]
    mixed = generate(llm, PROMPTS, lora=requests)
    assert largest_change([base[1], base[3]], [mixed[1], mixed[3]]) <= INVARIANCE
    assert max(differences(tiny_oracle, PROMPTS, base)) < TOLERANCE
    for index, name in ((0, "a"), (2, "b")):
        assert max(differences(adapters[name][1], [PROMPTS[index]], [mixed[index]])) < TOLERANCE


def test_the_prefix_cache_keeps_adapters_apart(llm: Any, adapters: Any) -> None:
    llm.reset_prefix_cache()
    prompts = PROMPTS[3:]
    cold = generate(llm, prompts, lora=request("a", 1, adapters["a"][0]))
    other = generate(llm, prompts)
    again = generate(llm, prompts, lora=request("a", 1, adapters["a"][0]))
    assert (other[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 32)
    assert largest_change(cold, again) <= INVARIANCE


def change(directory: Path, source: Path, rename: Any = None, settings: dict[str, Any] | None = None) -> Path:
    """A copy of an adapter with other tensors or settings."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(rename(tensors) if rename else tensors, directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | (settings or {})))
    return directory


def swap(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sink": (swap("q_proj.linear", "sink_proj"), {}, "sink_proj"),
    "conv": (swap("q_proj.linear", "k_proj.sconv.weight_proj"), {}, "weight_proj"),
    "router": (swap("self_attn.q_proj.linear", "mlp.gate"), {}, "mlp.gate"),
    "experts": (swap("self_attn.q_proj.linear", "mlp.experts"), {}, "mlp.experts"),
    "layer": (swap("layers.5.", "layers.6."), {}, "layers.6"),
    "narrow": (lambda t: {k: v[:, :64].contiguous() if "lora_A" in k else v for k, v in t.items()}, {}, "shape"),
    "rslora": (None, {"use_rslora": True}, "use_rslora"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_that_cannot_be_applied_exactly_is_refused(
    llm: Any, adapters: Any, tmp_path: Path, kind: str
) -> None:
    rename, settings, named = BROKEN[kind]
    path = change(tmp_path / kind, adapters["b"][0], rename, settings)
    before = completion_of(generate(llm, PROMPTS[:1])[0])
    with pytest.raises(AdapterError, match=named):
        llm.llm_engine.add_lora(request(kind, 100 + list(BROKEN).index(kind), path))
    assert completion_of(generate(llm, PROMPTS[:1])[0]) == before
