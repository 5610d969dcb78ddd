"""SkyRL's experiment with our parts: tokenizer, data, worker, generator, client, loop.

Built step by step by `trainer.run`, so that the engine, Ray and the worker start beside each other. SkyRL's own
constructor and set-up are not called: they load data through a hub client, trust remote code and know two strategies.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from skyrl.train.entrypoints.main_base import BasePPOExp

from inkling_rl.recipe import Recipe
from trainer import cluster, logs
from trainer.client import EngineClient
from trainer.dataset import BUILTIN, DataError, Prompts, read_rows, read_tokenizer
from trainer.engine import EngineProcess
from trainer.generator import ChatTokenizer, Generator
from trainer.loop import Loop
from trainer.progress import Progress
from trainer.tracker import Tracker


def load_tokenizer(model_path: Path, effort: float) -> ChatTokenizer:
    """The checkpoint's tokenizer under the renderer's chat format.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    return ChatTokenizer(read_tokenizer(model_path), effort)


def load_prompts(recipe: Recipe, tokenizer: ChatTokenizer) -> tuple[Prompts, Prompts | None]:
    """Training and held-out prompts of a recipe.

    Raises:
        DataError: a source cannot be used, or too few prompts are short enough for one batch.
    """
    data = recipe.data

    def load(source: str, field: str) -> Prompts:
        prompt_key, answer_key = ("prompt", "answer") if source in BUILTIN else (data.prompt_key, data.answer_key)
        return Prompts(
            read_rows(source, prompt_key, answer_key, field),
            tokenizer.renderer,
            prompt_key=prompt_key,
            answer_key=answer_key,
            effort=recipe.rollout.effort,
            environment=recipe.environment.name,
            max_prompt_length=data.max_prompt_length,
        )

    train = load(data.train, "data.train")
    if len(train) < recipe.trainer.train_batch_size:
        raise DataError(
            f"data.train must have at least trainer.train_batch_size = {recipe.trainer.train_batch_size} prompts of up "
            f"to data.max_prompt_length = {data.max_prompt_length} tokens; got {len(train)} ({train.num_dropped} are "
            "longer). Lower the batch size or raise the length"
        )
    heldout = load(data.eval, "data.eval") if data.eval else None
    if heldout is not None and not len(heldout):
        raise DataError(
            f"data.eval must have prompts of up to data.max_prompt_length = {data.max_prompt_length} tokens; all "
            f"{heldout.num_dropped} are longer. Raise it"
        )
    return train, heldout


class Experiment(BasePPOExp):
    """One run's objects. `prepare` starts the worker and returns while it loads; `train` runs the loop."""

    def __init__(self, recipe: Recipe, cfg: Any, tokenizer: ChatTokenizer, run_dir: Path, progress: Progress) -> None:
        self.recipe = recipe
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.run_dir = run_dir
        self.progress = progress
        self.colocate_pg = None
        self.client: EngineClient | None = None
        self.trainer: Loop | None = None
        self.engines: Any = None

    def connect(self, engine: EngineProcess | None) -> EngineClient:
        """The client of the standalone engine, or of engines that SkyRL starts as Ray actors."""
        if engine is not None:
            server_urls, is_alive = [engine.url], engine.is_alive
        else:
            # A dead actor closes its connections, which ends the requests on them; there is no process to ask.
            self.engines, server_urls = cluster.start_engines(self.cfg)
            is_alive = lambda: True
        # One request after the other where the engine runs one sequence at a time: its results then depend on no race.
        concurrency = 1 if self.recipe.rollout.max_num_seqs == 1 else 0
        self.client = EngineClient(
            server_urls=server_urls,
            tokenizer=self.tokenizer,
            request_timeout=self.recipe.rollout.request_timeout,
            max_concurrency=concurrency,
            is_alive=is_alive,
        )
        return self.client

    def build(self, prompts: tuple[Prompts, Prompts | None], resumed_step: int | None, log: Path) -> Loop:
        """The loop, with workers that have loaded the model. Vendors' messages go to `log`.

        Raises:
            RayTaskError: a worker could not build the policy; its cause says why.
        """
        from trainer.worker import PolicyWorker

        assert self.client is not None, "connect before build"
        train, heldout = prompts
        self.trainer = Loop(
            self.recipe,
            train,
            heldout,
            self.run_dir,
            self.progress,
            cfg=self.cfg,
            tracker=Tracker(self.recipe, self.run_dir, resumed_step),
            tokenizer=self.tokenizer,
            inference_engine_client=self.client,
            generator=Generator(self.recipe, self.cfg, self.client, self.tokenizer),
        )
        logs.theirs_to(log)
        self.trainer.build_models(PolicyWorker, None, None)
        return self.trainer

    def run(self) -> None:
        """Trains to the end."""
        assert self.trainer is not None and self.client is not None, "build before run"
        loop, client = self.trainer, self.client

        async def main() -> None:
            try:
                await loop.train()
            finally:
                await client.aclose()

        asyncio.run(main())
