"""How SkyRL is imported into the driver and the workers: without vLLM, without bars, without extra processes.

SkyRL's configuration and trainer work without vLLM and import it only where it is installed, which costs the driver
10-14 s on two cores; here the import fails at once and SkyRL goes on. Its registries of losses and estimators mirror
themselves into named Ray actors, one process each, so that custom functions reach every worker; built-in functions are
in every process already, so the mirrors are switched off.

Call `prepare()` before anything of SkyRL is imported. Source: skyrl 0.4.0, `ppo_utils.BaseFunctionRegistry`,
`train/config/config.py` (`__post_init__`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

BLOCKED = "vllm"
NO_BARS = "TQDM_DISABLE"  # read when tqdm is imported, which torch already does; progress is trainer.progress's


class _Without(importlib.abc.MetaPathFinder):
    """An import finder that says: not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == BLOCKED or fullname.startswith(f"{BLOCKED}."):
            raise ModuleNotFoundError(f"{fullname} is kept out of this process by {__name__}", name=fullname)
        return None


def prepare() -> None:
    """Makes SkyRL importable cheaply in this process. Safe to call again."""
    # Where it is imported already (a test's process) there is nothing left to save.
    if BLOCKED not in sys.modules and not any(isinstance(finder, _Without) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Without())
    _keep_registries_local()


def restore() -> None:
    """Lets vLLM be imported again; for tests that share a process with an engine."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Without)]


def _keep_registries_local() -> None:
    import ray

    asked = ray.is_initialized
    # Registration at import asks Ray, inside a worker, before there is a class to patch.
    ray.is_initialized = lambda: False
    try:
        registries = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    finally:
        ray.is_initialized = asked
    registry = registries.BaseFunctionRegistry
    assert hasattr(registry, "sync_with_actor"), "skyrl's registries changed; see trainer.vendor"
    registry.sync_with_actor = classmethod(lambda cls: None)
