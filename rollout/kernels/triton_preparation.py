"""Everything between the projections of an attention sublayer and attention itself, in one launch on CUDA.

Queries and mixtures of the relative bias: learned scale, L2 clip per head, log-length factor, and the units of
`rollout.kernels.units`, so that attention uses them as they are. Keys and values: short
convolution (static or dynamic taps) with its paged state, then clip or RMSNorm per head, then the pages of attention.
The reference is `composed.prepare_queries` and `prepare_mixtures`, `reference.short_conv` and `reference.store_kv`.

A program owns the heads of one kind in one row, so every activation is read once and written once, no value crosses
rows, and a row's bits depend on that row alone. All arithmetic is float32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rollout.kernels import units
from rollout.kernels.triton_taps import load_tap, tap_pointers, token_offset

LOG2_E = tl.constexpr(units.LOG2_E)
ELEMENTS, WARPS = 2048, 4
"""Of a program that prepares queries; the others are smaller."""


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
    elements: int = ELEMENTS,
    warps: int = WARPS,
) -> None:
    """Write `q_out`, `r_out`, the convolution state and the pages.

    Args:
        q_TC, k_TC, v_TC, r_TC: projections, bfloat16 or float32; columns of one wider tensor will do.
        q_scale_ND, r_scale_NM: learned scales, contiguous.
        k_taps, v_taps: static taps [C, 1, 4], last tap the current token; with dynamic ones [4, C], first the current.
        k_dynamic_TKL, v_dynamic_TKL: contiguous taps per token and head, [T, K, 4], or None for both.
        state_BNC: convolution pages, the channels of keys and then of values.
        sources_TL: `triton_taps.tap_sources` of the step. conv_slots_T: int64, of the convolution's group.
        kv_BKNC: attention pages [blocks, K, tokens, 2 D]. kv_slots_T: int64, of attention's group.
        positions_T: int64; needed with `log_scaling`, which is (alpha, floor) on full layers and None on sliding ones.
        elements, warps: shape of a program, part of the definition of a row's bits.
    """
    num_rows = q_TC.shape[0]
    (num_heads, head_dim), num_kv_heads, d_rel = q_scale_ND.shape, kv_BKNC.shape[1], r_scale_NM.shape[1]
    channels, dynamic = num_kv_heads * head_dim, k_dynamic_TKL is not None
    assert dynamic == (v_dynamic_TKL is not None) and kv_BKNC.shape[3] == 2 * head_dim
    assert state_BNC.shape[2] == 2 * channels and k_TC.shape == v_TC.shape == (num_rows, channels)
    assert (positions_T is not None) or log_scaling is None
    whole = (q_TC, k_TC, v_TC, r_TC, state_BNC, kv_BKNC, q_out_TND, r_out_TNM)
    assert all(tensor.stride(-1) == 1 for tensor in whole)
    assert q_out_TND.stride(1) == head_dim and r_out_TNM.stride(1) == d_rel
    assert all(t is None or t.is_contiguous() for t in (q_scale_ND, r_scale_NM, k_dynamic_TKL, v_dynamic_TKL))
    if num_rows == 0:
        return
    k_taps, v_taps = (taps if dynamic else taps[:, 0].t() for taps in (k_taps, v_taps))
    assert k_taps.stride() == v_taps.stride() and k_taps.shape == (4, channels)
    heads = max(1, min(triton.next_power_of_2(num_heads), elements // head_dim))
    alpha, floor = log_scaling or (0.0, 1)
    early = not triton.knobs.runtime.interpret
    with torch.cuda.device_of(q_TC):
        _prepare_kernel[(num_rows, 3 + triton.cdiv(num_heads, heads))](
            q_TC, k_TC, v_TC, r_TC, q_scale_ND, r_scale_NM, k_taps, v_taps, k_dynamic_TKL, v_dynamic_TKL, state_BNC,
            sources_TL, conv_slots_T, kv_BKNC, kv_slots_T, positions_T, q_out_TND, r_out_TNM,
            q_TC.stride(0), k_TC.stride(0), v_TC.stride(0), r_TC.stride(0), *k_taps.stride(), *state_BNC.stride()[:2],
            *kv_BKNC.stride()[:3], q_out_TND.stride(0), r_out_TNM.stride(0), conv_slots_T.shape[0], kv_slots_T.shape[0],
            q_clip, r_clip, 1.0 / head_dim, norm_eps, alpha, 1.0 / floor,
            1.0 / math.sqrt(9.0 if dynamic else 5.0), state_BNC.shape[1], kv_BKNC.shape[2], num_heads, num_kv_heads,
            head_dim, d_rel, heads, triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(num_heads),
            log_scaling is not None, early, num_warps=warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_conv_slots", "num_kv_slots"])
def _prepare_kernel(
    q, k, v, r, q_scale, r_scale, k_taps, v_taps, k_dynamic, v_dynamic, state, sources, conv_slots, kv, kv_slots,
    positions, q_out, r_out, stride_q, stride_k, stride_v, stride_r, stride_lag, stride_tap, stride_conv_block,
    stride_conv_token, stride_kv_block, stride_kv_head, stride_kv_token, stride_q_out, stride_r_out, num_conv_slots,
    num_kv_slots, q_clip, r_clip, per_dim, norm_eps, alpha, per_floor, conv_scale, CONV_TOKENS: tl.constexpr,
    KV_TOKENS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, REL_DIM: tl.constexpr,
    TILE: tl.constexpr, KV_TILE: tl.constexpr, REL_TILE: tl.constexpr, LOG_SCALING: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """EARLY: launched before the kernel before has ended, see `triton_skinny`."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < 2:
        if part == 0:
            key = _convolved_heads(
                k + row * stride_k, k, state, k_taps, k_dynamic, sources + row * 3, conv_slots, row, stride_k,
                stride_lag, stride_tap, stride_conv_block, stride_conv_token, num_conv_slots, conv_scale, CONV_TOKENS,
                KV_TILE, KV_HEADS, DIM,
            )  # fmt: skip
            key = _clipped(key, q_clip)
            _store_heads(
                key, kv, kv_slots, row, stride_kv_block, stride_kv_head, stride_kv_token, num_kv_slots, KV_TOKENS,
                KV_TILE, KV_HEADS, DIM,
            )  # fmt: skip
        else:
            value = _convolved_heads(
                v + row * stride_v, v, state + KV_HEADS * DIM, v_taps, v_dynamic, sources + row * 3, conv_slots, row,
                stride_v, stride_lag, stride_tap, stride_conv_block, stride_conv_token, num_conv_slots, conv_scale,
                CONV_TOKENS, KV_TILE, KV_HEADS, DIM,
            )  # fmt: skip
            value *= tl.rsqrt(tl.sum(value * value, axis=1) * per_dim + norm_eps)[:, None]
            _store_heads(
                value, kv + DIM, kv_slots, row, stride_kv_block, stride_kv_head, stride_kv_token, num_kv_slots,
                KV_TOKENS, KV_TILE, KV_HEADS, DIM,
            )  # fmt: skip
    else:
        if LOG_SCALING:
            position = tl.load(positions + row)
            tau = 1.0 + alpha * tl.log(tl.maximum((position + 1).to(tl.float32) * per_floor, 1.0))
        else:
            tau = 1.0
        if part == 2:
            _prepare_heads(
                r + row * stride_r, r_scale, r_out + row * stride_r_out, 0, r_clip, tau * LOG2_E, REL_TILE, HEADS,
                REL_DIM,
            )  # fmt: skip
        else:
            _prepare_heads(
                q + row * stride_q, q_scale, q_out + row * stride_q_out, (part - 3) * TILE, q_clip,
                tau * (LOG2_E * DIM**-0.5), TILE, HEADS, DIM,
            )  # fmt: skip


