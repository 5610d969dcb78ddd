"""Environments on skyrl_gym, registered by name inside the process of the generator.

A recipe names one of `ENVIRONMENTS`, or a class of the user's own as `package.module:Class` (any `BaseTextEnv`). Either
way the registered class is a guarded one: what an environment raises comes out as one error with its traceback and the
data row, because between here and the user lie a thread pool, an event loop and Ray, which keep neither.
"""

from __future__ import annotations

import importlib
import json
import math
import traceback
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs import registration
from skyrl_gym.envs.base_text_env import BaseTextEnv

ENVIRONMENTS: dict[str, str] = {
    "arithmetic": "rollout.envs.arithmetic:ArithmeticEnv",
    "gsm8k": "rollout.envs.gsm8k:Gsm8kEnv",
}


class EnvironmentNameError(ValueError):
    """`environment.name` does not lead to a usable class."""


class EnvironmentFailedError(RuntimeError):
    """An environment raised. The message holds its traceback and the row."""


def register_environments(name: str | None = None, args: Mapping[str, Any] | None = None) -> str | None:
    """Registers the built-in environments, and the recipe's one with its arguments. Safe to call again.

    Args:
        name: `environment.name` of the recipe.
        args: `environment.args`, given to the environment as `env_config`.

    Returns:
        The id to give to `skyrl_gym.make` (`name` itself), or None without a name.

    Raises:
        EnvironmentNameError: unknown name, or a path that does not lead to a `BaseTextEnv` class.
    """
    for known, path in ENVIRONMENTS.items():
        _register(known, _load(path), {})
    if name is None:
        return None
    if name not in ENVIRONMENTS and ":" not in name:
        raise EnvironmentNameError(
            f"environment.name must be one of {', '.join(ENVIRONMENTS)} or package.module:Class; got {name!r}. "
            "Correct the name"
        )
    _register(name, _load(ENVIRONMENTS.get(name, name)), dict(args or {}))
    return name


def _register(name: str, kind: type[BaseTextEnv], args: dict[str, Any]) -> None:
    # skyrl_gym has a gsm8k of its own, and a second call must not fail.
    if name in registration.registry:
        registration.deregister(name)
    registration.register(id=name, entry_point=guarded(name, kind, args))


def _load(path: str) -> type[BaseTextEnv]:
    module_name, _, class_name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a user's module runs here, and it may raise anything
        trace = "" if isinstance(error, ImportError | AttributeError) else "\n" + _trace(error)
        raise EnvironmentNameError(
            f"environment.name must be an importable package.module:Class; got {path!r} ({type(error).__name__}: "
            f"{error}). Install the package, put its folder on PYTHONPATH, or mend the module{trace}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, BaseTextEnv)):
        raise EnvironmentNameError(
            f"environment.name must be a subclass of skyrl_gym's BaseTextEnv; got {path!r}, {kind!r}. Derive from it"
        )
    return kind


def guarded(name: str, kind: type[BaseTextEnv], args: dict[str, Any]) -> type[BaseTextEnv]:
    """The same environment, with its arguments bound and its failures reported.

    A class and not a function, because SkyRL also asks it to aggregate metrics.
    """

    class Guarded(kind):
        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            self._row = dict(extras or {})
            try:
                super().__init__(env_config=args or env_config, extras=extras or {})
            except Exception as error:
                raise _failure(name, "__init__", self._row, error) from error

        def init(self, prompt: Any) -> Any:
            try:
                return super().init(prompt)
            except Exception as error:
                raise _failure(name, "init", self._row, error) from error

        def step(self, action: str) -> Any:
            # The one broad catch around code that users write; it ends the run with what they need to mend it.
            try:
                output = super().step(action)
                if not math.isfinite(float(output["reward"])):
                    raise ValueError(f"reward must be a finite number; got {output['reward']!r}")
            except Exception as error:
                raise _failure(name, "step", self._row, error, action) from error
            return output

        def get_metrics(self) -> Any:
            try:
                return super().get_metrics()
            except Exception as error:
                raise _failure(name, "get_metrics", self._row, error) from error

        def close(self) -> Any:
            try:
                return super().close()
            except Exception as error:
                raise _failure(name, "close", self._row, error) from error

    Guarded.__name__ = Guarded.__qualname__ = kind.__name__
    return Guarded


def _failure(
    name: str, where: str, row: Mapping[str, Any], error: Exception, action: str | None = None
) -> EnvironmentFailedError:
    shown = json.dumps(row, default=repr, ensure_ascii=False)
    said = "" if action is None else f"\ncompletion: {action[:400]!r}"
    return EnvironmentFailedError(
        f"environment {name}: {where} must not raise; got {type(error).__name__}: {error}. Mend the environment or the "
        f"row\nrow: {shown[:1000]}{said}\n{_trace(error)}"
    )


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
