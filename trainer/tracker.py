"""Where SkyRL sends metrics: the run's files, in SkyRL's interface.

Takes the place of SkyRL's `Tracking`. Metrics go to `inkling_rl.metrics` sinks under SkyRL's own keys plus ours;
samples go to `samples.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inkling_rl.metrics import JsonlSink, Sink, Sinks, WandbSink
from inkling_rl.recipe import Recipe
from inkling_rl.types import Sample


class Tracker:
    """SkyRL's tracker over our sinks."""

    backend = "inkling-rl"

    def __init__(self, recipe: Recipe, run_dir: Path, resumed_step: int | None) -> None:
        """Opens RUN/metrics.jsonl and RUN/samples.jsonl; later steps of an interrupted run are cut off on resume."""
        self.samples = JsonlSink(run_dir / "samples.jsonl", resumed_step)
        sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", resumed_step)]
        if recipe.logging.wandb != "off":
            config = recipe.model_dump(mode="json")
            sinks.append(
                WandbSink(recipe.logging.project_name, run_dir.name, recipe.logging.wandb, run_dir / "wandb", config)
            )
        self.sinks = Sinks(sinks)
        self.num_samples = recipe.logging.num_samples_per_step
        self.after_log: Callable[[int], None] = lambda step: None
        """Called when the metrics of a step are on disk."""

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Metrics of a step."""
        self.sinks.log(data, step)
        self.after_log(step)

    def log_samples(self, samples: list[Sample], step: int, decode: Callable[[tuple[int, ...]], str]) -> None:
        """The first `logging.num_samples_per_step` completions of a step."""
        for sample in samples[: self.num_samples]:
            self.samples.append(sample.as_row(step, decode(sample.prompt_token_ids), decode(sample.token_ids)))

    def log_exception(self, error: BaseException, step: int = 0) -> None:
        """Nothing: `trainer.run` reports what ended the run."""

    def finish(self) -> None:
        self.sinks.close()
        self.samples.close()
