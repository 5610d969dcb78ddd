"""`inkling-rl convert`: byte-exact round trips, what became of changed experts, the proof, and every way to fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint import directory, layout, reader, source, tensor_file
from inkling_rl.checkpoint.convert import convert
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.proof import ProofError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.writer import export_release, write_checkpoint
from inkling_rl.formats.errors import FormatError
from tests.benchmarks.convert_speed import write_release

W13, W2 = (f"model.llm.layers.3.mlp.experts.{matrix}" for matrix in ("w13_weight", "w2_weight"))
MXFP8_W2 = "model.llm.layers.5.mlp.experts.w2_weight"


@pytest.fixture(scope="module")
def export(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only BF16 export of the tiny checkpoint."""
    path = tmp_path_factory.mktemp("convert") / "bf16"
    convert(tiny_path, path, "bf16", check=True)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def changed(
    path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object], files: str = "model"
) -> Path:
    """A copy of a checkpoint, all its `files` tensors changed in memory and written into one file again."""
    shutil.copytree(path, target)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(target.glob(f"{files}-*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    change(tensors)
    save_file(tensors, target / f"{files}-all.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, f"{files}-all.safetensors")}
    (target / f"{files}.safetensors.index.json").write_text(json.dumps(index))
    return target


def expert_differences(a: Path, b: Path) -> dict[str, list[int]]:
    """Tensor -> experts whose bytes differ, over all tensors of two checkpoints."""
    ours, theirs = Checkpoint.open(a), Checkpoint.open(b)
    assert set(ours.shards) == set(theirs.shards)
    found = {}
    for name in ours.shards:
        x, y = ours.tensor(name), theirs.tensor(name)
        rows = [e for e in range(len(x)) if not raw(x[e]).equal(raw(y[e]))] if x.ndim else []
        if rows or (not x.ndim and x != y):
            found[name] = rows
    return found


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


# Bad input


@pytest.mark.parametrize(
    ("to", "layers", "message"),
    [
        ("release", None, "must have experts to convert; all its 6 layers are quantised already"),
        ("bf16", [0, 6], "must name layers 0 to 5; got 6"),
        ("bf16", [], "must name at least one layer"),
    ],
)
def test_nothing_to_convert(to: Any, layers: list[int] | None, message: str, tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_path, tmp_path / "new", to, layers=layers)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_has_its_form_already_is_named(tiny_path: Path, tmp_path: Path) -> None:
    convert(tiny_path, tmp_path / "part", "bf16", layers=[2])
    with pytest.raises(CheckpointError, match=r"layer 2 is BF16 already\. Leave it out"):
        convert(tmp_path / "part", tmp_path / "new", "bf16", layers=[1, 2])
    with pytest.raises(CheckpointError, match="layer 1 is quantised already"):
        convert(tmp_path / "part", tmp_path / "new", "release", layers=[1, 2])


def test_a_place_that_is_taken(tiny_path: Path, export: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="DST must not be SRC"):
        convert(tiny_path, tiny_path / "." / "x" / "..", "bf16")
    before = contents(export)
    with pytest.raises(CheckpointError, match="must not exist or be an empty directory; it is in use"):
        convert(tiny_path, export, "bf16")
    assert contents(export) == before


@pytest.mark.parametrize("companion", ["_scale", "_amax", "_outer_scale_denominator", source.DIGEST])
def test_a_missing_companion_is_named(companion: str, export: Path, tmp_path: Path) -> None:
    path = changed(export, tmp_path / "export", lambda t: t.pop(W13 + companion), files="source_scales")
    with pytest.raises(CheckpointError, match=rf"layers\.3\.mlp\.experts\.w13_weight{companion} must be present"):
        convert(path, tmp_path / "new", "release")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]


def test_missing_files_beside_are_named(export: Path, tmp_path: Path) -> None:
    shutil.copytree(export, tmp_path / "export")
    (tmp_path / "export" / source.SCALES_INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"source_scales\.safetensors must be present; it is missing"):
        convert(tmp_path / "export", tmp_path / "new", "release")


def test_a_denominator_of_another_recipe_is_named(export: Path, tiny_path: Path, tmp_path: Path) -> None:
    key = f"{W13}_outer_scale_denominator"
    for files, source_path, to in (("source_scales", export, "release"), ("model", tiny_path, "bf16")):
        path = changed(source_path, tmp_path / files, lambda t: t.update({key: torch.tensor(1000.0)}), files=files)
        with pytest.raises(CheckpointError, match=r"w13_weight_outer_scale_denominator must be 1536 or 2688; got 1000"):
            convert(path, tmp_path / "new", to)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_bytes", [reader.GROUP_BYTES, 3 * 2**14])
def test_values_that_are_not_finite_are_named(
    group_bytes: int, export: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GROUP_BYTES", group_bytes)

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MXFP8_W2][11, 0, :2] = torch.nan
        tensors[MXFP8_W2][11, 1, 0] = -torch.inf

    path = changed(export, tmp_path / "nan", poison)
    with pytest.raises(FormatError, match=rf"{MXFP8_W2} must be finite; got non-finite values \(expert 11: 3\)"):
        convert(path, tmp_path / "new", "release")
    path = changed(tiny_path, tmp_path / "inf", lambda t: t[f"{W13}_amax"][13].fill_(torch.inf))
    with pytest.raises(FormatError, match=rf"{W13} must be finite; got non-finite values \(expert 13: \d+\)"):
        convert(path, tmp_path / "new", "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inf", "nan"]


def test_names_of_transformers_are_refused(export: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(layout.TEXT_PREFIX)]:
            tensors[layout.hf_name(name)] = tensors.pop(name)

    path = changed(export, tmp_path / "renamed", rename)
    with pytest.raises(CheckpointError, match=r"model\.llm\.embed\.weight must be present; it is missing"):
        convert(path, tmp_path / "new", "release")


# A disk and a process that end too early


def test_a_disk_without_room_is_noticed_first(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(CheckpointError, match=r"must be on a disk with 0\.00\d GB free; got 0\.001 GB"):
        convert(tiny_path, tmp_path / "new", "bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fills_or_fails_while_writing(
    number: int, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def pwrite(descriptor: int, buffer: memoryview, offset: int) -> int:
        nonlocal written
        written += len(buffer)
        if written > 3 * 10**6:
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffer, offset)

    real = os.pwrite
    monkeypatch.setattr(tensor_file.os, "pwrite", pwrite)
    error = CheckpointError if number == errno.ENOSPC else OSError
    with pytest.raises(error, match="the disk is full" if number == errno.ENOSPC else "new"):
        convert(tiny_path, tmp_path / "new", "bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of 73 MB, 234 MB in BF16."""
    return write_release(tmp_path_factory.mktemp("wide") / "release", experts=12)


def started(source_path: Path, target: Path) -> subprocess.Popen[str]:
    """A conversion in a process of its own, in the middle of writing."""
    command = [sys.executable, "-m", "inkling_rl.cli", "convert", str(source_path), str(target), "--to", "bf16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 60
    while not list(target.parent.glob(f".{target.name}.partial-*/model-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    return process


def test_a_killed_conversion_leaves_no_checkpoint_and_the_next_one_clears_up(wide: Path, tmp_path: Path) -> None:
    process = started(wide, tmp_path / "new")
    process.kill()
    process.communicate()
    assert not (tmp_path / "new").exists() and len(list(tmp_path.glob(".new.partial-*"))) == 1
    convert(wide, tmp_path / "new", "bf16")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_ctrl_c_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    process = started(wide, tmp_path / "new")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 2) and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_another_conversion_at_work_is_left_alone(tiny_path: Path, tmp_path: Path) -> None:
    with directory.new_directory(tmp_path / "new") as partial:
        convert(tiny_path, tmp_path / "new", "bf16")
        assert partial.is_dir()
        shutil.rmtree(tmp_path / "new")
        (partial / "file").touch()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]
    with pytest.raises(CheckpointError, match="it is in use"), directory.new_directory(tmp_path / "late"):
        convert(tiny_path, tmp_path / "late", "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["late", "new"]


PEAK = """
import re, sys
from pathlib import Path
from inkling_rl.checkpoint.convert import convert
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
small, wide, target = map(Path, sys.argv[1:])
for number, source in enumerate((small, wide)):
    convert(source, target / f"bf16-{number}", "bf16", check=True)
    convert(target / f"bf16-{number}", target / f"back-{number}", "release", check=True)
    print(peak())
"""


def test_memory_does_not_grow_with_the_checkpoint(tiny_path: Path, wide: Path, tmp_path: Path) -> None:
    """Peak resident size, everything counted, of a process that converts 4 MB and then 234 MB, there and back."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(tiny_path), str(wide), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    small, large = map(float, result.stdout.split())
    assert large - small < 120, (small, large)


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "inkling_rl.cli", "convert", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_command_shows_what_it_does_and_ends_with_one_line(tiny_path: Path, tmp_path: Path) -> None:
    shown = command(str(tiny_path), str(tmp_path / "new"), "--to", "bf16", "--layers", "0-2,5", "--check")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "convert to bf16" in lines[0] and "layer 5 (4/4): mxfp8 -> bf16, 32 expert matrices" in lines[4]
    assert lines[-1].startswith(f"result: {tmp_path / 'new'} (bf16), 0.01 GB in ") and "checked in" in lines[-1]
    again = command(str(tiny_path), str(tmp_path / "new"), "--to", "bf16")
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "it is in use" in again.stderr


def test_a_failed_check_is_status_1(tiny: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{W13}_scale"].view(torch.uint8)[4, 0, 0] = 0
        tensors[W13][4, 0, :8] = 0x77

    foreign = changed(tiny.path, tmp_path / "foreign", change)
    result = command(str(foreign), str(tmp_path / "new"), "--to", "bf16", "--check")
    assert result.returncode == 1 and "check failed: model-" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()
