"""The optimiser's loop over completions: batches, schedule, gradients, and a state that can be continued from.

Everything drawn at random follows from the seed and the step, so a state is weights, optimiser and step. Several ranks
train one draft: each takes a share of a step's micro-batches, and gradients are added up. Source: DSpark (arXiv
2607.05147) for the numbers of `Plan`: AdamW without weight decay, 4 % warm-up, gradients clipped to 1, ten epochs.
Departure: after the warm-up the rate follows half a cosine to zero; what the paper's does is not said.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.draft.completions import Blocks, Completion, make_blocks, sample_anchors
from trainer.draft.losses import Coefficients, backward, decay
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target
from trainer.draft.teacher_forcing import passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the result, besides target, starting weights and completions."""

    num_epochs: float = 10.0
    batch_size: int = 512
    """Completions of an optimiser step."""

    micro_batch_size: int = 16
    """Completions at a time."""

    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    max_grad_norm: float = 1.0
    max_anchors: int = 512
    """Anchors of a completion and epoch."""

    decay_gamma: float = 4.0
    coefficients: Coefficients = field(default_factory=Coefficients)
    seed: int = 0

    def num_steps(self, num_completions: int) -> int:
        return max(1, round(self.num_epochs * num_completions / self.batch_size))

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, counted from 0."""
        num_warmup_steps = max(1, round(self.warmup_share * num_steps))
        if step < num_warmup_steps:
            return self.learning_rate * (step + 1) / num_warmup_steps
        progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Means over the rows of one optimiser step, weighted as in the loss."""

    loss: float
    cross_entropy: float
    distance: float
    confidence: float
    acceptance: tuple[float, ...]
    """Mean acceptance probability of each row, not weighted."""

    grad_norm: float


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every step is this process's."""

    rank: int = 0
    world_size: int = 1

    def of(self, batches: Sequence[Blocks]) -> list[Blocks]:
        """This rank's micro-batches, one of every round: as many as every other rank's, and of the same shapes.

        The target's weights may be spread over ranks, so that all of them must run its modules equally often: how
        often the head is run follows from a batch's shape. Where a round has too few, a rank gets one without weight.
        A rank that waits for the largest batch of a round loses nothing when its own is as large.
        """
        if self.world_size == 1:
            return list(batches)
        blank = batches[-1]._replace(weights=torch.zeros_like(batches[-1].weights))
        mine = []
        for round_of in batched(batches, self.world_size):
            own = round_of[self.rank] if self.rank < len(round_of) else blank
            sizes = [(*blocks.tokens.shape, blocks.anchors.shape[1]) for blocks in round_of]
            mine.append(own.padded(*map(max, zip(*sizes, strict=True))))
        return mine

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sums over ranks, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)


class Masters:
    """A draft's weights in training, float32, and their optimiser."""

    def __init__(self, draft: BlockDraft, device: torch.device) -> None:
        """Shape and starting values are those of `draft`, which is copied."""
        self.device = device
        weights = {
            name: value.to(device, torch.float32, copy=True).requires_grad_() for name, value in draft.weights.items()
        }
        self.draft = BlockDraft(draft.shape, weights)
        self.optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rate: float, max_grad_norm: float) -> float:
        """One step at a learning rate. Returns the gradients' norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.draft.weights.values(), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers to continue from."""
        return {
            "weights": {name: value.detach() for name, value in self.draft.weights.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        with torch.no_grad():
            for name, value in self.draft.weights.items():
                value.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


class Training:
    """Masters, what they are trained on, and the step."""

    def __init__(
        self,
        masters: Masters,
        target: Target,
        completions: Sequence[Completion],
        plan: Plan,
        share: Share = Share(),
    ) -> None:
        """`masters` are trained in place; `completions` are all ranks' and the same on each.

        Raises:
            ValueError: no completion is long enough to have an anchor.
        """
        self.completions = [c for c in completions if len(c.tokens) > 1]
        if not self.completions:
            raise ValueError(
                "--data must have completions of two tokens or more; got none. Give the draft something to predict"
            )
        self.masters, self.target, self.plan, self.share = masters, target, plan, share
        self.draft = masters.draft
        self.num_steps = plan.num_steps(len(self.completions))
        self.step = 0
        self._orders: dict[int, list[int]] = {}

    def run(self, report: Callable[[int, int, StepResult], None] = lambda step, num_steps, result: None) -> None:
        """Train to the end, from wherever the state is; `report` is called after every step, counted from 1."""
        while self.step < self.num_steps:
            result = self.advance()
            report(self.step, self.num_steps, result)

    def advance(self) -> StepResult:
        """One optimiser step."""
        plan, shape = self.plan, self.draft.shape
        decay_B = decay(shape.block_size, plan.decay_gamma)
        batches = [
            make_blocks([c for c, _ in part], [a for _, a in part], shape.mask_token_id, decay_B)
            for part in batched(self._batch(), plan.micro_batch_size)
        ]
        # The denominators are those of the whole batch, so its cut into micro-batches and shares changes nothing.
        total = float(sum(float(blocks.weights.sum()) for blocks in batches))
        counts_B = sum((blocks.weights > 0).sum((0, 1)) for blocks in batches)
        sums = torch.zeros(4)
        accepted_B = torch.zeros(shape.block_size)
        for blocks in self.share.of(batches):
            for _, scored in passes(self.draft, self.target, blocks.to(self.target.device)):
                losses = backward(
                    scored,
                    self.target.logits,
                    self.draft.weights["markov_head.markov_w2.weight"],
                    shape.block_size,
                    lambda losses: plan.coefficients.total(losses) / total,
                )
                sums += torch.stack([plan.coefficients.total(losses), *losses[:3]]).float().cpu()
                accepted_B += losses.acceptance.float().cpu()
        gradients = [value.grad for value in self.draft.weights.values() if value.grad is not None]
        self.share.add_up([*gradients, sums, accepted_B])
        grad_norm = self.masters.step(plan.rate(self.step, self.num_steps), plan.max_grad_norm)
        self.step += 1
        loss, cross_entropy, distance, confidence = (sums / total).tolist()
        acceptance = (accepted_B / counts_B).nan_to_num().tolist()
        return StepResult(
            loss=loss,
            cross_entropy=cross_entropy,
            distance=distance,
            confidence=confidence,
            acceptance=tuple(acceptance),
            grad_norm=grad_norm,
        )

    def _batch(self) -> list[tuple[Completion, list[int]]]:
        """Completions of the current step with their anchors, the longest last."""
        count, size = len(self.completions), self.plan.batch_size
        batch = []
        for number in range(self.step * size, (self.step + 1) * size):
            epoch, place = divmod(number, count)
            index = self._order(epoch)[place]
            completion = self.completions[index]
            seed = f"{self.plan.seed}/{epoch}/{index}"
            batch.append((completion, sample_anchors(completion, self.plan.max_anchors, seed)))
        return sorted(batch, key=lambda item: len(item[0].prompt) + len(item[0].tokens))

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.completions)))
            random.Random(f"batches/{self.plan.seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._orders[epoch]

    def state(self) -> dict[str, Any]:
        """Tensors and numbers to continue from."""
        return {"step": self.step, **self.masters.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.step = state["step"]
        self.masters.restore(state)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """A file that holds the old state or the new one, whenever this process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
