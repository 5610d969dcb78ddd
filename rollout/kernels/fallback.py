"""What takes the place of a Triton kernel that does not run: torch functions with the same signatures and effects.

Composed of `reference` and `composed`; where a kernel is given `sources` or `slots` instead of a batch, a gather over
all rows at once. Nothing waits for the device and nothing is allocated by data, so all but the two attentions can be
captured in a graph; those read lengths on the host. What only shapes a launch (`tile`, `plan`, `programs`) is ignored.

Not the references themselves, which the kernels' tests use; these are tested against them too. Not fast either:
`rollout.kernels.cuda` says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rollout.kernels import composed, reference
from rollout.kernels.paged import PagedBatch
from rollout.kernels.units import LOG2_E, query_units

LAGS = 3

# Scores of one piece of attention, float32: 256 MiB, of which about four are alive at a time.
SCORES = 1 << 26
# Keys from which on the heads go one after the other: copies of keys for every query head would not fit beside a cache.
MANY_KEYS = 1 << 14


class Blocks(NamedTuple):
    """Fields of `triton_moe_align.Blocks`, which cannot be imported without Triton."""

    rows: torch.Tensor
    experts: torch.Tensor
    num_rows: torch.Tensor


def tap_sources(
    batch: PagedBatch, num_rows: int, tokens_per_block: int, out_TL: torch.Tensor | None = None
) -> torch.Tensor:
    """`triton_taps.tap_sources`."""
    device = batch.slots.device
    row = torch.arange(num_rows, device=device)
    starts = batch.query_start.long()
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    belongs = request < batch.seq_lens.shape[0]
    request = request.clamp(max=batch.seq_lens.shape[0] - 1)
    first, last = starts[request], starts[request + 1]
    lag = torch.arange(1, LAGS + 1, device=device)
    neighbour = row[:, None] - lag
    position = (batch.seq_lens[request] - last + row)[:, None] - lag
    block = (position.clamp(min=0) // tokens_per_block).clamp(max=batch.block_table.shape[1] - 1)
    slot = batch.block_table[request[:, None], block].long() * tokens_per_block + position % tokens_per_block
    filled_by = _last_row_with(batch.slots[:num_rows], slot)
    earlier = torch.where(filled_by >= 0, filled_by, -2 - slot)
    source = torch.where(neighbour >= first[:, None], neighbour, torch.where(position >= 0, earlier, -1))
    source = torch.where(belongs[:, None], source, -1)
    return source if out_TL is None else out_TL.copy_(source)


def _last_row_with(slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The last row whose slot is the wanted one, -1 where there is none."""
    ordered, rows = F.pad(slots, (1, 0), value=-1).sort(stable=True)
    place = torch.searchsorted(ordered, wanted.contiguous(), right=True) - 1
    place = place.clamp(min=0)
    return torch.where((ordered[place] == wanted) & (wanted >= 0), rows[place] - 1, -1)


def prepare(
    q_TC: torch.Tensor,
    k_TC: torch.Tensor,
    v_TC: torch.Tensor,
    r_TC: torch.Tensor,
    q_scale_ND: torch.Tensor,
    r_scale_NM: torch.Tensor,
    k_taps: torch.Tensor,
    v_taps: torch.Tensor,
    k_dynamic_TKL: torch.Tensor | None,
    v_dynamic_TKL: torch.Tensor | None,
    state_BNC: torch.Tensor,
    sources_TL: torch.Tensor,
    conv_slots_T: torch.Tensor,
    kv_BKNC: torch.Tensor,
    kv_slots_T: torch.Tensor,
    positions_T: torch.Tensor | None,
    q_clip: float,
    r_clip: float,
    norm_eps: float,
    log_scaling: tuple[float, int] | None,
    q_out_TND: torch.Tensor,
    r_out_TNM: torch.Tensor,
    elements: int = 0,
    warps: int = 0,
) -> None:
    """`triton_preparation.prepare`."""
    channels = k_TC.shape[1]
    halves = state_BNC[..., :channels], state_BNC[..., channels:]
    k_TKD, v_TKD = (
        _short_conv(x, state, sources_TL, taps, dynamic).unflatten(-1, (kv_BKNC.shape[1], -1))
        for x, state, taps, dynamic in zip(
            (k_TC, v_TC), halves, (k_taps, v_taps), (k_dynamic_TKL, v_dynamic_TKL), strict=True
        )
    )
    for x, state in zip((k_TC, v_TC), halves, strict=True):
        _store(x.to(state.dtype), state, conv_slots_T)
    stored_TKC = torch.cat([reference.clip_norm(k_TKD, q_clip), reference.rms_norm(v_TKD, None, norm_eps)], dim=-1)
    _store(stored_TKC.to(kv_BKNC.dtype), kv_BKNC.transpose(1, 2), kv_slots_T)
    q_out_TND.copy_(composed.prepare_queries(q_TC, q_scale_ND, q_clip, positions_T, log_scaling))
    r_out_TNM.copy_(composed.prepare_mixtures(r_TC, r_scale_NM, r_clip, positions_T, log_scaling))


