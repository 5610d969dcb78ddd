"""Options of this plugin inside a vLLM configuration: `additional_config={"inkling2": {...}}`.

vLLM carries `additional_config` to every process of an engine unread, so this is the one way in that needs no
environment variable. A recipe's fields come here through `inkling_rl.engine_args`.
"""

from __future__ import annotations

from typing import Any

from inkling_rl.engine_args import PLUGIN, STRICT_KERNELS
from rollout.plugin.shape import EngineError


def strict_kernels(vllm_config: Any) -> bool:
    """Whether a GPU kernel that does not run is an error rather than replaced by its torch fallback; no unless asked.

    Raises:
        EngineError: an option of this plugin that does not exist, or is no boolean.
    """
    given = (vllm_config.additional_config or {}).get(PLUGIN, {})
    _require(isinstance(given, dict), f"a map of options ({STRICT_KERNELS})", given)
    _require(given.keys() <= {STRICT_KERNELS}, f"a map with no other key than {STRICT_KERNELS}", given)
    asked = given.get(STRICT_KERNELS, False)
    _require(isinstance(asked, bool), f"a map in which {STRICT_KERNELS} is true or false", given)
    return bool(asked)


def _require(holds: bool, requirement: str, value: object) -> None:
    if not holds:
        raise EngineError(f"additional_config.{PLUGIN} must be {requirement}; got {value!r}. Correct it or remove it")
