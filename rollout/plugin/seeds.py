"""Per-request seeds on a CPU survive chunked prefill.

A chunk of a prompt samples a token that is thrown away. vLLM 0.30 rewinds the request's generator by setting its offset
(`GPUModelRunner._bookkeeping_sync`), which only a CUDA generator has: on a CPU the engine dies with "CPU Generator does
not use offset". Here the state before sampling is put back instead, so that a seeded completion does not depend on how
its prompt was cut. Can go when vLLM rewinds CPU generators itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.platforms import current_platform


def install() -> None:
    """Patch the CPU model runner. Safe to call again; does nothing on other platforms."""
    if not current_platform.is_cpu() or is_installed():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        generators = [self.input_batch.generators[i] for i in discarded if i in self.input_batch.generators]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Nothing in it needs the generators but the rewinding.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    _sample.is_inkling2 = True  # type: ignore[attr-defined]
    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = _sample, _bookkeeping_sync


def is_installed() -> bool:
    """Whether the patch is in force, or not needed."""
    if not current_platform.is_cpu():
        return True
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return getattr(GPUModelRunner._sample, "is_inkling2", False)
