"""The driver's side of a refresh: what is kept, when it is due, what is left on disk, what a checkpoint holds."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl import metrics
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.recipe import Recipe
from inkling_rl.types import Publication, Sample
from tests.trainer.conftest import Recipes
from trainer.draft.completions import Completion
from trainer.draft.live import LiveDraft
from trainer.draft.loop import Share
from trainer.model import load_frozen
from trainer.progress import Progress
from trainer.refresh import DraftRefresh, RefreshError, turns
from trainer.resume import Checkpoints, ResumeError, RunState, identity_of, restore_drafts, served_draft


def sample(row: int, tokens: int, prompt: int = 5) -> Sample:
    ids = torch.randint(1, 500, (prompt + tokens,), generator=torch.Generator().manual_seed(row)).tolist()
    return Sample(
        row=row,
        sample=0,
        prompt_token_ids=tuple(ids[:prompt]),
        token_ids=tuple(ids[prompt:]),
        logprobs=(-1.0,) * tokens,
        policy_version=0,
        stop_reason="stop",
        reward=0.0,
    )


def completion(of: Sample) -> Completion:
    return Completion(of.prompt_token_ids, of.token_ids)


class Published:
    """Takes the place of the engines: notes what is published, and can refuse."""

    def __init__(self) -> None:
        self.drafts: list[tuple[str, int]] = []
        self.fault: Exception | None = None

    async def __call__(self, directory: Path, version: int) -> Publication:
        if self.fault is not None:
            raise self.fault
        assert (directory / "draft.json").is_file()
        self.drafts.append((directory.name, version))
        return Publication(version=version, kind="draft", num_bytes=1, seconds=0.5)


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Any:
    return load_frozen(Checkpoint.open(checkpoint), torch.float32, torch.device("cpu"))


@pytest.fixture
def recipe(recipes: Recipes) -> Recipe:
    return recipes(
        rollout={"draft": {"num_tokens": 3, "refresh": {"interval": 2, "batch_size": 4, "learning_rate": 1e-2}}}
    )


@pytest.fixture
def make(recipe: Recipe, policy: Any, tmp_path: Path) -> Callable[..., tuple[DraftRefresh, Published, LiveDraft]]:
    """A refresh whose workers are one live draft in this process."""

    def make() -> tuple[DraftRefresh, Published, LiveDraft]:
        path = served_draft(recipe, tmp_path)
        assert path is not None
        live, published = LiveDraft(recipe, path, lambda: policy, torch.device("cpu"), Share()), Published()

        async def call(method: str, *arguments: Any) -> Any:
            return getattr(live, method)(*arguments)

        refresh = DraftRefresh(
            recipe,
            tmp_path,
            call=call,
            wait_for=lambda method, *arguments: getattr(live, method)(*arguments),
            publish=published,
            progress=Progress(4),
        )
        return refresh, published, live

    return make


def step(refresh: DraftRefresh, number: int) -> None:
    samples = [sample(10 * number + row, 4 + row) for row in range(6)]
    refresh.collect(samples, [[1] * len(s.token_ids) for s in samples])
    run(refresh.after_publication(number))


def run(awaitable: Awaitable[Any]) -> None:
    asyncio.run(awaitable)  # type: ignore[arg-type]


def test_it_is_due_every_interval_and_trains_on_all_steps_since(make: Any, tmp_path: Path) -> None:
    refresh, published, _ = make()
    step(refresh, 1)
    assert (len(refresh.completions), published.drafts, refresh.metrics) == (6, [], {})
    step(refresh, 2)
    assert published.drafts == [("draft-1", 1)] and refresh.completions == [] and refresh.version == 1
    assert set(refresh.metrics) == {
        metrics.DRAFT_LOSS,
        metrics.DRAFT_LENGTH_BEFORE,
        metrics.DRAFT_LENGTH,
        metrics.DRAFT_VERSION,
        metrics.DRAFT_SYNC_SECONDS,
        metrics.TIME_DRAFT_REFRESH,
    }
    assert refresh.metrics[metrics.DRAFT_VERSION] == 1 and refresh.metrics[metrics.DRAFT_SYNC_SECONDS] == 0.5
    facts = json.loads((tmp_path / "drafts" / "draft-1" / "draft.json").read_text())["training"]
    assert (facts["policy_version"], facts["num_completions"], facts["num_steps"]) == (2, 12, 3)
    # A step without one has no metrics of one.
    step(refresh, 3)
    assert refresh.metrics == {} and len(refresh.completions) == 6


def test_it_waits_for_completions_of_two_tokens(make: Any) -> None:
    refresh, published, _ = make()
    refresh.collect([sample(1, 1), sample(2, 0)], [[1], []])
    run(refresh.after_publication(2))
    assert published.drafts == [] and refresh.metrics == {}
    step(refresh, 4)
    assert published.drafts == [("draft-1", 1)]


def test_two_drafts_stay_on_disk(make: Any, tmp_path: Path) -> None:
    refresh, published, _ = make()
    for number in (2, 4, 6, 8):
        step(refresh, number)
    assert [version for _, version in published.drafts] == [1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "drafts").iterdir()) == ["draft-3", "draft-4"]


def test_a_draft_that_engines_refuse_ends_the_run_and_is_not_served(make: Any, tmp_path: Path) -> None:
    refresh, published, _ = make()
    published.fault = RuntimeError("not served as trained")
    with pytest.raises(RuntimeError, match="not served as trained"):
        step(refresh, 2)
    assert refresh.version == 0 and len(refresh.completions) == 6


def test_a_training_that_diverges_is_not_published(make: Any, tmp_path: Path) -> None:
    refresh, published, live = make()
    with torch.no_grad():
        live.masters.draft.weights["fc.weight"].fill_(float("inf"))
    with pytest.raises(RefreshError, match=r"got nan .* at step 1 of 2\. Lower rollout\.draft\.refresh\.learning_rate"):
        step(refresh, 2)
    assert published.drafts == [] and not (tmp_path / "drafts").exists()


def test_a_continued_run_trains_and_serves_what_one_never_stopped_does(
    make: Any, recipe: Recipe, tmp_path: Path
) -> None:
    """Stopped after step 3: the draft of step 2 serves, and step 3's completions wait for the refresh after step 4."""
    whole, _, _ = make()
    for number in (1, 2, 3):
        step(whole, number)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    staged = checkpoints.begin(3)
    whole.save(staged)
    saved = checkpoints.commit(staged, RunState(step=3, identity=identity_of(recipe), cursor={}, probe=None))
    assert DraftCheckpoint.open(saved / "draft", Checkpoint.open(recipe.model.path).config).version == 1
    step(whole, 4)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "drafts" / "draft-2").iterdir()}

    restore_drafts(recipe, tmp_path, saved)
    assert [path.name for path in (tmp_path / "drafts").iterdir()] == ["draft-1"]
    assert served_draft(recipe, tmp_path) == tmp_path / "drafts" / "draft-1"
    continued, published, _ = make()
    continued.restore(saved)
    assert continued.version == 1 and len(continued.completions) == 6
    step(continued, 4)
    assert published.drafts == [("draft-2", 2)]
    assert {path.name: path.read_bytes() for path in (tmp_path / "drafts" / "draft-2").iterdir()} == expected
    metric = metrics.DRAFT_LENGTH
    assert continued.metrics[metric] == whole.metrics[metric]


