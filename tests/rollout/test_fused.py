"""The GPU's decoder in a real engine on the CPU, with torch in place of every kernel; and how a step is divided.

Proves the plumbing: which rows go to which kernel, which pages and sources they are given, and what is shared between
layers. Not the kernels themselves (their own tests), nor the GPU runner (tests/gpu).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context

from rollout.kernels.cuda import FALLBACKS, Kernels
from rollout.kernels.layout import consecutive
from rollout.kernels.paged import PagedBatch
from rollout.plugin import fused
from rollout.plugin.attention import SharedWeights
from rollout.plugin.model import DecoderLayer, Inkling2ForCausalLM, TextModel
from rollout.plugin.paging import PagedMetadata, PagedMetadataBuilder, divide
from tests.inkling_rl.test_draft_checkpoint import write_standalone
from tests.rollout.drafting import speculative, watched
from tests.rollout.engines import differences, engine, generate, random_prompts
from tests.rollout.test_drafting import Reference, check_blocks

TOLERANCE = 1e-4
RANK = 8
COUNTED = (
    "decode", "prefill", "prepare", "project", "softcap_logits", "skinny_inputs", "skinny_linear", "skinny_logits",
)  # fmt: skip


class Calls:
    """The fallbacks, counting attention's calls and the kinds of steps that they made up."""

    def __init__(self, few_rows: int = 0) -> None:
        self.counter: Counter[str] = Counter()
        self.max_queries: set[int] = set()
        counted = {name: self._counted(name, getattr(FALLBACKS, name)) for name in COUNTED}
        self.kernels: Kernels = replace(FALLBACKS, **counted, few_rows=few_rows)

    def _counted(self, name: str, kernel: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.counter[name] += 1
            if name == "decode":
                self.max_queries.add(options["max_queries"])
            return kernel(*arguments, **options)

        return call

    @property
    def mixed(self) -> int:
        """Layers of steps in which both kernels ran."""
        return self.counter["decode"] + self.counter["prefill"] - self.counter["prepare"]


def share(model: TextModel) -> None:
    """Lay weights together as the constructor does on CUDA; what is in them stays."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        weights = [*(norm.weight for norm in layer.input_norms), *layer.self_attn.parameters()]
        values = [weight.clone() for weight in weights]
        layer.shared_norms = consecutive(*(norm.weight for norm in layer.input_norms)).view(-1, model.shape.hidden_size)
        layer.self_attn.shared = SharedWeights.of(layer.self_attn)
        for weight, value in zip(weights, values, strict=True):
            weight.data.copy_(value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Calls:
    """The engines of this test run the GPU's decoder; the parameter: up to how many rows with the kernels for few."""
    calls, ordinary = Calls(getattr(request, "param", 0)), TextModel.forward

    def forward(
        self: TextModel, hidden_TH: torch.Tensor, positions_T: torch.Tensor, outputs: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return ordinary(self, hidden_TH, positions_T, outputs)
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        if first.self_attn.shared is None:
            share(self)
        return fused.forward(self, calls.kernels, hidden_TH, positions_T, metadata, outputs)

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        common = common_attn_metadata
        batch = PagedBatch(common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping)
        return divide(batch, common.query_start_loc_cpu, common.max_query_len)

    def compute_logits(self: Inkling2ForCausalLM, hidden_TH: torch.Tensor) -> torch.Tensor:
        return fused.logits(
            calls.kernels, hidden_TH, self.lm_head.weight, self.shape.logit_cap, self.shape.vocab_size
        )  # fmt: skip

    monkeypatch.setattr(TextModel, "forward", forward)
    monkeypatch.setattr(Inkling2ForCausalLM, "compute_logits", compute_logits)
    monkeypatch.setattr(PagedMetadataBuilder, "build", build)
    return calls


def test_whole_prompts_prefix_hits_and_a_prefix_filled_in_the_same_step(
    tiny_checkpoint: Path, tiny_oracle: Any, calls: Calls
) -> None:
    with engine(tiny_checkpoint) as llm:
        prompts = random_prompts((3, 1, 9, 64, 8, 17, 40, 70))
        cold = generate(llm, prompts, max_tokens=12, prompt_logprobs=5)
        assert max(differences(tiny_oracle, prompts, cold)) < TOLERANCE
        # The first two prompts are short enough for the decode kernel; what follows a longer one is not.
        assert calls.counter["prefill"] > 0 and calls.max_queries == {1, 8}
        longer = [[*prompt, 7, 8, 9] for prompt in prompts]
        warm = generate(llm, longer, max_tokens=12)
        assert sum(output.num_cached_tokens for output in warm) == 32 + 32 + 64
        assert max(differences(tiny_oracle, longer, warm)) < TOLERANCE
        [shared] = random_prompts((70,), seed=11)
        same = [shared[:n] + [tail] * 6 for n in (70, 64, 40, 33) for tail in (3, 4)]
        outputs = generate(llm, same, max_tokens=8)
        assert sum(output.num_cached_tokens for output in outputs) > 0
        assert max(differences(tiny_oracle, same, outputs)) < TOLERANCE


def test_chunks_beside_decoding_requests(tiny_checkpoint: Path, tiny_oracle: Any, calls: Calls) -> None:
    """A step of 24 rows holds what decodes, the tail of one prompt and the head of the next."""
    prompts = random_prompts((5, 30, 7, 90, 12, 41, 33, 66), seed=4)
    with engine(tiny_checkpoint, max_num_batched_tokens=24, max_num_seqs=8, num_gpu_blocks_override=56) as llm:
        outputs = generate(llm, prompts, max_tokens=40, prompt_logprobs=5)
    assert calls.mixed > 6 * 10
    assert len(calls.max_queries) > 1
    assert max(differences(tiny_oracle, prompts, outputs)) < TOLERANCE


def test_a_draft_sees_the_tapped_layers(
    tiny_checkpoint: Path, tiny_oracle: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them in the middle of a block of residuals, the other at its end: what is drafted is the reference's."""
    prompts, own = random_prompts((3, 9, 40), seed=6), write_standalone(tiny_checkpoint, tmp_path / "draft")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"target_layer_ids": [1, 5]}))
    with engine(tiny_checkpoint, speculative_config=speculative(own)) as llm, watched(monkeypatch) as seen:
        outputs = generate(llm, prompts, max_tokens=12)
    assert check_blocks(seen, outputs, prompts, Reference(tiny_checkpoint, tiny_oracle, own)) >= len(prompts) * 8


