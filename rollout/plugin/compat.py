"""Places where vLLM 0.30 must be told something about Inkling 2. Each entry says what is wrong and when it can go."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.platforms import current_platform
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
    """Patch `LoRAConfig.verify_with_model_config`: no check meant for in-tree Inkling 1, and adapters in float32."""
    if lora_is_allowed():
        return
    original = LoRAConfig.verify_with_model_config

    def verify_with_model_config(self: LoRAConfig, model_config: Any) -> None:
        architectures = getattr(model_config, "architectures", None) or []
        if not architectures or not all(name.startswith("Inkling2") for name in architectures):
            return original(self, model_config)
        automatic = self.lora_dtype in (None, "auto")
        before = os.environ.get(LORA_CHECK_ENV)
        os.environ[LORA_CHECK_ENV] = "0"
        try:
            original(self, model_config)
        finally:
            if before is None:
                del os.environ[LORA_CHECK_ENV]
            else:
                os.environ[LORA_CHECK_ENV] = before
        if automatic and current_platform.is_cpu():
            # The trainer's adapters are float32 whatever the base is; our kernel takes them as they are.
            self.lora_dtype = torch.float32

    verify_with_model_config.is_inkling2 = True  # type: ignore[attr-defined]
    LoRAConfig.verify_with_model_config = verify_with_model_config


def lora_is_allowed() -> bool:
    return getattr(LoRAConfig.verify_with_model_config, "is_inkling2", False)
