"""A program: one rank of a policy worker trains on its share of fixed batches, refreshes its draft, and writes both.

python -m tests.trainer.ranks RANK WORLD_SIZE PORT STAGE CHECKPOINT OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from trainer.draft.completions import Completion


def main(rank: int, world_size: int, port: int, stage: int, checkpoint: str, out: str) -> None:
    from tests.trainer.conftest import build_recipe
    from tests.trainer.test_worker import batch
    from trainer import skyrl_config
    from trainer.draft import losses, teacher_forcing
    from trainer.worker import PolicyWorkerCore

    # Less than the blocks of two anchors: every micro-batch of the draft takes several pieces, and under ZeRO-3 all
    # ranks gather the target's head for each of them.
    losses.MAX_LOGITS, teacher_forcing.MAX_SCORES = 512 * 10, 1 << 12
    recipe = build_recipe(
        Path(checkpoint),
        trainer={"zero_stage": stage, "num_gpus_per_node": world_size},
        # Three micro-batches of four: one of two ranks is short of one.
        rollout={"draft": {"refresh": {"interval": 1, "batch_size": 12}}},
    )
    cfg = skyrl_config.build(
        recipe, model_path=Path(checkpoint), run_dir=Path(out), engine_url="http://127.0.0.1:1", stop_token_ids=[263]
    )
    worker = PolicyWorkerCore(
        cfg=cfg.trainer, world_size=world_size, rank=rank, local_rank=rank, master_addr="127.0.0.1", master_port=port,
        sequence_parallel_size=1,
    )  # fmt: skip
    worker.init_worker_process_group()
    worker.init_model(checkpoint, num_training_steps=4)
    steps = []
    for step in range(2):
        share = 8 // world_size
        data = batch(step)[rank * share : (rank + 1) * share]
        data.metadata = {"response_length": 12}
        steps.append((worker.forward_backward(data).metrics["policy_loss"], worker.optim_step()))
    worker.save_checkpoint(f"{out}/policy")
    before = worker.strategy.adapter_state()
    worker.forward_backward(data)
    worker.optim_step()
    worker.load_checkpoint(f"{out}/policy")
    after = worker.strategy.adapter_state()
    is_restored = all(torch.equal(value, after[name]) for name, value in before.items())
    worker.export_adapter(f"{out}/adapter")
    refreshed = refresh_draft(worker)
    torch.save(worker.live_draft.masters.state()["weights"], f"{out}/draft-rank{rank}.pt")
    last = worker.forward_backward(data).metrics["policy_loss"], worker.optim_step()
    if rank == 0:
        result = {"steps": [*steps, last], "adapter": after, "is_restored": is_restored, "refreshed": refreshed}
        torch.save(result, f"{out}/result.pt")


def refresh_draft(worker: Any) -> list[float]:
    """Loss and gradient norm of every step, and what the draft is worth."""
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(1, 500, (24,), generator=generator).tolist() for _ in range(12)]
    completions = [Completion(tuple(row[:7]), tuple(row[7 : 9 + number])) for number, row in enumerate(ids)]
    found = []
    for _ in range(worker.draft("begin", completions, 2)):
        result = worker.draft("advance")
        found += [result.loss, result.grad_norm, *result.acceptance]
    return [*found, worker.draft("worth", completions).tokens_per_step]


if __name__ == "__main__":
    rank, world_size, port, stage = (int(value) for value in sys.argv[1:5])
    main(rank, world_size, port, stage, sys.argv[5], sys.argv[6])