@pytest.mark.parametrize("calls", [16], indirect=True)
def test_few_rows(tiny_checkpoint: Path, tiny_oracle: Any, calls: Calls) -> None:
    """Steps of up to 16 rows take three products and nothing else, longer ones none of them."""
    prompts = random_prompts((3, 1, 9, 40, 8, 17), seed=5)
    with engine(tiny_checkpoint, max_num_batched_tokens=24, max_num_seqs=6) as llm:
        outputs = generate(llm, prompts, max_tokens=12, prompt_logprobs=5)
        assert max(differences(tiny_oracle, prompts, outputs)) < TOLERANCE
        count = calls.counter
        assert 0 < count["skinny_inputs"] == count["skinny_linear"] < count["prepare"]
        assert count["project"] > 0 and count["skinny_logits"] > 0 and count["softcap_logits"] > 0
        count.clear()
        prompts = random_prompts((4, 5), seed=6)
        assert max(differences(tiny_oracle, prompts, generate(llm, prompts, max_tokens=5))) < TOLERANCE
    assert count["skinny_inputs"] == count["skinny_linear"] == count["prepare"] > 0 < count["skinny_logits"]
    assert count["project"] == count["softcap_logits"] == 0


@pytest.mark.parametrize("calls", [0, 16], indirect=True)
def test_adapters(tiny_checkpoint: Path, tiny_oracle: Any, calls: Calls, tmp_path: Path) -> None:
    from tests.rollout.test_engine_lora import make_adapter, request

    adapted = make_adapter(tiny_checkpoint, tmp_path / "a", 1)
    prompts = random_prompts((20, 33, 7, 24), seed=6)
    with engine(tiny_checkpoint, enable_lora=True, max_loras=1, max_lora_rank=RANK, max_num_batched_tokens=32) as llm:
        one = request("a", 1, tmp_path / "a")
        outputs = generate(llm, prompts, lora=[one, None, one, None], max_tokens=8)
    assert calls.mixed > 0
    for index, output in enumerate(outputs):
        model = tiny_oracle if index % 2 else adapted
        assert max(differences(model, [prompts[index]], [output])) < TOLERANCE


def batch_of(rows: list[int]) -> tuple[PagedBatch, torch.Tensor]:
    """A batch of requests with so many rows each, and its query starts on the host."""
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    table = torch.arange(4 * len(rows), dtype=torch.int32).view(len(rows), 4)
    lengths = torch.arange(len(rows), dtype=torch.int32) + 20
    return PagedBatch(starts, lengths, table, torch.arange(sum(rows))), starts.clone()


# rows of each request, longest -> requests, rows and (rounded) most rows for the decode kernel; None: no prefill.
DIVISIONS = {
    "all decode": ([1, 1, 1], 1, (3, 3, 1), None),
    "verified drafts": ([8, 3, 8], 8, (3, 19, 8), None),
    "few rows, counts rounded": ([1, 3, 2], 3, (3, 6, 8), None),
    "none decodes": ([40, 9], 40, (0, 0, 0), [40, 9]),
    "sorted": ([1, 1, 5, 9, 30], 30, (3, 7, 8), [9, 30]),
    "a short one after a long one": ([1, 20, 1, 2], 20, (1, 1, 1), [20, 1, 2]),
    "padded requests after decoding ones": ([1, 1, 0, 0], 1, (4, 2, 1), None),
    "padded requests after a prompt": ([2, 12, 0, 0], 12, (1, 2, 8), [12, 0, 0]),
    "the longest is only a bound": ([1, 2, 1], 16, (3, 4, 8), None),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_division(name: str) -> None:
    rows, longest, expected, later = DIVISIONS[name]
    batch, starts = batch_of(rows)
    metadata = divide(batch, starts, longest)
    assert metadata.batch is batch
    assert (metadata.decode_requests, metadata.decode_rows, metadata.max_queries) == expected
    if later is None:
        assert metadata.prefill is None
        return
    prefill, requests, few = metadata.prefill, expected[0], expected[1]
    assert prefill is not None
    assert prefill.query_start.tolist() == torch.tensor([0, *later]).cumsum(0).tolist()
    assert torch.equal(prefill.seq_lens, batch.seq_lens[requests:])
    assert torch.equal(prefill.block_table, batch.block_table[requests:])
    assert torch.equal(prefill.slots, batch.slots[few:])
    first = batch.first(requests, few)
    assert first.query_start.tolist() == torch.tensor([0, *rows[:requests]]).cumsum(0).tolist()
    assert torch.equal(first.seq_lens, batch.seq_lens[:requests])
    assert torch.equal(first.block_table, batch.block_table[:requests])
    assert torch.equal(first.slots, batch.slots[:few])
    # Both halves name the rows and positions of the whole.
    whole = {(r.first, r.last, r.start) for r in batch.requests()}
    parts = {(r.first, r.last, r.start) for r in first.requests()}
    parts |= {(r.first + few, r.last + few, r.start) for r in prefill.requests()}
    assert parts == whole
