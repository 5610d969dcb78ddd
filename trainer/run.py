"""The composition root: one call trains a recipe from the first process to the last line.

    engine process starts | Ray starts | SkyRL is imported | worker loads the model | engine is healthy | steps

Everything that is started is ended here, in every case: finished, failed, interrupted. A killed driver cannot do that:
then the engine's processes and Ray's end by themselves (`trainer.server`, the engine's plugin, Ray's raylet).

Exit status: 0 finished, 1 failed, 2 the recipe or its files cannot be used, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from inkling_rl import metrics
from inkling_rl.engine_args import check_memory, engine_arguments, installed_device
from inkling_rl.recipe import Recipe, RecipeError, dump
from trainer import interrupts
from trainer.engine import SERVER_ARGUMENTS, EngineProcess, visible_gpus
from trainer.failure import ENGINE_LOG, WORKER_LOG, explain
from trainer.progress import Progress
from trainer.resume import (
    Checkpoints,
    check_identity,
    lock,
    read_state,
    restore_drafts,
    served_draft,
    write_atomically,
)
from trainer.vendor import NO_BARS

if TYPE_CHECKING:
    from trainer.dataset import Prompts
    from trainer.experiment import Experiment

SKYRL_LOG = "skyrl.log"


def train(recipe: Recipe, resume: Path | None = None, *, name: str = "train") -> int:
    """Trains a recipe and says on the console how it goes.

    Args:
        recipe: the whole run.
        resume: directory of an earlier run, to continue from its newest checkpoint; None starts a new one.
        name: of the recipe, for the run's name where `logging.run_name` gives none.

    Returns:
        The exit status.
    """
    progress = Progress(recipe.trainer.num_steps)
    run = Run(recipe, resume, name, progress)
    with interrupts.raised():
        try:
            run.execute()
            return 0
        except (Exception, interrupts.Interrupted) as error:  # the outermost frame: it is shown and everything is ended
            interrupts.ignore()  # cleaning up takes seconds, and half of it would leave processes
            # Asked of the signals and not of the error: C code of Ray's makes a SystemError of an `Interrupted`.
            if interrupts.RECEIVED:
                first = interrupts.RECEIVED[0]
                status, message = 128 + first, f"interrupted by {signal.Signals(first).name}"
            else:
                status = 2 if isinstance(error, ValueError) else 1
                message = "error: " + run.explain(error)
        finally:
            interrupts.ignore()
            progress.stop()
            run.close()
    if status == 2 or status > 128:
        run.discard()
    print(message, file=sys.stderr, flush=True)
    if run.lock is not None and (run.directory / "checkpoints" / "latest").is_file():
        print(f"continue with: inkling-rl train --resume {run.directory}", flush=True)
    return status


class Run:
    """What one call of `train` owns."""

    def __init__(self, recipe: Recipe, resume: Path | None, name: str, progress: Progress) -> None:
        self.recipe = recipe
        self.resume = resume
        self.progress = progress
        run_name = recipe.logging.run_name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.directory = (resume or recipe.logging.runs_dir.expanduser() / run_name).resolve()
        self.logs = self.directory / "logs"
        self.engine: EngineProcess | None = None
        self.engine_gpus: list[str] | None = None
        self.is_new = False  # whether the directory was made by this call
        self.lock: IO[str] | None = None

    def execute(self) -> None:
        """The whole run. Raises whatever ends it early."""
        os.environ[NO_BARS] = "1"
        from inkling_rl.checkpoint.reader import resolve

        model_path = resolve(self.recipe.model.path).absolute()
        resumed_step = self._prepare_directory()
        if resumed_step is not None and resumed_step >= self.recipe.trainer.num_steps:
            self.progress.line(
                f"{self.directory} has finished its {resumed_step} steps. Raise trainer.num_steps to go on"
            )
            return
        self._start_engine(model_path)
        with self.progress.phase("start trainer"):
            experiment = self._start_trainer(model_path, resumed_step)
        with self.progress.phase("start engine"):
            if self.engine is not None:
                self.engine.wait_until_healthy(self.recipe.rollout.startup_timeout)
        experiment.run()
        self.progress.stop()
        self._print_result()

    def _prepare_directory(self) -> int | None:
        """Makes or checks the run directory.

        Returns:
            The step to continue from, None for a new run.
        """
        if self.resume is not None:
            self.lock = lock(self.directory)
            checkpoint = Checkpoints(self.directory / "checkpoints", self.recipe.checkpoint.max_to_keep).latest()
            state = read_state(checkpoint)
            check_identity(state, self.recipe)
            shutil.rmtree(self.directory / "adapters", ignore_errors=True)
            restore_drafts(self.recipe, self.directory, checkpoint)
            step = state.step
            self.progress.line(f"run: {self.directory}, continuing after step {step}")
            self.logs = self.directory / "logs" / f"resumed-{step}-{time.strftime('%Y%m%d-%H%M%S')}"
        else:
            step = None
            self._make_directory()
            self.progress.line(f"run: {self.directory}")
        self.logs.mkdir(parents=True, exist_ok=True)
        write_atomically(self.directory / "recipe.yaml", dump(self.recipe))
        return step

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True)  # made, not found: of two runs that start together one gets it
        except OSError as error:
            if self.directory.exists():
                raise RecipeError(
                    f"logging.run_name must be a new directory below logging.runs_dir; got {self.directory}, which "
                    f"exists. Choose another, or continue it with --resume {self.directory}"
                ) from error
            raise RecipeError(
                f"logging.runs_dir must be a directory that can be written; got {self.recipe.logging.runs_dir} "
                f"({error.strerror}). Set another"
            ) from error
        self.is_new = True
        self.lock = lock(self.directory)

    def _start_engine(self, model_path: Path) -> None:
        if self.recipe.rollout.placement != "standalone":
            return
        self._divide_gpus()
        draft = served_draft(self.recipe, self.directory)
        arguments = engine_arguments(self.recipe, model=str(model_path), draft=draft) | SERVER_ARGUMENTS
        check_memory(arguments)
        self.engine = EngineProcess(
            arguments, port=self.recipe.rollout.port, log=self.logs / ENGINE_LOG, gpus=self.engine_gpus
        )
        self.progress.line(f"engine: process {self.engine.process.pid}, {self.engine.url}")

    def _divide_gpus(self) -> None:
        """The engine takes the first GPUs of this node, Ray and the workers the rest."""
        rollout, trainer = self.recipe.rollout, self.recipe.trainer
        if rollout.num_engines > 1 or trainer.num_nodes > 1:
            raise RecipeError(
                "rollout.placement must be ray for more than one engine or node; got standalone with "
                f"rollout.num_engines = {rollout.num_engines}, trainer.num_nodes = {trainer.num_nodes}. Set it to ray"
            )
        if installed_device() == "cpu":
            return
        gpus = visible_gpus()
        if len(gpus) < rollout.tensor_parallel_size + trainer.num_gpus_per_node:
            raise RecipeError(
                "rollout.tensor_parallel_size + trainer.num_gpus_per_node must be at most the "
                f"{len(gpus)} GPUs of this node; got {rollout.tensor_parallel_size} + {trainer.num_gpus_per_node}. "
                "Lower one of them"
            )
        self.engine_gpus = gpus[: rollout.tensor_parallel_size]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rollout.tensor_parallel_size :])

    def _start_trainer(self, model_path: Path, resumed_step: int | None) -> Experiment:
        with interrupts.held():
            import torch  # noqa: F401 - what comes first loads it otherwise, in the middle of its work

            from inkling_rl.checkpoint.reader import Checkpoint
            from trainer import cluster, logs, vendor
        # While the engine starts: what it and the workers would find half a minute later.
        Checkpoint.open(model_path).check()
        logs.ours_to(self.progress)
        vendor.prepare()
        if cluster.is_local(self.recipe):
            cluster.start_local(self.recipe, self.logs / WORKER_LOG)
            interrupts.raise_on_signals()  # Ray has just put a handler of its own there, which aborts
        logs.theirs_to(self.logs / SKYRL_LOG)
        with interrupts.held():
            from trainer import skyrl_config
            from trainer.experiment import Experiment, load_prompts, load_tokenizer
        tokenizer = load_tokenizer(model_path, self.recipe.rollout.effort)
        cfg = skyrl_config.build(
            self.recipe,
            model_path=model_path,
            run_dir=self.directory,
            engine_url=self.engine.url if self.engine else None,
            stop_token_ids=tokenizer.renderer.stop_token_ids,
            is_resumed=resumed_step is not None,
        )
        prompts = load_prompts(self.recipe, tokenizer)
        self._report_dropped(*prompts)
        if not cluster.is_local(self.recipe):
            cluster.join(cfg)
            interrupts.raise_on_signals()
        experiment = Experiment(self.recipe, cfg, tokenizer, self.directory, self.progress)
        experiment.connect(self.engine)
        experiment.build(prompts, resumed_step, self.logs / SKYRL_LOG)
        return experiment

    def _report_dropped(self, *sources: Prompts | None) -> None:
        for field, prompts in zip(("data.train", "data.eval"), sources, strict=True):
            if prompts is not None and prompts.num_dropped:
                dropped = f"{prompts.num_dropped} longer than data.max_prompt_length left out"
                self.progress.line(f"{field}: {len(prompts)} prompts, {dropped}")

    def _print_result(self) -> None:
        rows = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        scores = [row[metrics.EVAL_SCORE] for row in rows if metrics.EVAL_SCORE in row]
        rewards = [row[metrics.REWARD_MEAN] for row in rows if metrics.REWARD_MEAN in row]
        held_out = f"held-out {scores[0]:.3f} -> {scores[-1]:.3f}, " if scores else ""
        reward = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, " if rewards else ""
        print(
            f"result: {len(rewards)} steps, {held_out}{reward}{self.progress.seconds:.0f} s, {self.directory}",
            flush=True,
        )

    def explain(self, error: BaseException) -> str:
        rollout = self.recipe.rollout
        ended_by = self.engine.ended_by if self.engine is not None else None
        return explain(error, self.logs, ended_by, rollout.kv_cache_gib, rollout.max_model_len)

    def discard(self) -> None:
        """Removes the directory of a run that could not begin."""
        record = self.directory / "metrics.jsonl"
        if self.is_new and not (record.exists() and record.stat().st_size):
            shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Ends everything that was started. Safe to call in any state."""
        if self.engine is not None:
            self.engine.ask_to_end()
        if "ray" in sys.modules:
            import ray

            ray.shutdown()
        if self.engine is not None:
            self.engine.end()
