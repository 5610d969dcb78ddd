"""The fallbacks of the GPU's kernels, on the CPU: the same cases as the kernels themselves, the same references.

What is captured in a CUDA graph may not wait for the device: shown with tensors that have no values.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rollout.kernels import cuda, draft_fallback, fallback, reference
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.paged import PagedBatch
from rollout.kernels.trials import TRIALS, AttentionSizes, DraftSizes, Sizes
from tests.rollout import around_attention_cases as cases
from tests.rollout import draft_cases, linear_cases, moe_cases
from tests.rollout.decode_cases import CASES, Case, exact, make, relative_error
from tests.rollout.test_triton_prefill import CASES as PREFILL_CASES

BF16, F32 = torch.bfloat16, torch.float32
# Of the inputs as they are stored; nothing is rounded but the result.
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def in_place_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the kernels call the fallbacks."""
    for name in ("tap_sources", "conv_mix", "prepare"):
        monkeypatch.setattr(cases, name, getattr(fallback, name))
    monkeypatch.setattr(cases.triton_router, "route", fallback.route)
    monkeypatch.setattr(cases.triton_router, "logits", lambda x, router: (x.double() @ router.double().t()).float())
    monkeypatch.setattr(cases.triton_activation, "expert_activation", fallback.expert_activation)
    monkeypatch.setattr(moe_cases.triton_moe_align, "align", fallback.align)
    monkeypatch.setattr(moe_cases.triton_moe_sum, "weighted_sum", fallback.weighted_sum)
    monkeypatch.setattr(linear_cases.triton_linear, "project", fallback.project)
    monkeypatch.setattr(linear_cases.triton_softcap, "softcap_logits", fallback.softcap_logits)
    for name in ("norm_rotate", "store_context"):
        monkeypatch.setattr(draft_cases.triton_draft, name, getattr(draft_fallback, name))
    for name in ("rnn_step", "token_logits"):
        monkeypatch.setattr(draft_cases.triton_draft_head, name, getattr(draft_fallback, name))


@pytest.mark.parametrize("tokens_per_block", [1, 4, 16])
@pytest.mark.parametrize("step", [cases.STEP, ((5, 300), (0, 0), (2, 1)), ((0, 1),), ((0, 0), (9, 2))])
def test_tap_sources(step: cases.Step, tokens_per_block: int) -> None:
    cases.check_tap_sources("cpu", step, tokens_per_block)


def test_tap_sources_into_a_given_tensor_and_of_unstored_rows() -> None:
    batch = replace(cases.make_batch(((2, 3),), 4, "cpu"), slots=torch.full((2,), -1))
    out = torch.zeros(3, 3, dtype=torch.int64)
    assert fallback.tap_sources(batch, 3, 4, out) is out
    block = int(batch.block_table[0, 0]) * 4
    assert out.tolist() == [[-2 - block - 1, -2 - block, -1], [0, -2 - block - 1, -2 - block], [1, 0, -2 - block - 1]]


def test_a_prefix_that_this_step_computes() -> None:
    cases.check_shared_prefix("cpu")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("blocks", "queries", "residual"), [(0, 1, True), (1, 3, False), (3, 3, True), (8, 1, True)])
def test_conv_mix(dtype: torch.dtype, blocks: int, queries: int, residual: bool) -> None:
    cases.check_conv_mix("cpu", dtype, blocks, queries, residual=residual)


def test_conv_mix_of_two_dtypes() -> None:
    cases.check_conv_mix_of_two_dtypes("cpu", 64, None)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_prepare(dtype: torch.dtype, dynamic: bool, scale: float) -> None:
    cases.check_prepare("cpu", dtype, dynamic, scale=scale)
    cases.check_prepare("cpu", dtype, dynamic, heads=(3, 1), head_dim=64, step=((6, 3), (0, 2)))


