"""The C++ kernels as functions on CPU tensors; same names and meaning as in `rollout.kernels.reference`.

Not a numpy-style wrapper: inputs must be what the engine passes (float32, dense rows); weights and caches may be
bfloat16. What is not so is an error of ours, hence assertions.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from typing import Any, ClassVar

import torch

from rollout.kernels.build import library
from rollout.kernels.layout import is_k_major, k_major
from rollout.kernels.paged import PagedBatch


class _Batch(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("query_start", "seq_lens", "block_table", "slots")),
        *((name, c_int64) for name in ("requests", "table_stride", "tokens_per_block")),
    ]


class _Attention(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("q", "r", "sink", "gate", "q_scale", "r_scale", "proj", "out")),
        *((name, c_int64) for name in ("T", "N", "K", "D", "M", "extent", "window", "block", "head", "token")),
        *((name, c_float) for name in ("q_clip", "r_clip", "alpha", "floor")),
    ]


class _Experts(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("x", "router", "bias", "out")),
        *((name, c_int64) for name in ("T", "H", "E", "I", "top_k")),
        *((name, c_float) for name in ("route_scale", "gate_cap", "up_cap")),
    ]


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "ink_linear": [_P] * 3 + [_I] * 4,
    "ink_softcap_logits": [_P] * 3 + [_I] * 4 + [_F, _I],
    "ink_mix_norm": [_P] * 5 + [_I] * 4 + [_F] * 2,
    "ink_short_conv": [_P, _P, POINTER(_Batch)] + [_P] * 4 + [_I] * 6,
    "ink_store_kv": [_P] * 3 + [POINTER(_Batch)] + [_I] * 6 + [_F] * 2 + [_I],
    "ink_attention": [POINTER(_Attention), _P, POINTER(_Batch), _I],
    "ink_experts": [POINTER(_Experts), _P, _P, _I],
    "ink_lora": [_P, _I] + [_P] * 4 + [_I] * 4 + [_F],
}


@cache
def functions() -> Any:
    """The library with argument types set, or None when there is none."""
    loaded = library()
    if loaded is None:
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _dense(x: torch.Tensor) -> int:
    """Address of a dense float32 tensor."""
    assert x.dtype is torch.float32 and x.is_contiguous()
    return x.data_ptr()


def _is_half(x: torch.Tensor) -> int:
    assert x.dtype is torch.float32 or x.dtype is torch.bfloat16
    return int(x.dtype is torch.bfloat16)


def _k_major(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the kernels read it. The model's parameters are laid out so; anything else is copied."""
    return weight if is_k_major(weight) else k_major(weight)


def _batch(batch: PagedBatch, tokens_per_block: int) -> Any:
    """The batch as a C structure, made once per group and step."""
    found = batch.native.get(tokens_per_block)
    if found is None:
        assert batch.block_table.stride(1) == 1 and batch.slots.is_contiguous()
        found = byref(
            _Batch(
                batch.query_start.data_ptr(),
                batch.seq_lens.data_ptr(),
                batch.block_table.data_ptr(),
                batch.slots.data_ptr(),
                batch.seq_lens.shape[0],
                batch.block_table.stride(0),
                tokens_per_block,
            )
        )
        batch.native[tokens_per_block] = found
    return found


def linear(x_TC: torch.Tensor, weight_OC: torch.Tensor) -> torch.Tensor:
    num_rows, width = x_TC.shape
    out_TO = torch.empty(num_rows, weight_OC.shape[0], dtype=torch.float32)
    weight_OC = _k_major(weight_OC)
    functions().ink_linear(
        _dense(x_TC), weight_OC.data_ptr(), out_TO.data_ptr(), num_rows, out_TO.shape[1], width, _is_half(weight_OC)
    )
    return out_TO


def softcap_logits(x_TH: torch.Tensor, weight_VH: torch.Tensor, cap: float, padded_size: int) -> torch.Tensor:
    out_TV = torch.empty(x_TH.shape[0], padded_size, dtype=torch.float32)
    weight_VH = _k_major(weight_VH)
    functions().ink_softcap_logits(
        _dense(x_TH),
        weight_VH.data_ptr(),
        out_TV.data_ptr(),
        x_TH.shape[0],
        weight_VH.shape[0],
        x_TH.shape[1],
        padded_size,
        cap,
        _is_half(weight_VH),
    )
    return out_TV


def mix_norm(
    blocks_STH: torch.Tensor,
    partial_TH: torch.Tensor,
    queries_QH: torch.Tensor | None,
    weights_QH: torch.Tensor,
    mix_eps: float,
    norm_eps: float,
) -> torch.Tensor:
    num_queries, hidden = weights_QH.shape
    num_tokens = partial_TH.shape[0]
    num_blocks = blocks_STH.shape[0]
    assert num_blocks < 64  # the kernel's stack array
    out_QTH = torch.empty(num_queries, num_tokens, hidden, dtype=torch.float32)
    functions().ink_mix_norm(
        _dense(blocks_STH),
        _dense(partial_TH),
        None if queries_QH is None else _dense(queries_QH),
        _dense(weights_QH),
        out_QTH.data_ptr(),
        num_blocks,
        num_tokens,
        hidden,
        num_queries,
        mix_eps,
        norm_eps,
    )
    return out_QTH