def conv_mix(
    x_TH: torch.Tensor,
    state_BNC: torch.Tensor,
    sources_TL: torch.Tensor,
    slots_T: torch.Tensor,
    weight: torch.Tensor,
    residual_TH: torch.Tensor | None,
    blocks_STH: torch.Tensor,
    queries_QH: torch.Tensor,
    weights_QH: torch.Tensor,
    mix_eps: float,
    norm_eps: float,
    running_TH: torch.Tensor,
    out_QTH: torch.Tensor,
    tile: Any = None,
    early: bool = False,
) -> None:
    """`triton_conv_mix.conv_mix`."""
    new_TH = _short_conv(x_TH, state_BNC, sources_TL, weight, None)
    if residual_TH is not None:
        new_TH = residual_TH.float() + new_TH
    _store(x_TH.to(state_BNC.dtype), state_BNC, slots_T)
    running_TH.copy_(new_TH)
    out_QTH.copy_(reference.mix_norm(blocks_STH, running_TH, queries_QH, weights_QH, mix_eps, norm_eps))


def _short_conv(
    x_TC: torch.Tensor,
    state_BNC: torch.Tensor,
    sources_TL: torch.Tensor,
    taps: torch.Tensor,
    dynamic_TKL: torch.Tensor | None,
) -> torch.Tensor:
    """`reference.short_conv` with the earlier inputs named by `sources`, float32 [T, C]; stores nothing."""
    taps_LC = taps.float() if dynamic_TKL is not None else taps[:, 0].flip(1).t().float()
    x_TC = x_TC.to(state_BNC.dtype)
    total_TC = x_TC.float()
    for lag in range(LAGS + 1):
        taps_TC = taps_LC[lag]
        if dynamic_TKL is not None:
            taps_TC = taps_TC + dynamic_TKL[:, :, lag].float().repeat_interleave(
                x_TC.shape[1] // dynamic_TKL.shape[1], dim=1
            )
        input_TC = x_TC if lag == 0 else _earlier(x_TC, state_BNC, sources_TL[:, lag - 1])
        total_TC = total_TC + input_TC.float() * taps_TC
    return total_TC / math.sqrt((1 if dynamic_TKL is None else 2) * (LAGS + 1) + 1)


