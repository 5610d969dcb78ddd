"""Drafting as a patch of vLLM 0.30's two runners: which of their names are replaced, and when.

A runner's module is heavy and is loaded in engine processes only, after plugins. So the patch waits until the runner
asks its configuration for the kind of draft, which is just before it makes what drafts. Can go when vLLM runs DSpark
with an RNN head.

| | CPU, V1 runner | GPU, V2 runner |
|---|---|---|
| method | `dflash` | `dspark` |
| drafts | `proposer.DSparkProposer` | `speculator.DSparkSpeculator` |
| decides what is kept | `rejection` | vLLM's rejection sampler |
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.config.speculative import SpeculativeConfig
from vllm.platforms import current_platform

from rollout.plugin import draft_config
from rollout.plugin.shape import EngineError

FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
_original_dflash = SpeculativeConfig.use_dflash
_original_dspark = SpeculativeConfig.use_dspark


def register() -> None:
    """Make a draft's configuration known, and wait for a runner; idempotent."""
    draft_config.register()
    SpeculativeConfig.use_dflash = use_dflash
    SpeculativeConfig.use_dspark = use_dspark


def is_registered() -> bool:
    patched = SpeculativeConfig.use_dflash is use_dflash and SpeculativeConfig.use_dspark is use_dspark
    return draft_config.is_registered() and patched


def use_dflash(self: Any) -> bool:
    """vLLM's, and the moment to patch the V1 runner."""
    if draft_config.is_ours(self) and FIRST_RUNNER in sys.modules:
        install_first()
    return _original_dflash(self)


def use_dspark(self: Any) -> bool:
    """vLLM's, and the moment to patch the V2 runner."""
    if draft_config.is_ours(self) and SECOND_RUNNER in sys.modules:
        install_second()
    return _original_dspark(self)


def install_first() -> None:
    """Patch the V1 runner of this process, once."""
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


def install_second() -> None:
    """Patch the V2 runner of this process, once."""
    from vllm.v1.worker.gpu import model_runner

    original = model_runner.init_speculator
    if getattr(original, "is_inkling2", False):
        return

    def init_speculator(vllm_config: Any, device: Any) -> Any:
        if draft_config.is_ours(vllm_config.speculative_config):
            from rollout.plugin.speculator import DSparkSpeculator

            return DSparkSpeculator(vllm_config, device)
        return original(vllm_config, device)

    init_speculator.is_inkling2 = True  # type: ignore[attr-defined]
    model_runner.init_speculator = init_speculator


def check_installed(vllm_config: Any) -> None:
    """Called by the model's constructor, which comes after the runner's.

    Raises:
        EngineError: a draft of ours is asked for and this process's runner is not patched.
    """
    if not draft_config.is_ours(vllm_config.speculative_config):
        return
    first = current_platform.is_cpu()
    if not (first_is_installed() if first else second_is_installed()):
        raise EngineError(
            "the plugin's part of drafting must be active where a draft is used; vLLM's own is. Use the "
            f"{'V1' if first else 'V2'} runner of vLLM 0.30, or leave rollout.draft out"
        )


def first_is_installed() -> bool:
    """Whether the V1 runner of this process is patched."""
    from vllm.v1.worker import gpu_model_runner

    from rollout.plugin import rejection
    from rollout.plugin.proposer import AnyProposer

    fits = getattr(gpu_model_runner.GPUModelRunner._input_fits_in_drafter, "is_inkling2", False)
    return fits and gpu_model_runner.DFlashProposer is AnyProposer and rejection.is_installed()


def second_is_installed() -> bool:
    """Whether the V2 runner of this process is patched."""
    runner = sys.modules.get(SECOND_RUNNER)
    return getattr(getattr(runner, "init_speculator", None), "is_inkling2", False)