def short_conv(
    x_TC: torch.Tensor,
    state_BNC: torch.Tensor,
    batch: PagedBatch,
    weight: torch.Tensor,
    dynamic_TKL: torch.Tensor | None = None,
    residual_TC: torch.Tensor | None = None,
) -> torch.Tensor:
    assert state_BNC.stride(2) == 1
    num_tokens, channels = x_TC.shape
    # Static taps [C, 1, L] lie in memory as [L, C], like dynamic ones.
    taps = weight if dynamic_TKL is not None else _k_major(weight[:, 0]).t()
    assert taps.is_contiguous() and taps.dtype is torch.float32
    out_TC = torch.empty(num_tokens, channels, dtype=torch.float32)
    functions().ink_short_conv(
        _dense(x_TC),
        state_BNC.data_ptr(),
        _batch(batch, state_BNC.shape[1]),
        taps.data_ptr(),
        None if dynamic_TKL is None else _dense(dynamic_TKL),
        None if residual_TC is None else _dense(residual_TC),
        out_TC.data_ptr(),
        num_tokens,
        channels,
        0 if dynamic_TKL is None else dynamic_TKL.shape[1],
        state_BNC.stride(0),
        state_BNC.stride(1),
        _is_half(state_BNC),
    )
    return out_TC


def store_kv(
    k_TC: torch.Tensor, v_TC: torch.Tensor, kv_BKNC: torch.Tensor, batch: PagedBatch, clip: float, eps: float
) -> None:
    assert kv_BKNC.stride(3) == 1
    num_heads = kv_BKNC.shape[1]
    functions().ink_store_kv(
        _dense(k_TC),
        _dense(v_TC),
        kv_BKNC.data_ptr(),
        _batch(batch, kv_BKNC.shape[2]),
        min(k_TC.shape[0], batch.slots.shape[0]),
        num_heads,
        k_TC.shape[1] // num_heads,
        *kv_BKNC.stride()[:3],
        clip,
        eps,
        _is_half(kv_BKNC),
    )


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
    num_heads, head_dim = q_scale_ND.shape
    assert head_dim % 16 == 0 and kv_BKNC.stride(3) == 1
    out_TC = torch.empty(q_TC.shape, dtype=torch.float32)
    alpha, floor = log_scaling or (0.0, 0)
    arguments = _Attention(
        *map(_dense, (q_TC, r_TC, sink_TN, gate_TC, q_scale_ND, r_scale_NM, proj_MR, out_TC)),
        q_TC.shape[0],
        num_heads,
        kv_BKNC.shape[1],
        head_dim,
        *proj_MR.shape,
        window or 0,
        *kv_BKNC.stride()[:3],
        q_clip,
        r_clip,
        alpha,
        floor,
    )
    functions().ink_attention(byref(arguments), kv_BKNC.data_ptr(), _batch(batch, kv_BKNC.shape[2]), _is_half(kv_BKNC))
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
    num_experts, hidden, width = down_EHI.shape
    assert width % 16 == 0
    router_EH, gate_up_ECH, down_EHI = _k_major(router_EH), _k_major(gate_up_ECH), _k_major(down_EHI)
    out_TH = torch.empty(x_TH.shape, dtype=torch.float32)
    arguments = _Experts(
        *map(_dense, (x_TH, router_EH.t(), bias_E, out_TH)),
        x_TH.shape[0],
        hidden,
        num_experts,
        width,
        top_k,
        route_scale,
        gate_cap,
        up_cap,
    )
    functions().ink_experts(byref(arguments), gate_up_ECH.data_ptr(), down_EHI.data_ptr(), _is_half(down_EHI))
    return out_TH


def lora_delta(
    y_TO: torch.Tensor,
    x_TC: torch.Tensor,
    a_SRC: torch.Tensor,
    b_SOR: torch.Tensor,
    slot_T: torch.Tensor,
    scale: float,
) -> None:
    assert y_TO.dtype is torch.float32 and y_TO.stride(1) == 1 and slot_T.dtype is torch.int64
    _, rank, width = a_SRC.shape
    a_SRC, b_SOR = a_SRC.float(), b_SOR.float()
    functions().ink_lora(
        y_TO.data_ptr(),
        y_TO.stride(0),
        *map(_dense, (x_TC, a_SRC, b_SOR)),
        slot_T.data_ptr(),
        x_TC.shape[0],
        width,
        rank,
        y_TO.shape[1],
        scale,
    )
