"""The DeepSpeed worker against plain torch: losses, gradients, steps, checkpoints and exported adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import Recipes
from tests.trainer.workers import build_worker

pytestmark = pytest.mark.usefixtures("own_workers")

RESPONSES = 12


@pytest.fixture(scope="module")
def build(recipes: Recipes) -> Any:
    """Makes a worker in this process."""
    return lambda steps=4, **changes: build_worker(recipes(**changes), steps)


def batch(seed: int = 0) -> Any:
    """Eight rollouts of uneven length, padded as SkyRL pads them."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    generator = torch.Generator().manual_seed(seed)
    width, count = 30, 8
    tokens, attention = torch.full((count, width), 256), torch.zeros(count, width, dtype=torch.long)
    response = torch.zeros(count, RESPONSES, dtype=torch.long)
    for row in range(count):
        length = int(torch.randint(4, RESPONSES + 1, (), generator=generator))
        total = length + int(torch.randint(3, width - RESPONSES + 1, (), generator=generator))
        tokens[row, width - total :] = torch.randint(0, 250, (total,), generator=generator)
        attention[row, width - total :] = 1
        response[row, RESPONSES - length :] = 1
    old = -6.0 + 0.3 * torch.randn(count, RESPONSES, generator=generator)
    data = TrainingInputBatch(
        {
            "sequences": tokens,
            "attention_mask": attention,
            "response_mask": response,
            "loss_mask": response.float(),
            "advantages": torch.randn(count, 1, generator=generator).expand(-1, RESPONSES) * response / response.sum(),
            "action_log_probs": old,
            "rollout_logprobs": old + 0.1 * torch.randn(count, RESPONSES, generator=generator),
        }
    )
    data.metadata = {"response_length": RESPONSES}
    return data


