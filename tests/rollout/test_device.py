"""What a GPU is refused for, what the kernels are compiled for, and the plugin's options: from real configurations."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Inkling2TextConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser

from inkling_rl.checkpoint.tiny import tiny_config
from inkling_rl.draft.shape import DraftShape
from inkling_rl.engine_args import command_line, engine_arguments
from inkling_rl.formats import ExpertFormat
from inkling_rl.recipe import Recipe
from rollout.kernels.trials import AttentionSizes, DraftSizes
from rollout.plugin import device
from rollout.plugin.options import strict_kernels
from rollout.plugin.shape import EngineError, ModelShape, check_engine


class Platform:
    """What vLLM says of a machine."""

    def __init__(self, capability: tuple[int, int] | None, name: str = "NVIDIA H200") -> None:
        self.capability, self.name = capability, name
        self.device_name = "cuda" if capability else "xpu"

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return self.capability is not None

    def get_device_capability(self) -> DeviceCapability | None:
        return DeviceCapability(*self.capability) if self.capability else None

    def get_device_name(self) -> str:
        return self.name


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, name: str = "NVIDIA H200") -> None:
    monkeypatch.setattr(device, "current_platform", Platform(capability, name))


def settings(
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: str = "auto",
    lora_config: object = None,
    max_num_seqs: int = 256,
    drafted: int | None = None,
    **text: Any,
) -> Any:
    """As much of a vLLM configuration as the checks read; `text` changes the model."""
    config = Inkling2TextConfig(**(tiny_config()["text_config"] | text))
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, quantization=None, hf_text_config=config),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=64),
        lora_config=lora_config,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048),
        speculative_config=drafted and SimpleNamespace(num_speculative_tokens=drafted),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )


def test_a_hopper_gpu_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (9, 0))
    check_engine(settings())
    check_engine(settings(dtype=torch.float32, cache_dtype="bfloat16", drafted=7))
    assert device.gpu() == device.Gpu("Hopper", "marlin", has_run=True)


@pytest.mark.parametrize(("capability", "name", "got"), [
    ((8, 0), "NVIDIA A100", "NVIDIA A100, compute capability 8.0"),
    ((8, 9), "NVIDIA L40S", "NVIDIA L40S, compute capability 8.9"),
    ((11, 0), "NVIDIA Thor", "NVIDIA Thor, compute capability 11.0"),
    (None, "", "xpu"),
])  # fmt: skip
def test_other_devices_are_refused_with_what_is_supported(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, name: str, got: str
) -> None:
    on(monkeypatch, capability, name)
    monkeypatch.setenv(device.UNTESTED_GPU, "1")
    message = rf"device must be an NVIDIA GPU of compute capability 9\.0 \(Hopper\), or a CPU; got {got}\. "
    with pytest.raises(EngineError, match=message):
        check_engine(settings())


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_blackwell_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    on(monkeypatch, capability, "NVIDIA B200")
    with pytest.raises(
        EngineError, match=r"NVIDIA B200 \(Blackwell\), on which .* never run\. Set INKLING_RL_UNTESTED_"
    ):
        check_engine(settings())
    monkeypatch.setenv(device.UNTESTED_GPU, "1")
    with caplog.at_level(logging.WARNING):
        check_engine(settings())
    [record] = caplog.records
    assert "never run on such a GPU" in record.message and "marlin experts" in record.message
    assert device.gpu().experts == "marlin" and not device.gpu().has_run


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": torch.float16}, r"dtype must be float32 or bfloat16 .* got torch\.float16"),
    ({"cache_dtype": "fp8_e4m3"}, "kv_cache_dtype must be auto or bfloat16 .* got fp8_e4m3"),
    ({"head_dim": 256}, "head_dim must be one of 16, 32, 64, 128 on a GPU; got 256"),
    ({"swa_head_dim": 256}, "swa_head_dim must be one of 16, 32, 64, 128 on a GPU; got 256"),
    ({"dtype": torch.float32, "lora_config": object()},
     r"dtype must be bfloat16 where adapters are loaded on a GPU; got torch\.float32\. Set it to bfloat16"),
    ({"max_num_seqs": 4097}, r"max_num_seqs must be 4096 or less on a GPU; got 4097\. Lower it"),
    ({"drafted": 8},
     r"speculative_config\.num_speculative_tokens must be 7 or less on a GPU; got 8\. Lower it"),
    ({"d_rel": 48}, "d_rel must be one of 16, 32, 64 on a GPU; got 48"),
    ({"num_attention_heads": 20, "num_key_value_heads": 2},
     "num_attention_heads / num_key_value_heads must be 8 or less on a GPU; got 10"),
])  # fmt: skip
def test_what_the_kernels_of_a_gpu_do_not_cover_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    on(monkeypatch, (9, 0))
    with pytest.raises(EngineError, match=message):
        check_engine(settings(**changes))


def test_the_limits_are_those_of_the_kernels() -> None:
    """What `check_device` lets through, the kernels' own checks let through, and nothing less."""
    from rollout.kernels import triton_decode, triton_prefill

    batch: Any = SimpleNamespace(seq_lens=torch.zeros(1))
    for head_dim in (16, 32, 64, 128, 256):
        for rel in (16, 32, 48, 64):
            for group in (1, 8, 9):
                kv = torch.empty(1, 1, 64, 2 * head_dim)
                covered = head_dim in device.HEAD_DIMS and rel in device.REL_DIMS and group <= device.MAX_GROUP
                if covered:
                    triton_decode._check(kv, head_dim, rel, group, 8, batch)
                    triton_prefill._check(kv, head_dim, rel, None)
                else:
                    with pytest.raises(ValueError, match="must be"):
                        triton_decode._check(kv, head_dim, rel, group, 8, batch)


