"""A draft that is trained during reinforcement learning, beside the policy whose tokens it guesses.

It lives in the policy worker, one copy per rank, all equal. A refresh is the training of `trainer.draft.loop` with two
differences: the target is the live policy, adapter included, and weights and optimiser stay from one refresh to the
next. Everything random follows from the run's seed and step. The order of calls is the driver's (`trainer.refresh`):

    begin -> [worth] -> advance, as often as begin said -> [worth] -> write

Not here: which completions, when, and publication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.recipe import Recipe
from trainer.draft import files
from trainer.draft.completions import Completion
from trainer.draft.loop import Masters, Plan, Share, StepResult, Training, save_state
from trainer.draft.measure import Worth, measure
from trainer.draft.model import BlockDraft
from trainer.draft.target import Target


class LiveDraft:
    """One rank's copy of the draft in training."""

    def __init__(
        self, recipe: Recipe, path: Path, policy: Callable[[], Any], device: torch.device, share: Share
    ) -> None:
        """Begins with a draft on disk.

        Args:
            recipe: with `rollout.draft.refresh`; `model.path` is the directory of the checkpoint.
            path: of the draft that serves.
            policy: the live `Inkling2ForCausalLM`, adapter inside.
            device: where that is.
            share: which rank this is.

        Raises:
            CheckpointError: there is no draft, or it is for another target.
        """
        draft = recipe.rollout.draft
        assert draft is not None and draft.refresh is not None
        self.recipe, self.policy, self.device, self.share = recipe, policy, device, share
        self.num_tokens, self.settings = draft.num_tokens, draft.refresh
        self.micro_batch_size = draft.refresh.micro_batch_size or recipe.trainer.micro_batch_size_per_gpu
        self.checkpoint = Checkpoint.open(recipe.model.path)
        opened = DraftCheckpoint.open(path, self.checkpoint.config)
        self.config = dict(opened.source.config)
        self.version = opened.version
        self.masters = Masters(BlockDraft(opened.shape, dict(opened.tensors())), device)
        self.training: Training | None = None
        self.step = 0

    def begin(self, completions: Sequence[Completion], step: int) -> int:
        """Starts a refresh.

        Args:
            completions: since the last refresh, of all ranks, each of two tokens or more.
            step: of the run; the policy is that after it.

        Returns:
            How many times to `advance`.
        """
        plan = Plan(
            num_epochs=self.settings.num_epochs,
            batch_size=self.settings.batch_size,
            micro_batch_size=self.micro_batch_size,
            learning_rate=self.settings.learning_rate,
            max_anchors=self.settings.max_anchors,
            # As far apart as seeds of runs may be: two runs' refreshes share no anchors.
            seed=self.recipe.trainer.seed * 1_000_003 + step,
        )
        self.step = step
        self.training = Training(self.masters, self._target(), completions, plan, self.share)
        return self.training.num_steps

    def advance(self) -> StepResult:
        """One optimiser step."""
        assert self.training is not None, "begin first"
        return self.training.advance()

    def worth(self, completions: Sequence[Completion]) -> Worth:
        """Of the weights as they are stored and served, under the live policy at the temperature of the rollouts."""
        stored = files.stored(self.masters.draft.weights, self.config)
        weights = {name: value.to(self.device, torch.float32) for name, value in stored.items()}
        draft = BlockDraft(self.masters.draft.shape, weights)
        # Every rank measures all of them: under ZeRO-3 all must run the target equally often.
        return measure(
            draft,
            self._target(),
            completions,
            num_tokens=self.num_tokens,
            temperature=self.recipe.rollout.temperature,
            batch_size=self.micro_batch_size,
        )

    def write(self, directory: str, worth: Worth) -> None:
        """Ends the refresh: the draft has its next version, which the first rank writes to `directory`.

        Raises:
            CheckpointError: the directory is in use or the disk is full.
        """
        training = self.training
        assert training is not None and training.step == training.num_steps, "advance to the end first"
        self.training = None
        self.version += 1
        if self.share.rank != 0:
            return
        weights = files.stored(self.masters.draft.weights, self.config)
        contents = files.manifest(
            weights,
            self.checkpoint,
            version=self.version,
            parent_version=self.version - 1,
            facts={"training": self._facts(training), "worth": asdict(worth)},
        )
        files.write_draft(Path(directory), self.config, weights, contents)

    def save(self, path: str) -> None:
        """Writes what the next refresh begins with to a file (the first rank)."""
        if self.share.rank == 0:
            save_state(Path(path), {"version": self.version, **self.masters.state()})

    def restore(self, path: str) -> int:
        """Continues from what `save` wrote. Returns the draft's version."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.version = int(state["version"])
        self.masters.restore(state)
        return self.version

    def _target(self) -> Target:
        return Target(self.policy(), self.masters.draft.shape.target_layers)

    def _facts(self, training: Training) -> dict[str, Any]:
        # Nothing of the moment: a resumed run writes the same bytes.
        return {
            "policy_version": self.step,
            "num_completions": len(training.completions),
            "num_tokens": sum(len(completion.tokens) for completion in training.completions),
            "num_steps": training.num_steps,
            "plan": asdict(training.plan) | {"coefficients": training.plan.coefficients._asdict()},
            "torch": torch.__version__,
        }
