"""What the rollout engine is started with: environment variables and arguments, as plain dictionaries.

One place for the service, for the trainer's engine server and for tests, which start the engine in different ways and
must not start different engines. Nothing here imports vLLM or torch: the trainer's driver may not, and need not.

Not here: starting anything (`rollout.service`, `trainer.server`).
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from inkling_rl.checkpoint.reader import BUILTIN, read_json, resolve
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.recipe import Recipe

Device = Literal["cpu", "cuda"]

GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0  # vLLM would take most of the memory of a machine that also trains
MAX_LORAS = 2  # two policy versions are in flight while one is being replaced
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's list

PLUGIN = "inkling2"
"""The key of our plugin's options in vLLM's `additional_config`, read by `rollout.plugin.options`."""

STRICT_KERNELS = "strict_kernels"

DRAFT_WORKER = "rollout.plugin.draft_versions.DraftTransfer"
"""Mixed into the workers of an engine with a draft: how its weights are replaced while it runs."""

DRAFT_ROUTES = "rollout.draft_routes.DraftRoutes"
"""Adds the same to an API server, see there."""

UNSET = "VLLM_CPU_KVCACHE_SPACE"  # an old setting in whole GiB that silently wins over kv_cache_memory_bytes


class EngineArgumentError(ValueError):
    """An engine that could not start with what it is given."""


@cache
def installed_device() -> Device:
    """The device that the installed engine was built for: the CPU build is a distribution of its own."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def engine_environment(device: Device | None = None) -> dict[str, str]:
    """Environment variables that every process of an engine must start with.

    They are read when vLLM, torch or OpenMP is imported, so setting them later has no effect. `UNSET` names one that
    must not be inherited.
    """
    common = {
        # vLLM refuses LoRA on any architecture with "Inkling" in its name unless this switch of another model is off.
        "INKLING_MULTIMEM_AR": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if (device or installed_device()) == "cuda":
        return common
    return common | {
        # Idle OpenMP threads spin: with two on a shared two-core machine a run took fifteen times as long.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Nothing in the model is compiled on a CPU; the sampler alone would cost 5-10 s at the first request.
        "TORCH_COMPILE_DISABLE": "1",
        # Keeps the worker inside the engine-core process, which saves a process and its 10 s of imports.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def engine_arguments(
    recipe: Recipe, *, model: str | None = None, draft: Path | None = None, device: Device | None = None
) -> dict[str, Any]:
    """vLLM engine arguments of a recipe, by the names of `vllm.EngineArgs`.

    Args:
        recipe: read by `inkling_rl.recipe.load`.
        model: directory of the checkpoint, where it is not `model.path`.
        draft: directory of the draft, where it is not the recipe's.
        device: of the engine; that of the installed build unless given.

    Raises:
        CheckpointError: `model.path` names a built-in checkpoint that this installation lacks; a draft does not fit.
        EngineArgumentError: a draft where this engine has none.
    """
    path = model or recipe.model.path
    rollout, lora = recipe.rollout, recipe.lora
    device = device or installed_device()
    arguments: dict[str, Any] = {
        "model": str(resolve(path)) if path.startswith(BUILTIN) else path,
        "dtype": recipe.rollout_dtype,
        "seed": recipe.trainer.seed,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.prefix_caching,
        "enable_lora": True,
        "max_loras": MAX_LORAS,
        "max_lora_rank": lora.rank,
        # The engine knows modules by the last part of their name, so this is coarser than the adapter's own list: it
        # keeps LoRA off the sink, the convolutions and, where nobody trains it, the gate.
        "lora_target_modules": sorted({"gate_proj" if target == "gate" else "linear" for target in lora.targets}),
    }
    arguments |= device_arguments(device, rollout.kv_cache_gib, rollout.tensor_parallel_size)
    # Unasked, strict where there are kernels to be strict about: nobody wants to rent GPUs for the fallbacks.
    strict = device == "cuda" if rollout.strict_kernels is None else rollout.strict_kernels
    arguments["additional_config"] = {PLUGIN: {STRICT_KERNELS: strict}}
    if rollout.draft:
        arguments["speculative_config"] = draft_arguments(recipe, arguments["model"], device, draft)
        arguments["worker_extension_cls"] = DRAFT_WORKER
    return arguments | {key.replace("-", "_"): value for key, value in rollout.vllm_args.items()}


def draft_arguments(recipe: Recipe, model: str, device: Device, path: Path | None = None) -> dict[str, Any]:
    """vLLM's `speculative_config` of a recipe with `rollout.draft`, after a look at the draft's files.

    Raises:
        CheckpointError: there is no draft, it is not whole, or it is for another target.
        EngineArgumentError: the engine that is asked for has no drafting.
    """
    draft = recipe.rollout.draft
    assert draft is not None
    _check_drafting(recipe, draft.num_tokens, device)
    target = read_json(resolve(model) / "config.json")
    opened = DraftCheckpoint.open(path or draft.path or model, target)
    opened.check_tokens(draft.num_tokens)
    return {
        "method": draft_method(device),
        "model": str(opened.source.path),
        "num_speculative_tokens": draft.num_tokens,
        "draft_sample_method": draft.sampling,
        # vLLM drops the last cached block of a prompt for drafts that need a token of it again; ours does not.
        "disable_eagle_block_drop": True,
    }


def _check_drafting(recipe: Recipe, num_tokens: int, device: Device) -> None:
    """Refuse what `rollout.plugin.draft_config` would refuse when the engine starts."""
    rollout = recipe.rollout
    if rollout.tensor_parallel_size > 1:
        raise EngineArgumentError(
            "rollout.tensor_parallel_size must be 1 where rollout.draft is given; got "
            f"{rollout.tensor_parallel_size}. Leave one of them out"
        )
    for key, value in rollout.vllm_args.items():
        # As text: the command line would take "2", too.
        if key.replace("-", "_") == "data_parallel_size" and str(value) != "1":
            raise EngineArgumentError(
                f"rollout.vllm_args.{key} must be 1 where rollout.draft is given: a draft is replaced in the first "
                f"engine alone; got {value}. Set rollout.num_engines instead"
            )
    rows, room = rollout.max_num_seqs * num_tokens, rollout.max_num_batched_tokens
    if device == "cuda" and room < rows:
        raise EngineArgumentError(
            "rollout.max_num_batched_tokens must be at least rollout.max_num_seqs x rollout.draft.num_tokens = "
            f"{rollout.max_num_seqs} x {num_tokens} = {rows} on a GPU; got {room}. Raise it, or lower one of the two"
        )


def draft_method(device: Device) -> str:
    """vLLM's name for the way a draft of Inkling 2 runs there; what drafts is `rollout.plugin.drafting`'s."""
    return "dspark" if device == "cuda" else "dflash"


def serving_arguments(model: str, *, max_lora_rank: int = 64, device: Device | None = None) -> dict[str, Any]:
    """vLLM engine arguments for a checkpoint without a recipe: the checkpoint's dtype, as long a context as fits."""
    return {
        "model": model,
        "max_model_len": -1,
        "enable_lora": True,
        "max_loras": MAX_LORAS,
        "max_lora_rank": served_rank(max_lora_rank),
        **device_arguments(device or installed_device(), None, 1),
    }


def served_rank(rank: int) -> int:
    """The smallest rank that the engine can be set up for and that holds an adapter of this one (512 at the most)."""
    return next((served for served in SERVED_RANKS if served >= rank), SERVED_RANKS[-1])


def device_arguments(device: Device, kv_cache_gib: float | None, tensor_parallel_size: int) -> dict[str, Any]:
    """The arguments that differ between a GPU and a CPU."""
    if device == "cuda":
        return {"kv_cache_memory_bytes": int(kv_cache_gib * GIB)} if kv_cache_gib else {}
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": int((kv_cache_gib or CPU_KV_CACHE_GIB) * GIB),
        "enforce_eager": True,
        # vLLM's 128 on a CPU is longer than many prompts, which then share nothing.
        "block_size": 32,
        # SkyRL's server replaces "auto" by the GPU worker.
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
    }
    return arguments | ({"distributed_executor_backend": "uni"} if tensor_parallel_size == 1 else {})


def check_memory(arguments: Mapping[str, Any], device: Device | None = None) -> None:
    """On a CPU, compares the KV cache with the memory that is free, seconds before the engine would.

    Raises:
        EngineArgumentError: it does not fit.
    """
    asked = arguments.get("kv_cache_memory_bytes") or 0
    meminfo = Path("/proc/meminfo")
    if (device or installed_device()) == "cuda" or not meminfo.exists():
        return
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    if asked > free:
        raise EngineArgumentError(
            f"rollout.kv_cache_gib must be below the {free / GIB:.1f} GiB of free memory; got {asked / GIB:g}. "
            "Lower it or end other programs"
        )


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as vLLM's command line takes them: `["--model", "DIR", "--enable-lora", ...]`; None is left out."""
    line: list[str] = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            line.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list | tuple):
            line += [flag, *map(str, value)]
        elif isinstance(value, dict):
            line += [flag, json.dumps(value)]
        else:
            line += [flag, str(value)]
    return line