def test_a_run_continued_without_a_refresh_serves_the_recipes_draft(
    make: Any, recipe: Recipe, recipes: Recipes, tmp_path: Path
) -> None:
    refresh, _, _ = make()
    step(refresh, 2)
    refresh.save(tmp_path)
    without = recipes(rollout={"draft": {"num_tokens": 3}})
    restore_drafts(without, tmp_path, tmp_path)
    assert served_draft(without, tmp_path) == Path(without.model.path)
    assert served_draft(recipes(), tmp_path) is None
    # And one that begins to refresh later has nothing to restore.
    shutil.rmtree(tmp_path / "draft")
    (tmp_path / "draft_training.pt").unlink()
    later, _, _ = make()
    later.restore(tmp_path)
    assert later.version == 0


def test_a_step_without_anything_to_predict_is_not_what_a_draft_is_measured_on(make: Any) -> None:
    refresh, published, _ = make()
    step(refresh, 1)
    refresh.collect([sample(1, 1)], [[1]])
    run(refresh.after_publication(2))
    assert published.drafts == [("draft-1", 1)]
    assert refresh.metrics[metrics.DRAFT_LENGTH_BEFORE] >= 1 <= refresh.metrics[metrics.DRAFT_LENGTH]


def test_a_draft_that_the_driver_does_not_see_is_not_published(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker writes to its own disk."""
    refresh, published, live = make()
    monkeypatch.setattr(live, "write", lambda directory, worth: LiveDraft.write(live, f"{directory}-elsewhere", worth))
    with pytest.raises(
        RefreshError, match=r"logging\.runs_dir must be on a disk .* share; \S+/draft-1, .* is not here"
    ):
        step(refresh, 2)
    assert published.drafts == [] and (refresh.version, len(refresh.completions)) == (0, 6)


def test_a_checkpoint_without_the_draft_that_serves_is_refused(make: Any, tmp_path: Path) -> None:
    refresh, _, _ = make()
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    refresh.save(first)  # the recipe's draft serves: the recipe names it
    assert not (first / "draft").exists() and (first / "draft_training.pt").is_file()
    step(refresh, 2)
    shutil.rmtree(tmp_path / "drafts" / "draft-1")
    with pytest.raises(RefreshError, match=r"draft-1 must be there for the checkpoint: .* it is gone"):
        refresh.save(second)
    assert list(second.iterdir()) == []


def test_a_checkpoint_of_two_drafts_is_refused(make: Any, tmp_path: Path) -> None:
    refresh, _, _ = make()
    step(refresh, 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    refresh.save(saved)
    shutil.rmtree(tmp_path / "drafts")
    other, _, _ = make()  # on the recipe's draft
    with pytest.raises(ResumeError, match=r"must be of draft version 0, .* serve; it is of version 1"):
        other.restore(saved)


def test_a_runs_drafts_stay_where_a_checkpoints_cannot_be_read(make: Any, recipe: Recipe, tmp_path: Path) -> None:
    refresh, _, _ = make()
    step(refresh, 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    refresh.save(saved)
    whole = (saved / "draft" / "draft.json").read_text()
    (saved / "draft" / "draft.json").write_text(whole[:100])
    before = {path: path.read_bytes() for path in (tmp_path / "drafts").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"draft\.json"):
        restore_drafts(recipe, tmp_path, saved)
    assert {path: path.read_bytes() for path in (tmp_path / "drafts").rglob("*") if path.is_file()} == before
    # A copy that was cut short is no hindrance later.
    (tmp_path / ".drafts.partial" / "draft-7").mkdir(parents=True)
    (saved / "draft" / "draft.json").write_text(whole)
    step(refresh, 4)
    restore_drafts(recipe, tmp_path, saved)
    assert [path.name for path in (tmp_path / "drafts").iterdir()] == ["draft-1"]
    assert not list(tmp_path.glob(".drafts*"))


def test_turns_are_what_was_sampled_with_all_before_it_as_prompt() -> None:
    episode = sample(3, 8)
    ids = episode.token_ids
    found = list(turns(episode, [1, 1, 1, 0, 0, 1, 1, 1]))
    assert found == [
        Completion(episode.prompt_token_ids, ids[:3]),
        Completion(episode.prompt_token_ids + ids[:5], ids[5:]),
    ]
    assert list(turns(episode, [0, 1, 0, 0, 0, 0, 0, 1])) == []


def test_one_turn_is_kept_whole_whatever_the_loss_leaves_out(make: Any) -> None:
    refresh, _, _ = make()
    cut_short = sample(1, 6)
    refresh.collect([cut_short], [[0] * 6])
    assert refresh.completions == [completion(cut_short)]
