"""The draft beside the policy: it alone is trained, on the policy as it is, and goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from tests.trainer.conftest import Recipes
from tests.trainer.test_worker import adapter, trained
from tests.trainer.workers import build_worker
from trainer.draft.completions import Completion
from trainer.draft.live import LiveDraft
from trainer.draft.loop import Masters, Plan, Training
from trainer.draft.measure import measure
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target

pytestmark = pytest.mark.usefixtures("own_workers")

REFRESH = {"interval": 1, "batch_size": 4, "learning_rate": 1e-2, "num_epochs": 2.0}


@pytest.fixture(scope="module")
def build(recipes: Recipes) -> Any:
    """Makes a worker whose adapter does something: two steps have been taken. Dropout shows who is in evaluation."""

    def make(refresh: dict[str, Any] | None = REFRESH, **changes: Any) -> Any:
        draft = {"num_tokens": 3, "refresh": refresh}
        worker = build_worker(recipes(rollout={"draft": draft}, lora={"rank": 8, "dropout": 0.3}, **changes))
        trained(worker, range(2))
        return worker

    return make


@pytest.fixture(scope="module")
def shared(build: Any) -> Any:
    return build()


@pytest.fixture
def worker(shared: Any) -> Any:
    """One whose draft is that of the checkpoint, whatever other tests made of it."""
    return anew(shared)


def anew(worker: Any) -> Any:
    worker.live_draft = worker._live_draft()
    return worker


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    """Eight, of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(1, 500, (24,), generator=generator).tolist() for _ in range(8)]
    return [Completion(tuple(row[:7]), tuple(row[7 : 10 + number])) for number, row in enumerate(ids)]


def refresh(worker: Any, completions: list[Completion], step: int) -> list[Any]:
    """Every optimiser step of a refresh, from `begin` to the last `advance`."""
    return [worker.draft("advance") for _ in range(worker.draft("begin", completions, step))]


def masters(worker: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in worker.live_draft.masters.draft.weights.items()}


def differs(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in first.items() if not torch.equal(value, second[name])}


def merged_target(worker: Any, checkpoint: Path) -> Target:
    """The policy as a frozen model without an adapter: base + (alpha / rank) B A."""
    target = Target.load(Checkpoint.open(checkpoint), (2, 5), torch.device("cpu"), torch.float32)
    lora = worker.recipe.lora
    state = adapter(worker)
    with torch.no_grad():
        for name, a in state.items():
            if name.endswith(".lora_A.weight"):
                module = target.model.get_submodule(
                    name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                )
                module.weight += lora.alpha / lora.rank * state[name.replace("lora_A", "lora_B")] @ a
    return target


def test_a_refresh_changes_the_draft_alone_and_the_policy_trains_on_as_without(
    build: Any, completions: list[Completion]
) -> None:
    alone, worker = build(refresh=None), build()
    policy, draft = dict(worker.model.module.named_parameters()), masters(worker)
    before = {name: value.detach().clone() for name, value in policy.items()}
    random_state = torch.get_rng_state()
    results = refresh(worker, completions, step=2)
    worker.draft("worth", completions)
    assert len(results) == 4 and results[-1].loss < results[0].loss
    assert differs(masters(worker), draft) == draft.keys()
    assert not differs(before, {name: value.detach() for name, value in policy.items()})
    assert all(value.grad is None or not value.grad.any() for value in policy.values())
    assert torch.equal(torch.get_rng_state(), random_state)
    # Dropout masks included.
    torch.manual_seed(7)
    expected = trained(alone, range(2, 4))
    torch.manual_seed(7)
    assert trained(worker, range(2, 4)) == expected
    assert not differs(adapter(worker), adapter(alone))


