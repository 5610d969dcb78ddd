"""A draft replaced in a running engine: what it drafts, what comes out meanwhile, and every draft that is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.engine_args import DRAFT_WORKER
from rollout.plugin.draft_versions import versions_of
from tests.rollout.drafting import speculative, switch_draft, watched, write_version
from tests.rollout.engines import differences, engine, generate, largest_change, random_prompts
from tests.rollout.test_drafting import INVARIANCE, Reference, check_blocks
from tests.rollout.test_drafting_distribution import LEVEL, PREFIXES, TESTED, p_values
from tests.rollout.test_engine_lora import make_adapter, request

PROMPTS = random_prompts((3, 1, 9, 64, 100, 17, 33, 130), seed=20)
CACHED = 96 + 32 + 128 + 32  # tokens of these that a second request finds in whole pages
MAX_TOKENS = 32
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def loras(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("adapters") / "a"
    make_adapter(tiny_checkpoint, path, 1)
    return [request("a", 1, path) if index % 2 else None for index in range(len(PROMPTS))]


class Without(NamedTuple):
    """What an engine without a draft gives."""

    plain: list[Any]
    adapted: list[Any]
    refusals: list[str]


@pytest.fixture(scope="module")
def without(tiny_checkpoint: Path, loras: list[Any]) -> Without:
    asked: list[tuple[Any, ...]] = [
        ("draft_status",),
        ("stage_draft", "x", 1),
        ("switch_draft", 1),
        ("forget_draft", 1),
    ]
    with engine(tiny_checkpoint, worker_extension_cls=DRAFT_WORKER, **LORA) as llm:
        outputs = [generate(llm, PROMPTS, lora=lora, max_tokens=MAX_TOKENS) for lora in (None, loras)]
        return Without(*outputs, [ask(llm, *question)["refused"] for question in asked])


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path, without: Without) -> Iterator[Any]:
    """An engine on the checkpoint's own draft, which is version 0: nobody trained it."""
    arguments = {"speculative_config": speculative(tiny_checkpoint), "worker_extension_cls": DRAFT_WORKER, **LORA}
    with engine(tiny_checkpoint, **arguments) as llm:
        yield llm


def ask(llm: Any, method: str, *arguments: Any) -> dict[str, Any]:
    """The answer of the engine's one worker."""
    [answer] = llm.collective_rpc(method, args=arguments)
    return answer


def serving(llm: Any) -> int:
    return int(ask(llm, "draft_status")["version"])


Versions = Callable[..., Path]


@pytest.fixture
def version(llm: Any, tiny_checkpoint: Path, tmp_path: Path) -> Versions:
    """Writes the version after the one that serves."""

    def write(noise: float = 0.5, number: int | None = None, parent: int | None = None, **more: Any) -> Path:
        now = serving(llm)
        number, parent = number or now + 1, now if parent is None else parent
        directory = Path(mkdtemp(dir=tmp_path)) / f"draft-{number}"
        return write_version(tiny_checkpoint, directory, number, parent, noise=noise, **more)

    return write


def replace(llm: Any, draft: Path) -> int:
    """Stages, switches and forgets the version before."""
    before, number = serving(llm), number_of(draft)
    staged = ask(llm, "stage_draft", str(draft), number)
    assert staged["version"] == number, staged
    assert (answer := switch_draft(llm, number))["memory"] == staged["memory"], answer
    ask(llm, "forget_draft", before)
    return number


def test_an_engine_says_what_it_was_started_on(llm: Any, monkeypatch: Any) -> None:
    status = ask(llm, "draft_status")
    assert (status["version"], status["files"], status["held"]) == (0, None, None)
    with watched(monkeypatch) as seen:
        generate(llm, PROMPTS[:2], max_tokens=4)
    assert ask(llm, "draft_status") == status | {"num_blocks": status["num_blocks"] + len(seen)}


def test_a_staged_draft_changes_nothing_yet(llm: Any, version: Versions) -> None:
    draft, before = version(), ask(llm, "draft_status")
    staged = ask(llm, "stage_draft", str(draft), before["version"] + 1)
    assert staged["memory"] != before["memory"]
    assert ask(llm, "draft_status") == before | {"held": before["version"] + 1}
    assert ask(llm, "forget_draft", before["version"] + 1) == before


def test_the_new_draft_drafts_as_it_would_alone_also_after_cached_prompts(
    llm: Any, version: Versions, tiny_checkpoint: Path, tiny_oracle: Any, without: Without, monkeypatch: Any
) -> None:
    """The slow draft on the new weights is what its blocks are compared with."""
    generate(llm, PROMPTS, max_tokens=MAX_TOKENS)  # the old draft's pages are in the cache
    draft = version()
    replace(llm, draft)
    reference = Reference(tiny_checkpoint, tiny_oracle, draft)
    shutil.rmtree(draft)  # what serves is in memory
    for cached in (0, CACHED):
        with watched(monkeypatch) as seen:
            outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
        assert sum(output.num_cached_tokens for output in outputs) == cached
        assert largest_change(without.plain, outputs) <= INVARIANCE
        assert check_blocks(seen, outputs, PROMPTS, reference) >= len(PROMPTS) * 20


