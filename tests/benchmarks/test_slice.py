"""The bookkeeping of the slice benchmark: configuration, pages, bounds and which part a kernel belongs to."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from inkling_rl.checkpoint.layout import release_tensors
from tests.benchmarks import slice_bounds, slice_model
from tests.benchmarks.slice_bounds import Work
from tests.benchmarks.slice_steps import Group, blocks_needed, deal
from tests.rollout.engines import engine, generate

KI = 1024
GROUPS = (Group(16, None), Group(4, 24), Group(2, 4))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slice_model.write_slice(tmp_path_factory.mktemp("slice") / "slice")


def test_the_numbers_are_the_release_defaults() -> None:
    from transformers import Inkling2TextConfig

    release = Inkling2TextConfig()
    assert {key: getattr(release, key) for key in slice_model.RELEASE} == slice_model.RELEASE
    assert slice_model.layer_types(48) == release.layer_types
    assert slice_model.formats(48) == ["nvfp4"] * 40 + ["mxfp8"] * 8


def test_the_slice_keeps_the_proportions_of_the_release(written: Path) -> None:
    shape = slice_model.slice_shape(written)
    assert [layer for layer, full in enumerate(shape.is_full) if full] == [5, 11]
    assert shape.expert_formats == ("nvfp4",) * 10 + ("mxfp8",) * 2
    assert (shape.num_layers, shape.num_experts, shape.expert_width, shape.vocab_size) == (12, 384, 2304, 201024)


def test_the_slice_needs_about_100_gb(written: Path) -> None:
    config, quant = (json.loads((written / f"{n}.json").read_text()) for n in ("config", "hf_quant_config"))
    sizes = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}
    stored = sum(torch.Size(spec.shape).numel() * sizes[spec.dtype] for spec in release_tensors(config, quant).values())
    assert 98e9 < stored < 102e9


def test_bounds_are_those_that_were_worked_out_by_hand(written: Path) -> None:
    """1.24 ms without the unembedding and 1.68 ms with it at 4,244 GB/s, for one request of 100K."""
    shape = slice_model.slice_shape(written)
    by_part = slice_bounds.bytes_by_part(shape, Work(((100 * KI - 1, 1),), 1), [8.0] * 12)
    assert slice_bounds.without_unembedding(by_part) / 4244e9 == pytest.approx(1.24e-3, rel=0.01)
    assert sum(by_part.values()) / 4244e9 == pytest.approx(1.68e-3, rel=0.01)
    attention = 4096 * (2 * 100 * KI + 10 * 1024)
    assert by_part["attention"] == pytest.approx(attention, rel=0.01)
    experts = 8 * 3 * 4608 * 2304 * (10 * 0.5625 + 2 * 1.03125)
    assert by_part["expert GEMMs"] == pytest.approx(experts, rel=0.01)


def test_operations_of_a_prefill(written: Path) -> None:
    """Twice the active parameters for every token, and four times the channels for every pair of query and key."""
    shape = slice_model.slice_shape(written)
    by_part = slice_bounds.operations_by_part(shape, Work(((0, 8 * KI),), 1))
    projections = 4608 * (6144 * 2 + 768 + 2048)
    assert by_part["projections"] == 2 * 8 * KI * 12 * projections
    assert by_part["expert GEMMs"] == 2 * 8 * KI * 12 * 8 * 3 * 4608 * 2304
    full, sliding = 8 * KI * (8 * KI + 1) / 2, 1024 * 1025 / 2 + 7 * KI * 1024
    assert by_part["attention"] == 4 * 6144 * (2 * full + 10 * sliding)


@pytest.mark.parametrize("window", [None, 1, 7, 24, 1000])
def test_pairs_and_visible_keys_are_those_that_a_loop_counts(window: int | None) -> None:
    requests = ((0, 5), (3, 1), (6, 3), (30, 40), (100, 1))
    pairs = visible = 0
    for past, new in requests:
        seen = [range(max(0, p + 1 - window) if window else 0, p + 1) for p in range(past, past + new)]
        pairs += sum(map(len, seen))
        visible += len(set(chain(*seen)))
    work = Work(requests, len(requests))
    assert (work.pairs(window), work.visible(window)) == (pairs, visible)


def test_pages_hold_what_a_step_reads_and_nothing_twice() -> None:
    requests = ((0, 7), (40, 1), (99, 30))
    pages = deal(GROUPS, requests, 100, 256, seed=3)
    used = [block for page in pages for block in page.block_table.flatten().tolist() if block]
    assert len(used) == len(set(used)) == blocks_needed(GROUPS, requests)
    for group, page in zip(GROUPS, pages, strict=True):
        assert page.block_table.shape == (3, -(-256 // group.block_size))
        slots = iter(page.slots.tolist())
        for row, (past, new) in enumerate(requests):
            first = 0 if group.window is None else max(0, past - group.window + 1)
            for position in range(first, past + new):
                block = int(page.block_table[row, position // group.block_size])
                assert block > 0
                if position >= past:
                    assert next(slots) == block * group.block_size + position % group.block_size
        assert next(slots, None) is None
    with pytest.raises(ValueError, match="must fit 20 blocks"):
        deal(GROUPS, requests, 21, 256)


# The kernels of a decode step of two layers in their order, and parts of each.
STEP = (
    ("vectorized_gather_kernel", "other"), ("rms_norm", "other"), ("_sources_kernel", "prepare"),
    *2 * (
        ("nvjet_tst_64x8", "projections"), ("_project_kernel", "projections"), ("_prepare_kernel", "prepare"),
        ("_decode_kernel", "attention"), ("merge_kernel", "merge"), ("nvjet_tst_64x8", "o-projection"),
        ("splitKreduce_kernel", "o-projection"), ("_conv_mix_kernel", "conv_mix"), ("_logits_kernel", "router"),
        ("_choose_kernel", "router"), ("_align_kernel", "align"), ("marlin_moe_wna16::Marlin<1>", "expert GEMMs"),
        ("_activation_kernel", "activation"), ("void marlin_moe_wna16::Marlin<1>", "expert GEMMs"),
        ("_sum_kernel", "sum"), ("_conv_mix_kernel", "conv_mix"),
    ),
    ("nvjet_tst_64x8", "unembedding"), ("_softcap_kernel", "unembedding"),
)  # fmt: skip


def test_every_kernel_has_its_part() -> None:
    names = [name for name, _ in STEP]
    assert slice_bounds.parts_of(names, 2) == [part for _, part in STEP]
    with pytest.raises(ValueError, match="must mix 6 times; got 4"):
        slice_bounds.parts_of(names, 3)
    assert slice_bounds.split_steps(names * 3, 3)[1] == range(len(names), 2 * len(names))
    with pytest.raises(ValueError, match="the same kernels"):
        slice_bounds.split_steps([*names, *names[:-1], "another"], 2)


def test_products_of_many_tokens_are_the_experts() -> None:
    names = [name.replace("void marlin_moe_wna16::Marlin<1>", "product_kernel") for name, _ in STEP]
    names = [name.replace("marlin_moe_wna16::Marlin<1>", "product_kernel") for name in names]
    assert slice_bounds.parts_of(names, 2) == [part for _, part in STEP]


def test_kernels_of_few_rows_have_their_part() -> None:
    few = {"_conv_mix_kernel": "_early_kernel", "_logits_kernel": "_segment_kernel"}
    assert slice_bounds.parts_of([few.get(name, name) for name, _ in STEP], 2) == [part for _, part in STEP]


def test_a_kernel_that_waits_for_another_counts_from_its_end() -> None:
    ranges = [(0.0, 4.0), (1.0, 6.0), (2.0, 5.0), (8.0, 9.0)]
    assert slice_bounds.lengths_alone(ranges) == [4.0, 2.0, 0.0, 1.0]


def test_a_row_of_the_table_says_what_bounds_it() -> None:
    nothing = dict.fromkeys(slice_bounds.PARTS, 0.0)
    rows = slice_bounds.table(
        nothing | {"attention": 20.0, "sum": 5.0}, {"attention": 2, "sum": 1},
        nothing | {"attention": 4e4, "sum": 4e3}, nothing | {"attention": 8e9}, 4e3, 8e8,
    )  # fmt: skip
    assert [(row["part"], row["by"], row["of_bound"]) for row in rows] == [
        ("attention", "bytes", 0.5), ("sum", "bytes", 0.2),
    ]  # fmt: skip


def test_steps_without_the_scheduler_compute_what_the_engine_does(tmp_path: Path) -> None:
    """A prompt in two chunks and then a token, in pages that hold random numbers, against one whole prompt."""
    from tests.benchmarks import slice_steps

    path = slice_model.write_slice(tmp_path / "slice", num_layers=6, small=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (60,), generator=draw)
    with (
        engine(path, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False) as llm,
        torch.no_grad(),
    ):
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        (greedy,) = generate(llm, [ids.tolist()], max_tokens=1)
        slice_steps.fill_pages(runner)
        whole_TH = slice_steps.build(runner, ((0, 60),), ids, seed=1).hidden()
        kept = deal(slice_steps.groups_of(runner), ((0, 60),), runner.kv_cache_config.num_blocks, 512, seed=2)
        steps = []
        for past, new in ((0, 30), (30, 29), (59, 1)):
            pages = [page._replace(slots=page.slots[past : past + new]) for page in kept]
            steps.append(slice_steps.build(runner, ((past, new),), ids[past : past + new], pages=pages))
        hidden_TH = torch.cat([step.hidden() for step in steps])
        logits_TV = steps[-1].logits()
    assert torch.isfinite(whole_TH).all() and whole_TH.std() > 0.1
    torch.testing.assert_close(hidden_TH, whole_TH, rtol=1e-4, atol=1e-4)
    assert int(logits_TV.argmax()) == greedy.outputs[0].token_ids[0]