def test_rows_without_a_slot_are_stored_nowhere() -> None:
    pages = torch.arange(24.0).view(3, 4, 2)
    before = pages.clone()
    fallback._store(torch.full((3, 2), 99.0), pages, torch.tensor([-1, -1, -1]))
    assert torch.equal(pages, before)
    fallback._store(torch.tensor([[50.0] * 2, [60.0] * 2, [70.0] * 2]), pages, torch.tensor([-1, 6]))
    before[1, 2] = 60.0
    assert torch.equal(pages, before)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(16, 4, 128), (384, 8, 600), (16, 16, 64)])
def test_route(dtype: torch.dtype, experts: int, top_k: int, hidden: int) -> None:
    cases.check_route("cpu", dtype, 5, experts, top_k, hidden)


def test_route_into_given_tensors_and_ties() -> None:
    cases.check_route_ties("cpu")
    x, router, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    out = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    got = fallback.route(x, router, bias, 2, 1.0, *out)
    assert got[0] is out[0] and got[1] is out[1]
    assert all(torch.equal(a, b) for a, b in zip(out, fallback.route(x, router, bias, 2, 1.0), strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activation(dtype: torch.dtype) -> None:
    x = (cases.rand(7, 136) * 5).to(dtype)[:, :128]
    x[0, :4] = torch.tensor([0.0, torch.inf, -torch.inf, 1e-6])
    exact_TI = 4 * torch.tanh(x.double()[:, :64] / 4) * torch.sigmoid(x.double()[:, :64])
    exact_TI *= 25 * torch.tanh(x.double()[:, 64:] / 25)
    out = torch.empty(7, 64)
    assert fallback.expert_activation(x, 4.0, 25.0, out) is out
    torch.testing.assert_close(out.double(), exact_TI, rtol=1e-5, atol=1e-12)
    assert fallback.expert_activation(x, 4.0, 25.0).dtype == dtype


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (3, 16, 4), (40, 384, 8), (200, 16, 4)])
@pytest.mark.parametrize("block_size", [8, 48])
def test_align(tokens: int, experts: int, top_k: int, block_size: int) -> None:
    moe_cases.check_align("cpu", tokens, experts, top_k, block_size)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weighted_sum(dtype: torch.dtype) -> None:
    for out_dtype in (F32, BF16):
        moe_cases.check_sum("cpu", dtype, out_dtype, tokens=5, top_k=4, hidden=72)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_small_projections(dtype: torch.dtype) -> None:
    linear_cases.check_project("cpu", dtype, jobs=2, rows=3, outputs=6, hidden=600)


def test_softcap() -> None:
    linear_cases.check_softcap("cpu", F32, rows=2, vocabulary=70, padded=96, hidden=32)
    linear_cases.check_softcap("cpu", BF16, rows=2, vocabulary=70, padded=96, hidden=32)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", CASES)
def test_decode_attention(name: str, dtype: torch.dtype) -> None:
    inputs = make(replace(CASES[name], dtype=dtype))
    got = fallback.decode_attention(*inputs.arguments(), max_queries=inputs.case.max_queries)
    assert got.dtype is F32 and relative_error(got, exact(inputs)) < TOLERANCE


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_prefill_attention(name: str) -> None:
    inputs = make(PREFILL_CASES[name])
    got = fallback.prefill_attention(*inputs.arguments())
    assert relative_error(got, exact(inputs)) < TOLERANCE
    rounded = fallback.prefill_attention(*inputs.arguments(), out_dtype=BF16)
    assert torch.equal(rounded, got.to(BF16))


