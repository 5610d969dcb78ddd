"""What a draft runs on beside linear layers and norms: torch reference, C++ twin (`cpu/draft.h`) and the choice.

The reference runs anywhere and is the truth that the twin is tested against. Unlike the target's kernels these do not
promise the same bits in every batch: what is drafted does not change what comes out.

Suffixes: R requests, B rows of a block, T = R B rows, N query heads, K key/value heads, D head size, S rank of the RNN,
V vocabulary, C channels of a page (keys, then values).
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from rollout.kernels import native, ops, reference
from rollout.kernels.layout import is_k_major


class Angles(NamedTuple):
    """Cosine and sine of the rotary positions of some rows, float32 [T, D/2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Blocks(NamedTuple):
    """The blocks of a step, one per request that drafts."""

    lengths: torch.Tensor
    """int64 [R]: tokens of context, which is also the anchor's position."""

    block_table: torch.Tensor
    """int32 [R, blocks per request]: physical pages in the draft's group."""


class Head(NamedTuple):
    """Weights of the RNN head, k-major: `markov_w1`, `markov_w2` [V, S], `joint_proj` without the hidden state."""

    w1: torch.Tensor
    joint: torch.Tensor
    w2: torch.Tensor


class Choice(NamedTuple):
    """How the tokens of a step's blocks are chosen."""

    temperature: torch.Tensor
    """float32 [R]; 0 takes the likeliest."""

    uniform: torch.Tensor | None
    """float64 [R, B] in [0, 1), one per token to draw; None where all requests take the likeliest."""

    forbidden: torch.Tensor | None
    """bool [R, V]: tokens that a request may not have."""


def norm_rotate(x_TC: torch.Tensor, weight_D: torch.Tensor, angles: Angles, eps: float) -> torch.Tensor:
    """RMS norm of every head's vector, then its rotation, float32 [T, N, D]."""
    if not _is_native(x_TC):
        return norm_rotate_reference(x_TC, weight_D, angles, eps)
    size = len(weight_D)
    out_TND = x_TC.clone().unflatten(-1, (-1, size))
    rows = [x.data_ptr() for x in (out_TND, weight_D, angles.cos, angles.sin)]
    functions().ink_norm_rotate(*rows, *out_TND.shape, eps)
    return out_TND


def norm_rotate_reference(x_TC: torch.Tensor, weight_D: torch.Tensor, angles: Angles, eps: float) -> torch.Tensor:
    x_TND = x_TC.float().unflatten(-1, (-1, len(weight_D)))
    first, second = reference.rms_norm(x_TND, weight_D, eps).chunk(2, dim=-1)
    cos, sin = (angle[:, None] for angle in angles)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_PKNC: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """Attention of each request's block to its context's pages and to the whole block, float32 [T, N, D]."""
    if not _is_native(q_TND):
        return attention_reference(q_TND, k_TKD, v_TKD, kv_PKNC, blocks)
    assert kv_PKNC.stride(3) == 1 and blocks.block_table.stride(1) == 1
    q_TND, k_TKD, v_TKD = (x.contiguous() for x in (q_TND, k_TKD, v_TKD))
    out_TND = torch.empty_like(q_TND)
    arguments = _Attention(
        *(x.data_ptr() for x in (q_TND, k_TKD, v_TKD, out_TND, blocks.block_table, blocks.lengths)),
        len(blocks.lengths),
        len(q_TND) // len(blocks.lengths),
        q_TND.shape[1],
        *k_TKD.shape[1:],
        blocks.block_table.stride(0),
        kv_PKNC.shape[2],
        *kv_PKNC.stride()[:3],
    )
    functions().ink_draft_attention(byref(arguments), kv_PKNC.data_ptr(), kv_PKNC.dtype is torch.bfloat16)
    return out_TND


def attention_reference(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_PKNC: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    outputs, page = [], kv_PKNC.shape[2]
    rows, group = len(q_TND) // len(blocks.lengths), q_TND.shape[1] // k_TKD.shape[1]
    for request, length in enumerate(blocks.lengths.tolist()):
        own = slice(request * rows, (request + 1) * rows)
        pages = blocks.block_table[request, : -(-length // page)].long()
        # Cut off before use, not masked: pages hold whatever was left there, and 0 * NaN is NaN.
        past_LKC = kv_PKNC[pages].transpose(1, 2).flatten(0, 1)[:length].float()
        k_SND, v_SND = (
            torch.cat([past, block[own]]).repeat_interleave(group, dim=1)
            for past, block in zip(past_LKC.chunk(2, dim=-1), (k_TKD, v_TKD), strict=True)
        )
        scores_BNS = torch.einsum("bnd,snd->bns", q_TND[own], k_SND) * q_TND.shape[-1] ** -0.5
        outputs.append(torch.einsum("bns,snd->bnd", scores_BNS.softmax(-1), v_SND))
    return torch.cat(outputs)


def draw_blocks(
    logits_RBV: torch.Tensor, prepared_RBJ: torch.Tensor, anchors_R: torch.Tensor, head: Head, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens of every block, left to right, through the RNN.

    Args:
        logits_RBV: the target's head on the blocks' rows, float32, -inf for what cannot come.
        prepared_RBJ: the rows' share of `joint_proj` and its bias, float32 [R, B, 3 S].
        anchors_R: int64, the token before each block.
        head, choice: see there.

    Returns:
        Tokens int64 [R, B] and the distributions that they were drawn from, float32 [R, B, V]; None without `uniform`.
        For a request that takes the likeliest, the distribution is of temperature 1 and not what it was drawn from.
    """
    if not _is_native(logits_RBV):
        return draw_blocks_reference(logits_RBV, prepared_RBJ, anchors_R, head, choice)
    num_requests, num_rows = prepared_RBJ.shape[:2]
    assert is_k_major(head.w1) and is_k_major(head.joint) and is_k_major(head.w2)
    assert anchors_R.dtype is torch.int64 and choice.temperature.dtype is torch.float32
    assert choice.uniform is None or choice.uniform.dtype is torch.float64
    assert choice.forbidden is None or choice.forbidden.shape == (num_requests, logits_RBV.shape[-1])
    logits_RBV, prepared_RBJ = logits_RBV.contiguous(), prepared_RBJ.contiguous()
    tokens_RB = torch.empty(num_requests, num_rows, dtype=torch.int64)
    probs_RBV = None if choice.uniform is None else torch.empty_like(logits_RBV)
    pointers = (logits_RBV, prepared_RBJ, *choice, anchors_R, tokens_RB, probs_RBV)
    arguments = _Block(*(None if x is None else x.data_ptr() for x in pointers), *logits_RBV.shape, head.w1.shape[1])
    weights = [x.data_ptr() for x in head]
    functions().ink_draft_block(byref(arguments), *weights, head.w1.dtype is torch.bfloat16)
    return tokens_RB, probs_RBV


def draw_blocks_reference(
    logits_RBV: torch.Tensor, prepared_RBJ: torch.Tensor, anchors_R: torch.Tensor, head: Head, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    state_RS = logits_RBV.new_zeros(len(anchors_R), head.w1.shape[1])
    previous_R, greedy_R = anchors_R, choice.temperature == 0
    tokens, probs = [], []
    for index in range(logits_RBV.shape[1]):
        embedded_RS = F.embedding(previous_R, head.w1).float()
        joint = reference.linear(torch.cat([state_RS, embedded_RS], dim=-1), head.joint) + prepared_RBJ[:, index]
        gate, candidate, output = joint.chunk(3, dim=-1)
        state_RS = torch.lerp(torch.tanh(candidate), state_RS, torch.sigmoid(gate))
        logits_RV = logits_RBV[:, index] + reference.linear(torch.tanh(output), head.w2)
        if choice.forbidden is not None:
            logits_RV = logits_RV.masked_fill(choice.forbidden, float("-inf"))
        previous_R = logits_RV.argmax(-1)
        if choice.uniform is not None:
            probs.append((logits_RV / torch.where(greedy_R, 1.0, choice.temperature)[:, None]).softmax(-1))
            # In float64: over 200,000 tokens a float32 sum is off by more than a rare token's probability.
            sums_RV = probs[-1].double().cumsum(-1)
            # The first whose sum exceeds its share of the whole, so never one of probability 0.
            wanted_R1 = choice.uniform[:, index, None] * sums_RV[:, -1:]
            drawn_R = torch.searchsorted(sums_RV, wanted_R1, right=True)[:, 0].clamp(max=logits_RV.shape[-1] - 1)
            previous_R = torch.where(greedy_R, previous_R, drawn_R)
        tokens.append(previous_R)
    return torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None


def _is_native(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype is torch.float32 and ops.have_native()


class _Attention(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("q", "k", "v", "out", "block_table", "lengths")),
        *((name, c_int64) for name in ("requests", "rows", "N", "K", "D", "table", "page", "block", "head", "token")),
    ]


class _Block(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("logits", "prepared", "temperature", "uniform", "forbidden", "anchors")),
        *((name, c_void_p) for name in ("tokens", "probs")),
        *((name, c_int64) for name in ("requests", "rows", "vocabulary", "rank")),
    ]


@cache
def functions() -> Any:
    """The library with the types of this file's functions set."""
    loaded, address, number = native.functions(), c_void_p, c_int64
    types = {
        "ink_norm_rotate": [address] * 4 + [number] * 3 + [c_float],
        "ink_draft_attention": [POINTER(_Attention), address, number],
        "ink_draft_block": [POINTER(_Block)] + [address] * 3 + [number],
    }
    for name, arguments in types.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
