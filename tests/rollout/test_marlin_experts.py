"""Marlin's tensors in a model on a CPU: loading and updating layers, dummy weights, formats, routing capture."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Inkling2TextConfig

from inkling_rl.checkpoint.conversion import default_formats
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import tiny_config, tiny_quant_config, write_tiny
from inkling_rl.formats import ExpertFormat, marlin
from inkling_rl.formats.errors import FormatError
from rollout.kernels import reference
from rollout.kernels.cuda import FALLBACKS
from rollout.kernels.fallback import Blocks
from rollout.kernels.triton_moe_align import block_size
from rollout.plugin import dummy, loader, marlin_experts
from rollout.plugin.experts import Experts, SparseMoe
from rollout.plugin.marlin_experts import MarlinExperts
from rollout.plugin.shape import ModelShape
from tests.rollout.engines import engine, engine_logprobs, generate, random_prompts

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "mxfp8")


def shape_of(formats: Iterable[ExpertFormat] | None = None, **changes: Any) -> ModelShape:
    text = tiny_config()["text_config"] | changes
    return ModelShape.from_config(Inkling2TextConfig(**text), list(formats) if formats else None)


class Inkling2Part(nn.Module):
    """A norm and the layers' experts as Marlin's tensors, under the names of the model."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for expert_format in shape.expert_formats:
            layer = nn.Module()
            layer.mlp = nn.Module()
            layer.mlp.experts = MarlinExperts(shape, expert_format)
            for parameter in layer.mlp.experts.parameters():
                parameter.view(torch.uint8).fill_(0xA5)
            self.model.layers.append(layer)

    def experts(self, layer: int) -> dict[str, torch.Tensor]:
        return dict(self.model.layers[layer].mlp.experts.named_parameters())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """Release tensors of an NVFP4 and of an MXFP8 layer of the tiny model, by what follows `experts.`."""
    checkpoint = Checkpoint.open(write_tiny(tmp_path_factory.mktemp("marlin") / "tiny", seed=4))
    found: dict[int, dict[str, torch.Tensor]] = {}
    for number, source in enumerate((3, 5)):
        prefix = f"model.llm.layers.{source}.mlp.experts."
        names = [name for name in checkpoint.shards if name.startswith(prefix)]
        found[number] = {name.removeprefix(prefix): checkpoint.tensor(name) for name in names}
    return found


def named(stored: dict[str, torch.Tensor], layer: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"model.llm.layers.{layer}.mlp.experts.{key}", tensor) for key, tensor in stored.items()]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


NORM = ("norm.weight", torch.ones(4))


