"""Drafting as a patch of vLLM 0.30's V1 runner: which of its names are replaced, and when.

The runner's module is heavy and is loaded in engine processes only, after plugins. So the patch waits until the runner
asks its configuration for the kind of draft, which is just before it makes the proposer. Can go when vLLM runs DSpark
with an RNN head on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.config.speculative import SpeculativeConfig

from rollout.plugin import draft_config
from rollout.plugin.shape import EngineError

RUNNER = "vllm.v1.worker.gpu_model_runner"
_original = SpeculativeConfig.use_dflash


def register() -> None:
    """Make a draft's configuration known, and wait for the runner; idempotent."""
    draft_config.register()
    SpeculativeConfig.use_dflash = use_dflash


def is_registered() -> bool:
    return draft_config.is_registered() and SpeculativeConfig.use_dflash is use_dflash


def use_dflash(self: Any) -> bool:
    """vLLM's, and the moment to patch the runner."""
    if draft_config.is_ours(self) and RUNNER in sys.modules:
        install()
    return _original(self)


def install() -> None:
    """Patch the runner of this process, once."""
    from vllm.v1.worker import gpu_model_runner

    from rollout.plugin import rejection
    from rollout.plugin.proposer import AnyProposer, DSparkProposer

    fits = gpu_model_runner.GPUModelRunner._input_fits_in_drafter
    if getattr(fits, "is_inkling2", False):
        return

    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        # vLLM skips a draft that could pass the longest sequence, and with it the writing of the draft's pages, which
        # the prefix cache would hand out all the same. Ours stores nothing of a block, and the scheduler cuts drafts.
        if isinstance(self.drafter, DSparkProposer):
            return common_attn_metadata is not None
        return bool(fits(self, common_attn_metadata))

    _input_fits_in_drafter.is_inkling2 = True  # type: ignore[attr-defined]
    gpu_model_runner.GPUModelRunner._input_fits_in_drafter = _input_fits_in_drafter
    gpu_model_runner.DFlashProposer = AnyProposer
    rejection.install()


def check_installed(vllm_config: Any) -> None:
    """Called by the model's constructor, which comes after the runner's.

    Raises:
        EngineError: a draft of ours is asked for and this process's runner is not patched.
    """
    if draft_config.is_ours(vllm_config.speculative_config) and not is_installed():
        raise EngineError(
            "the plugin's proposer and rejection sampler must be active where a draft is used; vLLM's own are. Use the "
            "V1 runner of vLLM 0.30 on a CPU, or leave rollout.draft out"
        )


def is_installed() -> bool:
    """Whether the runner of this process is patched."""
    from vllm.v1.worker import gpu_model_runner

    from rollout.plugin import rejection
    from rollout.plugin.proposer import AnyProposer

    fits = getattr(gpu_model_runner.GPUModelRunner._input_fits_in_drafter, "is_inkling2", False)
    return fits and gpu_model_runner.DFlashProposer is AnyProposer and rejection.is_installed()
