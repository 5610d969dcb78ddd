"""Ray for a run: a local instance on this node, or the cluster that SkyRL finds.

On a CPU a worker is a process, so the GPUs that SkyRL's placement asks for are made up. The environment goes to Ray's
processes by inheritance, which is faster than a runtime environment and, on one node, enough.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inkling_rl.engine_args import UNSET, engine_environment, installed_device
from inkling_rl.recipe import Recipe
from trainer import vendor
from trainer.server import LAUNCHER


def is_local(recipe: Recipe) -> bool:
    """Whether the run needs no cluster: one node without GPUs, or one standalone engine."""
    return recipe.rollout.placement == "standalone" or installed_device() == "cpu"


def start_local(recipe: Recipe, log: Path) -> None:
    """A Ray instance of this run alone; workers write to `log`. It replaces this process's signal handlers."""
    import ray

    workers, engines = recipe.trainer.num_gpus_per_node, 0
    os.environ |= {
        "SKYRL_LOG_FILE": str(log),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Idle threads of a worker must sleep, not spin, while the engine computes on the same cores.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if recipe.rollout.placement == "ray":
        engines = recipe.rollout.num_engines * recipe.rollout.tensor_parallel_size
        # Their engine cores outlive a killed actor; with this they end when the driver does.
        os.environ |= engine_environment() | {LAUNCHER: str(os.getpid())}
        os.environ.pop(UNSET, None)
    ray.init(
        address="local",  # never somebody else's cluster
        num_cpus=workers + engines,
        num_gpus=workers + engines if installed_device() == "cpu" else None,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )


def start_engines(cfg: Any) -> tuple[Any, list[str]]:
    """Starts `num_engines` engines as Ray actors on the GPUs that Ray has, and waits until they are healthy.

    SkyRL reads their arguments with vLLM's parser, so this is the one kind of driver that imports vLLM.

    Returns:
        SkyRL's server group, which must be kept, and the URLs of the engines. They end with Ray.
    """
    vendor.restore()
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # of this process; the actors' environment is fixed already
    from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    engines = cfg.generator.inference_engine
    group = ServerGroup(
        cli_args=build_vllm_cli_args(cfg),
        num_servers=engines.num_engines,
        distributed_executor_backend=engines.distributed_executor_backend,
        enable_ray_prometheus_stats=engines.enable_ray_prometheus_stats,
    )
    return group, [info.url for info in group.start()]


def join(cfg: Any) -> None:
    """The cluster of RAY_ADDRESS, or a new one over this node's GPUs, as SkyRL sets it up."""
    from skyrl.train.utils.utils import initialize_ray

    initialize_ray(cfg)
