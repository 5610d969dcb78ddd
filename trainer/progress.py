"""What a user sees of a run: phases as they finish, a line per step, one line of result.

Bars on a terminal, plain lines elsewhere, the same facts in both. Not logging: what SkyRL, Ray and the engine say goes
to files in RUN/logs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inkling_rl import metrics


class Progress:
    """Console of one run."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.started = time.monotonic()
        self.is_terminal = sys.stdout.isatty()
        self._bar: Any = None
        self._task: Any = None

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.started

    def line(self, text: str) -> None:
        """One line with the time since the run began."""
        shown = f"[{self.seconds:6.1f} s] {text}"
        if self._bar is not None:
            self._bar.console.print(shown, markup=False, highlight=False)
        else:
            print(shown, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a phase when it begins and how long it took when it ends."""
        started = time.monotonic()
        self._describe(name)
        if not self.is_terminal:
            self.line(f"{name} ...")
        yield
        self.line(f"{name}: {time.monotonic() - started:.1f} s")

    def start(self, done: int) -> None:
        """Shows the bar of steps on a terminal."""
        if not self.is_terminal or self._bar is not None:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=self.num_steps, completed=done)

    def step(self, step: int, values: dict[str, Any]) -> None:
        """The line of a finished step (0 is the evaluation before training)."""
        shown = [f"step {step}/{self.num_steps}"]
        for label, key, form in (
            ("reward", metrics.REWARD_MEAN, ".3f"),
            ("held-out", metrics.EVAL_SCORE, ".3f"),
            ("greedy", metrics.EVAL_GREEDY_SCORE, ".3f"),
            ("mismatch", metrics.MISMATCH_ABS_LOGPROB_DIFF, ".1e"),
            ("tokens", metrics.TOKENS_GENERATED, "d"),
        ):
            if key in values:
                shown.append(f"{label} {values[key]:{form}}")
        if metrics.TIME_STEP in values:
            shown.append(f"{values[metrics.TIME_STEP]:.1f} s")
        self.line("  ".join(shown))
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def _describe(self, name: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def stop(self) -> None:
        """Takes the bar away. Safe to call again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
