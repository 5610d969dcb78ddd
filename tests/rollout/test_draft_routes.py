"""The routes in vLLM's own application: behind its authentication, and all workers of an engine or none.

The workers have real drafts and no engine around them: on a CPU an engine with a draft has one worker, here are two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.engine_args import DRAFT_ROUTES, DRAFT_WORKER
from rollout.plugin import draft_versions
from rollout.plugin.draft import Draft
from rollout.plugin.draft_versions import DraftTransfer, memory_digest, on_host
from tests.rollout.drafting import write_version
from trainer.draft import files

KEY = {"Authorization": "Bearer secret"}


class Worker(DraftTransfer):
    """What the methods need of vLLM's: where the checkpoint lies and what drafts."""

    def __init__(self, target: Path, draft: Path) -> None:
        opened = DraftCheckpoint.open(draft, Checkpoint.open(target).config)
        model = Draft(opened.shape, torch.bfloat16, cache=())
        model.load(opened)
        assert model.versions is not None
        self.versions = model.versions
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(target)))
        self.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=model))


class Engine:
    """Two workers, and a scheduler that can be paused."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.paused = False
        self.calls: list[str] = []

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and clear_cache
        self.paused = True
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.paused = False
        self.calls.append("resume")

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "switch_draft":
            assert self.paused
            self.calls.append(f"switch {args[0]}")
        return [getattr(worker, method)(*args) for worker in self.workers]

    def versions(self) -> list[tuple[int, int | None]]:
        """Of every worker: which serves and which is held."""
        return [(w.versions.version, w.versions.held and w.versions.held.version) for w in self.workers]


@pytest.fixture
def engine(tiny_checkpoint: Path, tmp_path: Path) -> Engine:
    """Version 1 serves."""
    first = write_version(tiny_checkpoint, tmp_path / "draft-1", 1, 0)
    return Engine([Worker(tiny_checkpoint, first) for _ in range(2)])


@pytest.fixture
def draft(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return write_version(tiny_checkpoint, tmp_path / "draft-2", 2, 1, noise=0.5)


@pytest.fixture
def http(engine: Engine) -> Iterator[TestClient]:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--api-key", "secret", "--middleware", DRAFT_ROUTES]
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments), ("generate",))
    app.state.log_stats = False
    app.state.engine_client = engine
    app.state.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=DRAFT_WORKER))
    with TestClient(app, headers=KEY) as client:
        yield client


def reason(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def stage(http: TestClient, draft: Path, version: int = 2) -> Any:
    return http.post("/v1/draft/stage", json={"directory": str(draft), "version": version})


def test_the_routes_lie_behind_the_authentication(http: TestClient) -> None:
    assert http.get("/v1/draft").json()["version"] == 1
    stranger = {"Authorization": "Bearer guess"}
    assert http.get("/v1/draft", headers=stranger).status_code == 401
    assert http.post("/v1/draft/switch", json={"version": 2}, headers=stranger).status_code == 401


def test_a_draft_is_staged_switched_to_and_taken_back_in_all_workers(
    http: TestClient, engine: Engine, draft: Path
) -> None:
    before = http.get("/v1/draft").json()
    staged = stage(http, draft).json()
    assert engine.versions() == [(1, 2)] * 2 and engine.calls == []
    status = http.post("/v1/draft/switch", json={"version": 2}).json()
    assert (status["version"], status["memory"]) == (2, staged["memory"])
    assert engine.versions() == [(2, 1)] * 2 and engine.calls == ["pause", "switch 2", "resume"]
    assert http.post("/v1/draft/switch", json={"version": 2}).json() == status and len(engine.calls) == 3
    assert http.post("/v1/draft/forget", json={"version": 2}).json() == before
    assert engine.versions() == [(1, None)] * 2 and engine.calls[3:] == ["pause", "switch 1", "resume"]
    assert "no other is held" in reason(http.post("/v1/draft/forget", json={"version": 1}))


def test_what_one_worker_refuses_no_worker_holds(http: TestClient, engine: Engine, draft: Path) -> None:
    engine.workers[1].versions.version = 5
    assert "must be 5, which serves; got 1" in reason(stage(http, draft))
    assert [held for _, held in engine.versions()] == [None, None]


def test_when_one_worker_cannot_switch_the_others_switch_back(
    http: TestClient, engine: Engine, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = http.get("/v1/draft").json()
    stage(http, draft)
    versions = engine.workers[1].versions
    with monkeypatch.context() as patch:
        patch.setattr(versions, "switch", no_room)
        assert reason(http.post("/v1/draft/switch", json={"version": 2})) == "no room for 1 byte"
    assert engine.versions() == [(1, 2)] * 2
    assert engine.calls == ["pause", "switch 2", "switch 1", "resume"] and not engine.paused
    assert http.post("/v1/draft/forget", json={"version": 2}).json() == before


def no_room(version: int) -> Any:
    raise MemoryError("no room for 1 byte")


def test_no_worker_switches_unless_all_hold_the_draft(http: TestClient, engine: Engine, draft: Path) -> None:
    before = http.get("/v1/draft").json()
    stage(http, draft)
    engine.workers[1].versions.forget(2)
    assert "every worker" in reason(http.post("/v1/draft/switch", json={"version": 2}))
    assert engine.calls == []
    assert http.post("/v1/draft/forget", json={"version": 2}).json() == before


def test_forgetting_brings_workers_together_that_differ(http: TestClient, engine: Engine, draft: Path) -> None:
    before = http.get("/v1/draft").json()
    stage(http, draft)
    engine.workers[0].versions.switch(2)
    assert http.post("/v1/draft/forget", json={"version": 2}).json() == before
    assert engine.versions() == [(1, None)] * 2


def test_workers_that_hold_different_bytes_are_refused(http: TestClient, engine: Engine, draft: Path) -> None:
    before = http.get("/v1/draft").json()
    with torch.no_grad():
        next(engine.workers[1].versions.model.parameters()).add_(1.0)
    # Without being asked to nobody looks again.
    assert http.get("/v1/draft").json() == before
    assert "every worker of an engine must hold the same draft" in reason(http.get("/v1/draft?verify=true"))


def test_a_publication_looks_at_the_weights_in_use_once(
    http: TestClient, engine: Engine, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests take seconds at a real draft: of what is staged, and of what serves when the driver says so."""
    looks: list[bool] = []

    def count(tensors: Any) -> str:
        looks.append(any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors.values()))
        return memory_digest(tensors)

    monkeypatch.setattr(draft_versions, "memory_digest", count)
    del engine.workers[1:]
    before = http.get("/v1/draft").json()
    assert looks == [True]
    staged = stage(http, draft).json()
    http.post("/v1/draft/switch", json={"version": 2})
    http.get("/v1/draft")
    assert looks == [True, False]
    assert http.get("/v1/draft?verify=true").json()["memory"] == staged["memory"] != before["memory"]
    http.post("/v1/draft/forget", json={"version": 1})
    assert looks == [True, False, True]
    assert http.get("/v1/draft?verify=yes, please").status_code == 400


