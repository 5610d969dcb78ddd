"""The command line: frozen commands and options, quick help, exit statuses."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from inkling_rl.cli import app

FROZEN = {
    "train": {"recipe", "overrides", "resume", "dry_run"},
    "init": {"directory", "seed", "pretrain"},
    "serve": {"model", "recipe", "overrides", "adapter", "host", "port", "vllm_args", "log"},
    "verify": {"checkpoint", "adapter", "prompts", "dtype", "num_prompts", "max_tokens", "tolerance", "report"},
    "convert": {"source", "target", "to", "layers", "check"},
    "draft": set(),
}
SAMPLING = {"num_completions", "temperature", "max_tokens", "max_prompt_length", "effort", "seed", "device", "dtype"}
FROZEN_DRAFT = {
    "train": SAMPLING
    | {"checkpoint", "data", "out", "draft", "fresh", "bundle", "num_epochs", "batch_size", "micro_batch_size"}
    | {"learning_rate", "max_anchors"},
    "measure": SAMPLING | {"checkpoint", "data", "draft", "num_tokens"},
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inkling_rl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_commands_and_options_are_frozen() -> None:
    group = typer.main.get_command(app)
    found = {name: {p.name for p in command.params} for name, command in group.commands.items()}  # type: ignore[attr-defined]
    assert found == FROZEN
    draft = group.commands["draft"]  # type: ignore[attr-defined]
    assert {name: {p.name for p in command.params} for name, command in draft.commands.items()} == FROZEN_DRAFT


def test_help_answers_at_once() -> None:
    """Half a second of the processor's time, whatever else the machine does; the best of three."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "train" in run("--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quickstart.yaml", "-s", "trainer.lerning_rate=1"], "Did you mean trainer.learning_rate?"),
        (["train", "absent.yaml"], "absent.yaml is none"),
        (["train"], "give a recipe or --resume RUN"),
        (["train", "quickstart.yaml", "--resume", "x"], "give a recipe or --resume RUN"),
        (["train", "--resume", "no-such-run"], "holds no recipe.yaml"),
        (["init", "somewhere", "--pretrain", "chess"], "must be arithmetic; got chess"),
        (["init", "/proc/no/such/place"], "must be usable; got: No such file or directory"),
        (["verify", "x", "--report", "/proc/no/such/place.json"], "must be in an existing directory"),
        (["serve"], "give a checkpoint or --recipe"),
        (["serve", "x", "--adapter", "y"], "must be NAME=DIR"),
        (["serve", "x", "--vllm-args", "[1]"], "must be a JSON object"),
        (["convert", "x"], "Missing argument 'DST'"),
        (["convert", "x", "y"], "Missing option '--to'"),
        (["convert", "x", "y", "--to", "fp4"], "'fp4' is not one of 'bf16', 'release'"),
        (["convert", "x", "y", "--to", "bf16", "--layers", "3-1"], "must be numbers and ranges like 0-3,7; got 3-1"),
        (["convert", "x", "y", "--to", "bf16", "--layers", ""], "must be numbers and ranges like 0-3,7"),
        (["convert", "x", "y", "--to", "bf16", "--layers", "0-9999999999"], "must be numbers and ranges like 0-3,7"),
        (["convert", "no-such-model", "y", "--to", "bf16"], "must be a checkpoint directory with a config.json"),
        (["draft", "train", "x"], "Missing option '--data'"),
        (["draft", "train", "no-such-model", "--data", "d", "--out", "/tmp/o"], "must be a checkpoint directory"),
        (["draft", "measure", "no-such-model", "--data", "d"], "must be a checkpoint directory"),
        (["frobnicate"], "No such command"),
    ],
)
def test_a_users_fault_is_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2, result
    assert message in result.stderr and "Traceback" not in result.stderr


def test_dry_run_accepts_what_ships_and_starts_nothing(tmp_path: Path) -> None:
    result = run("train", "inkling-2-small-lora-gsm8k.yaml", "--dry-run", "-s", f"logging.runs_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "not on this machine" in result.stdout and "200 steps of 1024 completions" in result.stdout
    assert not list(tmp_path.iterdir())


def test_dry_run_opens_the_draft_as_a_run_does(tmp_path: Path) -> None:
    refresh = ["-s", "rollout.draft={num_tokens: 7, refresh: {interval: 2}}", "-s", "trainer.num_steps=9"]
    result = run("train", "quickstart.yaml", "--dry-run", *refresh)
    assert result.returncode == 0, result.stderr
    assert "# rollout.draft: 7 tokens at a time from the draft in " in result.stdout
    assert "# rollout.draft.refresh: after every 2 steps, on the 512 completions of them" in result.stdout
    for setting, message in (
        ("rollout.draft.num_tokens=8", "rollout.draft.num_tokens must be 1 to 7"),
        (f"rollout.draft.path={tmp_path}", "must be a checkpoint directory with a config.json; found none"),
    ):
        refused = run("train", "quickstart.yaml", "--dry-run", "-s", setting)
        assert refused.returncode == 2 and message in refused.stderr, refused


def test_init_writes_a_checkpoint_and_refuses_a_used_directory(tmp_path: Path) -> None:
    from inkling_rl.checkpoint.reader import Checkpoint

    assert run("init", str(tmp_path / "tiny"), "--seed", "3").returncode == 0
    Checkpoint.open(tmp_path / "tiny").check()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    again = run("init", str(tmp_path / "tiny"))
    assert again.returncode == 2 and "must not exist or be an empty directory" in again.stderr
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
