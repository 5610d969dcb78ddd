"""`inkling-rl convert`: byte-exact round trips, what became of changed experts, the proof."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint import layout, reader, source, tensor_file
from inkling_rl.checkpoint.convert import convert
from inkling_rl.checkpoint.proof import ProofError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.writer import export_release, write_checkpoint
from tests.inkling_rl.converted import MXFP8_W2, W2, W13, changed, contents, expert_differences, raw

# Round trips


@pytest.mark.parametrize("model", ["tiny", "builtin:tiny-arithmetic"])
@pytest.mark.parametrize("group_bytes", [reader.GROUP_BYTES, 3 * 2**14])
def test_there_and_back_gives_the_same_directory(
    model: str, group_bytes: int, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GROUP_BYTES", group_bytes)  # all experts at once, and groups that 16 is no multiple of
    path = reader.resolve(tiny_path if model == "tiny" else model)
    assert convert(model if model != "tiny" else path, tmp_path / "bf16", "bf16", check=True).counts.converted == 192
    summary = convert(tmp_path / "bf16", tmp_path / "again", "release", check=True)
    assert summary.counts.untouched == summary.counts.converted == 192
    assert contents(tmp_path / "again") == contents(path)


def test_a_bf16_export_is_an_ordinary_checkpoint_with_memory(tiny: Checkpoint, export: Path) -> None:
    opened = Checkpoint.open(export)
    opened.check()
    assert opened.quant_config is None and set(opened.expert_formats) == {"bf16"}
    assert opened.source_formats == tiny.expert_formats and opened.config == tiny.config
    for (name, ours), (same, theirs) in zip(
        opened.iter_text(torch.bfloat16), tiny.iter_text(torch.bfloat16), strict=True
    ):
        assert name == same and raw(ours).equal(raw(theirs)), name
    for layer in range(6):
        before = tiny.companions(layer)
        kept = opened.companions(layer)
        assert set(kept) == set(before) and all(raw(kept[n]).equal(raw(v)) for n, v in before.items())
    assert not [name for name in opened.shards if name.endswith(("_scale", "_amax", "_denominator"))]
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (export / name).read_bytes() == (tiny.path / name).read_bytes()


def test_transformers_loads_an_export_and_misses_nothing(export: Path, hf_config: Any) -> None:
    from transformers import Inkling2ForCausalLM

    model, info = Inkling2ForCausalLM.from_pretrained(export, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith(("model.visual.", "model.dspark.")) for name in info["unexpected_keys"])
    state = dict(Checkpoint.open(export).iter_hf(torch.bfloat16))
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())


def test_what_transformers_saves_of_an_export_goes_back_with_the_files_beside(
    tiny: Checkpoint, export: Path, tmp_path: Path
) -> None:
    """The way of a trained model: load the export, train, save_pretrained, take the companions along."""
    from transformers import Inkling2ForCausalLM

    model = Inkling2ForCausalLM.from_pretrained(export, dtype=torch.bfloat16)
    with torch.no_grad():
        weight = model.model.layers[3].mlp.experts.down_proj[7]
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "trained")
    for file in export.glob("source_*"):
        if file.name != source.MODEL_INDEX_FILE:
            shutil.copy(file, tmp_path / "trained")
    summary = convert(tmp_path / "trained", tmp_path / "release", "release", check=True)
    assert (summary.counts.untouched, summary.counts.requantized) == (191, 1)
    result = Checkpoint.open(tmp_path / "release")
    for name in result.shards:
        x, y = result.tensor(name), tiny.tensor(name)
        differing = {e for e in range(len(x)) if not raw(x[e]).equal(raw(y[e]))} if x.ndim else set()
        assert differing == ({7} if name in (W2, f"{W2}_scale") else set()), name


def test_layers_are_converted_alone_and_the_rest_is_copied(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(tiny.path, tmp_path / "part", "bf16", layers=[1, 5], check=True)
    part = Checkpoint.open(tmp_path / "part")
    part.check()
    assert part.expert_formats == ("nvfp4", "bf16", "nvfp4", "nvfp4", "nvfp4", "bf16")
    assert {layout.layer_of_experts(name) for name in part.source_shards} == {1, 5}
    convert(tmp_path / "part", tmp_path / "all", "bf16", check=True)
    assert Checkpoint.open(tmp_path / "all").expert_formats == ("bf16",) * 6
    convert(tmp_path / "all", tmp_path / "half", "release", layers=range(3), check=True)
    half = Checkpoint.open(tmp_path / "half")
    assert half.expert_formats == ("nvfp4",) * 3 + ("bf16",) * 3
    assert {layout.layer_of_experts(name) for name in half.source_shards} == {3, 4, 5}
    convert(tmp_path / "half", tmp_path / "back", "release", check=True)
    assert contents(tmp_path / "back") == contents(tiny.path)


def test_a_config_that_names_its_quantisation_says_so_only_while_it_is_true(tiny_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_path, tmp_path / "release")
    config = json.loads((tiny_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "modelopt"}}
    (tmp_path / "release" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "release", tmp_path / "bf16", "bf16")
    assert "quantization_config" not in Checkpoint.open(tmp_path / "bf16").config
    convert(tmp_path / "bf16", tmp_path / "half", "release", layers=[0])
    assert "quantization_config" not in Checkpoint.open(tmp_path / "half").config
    convert(tmp_path / "half", tmp_path / "back", "release", check=True)
    assert contents(tmp_path / "back") == contents(tmp_path / "release")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_companions_the_releases_pattern_and_fresh_anchors(
    tiny: Checkpoint, tmp_path: Path, dtype: str
) -> None:
    config = dict(tiny.config) | {"dtype": dtype}
    state = dict(tiny.iter_hf(getattr(torch, dtype)))
    extra = {name: tiny.tensor(name) for name in tiny.shards if not name.startswith(layout.TEXT_PREFIX)}
    export_release(tmp_path / "plain", config, None, state, extra)
    summary = convert(tmp_path / "plain", tmp_path / "release", "release", check=True)
    assert summary.counts.new == summary.counts.converted == 192
    result = Checkpoint.open(tmp_path / "release")
    assert result.expert_formats == ("nvfp4",) * 5 + ("mxfp8",)
    # The values were a quantised model's: fresh scales lose nothing.
    for name, value in result.iter_hf(getattr(torch, dtype)):
        # Nothing at all in float32; in BF16 the maximum is a rounded one, and with it every value.
        torch.testing.assert_close(value, state[name], rtol=0 if dtype == "float32" else 2**-7, atol=0)


def test_a_float32_release_comes_back_from_values_and_their_bf16_rounding(tiny: Checkpoint, tmp_path: Path) -> None:
    tensors = [
        (name, value.float() if value.dtype == torch.bfloat16 else value)
        for name, value in ((name, tiny.tensor(name)) for name in tiny.shards)
    ]
    config = dict(tiny.config) | {"dtype": "float32"}
    write_checkpoint(tmp_path / "release", config, tiny.quant_config, tensors)
    convert(tmp_path / "release", tmp_path / "full", "bf16", check=True)
    full = Checkpoint.open(tmp_path / "full")
    assert full.place(W2).spec.dtype == "float32"
    rounded = changed(
        tmp_path / "full",
        tmp_path / "rounded",
        lambda t: t.update({name: t[name].bfloat16().float() for name in t if name.endswith("w2_weight")}),
    )
    for path in (tmp_path / "full", rounded):
        target = path.with_name(f"{path.name}-back")
        assert convert(path, target, "release", check=True).counts.untouched == 192
        assert not expert_differences(target, tmp_path / "release")


# Changed experts


def scale(name: str, expert: int, factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][expert] *= factor

    return change


@pytest.mark.parametrize(
    ("name", "factor", "field"),
    [
        (W13, 1.15, "requantized"),
        (W13, 0.89, "requantized"),
        (W13, 1.17, "reanchored"),
        (W13, 0.5, "reanchored"),
        (W13, 0.0, "exact"),
        (MXFP8_W2, 1.05, "requantized"),
        (MXFP8_W2, 4.0, "requantized"),
    ],
)
def test_a_changed_expert_changes_its_own_bytes_only(
    name: str, factor: float, field: str, tiny: Checkpoint, export: Path, tmp_path: Path
) -> None:
    trained = changed(export, tmp_path / "trained", scale(name, 7, factor))
    summary = convert(trained, tmp_path / "release", "release", check=True)
    assert summary.counts.untouched == 191 and getattr(summary.counts, field) == 1
    found = expert_differences(tmp_path / "release", tiny.path)
    assert found and all(rows == [7] for rows in found.values())
    assert set(found) <= {name, f"{name}_scale", f"{name}_amax"}
    assert (f"{name}_amax" in found) == (field == "reanchored")
    # As good as a quantisation can be: the steps of 4 bits are up to a third, those of 8 bits an eighth.
    result, wanted = Checkpoint.open(tmp_path / "release"), Checkpoint.open(trained)
    matrix, layer = name.rpartition(".")[2], layout.layer_of_experts(name)
    assert layer is not None
    got, want = (c.expert(layer, matrix, 7, torch.float32) for c in (result, wanted))
    assert (got - want).abs().sum() <= (0.05 if name == MXFP8_W2 else 0.11) * want.abs().sum()


def test_an_expert_of_zeros_comes_alive_and_another_stays_dead(tiny: Checkpoint, tmp_path: Path) -> None:
    def kill(tensors: dict[str, torch.Tensor]) -> None:
        for expert in (2, 9):
            for suffix in ("", "_scale", "_amax"):
                tensors[W13 + suffix].view(torch.uint8 if suffix != "_amax" else torch.float32)[expert] = 0

    release = changed(tiny.path, tmp_path / "release", kill)
    convert(release, tmp_path / "bf16", "bf16", check=True)
    trained = changed(tmp_path / "bf16", tmp_path / "trained", lambda t: t[W13][9].fill_(0.25))
    summary = convert(trained, tmp_path / "back", "release", check=True)
    assert (summary.counts.untouched, summary.counts.reanchored) == (191, 1)
    assert {tuple(rows) for rows in expert_differences(tmp_path / "back", release).values()} == {(9,)}
    assert Checkpoint.open(tmp_path / "back").expert(3, "w13_weight", 9, torch.float32).eq(0.25).all()


def test_a_denominator_of_2688_leaves_no_room_above_the_anchor(export: Path, tmp_path: Path) -> None:
    """Its map-to-6 scale of the largest block is at the end of E4M3: growth re-anchors instead of saturating."""

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{W13}_outer_scale_denominator"].fill_(2688.0)

    grown = changed(export, tmp_path / "grown", scale(W13, 0, 1.1))
    narrowed = changed(grown, tmp_path / "narrow", narrow, files="source_scales")
    convert(grown, tmp_path / "kept", "release")
    convert(narrowed, tmp_path / "moved", "release", check=True)
    old, kept, moved = (
        Checkpoint.open(tmp_path / path).companions(3)[f"{W13}_amax"][0] for path in ("grown", "kept", "moved")
    )
    assert kept == old and moved == pytest.approx(1.1 * float(old), rel=2**-7)


# The proof


@pytest.mark.parametrize(
    ("to", "name", "message"),
    [
        ("bf16", W13, "the values of SRC's bytes, which give them back; expert 5"),
        ("bf16", f"{MXFP8_W2}_scale", "w2_weight_scale must hold the bytes of SRC's; expert 5"),
        ("bf16", f"{W13}_amax", "w13_weight_amax must hold the bytes of SRC's; expert 5"),
        ("bf16", f"{W13}{source.DIGEST}", "SRC's digest; expert 5"),
        ("bf16", "model.llm.embed.weight", "must be a copy of SRC's; it differs"),
        ("release", W13, "the bytes that it had in the release; expert 5"),
        ("release", f"{W13}_scale", "the bytes that it had in the release; expert 5"),
        ("release", "model.dspark.fc.weight", "must be a copy of SRC's; it differs"),
    ],
)
def test_a_byte_that_goes_wrong_on_its_way_to_the_disk_is_found(
    to: Any, name: str, message: str, tiny_path: Path, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = tensor_file.TensorFileWriter.close

    def spoil(self: tensor_file.TensorFileWriter) -> None:
        if name in self.places and self.descriptor >= 0:
            place = self.places[name]
            at = place.offset + 5 * place.row_bytes
            with self.path.open("rb") as file:
                byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(self.descriptor, bytes([byte ^ 0x11]), at)
        close(self)

    monkeypatch.setattr(tensor_file.TensorFileWriter, "close", spoil)
    with pytest.raises(ProofError, match=message) as caught:
        convert(tiny_path if to == "bf16" else export, tmp_path / "new", to, check=True)
    assert name.removesuffix("_scale") in str(caught.value) and "partial" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_values_do_not_determine_are_found(tiny: Checkpoint, tmp_path: Path) -> None:
    """Other writers store codes other than 0 in a block whose scale is 0."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{W13}_scale"].view(torch.uint8)[4, 0, 0] = 0
        tensors[W13][4, 0, :8] = 0x77

    foreign = changed(tiny.path, tmp_path / "foreign", change)
    with pytest.raises(
        ProofError, match=r"w13_weight must hold the values of SRC's bytes.*expert 4 does not.*determine"
    ):
        convert(foreign, tmp_path / "checked", "bf16", check=True)
    convert(foreign, tmp_path / "bf16", "bf16")
    summary = convert(tmp_path / "bf16", tmp_path / "back", "release", check=True)
    assert (summary.counts.untouched, summary.counts.exact) == (191, 1)
