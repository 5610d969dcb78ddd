"""PEFT directories: plain PEFT reads what we write, and what cannot be applied exactly is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora.files import CONFIG_FILE, WEIGHTS_FILE, read_adapter, write_adapter
from lora.model import adapter_state, attach
from lora.schema import AdapterError
from tests.lora.conftest import SIZES, logprobs, tiny_model
from tests.lora.test_model import randomised

TARGETS = ("q", "r", "gate", "o")
NAME = "base_model.model.model.layers.1.self_attn.q_proj.linear.lora_A.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    wrapped = randomised(tiny_model(), TARGETS)
    path = tmp_path_factory.mktemp("adapters") / "step-1"
    write_adapter(
        path, adapter_state(wrapped), rank=4, alpha=6.0, targets=TARGETS, base_model="tiny", fingerprint="a" * 64
    )
    return path, logprobs(wrapped)


@pytest.fixture()
def copy(written: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    path.mkdir()
    for file in written[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, path / WEIGHTS_FILE)


def edit_settings(path: Path, **changes: Any) -> None:
    settings = json.loads((path / CONFIG_FILE).read_text()) | changes
    (path / CONFIG_FILE).write_text(json.dumps(settings))


def test_equal_adapters_are_equal_bytes(written: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """With two entries of metadata, 12 files in a random order would all be equal once in 2,000 times."""
    state = load_file(written[0] / WEIGHTS_FILE)
    for number in range(12):
        path = write_adapter(
            tmp_path / str(number), state, rank=4, alpha=6.0, targets=TARGETS, base_model="tiny", fingerprint="a" * 64
        )
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            assert (path / file).read_bytes() == (written[0] / file).read_bytes()


def test_plain_peft_gives_the_same_logprobs(written: tuple[Path, torch.Tensor]) -> None:
    path, expected = written
    loaded = PeftModel.from_pretrained(tiny_model(), str(path)).eval()
    torch.testing.assert_close(logprobs(loaded), expected, rtol=0, atol=0)
    assert (logprobs(tiny_model()) - expected).abs().max() > 0.01


def test_an_adapter_read_from_disk_attaches_to_a_model(written: tuple[Path, torch.Tensor]) -> None:
    path, expected = written
    attached = attach(tiny_model(), read_adapter(path, SIZES))
    assert torch.equal(logprobs(attached), expected)
    with attached.disable_adapter():
        assert torch.equal(logprobs(attached), logprobs(tiny_model()))


def test_reading_gives_back_what_was_written(written: tuple[Path, torch.Tensor]) -> None:
    path, _ = written
    adapter = read_adapter(path, {"text_config": SIZES}, fingerprint="a" * 64)
    assert (adapter.rank, adapter.alpha, adapter.targets, adapter.base_model) == (4, 6.0, TARGETS, "tiny")
    stored = load_file(path / WEIGHTS_FILE)
    assert adapter.state.keys() == stored.keys() and len(stored) == 2 * 4 * 3
    assert all(torch.equal(adapter.state[name], stored[name]) for name in stored)
    assert [file.name for file in path.parent.iterdir()] == ["step-1"], "nothing half-written stays behind"


def test_names_of_the_full_class_are_accepted(copy: Path, written: tuple[Path, torch.Tensor]) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.model.layers", "model.model.language_model.layers")] = tensors.pop(name)

    edit_tensors(copy, rename)
    assert read_adapter(copy, SIZES).state.keys() == read_adapter(written[0], SIZES).state.keys()


def test_an_adapter_of_another_tool_with_suffix_targets_is_accepted(copy: Path) -> None:
    edit_settings(
        copy, target_modules=["q_proj.linear", "o_proj.linear"], use_dora=False, rank_pattern={}, revision=None
    )
    assert read_adapter(copy, SIZES).targets == TARGETS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora must be False; got True"),
        ({"use_rslora": True}, "use_rslora must be False"),
        ({"bias": "all"}, "bias must be 'none'; got 'all'"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern must be None"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters must be None"),
        ({"r": 8}, r"lora_A.weight must have shape \(8, 64\) \(rank 8\); got \(4, 64\)"),
        ({"r": None}, "r must be a number above 0; got None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_the_engine_cannot_apply_are_refused(copy: Path, change: dict[str, Any], message: str) -> None:
    edit_settings(copy, **change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(copy, SIZES)


def test_tensors_that_do_not_fit_are_refused_by_name(copy: Path) -> None:
    original = load_file(copy / WEIGHTS_FILE)
    cases: list[tuple[dict[str, torch.Tensor], list[str], str]] = [
        (
            {NAME.replace("q_proj", "sink_proj"): original[NAME]},
            [],
            "sink_proj.* must be a factor of",
        ),
        ({NAME.replace("layers.1", "layers.3"): original[NAME]}, [], "layers.3.* has no such module"),
        ({"base_model.model.lm_head.lora_A.weight": original[NAME]}, [], "lm_head.* must be a factor of"),
        ({NAME: torch.zeros(4, 32)}, [], r"must have shape \(4, 64\)"),
        ({NAME: torch.full((4, 64), float("nan"))}, [], "must hold finite numbers"),
        ({}, [NAME], "must be there beside its other factor"),
        ({}, list(original), "must hold tensors"),
    ]
    for added, removed, message in cases:
        tensors = {name: value for name, value in (original | added).items() if name not in removed}
        save_file({name: value.clone() for name, value in tensors.items()}, copy / WEIGHTS_FILE)
        with pytest.raises(AdapterError, match=message):
            read_adapter(copy, SIZES)


def test_another_base_model_is_refused(written: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(AdapterError, match="must have shape"):
        read_adapter(written[0], SIZES | {"hidden_size": 96})
    with pytest.raises(AdapterError, match=r"base_model_fingerprint must be that of the base model, bbbb.*of tiny"):
        read_adapter(written[0], SIZES, fingerprint="b" * 64)


def test_missing_and_damaged_files_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"must hold {CONFIG_FILE}"):
        read_adapter(tmp_path / "nowhere", SIZES)
    (copy / WEIGHTS_FILE).write_bytes((copy / WEIGHTS_FILE).read_bytes()[:200])
    with pytest.raises(AdapterError, match="must be a safetensors file"):
        read_adapter(copy, SIZES)
    (copy / CONFIG_FILE).write_text("{")
    with pytest.raises(AdapterError, match="must be JSON"):
        read_adapter(copy, SIZES)


def test_a_refused_write_leaves_the_older_adapter_alone(copy: Path) -> None:
    state = load_file(copy / WEIGHTS_FILE)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    broken = {
        "must have rank 8; got 4": (state, 8),
        "must be finite; got 256 values": (state | {NAME: torch.full((4, 64), float("inf"))}, 4),
        "must be a factor of a module": (state | {NAME.replace("q_proj", "k_proj"): state[NAME]}, 4),
        "must have both factors": ({NAME: state[NAME]}, 4),
        "must have tensors; got none": ({}, 4),
    }
    for message, (tensors, rank) in broken.items():
        with pytest.raises(AdapterError, match=message):
            write_adapter(copy, tensors, rank=rank, alpha=6.0, targets=TARGETS, base_model="tiny")
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    doubled = {name: 2 * value for name, value in state.items()}
    write_adapter(copy, doubled, rank=4, alpha=6, targets=TARGETS, base_model="x")
    assert torch.equal(load_file(copy / WEIGHTS_FILE)[NAME], 2 * state[NAME])
    assert [file.name for file in copy.parent.iterdir()] == ["copy"]
