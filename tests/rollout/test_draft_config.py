"""What a draft's engine must be configured as, on a CPU and on a GPU: the plugin's check of a vLLM configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

from rollout.plugin import draft_config
from rollout.plugin.shape import EngineError


def settings(**changed: Any) -> Any:
    """As much of a vLLM configuration as the check reads: 100 requests, 7 tokens drafted for each."""
    values = {"max_num_seqs": 100, "max_num_batched_tokens": 700, "data_parallel_size": 1, "async_scheduling": False}
    values |= changed
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=7,
            max_num_new_slots_for_drafting=6,
            enable_adaptive_verification=False,
            dspark_draft_topk=None,
            rejection_sample_method="standard",
            disable_padded_drafter_batch=False,
            num_speculative_tokens_per_batch_size=None,
        ),
        scheduler_config=SimpleNamespace(
            **{key: values[key] for key in ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")}
        ),
        parallel_config=SimpleNamespace(data_parallel_size=values["data_parallel_size"]),
        kv_transfer_config=None,
    )


class Gpu(Platform):
    """Of no maker: all that the check asks is whether it is a CPU."""

    def is_cpu(self) -> bool:
        return False


@pytest.fixture(params=[CpuPlatform, Gpu])
def platform(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(draft_config, "current_platform", request.param())
    return request.param


def test_every_request_of_a_step_has_room_for_its_draft_on_a_gpu(platform: Any) -> None:
    draft_config._check(settings())
    if platform is CpuPlatform:
        draft_config._check(settings(max_num_batched_tokens=16))
        return
    message = (
        r"max_num_batched_tokens must be at least max_num_seqs x num_speculative_tokens = 700 where a draft is used; "
        r"got 699\. Raise it \(rollout.max_num_batched_tokens\), or lower max_num_seqs \(rollout.max_num_seqs\)"
    )
    with pytest.raises(EngineError, match=message):
        draft_config._check(settings(max_num_batched_tokens=699))


def test_steps_that_draft_for_some_of_the_requests_only_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(draft_config.logger, "warning", lambda text, *values: said.append(text % values))
    draft_config.warn_of_room(settings(max_num_batched_tokens=1400))
    assert not said
    draft_config.warn_of_room(settings(max_num_batched_tokens=1399))
    [line] = said
    assert line.startswith("a step drafts for 99 of 100 requests: each takes 14 of max_num_batched_tokens = 1399.")
    assert "Raise it to 1400 (rollout.max_num_batched_tokens)" in line


def test_several_engines_in_one_are_refused(platform: Any) -> None:
    with pytest.raises(EngineError, match=r"data_parallel_size must be 1 where a draft is used; got 2\. Start"):
        draft_config._check(settings(data_parallel_size=2))
