"""What takes the place of a draft's Triton kernels: the references of `rollout.kernels.draft`, with their signatures.

Nothing but attention waits for the device, which reads lengths on the host; see `rollout.kernels.fallback`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rollout.kernels import draft, reference
from rollout.kernels.draft import Angles, Blocks
from rollout.kernels.fallback import _store


def norm_rotate(
    x_TC: torch.Tensor,
    weight_D: torch.Tensor,
    angles: Angles,
    eps: float,
    out_dtype: torch.dtype | None = None,
    early: bool = False,
) -> torch.Tensor:
    """`triton_draft.norm_rotate`."""
    return draft.norm_rotate_reference(x_TC, weight_D, angles, eps).to(out_dtype or x_TC.dtype)


def store_context(
    kv_TC: torch.Tensor,
    weight_D: torch.Tensor,
    angles: Angles,
    eps: float,
    kv_PKNC: torch.Tensor,
    slots_T: torch.Tensor,
    early: bool = False,
) -> None:
    """`triton_draft.store_context`."""
    keys_TC, values_TC = kv_TC.chunk(2, dim=1)
    k_TKD = draft.norm_rotate_reference(keys_TC, weight_D, angles, eps)
    stored_TKC = torch.cat([k_TKD, values_TC.unflatten(1, k_TKD.shape[1:]).float()], dim=-1)
    _store(stored_TKC.to(kv_PKNC.dtype), kv_PKNC.transpose(1, 2), slots_T)


def attention(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv_PKNC: torch.Tensor,
    blocks: Blocks,
    out_dtype: torch.dtype | None = None,
    programs: int | None = None,
    tiles: Any = None,
    early: bool = False,
) -> torch.Tensor:
    """`triton_draft.attention`, a key/value head at a time so that copies fit beside a cache. Waits for the device."""
    out_TND, group = q_TND.new_empty(q_TND.shape, dtype=out_dtype or q_TND.dtype), q_TND.shape[1] // k_TKD.shape[1]
    for head in range(k_TKD.shape[1] if len(blocks.lengths) else 0):
        one, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
        q, k, v = (x.float() for x in (q_TND[:, queries], k_TKD[:, one], v_TKD[:, one]))
        out_TND[:, queries] = draft.attention_reference(q, k, v, kv_PKNC[:, one], blocks).to(out_TND.dtype)
    return out_TND


def rnn_step(
    prepared_RJ: torch.Tensor,
    state_RS: torch.Tensor,
    tokens_R: torch.Tensor,
    w1_VS: torch.Tensor,
    joint: torch.Tensor,
    state_out_RS: torch.Tensor,
    out_RS: torch.Tensor,
    early: bool = False,
) -> None:
    """`triton_draft_head.rnn_step`."""
    inputs_RC = torch.cat([state_RS, F.embedding(tokens_R, w1_VS).float()], dim=-1)
    gate, candidate, output = (reference.linear(inputs_RC, joint) + prepared_RJ).chunk(3, dim=-1)
    state_out_RS.copy_(torch.lerp(torch.tanh(candidate), state_RS, torch.sigmoid(gate)))
    out_RS.copy_(torch.tanh(output))


def token_logits(
    base_RV: torch.Tensor,
    out_RS: torch.Tensor,
    w2_VS: torch.Tensor,
    result_RV: torch.Tensor | None = None,
    tile: Any = None,
    early: bool = False,
) -> torch.Tensor:
    """`triton_draft_head.token_logits`."""
    logits_RV = base_RV + reference.linear(out_RS, w2_VS)
    return logits_RV if result_RV is None else result_RV.copy_(logits_RV)
