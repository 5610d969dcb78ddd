"""What the GPU's decoder holds at once, against what it shows vLLM before there are pages (`fused.reserve`).

vLLM gives to pages what a profiled step leaves: memory of a real step beyond that is missing when the engine is full.
Attention and experts are stand-ins that allocate as theirs do; residuals, mixtures and lifetimes are the decoder's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.kernels import fallback, triton_decode
from rollout.plugin import fused
from rollout.plugin.linear import Projection
from rollout.plugin.paging import PagedMetadata

ROWS, HIDDEN, LAYERS, PER_BLOCK, PAIRS, REQUESTS = 32, 64, 6, 2, 8, 12


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at the end of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        held = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in held:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(size for _, size in self._made.values()))
        return result


def experts(x_TH: torch.Tensor) -> torch.Tensor:
    """As much memory as a product for every pair of token and expert."""
    down_NH = x_TH.new_empty(PAIRS * len(x_TH), HIDDEN)
    return down_NH[: len(x_TH)].clone()


def model() -> tuple[Any, dict[str, Any]]:
    """As much of a text model as the decoder reads, every second layer full; and a step's metadata."""
    weight = torch.ones(HIDDEN)
    conv = SimpleNamespace(range=slice(0, HIDDEN), conv1d=SimpleNamespace(weight=torch.ones(HIDDEN, 1, 4)))
    layers = []
    for index in range(LAYERS):
        queries = torch.ones(3 if index % 2 else 1, HIDDEN)
        layers.append(SimpleNamespace(
            norm_eps=1e-6, opens_block=index % PER_BLOCK == 0, input_norms=[SimpleNamespace(weight=weight)],
            self_attn=SimpleNamespace(kind=index % 2), mlp=experts,
            attention_input=SimpleNamespace(query=queries), shared_norms=queries,
            mlp_input=SimpleNamespace(query=weight), post_attention_layernorm=SimpleNamespace(weight=weight),
            post_attention_convolution=conv, post_mlp_convolution=conv,
        ))  # fmt: skip
    pool_BKNC = torch.ones(2, 1, 4, HIDDEN)
    pages = [SimpleNamespace(key="pages", view=lambda: pool_BKNC)] * LAYERS
    cache = SimpleNamespace(attention=pages, conv=pages)
    batch = SimpleNamespace(slots=torch.arange(ROWS))
    shape = SimpleNamespace(layers_per_block=PER_BLOCK, expert_formats=["nvfp4"] * LAYERS)
    final = {"norm": SimpleNamespace(weight=weight), "final_input": SimpleNamespace(query=weight)}
    text = SimpleNamespace(
        layers=layers, shape=shape, cache=cache, max_requests=REQUESTS, kernels=SimpleNamespace(vector_rows=0), **final
    )
    return text, {"pages": SimpleNamespace(batch=batch)}


def test_a_step_holds_no_more_than_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = SimpleNamespace(
        tap_sources=lambda batch, rows, tokens: torch.empty(0), conv_mix=lambda *arguments, **_: arguments[-1].zero_()
    )
    monkeypatch.setattr(fused, "attend", lambda module, kernels, inputs_QTH, *_: torch.empty_like(inputs_QTH[0]))
    asked: list[tuple[Any, int]] = []
    monkeypatch.setattr(fused, "reserve_attention", lambda module, *given: asked.append((module.kind, given[-1])))
    text, metadata = model()
    hidden_TH = torch.randn(ROWS, HIDDEN)
    # A draft sees a layer in the middle of a block, which is copied, and one at its end.
    tapped = (0, PER_BLOCK - 1)
    with Peak() as step:
        outputs = dict.fromkeys(tapped, hidden_TH)
        out_TH = fused.forward(text, kernels, hidden_TH, torch.arange(ROWS), metadata, outputs)
    assert out_TH.shape == hidden_TH.shape
    assert all(output is not hidden_TH for output in outputs.values())
    with Peak() as reserved:
        fused.reserve(text, hidden_TH, dict.fromkeys(tapped, hidden_TH))
    with Peak() as without:
        fused.reserve(text, hidden_TH, {})
    plane = hidden_TH.nbytes
    assert reserved.bytes == without.bytes + plane
    # Blocks, the running one, the experts' input, products and output.
    assert reserved.bytes >= (LAYERS // PER_BLOCK + 1 + 1 + PAIRS + 1) * plane
    assert step.bytes <= reserved.bytes + plane // 8
    # Of each kind of layer, with all requests.
    assert asked[:2] == [(0, REQUESTS), (1, REQUESTS)]
    text.max_requests = ROWS + 1
    fused.reserve(text, hidden_TH, {})
    assert asked[-2:] == [(0, ROWS), (1, ROWS)]


def test_every_format_of_experts_runs_on_few_rows_that_are_marlins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "reserve_attention", lambda *_: None)
    text, _ = model()
    ran: list[tuple[int, int]] = []
    for index, layer in enumerate(text.layers):
        layer.mlp = lambda x_TH, index=index: ran.append((index, len(x_TH))) or x_TH
    text.shape.expert_formats = ["nvfp4"] * 4 + ["mxfp8"] * 2
    text.kernels.vector_rows = 8
    fused.reserve(text, torch.randn(ROWS, HIDDEN), {})
    assert ran == [(3, 9), (5, 9), (0, ROWS)]