def test_without_an_empty_cache_the_old_pages_would_show(
    llm: Any, version: Versions, tiny_checkpoint: Path, tiny_oracle: Any, monkeypatch: Any
) -> None:
    """That the test above can see what it is there for."""
    llm.reset_prefix_cache()
    generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
    draft = version()
    number = number_of(draft)
    ask(llm, "stage_draft", str(draft), number)
    ask(llm, "switch_draft", number)
    with watched(monkeypatch) as seen:
        outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
    with pytest.raises(AssertionError):
        check_blocks(seen, outputs, PROMPTS, Reference(tiny_checkpoint, tiny_oracle, draft))
    llm.reset_prefix_cache()
    ask(llm, "forget_draft", number - 1)


@contextmanager
def switching(llm: Any, monkeypatch: Any, every: int, *versions: int) -> Iterator[None]:
    """Inside, the engine switches to these versions, one after each `every` steps, while requests run."""
    step, waiting, steps = llm.llm_engine.step, list(versions), 0

    def counted() -> Any:
        nonlocal steps
        steps += 1
        if waiting and steps % every == 0:
            assert len(llm.llm_engine.engine_core.engine_core.scheduler.running) > 1
            switch_draft(llm, waiting.pop(0))
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", counted)
        yield
    assert not waiting, f"{steps} steps were too few"


@pytest.mark.parametrize("after", [2, 3, 9])
def test_a_switch_under_running_requests_changes_no_output(
    llm: Any, version: Versions, without: Without, loras: list[Any], tiny_oracle: Any, monkeypatch: Any, after: int
) -> None:
    """With drafts in flight, half of the requests with an adapter: all is as without a draft. And the same way back."""
    draft = version(noise=1.0)
    number = number_of(draft)
    ask(llm, "stage_draft", str(draft), number)
    with switching(llm, monkeypatch, after, number):
        outputs = generate(llm, PROMPTS, lora=loras, max_tokens=MAX_TOKENS)
    assert serving(llm) == number
    assert largest_change(without.adapted, outputs) <= INVARIANCE
    with switching(llm, monkeypatch, after, number - 1):
        outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS, temperature=1.0, seed=after)
    assert serving(llm) == number - 1
    assert max(differences(tiny_oracle, PROMPTS, outputs)) < 1e-4


def test_the_way_back_is_to_the_same_bytes(llm: Any, version: Versions) -> None:
    before, draft = ask(llm, "draft_status"), version()
    number = number_of(draft)
    ask(llm, "stage_draft", str(draft), number)
    after = switch_draft(llm, number)
    assert (after["version"], after["held"], after["num_blocks"]) == (number, number - 1, 0)
    assert ask(llm, "draft_status", True) == after == after | {"previous": number - 1}
    assert ask(llm, "switch_draft", number) == after  # it serves: nothing to do
    assert switch_draft(llm, number - 1) == before | {"held": number, "num_blocks": 0}
    assert ask(llm, "draft_status", True) == ask(llm, "draft_status")
    assert ask(llm, "forget_draft", number)["held"] is None
    assert "must be staged before it is switched to; got none staged" in ask(llm, "switch_draft", number)["refused"]
    assert "must not serve to be forgotten" in ask(llm, "forget_draft", number - 1)["refused"]


def test_a_switch_that_fails_half_way_shows(llm: Any, version: Versions) -> None:
    before, draft = ask(llm, "draft_status"), version()
    number = number_of(draft)
    ask(llm, "stage_draft", str(draft), number)

    def damage(worker: Any) -> None:
        tensors = versions_of(worker).held.tensors
        tensors[list(tensors)[-1]] = torch.zeros(3, 5, 7)

    llm.collective_rpc(damage)
    assert "size of tensor" in ask(llm, "switch_draft", number)["refused"]
    after = ask(llm, "draft_status")
    assert after["version"] == before["version"] and after["memory"] != before["memory"]
    replace(llm, version())


def test_the_same_draft_again_changes_nothing(llm: Any, version: Versions, monkeypatch: Any) -> None:
    """Neither a byte nor a drafted token."""
    replace(llm, version())
    before = ask(llm, "draft_status")
    blocks = []
    for _ in range(2):
        llm.reset_prefix_cache()
        with watched(monkeypatch) as seen:
            generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
        blocks.append([(block.length, block.anchor, block.tokens, block.hidden.tolist()) for block in seen])
        number = serving(llm)
        replace(llm, version(number=number + 1, seed=before["version"]))
        after = ask(llm, "draft_status")
        assert (after["files"], after["memory"]) == (before["files"], before["memory"])
        assert after["version"] == number + 1
    assert blocks[0] == blocks[1] and len(blocks[0]) > 100


