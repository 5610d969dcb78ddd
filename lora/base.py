"""Which base model an adapter belongs to: a short digest of a checkpoint's small tensors.

Shapes tell models of different sizes apart; two checkpoints of one size (another seed, a further-trained base) only
differ in values, and an adapter on the wrong one is silently bad. The digest reads a few kilobytes, whatever the
size of the checkpoint. It identifies, it does not authenticate.
"""

from __future__ import annotations

import hashlib
import json

import torch

from inkling_rl.checkpoint.reader import Checkpoint

# Small tensors that any training of the base changes. Their release names; every Inkling 2 has them.
DIGESTED = (
    "model.llm.embed_norm.weight",
    "model.llm.norm.weight",
    "model.llm.attn_res.output_query",
    "model.llm.layers.0.mlp.gate.bias",
    "model.llm.layers.0.attn.q_l2_clip.scale",
)
SHAPE_KEYS = ("hidden_size", "num_hidden_layers", "vocab_size", "n_routed_experts", "moe_intermediate_size")


def fingerprint(checkpoint: Checkpoint) -> str:
    """64 hexadecimal digits that identify the weights of a base model.

    Raises:
        CheckpointError: the checkpoint lacks one of the tensors.
    """
    digest = hashlib.sha256(json.dumps([checkpoint.text_config.get(key) for key in SHAPE_KEYS]).encode())
    for name in DIGESTED:
        digest.update(checkpoint.tensor(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
