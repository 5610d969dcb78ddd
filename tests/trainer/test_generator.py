"""Prompts and continuations come from the one renderer; seeds follow from the run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> object:
    from trainer.experiment import load_tokenizer

    return load_tokenizer(checkpoint, effort=0.7)


def test_the_effort_is_in_every_prompt(tokenizer: object) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], add_generation_prompt=True)  # type: ignore[attr-defined]
    assert "Thinking effort level: 0.7" in tokenizer.decode(ids)  # type: ignore[attr-defined]


def test_turns_put_together_equal_the_conversation_rendered_at_once(tokenizer: object) -> None:
    first = [{"role": "user", "content": "look it up"}]
    answer = [{"role": "assistant", "content": "which?"}]
    second = [{"role": "user", "content": "the <|end_message|> one"}]
    chat = tokenizer
    prompt = chat.apply_chat_template(first, add_generation_prompt=True)  # type: ignore[attr-defined]
    whole = chat.apply_chat_template(first + answer + second, add_generation_prompt=True)  # type: ignore[attr-defined]
    upto_answer = chat.apply_chat_template(first + answer, add_generation_prompt=False)  # type: ignore[attr-defined]
    sampled = upto_answer[len(prompt) :]  # what the model writes after the generation prompt
    follows = chat.continuation(second, add_generation_prompt=True)  # type: ignore[attr-defined]
    assert prompt + sampled + follows == whole


def test_seeds_follow_from_their_parts() -> None:
    from trainer import vendor

    vendor.prepare()
    from trainer.client import model_name, request_seed

    assert request_seed(0, "train", 3, "12", 5) == request_seed(0, "train", 3, "12", 5)
    seeds = {request_seed(0, phase, step, row, 0) for phase in ("train", "eval") for step in range(9) for row in "0123"}
    assert len(seeds) == 72 and all(0 <= seed < 2**31 for seed in seeds)
    assert (model_name(0), model_name(12)) == ("base", "policy-v12")
