"""Drafts on disk: both forms read alike, and everything that does not fit is refused with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import tiny_config, write_tiny
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.shape import PREFIX, DraftShape, standalone_config

Config = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("draft") / "tiny", seed=5)


def write_standalone(source: Path, directory: Path) -> Path:
    """The bundled draft in a directory of its own."""
    directory.mkdir()
    bundled = DraftCheckpoint.open(source, Checkpoint.open(source).config)
    save_file(dict(bundled.tensors()), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(standalone_config(bundled.source.config)))
    return directory


@pytest.fixture(scope="module")
def standalone(target: Path) -> Path:
    return write_standalone(target, target.parent / "own")


def test_both_forms_hold_the_same_draft(target: Path, standalone: Path) -> None:
    config = Checkpoint.open(target).config
    bundled, own = DraftCheckpoint.open(target, config), DraftCheckpoint.open(standalone, config)
    assert bundled.shape == own.shape
    assert bundled.shape.target_layers == (2, 5) and bundled.shape.block_size == 7 and bundled.shape.rank == 16
    first, second = dict(bundled.tensors()), dict(own.tensors())
    assert len(first) == 2 * 11 + 3 + 4 + 2 and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(name.startswith(PREFIX) for name in first)


def test_opening_a_draft_imports_nothing_heavy() -> None:
    program = "import sys, inkling_rl.draft.checkpoint; print('torch' in sys.modules, 'vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def changed(source: Path, directory: Path, change: Callable[[Config, dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    change(config, tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def narrower(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """A whole draft, for a hidden size of 64."""
    config["hidden_size"] = 64
    for name, value in tensors.items():
        if name == "markov_head.joint_proj.weight":
            value = value[:, : 2 * 16 + 64]
        elif name == "confidence_head.proj.weight":
            value = value[:, : 64 + 16]
        elif name == "fc.weight":
            value = value[:64, :128]
        elif value.shape[-1] == 128 and not name.endswith("down_proj.weight"):
            value = value[..., :64]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value = value[:64]
        tensors[name] = value.clone()


def vocabulary(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    config["vocab_size"] = 1024
    for name in ("markov_w1", "markov_w2"):
        tensors[f"markov_head.{name}.weight"] = tensors[f"markov_head.{name}.weight"].repeat(2, 1)


def setting(key: str, value: Any) -> Callable[[Config, dict[str, torch.Tensor]], None]:
    return lambda config, tensors: config.update({key: value})


def without(*names: str) -> Callable[[Config, dict[str, torch.Tensor]], None]:
    return lambda config, tensors: [tensors.pop(name) for name in names]  # type: ignore[return-value]


BROKEN: dict[str, tuple[Callable[[Config, dict[str, torch.Tensor]], None], str]] = {
    "hidden size": (narrower, r"with hidden_size 128; got one for 64\. Take the draft of this"),
    "vocabulary": (vocabulary, "with vocab_size 512; got one for 1024"),
    "target layers": (setting("num_target_layers", 8), "with num_hidden_layers 6; got one for 8"),
    "tap beyond the target": (
        setting("target_layer_ids", [2, 6]),
        r"layers of the target's 0-5; got \[2, 6\]",
    ),
    "taps out of order": (setting("target_layer_ids", [5, 2]), "increasing layers"),
    "taps do not fit fc": (setting("target_layer_ids", [1, 2, 5]), r"fc.weight must have shape \[128, 384\]"),
    "no RNN": (
        without("markov_head.joint_proj.weight", "markov_head.joint_proj.bias"),
        r"markov_head.joint_proj.weight must be present; it is missing \(2 in all\)",
    ),
    "another head": (setting("markov_head_type", "vanilla"), "markov_head_type must be rnn; got 'vanilla'"),
    "no mask": (setting("mask_token_id", 512), "a row of the embedding, 0-511; got 512"),
    "no block size": (lambda config, tensors: config.pop("block_size"), "block_size must be 1 or more; got None"),
    "another dtype": (setting("dtype", "float32"), "must have dtype float32; got bfloat16"),
    "no draft": (setting("model_type", "qwen3"), "must describe a draft"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_draft_that_does_not_fit_is_refused(standalone: Path, target: Path, tmp_path: Path, kind: str) -> None:
    change, message = BROKEN[kind]
    path = changed(standalone, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=message):
        DraftCheckpoint.open(path, Checkpoint.open(target).config)


def test_a_bundled_draft_is_refused_like_one_of_its_own(target: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(target, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dspark_markov_rank": 32}))
    with pytest.raises(CheckpointError, match=r"model.dspark.markov_head.* must have shape"):
        DraftCheckpoint.open(directory, config)
    for key in [key for key in config if key.startswith("dspark_")]:
        del config[key]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"name one in rollout\.draft\.path"):
        DraftCheckpoint.open(directory, config)


@pytest.mark.parametrize("num_tokens", [0, 8])
def test_more_tokens_than_the_block_are_refused(standalone: Path, target: Path, num_tokens: int) -> None:
    draft = DraftCheckpoint.open(standalone, Checkpoint.open(target).config)
    draft.check_tokens(1)
    draft.check_tokens(7)
    with pytest.raises(CheckpointError, match=rf"num_tokens must be 1 to 7, .*; got {num_tokens}"):
        draft.check_tokens(num_tokens)


def test_the_tiny_draft_has_a_shape() -> None:
    assert DraftShape.from_config(tiny_config()).confidence_sees_token