@pytest.mark.parametrize("window", [None, 16])
def test_pieces_of_rows_and_heads_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    inputs = make(Case(step=((37, 20), (0, 1), (5, 3)), window=window, log_scaling=(0.1, 16)))
    whole = fallback.prefill_attention(*inputs.arguments())
    calls: list[int] = []
    real = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *given: (calls.append(given[0].shape[0]), real(*given))[1])
    monkeypatch.setattr(fallback, "MANY_KEYS", 30)
    monkeypatch.setattr(fallback, "SCORES", 57 * 6 * 7)
    pieces = fallback.prefill_attention(*inputs.arguments())
    assert max(calls) < 20 and sum(calls) > 24
    assert relative_error(pieces, whole.double()) < 1e-6 and relative_error(pieces, exact(inputs)) < TOLERANCE


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_drafts_layers_and_head(dtype: torch.dtype) -> None:
    draft_cases.check_norm_rotate("cpu", dtype, 5, 3, 16)
    draft_cases.check_norm_rotate("cpu", dtype, 3, 48, 128, 3, F32)
    for page_dtype in (F32, BF16):
        draft_cases.check_store("cpu", dtype, page_dtype, 12, 8, 128, layers=3)
    draft_cases.check_rnn("cpu", dtype, 5, 20)
    draft_cases.check_logits("cpu", dtype, 5, 256, 333)
    draft_cases.check_logits("cpu", dtype, 5, 256, 333, lambda base: base)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", draft_cases.CASES)
def test_a_drafts_attention(name: str, dtype: torch.dtype) -> None:
    """Nothing is rounded, whatever the dtypes of rows and pages."""
    inputs = draft_cases.make(replace(draft_cases.CASES[name], dtype=dtype))
    got, wanted = draft_fallback.attention(*inputs.arguments(), F32), draft_cases.exact(inputs)
    assert got.dtype is F32 and relative_error(got, wanted) < TOLERANCE
    rounded = draft_fallback.attention(*inputs.arguments())
    assert rounded.dtype is dtype and torch.equal(rounded, got.to(dtype))
    none = draft_cases.make(draft_cases.Case(lengths=()))
    assert draft_fallback.attention(*none.arguments()).shape == (0, 12, 16)


SIZES = Sizes(
    dtype=BF16, state_dtype=BF16, hidden=64, experts=16, top_k=4, expert_width=32, d_rel=16, conv_page=4, gate_cap=4.0,
    up_cap=25.0, max_queries=(1, 8), attention=tuple(
        AttentionSizes(num_heads=12, num_kv_heads=2, head_dim=16, extent=16, window=window, page=16)
        for window in (None, 16)
    ), draft=DraftSizes(
        num_heads=12, num_kv_heads=2, head_dim=16, page=16, block_rows=7, rank=16, vocab=512, norm_eps=1e-6
    ),
)  # fmt: skip


@pytest.mark.parametrize("name", TRIALS | DRAFT_TRIALS)
def test_nothing_but_attention_waits_for_the_device(name: str) -> None:
    """Without values, whatever needs one on the host (a count, a length) fails."""
    with FakeTensorMode() as mode:
        for trial in TRIALS_OUTSIDE[name]:
            arguments = [fake(argument, mode) for argument in trial.arguments]
            if name in cuda._WAITING:
                with pytest.raises(DataDependentOutputException):
                    trial.call(cuda._FALLBACKS[name], arguments)
            else:
                trial.call(cuda._FALLBACKS[name], arguments)


def fake(argument: Any, mode: FakeTensorMode) -> Any:
    if isinstance(argument, PagedBatch):
        names = [f.name for f in fields(argument) if f.name != "native"]
        return replace(argument, **{name: mode.from_tensor(getattr(argument, name)) for name in names})
    if hasattr(argument, "_fields"):
        return type(argument)(*(fake(part, mode) for part in argument))
    return mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument


TRIALS_OUTSIDE: dict[str, list[Any]] = {name: list(trials(SIZES)) for name, trials in (TRIALS | DRAFT_TRIALS).items()}
"""Made before a mode is entered: real tensors."""


def test_every_kernel_has_a_fallback_of_the_same_signature() -> None:
    """Triton's own functions, parameter by parameter."""
    import inspect

    for name, slow in cuda._FALLBACKS.items():
        theirs, ours = (inspect.signature(function).parameters for function in (cuda._triton(name), slow))
        assert [(p.name, p.kind) for p in theirs.values()] == [(p.name, p.kind) for p in ours.values()], name
        required = [p.name for p in theirs.values() if p.default is p.empty]
        assert required == [p.name for p in ours.values() if p.default is p.empty], name
