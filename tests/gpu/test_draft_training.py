"""Draft training on a GPU against the CPU: one optimiser step in float32, and thirty in bfloat16."""

from __future__ import annotations

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import tiny_config, write_tiny
from inkling_rl.draft.shape import DraftShape
from trainer.draft.completions import Completion
from trainer.draft.loop import Masters, Plan, StepResult, Training
from trainer.draft.model import BlockDraft, new_weights
from trainer.draft.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = DraftShape.from_config(tiny_config())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0))


def completions() -> list[Completion]:
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, 500, (20 + number,), generator=generator).tolist() for number in range(8)]
    return [Completion(tuple(row[:9]), tuple(row[9:])) for row in ids]


def advance(checkpoint: Checkpoint, device: str, dtype: torch.dtype, steps: int = 1) -> tuple[StepResult, Training]:
    target = Target.load(checkpoint, SHAPE.target_layers, torch.device(device), dtype)
    start = BlockDraft(SHAPE, new_weights(tiny_config(), torch.ones(SHAPE.hidden_size), seed=1))
    plan = Plan(num_epochs=steps, batch_size=8, learning_rate=1e-2)
    training = Training(Masters(start, target.device), target, completions(), plan)
    for _ in range(steps):
        result = training.advance()
    return result, training


def test_a_step_is_that_of_the_cpu(checkpoint: Checkpoint) -> None:
    (expected, _), (found, training) = (advance(checkpoint, device, torch.float32) for device in ("cpu", "cuda"))
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    assert found.acceptance == pytest.approx(expected.acceptance, abs=2e-3)
    assert all(value.is_cuda for value in training.draft.weights.values())


def test_bfloat16_learns(checkpoint: Checkpoint) -> None:
    first, _ = advance(checkpoint, "cuda", torch.bfloat16)
    last, training = advance(checkpoint, "cuda", torch.bfloat16, steps=30)
    assert last.loss < 0.9 * first.loss
    prompts = torch.arange(1, 9).expand(4, -1)
    made = training.target.complete(prompts, 1.0, 5, stop_token=263, seed=0)
    assert made == training.target.complete(prompts, 1.0, 5, stop_token=263, seed=0)