def _earlier(x_TC: torch.Tensor, state_BNC: torch.Tensor, source_T: torch.Tensor) -> torch.Tensor:
    """The inputs that `source` names. Chosen, not multiplied with a mask: what is not seen may be NaN."""
    source_T = source_T[:, None]
    slot_T = (-2 - source_T[:, 0]).clamp(min=0)
    stored_TC = state_BNC[slot_T // state_BNC.shape[1], slot_T % state_BNC.shape[1]]
    past_TC = torch.where(source_T < -1, stored_TC, 0.0)
    return torch.where(source_T >= 0, x_TC[source_T[:, 0].clamp(min=0)], past_TC)


def _store(rows: torch.Tensor, pages: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write rows [T, ...] to the slots of `pages` [blocks, tokens, ...]; none beyond `slots` or to a negative slot.

    A mask as an index would make the host wait for its count. So rows that are not to be stored write what another row
    writes, to the same place; where no row is stored at all, they write back what is there.
    """
    num_rows, tokens = min(rows.shape[0], slots_T.shape[0]), pages.shape[1]
    if num_rows == 0:
        return
    slots_T, rows = slots_T[:num_rows], rows[:num_rows]
    is_stored = slots_T >= 0
    of_stored = torch.where(is_stored, torch.arange(num_rows, device=rows.device), is_stored.int().argmax())
    target = slots_T[of_stored].clamp(min=0)
    values = torch.where(is_stored.any(), rows[of_stored], pages[target // tokens, target % tokens])
    pages[target // tokens, target % tokens] = values


def route(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    route_scale: float,
    weights_TK: torch.Tensor | None = None,
    experts_TK: torch.Tensor | None = None,
    plan: Any = None,
    early: bool = True,
    constant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`triton_router.route`. The product in float64: a float32 one may be rounded to tf32, which chooses others."""
    logits_TE = (x_TH.double() @ router_EH.double().t()).float()
    weights, experts = composed.route(logits_TE, bias_E, top_k, route_scale)
    return (
        weights if weights_TK is None else weights_TK.copy_(weights),
        experts if experts_TK is None else experts_TK.copy_(experts),
    )


def expert_activation(
    gate_up_TC: torch.Tensor,
    gate_cap: float,
    up_cap: float,
    out_TI: torch.Tensor | None = None,
    block: int = 0,
    warps: int = 0,
) -> torch.Tensor:
    """`triton_activation.expert_activation`."""
    activated_TI = composed.expert_activation(gate_up_TC, gate_cap, up_cap)
    return activated_TI.to(gate_up_TC.dtype) if out_TI is None else out_TI.copy_(activated_TI)


def weighted_sum(
    outputs_TKH: torch.Tensor, weights_TK: torch.Tensor, out_TH: torch.Tensor | None = None
) -> torch.Tensor:
    """`triton_moe_sum.weighted_sum`."""
    total_TH = torch.zeros_like(outputs_TKH[:, 0], dtype=torch.float32)
    for rank in range(outputs_TKH.shape[1]):
        total_TH += outputs_TKH[:, rank].float() * weights_TK[:, rank, None]
    return total_TH.to(outputs_TKH.dtype) if out_TH is None else out_TH.copy_(total_TH)


def align(experts_TK: torch.Tensor, num_experts: int, block_size: int) -> Blocks:
    """`triton_moe_align.align`."""
    expert_P, device = experts_TK.flatten().long(), experts_TK.device
    pairs = expert_P.shape[0]
    num_blocks = -(-min(pairs * block_size, pairs + num_experts * (block_size - 1)) // block_size)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(
        0, expert_P, torch.ones_like(expert_P)
    )
    blocks_E = (counts_E + block_size - 1) // block_size
    ends_E = blocks_E.cumsum(0)
    owner_P, pair_P = expert_P.sort(stable=True)
    rank_P = torch.arange(pairs, device=device) - (counts_E.cumsum(0) - counts_E)[owner_P]
    rows = torch.full((num_blocks * block_size,), pairs, dtype=torch.int32, device=device)
    rows[(ends_E - blocks_E)[owner_P] * block_size + rank_P] = pair_P.int()
    owners = torch.searchsorted(ends_E, torch.arange(num_blocks, device=device), right=True, out_int32=True)
    return Blocks(rows, owners.clamp(max=num_experts - 1), (ends_E[-1:] * block_size).int())


def project(x_JTH: torch.Tensor, weight_JNH: torch.Tensor) -> torch.Tensor:
    """`triton_linear.project`."""
    return torch.bmm(x_JTH.float(), weight_JNH.transpose(1, 2))


def softcap_logits(x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int) -> torch.Tensor:
    """`triton_softcap.softcap_logits`. The product is the same: a float32 copy of the weight would take gigabytes."""
    if x_TH.is_cuda and weight_VH.dtype != torch.float32:
        logits_TV = torch.mm(x_TH.to(weight_VH.dtype), weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_TV = reference.linear(x_TH.to(weight_VH.dtype), weight_VH)
    capped_TV = cap * torch.tanh(logits_TV / cap)
    return F.pad(capped_TV, (0, padded_size - capped_TV.shape[1]), value=-math.inf)


def linear(x_TC: torch.Tensor, weight_OC: torch.Tensor, tile: Any = None, early: bool = True) -> torch.Tensor:
    """`triton_skinny.linear`."""
    return (x_TC.float() @ weight_OC.float().t()).to(x_TC.dtype)


def few_logits(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    cap: float,
    padded_size: int,
    tile: Any = None,
    early: bool = True,
) -> torch.Tensor:
    """`triton_skinny.softcap_logits`."""
    return softcap_logits(x_TH, weight_VH, cap, padded_size)


def attention_inputs(
    x_QTH: torch.Tensor,
    weight_OH: torch.Tensor,
    keys_values: torch.Tensor | None,
    sinks_NH: torch.Tensor,
    taps: torch.Tensor | None,
    tile: Any = None,
    early: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`triton_skinny.attention_inputs`."""
    columns, sink_TN = [linear(x_QTH[0], weight_OH)], project(x_QTH[:1], sinks_NH[None])[0]
    if keys_values is None or taps is None:
        return columns[0], sink_TN, None
    columns += [linear(*pair) for pair in zip(x_QTH[1:], keys_values, strict=True)]
    return torch.cat(columns, dim=1), sink_TN, project(x_QTH[1:], taps)


def decode_attention(
    q_TC: torch.Tensor,
    r_TC: torch.Tensor,
    sink_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    kv_BKNC: torch.Tensor,
    batch: PagedBatch,
    q_scale_ND: torch.Tensor | None,
    r_scale_NM: torch.Tensor | None,
    proj_MR: torch.Tensor,
    q_clip: float,
    r_clip: float,
    window: int | None,
    log_scaling: tuple[float, int] | None,
    *,
    max_queries: int,
    out_dtype: torch.dtype = torch.float32,
    tiles: Any = None,
    programs: int | None = None,
    early_merge: bool = False,
) -> torch.Tensor:
    """`triton_decode.attention`. Waits for the device."""
    return prefill_attention(
        q_TC, r_TC, sink_TN, gate_TC, kv_BKNC, batch, q_scale_ND, r_scale_NM, proj_MR, q_clip, r_clip, window,
        log_scaling, out_dtype=out_dtype,
    )  # fmt: skip


def prefill_attention(
    q_TC: torch.Tensor,
    r_TC: torch.Tensor,
    sink_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    kv_BKNC: torch.Tensor,
    batch: PagedBatch,
    q_scale_ND: torch.Tensor | None,
    r_scale_NM: torch.Tensor | None,
    proj_MR: torch.Tensor,
    q_clip: float,
    r_clip: float,
    window: int | None,
    log_scaling: tuple[float, int] | None,
    *,
    out_dtype: torch.dtype = torch.float32,
    tiles: Any = None,
) -> torch.Tensor:
    """`triton_prefill.attention`, a piece at a time so that scores fit beside a cache. Waits for the device."""
    num_heads, kv_heads, rel = sink_TN.shape[1], kv_BKNC.shape[1], proj_MR.shape[0]
    head_dim, group = q_TC.shape[1] // num_heads, num_heads // kv_heads
    if q_scale_ND is None or r_scale_NM is None:
        # Prepared already: back to natural units, and nothing else.
        q_scale_ND = sink_TN.new_full((num_heads, head_dim), 1.0 / query_units(head_dim), dtype=torch.float32)
        r_scale_NM = sink_TN.new_full((num_heads, rel), 1.0 / LOG2_E, dtype=torch.float32)
        q_clip, r_clip, log_scaling = math.inf, math.inf, None
    out_TC = q_TC.new_zeros(q_TC.shape, dtype=out_dtype)
    for piece, rows, first, last in _pieces(batch, num_heads, kv_heads, window):
        heads = slice(first * group, last * group)
        columns = slice(heads.start * head_dim, heads.stop * head_dim)
        out_TC[rows, columns] = reference.attention(
            q_TC[rows, columns], r_TC[rows, heads.start * rel : heads.stop * rel], sink_TN[rows, heads],
            gate_TC[rows, columns], kv_BKNC[:, first:last], piece, q_scale_ND[heads], r_scale_NM[heads], proj_MR,
            q_clip, r_clip, window, log_scaling,
        ).to(out_dtype)  # fmt: skip
    return out_TC


def _pieces(
    batch: PagedBatch, num_heads: int, kv_heads: int, window: int | None
) -> Iterator[tuple[PagedBatch, slice, int, int]]:
    """A batch of some rows of one request, which rows they are, and the key/value heads to take, from and to."""
    for request in batch.requests():
        length = request.start + request.last - request.first
        keys = length if window is None else min(length, window + request.last - request.first)
        at_once = kv_heads if keys < MANY_KEYS else 1
        most = max(1, SCORES // (keys * num_heads // kv_heads * at_once))
        for begin in range(request.first, request.last, most):
            end = min(begin + most, request.last)
            piece = PagedBatch(
                batch.query_start.new_tensor([0, end - begin]),
                batch.seq_lens.new_tensor([request.start + end - request.first]),
                batch.block_table[request.request : request.request + 1],
                batch.slots[:0],
            )
            for first in range(0, kv_heads, at_once):
                yield piece, slice(begin, end), first, first + at_once