def test_a_layer_becomes_marlins_bytes_in_any_order(stored: dict[int, dict[str, torch.Tensor]]) -> None:
    for reverse in (False, True):
        model = Inkling2Part(shape_of(FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2))
        pairs = [pair for layer in stored for pair in named(stored[layer], layer)] + [NORM]
        written = loader.load(model, pairs[::-1] if reverse else pairs)
        assert written == {name for name, _ in model.named_parameters()}
        for layer, expert_format in enumerate(FORMATS):
            expected = marlin.from_release(stored[layer], expert_format)
            found = model.experts(layer)
            assert found.keys() == expected.keys()
            assert all(same_bytes(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_conversion_on_another_device_is_the_same(stored: dict[int, dict[str, torch.Tensor]], layer: int) -> None:
    """Some experts at a time; cpu:0 counts as another device than cpu."""
    expected = marlin.from_release(stored[layer], FORMATS[layer])
    many = {key: t.repeat(3, *[1] * (t.ndim - 1)) if t.ndim else t for key, t in stored[layer].items()}
    whole = marlin.from_release(many, FORMATS[layer])
    moved: dict[str, torch.Tensor] = {}
    for matrix in marlin.matrices_from_release(many, FORMATS[layer], device=torch.device("cpu:0")):
        assert len({key.split("_")[0] for key in matrix}) == 1
        moved |= matrix
    assert moved.keys() == whole.keys() == expected.keys() and len(moved["w2_weight"]) == 48
    assert all(same_bytes(moved[key], whole[key]) for key in whole)


def test_a_matrix_is_let_go_before_the_next_is_made(
    stored: dict[int, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU holds beside the model while it loads."""
    made, alive, engine_matrix = [], [], marlin._engine_matrix

    def watched(*arguments: Any) -> dict[str, torch.Tensor]:
        alive.append([matrix() is not None for matrix in made])
        engine = engine_matrix(*arguments)
        made.append(weakref.ref(next(iter(engine.values()))))
        return engine

    monkeypatch.setattr(marlin, "_engine_matrix", watched)
    model = Inkling2Part(shape_of(FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2))
    loader.load(model, [pair for layer in stored for pair in named(stored[layer], layer)] + [NORM])
    assert alive == [[False] * number for number in range(4)]


def test_live_updates_bring_whole_layers(stored: dict[int, dict[str, torch.Tensor]]) -> None:
    model = Inkling2Part(shape_of(FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2))
    pairs = [pair for layer in stored for pair in named(stored[layer], layer)] + [NORM]
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.mlp\.experts"):
        loader.load(model, [*named(stored[1], 1), NORM])
    loader.load(model, pairs)
    before = {key: tensor.clone() for key, tensor in model.experts(1).items()}
    update = {key: t.flip(0).contiguous() if t.ndim else t for key, t in stored[0].items()}
    assert loader.load(model, named(update, 0)) == {f"model.layers.0.mlp.experts.{key}" for key in model.experts(0)}
    expected = marlin.from_release(update, "nvfp4")
    assert all(same_bytes(model.experts(0)[key], expected[key]) for key in expected)
    assert all(same_bytes(model.experts(1)[key], before[key]) for key in before)
    # What Marlin holds can also come as it is, and comes back unchanged.
    direct = [(f"model.layers.1.mlp.experts.{key}", t.flip(0).contiguous()) for key, t in before.items()]
    loader.load(model, direct)
    assert all(same_bytes(model.experts(1)[key], before[key].flip(0)) for key in before)


def test_vllms_live_reload_writes_into_the_same_memory(stored: dict[int, dict[str, torch.Tensor]]) -> None:
    from vllm.model_executor.model_loader import reload

    model = Inkling2Part(shape_of(FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2))
    reload.record_metadata_for_reloading(model)
    loader.load(model, [pair for layer in stored for pair in named(stored[layer], layer)] + [NORM])
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = {key: tensor.clone() for key, tensor in model.experts(1).items()}
    update = {key: t.flip(0).contiguous() if t.ndim else t for key, t in stored[0].items()}
    reload.initialize_layerwise_reload(model)
    loader.load(model, named(update, 0))
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    expected = marlin.from_release(update, "nvfp4")
    assert all(same_bytes(model.experts(0)[key], expected[key]) for key in expected)
    assert all(same_bytes(model.experts(1)[key], before[key]) for key in before)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_in_part_is_refused(stored: dict[int, dict[str, torch.Tensor]], layer: int) -> None:
    model = Inkling2Part(shape_of(FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2))
    for left_out in stored[layer]:
        part = {key: tensor for key, tensor in stored[layer].items() if key != left_out}
        with pytest.raises(FormatError, match=rf"layers\.{layer}\.mlp\.experts.*{left_out.split('_')[0]}_weight"):
            loader.load(model, named(part, layer))
    # Another layer's format, and bytes of another type.
    with pytest.raises(FormatError, match=f"must be {FORMATS[layer]}; got {FORMATS[1 - layer]}"):
        loader.load(model, named(stored[1 - layer], layer))
    name = f"model.layers.{layer}.mlp.experts.w2_weight"
    with pytest.raises(CheckpointError, match=r"w2_weight must be torch\.int32; got torch\.float32"):
        loader.load(model, [(name, model.get_parameter(name).float())])
    assert all(bool((t.view(torch.uint8) == 0xA5).all()) for t in model.experts(layer).values())


def test_dummy_experts_have_the_size_of_a_models() -> None:
    shape = shape_of(
        FORMATS, num_hidden_layers=2, layer_types=["hybrid"] * 2, n_routed_experts=20, hidden_size=256,
        moe_intermediate_size=96,
    )  # fmt: skip
    model = Inkling2Part(shape)
    dummy.fill(model)
    assert abs(float(model.norm.weight.mean()) - 1) < 0.2 and model.norm.weight.std() > 0
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    for layer, expert_format in enumerate(FORMATS):
        experts = model.experts(layer)
        for matrix, fan in (("w13_weight", 256), ("w2_weight", 96)):
            values = marlin.dequantize(experts, matrix, expert_format, 96)
            deviation = values.flatten(1).std(1) * fan**0.5
            assert values.shape[0] == 20 and bool(((deviation > 0.95) & (deviation < 1.05)).all())
            assert abs(float(values.mean()) * fan**0.5) < 0.02
            # A few are different, the others are copies.
            assert len({float(value) for value in values.sum((1, 2))}) == dummy.DISTINCT_EXPERTS
    again = Inkling2Part(shape)
    dummy.fill(again)
    assert all(same_bytes(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_dummy_routing_spreads() -> None:
    shape = shape_of(n_routed_experts=384, num_experts_per_tok=8, hidden_size=512, moe_intermediate_size=16)
    router = nn.Module()
    router.mlp = SparseMoe(shape, 0)
    dummy.fill(router)
    seen: list[torch.Tensor] = []
    router.mlp.capture_fn = seen.append
    router.mlp(torch.randn(32, 512, generator=torch.Generator().manual_seed(0)))
    assert len(seen[0].unique()) >= 150


def test_the_engine_generates_from_dummy_weights(tmp_path: Path) -> None:
    """Through vLLM's own loader; both dtypes start, and the same weights come each time."""
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = random_prompts((20, 45), seed=3)
    with engine(tmp_path, load_format="dummy", skip_tokenizer_init=True) as llm:
        rows = [row for output in generate(llm, prompts) for row in engine_logprobs(output)]
        values = [value for row in rows for value in row.values()]
        assert all(-20 < value < 0 for value in values) and len({round(value, 3) for value in values}) > 20
        [statistics] = llm.apply_model(parameter_statistics)
    assert abs(statistics["model.layers.2.self_attn.q_proj.norm.scale"][0] - 1) < 0.05
    assert statistics["model.layers.0.mlp.gate.e_score_correction_bias"] == (0.0, 0.0)
    for name, fan in (("self_attn.q_proj.linear.weight", 128), ("mlp.experts.down_proj", 64)):
        assert abs(statistics[f"model.layers.1.{name}"][1] * fan**0.5 - 1) < 0.05
    assert all(mean == mean and (deviation > 0 or "bias" in name) for name, (mean, deviation) in statistics.items())


def parameter_statistics(model: nn.Module) -> dict[str, tuple[float, float]]:
    return {name: (float(p.float().mean()), float(p.float().std())) for name, p in model.named_parameters()}


def settings(path: Path, load_format: str) -> Any:
    text = SimpleNamespace(num_hidden_layers=12)
    model = SimpleNamespace(model=str(path), revision=None, hf_text_config=text)
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))


def test_formats_come_from_the_checkpoint_or_from_the_releases_pattern(tmp_path: Path) -> None:
    assert loader.expert_formats(settings(tmp_path, "auto")) == ["bf16"] * 12
    assert loader.expert_formats(settings(tmp_path, "dummy")) == default_formats(12) == ["nvfp4"] * 10 + ["mxfp8"] * 2
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(tiny_quant_config()))
    expected = ["nvfp4"] * 5 + ["mxfp8"] + ["bf16"] * 6
    assert loader.expert_formats(settings(tmp_path, "auto")) == expected
    assert loader.expert_formats(settings(tmp_path, "dummy")) == expected


def test_experts_are_dense_on_a_cpu_and_sizes_that_marlin_cannot_take_are_refused() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert type(SparseMoe(shape_of(["nvfp4"] * 6), 0).experts) is Experts
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(FormatError, match=r"layers\.7.*hidden size must be a multiple of 64"):
        MarlinExperts(shape_of(hidden_size=96), "nvfp4", "model.layers.7.mlp.experts")
    with pytest.raises(FormatError, match=r"must be a multiple of 128 .* got 192 and 160"):
        MarlinExperts(shape_of(hidden_size=192, moe_intermediate_size=160), "mxfp8")
    MarlinExperts(shape_of(hidden_size=192, moe_intermediate_size=160), "nvfp4")
    with pytest.raises(FormatError, match="multiples of 32"):
        MarlinExperts(shape_of(moe_intermediate_size=48), "mxfp8")


@pytest.mark.parametrize("rows", [1, 9])
def test_all_experts_on_all_tokens_equal_the_reference(rows: int) -> None:
    shape = shape_of()
    moe = SparseMoe(shape, 2)
    dummy.fill(moe)
    x = torch.randn(rows, shape.hidden_size, generator=torch.Generator().manual_seed(rows))
    routing = moe.gate.weight, moe.gate.e_score_correction_bias
    limits = shape.experts_per_token, shape.route_scale, shape.gate_cap, shape.up_cap
    expected = reference.experts(x, *routing, moe.experts.gate_up_proj, moe.experts.down_proj, *limits)
    seen: list[torch.Tensor] = []
    moe.capture_fn = seen.append
    torch.testing.assert_close(moe(x), expected, rtol=1e-5, atol=1e-5)
    [chosen] = seen
    assert chosen.dtype == torch.int32 and chosen.shape == (rows, 4) and bool((chosen[:, 1:] > chosen[:, :-1]).all())
    scores = torch.sigmoid(x @ moe.gate.weight.t()).gather(1, chosen.long())
    got = moe.experts(x, scores / scores.sum(1, keepdim=True) * shape.route_scale, chosen)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_vllm_finds_the_layers_to_capture_from() -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCaptureSource,
        bind_routed_experts_capturer,
    )

    moe = SparseMoe(shape_of(), 3)
    assert isinstance(moe, RoutedExpertsCaptureSource)
    calls: list[tuple[int, torch.Tensor]] = []
    capturer: Any = SimpleNamespace(capture=lambda layer, ids: calls.append((layer, ids)))
    bind_routed_experts_capturer(nn.ModuleList([moe]), capturer)
    dummy.fill(moe)
    moe(torch.ones(2, 128))
    assert [(layer, ids.shape) for layer, ids in calls] == [(3, (2, 4))]


