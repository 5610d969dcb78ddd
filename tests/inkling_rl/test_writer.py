"""Writing a checkpoint: byte-exact round trips, and nothing visible when it fails."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.directory import new_directory
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import MAX_SHARD_BYTES, tiny_config, tiny_quant_config, write_tiny
from inkling_rl.checkpoint.writer import export_release, write_checkpoint
from inkling_rl.formats.errors import FormatError


def stored(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, checkpoint.tensor(name)) for name in checkpoint.shards)


def extra(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: value for name, value in stored(checkpoint) if not name.startswith(layout.TEXT_PREFIX)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_then_export_is_the_identity_on_bytes(tiny: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    source = {name: value for layer in range(6) for name, value in tiny.companions(layer).items()}
    path = export_release(
        tmp_path / "again",
        tiny.config,
        tiny.quant_config,
        dict(tiny.iter_hf(dtype)),
        extra(tiny),
        source=source,
        max_shard_bytes=MAX_SHARD_BYTES,
    )
    names = sorted(p.name for p in tiny.path.glob("*.safetensors*"))
    assert len(names) == 3 and sorted(p.name for p in path.glob("*.safetensors*")) == names
    for name in [*names, "config.json", "hf_quant_config.json"]:
        assert (path / name).read_bytes() == (tiny.path / name).read_bytes(), name


def test_without_the_source_scales_values_are_kept(tiny: Checkpoint, tmp_path: Path) -> None:
    state = dict(tiny.iter_hf(torch.float32))
    path = export_release(tmp_path / "again", tiny.config, tiny.quant_config, state, extra(tiny))
    again = dict(Checkpoint.open(path).iter_hf(torch.float32))
    assert all(again[name].equal(value) for name, value in state.items())


def test_a_changed_expert_changes_only_its_own_bytes(tiny: Checkpoint, tmp_path: Path) -> None:
    state = dict(tiny.iter_hf(torch.float32))
    state["model.layers.3.mlp.experts.gate_up_proj"][7] *= 1.5
    matrix = "model.llm.layers.3.mlp.experts.w13_weight"
    source = {name: value for layer in range(6) for name, value in tiny.companions(layer).items()}
    source = {name: value for name, value in source.items() if not name.startswith(f"{matrix}_")}
    path = export_release(tmp_path / "new", tiny.config, tiny.quant_config, state, extra(tiny), source=source)
    new = Checkpoint.open(path)
    changed = [n for n in tiny.shards if not raw(new.tensor(n)).equal(raw(tiny.tensor(n)))]
    assert changed and all(n.startswith(matrix) for n in changed)
    ratio = new.tensor(f"{matrix}_amax") / tiny.tensor(f"{matrix}_amax")
    assert ratio[7] == pytest.approx(1.5) and ratio[torch.arange(16) != 7].tolist() == pytest.approx([1.0] * 15)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_the_padded_rows_of_the_unembedding_are_zero(tiny: Checkpoint) -> None:
    unembed = tiny.tensor("model.llm.unembed.weight")
    assert unembed.shape[0] == 512 and not unembed[500:].any() and unembed[:500].any(dim=1).all()


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tiny: Checkpoint, tmp_path: Path) -> None:
    same, other = write_tiny(tmp_path / "same", seed=0), write_tiny(tmp_path / "other", seed=1)
    for shard in tiny.path.glob("*"):
        assert (same / shard.name).read_bytes() == shard.read_bytes()
    differing = Checkpoint.open(other)
    same_values = [n for n, v in stored(tiny) if raw(v).equal(raw(differing.tensor(n)))]
    assert all(n.endswith("_outer_scale_denominator") for n in same_values)


def test_the_index_says_where_everything_is(tiny: Checkpoint) -> None:
    index = json.loads((tiny.path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for name, path in sorted(tiny.shards.items())}
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in stored(tiny))
    assert all((tiny.path / s).stat().st_size < MAX_SHARD_BYTES for s in set(index["weight_map"].values()))


def interrupted(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for n, item in enumerate(stored(checkpoint)):
        if n == 50:
            raise KeyboardInterrupt
        yield item


@pytest.mark.parametrize("case", ["interrupted", "missing", "extra", "twice", "misshapen", "non-finite", "unknown"])
def test_a_write_that_fails_leaves_nothing(case: str, tiny: Checkpoint, tmp_path: Path) -> None:
    config, quant = tiny_config(), tiny_quant_config()
    tensors = dict(stored(tiny))
    state = dict(tiny.iter_hf(torch.bfloat16))
    target = tmp_path / "new"
    error: type[BaseException] = CheckpointError
    if case == "interrupted":
        error, call = KeyboardInterrupt, lambda: write_checkpoint(target, config, quant, interrupted(tiny), {}, 10**5)
    elif case == "missing":
        call = lambda: write_checkpoint(target, config, quant, list(tensors.items())[1:])
    elif case == "extra":
        call = lambda: write_checkpoint(target, config, quant, [*tensors.items(), ("more", torch.ones(1))])
    elif case == "twice":
        call = lambda: write_checkpoint(target, config, quant, [*tensors.items(), *list(tensors.items())[:1]])
    elif case == "misshapen":
        call = lambda: write_checkpoint(
            target, config, quant, (tensors | {"model.llm.norm.weight": torch.ones(64).bfloat16()}).items()
        )
    elif case == "non-finite":
        state["model.layers.5.mlp.experts.down_proj"][3, 0, 0] = torch.inf
        error, call = FormatError, lambda: export_release(target, config, quant, state, extra(tiny))
    else:
        state["model.layers.0.self_attn.q_proj.linear.lora_A.weight"] = torch.ones(1)
        call = lambda: export_release(target, config, quant, state, extra(tiny))
    with pytest.raises(error):
        call()
    assert list(tmp_path.iterdir()) == []


def test_files_do_not_depend_on_the_order_in_which_tensors_come(tiny: Checkpoint, tmp_path: Path) -> None:
    backwards = reversed(list(stored(tiny)))
    path = write_checkpoint(
        tmp_path / "again", tiny.config, tiny.quant_config, backwards, max_shard_bytes=MAX_SHARD_BYTES
    )
    for file in path.iterdir():
        assert file.read_bytes() == (tiny.path / file.name).read_bytes(), file.name


def test_a_tensor_is_written_as_it_comes_and_held_no_longer(tiny: Checkpoint, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name in tiny.shards:
            assert all(reference() is None for reference in alive), name
            value = tiny.tensor(name)
            alive.append(weakref.ref(value))
            yield name, value
            del value

    write_checkpoint(tmp_path / "again", tiny.config, tiny.quant_config, one_by_one())
    assert len(alive) == len(tiny.shards)


def test_the_files_are_those_of_the_library(tiny: Checkpoint, tmp_path: Path) -> None:
    for file in sorted(tiny.path.glob("*.safetensors")):
        save_file(load_file(file), tmp_path / file.name, metadata={"format": "pt"})
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_errors_name_the_tensor(tiny: Checkpoint, tmp_path: Path) -> None:
    state = dict(tiny.iter_hf(torch.bfloat16))
    state["model.layers.5.mlp.experts.down_proj"][3, 0, :2] = torch.nan
    with pytest.raises(
        FormatError, match=r"model\.llm\.layers\.5\.mlp\.experts\.w2_weight must be finite.*expert 3: 2"
    ):
        export_release(tmp_path / "new", tiny.config, tiny.quant_config, state, extra(tiny))
    del state["model.layers.5.mlp.experts.down_proj"]
    with pytest.raises(CheckpointError, match=r"state: model\.layers\.5\.mlp\.experts\.down_proj must be present"):
        export_release(tmp_path / "new", tiny.config, tiny.quant_config, state, extra(tiny))


def test_a_directory_in_use_is_left_alone(tiny: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="must not exist or be an empty directory; it is in use"):
        write_tiny(tmp_path / "used")
    assert [p.name for p in tmp_path.rglob("*")] == ["used", "notes.txt"]
    (tmp_path / "empty").mkdir()
    Checkpoint.open(write_tiny(tmp_path / "empty")).check()
    Checkpoint.open(write_tiny(tmp_path / "deep" / "er" / "tiny")).check()


def test_a_failure_takes_away_the_parents_that_were_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "mine" / "deep" / "er" / "new") as partial:
        (partial / "file").touch()
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="GB free"), new_directory(tmp_path / "a" / "b" / "new", 10**18):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]