@triton.jit
def _clipped(x, clip):
    """Rows of the last dimension scaled down to the L2 norm `clip`; shorter ones unchanged."""
    norm = tl.sqrt_rn(tl.sum(x * x, axis=1))
    return x * tl.minimum(clip / (norm + 1e-6), 1.0)[:, None]


@triton.jit
def _prepare_heads(x, scale, out, first, clip, factor, TILE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    head = first + tl.arange(0, TILE)[:, None]
    columns = head * DIM + tl.arange(0, DIM)[None, :]
    inside = head < HEADS
    value = tl.load(x + columns, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value *= tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    value = _clipped(value, clip) * factor
    tl.store(out + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolved_heads(
    own, x, state, taps, dynamic, sources, slots, row, stride_x, stride_lag, stride_tap, stride_block, stride_token,
    num_slots, conv_scale, TOKENS_PER_BLOCK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Convolved row as float32 [heads, DIM]; stores its inputs."""
    head = tl.arange(0, TILE)[:, None]
    columns = head * DIM + tl.arange(0, DIM)[None, :]
    inside = head < HEADS
    given = tl.load(own + columns, mask=inside, other=0.0, cache_modifier=".cg").to(state.dtype.element_ty)
    total = given.to(tl.float32)
    total += total * _tap(taps, dynamic, 0, row, head, columns, inside, stride_lag, stride_tap, HEADS)
    for lag in tl.static_range(1, 4):
        source = tl.load(sources + lag - 1)
        in_x, in_state = tap_pointers(x, state, source, stride_x, stride_block, stride_token, TOKENS_PER_BLOCK)
        earlier = load_tap(in_x, in_state, source, columns, inside).to(tl.float32)
        total += earlier * _tap(taps, dynamic, lag, row, head, columns, inside, stride_lag, stride_tap, HEADS)
    slot = tl.load(slots + row, mask=row < num_slots, other=-1)
    stored = state + token_offset(slot, stride_block, stride_token, TOKENS_PER_BLOCK)
    tl.store(stored + columns, given, mask=inside & (slot >= 0))
    return total * conv_scale


@triton.jit
def _tap(taps, dynamic, lag: tl.constexpr, row, head, columns, inside, stride_lag, stride_tap, HEADS: tl.constexpr):
    if dynamic is None:
        return tl.load(taps + (3 - lag) * stride_lag + columns * stride_tap, mask=inside, other=0.0).to(tl.float32)
    else:
        own = tl.load(dynamic + (row * HEADS + head) * 4 + lag, mask=inside, other=0.0).to(tl.float32)
        return own + tl.load(taps + lag * stride_lag + columns * stride_tap, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(
    x, kv, slots, row, stride_block, stride_head, stride_token, num_slots, TOKENS_PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + row, mask=row < num_slots, other=-1)
    head = tl.arange(0, TILE)[:, None]
    start = kv + token_offset(slot, stride_block, stride_token, TOKENS_PER_BLOCK)
    pointers = start + head.to(tl.int64) * stride_head + tl.arange(0, DIM)[None, :]
    tl.store(pointers, x.to(kv.dtype.element_ty), mask=(head < HEADS) & (slot >= 0))
