"""A tiny checkpoint and recipes for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.recipe import Recipe
from trainer import vendor

Recipes = Callable[..., Recipe]


def build_recipe(path: str | Path, /, **changes: Any) -> Recipe:
    """A recipe for the tiny model in float32; `changes` are sections, as dictionaries."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"train": "arithmetic/train", "max_prompt_length": 64},
        "environment": {"name": "arithmetic"},
        "rollout": {
            "max_model_len": 128,
            "max_generate_length": 16,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "kv_cache_gib": 0.1,
        },
        "trainer": {"num_steps": 2, "train_batch_size": 2, "learning_rate": 1e-2, "micro_batch_size_per_gpu": 4},
        "algorithm": {"n_samples_per_prompt": 4},
        "lora": {"rank": 8, "targets": ["q", "k", "v", "o"]},
    }
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    return Recipe.model_validate(sections)


@pytest.fixture(scope="package", autouse=True)
def _vllm_can_be_imported_afterwards() -> Iterator[None]:
    """The trainer keeps vLLM out of its process; other packages' tests run engines in this one."""
    yield
    vendor.restore()


@pytest.fixture(scope="package")
def process_group() -> Iterator[None]:
    """What workers join in this process, once: DeepSpeed keeps hold of the first one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def own_workers(process_group: None) -> Iterator[None]:
    """For modules with workers in this process: afterwards it computes as before."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Inkling 2."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, 0)
    return path


@pytest.fixture(scope="session")
def recipes(checkpoint: Path) -> Recipes:
    """Recipes for the tiny model."""
    return lambda **changes: build_recipe(checkpoint, **changes)