TINY_DRAFT = DraftShape.from_config(tiny_config())


@pytest.mark.parametrize(("changes", "message"), [
    ({"head_dim": 256}, r"the draft's head_dim must be one of 16, 32, 64, 128 on a GPU; got 256\. Draft on a CPU"),
    ({"num_heads": 20, "block_size": 7}, "num_key_value_heads x block_size must be 64 or less on a GPU; got 70"),
    ({"rank": 512}, "the draft's markov_rank must be 256 or less on a GPU; got 512"),
])  # fmt: skip
def test_a_draft_that_the_kernels_of_a_gpu_do_not_cover_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    shape = replace(TINY_DRAFT, **changes)
    device.check_draft(shape)  # a CPU
    on(monkeypatch, (9, 0))
    device.check_draft(TINY_DRAFT)
    with pytest.raises(EngineError, match=message):
        device.check_draft(shape)


def test_the_limits_of_a_draft_are_those_of_the_kernels() -> None:
    triton_draft = pytest.importorskip("rollout.kernels.triton_draft")
    triton_draft_head = pytest.importorskip("rollout.kernels.triton_draft_head")
    assert device.HEAD_DIMS == triton_draft.HEAD_DIMS
    assert (device.MAX_DRAFT_ROWS, device.MAX_DRAFT_RANK) == (triton_draft.MAX_ROWS, triton_draft_head.MOST_RANK)


def test_nothing_is_refused_on_a_cpu() -> None:
    check_engine(settings(head_dim=256, d_rel=48, drafted=8))


@pytest.mark.parametrize(("dtype", "cache_dtype", "state"), [
    (torch.bfloat16, "auto", torch.float32),  # pages on this machine, a CPU
    (torch.float32, "bfloat16", torch.bfloat16),
])  # fmt: skip
def test_kernels_are_tried_with_the_sizes_of_the_model(
    dtype: torch.dtype, cache_dtype: str, state: torch.dtype
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from rollout.plugin.paging import CachePlan

    config = settings(dtype=dtype, cache_dtype=cache_dtype)
    formats: list[ExpertFormat] = ["bf16", "nvfp4", "nvfp4", "nvfp4", "nvfp4", "mxfp8"]
    shape = ModelShape.from_config(config.model_config.hf_text_config, formats)
    real = VllmConfig()
    with set_current_vllm_config(real):
        plan = CachePlan.create(shape, config, "model", TINY_DRAFT)
    config.compilation_config = real.compilation_config
    assert device.kernel_sizes(config, shape).draft is None
    sizes = device.kernel_sizes(config, shape, TINY_DRAFT)
    assert sizes.draft == DraftSizes(
        num_heads=12, num_kv_heads=2, head_dim=16, page=plan.draft[0].owner.spec.block_size, block_rows=7, rank=16,
        vocab=512, norm_eps=1e-6,
    )  # fmt: skip
    assert (sizes.dtype, sizes.state_dtype, sizes.hidden, sizes.experts) == (dtype, state, 128, shape.num_experts)
    # Those of a float32 model are dense.
    assert sizes.expert_formats == (("mxfp8", "nvfp4") if dtype is torch.bfloat16 else ()) and sizes.max_tokens == 2048
    assert sizes.conv_page == plan.conv[0].owner.spec.block_size
    full, sliding = sizes.attention
    owners = [plan.attention[shape.is_full.index(is_full)].owner for is_full in (True, False)]
    assert [full.page, sliding.page] == [owner.spec.block_size for owner in owners]
    assert full == AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=16, extent=16, window=None, page=full.page)
    assert sliding.window == shape.sliding.window


def recipe(path: Path, **rollout: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32"},
            "data": {"train": "arithmetic/train", "max_prompt_length": 32},
            "environment": {"name": "arithmetic"},
            "rollout": {"max_model_len": 128, "max_generate_length": 64} | rollout,
            "trainer": {"num_steps": 1, "train_batch_size": 2},
        }
    )


@pytest.mark.parametrize("strict", [True, False])
def test_the_recipe_reaches_the_plugin_through_the_engines_command_line(tiny_checkpoint: Path, strict: bool) -> None:
    """As the trainer's engine and `serve` start it: arguments, command line, vLLM's parser and configuration."""
    line = command_line(engine_arguments(recipe(tiny_checkpoint, strict_kernels=strict), device="cpu"))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    config = EngineArgs.from_cli_args(parser.parse_args(line)).create_engine_config()
    assert strict_kernels(config) is strict


@pytest.mark.parametrize(("given", "expected"), [
    ({}, False), (None, False), ({"other": 1}, False), ({"inkling2": {}}, False),
    ({"inkling2": {"strict_kernels": True}}, True),
])  # fmt: skip
def test_kernels_are_not_strict_unless_asked(given: Any, expected: bool) -> None:
    assert strict_kernels(SimpleNamespace(additional_config=given)) is expected


@pytest.mark.parametrize(("given", "message"), [
    (True, r"must be a map of options \(strict_kernels\); got True"),
    ({"strict_kernel": True}, "must be a map with no other key than strict_kernels; got {'strict_kernel': True}"),
    ({"strict_kernels": "yes"}, "must be a map in which strict_kernels is true or false; got"),
])  # fmt: skip
def test_options_that_do_not_exist_are_refused(given: Any, message: str) -> None:
    with pytest.raises(EngineError, match=rf"additional_config\.inkling2 {message}"):
        strict_kernels(SimpleNamespace(additional_config={"inkling2": given}))
