"""Slow torch reference of every kernel of the engine, for any device.

Each function has the signature of its fast twin in `rollout.kernels.native` and is the truth that the twin is tested
against. All arithmetic is float32 whatever the dtype of weights and caches: transformers keeps float32 in norms, clips,
convolutions, softmax, routing and gates, and doing the same in the linear layers only brings the result closer to the
float32 model. Source of the equations: transformers 5.24 `models/inkling2/modeling_inkling2.py`. Departures: a conv
input is rounded to the dtype of its state first, so that a tap read from a page equals one read from the same step;
and the positions a query may not see are never read, so that a NaN left in a page cannot spread.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from rollout.kernels.paged import PagedBatch


def linear(x_TC: torch.Tensor, weight_OC: torch.Tensor) -> torch.Tensor:
    """`x W^T` in float32, [T, O]. The weight may be stored in bfloat16."""
    return F.linear(x_TC.float(), weight_OC.float())


def softcap_logits(x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int) -> torch.Tensor:
    """`cap tanh(x W^T / cap)`, [T, padded_size]; columns beyond the weight's rows are -inf.

    vLLM builds masks of `vocab_size` columns (`allowed_token_ids`), while the head has `unpadded_vocab_size` rows.
    """
    logits = cap * torch.tanh(linear(x_TH, weight_VH) / cap)
    return F.pad(logits, (0, padded_size - logits.shape[-1]), value=-math.inf)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`weight x / rms(x)` over the last dimension in float32; the weight multiplies in float32 too."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def clip_norm(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Vectors of the last dimension scaled down to an L2 norm of `threshold`; shorter ones unchanged."""
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (threshold / (norm + 1e-6)).clamp(max=1.0)


