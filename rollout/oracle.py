"""The reference of every forward pass: transformers' `Inkling2ForCausalLM` with a checkpoint's dequantised weights.

Slow and simple on purpose: eager attention, experts one by one, no cache, one sequence at a time. Not a trainer.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Inkling2ForCausalLM, Inkling2TextConfig

from inkling_rl.checkpoint.reader import Checkpoint
from lora.files import Adapter
from lora.model import attach


@dataclass(frozen=True)
class Oracle:
    """A loaded reference model; `Oracle.load` is the way in."""

    model: Any
    has_adapter: bool

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, adapter: Adapter | None = None) -> Oracle:
        """The model in `dtype`, on the CPU. The adapter stays float32, as in training.

        Raises:
            CheckpointError, AdapterError: a tensor or a module is missing.
        """
        config = Inkling2TextConfig(**checkpoint.text_config)
        config._attn_implementation = config._experts_implementation = "eager"
        # `_from_config` keeps in float32 what the class declares so (router, convolutions, queries).
        model = Inkling2ForCausalLM._from_config(config, dtype=dtype)
        # Tensor by tensor into the model's own, in their dtype: no second copy of the weights in memory.
        state = model.state_dict()
        unset = set(state)
        for name, value in checkpoint.iter_hf(torch.float32):
            state[name].copy_(value)
            unset.discard(name)
        assert not unset, f"the checkpoint's layout lacks {sorted(unset)[:3]}"
        return cls(attach(model, adapter) if adapter else model.eval(), adapter is not None)

    def logprobs(self, token_ids: list[int], *, adapted: bool = False) -> torch.Tensor:
        """float32 [num_tokens, vocabulary]; row i is the distribution of token i + 1.

        Args:
            token_ids: one sequence.
            adapted: with the adapter; False leaves it out.
        """
        assert not adapted or self.has_adapter
        without = self.model.disable_adapter() if self.has_adapter and not adapted else nullcontext()
        with torch.no_grad(), without:
            return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)
