"""Sorting by expert and the weighted sum under Triton's interpreter; `test_triton_moe_compiled` runs this file."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from transformers import Inkling2TextConfig

from inkling_rl.checkpoint.tiny import tiny_config
from inkling_rl.formats import ExpertFormat, marlin, mixed
from rollout.kernels import composed, reference
from rollout.kernels.triton_moe_align import single_token
from rollout.plugin import dummy, marlin_experts
from rollout.plugin.experts import Router
from rollout.plugin.marlin_experts import MarlinExperts
from rollout.plugin.shape import ModelShape
from tests.rollout import moe_cases as cases


@pytest.mark.parametrize("block_size", [8, 48, 64])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 16, 4), (2, 16, 16), (33, 16, 4), (17, 40, 8)])
def test_align(tokens: int, num_experts: int, top_k: int, block_size: int) -> None:
    cases.check_align("cpu", tokens, num_experts, top_k, block_size)


def test_align_of_many_experts() -> None:
    cases.check_align("cpu", 40, 384, 8, 8)


def test_a_single_token_needs_no_sorting() -> None:
    cases.check_single_token("cpu", 16, 4, 8)
    cases.check_single_token("cpu", 384, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_sum(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for tokens, top_k, hidden in ((1, 8, 520), (3, 4, 128), (5, 1, 1024)):
        cases.check_sum("cpu", dtype, out_dtype, tokens, top_k, hidden)


def marlin_in_torch(
    x: torch.Tensor, out: torch.Tensor, *tensors: Any, top_k: int, moe_block_size: int, **options: Any
) -> torch.Tensor:
    """What vLLM's operator computes from these arguments, with the values of the codes where its codes would be."""
    values_ENK, _, _, _, _, _, locks, rows, experts, num_rows, weights_TK = tensors
    assert locks.dtype == torch.int32 and not locks.any() and weights_TK.dtype == torch.float32
    assert not options["mul_topk_weights"] and options["size_m"] == len(x) and len(out) == top_k * len(x)
    assert (options["size_n"], options["size_k"]) == values_ENK.shape[1:] == (out.shape[1], x.shape[1])
    out.fill_(float("nan"))
    for block, row in enumerate(rows[: int(num_rows)].view(-1, moe_block_size)):
        pairs = row[row < len(out)].long()
        out[pairs] = (x[pairs // top_k].float() @ values_ENK[experts[block]].t()).bfloat16()
    return out


@pytest.mark.parametrize("expert_format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_the_whole_sublayer(expert_format: ExpertFormat, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing, sorting, padded widths, activation and sum around the operator, against the reference."""
    text = tiny_config()["text_config"] | {"moe_intermediate_size": 96}
    shape = ModelShape.from_config(Inkling2TextConfig(**text), [expert_format] * 6)
    module = nn.ModuleDict({"gate": Router(shape), "experts": MarlinExperts(shape, expert_format)})
    dummy.fill(module)
    engine = dict(module["experts"].named_parameters())
    gate_up, down = (marlin.dequantize(engine, m, expert_format, 96) for m in ("w13_weight", "w2_weight"))
    gate_up = mixed.deinterleave(gate_up)
    # The engine's expert width is the next multiple of 64; what it adds is zero.
    padded = torch.cat([F.pad(half, (0, 0, 0, 32)) for half in gate_up.chunk(2, dim=1)], dim=1), F.pad(down, (0, 32))
    values = {"w13_weight": padded[0], "w2_weight": padded[1]}
    by_address = {engine[name].data_ptr(): value for name, value in values.items()}

    def gemm(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, *tensors: Any, **options: Any) -> torch.Tensor:
        return marlin_in_torch(x, out, by_address[weight.data_ptr()], *tensors, **options)

    locks = torch.zeros(528, dtype=torch.int32)
    standing = marlin_experts.Standing(locks, *single_token(4, 8, torch.device("cpu")))
    monkeypatch.setattr(marlin_experts, "standing", lambda device, top_k: standing)
    monkeypatch.setattr(marlin_experts.vllm_ops, "moe_wna16_marlin_gemm", gemm)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    routing = module["gate"].weight, module["gate"].e_score_correction_bias
    expected = reference.experts(x, *routing, gate_up, down, 4, 8.0, 4.0, 25.0)
    weights, chosen = composed.route(x.float() @ routing[0].t(), routing[1], 4, 8.0)
    for dtype in (torch.bfloat16, torch.float32):
        got = module["experts"](x.to(dtype), weights, chosen)
        error = float((got.double() - expected.double()).norm() / expected.double().norm())
        assert got.dtype == dtype and error < 1e-2, error  # the interpreter truncates to bfloat16
