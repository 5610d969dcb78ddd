"""What the plugin changes in vLLM, as a table of steps that can be asked whether they are in force.

vLLM logs and swallows an exception of a plugin, so an engine could start half patched. The model's constructor calls
`check_active`, which names every step that is missing. Nothing here imports the model: API servers and model inspection
run this too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _ModelInfo

from rollout.launcher import LAUNCHER_VARIABLE, watch_launcher
from rollout.plugin import compat, draft_config, drafting
from rollout.plugin.shape import EngineError

ARCHITECTURES = ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration")
MODEL_MODULE = "rollout.plugin.model"
MODEL_CLASS = "Inkling2ForCausalLM"
DRAFT_MODULE = "rollout.plugin.draft"
DRAFT_CLASS = "Draft"


@dataclass(frozen=True)
class KnownModel(_LazyRegisteredModel):
    """A model that is imported only where it runs.

    vLLM would start a second process just to read these flags off the class, which costs every first start some ten
    seconds; a test compares them with the class.
    """

    def inspect_model_cls(self) -> _ModelInfo:
        return _ModelInfo(
            architecture=self.class_name,
            is_text_generation_model=True,
            is_pooling_model=False,
            attn_type="decoder",
            default_seq_pooling_type="LAST",
            default_tok_pooling_type="ALL",
            score_type="bi-encoder",
            supports_multimodal=False,
            supports_multimodal_raw_input_only=False,
            requires_raw_input_tokens=False,
            supports_multimodal_encoder_tp_data=False,
            supports_pp=False,
            has_inner_state=False,
            is_attention_free=False,
            is_hybrid=False,
            has_noops=False,
            supports_mamba_prefix_caching=False,
            supports_replayssm=False,
            supports_transcription=False,
            supports_transcription_only=False,
            supported_video_pruning_methods=(),
            supports_mm_device_do_normalize=False,
        )


@dataclass(frozen=True)
class Step:
    """One registration or patch."""

    apply: Callable[[], None]
    is_active: Callable[[], bool]


def _register_models() -> None:
    for architecture in ARCHITECTURES:
        # A vLLM that knows Inkling 2 itself keeps its own model.
        if architecture not in ModelRegistry.models:
            ModelRegistry.models[architecture] = KnownModel(MODEL_MODULE, MODEL_CLASS)
    for architecture in draft_config.ARCHITECTURES:
        # Looked at only: `rollout.plugin.proposer` builds the draft.
        ModelRegistry.models[architecture] = KnownModel(DRAFT_MODULE, DRAFT_CLASS)


def _models_are_registered() -> bool:
    return all(name in ModelRegistry.models for name in (*ARCHITECTURES, *draft_config.ARCHITECTURES))


def _watch_launcher() -> None:
    watch_launcher()


def _launcher_is_watched() -> bool:
    asked = os.environ.get(LAUNCHER_VARIABLE, "") not in ("", str(os.getpid()))
    return not asked or any(thread.name == "launcher-watch" for thread in threading.enumerate())


STEPS: dict[str, Step] = {
    "model registration": Step(_register_models, _models_are_registered),
    "config conversion": Step(compat.register_config, compat.config_is_registered),
    "LoRA name check": Step(compat.allow_lora, compat.lora_is_allowed),
    "draft configuration": Step(drafting.register, drafting.is_registered),
    "launcher watch": Step(_watch_launcher, _launcher_is_watched),
}


def apply() -> None:
    """Apply every step; each is idempotent."""
    for step in STEPS.values():
        step.apply()


def check_active() -> None:
    """Called by the model's constructor, after the patches of the worker process are applied.

    Raises:
        EngineError: names the steps that are not in force.
    """
    from rollout.plugin import lora, seeds

    lora.install()
    seeds.install()
    missing = [name for name, step in STEPS.items() if not step.is_active()]
    missing += [] if lora.is_installed() else ["LoRA on the CPU"]
    missing += [] if seeds.is_installed() else ["seeds under chunked prefill on the CPU"]
    if missing:
        raise EngineError(
            f"the vLLM plugin inkling2 must be active; got these steps missing: {', '.join(missing)}. "
            "Look for 'Failed to load plugin' in the log, and check that VLLM_PLUGINS does not exclude inkling2"
        )
