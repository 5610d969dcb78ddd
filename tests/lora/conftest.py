"""A very small Inkling 2 with live parameters on every path, and an adapter whose B is not zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Inkling2ForCausalLM, Inkling2TextConfig

SIZES = {
    "vocab_size": 64,
    "unpadded_vocab_size": 60,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "d_rel": 8,
    "rel_extent": 16,
    "log_scaling_n_floor": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 3,
    "eos_token_id": 59,
}


def tiny_model(seed: int = 0, **changes: object) -> Inkling2ForCausalLM:
    torch.manual_seed(seed)
    config = Inkling2TextConfig(**(SIZES | changes), attn_implementation="eager")
    model = Inkling2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Queries, dynamic taps and router bias start at zero, which would leave their paths dead.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture()
def model() -> Iterator[Inkling2ForCausalLM]:
    yield tiny_model()


def logprobs(model: torch.nn.Module, length: int = 24) -> torch.Tensor:
    """Log-probabilities [length, vocabulary] of a fixed prompt that is three windows long."""
    ids = torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