def mix_norm(
    blocks_STH: torch.Tensor,
    partial_TH: torch.Tensor,
    queries_QH: torch.Tensor | None,
    weights_QH: torch.Tensor,
    mix_eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """Block attention residual followed by the RMSNorm of the sublayer's input, float32 [Q, T, H].

    The sources (finished blocks, then the running one) are normalised; each query mixes them with
    `softmax(<query, source> / sqrt(H))`. Without queries (layer 0) the running block itself is normed.
    """
    if queries_QH is None:
        return torch.stack([rms_norm(partial_TH, weight, norm_eps) for weight in weights_QH])
    sources_STH = rms_norm(torch.cat([blocks_STH.float(), partial_TH.float()[None]]), None, mix_eps)
    scores_QST = torch.einsum("qh,sth->qst", queries_QH.float(), sources_STH) * queries_QH.shape[-1] ** -0.5
    mixed_QTH = torch.einsum("qst,sth->qth", scores_QST.softmax(1), sources_STH)
    return rms_norm(mixed_QTH, None, norm_eps) * weights_QH.float()[:, None]


def short_conv(
    x_TC: torch.Tensor,
    state_BNC: torch.Tensor,
    batch: PagedBatch,
    weight: torch.Tensor,
    dynamic_TKL: torch.Tensor | None = None,
    residual_TC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal depthwise convolution over a paged window, its inner residual and output scale, float32 [T, C].

    Static taps: `weight` [C, 1, L], last tap the current token, scale 1/sqrt(L + 1). Dynamic taps: `weight` [L, C] plus
    per-token, per-head taps `dynamic` [T, K, L], first tap the current token, scale 1/sqrt(2 L + 1). Inputs are first
    stored in `state` at the batch's slots; a request's earlier positions come from its own rows or from `state`;
    positions before the request are zero. `residual` is added to the result.
    """
    taps_LC = weight.float() if dynamic_TKL is not None else weight[:, 0].flip(1).t().float()
    num_taps = taps_LC.shape[0]
    x_TC = x_TC.to(state_BNC.dtype)
    # Before any read: a request may have been given pages of a common prefix that another one fills in this very step.
    stored = batch.slots >= 0
    slots = batch.slots[stored]
    state_BNC[slots // state_BNC.shape[1], slots % state_BNC.shape[1]] = x_TC[: batch.slots.shape[0]][stored]
    out_TC = torch.zeros_like(x_TC, dtype=torch.float32)
    for request in batch.requests():
        positions = torch.arange(max(request.start - num_taps + 1, 0), request.start, device=x_TC.device)
        slots = batch.slots_of(request.request, positions, state_BNC.shape[1])
        past = state_BNC[slots // state_BNC.shape[1], slots % state_BNC.shape[1]]
        rows = torch.cat([past, x_TC[request.first : request.last]]).float()
        rows = F.pad(rows, (0, 0, num_taps - 1 - past.shape[0], 0))
        windows_TCL = rows.unfold(0, num_taps, 1).flip(-1)
        taps_TCL = taps_LC.t()[None]
        if dynamic_TKL is not None:
            dynamic = dynamic_TKL[request.first : request.last].float()
            taps_TCL = taps_TCL + dynamic.repeat_interleave(x_TC.shape[1] // dynamic.shape[1], dim=1)
        out_TC[request.first : request.last] = (windows_TCL * taps_TCL).sum(-1)
    scale = 1.0 / math.sqrt((2 if dynamic_TKL is not None else 1) * num_taps + 1)
    out_TC = (out_TC + x_TC.float()) * scale
    return out_TC if residual_TC is None else residual_TC.float() + out_TC


def store_kv(
    k_TC: torch.Tensor, v_TC: torch.Tensor, kv_BKNC: torch.Tensor, batch: PagedBatch, clip: float, eps: float
) -> None:
    """Clip keys to an L2 norm of `clip`, RMS-normalise values, and store both per head at the batch's slots."""
    num_heads, tokens_per_block = kv_BKNC.shape[1:3]
    k_TKD = clip_norm(k_TC.unflatten(-1, (num_heads, -1)), clip)
    v_TKD = rms_norm(v_TC.unflatten(-1, (num_heads, -1)), None, eps)
    stored = batch.slots >= 0
    slots = batch.slots[stored]
    rows_TKC = torch.cat([k_TKD, v_TKD], dim=-1)[: batch.slots.shape[0]][stored].to(kv_BKNC.dtype)
    kv_BKNC[slots // tokens_per_block, :, slots % tokens_per_block] = rows_TKC


def log_scale(positions_T: torch.Tensor, alpha: float, floor: int) -> torch.Tensor:
    """`1 + alpha ln(max((position + 1) / floor, 1))`, float32 [T]: longer contexts sharpen queries and biases."""
    return 1.0 + alpha * torch.log(((positions_T + 1).float() / floor).clamp(min=1.0))


def attention(
    q_TC: torch.Tensor,
    r_TC: torch.Tensor,
    sink_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    kv_BKNC: torch.Tensor,
    batch: PagedBatch,
    q_scale_ND: torch.Tensor,
    r_scale_NM: torch.Tensor,
    proj_MR: torch.Tensor,
    q_clip: float,
    r_clip: float,
    window: int | None,
    log_scaling: tuple[float, int] | None,
) -> torch.Tensor:
    """Relative attention with a per-token sink and an elementwise output gate over a paged cache, float32 [T, N D].

    `q` and `r` are raw projections: they are scaled, clipped and (full layers) scaled with the position here. A query
    sees positions `max(0, p - window + 1) .. p`; the bias of distance `d < R` is column d of `r proj`, else 0.
    """
    num_heads, head_dim = q_scale_ND.shape
    kv_heads, tokens_per_block = kv_BKNC.shape[1:3]
    out_TC = torch.zeros(q_TC.shape, dtype=torch.float32, device=q_TC.device)
    for request in batch.requests():
        rows = slice(request.first, request.last)
        p_T = torch.arange(request.start, request.start + request.last - request.first, device=q_TC.device)
        q_TND = clip_norm(q_TC[rows].float().unflatten(-1, (num_heads, -1)) * q_scale_ND.float(), q_clip)
        r_TNM = clip_norm(r_TC[rows].float().unflatten(-1, (num_heads, -1)) * r_scale_NM.float(), r_clip)
        if log_scaling is not None:
            tau_T = log_scale(p_T, *log_scaling)[:, None, None]
            q_TND, r_TNM = q_TND * tau_T, r_TNM * tau_T
        first = 0 if window is None else max(0, request.start - window + 1)
        p_S = torch.arange(first, int(p_T[-1]) + 1, device=q_TC.device)
        slots = batch.slots_of(request.request, p_S, tokens_per_block)
        kv_SKC = kv_BKNC[slots // tokens_per_block, :, slots % tokens_per_block].float()
        k_SND, v_SND = (half.repeat_interleave(num_heads // kv_heads, dim=1) for half in kv_SKC.chunk(2, dim=-1))
        distance_TS = p_T[:, None] - p_S[None]
        extent = proj_MR.shape[1]
        bias_TNS = (r_TNM @ proj_MR.float()).gather(
            -1, distance_TS.clamp(0, extent - 1)[:, None].expand(-1, num_heads, -1)
        )
        scores_TNS = torch.einsum("tnd,snd->tns", q_TND, k_SND) * head_dim**-0.5
        scores_TNS = scores_TNS + bias_TNS.masked_fill((distance_TS >= extent)[:, None], 0.0)
        hidden_TS = (distance_TS < 0) | (distance_TS >= (window or int(p_S[-1]) + 1))
        scores_TNS = scores_TNS.masked_fill(hidden_TS[:, None], -math.inf)
        with_sink = torch.cat([scores_TNS, sink_TN[rows].float()[..., None]], dim=-1)
        out_TND = torch.einsum("tns,snd->tnd", with_sink.softmax(-1)[..., :-1], v_SND)
        out_TC[rows] = out_TND.flatten(1) * torch.sigmoid(gate_TC[rows].float())
    return out_TC


def experts(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    gate_up_ECH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    route_scale: float,
    gate_cap: float,
    up_cap: float,
) -> torch.Tensor:
    """Sigmoid top-k router and softcapped SwiGLU experts, float32 [T, H].

    The bias only selects. Contributions are added in ascending order of the expert's number.
    """
    x_TH = x_TH.float()
    scores_TE = torch.sigmoid(linear(x_TH, router_EH))
    # A stable sort breaks ties by the lower expert number; torch.topk leaves them open.
    order_TE = torch.sort(scores_TE + bias_E.float(), dim=-1, descending=True, stable=True).indices
    chosen_TK = order_TE[:, :top_k].sort(-1).values
    weights_TK = scores_TE.gather(1, chosen_TK)
    weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * route_scale
    out_TH = torch.zeros_like(x_TH)
    for expert in chosen_TK.unique().tolist():
        rows, ranks = torch.where(chosen_TK == expert)
        gate, up = linear(x_TH[rows], gate_up_ECH[expert]).chunk(2, dim=-1)
        hidden = gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * (up_cap * torch.tanh(up / up_cap))
        out_TH.index_add_(0, rows, linear(hidden, down_EHI[expert]) * weights_TK[rows, ranks, None])
    return out_TH


def lora_delta(
    y_TO: torch.Tensor,
    x_TC: torch.Tensor,
    a_SRC: torch.Tensor,
    b_SOR: torch.Tensor,
    slot_T: torch.Tensor,
    scale: float,
) -> None:
    """Add `scale B[slot] (A[slot] x)` to the rows of `y` whose slot is not negative, in place.

    `a` [slots, rank, C] and `b` [slots, O, rank] hold one adapter per slot; a row with slot -1 is a base-model row.
    """
    for slot in slot_T[slot_T >= 0].unique().tolist():
        rows = (slot_T == slot).nonzero()[:, 0]
        delta = linear(linear(x_TC[rows], a_SRC[slot]), b_SOR[slot]) * scale
        y_TO[rows, : delta.shape[1]] += delta.to(y_TO.dtype)
