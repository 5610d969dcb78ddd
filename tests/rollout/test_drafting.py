"""Drafting in a real engine: the draft's arithmetic in pages, and outputs that are those without it, in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.reference import Block, ReferenceDraft
from rollout.kernels import ops
from tests.rollout.drafting import counter, drafts, speculative, watched
from tests.rollout.engines import completion_of, differences, engine, generate, largest_change, random_prompts
from tests.rollout.test_engine_lora import make_adapter, request

INVARIANCE = 0.0 if ops.have_native() else 1e-5
LENGTHS = (3, 1, 9, 64, 100, 17, 33, 130)
MAX_TOKENS = 96
PROMPTS = random_prompts(LENGTHS, seed=20)


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path) -> list[Any]:
    """Greedy completions without a draft, with their log-probabilities."""
    with engine(tiny_checkpoint) as llm:
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS)


class Reference:
    """The slow draft on transformers' model."""

    def __init__(self, path: Path, model: Any, draft: Path | None = None) -> None:
        opened = DraftCheckpoint.open(draft or path, Checkpoint.open(path).config)
        self.draft = ReferenceDraft(opened.shape, {name: value.float() for name, value in opened.tensors()})
        self.model = model

    def outputs(self, token_ids: list[int]) -> torch.Tensor:
        """[T, taps * H]: what the tapped layers give."""
        found: dict[int, torch.Tensor] = {}
        hooks = [
            self.model.model.layers[layer].register_forward_hook(
                lambda module, arguments, output, layer=layer: found.update({layer: output[0]})
            )
            for layer in self.draft.shape.target_layers
        ]
        with torch.no_grad():
            self.model(torch.tensor([token_ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([found[layer] for layer in self.draft.shape.target_layers], dim=-1)

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        return 30 * torch.tanh(self.model.lm_head(hidden_BH) / 30)

    def block(self, outputs_TC: torch.Tensor, anchor: int) -> Block:
        weights = self.draft.weights
        # The head has no rows for padding tokens; the RNN's part does.
        cut = {"markov_head.markov_w2.weight": weights["markov_head.markov_w2.weight"][:500]}
        draft = ReferenceDraft(self.draft.shape, {**weights, **cut})
        with torch.no_grad():
            return draft.block(self.model.model.embed_tokens, self.logits, outputs_TC, anchor)


def check_blocks(seen: list[Any], outputs: list[Any], prompts: list[list[int]], reference: Reference) -> int:
    """Every drafted block of finished requests equals the reference's; how many there were."""
    checked = 0
    for output, prompt in zip(outputs, prompts, strict=True):
        sequence = prompt + completion_of(output)
        states = reference.outputs(sequence)
        own = [block for block in seen if block.request.split("-")[0] == output.request_id.split("-")[0]]
        for block in own:
            if block.length >= len(sequence):
                continue
            assert sequence[block.length] == block.anchor
            expected = reference.block(states[: block.length], block.anchor)
            # The first row of another token changes all that follow.
            assert (block.hidden - expected.hidden).abs().max() < 2e-4
            assert block.tokens == expected.tokens
            checked += 1
    return checked


class TestOneEngine:
    """Everything that one engine with a draft can show."""

    # The engine without comes first: one process has one at a time.
    @pytest.fixture(scope="class")
    def llm(self, tiny_checkpoint: Path, plain: list[Any]) -> Iterator[Any]:
        with engine(tiny_checkpoint, speculative_config=speculative(tiny_checkpoint)) as llm:
            yield llm

    def test_blocks_are_the_references_cold_and_cached(
        self, llm: Any, tiny_checkpoint: Path, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also after rejections, which leave other tokens' context in the pages."""
        reference = Reference(tiny_checkpoint, tiny_oracle)
        llm.reset_prefix_cache()
        for _ in range(2):
            with watched(monkeypatch) as seen:
                outputs = generate(llm, PROMPTS, max_tokens=24)
            assert check_blocks(seen, outputs, PROMPTS, reference) >= len(PROMPTS) * 15
        assert sum(o.num_cached_tokens for o in outputs) == 32 + 96 + 32 + 128

    def test_greedy_output_and_logprobs_are_those_without_a_draft(self, llm: Any, plain: list[Any]) -> None:
        llm.reset_prefix_cache()
        for _ in range(2):  # cold, then with cached prefixes
            outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
            assert largest_change(plain, outputs) <= INVARIANCE
        assert counter(llm, "num_drafts") > 0
        alone = [generate(llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS[:3]]
        assert largest_change(plain[:3], alone) <= INVARIANCE

    def test_sampled_tokens_have_the_oracles_logprobs(self, llm: Any, tiny_oracle: Any) -> None:
        """Those of accepted, recovered and bonus tokens alike, and of the prompt."""
        llm.reset_prefix_cache()
        outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS, temperature=1.0, seed=1, prompt_logprobs=5)
        assert max(differences(tiny_oracle, PROMPTS, outputs)) < 1e-4

    def test_a_seeded_request_repeats_in_any_batch(self, llm: Any) -> None:
        """Its draft is drawn with its own generator; greedy requests in the same batch stay greedy."""
        from vllm import SamplingParams

        def params(**sampling: Any) -> Any:
            return SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **sampling)

        llm.reset_prefix_cache()
        seeded = [params(temperature=1.0, seed=index) for index in range(3)]
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
        first = [completion_of(o) for o in llm.generate(inputs, seeded, use_tqdm=False)]
        again = [completion_of(llm.generate([i], [p], use_tqdm=False)[0]) for i, p in zip(inputs, seeded, strict=True)]
        assert first == again
        mixed = [seeded[0], params(temperature=0.0), params(temperature=0.7)]
        outputs = [completion_of(o) for o in llm.generate(inputs, mixed, use_tqdm=False)]
        [greedy] = llm.generate([inputs[1]], [params(temperature=0.0)], use_tqdm=False)
        assert outputs[0] == first[0] and outputs[1] == completion_of(greedy)


def test_blocks_are_the_references_in_chunked_prefill(
    tiny_checkpoint: Path, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "speculative_config": speculative(tiny_checkpoint)}
    with engine(tiny_checkpoint, **arguments) as llm, watched(monkeypatch) as seen:
        outputs = generate(llm, PROMPTS, max_tokens=24)
    assert check_blocks(seen, outputs, PROMPTS, Reference(tiny_checkpoint, tiny_oracle)) >= len(PROMPTS) * 15


def test_a_draft_with_fewer_tokens_and_one_of_its_own_directory(
    tiny_checkpoint: Path, plain: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.inkling_rl.test_draft_checkpoint import write_standalone

    own = write_standalone(tiny_checkpoint, tmp_path / "draft")
    with engine(tiny_checkpoint, speculative_config=speculative(own, "greedy", 3)) as llm, watched(monkeypatch) as seen:
        outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
        assert largest_change(plain, outputs) <= INVARIANCE
        assert counter(llm, "num_draft_tokens") == 3 * counter(llm, "num_drafts")
    assert all(len(block.tokens) == 3 and len(block.hidden) == 7 for block in seen)


class TestGoodDrafts:
    """Drafts that are right three times in four: many tokens per step, then a rejection in the middle of a block."""

    @pytest.fixture
    def known(self, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        sequences = [prompt + completion_of(output) for prompt, output in zip(PROMPTS, plain, strict=True)]

        def tokens(request: str, length: int) -> list[int]:
            index = int(request.split("-")[0]) % len(PROMPTS)
            right = sequences[index][length + 1 : length + 8]
            return [(token + (length + place) % 4 // 3) % 500 for place, token in enumerate(right)]

        with drafts(monkeypatch, tokens):
            yield

    def run(self, path: Path, plain: list[Any], **arguments: Any) -> Any:
        with engine(path, speculative_config=speculative(path), **arguments) as llm:
            outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
            assert largest_change(plain, outputs) <= INVARIANCE
            accepted, drafted = counter(llm, "num_accepted_tokens"), counter(llm, "num_drafts")
            assert accepted >= 1.4 * drafted
            return {m.name: int(m.value) for m in llm.get_metrics() if hasattr(m, "value")}

    def test_in_one_batch(self, tiny_checkpoint: Path, plain: list[Any], known: None) -> None:
        self.run(tiny_checkpoint, plain)

    def test_under_preemption_and_chunked_prefill(self, tiny_checkpoint: Path, plain: list[Any], known: None) -> None:
        metrics = self.run(
            tiny_checkpoint,
            plain,
            max_model_len=256,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            num_gpu_blocks_override=74,
        )
        assert metrics["vllm:num_preemptions"] > 0


def test_up_to_the_longest_sequence(tiny_checkpoint: Path) -> None:
    """Drafts near the end are cut, and the pages written there serve later requests."""
    arguments: dict[str, Any] = {"max_model_len": 96}
    prompts = random_prompts((90, 80, 64), seed=21)
    with engine(tiny_checkpoint, **arguments) as llm:
        expected = generate(llm, prompts, max_tokens=96)
    with engine(tiny_checkpoint, **arguments, speculative_config=speculative(tiny_checkpoint)) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, max_tokens=96)
            assert [len(completion_of(o)) for o in outputs] == [6, 16, 32]
            assert largest_change(expected, outputs) <= INVARIANCE


def test_adapters_on_the_target_alone_and_mixed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    make_adapter(tiny_checkpoint, tmp_path / "a", 1)
    make_adapter(tiny_checkpoint, tmp_path / "b", 2, ("q", "o"))
    loras = [request("a", 1, tmp_path / "a"), None, request("b", 2, tmp_path / "b"), None]
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine(tiny_checkpoint, **arguments) as llm:
        expected = generate(llm, PROMPTS[3:7], lora=loras, max_tokens=16)
    with engine(tiny_checkpoint, **arguments, speculative_config=speculative(tiny_checkpoint)) as llm:
        outputs = generate(llm, PROMPTS[3:7], lora=loras, max_tokens=16)
        assert counter(llm, "num_drafts") > 0
        assert largest_change(expected, outputs) <= INVARIANCE


def test_a_draft_that_is_never_right_is_reported(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.plugin import draft_watch

    warnings: list[str] = []
    monkeypatch.setattr(draft_watch, "SILENT_STEPS", 20)
    # vLLM's loggers pass nothing on.
    monkeypatch.setattr(draft_watch.logger, "warning", lambda message, *values: warnings.append(message % values))
    with (
        drafts(monkeypatch, lambda request, length: [499] * 7),
        engine(tiny_checkpoint, speculative_config=speculative(tiny_checkpoint)) as llm,
    ):
        generate(llm, PROMPTS[:2], max_tokens=24)
    [warning] = warnings
    assert "in 20 drafts of 7 tokens" in warning or "in 21 drafts" in warning


def test_the_torch_kernels_draft_the_same(
    tiny_checkpoint: Path, tiny_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a machine without a compiler."""
    monkeypatch.setattr(ops, "have_native", lambda: False)
    prompts = PROMPTS[:3]
    with engine(tiny_checkpoint, speculative_config=speculative(tiny_checkpoint)) as llm, watched(monkeypatch) as seen:
        outputs = generate(llm, prompts, max_tokens=8)
        sampled = generate(llm, prompts, max_tokens=8, temperature=1.0, seed=1)
    assert max(differences(tiny_oracle, prompts * 2, outputs + sampled)) < 1e-4
    assert check_blocks(seen, outputs, prompts, Reference(tiny_checkpoint, tiny_oracle)) > 10


def test_bfloat16_weights(tiny_checkpoint: Path) -> None:
    with engine(tiny_checkpoint, dtype="bfloat16") as llm:
        expected = generate(llm, PROMPTS[:4], max_tokens=24)
    with engine(tiny_checkpoint, dtype="bfloat16", speculative_config=speculative(tiny_checkpoint)) as llm:
        assert largest_change(expected, generate(llm, PROMPTS[:4], max_tokens=24)) <= INVARIANCE


def test_a_runner_that_is_not_patched_is_named(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    from rollout.plugin import drafting, rejection

    rejection.install()
    monkeypatch.setattr(drafting, "install_first", lambda: None)
    monkeypatch.setattr(rejection_sampler, "_expand", rejection.rejection_greedy_sample)
    with (
        pytest.raises(ValueError, match="part of drafting must be active where a draft is used"),
        engine(tiny_checkpoint, speculative_config=speculative(tiny_checkpoint)),
    ):
        pass


def test_what_a_draft_excludes_is_refused_at_the_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from tests.inkling_rl.test_draft_checkpoint import changed, setting, write_standalone

    own = write_standalone(tiny_checkpoint, tmp_path / "draft")
    other = changed(own, tmp_path / "other", setting("num_target_layers", 8))
    config = speculative(own)
    for given, message in (
        (speculative(own, num_tokens=8), r"num_tokens must be 1 to 7"),
        (speculative(other), r"with num_hidden_layers 6; got one for 8"),
        (config | {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "per_batch_size must be left unset"),
        (config | {"rejection_sample_method": "block"}, "rejection_sample_method must be standard"),
    ):
        with pytest.raises(ValueError, match=message), engine(tiny_checkpoint, speculative_config=given):
            pass


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestTwoHundredPrompts:
    """Cold, cached, chunked, preempted, with adapters: every token and log-probability is that of an engine without."""

    ADAPTERS: ClassVar[dict[str, Any]] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    SMALL: ClassVar[dict[str, Any]] = {
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 74,
    }

    @pytest.fixture(scope="class")
    def prompts(self) -> list[list[int]]:
        lengths = torch.randint(1, 150, (200,), generator=torch.Generator().manual_seed(1)).tolist()
        return random_prompts(lengths, seed=30)

    @pytest.fixture(scope="class")
    def loras(self, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        path = tmp_path_factory.mktemp("adapters") / "a"
        make_adapter(tiny_checkpoint, path, 1)
        return [request("a", 1, path) if index % 2 else None for index in range(200)]

    @pytest.fixture(scope="class")
    def expected(self, tiny_checkpoint: Path, prompts: list[list[int]], loras: list[Any]) -> list[list[Any]]:
        """Without a draft, without adapters and with."""
        with engine(tiny_checkpoint, **self.ADAPTERS) as llm:
            return [generate(llm, prompts, lora=lora, max_tokens=40) for lora in (None, loras)]

    @pytest.mark.parametrize("sampling", ["probabilistic", pytest.param("greedy", marks=pytest.mark.exhaustive)])
    def test_in_every_mode(
        self,
        tiny_checkpoint: Path,
        prompts: list[list[int]],
        loras: list[Any],
        expected: list[list[Any]],
        sampling: str,
    ) -> None:
        drafting = {"speculative_config": speculative(tiny_checkpoint, sampling)}
        with engine(tiny_checkpoint, **self.ADAPTERS, **drafting) as llm:
            for lora, outputs in ((None, expected[0]), (None, expected[0]), (loras, expected[1])):
                got = generate(llm, prompts, lora=lora, max_tokens=40)
                assert largest_change(outputs, got) <= INVARIANCE
        with engine(tiny_checkpoint, **self.SMALL, **drafting) as llm:
            assert largest_change(expected[0], generate(llm, prompts, max_tokens=40)) <= INVARIANCE


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3, "num_key_value_heads": 4}])
def test_drafts_of_other_shapes_than_the_targets(
    tiny_checkpoint: Path,
    tiny_oracle: Any,
    plain: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
) -> None:
    """Fewer layers than groups of pages have owners, more, and wider pages than the target's."""
    import json

    from safetensors.torch import save_file

    from inkling_rl.checkpoint import layout
    from inkling_rl.draft.shape import PREFIX, as_release, standalone_config

    config = standalone_config(Checkpoint.open(tiny_checkpoint).config) | changes
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name.removeprefix(PREFIX): (torch.randn(size, generator=generator) / size[-1] ** 0.5).bfloat16()
        for name, size in layout.draft_shapes(as_release(config)).items()
    }
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    drafting = {"speculative_config": speculative(tmp_path / "draft")}
    with engine(tiny_checkpoint, **drafting) as llm, watched(monkeypatch) as seen:
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        assert [len(group.layer_names) for group in groups] == [2, 2, 2, 2]
        for _ in range(2):
            outputs = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
            assert largest_change(plain, outputs) <= INVARIANCE
    reference = Reference(tiny_checkpoint, tiny_oracle, tmp_path / "draft")
    assert check_blocks(seen[-200:], outputs, PROMPTS, reference) > 50
