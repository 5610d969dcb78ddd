"""`draft train` from command to files: what is written, what continues, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import tiny_config
from inkling_rl.draft.checkpoint import DraftCheckpoint
from inkling_rl.draft.manifest import MANIFEST_FILE, Manifest
from inkling_rl.draft.shape import PREFIX, standalone_config
from trainer.dataset import DataError
from trainer.draft import completions as made
from trainer.draft.completions import TOKEN_COLUMNS, Completion, Sampling, load_completions
from trainer.draft.loop import Plan, StepResult, Training
from trainer.draft.run import INTERRUPTED, Job, measure_draft, placement, split, train
from trainer.draft.target import Target

CPU = torch.device("cpu")


def write_tokens(path: Path, count: int = 24) -> Path:
    """Completions as an engine would have given them; every second prompt twice."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 500, (20,), generator=generator).tolist()
        prompt = [number // 2 + 1, 5, 7] if number % 4 < 2 else ids[:3]
        rows.append(json.dumps(dict(zip(TOKEN_COLUMNS, (prompt, ids[3 : 8 + number % 9]), strict=True))))
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens.jsonl")


@pytest.fixture
def job(checkpoint: Path, tokens: Path, tmp_path: Path) -> Job:
    plan = Plan(num_epochs=2, batch_size=8, learning_rate=1e-3, max_anchors=3)
    return Job(checkpoint=str(checkpoint), data=str(tokens), out=tmp_path / "draft", plan=plan)


def tensors(path: Path, target: Path) -> dict[str, torch.Tensor]:
    return dict(DraftCheckpoint.open(path, Checkpoint.open(target).config).tensors())


def test_a_draft_of_its_own_is_written_and_trained_further(job: Job, checkpoint: Path, tmp_path: Path) -> None:
    assert train(job) == 0
    first = tensors(job.out, checkpoint)
    start = tensors(checkpoint, checkpoint)
    assert first.keys() == start.keys()
    assert all(value.dtype == torch.bfloat16 for value in first.values())
    changed = {name for name, value in first.items() if not torch.equal(value, start[name])}
    assert {"fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.joint_proj.weight"} <= changed
    assert not (tmp_path / "draft.training").exists()
    assert train(replace(job, draft=str(job.out), out=tmp_path / "second")) == 0
    contents = json.loads((tmp_path / "second" / MANIFEST_FILE).read_text())
    assert (contents["version"], contents["parent_version"]) == (2, 1)
    first_manifest = Manifest.read(job.out)
    assert first_manifest is not None and first_manifest.version == 1
    assert contents["tensors"].keys() == first.keys()
    assert contents["training"]["data"] == "tokens.jsonl" and str(tmp_path) not in json.dumps(contents)
    assert 1 <= contents["worth"]["tokens_per_step"] <= 8
    second = tensors(tmp_path / "second", checkpoint)
    assert not torch.equal(second["fc.weight"], first["fc.weight"])


def test_a_bundled_draft_changes_nothing_else(job: Job, checkpoint: Path) -> None:
    assert train(replace(job, is_bundled=True, is_fresh=True)) == 0
    before, after = Checkpoint.open(checkpoint), Checkpoint.open(job.out)
    after.check()
    assert after.config == before.config and after.shards.keys() == before.shards.keys()
    for name, file in before.shards.items():
        assert after.shards[name].name == file.name
        if not name.startswith(PREFIX):
            assert torch.equal(
                before.tensor(name).reshape(-1).view(torch.uint8), after.tensor(name).reshape(-1).view(torch.uint8)
            )
    names = {file.name for file in checkpoint.iterdir()}
    assert {file.name for file in job.out.iterdir()} == names | {MANIFEST_FILE}
    for name in names - {file.name for file in before.shards.values()}:
        assert (job.out / name).read_bytes() == (checkpoint / name).read_bytes(), name
    contents = json.loads((job.out / MANIFEST_FILE).read_text())
    assert contents["version"] == 1 and contents["parent_version"] is None


def test_a_checkpoint_without_a_draft_gets_one(job: Job, checkpoint: Path, tmp_path: Path) -> None:
    bare, shape = tmp_path / "bare", tmp_path / "shape"
    shutil.copytree(checkpoint, bare)
    config = json.loads((bare / "config.json").read_text())
    without = {key: value for key, value in config.items() if not key.startswith("dspark_")}
    (bare / "config.json").write_text(json.dumps(without))
    source = Checkpoint.open(checkpoint)
    from safetensors.torch import save_file

    kept = {name: source.tensor(name) for name in source.shards if not name.startswith(PREFIX)}
    for file in [*bare.glob("*.safetensors"), bare / "model.safetensors.index.json"]:
        file.unlink()
    save_file(kept, bare / "model.safetensors")
    with pytest.raises(CheckpointError, match="must describe a draft"):
        train(replace(job, checkpoint=str(bare), is_fresh=True))
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(standalone_config(config)))
    assert train(replace(job, checkpoint=str(bare), draft=str(shape), is_fresh=True, is_bundled=True)) == 0
    Checkpoint.open(job.out).check()
    assert Checkpoint.open(job.out).config == config
    assert tensors(job.out, job.out).keys() == tensors(checkpoint, checkpoint).keys()


