"""What the GPU's decoder holds at once, against what it shows vLLM before there are pages (`fused.reserve`).

vLLM gives to pages what a profiled step leaves: memory of a real step beyond that is missing when the engine is full.
Attention and experts are stand-ins that allocate as theirs do; residuals, mixtures and lifetimes are the decoder's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.plugin import fused

ROWS, HIDDEN, LAYERS, PER_BLOCK, PAIRS = 32, 64, 6, 2, 8


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
    down_NH = x_TH.new_empty(PAIRS * ROWS, HIDDEN)
    return down_NH[:ROWS].clone()


def model() -> tuple[Any, dict[str, Any]]:
    """As much of a text model as the decoder reads, every second layer full; and a step's metadata."""
    weight = torch.ones(HIDDEN)
    conv = SimpleNamespace(range=slice(0, HIDDEN), conv1d=SimpleNamespace(weight=torch.ones(HIDDEN, 1, 4)))
    layers = []
    for index in range(LAYERS):
        queries = torch.ones(3 if index % 2 else 1, HIDDEN)
        layers.append(SimpleNamespace(
            norm_eps=1e-6, opens_block=index % PER_BLOCK == 0, input_norms=[SimpleNamespace(weight=weight)],
            self_attn=SimpleNamespace(shared=SimpleNamespace(inputs=torch.ones(2 * HIDDEN, HIDDEN))), mlp=experts,
            attention_input=SimpleNamespace(query=queries), shared_norms=queries,
            mlp_input=SimpleNamespace(query=weight), post_attention_layernorm=SimpleNamespace(weight=weight),
            post_attention_convolution=conv, post_mlp_convolution=conv,
        ))  # fmt: skip
    pool_BKNC = torch.ones(2, 1, 4, HIDDEN)
    pages = [SimpleNamespace(key="pages", view=lambda: pool_BKNC)] * LAYERS
    cache = SimpleNamespace(attention=pages, conv=pages)
    batch = SimpleNamespace(slots=torch.arange(ROWS))
    shape = SimpleNamespace(layers_per_block=PER_BLOCK)
    final = {"norm": SimpleNamespace(weight=weight), "final_input": SimpleNamespace(query=weight)}
    return SimpleNamespace(layers=layers, shape=shape, cache=cache, **final), {"pages": SimpleNamespace(batch=batch)}


def test_a_step_holds_no_more_than_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = SimpleNamespace(
        tap_sources=lambda batch, rows, tokens: torch.empty(0), conv_mix=lambda *arguments: arguments[-1].zero_()
    )
    monkeypatch.setattr(fused, "attend", lambda module, kernels, inputs_QTH, *_: torch.empty_like(inputs_QTH[0]))
    text, metadata = model()
    hidden_TH = torch.randn(ROWS, HIDDEN)
    with Peak() as step:
        out_TH = fused.forward(text, kernels, hidden_TH, torch.arange(ROWS), metadata)
    assert out_TH.shape == hidden_TH.shape
    with Peak() as reserved:
        fused.reserve(text, hidden_TH)
    plane = hidden_TH.nbytes
    # Blocks, the running one, the experts' input, products and output.
    assert reserved.bytes >= (LAYERS // PER_BLOCK + 1 + 1 + PAIRS + 1) * plane
    assert step.bytes <= reserved.bytes + plane // 8