HEADS, KV_HEADS, DIM, REL = 12, 2, 16, 8


def projection(size: int) -> Projection:
    linear = Projection.__new__(Projection)
    nn.Module.__init__(linear)
    linear.output_size = size
    return linear


def attention(is_full: bool) -> Any:
    """As much of an attention sublayer as the decoder reads."""
    keys, heads = KV_HEADS * DIM, HEADS * DIM
    modules = tuple(projection(size) for size in (heads, HEADS * REL, heads, keys, keys))
    first = 2 * heads + HEADS * REL
    taps = torch.ones(2, KV_HEADS * 4, HIDDEN)
    shared = SimpleNamespace(
        inputs=torch.ones(first if is_full else first + 2 * keys, HIDDEN),
        keys_values=torch.ones(2, keys, HIDDEN) if is_full else None, taps=taps if is_full else None,
    )  # fmt: skip
    scaled = SimpleNamespace(norm=SimpleNamespace(scale=torch.ones(HEADS, REL)), proj=None)
    conv = SimpleNamespace(sconv=SimpleNamespace(conv1d=SimpleNamespace(weight=None)))
    kind = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, window=None if is_full else 4, log_scaling=None
    )
    return SimpleNamespace(
        kind=kind, shared=shared, projections=lambda: modules, relative_position_bias=scaled, q_proj=scaled,
        k_proj=conv, v_proj=conv, sink_proj=SimpleNamespace(weight=torch.ones(HEADS, HIDDEN)), q_clip=1.0, r_clip=1.0,
        norm_eps=1e-6, o_proj=SimpleNamespace(linear=lambda x_TC: x_TC.new_empty(len(x_TC), HIDDEN)),
    )  # fmt: skip


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("requests", [2, REQUESTS])
def test_attention_holds_no_more_than_was_reserved(
    monkeypatch: pytest.MonkeyPatch, is_full: bool, requests: int
) -> None:
    """A step of many requests with few rows and one with many; few requests, where what is put together is larger."""
    monkeypatch.setattr(triton_decode, "_multiprocessors", lambda device: 1)
    few, queries = ROWS // 2, triton_decode.MAX_QUERIES

    def decode(q_TC: torch.Tensor, *_: Any, max_queries: int, out_dtype: torch.dtype) -> torch.Tensor:
        out_TC = torch.empty_like(q_TC)
        triton_decode.buffers(q_TC, 2 + requests * KV_HEADS, max_queries * HEADS // KV_HEADS, DIM)
        return out_TC

    kernels: Any = SimpleNamespace(
        few_rows=0, fell_back=(), capturable=True, decode=decode, prepare=lambda *_: None,
        prefill=lambda q_TC, *_, out_dtype: torch.empty_like(q_TC),
        project=lambda x_JTH, weight_JNH: x_JTH.new_empty(*x_JTH.shape[:2], weight_JNH.shape[1]),
    )  # fmt: skip
    batch: Any = SimpleNamespace(first=lambda requests, rows: None, slots=None)
    metadata = PagedMetadata(batch, requests, few, queries, prefill=batch)
    step: Any = SimpleNamespace(state=torch.ones(1, 4 * DIM * KV_HEADS), sources=None, slots=None)
    inputs_QTH, module = torch.randn(3 if is_full else 1, ROWS, HIDDEN), attention(is_full)
    positions, pages = torch.arange(ROWS), torch.ones(1)
    with Peak() as real:
        fused.attend(module, kernels, inputs_QTH, positions, step, pages, metadata)
    with Peak() as reserved:
        fused.reserve_attention(module, kernels, inputs_QTH[0], requests)
    assert real.bytes + inputs_QTH.nbytes <= reserved.bytes <= 1.02 * (real.bytes + inputs_QTH.nbytes)
    # Where attention is a fallback, its scores.
    fallen: Any = SimpleNamespace(fell_back=("decode",), capturable=False)
    with Peak() as more:
        fused.reserve_attention(module, fallen, inputs_QTH[0], requests)
    assert more.bytes > 4 * 4 * fallback.SCORES


def test_the_buffer_of_decode_attention() -> None:
    """Of Inkling 2 Small, 1,024 requests of 8 rows."""
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    pieces, sums = triton_decode.buffers(like, 264 + 1024 * 8, 48, 128)
    assert pieces.nbytes + sums.nbytes == 8456 * 48 * 129 * 4
