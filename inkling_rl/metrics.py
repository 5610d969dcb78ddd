"""Names of our metrics, and where metrics go: one JSON line per step first, Weights & Biases if asked.

SkyRL's own keys pass through unchanged; what is listed here is what inkling-rl adds. A sink never changes a run: JSON
Lines is the record and must succeed, Weights & Biases is a mirror whose failure is one warning. A value that is not
finite is written as null and reported: `NaN` is not JSON, and a missing key looks like a step without the metric.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)

REWARD_MEAN = "reward/mean"  # mean reward of the step's completions
REWARD_ZERO_VARIANCE = "reward/zero_variance_fraction"  # groups whose completions all scored the same
EVAL_SCORE = "eval/score"  # mean reward on the held-out problems, at the training temperature
EVAL_GREEDY_SCORE = "eval/greedy_score"  # the same, greedy
MISMATCH_KL = "mismatch/kl"  # estimate of KL(engine || trainer) per token, nats
MISMATCH_ABS_LOGPROB_DIFF = "mismatch/abs_logprob_diff"  # mean |trainer - engine| log-probability per token
MISMATCH_PROBE = "mismatch/probe"  # mean |engine change - trainer change| on fixed prompts, after a publication
SYNC_SECONDS = "sync/seconds"  # one publication: first byte staged to last acknowledgement
SYNC_BYTES = "sync/bytes"  # sent to all engines by one publication
TIME_STEP = "time/step"  # seconds of the whole step
TIME_ROLLOUT = "time/rollout"  # seconds of generation
TIME_TRAIN = "time/train"  # seconds of scoring and optimisation
TOKENS_GENERATED = "tokens/generated"  # completion tokens of the step
TOKENS_PER_SECOND = "tokens/per_second"  # completion tokens per second of generation
COMPLETION_LENGTH_MEAN = "completion/length_mean"  # tokens
COMPLETION_TRUNCATED = "completion/truncated_fraction"  # completions that ran out of tokens
ACCEPTANCE_LENGTH = "rollout/acceptance_length"  # tokens per verification step, where rollouts are drafted
ACCEPTANCE_AT = "rollout/acceptance_at_"  # + 1, 2, ...: drafts whose token at this position was accepted, a fraction
DRAFT_VERSION_SERVED = "rollout/draft_version"  # version of the draft that the step's rollouts were drafted with
DRAFT_VERSION = "draft/version"  # version that a refresh after the step has published
DRAFT_LOSS = "draft/loss"  # mean over the refresh's optimiser steps
DRAFT_LENGTH_BEFORE = "draft/expected_length_before"  # tokens per verification step on completions of the step, before
DRAFT_LENGTH = "draft/expected_length"  # the same after the refresh, which has seen these completions
DRAFT_SYNC_SECONDS = "draft/sync_seconds"  # publication of the draft
TIME_DRAFT_REFRESH = "time/draft_refresh"  # seconds of training, measurement and publication
ENTROPY = "policy/entropy"  # mean entropy of the trainer's distribution per token, nats
CLIP_FRACTION = "policy/clip_fraction"  # tokens whose probability ratio was clipped
GRAD_NORM = "policy/grad_norm"  # before clipping
LEARNING_RATE = "policy/learning_rate"  # of this step
POLICY_VERSION = "policy_version"  # version that sampled the step's completions


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per call to a file and flushes it. Also used for samples."""

    def __init__(self, path: str | Path, resumed_step: int | None = None) -> None:
        """Open `path`, creating it.

        Args:
            path: the .jsonl file.
            resumed_step: last step of the checkpoint that a run continues from. Rows of later steps, and a last row
                that a crash cut short, are removed, so that no step appears twice.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and self.path.exists():
            self._truncate(resumed_step)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.append({"step": step, **metrics})

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; it must have a `step`, by which a resumed run finds where to cut."""
        assert "step" in row, "a row without a step cannot be cut on resume"
        self._file.write(json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _truncate(self, last_step: int) -> None:
        kept = [
            line
            for line in self.path.read_bytes().splitlines(keepends=True)
            if _step_of(line, last_step + 1) <= last_step
        ]
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_bytes(b"".join(kept))
        os.replace(partial, self.path)


class WandbSink:
    """Mirrors metrics to Weights & Biases. Any failure is one warning, after which it does nothing."""

    def __init__(
        self,
        project_name: str,
        run_name: str,
        mode: Literal["offline", "online"],
        directory: str | Path,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the run; `run_name` is also its id, so that a resumed run continues the same curves."""
        self._run: Any = None
        try:
            import wandb

            Path(directory).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project_name,
                name=run_name,
                id="".join(c if c.isalnum() or c in "-_" else "-" for c in run_name),
                resume="allow",
                mode=mode,
                dir=str(directory),
                config=dict(config or {}),
                settings=wandb.Settings(init_timeout=30, console="off", silent=True),
            )
        except Exception as error:  # the tracker is a convenience: whatever it raises must not end a run
            self._give_up(error)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if self._run is None:
            return
        try:
            self._run.log({k: v for k, v in to_json(metrics).items() if v is not None}, step=step)
        except Exception as error:  # as above
            self._give_up(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0)
        except Exception as error:  # as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        logger.warning("logging.wandb: the tracker failed and is off for the rest of the run: %s", error)


class Sinks:
    """Sends metrics to every sink and reports the values that are not finite."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, metrics: Mapping[str, Any], step: int) -> tuple[str, ...]:
        """Returns the names of the metrics whose value is not finite (they are written as null)."""
        bad = tuple(name for name, value in metrics.items() if _is_not_finite(value))
        if bad:
            shown = ", ".join(f"{name} = {metrics[name]}" for name in bad)
            logger.warning("step %d: not finite, written as null: %s", step, shown)
        for sink in self._sinks:
            sink.log(metrics, step)
        return bad

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def to_json(value: Any) -> Any:
    """JSON types from nested Python, numpy and torch values: scalars become numbers, non-finite ones None."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_json(value.tolist())
    return str(value)


def _is_not_finite(value: Any) -> bool:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, float) and not math.isfinite(value)


def _step_of(line: bytes, otherwise: int) -> int:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else otherwise
    except (ValueError, KeyError, TypeError):
        return otherwise