def number_of(draft: Path) -> int:
    return int(json.loads((draft / "draft.json").read_text())["version"])


def manifest_of(draft: Path, **fields: Any) -> None:
    path = draft / "draft.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def flip(draft: Path) -> None:
    (file,) = draft.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 0x40
    file.write_bytes(content)


def tensors_of(draft: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    (file,) = draft.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    for index in draft.glob("*.index.json"):
        index.unlink()
    file.rename(draft / "model.safetensors")


def another_shape(draft: Path) -> None:
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5e5}))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, r"must have the SHA-256 of draft.json, [0-9a-f]{64}; got"),
    "no manifest": (lambda draft: (draft / "draft.json").unlink(), "must hold draft.json; it does not"),
    "another version": (lambda draft: manifest_of(draft, version=99), r"version of the draft must be \d+; got 99"),
    "no descendant": (
        lambda draft: manifest_of(draft, parent_version=77),
        r"parent_version of draft version \d+ must be \d+, which serves; got 77",
    ),
    "from nothing": (lambda draft: manifest_of(draft, parent_version=None), "which serves; got None"),
    "another layout tag": (lambda draft: manifest_of(draft, layout="other"), "layout must be inkling2-dspark-rnn"),
    "another base": (
        lambda draft: manifest_of(draft, base_model="0" * 64),
        r"base_model of the draft must be [1-9a-f]",
    ),
    "another shape": (another_shape, r"rope_theta of the draft must be 1000000.0; got 500000.0. Start an engine on it"),
    "a missing tensor": (
        lambda draft: tensors_of(draft, lambda tensors: tensors.pop("norm.weight")),
        "norm.weight must be present; it is missing",
    ),
    "an extra tensor": (
        lambda draft: tensors_of(draft, lambda tensors: tensors.update(other=torch.zeros(1))),
        "other must not be present",
    ),
    "a misshapen tensor": (
        lambda draft: tensors_of(draft, lambda tensors: tensors.update({"norm.weight": torch.ones(64).bfloat16()})),
        r"norm.weight must have shape \[128\]; got \[64\]",
    ),
    "nothing there": (shutil.rmtree, "must be a checkpoint directory"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_draft_that_does_not_fit_is_refused_and_the_old_one_serves_on(llm: Any, version: Versions, kind: str) -> None:
    change, message = REFUSED[kind]
    before, draft = ask(llm, "draft_status"), version()
    number = number_of(draft)
    change(draft)
    answer = ask(llm, "stage_draft", str(draft), number)
    assert re.search(message, answer["refused"]), answer
    assert ask(llm, "draft_status") == before
    assert "must be staged" in ask(llm, "switch_draft", number)["refused"]


def test_versions_that_do_not_follow_need_to_be_told_what_they_replace(llm: Any, version: Versions) -> None:
    now = serving(llm)
    fresh = version(number=now + 10, parent=now + 9)
    assert "refused" in ask(llm, "stage_draft", str(fresh), now + 10, now + 1)
    assert ask(llm, "stage_draft", str(fresh), now + 10, now)["version"] == now + 10
    # What was staged for one version does not follow another.
    between = version(number=now + 1)
    assert ask(llm, "stage_draft", str(between), now + 1)["version"] == now + 1
    assert "got version" in ask(llm, "switch_draft", now + 10)["refused"]
    switch_draft(llm, now + 1)
    again = version(number=now + 1, parent=now)
    assert "must not be the one that serves; it is" in ask(llm, "stage_draft", str(again), now + 1)["refused"]


@pytest.mark.slow
def test_sampled_tokens_are_distributed_as_without_a_draft_while_drafts_change(
    tiny_checkpoint: Path, tiny_oracle: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Two drafts in turn, every second step, each time between thousands of drafted tokens and their verification."""
    draft = write_version(tiny_checkpoint, tmp_path / "draft-1", 1, 0, noise=1.0)
    arguments = {"max_model_len": 64, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    drafting = {"speculative_config": speculative(tiny_checkpoint, num_tokens=2), "worker_extension_cls": DRAFT_WORKER}
    with engine(tiny_checkpoint, **arguments, **drafting) as llm:
        ask(llm, "stage_draft", str(draft), 1)
        with switching(llm, monkeypatch, 2, *[1, 0] * 10):
            assert min(p_values(llm, tiny_oracle, PREFIXES[0], 1.0, 4000)) > LEVEL / len(TESTED)


def test_an_engine_without_a_draft_says_so(without: Without) -> None:
    assert len(without.refusals) == 4
    assert all("rollout.draft must be given" in refusal for refusal in without.refusals)
