"""The comparison of engine and transformers: its arithmetic, that it passes what is right and catches what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inkling_rl.arithmetic import rows
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import write_tiny
from inkling_rl.cli import main
from lora.files import Adapter, read_adapter
from rollout import verify
from rollout.agreement import Change, Differences, spread
from tests.rollout.test_service import random_adapter


def test_differences_count_positions_values_and_ties() -> None:
    expected = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.00005, -1.0], [-9.0, -9.0, -9.0]])
    counted = Differences()
    counted.add([{0: -1.1, 1: -2.2}, {1: -0.9, 2: -1.01}], expected, [0, 1, 2], num_prompt=2)
    report = counted.report()
    assert (report.prompt.num_values, report.generated.num_values, report.likeliest.num_values) == (1, 1, 4)
    assert report.prompt.max == pytest.approx(0.2, abs=1e-6)
    assert report.generated.max == pytest.approx(0.01, abs=1e-6)
    assert report.likeliest.mean == pytest.approx((0.1 + 0.2 + 0.10005 + 0.01) / 4, abs=1e-6)
    # Row 1: the engine prefers token 1, the reference token 2 by 0.00005; token 2 was generated.
    assert (report.argmax_disagreements, report.near_ties, report.greedy_agreement) == (1, 1, 1.0)
    assert report.argmax_agreement == 0.5


def part(value: float) -> dict[str, float]:
    return {"num_values": 1, "mean": value, "p99": value, "max": value}


def verdict(dtype: str, tolerance: float | None = None, **parts: Any) -> dict[str, Any]:
    report = {name: part(1e-6) for name in ("prompt", "generated", "likeliest")}
    return verify._with_verdict(
        {"dtype": dtype, "argmax_disagreements": 1, "near_ties": 1, **report, **parts}, tolerance
    )


def test_a_value_that_is_no_number_cannot_hide() -> None:
    assert torch.tensor(spread([0.1] * 99 + [float("nan")]).max).isnan()
    assert spread([float(n) for n in range(100)]).p99 == 99.0
    assert spread([]).num_values == 0
    assert verdict("float32")["ok"]
    for name in ("prompt", "generated", "likeliest"):
        assert not verdict("float32", **{name: part(float("nan"))})["ok"]
        assert not verdict("float32", **{name: part(2e-4)})["ok"]
        assert verdict("float32", 1e-3, **{name: part(2e-4)})["ok"]
    assert verdict("float32", near_ties=0)["reasons"] == ["the likeliest token differs where there is no near-tie"]


def test_bfloat16_is_measured_by_transformers_own() -> None:
    own = {"transformers_bfloat16": {"generated": part(0.01)}}
    assert verdict("bfloat16", generated=part(0.0119), **own)["ok"]
    assert not verdict("bfloat16", generated=part(0.0121), **own)["ok"]
    assert not verdict("bfloat16", 5e-3, generated=part(0.006), **own)["ok"]
    tail = verdict("bfloat16", generated=part(0.01) | {"p99": 0.016}, **own)
    assert tail["reasons"] == ["p99 |difference| is 0.016, above 1.5 x transformers' 0.01"]
    assert not verdict("bfloat16", generated=part(float("nan")), **own)["ok"]


def test_a_tolerance_of_zero_is_no_tolerance() -> None:
    assert verdict("float32", 0.0)["tolerance"] == 0.0


def test_changes_are_compared_at_the_real_tokens() -> None:
    change = Change()
    adapted, base = torch.tensor([[-1.0, -3.0], [0.0, 0.0]]), torch.tensor([[-1.0, -2.5], [0.0, 0.0]])
    change.add([{1: -3.1}], [{1: -2.5}], adapted, base, [0, 1])
    report = change.report()
    assert report.engine_mean == pytest.approx(0.6) and report.oracle_mean == pytest.approx(0.5)
    assert report.max_difference == pytest.approx(0.1)


class Run(NamedTuple):
    """What one engine gave for a checkpoint with an adapter, and with an adapter of zeros."""

    base: Path
    adapter: Adapter
    silent: Adapter
    with_adapter: tuple[Any, Any]
    with_silent: tuple[Any, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("verify")
    base = write_tiny(folder / "tiny", seed=0)
    checkpoint = Checkpoint.open(base)
    path = random_adapter(folder / "adapter", base, seed=1)
    silent = random_adapter(folder / "silent", base, seed=1, scale=0.0)
    prompts = verify._random_ids(checkpoint, 6, seed=0)
    with verify._engine(checkpoint, "float32", 4, {"max_num_batched_tokens": 48, "max_model_len": 128}) as llm:
        yield Run(
            base,
            read_adapter(path, checkpoint.config),
            read_adapter(silent, checkpoint.config),
            verify._run(llm, prompts, verify._lora_request(path), max_tokens=12),
            verify._run(llm, prompts[-2:], verify._lora_request(silent), max_tokens=4),
        )


def compare(run: Run, base: Path, adapter: Adapter, outputs: tuple[Any, Any]) -> dict[str, Any]:
    compared = verify._compare(Checkpoint.open(base), adapter, *outputs, "float32")
    return verify._with_verdict({"dtype": "float32"} | compared, None)


def test_engine_and_transformers_agree_with_and_without_an_adapter(run: Run) -> None:
    report = compare(run, run.base, run.adapter, run.with_adapter)
    assert report["ok"], report["line"]
    assert report["likeliest"]["max"] <= 1e-4
    lengths = [1, 7, 13, 19, 25, 32]
    assert report["prompt"]["num_values"] == 2 * sum(length - 1 for length in lengths)
    assert report["generated"]["num_values"] == 2 * 6 * 12
    change = report["adapter_change"]
    assert change["engine_mean"] > 0.1 and change["max_difference"] <= 1e-4
    assert report["line"].startswith("ok - engine against transformers in float32")


def test_other_weights_are_noticed(run: Run, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", seed=1)
    report = compare(run, other, run.adapter, run.with_adapter)
    assert not report["ok"] and "above 0.0001" in report["line"] and report["line"].startswith("FAILED")


def test_a_slightly_other_adapter_is_noticed(run: Run) -> None:
    name = "base_model.model.model.layers.3.self_attn.v_proj.linear.lora_B.weight"
    state = run.adapter.state | {name: run.adapter.state[name] * 1.01}
    assert not compare(run, run.base, run.adapter._replace(state=state), run.with_adapter)["ok"]


def test_an_adapter_that_changes_nothing_is_an_error(run: Run) -> None:
    report = compare(run, run.base, run.silent, run.with_silent)
    assert report["likeliest"]["max"] <= 1e-4
    assert report["reasons"] == ["the adapter changes nothing on one side"] and not report["ok"]


def test_the_command_answers_bad_input_with_status_2(run: Run, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1"}\n{"question": 2}\n')
    for arguments, message in (
        ([str(tmp_path)], "must be a checkpoint directory"),
        ([str(run.base), "--adapter", str(tmp_path)], "must hold adapter_config.json"),
        ([str(run.base), "--prompts", str(tmp_path / "absent.txt")], "must be a readable file of UTF-8 text"),
        ([str(run.base), "--prompts", str(tmp_path / "p.jsonl")], "p.jsonl:2 must be a JSON object with `prompt`"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["verify", *arguments])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_the_command_in_bfloat16_on_given_prompts(run: Run, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p.txt").write_text("347+586\n\nwhat is 12+30?\n")
    adapter = random_adapter(tmp_path / "adapter", run.base, seed=2)
    arguments = [str(run.base), "--adapter", str(adapter), "--prompts", str(tmp_path / "p.txt"), "--dtype", "bfloat16"]
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *arguments, "--report", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert exit_.value.code == 0 and report["ok"], report["line"]
    assert report["num_prompts"] == 2 and report["transformers_bfloat16"]["generated"]["mean"] > 0
    assert report["line"] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-3)])
def test_the_shipped_base_on_its_task(dtype: Any, tolerance: float) -> None:
    prompts = [row["prompt"] for row in rows("heldout", 48)]
    report = verify.verify("builtin:tiny-arithmetic", prompts=prompts, dtype=dtype, max_tokens=48, tolerance=tolerance)
    assert report["ok"], report["line"]
    assert report["generated"]["num_values"] == 48 * 48