def test_only_what_was_replaced_is_gone_back_to(
    http: TestClient, engine: Engine, draft: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Version 2 serves and 3 is staged: to forget 2 must not make 3 serve."""
    stage(http, draft)
    status = http.post("/v1/draft/switch", json={"version": 2}).json()
    assert (status["held"], status["previous"]) == (1, 1)
    third = write_version(tiny_checkpoint, tmp_path / "draft-3", 3, 2, noise=0.5)
    stage(http, third, 3)
    status = http.get("/v1/draft").json()
    assert (status["version"], status["held"], status["previous"]) == (2, 3, None)
    calls = list(engine.calls)
    refusal = reason(http.post("/v1/draft/forget", json={"version": 2}))
    assert "version 3, which is held, is not what it replaced" in refusal
    assert http.get("/v1/draft").json() == status and engine.calls == calls
    # Nor is one that was taken back.
    http.post("/v1/draft/switch", json={"version": 3})
    http.post("/v1/draft/switch", json={"version": 2})
    assert http.get("/v1/draft").json() == status
    assert "version 3, which is held, is not" in reason(http.post("/v1/draft/forget", json={"version": 2}))
    assert http.post("/v1/draft/forget", json={"version": 3}).json() == status | {"held": None}


@pytest.mark.parametrize("num_copies", [0, 5])
def test_memory_that_runs_out_at_a_switch_changes_no_parameter(
    http: TestClient, engine: Engine, draft: Path, monkeypatch: pytest.MonkeyPatch, num_copies: int
) -> None:
    stage(http, draft)
    before, left = http.get("/v1/draft?verify=true").json(), num_copies

    def copy(parameter: torch.Tensor) -> torch.Tensor:
        nonlocal left
        if left == 0:
            raise MemoryError("no room for 1 byte")
        left -= 1
        return on_host(parameter)

    with monkeypatch.context() as patch:
        patch.setattr(draft_versions, "on_host", copy)
        assert reason(http.post("/v1/draft/switch", json={"version": 2})) == "no room for 1 byte"
    assert http.get("/v1/draft?verify=true").json() == before and left == 0
    assert http.post("/v1/draft/switch", json={"version": 2}).json()["version"] == 2


def test_a_draft_that_is_not_finite_is_refused_by_name(
    http: TestClient, engine: Engine, draft: Path, tiny_checkpoint: Path
) -> None:
    """Also when the engine starts, and though every checksum is right."""
    before = http.get("/v1/draft").json()
    source = Checkpoint.open(tiny_checkpoint)
    weights = dict(DraftCheckpoint.open(draft, source.config).tensors())
    weights["norm.weight"][:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    (file,) = draft.glob("*.safetensors")
    save_file(weights, file)
    contents = files.manifest(weights, source, version=2, parent_version=1, facts={})
    (draft / "draft.json").write_text(json.dumps(contents))
    message = "norm.weight of the draft must hold finite numbers; got 3 of 128 that are NaN or infinite"
    assert message in reason(stage(http, draft))
    assert http.get("/v1/draft").json() == before
    with pytest.raises(CheckpointError, match=message):
        Worker(tiny_checkpoint, draft)


def test_an_engine_that_somebody_paused_stays_paused(http: TestClient, engine: Engine, draft: Path) -> None:
    engine.paused = True
    stage(http, draft)
    assert http.post("/v1/draft/switch", json={"version": 2}).json()["version"] == 2
    assert engine.paused and engine.calls == ["pause", "switch 2"]


def test_a_reason_names_the_directory(http: TestClient, tmp_path: Path) -> None:
    """vLLM cuts paths out of its own errors."""
    assert reason(stage(http, tmp_path / "nowhere")).startswith(f"{tmp_path}/nowhere must be a checkpoint directory")


def test_what_is_no_version_is_refused(http: TestClient) -> None:
    for body in ({}, {"version": "x"}, {"version": None}):
        assert "version" in reason(http.post("/v1/draft/switch", json=body))
