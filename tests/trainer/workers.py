"""A policy worker in the test's own process, as Ray would make it in one of its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch

from inkling_rl.recipe import Recipe

STOP = 263


def build_worker(recipe: Recipe, steps: int = 4) -> Any:
    """One rank that has loaded the recipe's model. The process group it joins is destroyed by whoever calls this."""
    from trainer import skyrl_config
    from trainer.worker import PolicyWorkerCore

    cfg = skyrl_config.build(
        recipe,
        model_path=Path(recipe.model.path),
        run_dir=Path("unused"),
        engine_url="http://127.0.0.1:1",
        stop_token_ids=[STOP],
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = PolicyWorkerCore(
        cfg=cfg.trainer, world_size=1, rank=0, local_rank=0, master_addr="127.0.0.1", master_port=port,
        sequence_parallel_size=1,
    )  # fmt: skip
    worker.init_worker_process_group()
    torch.set_num_threads(1)  # threads of a test's process spin where it shares its cores
    worker.init_model(recipe.model.path, num_training_steps=steps)
    return worker
