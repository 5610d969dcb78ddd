"""Places where vLLM 0.30 must be told something about Inkling 2. Each entry says what is wrong and when it can go."""

from __future__ import annotations

import os
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

MODEL_TYPES = ("inkling2", "inkling2_text")
# In-tree Inkling 1 drops adapters unless this is 0; vLLM 0.30 applies its check to every name that holds "Inkling".
LORA_CHECK_ENV = "INKLING_MULTIMEM_AR"


class Inkling2ConfigConvertor(ModelArchConfigConvertorBase):
    """Hides the checkpoint's quantisation from vLLM: experts are dequantised by the plugin when they are loaded.

    vLLM 0.30 refuses ModelOpt's MIXED_PRECISION in hf_quant_config.json, and has no NVFP4 or MXFP8 experts on a CPU.
    """

    def get_quantization_config(self) -> None:
        return None


def register_config() -> None:
    """Use our convertor for Inkling 2's model types."""
    for model_type in MODEL_TYPES:
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = Inkling2ConfigConvertor


def config_is_registered() -> bool:
    return all(MODEL_ARCH_CONFIG_CONVERTORS.get(kind) is Inkling2ConfigConvertor for kind in MODEL_TYPES)


def allow_lora() -> None:
    """Spare Inkling 2 the check that is meant for in-tree Inkling 1 (`LoRAConfig.verify_with_model_config`)."""
    if lora_is_allowed():
        return
    original = LoRAConfig.verify_with_model_config

    def verify_with_model_config(self: LoRAConfig, model_config: Any) -> None:
        architectures = getattr(model_config, "architectures", None) or []
        if not architectures or not all(name.startswith("Inkling2") for name in architectures):
            return original(self, model_config)
        before = os.environ.get(LORA_CHECK_ENV)
        os.environ[LORA_CHECK_ENV] = "0"
        try:
            return original(self, model_config)
        finally:
            if before is None:
                del os.environ[LORA_CHECK_ENV]
            else:
                os.environ[LORA_CHECK_ENV] = before

    verify_with_model_config.is_inkling2 = True  # type: ignore[attr-defined]
    LoRAConfig.verify_with_model_config = verify_with_model_config


def lora_is_allowed() -> bool:
    return getattr(LoRAConfig.verify_with_model_config, "is_inkling2", False)
