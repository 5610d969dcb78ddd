"""The draft of the rollouts, refreshed while the policy moves: which completions, when, what becomes of it.

    every step       the step's completions are kept
    every interval   the policy is published, then: train the draft on what was kept (`trainer.draft.live`, in the
                     workers) -> RUN/drafts/draft-<version> -> publish it to the engines -> keep nothing

A checkpoint is taken after that: it holds the draft that serves as a directory (`draft/`), and what the next refresh
begins with: the workers' weights and optimiser, and the completions kept so far. Engines of a resumed run are started
on that draft. A step's completions come from the policy before the step, the draft is trained for the one after it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from inkling_rl import metrics
from inkling_rl.recipe import Recipe
from inkling_rl.types import Publication, Sample
from trainer.draft.completions import Completion, read_lines, write_lines
from trainer.draft.loop import StepResult
from trainer.progress import Progress
from trainer.resume import DRAFT, DRAFTS, ResumeError, draft_version, served_draft

STATE_FILE, COMPLETIONS_FILE = "draft_training.pt", "draft_completions.jsonl"
NUM_MEASURED = 64  # of a step's completions, each time: a look costs as much as training on half as many
LINE_SECONDS = 10.0
NUM_KEPT = 2  # drafts on disk: the one that serves and the one before


class RefreshError(RuntimeError):
    """A refresh that would spoil or lose the draft. The draft before it still serves."""


class DraftRefresh:
    """Kept completions and the draft's version. Lives in the driver."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        *,
        call: Callable[..., Awaitable[Any]],
        wait_for: Callable[..., Any],
        publish: Callable[[Path, int], Awaitable[Publication]],
        progress: Progress,
    ) -> None:
        """Nothing is contacted.

        Args:
            recipe: with `rollout.draft.refresh`.
            run_dir: drafts go to a directory below it; every engine must be able to read it.
            call: a method of every worker's `LiveDraft` and its arguments; the first rank's answer.
            wait_for: the same where nothing can be awaited.
            publish: `Publisher.publish_draft`.
            progress: shows how it goes.
        """
        draft = recipe.rollout.draft
        assert draft is not None and draft.refresh is not None
        self.interval = draft.refresh.interval
        self.is_one_turn = recipe.environment.max_turns == 1
        self.directory = run_dir / DRAFTS
        self.call, self.wait_for, self.publish, self.progress = call, wait_for, publish, progress
        served = served_draft(recipe, run_dir)
        assert served is not None
        self.version = draft_version(served)
        self._is_trained = served.parent == self.directory  # and not the recipe's own
        self.completions: list[Completion] = []
        self.metrics: dict[str, float] = {}
        """Of the last step's refresh; empty where there was none."""

        self._newest: list[Completion] = []

    def collect(self, samples: Sequence[Sample], loss_masks: Sequence[Sequence[int]]) -> None:
        """Keeps the completions of a step, as sampled.

        Args:
            samples: of the step.
            loss_masks: of each, 0 on tokens of the environment.
        """
        self._newest = [
            part
            for sample, mask in zip(samples, loss_masks, strict=True)
            # One turn is sampled from end to end, also where a filter has taken it out of the loss.
            for part in turns(sample, [1] * len(mask) if self.is_one_turn else mask)
        ]
        self.completions += self._newest
        self.metrics = {}

    async def after_publication(self, step: int) -> None:
        """Refreshes the draft if it is due after this step, whose policy serves.

        Raises:
            RefreshError: the training diverged, or the draft is not where the engines look for it.
            PublicationError: the new draft does not serve; the old one does.
            EngineError: an engine is gone, hung or refuses.
        """
        if step % self.interval or not self.completions:
            return
        started = time.monotonic()
        num_steps = await self.call("begin", self.completions, step)
        # A step may have left nothing to predict where those before it have.
        measured = (self._newest or self.completions)[-NUM_MEASURED:]
        before = await self.call("worth", measured)
        results = [result async for result in self._train(num_steps)]
        after = await self.call("worth", measured)
        path = self.directory / f"{DRAFT}-{self.version + 1}"
        await self.call("write", str(path), after)
        if not path.is_dir():
            raise RefreshError(
                f"logging.runs_dir must be on a disk that the driver and the first worker share; {path}, which that "
                f"worker has written, is not here. Move the run there. Draft {self.version} still serves"
            )
        publication = await self.publish(path, self.version + 1)
        self.version += 1
        self._is_trained = True
        self._prune()
        self.completions = []
        self.metrics = {
            metrics.DRAFT_LOSS: sum(result.loss for result in results) / len(results),
            metrics.DRAFT_LENGTH_BEFORE: before.tokens_per_step,
            metrics.DRAFT_LENGTH: after.tokens_per_step,
            metrics.DRAFT_VERSION: self.version,
            metrics.DRAFT_SYNC_SECONDS: publication.seconds,
            metrics.TIME_DRAFT_REFRESH: time.monotonic() - started,
        }
        self.progress.line(
            f"draft {self.version}: loss {self.metrics[metrics.DRAFT_LOSS]:.3f}  tokens per step "
            f"{before.tokens_per_step:.2f} -> {after.tokens_per_step:.2f}  {time.monotonic() - started:.1f} s"
        )

    async def _train(self, num_steps: int) -> AsyncIterator[StepResult]:
        shown = time.monotonic()
        for number in range(1, num_steps + 1):
            result: StepResult = await self.call("advance")
            if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
                raise RefreshError(
                    f"draft {self.version + 1}: loss and gradients must be finite at every step of a refresh; got "
                    f"{result.loss} and a norm of {result.grad_norm} at step {number} of {num_steps}. Lower "
                    f"rollout.draft.refresh.learning_rate. Draft {self.version} still serves"
                )
            if time.monotonic() - shown >= LINE_SECONDS:
                shown = time.monotonic()
                self.progress.line(f"draft {self.version + 1}: step {number}/{num_steps}  loss {result.loss:.3f}")
            yield result

    def _prune(self) -> None:
        for version in range(self.version - NUM_KEPT, -1, -1):
            old = self.directory / f"{DRAFT}-{version}"
            if not old.is_dir():
                return
            shutil.rmtree(old, ignore_errors=True)

    def save(self, checkpoint: Path) -> None:
        """Adds to a checkpoint what a resumed run needs.

        Raises:
            RefreshError: the draft that serves is gone from the run directory.
        """
        served = self.directory / f"{DRAFT}-{self.version}"
        if self._is_trained and not served.is_dir():
            raise RefreshError(
                f"{served} must be there for the checkpoint: it is the draft that serves; it is gone. Leave the drafts "
                "of a run alone while it goes on, and continue it from its last checkpoint"
            )
        self.wait_for("save", str(checkpoint / STATE_FILE))
        (checkpoint / COMPLETIONS_FILE).write_text(write_lines(self.completions), encoding="utf-8")
        if self._is_trained:
            shutil.copytree(served, checkpoint / DRAFT)

    def restore(self, checkpoint: Path) -> None:
        """Continues from what `save` wrote; from the recipe's draft where the run had no refresh then.

        Raises:
            ResumeError: the checkpoint's draft in training is not the one that serves.
        """
        if not (checkpoint / STATE_FILE).is_file():
            return
        version = self.wait_for("restore", str(checkpoint / STATE_FILE))
        if version != self.version:
            raise ResumeError(
                f"{checkpoint / STATE_FILE} must be of draft version {self.version}, which the engines serve; it is of "
                f"version {version}. The checkpoint's parts do not belong together: resume from a copy that is whole"
            )
        self.completions = read_lines((checkpoint / COMPLETIONS_FILE).read_text(encoding="utf-8"))


def turns(sample: Sample, mask: Sequence[int]) -> Iterator[Completion]:
    """The sampled parts of an episode that have something to predict, each with all that precedes it as its prompt.

    Args:
        sample: one episode.
        mask: 1 on its sampled tokens.
    """
    end = 0
    for is_sampled, group in groupby(mask):
        first, end = end, end + len(list(group))
        if is_sampled and end - first > 1:
            yield Completion(sample.prompt_token_ids + sample.token_ids[:first], sample.token_ids[first:end])
