"""The draft and the speculator of a GPU on torch functions, on the CPU: against the slow reference, token by token.

The kernels themselves and vLLM's V2 runner are the business of tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.reference import ReferenceDraft
from rollout.kernels.cuda import FALLBACKS
from rollout.kernels.draft import Blocks
from rollout.plugin import draft_watch
from rollout.plugin.draft_cuda import CudaDraft
from rollout.plugin.draft_watch import DraftWatch

PAGE, VOCABULARY = 16, 500
LENGTHS = (37, 0, 5, 16)


@pytest.fixture(scope="module")
def opened(tiny_checkpoint: Path) -> DraftCheckpoint:
    return DraftCheckpoint.open(tiny_checkpoint, Checkpoint.open(tiny_checkpoint).config)


@pytest.fixture(scope="module")
def reference(opened: DraftCheckpoint) -> ReferenceDraft:
    return ReferenceDraft(opened.shape, {name: value.float() for name, value in opened.tensors()})


def make(opened: DraftCheckpoint, bound: bool = True) -> CudaDraft:
    """A loaded draft with pages full of NaN, or before there are pages."""
    shape, cache = opened.shape, []
    for _ in range(shape.num_layers):
        pages = torch.full((12, shape.num_kv_heads, PAGE, 2 * shape.head_dim), float("nan"))
        owner = SimpleNamespace(kv_cache=pages if bound else torch.tensor([]), spec=SimpleNamespace(block_size=PAGE))
        cache.append(SimpleNamespace(view=lambda pages=pages: pages, owner=owner))
    draft = CudaDraft(shape, torch.float32, cache, FALLBACKS).eval()
    draft.load(opened)
    return draft


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Step:
    """Contexts of several requests in a draft's pages, and what their blocks must come to."""

    def __init__(self, draft: CudaDraft, reference: ReferenceDraft) -> None:
        self.reference = reference
        width = len(draft.shape.target_layers) * draft.shape.hidden_size
        self.table = torch.tensor([[5, 2, 7], [0, 0, 0], [9, 0, 0], [1, 3, 0]], dtype=torch.int32)
        self.outputs = [rand(length, width, seed=length) for length in LENGTHS]
        self.anchors = [65, 3, 499, 10]
        self.embedding, self.head = (rand(512, draft.shape.hidden_size, seed=seed) for seed in (1, 2))
        for row, outputs in enumerate(self.outputs):
            positions = torch.arange(len(outputs))
            slots = self.table[row].long()[positions // PAGE] * PAGE + positions % PAGE
            # A rejected row behind the others is not stored.
            given = torch.cat([outputs, rand(1, width, seed=99)])
            context = draft.combine_hidden_states(given)
            draft.precompute_and_store_context_kv(
                context, torch.cat([positions, positions.new_zeros(1)]), torch.cat([slots, slots.new_full((1,), -1)])
            )

    def logits(self, rows_TH: torch.Tensor) -> torch.Tensor:
        logits_TV = rows_TH.float() @ self.head.T
        logits_TV[:, VOCABULARY:] = float("-inf")
        return logits_TV

    def expected(self, row: int) -> Any:
        return self.reference.block(lambda ids: self.embedding[ids], self.logits, self.outputs[row], self.anchors[row])


def test_weights_lie_side_by_side_and_are_loaded(opened: DraftCheckpoint) -> None:
    draft, tensors = make(opened), dict(opened.tensors())
    for index, layer in enumerate(draft.layers):
        parts = [tensors[f"layers.{index}.self_attn.{name}_proj.weight"].float() for name in "qkv"]
        assert torch.equal(draft.inputs[index], torch.cat(parts))
        layer.mlp.up_proj.weight.fill_(7.0)
        assert bool((draft.gate_up[index][draft.shape.mlp_width :] == 7.0).all())


def test_hidden_states_are_the_references(opened: DraftCheckpoint, reference: ReferenceDraft) -> None:
    draft = make(opened)
    step = Step(draft, reference)
    ids_RB = torch.full((len(LENGTHS), 7), draft.shape.mask_token_id)
    ids_RB[:, 0] = torch.tensor(step.anchors)
    hidden = draft.hidden(step.embedding[ids_RB.flatten()], Blocks(torch.tensor(LENGTHS), step.table))
    for row, states in enumerate(hidden.unflatten(0, ids_RB.shape)):
        assert (states - step.expected(row).hidden).abs().max() < 2e-5


def speculator(draft: CudaDraft, step: Step, num_tokens: int) -> Any:
    """vLLM's speculator with ours inside, as far as a draft needs it, with room for a request more than there are."""
    pytest.importorskip("vllm.v1.worker.gpu.spec_decode.dspark.speculator")
    from rollout.plugin.speculator import DSparkSpeculator

    made, room = DSparkSpeculator.__new__(DSparkSpeculator), len(LENGTHS) + 1
    made.shape, made.model, made.num_speculative_steps, made.device = draft.shape, draft, num_tokens, "cpu"
    made.block_ids = torch.full((room, 7), draft.shape.mask_token_id)
    made._anchor_idx = torch.arange(room) * num_tokens
    made.input_buffers = SimpleNamespace(
        input_ids=torch.full((room * num_tokens,), 77, dtype=torch.int32),
        positions=torch.full((room * num_tokens,), 40),
        seq_lens=torch.zeros(room, dtype=torch.int32),
    )
    for row, (anchor, length) in enumerate(zip(step.anchors, LENGTHS, strict=True)):
        made.input_buffers.input_ids[row * num_tokens] = anchor
        made.input_buffers.positions[row * num_tokens] = length
        made.input_buffers.seq_lens[row] = length + num_tokens
    made.target = SimpleNamespace(embed_input_ids=lambda ids: step.embedding[ids], compute_logits=step.logits)
    made.sample_idx_mapping = torch.zeros(room * num_tokens, dtype=torch.int32)
    made.sample_pos = torch.zeros(room * num_tokens, dtype=torch.int64)
    made.draft_tokens = torch.zeros(room, num_tokens, dtype=torch.int64)
    made.draft_logits = made.acceptance_estimator = None
    made._step_cols = torch.arange(num_tokens)
    made.draft_kv_cache_group_id = 1
    table = torch.cat([step.table, torch.full((1, 3), 11, dtype=torch.int32)])
    made.block_tables = SimpleNamespace(input_block_tables=[None, table])
    return made


@pytest.mark.parametrize("num_tokens", [7, 3])
def test_drafted_tokens_are_the_references(opened: DraftCheckpoint, reference: ReferenceDraft, num_tokens: int) -> None:
    """Also for fewer tokens than a block has, and beside a request that only pads a graph."""
    draft = make(opened)
    step = Step(draft, reference)
    made = speculator(draft, step, num_tokens)
    made._generate_draft(len(LENGTHS) + 1, (len(LENGTHS) + 1) * num_tokens, {}, None, None)
    expected = [step.expected(row).tokens[:num_tokens] for row in range(len(LENGTHS))]
    assert made.draft_tokens[:-1].tolist() == expected and len({tuple(tokens) for tokens in expected}) > 1


def test_before_there_are_pages(opened: DraftCheckpoint, reference: ReferenceDraft) -> None:
    draft = make(opened, bound=False)
    draft.precompute_and_store_context_kv(torch.zeros(3, draft.shape.hidden_size), torch.arange(3))
    made = speculator(draft, Step(make(opened), reference), 7)
    made.draft_kv_cache_group_id = -1
    made._generate_draft(len(LENGTHS), len(LENGTHS) * 7, None, None, None)
    assert bool((made.draft_tokens[:-1] < VOCABULARY).all())


def test_a_draft_has_a_graph_for_as_many_requests_as_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.worker.gpu.spec_decode.dspark.speculator")
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

    from rollout.plugin.speculator import DSparkSpeculator

    made, seen = DSparkSpeculator.__new__(DSparkSpeculator), []
    made.num_speculative_steps = made.num_query_per_req = 7
    made.max_num_reqs, made.device = 32, "cpu"
    made.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.UNIFORM_BATCH)
    sizes = [1, 8, 16, 24, 256, 264]
    made.vllm_config = config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    monkeypatch.setattr(dflash, "DFlashCudaGraphManager", lambda given, *rest, **more: seen.append(given))
    made.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    assert seen[0].compilation_config.cudagraph_capture_sizes == [7, 14, 21, 7 * 32]
    assert seen[0].compilation_config.max_cudagraph_capture_size == 7 * 32
    assert made.vllm_config is config and config.compilation_config.cudagraph_capture_sizes == sizes


def test_a_silent_draft_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(draft_watch, "SILENT_STEPS", 20)
    monkeypatch.setattr(draft_watch.logger, "warning", lambda message, *values: warnings.append(message % values))
    watch = DraftWatch(7)
    for _ in range(9):
        watch.count(1, 3, 0)
    assert [warning.split(":")[0] for warning in warnings] == [
        "the draft has had none of its tokens accepted in 21 drafts of 7 tokens"
    ]
    watch.count(1, 3, 1)
    for _ in range(6):
        watch.count(1, 3, 0)
    watch.count(2, 3, 0)  # another draft begins anew
    assert len(warnings) == 1
    for _ in range(7):
        watch.count(2, 3, 0)
    assert len(warnings) == 2