def test_it_is_trained_as_for_a_frozen_model_that_has_the_adapter_in_its_weights(
    worker: Any, checkpoint: Path, completions: list[Completion]
) -> None:
    start = BlockDraft(worker.live_draft.masters.draft.shape, masters(worker))
    plan = Plan(num_epochs=2.0, batch_size=4, micro_batch_size=4, learning_rate=1e-2, seed=3)
    target = merged_target(worker, checkpoint)
    frozen = Training(Masters(start, torch.device("cpu")), target, completions, plan)
    base = Target.load(Checkpoint.open(checkpoint), target.layers, torch.device("cpu"), torch.float32)
    without = Training(Masters(start, torch.device("cpu")), base, completions, plan)
    worth = measure(start, target, completions, num_tokens=3)
    assert worker.draft("worth", completions).tokens_per_step == pytest.approx(worth.tokens_per_step, rel=1e-4)
    # Run seed 0, step 3: the seed of the plan above.
    results = refresh(worker, completions, step=3)
    for result in results:
        expected = frozen.advance()
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        assert result.acceptance == pytest.approx(expected.acceptance, rel=1e-3)
    assert frozen.step == frozen.num_steps
    # The base model is another target.
    assert abs(results[0].cross_entropy - without.advance().cross_entropy) > 1e-2


def test_a_restored_draft_goes_on_bit_by_bit(worker: Any, completions: list[Completion], tmp_path: Path) -> None:
    refresh(worker, completions, step=1)
    worker.draft("write", str(tmp_path / "draft-1"), worker.draft("worth", completions))
    worker.draft("save", str(tmp_path / "state.pt"))
    expected, weights = refresh(worker, completions[3:], step=2), masters(worker)
    assert anew(worker).draft("restore", str(tmp_path / "state.pt")) == 1
    assert refresh(worker, completions[3:], step=2) == expected
    assert not differs(masters(worker), weights)
    # With the optimiser: from the weights alone it goes on otherwise.
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "state.pt")
    anew(worker).draft("restore", str(tmp_path / "state.pt"))
    assert refresh(worker, completions[3:], step=2)[0] == expected[0]
    assert differs(masters(worker), weights)


def test_the_recipe_bounds_anchors_and_micro_batches(
    recipes: Recipes, worker: Any, completions: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_anchors": 3, "micro_batch_size": 2}
    recipe = recipes(rollout={"draft": {"num_tokens": 3, "refresh": REFRESH | limits}})
    live = worker.live_draft
    worker.live_draft = LiveDraft(recipe, Path(recipe.model.path), live.policy, live.device, live.share)
    seen: list[tuple[int, ...]] = []
    rows = BlockDraft.rows

    def watched(draft: BlockDraft, outputs: torch.Tensor, embedded: torch.Tensor, *others: torch.Tensor) -> Any:
        seen.append(tuple(embedded.shape[:2]))
        return rows(draft, outputs, embedded, *others)

    monkeypatch.setattr(BlockDraft, "rows", watched)
    refresh(worker, completions, step=1)
    worker.draft("worth", completions)
    trained_on, measured = seen[:8], seen[8:]
    assert trained_on == [(2, 3)] * 8
    assert [shape[0] for shape in measured] == [2] * 4
    assert live.micro_batch_size == live.recipe.trainer.micro_batch_size_per_gpu
    assert live.settings.max_anchors == 512


def test_every_step_of_a_run_has_a_seed_of_its_own(worker: Any, completions: list[Completion]) -> None:
    first, again, other = ([r.loss for r in refresh(anew(worker), completions, step)] for step in (1, 1, 2))
    assert first == again != other


def test_what_is_written_is_the_masters_as_stored_and_says_where_it_is_from(
    worker: Any, checkpoint: Path, completions: list[Completion], tmp_path: Path
) -> None:
    for version in (1, 2):
        refresh(worker, completions, step=version)
        worth = worker.draft("worth", completions)
        worker.draft("write", str(tmp_path / f"draft-{version}"), worth)
    opened = DraftCheckpoint.open(tmp_path / "draft-2", Checkpoint.open(checkpoint).config)
    assert opened.manifest is not None
    assert (opened.version, opened.manifest.parent_version) == (2, 1)
    assert opened.manifest.base_model == worker.base_fingerprint
    tensors, live = dict(opened.tensors()), masters(worker)
    assert tensors.keys() == live.keys()
    assert all(torch.equal(value, live[name].bfloat16()) for name, value in tensors.items())
    # Worth is that of these, not of the masters.
    draft = BlockDraft(opened.shape, {name: value.float() for name, value in tensors.items()})
    target = Target(worker.model.module.get_base_model(), opened.shape.target_layers)
    assert worth == measure(draft, target, completions, num_tokens=3, batch_size=worker.live_draft.micro_batch_size)
