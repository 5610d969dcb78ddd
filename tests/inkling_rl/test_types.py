"""Records that cross boundaries refuse misaligned parts."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from inkling_rl.types import Evaluation, Publication, Sample


def sample(**changed: object) -> Sample:
    fields = {
        "row": 3,
        "sample": 1,
        "prompt_token_ids": (1, 2),
        "token_ids": (5, 6, 7),
        "logprobs": (-0.1, -0.2, -0.3),
        "policy_version": 4,
        "stop_reason": "stop",
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
    }
    return Sample(**(fields | changed))  # type: ignore[arg-type]


def test_a_sample_needs_one_logprob_per_token() -> None:
    with pytest.raises(
        ValueError, match="sample 1 of row 3 must have one log-probability per token; got 3 tokens and 2"
    ):
        sample(logprobs=(-0.1, -0.2))


def test_a_sample_becomes_a_line_of_samples_jsonl() -> None:
    row = sample().as_row(step=2, prompt="1+1=", completion="2")
    assert json.loads(json.dumps(row)) == row
    assert (row["step"], row["num_tokens"], row["policy_version"], row["reward"]) == (2, 3, 4, 1.0)


def test_records_are_frozen_and_travel_between_processes() -> None:
    publication = Publication(version=2, kind="adapter", num_bytes=10, seconds=0.5)
    for record in (sample(), publication, Evaluation(step=1, policy_version=1, num_problems=256, score=0.5)):
        assert pickle.loads(pickle.dumps(record)) == record
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, 0)
    assert publication.as_row() == {"version": 2, "kind": "adapter", "num_bytes": 10, "seconds": 0.5, "num_engines": 1}