def test_blocks_are_small_for_few_tokens() -> None:
    assert [block_size(tokens * 8, 384) for tokens in (1, 8, 32, 300, 345, 8192)] == [8, 8, 8, 8, 8, 64]
    assert block_size(4 * 300, 16) == 64


@pytest.mark.parametrize(("rows", "vector_rows", "min_pairs", "by"), [
    (1, 0, None, "Marlin"), (4, 4, None, "few"), (5, 4, 2, "Marlin"), (8, 4, 2, "many"), (7, 4, 2, "Marlin"),
    (4, 4, 1, "few"), (400, 0, None, "Marlin"),
])  # fmt: skip
def test_who_multiplies(
    monkeypatch: pytest.MonkeyPatch, rows: int, vector_rows: int, min_pairs: int | None, by: str
) -> None:
    """16 experts, 4 chosen."""
    experts, called = MarlinExperts(shape_of(["nvfp4"] * 6), "nvfp4"), []

    def product(who: str, out: torch.Tensor) -> torch.Tensor:
        called.append(who)
        return out.zero_()

    nothing = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(marlin_experts, "standing", lambda device, top_k: marlin_experts.Standing(*[nothing] * 3))
    monkeypatch.setattr(marlin_experts, "blocks_of", lambda *_: Blocks(nothing, nothing, nothing))
    monkeypatch.setattr(
        marlin_experts.vllm_ops, "moe_wna16_marlin_gemm", lambda x, out, *_, **__: product("Marlin", out)
    )
    experts.use(replace(
        FALLBACKS, vector_rows=vector_rows, min_pairs=min_pairs, vector_experts=lambda *given: product("few", given[5]),
        grouped_product=lambda *given: product("many", given[4]),
    ))  # fmt: skip
    x, chosen = torch.ones(rows, 128), torch.arange(4, dtype=torch.int32).expand(rows, 4).contiguous()
    assert experts(x, torch.ones(rows, 4), chosen).shape == x.shape
    assert called == [by] * (1 if by == "few" else 2)