def test_ctrl_c_keeps_the_state_and_the_same_command_ends_alike(
    job: Job, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, handler = replace(job, out=tmp_path / "whole"), signal.getsignal(signal.SIGINT)
    assert train(whole) == 0
    advance = Training.advance

    def interrupted(self: Training) -> StepResult:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", interrupted)
        assert train(job) == INTERRUPTED
    assert "interrupted at step 3/" in capfd.readouterr().out
    assert not job.out.exists() and (tmp_path / "draft.training" / "state.pt").is_file()
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(ValueError, match=r"--data must be that of the training in .*draft\.training"):
        train(replace(job, data=str(write_tokens(tmp_path / "other.jsonl"))))
    assert train(job) == 0
    assert "continued at step 3" in capfd.readouterr().out
    one, other = tensors(whole.out, checkpoint), tensors(job.out, checkpoint)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_was_sampled_is_not_sampled_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(Checkpoint.open(checkpoint), (2, 5), CPU, torch.float32)
    sampling = Sampling(num_completions=10, batch_size=3, max_tokens=3)

    def load(cache: Path | None, seed: int = 0) -> list[Completion]:
        return load_completions("arithmetic/train", target, checkpoint, sampling, seed, cache)

    whole = load(None)
    assert len(whole) == len({c.prompt for c in whole}) == 10 and all(1 <= len(c.tokens) <= 3 for c in whole)
    assert load(None, seed=1) != whole
    cache = tmp_path / "completions.jsonl"
    assert load(cache) == whole
    # Killed in the fifth line: one whole batch of three is left.
    lines = cache.read_text().split("\n")
    cache.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    sampled: list[int] = []
    complete = Target.complete

    def counted(self: Target, prompts: torch.Tensor, *rest: Any) -> list[list[int]]:
        sampled.append(len(prompts))
        return complete(self, prompts, *rest)

    monkeypatch.setattr(Target, "complete", counted)
    assert load(cache) == whole and sampled == [3, 3, 1]
    assert load(cache) == whole and sampled == [3, 3, 1]
    assert made._whole(7, [3, 3, 3, 1]) == 2


def test_sampling_follows_the_targets_distribution(checkpoint: Path) -> None:
    """First tokens of many completions of one prompt against the softmax, and a second token after a forced first."""
    target = Target.load(Checkpoint.open(checkpoint), (2, 5), CPU, torch.float32)
    prompt = torch.arange(1, 9)
    drawn = target.complete(prompt.expand(2000, -1), 0.5, 1, stop_token=263, seed=3)
    counts = torch.bincount(torch.tensor([row[0] for row in drawn]), minlength=500).double()
    expected = (target.logits(target.states(prompt[None]).final[0, -1]) / 0.5).softmax(-1).double() * 2000
    likely = expected > 5
    pooled = torch.stack([torch.cat([x[likely], x[~likely].sum()[None]]) for x in (counts, expected)])
    statistic = float(((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum())
    assert likely.sum() > 10
    # Chi-square: mean k, variance 2 k for k degrees of freedom.
    freedom = int(likely.sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    # Cached steps continue what they began: greedy, against whole passes.
    ids = prompt.tolist()
    for token in target.complete(prompt[None], 1e-4, 6, stop_token=263, seed=0)[0]:
        assert token == int(target.logits(target.states(torch.tensor([ids])).final[0, -1]).argmax())
        ids.append(token)


def test_no_prompt_is_trained_on_and_measured_with() -> None:
    completions = [Completion((number // 3,), (number, 1)) for number in range(100)]
    train_part, held_out = split(completions, seed=4)
    assert not {c.prompt for c in train_part} & {c.prompt for c in held_out}
    assert sorted([*train_part, *held_out]) == sorted(completions) and 5 <= len(held_out) <= 10
    assert split(completions, seed=4) == (train_part, held_out) != split(completions, seed=5)
    assert split(completions[:5], seed=0) == (completions[:5], [])


def test_a_draft_on_disk_is_measured(job: Job) -> None:
    def worth(num_tokens: int | None) -> Any:
        return measure_draft(
            job.checkpoint, job.data, draft=None, num_tokens=num_tokens, sampling=Sampling(), seed=0, device=None,
            dtype=None,
        )  # fmt: skip

    assert len(worth(None).acceptance) == 7
    assert len(worth(2).acceptance) == 2 and 1 <= worth(2).tokens_per_step <= 3
    with pytest.raises(CheckpointError, match="num_tokens must be 1 to 7"):
        worth(8)


def test_the_commands_do_what_their_options_say(job: Job, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "inkling_rl.cli", "draft", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    shown = run(
        "train", job.checkpoint, "--data", job.data, "--out", str(job.out), "--fresh", "--num-epochs", "1",
        "--batch-size", "6", "--micro-batch-size", "2", "--learning-rate", "1e-3", "--max-anchors", "2", "--seed", "3",
    )  # fmt: skip
    assert "result:" in shown.splitlines()[-1] and "version 1" in shown
    training = json.loads((job.out / MANIFEST_FILE).read_text())["training"]
    plan = training["plan"]
    assert (plan["batch_size"], plan["micro_batch_size"], plan["max_anchors"], plan["seed"]) == (6, 2, 2, 3)
    assert plan["coefficients"] == {"cross_entropy": 0.1, "distance": 0.9, "confidence": 1.0}
    assert training["num_steps"] == round(training["num_completions"] / 6)
    shown = run("measure", job.checkpoint, "--draft", str(job.out), "--data", job.data, "--num-tokens", "2")
    assert re.match(r"[12]\.\d{3} tokens per verification step, acceptance by position 0\.\d{3} 0\.\d{3}\n", shown)


BAD_DATA = {
    "not a list": (
        {"prompt_token_ids": [1], "token_ids": "abc"},
        "token_ids must be a list of token ids from 0 to 499",
    ),
    "beyond the vocabulary": ({"prompt_token_ids": [1], "token_ids": [500]}, r"row 1 of .* has \[500\]"),
    "prompt only in tokens": ({"token_ids": [4]}, "prompt_token_ids must be a list .* has None"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_tokens_are_refused(job: Job, tmp_path: Path, kind: str) -> None:
    row, message = BAD_DATA[kind]
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1], "token_ids": [2, 3]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        train(replace(job, data=str(path)))


def test_bad_input_is_refused_before_anything_is_loaded(job: Job, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data must be arithmetic/train, .* got 'nowhere\.jsonl'"):
        train(replace(job, data="nowhere.jsonl"))
    (tmp_path / "texts.jsonl").write_text('{"question": "1+1"}\n')
    with pytest.raises(DataError, match=r"prompt_token_ids and token_ids, or prompt, .* has question\. Rename"):
        train(replace(job, data=str(tmp_path / "texts.jsonl")))
    with pytest.raises(ValueError, match="--device must be cpu, or cuda on a machine with such a GPU; got tpu"):
        placement("tpu", None)
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(CheckpointError, match="must not exist or be an empty directory"):
        train(replace(job, out=used))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(standalone_config(tiny_config()) | {"num_target_layers": 12}))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers 6; got one for 12\. Take the draft of this"):
        train(replace(job, draft=str(other), is_fresh=True))
    assert not list(tmp_path.glob("draft*"))
