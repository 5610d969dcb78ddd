"""Engine arguments follow from the recipe, the escape hatch comes last, and nothing imports vLLM or torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.engine_args import (
    DRAFT_WORKER,
    Device,
    EngineArgumentError,
    command_line,
    engine_arguments,
    engine_environment,
    serving_arguments,
)
from inkling_rl.recipe import Recipe


def recipe(**rollout: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "/models/tiny", "dtype": "float32"},
            "data": {"train": "arithmetic/train", "max_prompt_length": 32},
            "environment": {"name": "arithmetic"},
            "rollout": {"max_model_len": 256, "max_generate_length": 64} | rollout,
            "trainer": {"num_steps": 1, "train_batch_size": 2, "seed": 5},
            "lora": {"rank": 8, "targets": ["q", "v"]},
        }
    )


def test_arguments_on_a_cpu() -> None:
    arguments = engine_arguments(recipe(vllm_args={"block-size": 32, "max_loras": 5}), device="cpu")
    assert arguments == {
        "model": "/models/tiny",
        "dtype": "float32",
        "seed": 5,
        "tensor_parallel_size": 1,
        "max_model_len": 256,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": 5,
        "max_lora_rank": 8,
        "lora_target_modules": ["linear"],
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        "distributed_executor_backend": "uni",
        "block_size": 32,
        "additional_config": {"inkling2": {"strict_kernels": False}},
    }


def test_a_gpu_keeps_its_own_worker_and_cache_size() -> None:
    arguments = engine_arguments(recipe(dtype="bfloat16"), model="/elsewhere", device="cuda")
    assert (arguments["model"], arguments["dtype"]) == ("/elsewhere", "bfloat16")
    assert not {"worker_cls", "enforce_eager", "kv_cache_memory_bytes"} & arguments.keys()
    assert engine_arguments(recipe(kv_cache_gib=0.5), device="cuda")["kv_cache_memory_bytes"] == 1 << 29
    assert "OMP_NUM_THREADS" not in engine_environment("cuda")
    assert engine_environment("cpu")["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("asked", "device", "strict"), [
    (None, "cuda", True), (None, "cpu", False), (False, "cuda", False), (True, "cpu", True),
])  # fmt: skip
def test_kernels_are_strict_on_gpus_unless_the_recipe_says_otherwise(
    asked: bool | None, device: Device, strict: bool
) -> None:
    arguments = engine_arguments(recipe(strict_kernels=asked), device=device)
    assert arguments["additional_config"] == {"inkling2": {"strict_kernels": strict}}


def test_a_draft_is_all_that_a_recipe_says(tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path / "tiny"))
    asked = recipe(draft={"num_tokens": 7, "sampling": "probabilistic"})
    arguments = engine_arguments(asked, model=path, device="cpu")
    assert arguments["worker_extension_cls"] == DRAFT_WORKER
    assert arguments["speculative_config"] == {
        "method": "dflash",
        "model": path,
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
        "disable_eagle_block_drop": True,
    }
    assert (
        not {"speculative_config", "worker_extension_cls"} & engine_arguments(recipe(), model=path, device="cpu").keys()
    )
    with pytest.raises(CheckpointError, match=r"rollout.draft.num_tokens must be 1 to 7.*; got 8"):
        engine_arguments(recipe(draft={"num_tokens": 8}), model=path, device="cpu")
    with pytest.raises(CheckpointError, match="found none"):
        engine_arguments(recipe(draft={"path": str(tmp_path / "absent")}), model=path, device="cpu")
    assert engine_arguments(asked, model=path, device="cuda")["speculative_config"]["method"] == "dspark"
    with pytest.raises(
        EngineArgumentError, match=r"tensor_parallel_size must be 1 where rollout.draft is given; got 2"
    ):
        engine_arguments(recipe(draft={}, tensor_parallel_size=2), model=path, device="cpu")


def test_several_engines_in_one_are_refused_where_a_draft_is_used(tmp_path: Path) -> None:
    path, draft = str(write_tiny(tmp_path / "tiny")), {"num_tokens": 7}
    for key, size in (("data_parallel_size", 2), ("data-parallel-size", "2")):
        message = rf"rollout.vllm_args.{key} must be 1 where rollout.draft is given.*; got 2. Set rollout.num_engines"
        with pytest.raises(EngineArgumentError, match=message):
            engine_arguments(recipe(draft=draft, vllm_args={key: size}), model=path, device="cpu")
        assert engine_arguments(recipe(vllm_args={key: size}), model=path, device="cpu")["data_parallel_size"] == size
        one = recipe(draft=draft, vllm_args={key: type(size)(1)})
        assert "speculative_config" in engine_arguments(one, model=path, device="cpu")


def test_a_gpu_has_room_for_the_drafts_of_all_requests_in_a_step(tmp_path: Path) -> None:
    path, draft = str(write_tiny(tmp_path / "tiny")), {"num_tokens": 7}
    tight = recipe(draft=draft, max_num_seqs=100, max_num_batched_tokens=699)
    message = (
        r"rollout.max_num_batched_tokens must be at least rollout.max_num_seqs x rollout.draft.num_tokens = "
        r"100 x 7 = 700 on a GPU; got 699\. Raise it"
    )
    with pytest.raises(EngineArgumentError, match=message):
        engine_arguments(tight, model=path, device="cuda")
    assert "speculative_config" in engine_arguments(tight, model=path, device="cpu")
    enough = recipe(draft=draft, max_num_seqs=100, max_num_batched_tokens=700)
    assert "speculative_config" in engine_arguments(enough, model=path, device="cuda")


def test_a_served_rank_is_the_next_that_the_engine_knows() -> None:
    assert serving_arguments("m", max_lora_rank=20, device="cpu")["max_lora_rank"] == 32


def test_the_command_line_spells_every_kind_of_value() -> None:
    values = {
        "model": "m",
        "enable_lora": True,
        "enable_prefix_caching": False,
        "a_b": ["x", 1],
        "c": {"d": 2},
        "e": None,
    }
    line = ["--model", "m", "--enable-lora", "--no-enable-prefix-caching", "--a-b", "x", "1", "--c", '{"d": 2}']
    assert command_line(values) == line


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, inkling_rl.engine_args; print(sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