def adapter(worker: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = worker.strategy.adapter_state()
    return state


def trained(worker: Any, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [
        (worker.forward_backward(batch(step)).metrics["policy_loss"], worker.optim_step()) for step in steps
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(recipes: Recipes) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Three steps written out in plain torch: loss, gradients over micro-batches, clipping, AdamW."""
    from lora.model import adapter_parameters, adapter_state
    from trainer.logprobs import score_actions
    from trainer.model import build_policy

    recipe = recipes()
    model = build_policy(recipe, torch.device("cpu")).train()
    parameters = list(adapter_parameters(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=recipe.trainer.learning_rate, weight_decay=0.0)
    steps = []
    for step in range(3):
        data, total = batch(step), 0.0
        for start in (0, 4):
            part = data[start : start + 4]
            new = score_actions(model, part["sequences"], part["attention_mask"], RESPONSES, 1.0).logprobs
            ratio = (new - part["action_log_probs"]).exp()
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
            surrogate = -torch.min(ratio * part["advantages"], clipped * part["advantages"])
            weight = (part["action_log_probs"] - part["rollout_logprobs"]).exp().clamp(max=2.0)
            loss = (surrogate * weight * part["loss_mask"]).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total, float(norm)))
    return steps, adapter_state(model)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_steps_equal_plain_torch(build: Any, plain: Any, stage: int) -> None:
    worker = build(trainer={"zero_stage": stage})
    steps = trained(worker, range(3))
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, plain[0], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for name, value in adapter(worker).items():
        # AdamW's first steps have the size of the learning rate whatever the gradient: rounding shows where it is 0.
        assert (value - plain[1][name]).abs().mean() < 1e-5, name


def test_metrics_of_a_step(build: Any) -> None:
    worker = build()
    metrics = worker.forward_backward(batch()).metrics
    assert 0 < metrics["policy_entropy"] < torch.log(torch.tensor(500.0))
    assert metrics["policy_lr"] == pytest.approx(1e-2)
    assert metrics["minibatch_rollout_logprobs_abs_diff_mean"] > 0
    # The weights are those of old against rollout, whose logarithms differ by 0.1 on average.
    assert 0.9 < metrics["loss_metrics/is_ratio_mean"] < 1.1


def test_forward_gives_the_log_probabilities_that_are_trained_on(build: Any) -> None:
    from trainer.logprobs import score_actions

    worker, data = build(), batch()
    rows = torch.tensor([entry["logprobs"] for entry in worker.forward(data).loss_fn_outputs])
    with torch.no_grad():
        expected = score_actions(worker.model.module, data["sequences"], data["attention_mask"], RESPONSES, 1.0)
    assert torch.allclose(rows, expected.logprobs, atol=1e-5, rtol=0)
    scored = worker.score([data["sequences"][0][data["attention_mask"][0] > 0].tolist()])
    length = int(data["response_mask"][0].sum())
    assert scored[0][-length:] == pytest.approx(rows[0, -length:].tolist(), abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_resumed_worker_continues_bit_by_bit(build: Any, tmp_path: Path, stage: int) -> None:
    changes = {"trainer": {"zero_stage": stage, "lr_scheduler": "cosine"}, "lora": {"dropout": 0.1}}
    first = build(**changes)
    trained(first, range(2))
    first.save_checkpoint(str(tmp_path / "policy"))
    at_save = adapter(first)
    expected = trained(first, range(2, 4))
    second = build(**changes)
    second.load_checkpoint(str(tmp_path / "policy"))
    assert all(torch.equal(value, at_save[name]) for name, value in adapter(second).items())
    assert trained(second, range(2, 4)) == expected
    assert all(torch.equal(value, adapter(first)[name]) for name, value in adapter(second).items())
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_resumed_worker_takes_the_rates_of_its_recipe(build: Any, tmp_path: Path, stage: int) -> None:
    first = build(trainer={"zero_stage": stage, "lr_scheduler": "linear"})
    trained(first, range(2))
    first.save_checkpoint(str(tmp_path / "policy"))
    rates = {"learning_rate": 1e-4, "weight_decay": 0.1}
    second = build(trainer={"zero_stage": stage, "lr_scheduler": "linear", **rates})
    second.load_checkpoint(str(tmp_path / "policy"))
    before = adapter(second)
    assert second.scheduler.get_last_lr() == [5e-5]  # two of four steps done
    trained(second, range(2, 3))
    moved = max(float((value - before[name]).abs().max()) for name, value in adapter(second).items())
    assert 0 < moved < 1.2e-4  # a step of AdamW is about the rate, and was 1e-2 when the checkpoint was written
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.1]


def test_another_number_of_workers_is_refused(build: Any, tmp_path: Path) -> None:
    from trainer.resume import ResumeError

    worker = build()
    worker.save_checkpoint(str(tmp_path))
    (tmp_path / "rng_rank1.pt").write_bytes(b"")
    with pytest.raises(ResumeError, match=r"must be 2, as when .* got 1"):
        worker.load_checkpoint(str(tmp_path))


def test_an_exported_adapter_is_what_plain_peft_loads(build: Any, recipes: Recipes, tmp_path: Path) -> None:
    from peft import PeftModel

    from inkling_rl.checkpoint.reader import Checkpoint
    from lora.base import fingerprint
    from lora.files import read_adapter
    from lora.schema import AdapterError
    from trainer.model import load_base

    worker = build()
    trained(worker, range(2))
    num_bytes = worker.export_adapter(str(tmp_path / "adapter"))
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert num_bytes == sum(value.numel() * 4 for value in written.values())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
    # Whoever is given it with another base of the same shape refuses it.
    checkpoint = Checkpoint.open(recipes().model.path)
    assert read_adapter(tmp_path / "adapter", checkpoint.config, fingerprint=fingerprint(checkpoint)).rank == 8
    other = fingerprint(Checkpoint.open("builtin:tiny-arithmetic"))
    with pytest.raises(AdapterError, match="base_model_fingerprint must be that of the base model"):
        read_adapter(tmp_path / "adapter", checkpoint.config, fingerprint=other)
    loaded = PeftModel.from_pretrained(load_base(recipes(), torch.device("cpu")), str(tmp_path / "adapter")).eval()
    ids = batch()["sequences"][:1]
    worker.model.eval()
    with torch.no_grad():
        ours = worker.model.module(input_ids=ids, use_cache=False).logits
        theirs = loaded(input_ids=ids, use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)


def test_a_bfloat16_base_keeps_a_float32_adapter(build: Any) -> None:
    worker = build(model={"dtype": "bfloat16"})
    (first, *_) = trained(worker, range(1))
    assert first[1] > 0
    kinds = {p.dtype for p in worker.model.module.parameters() if p.requires_grad}
    assert kinds == {torch.float32}
    assert worker.model.module.get_parameter("base_model.model.lm_head.weight").dtype == torch.bfloat16
