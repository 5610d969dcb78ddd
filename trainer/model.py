"""The policy: transformers' Inkling 2 with weights of a release checkpoint, frozen, and a trainable adapter.

Weights stream tensor by tensor from the checkpoint (experts dequantised), each straight into its parameter, so that the
peak is the model and one layer's experts. Under ZeRO stage 3 the parameters are born partitioned and each tensor is
gathered, filled by rank 0 and partitioned again.

Departure from `from_pretrained`: that would need the quantised experts converted on disk first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.recipe import Recipe

# Measured on one CPU thread, forward and backward of the tiny model, 8 rows of 56 tokens: grouped_mm 132 ms, eager
# (one expert after the other) 243 ms, batched_mm 1,367 ms.
EXPERTS_IMPLEMENTATION = "grouped_mm"


def build_policy(recipe: Recipe, device: torch.device, zero3: dict[str, Any] | None = None) -> torch.nn.Module:
    """Loads the base and wraps it with the recipe's adapter.

    Args:
        recipe: decides checkpoint, dtype, adapter and seed.
        device: where the parameters live.
        zero3: DeepSpeed configuration when parameters are to be born partitioned (stage 3), else None.

    Raises:
        CheckpointError: the checkpoint is not whole.
        AdapterError: the adapter does not fit the model.
    """
    from lora.model import wrap

    # The adapter is born whole under every stage: DeepSpeed partitions it when it takes the model over.
    policy: torch.nn.Module = wrap(
        load_base(recipe, device, zero3),
        rank=recipe.lora.rank,
        alpha=recipe.lora.alpha,
        dropout=recipe.lora.dropout,
        targets=recipe.lora.targets,
        seed=recipe.trainer.seed,
    )
    return policy.to(device)


def load_base(recipe: Recipe, device: torch.device, zero3: dict[str, Any] | None = None) -> torch.nn.Module:
    """transformers' `Inkling2ForCausalLM` in the trainer's dtype with the checkpoint's weights, all frozen."""
    model = load_frozen(Checkpoint.open(recipe.model.path), getattr(torch, recipe.trainer_dtype), device, zero3)
    if recipe.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def load_frozen(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, zero3: dict[str, Any] | None = None
) -> Any:
    """transformers' `Inkling2ForCausalLM` with a checkpoint's weights, nothing of it trainable.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    from transformers.models.inkling2 import Inkling2ForCausalLM
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

    checkpoint.check()
    config = Inkling2TextConfig(**{k: v for k, v in checkpoint.text_config.items() if k != "model_type"})
    config.use_cache = False
    # Starting values are overwritten below; drawing them must not move the caller's generator, nor cost time.
    with torch.random.fork_rng(devices=[]), _without_initialisation(), _partitioned(zero3), torch.device(device):
        model = Inkling2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    _load(model, checkpoint, dtype, is_partitioned=zero3 is not None)
    model.requires_grad_(False)
    return model


def _load(model: torch.nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, is_partitioned: bool) -> None:
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = set(places)
    for name, value in checkpoint.iter_hf(dtype):
        place = places[name]
        with _gathered(place, is_partitioned) as is_writer, torch.no_grad():
            if is_writer:
                assert place.shape == value.shape, f"{name}: {tuple(place.shape)} against {tuple(value.shape)}"
                place.copy_(value)
        missing.discard(name)
    assert not missing, f"the checkpoint filled no {sorted(missing)[:3]}"


@contextmanager
def _gathered(place: torch.Tensor, is_partitioned: bool) -> Iterator[bool]:
    if not is_partitioned or not hasattr(place, "ds_id"):
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([place], modifier_rank=0):
        yield torch.distributed.get_rank() == 0


def _partitioned(zero3: dict[str, Any] | None) -> AbstractContextManager[Any]:
    if zero3 is None:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.Init(config_dict_or_path=zero3)


@contextmanager
def _without_initialisation() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
