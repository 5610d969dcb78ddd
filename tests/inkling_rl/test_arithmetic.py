"""The quick start's task: disjoint splits, correct workings, strict answers."""

from __future__ import annotations

from itertools import islice

import pytest

from inkling_rl import arithmetic
from inkling_rl.arithmetic import extract_answer, pairs, rows, split_of, working


def test_splits_are_disjoint_in_either_order() -> None:
    seen = {
        split: {frozenset(p) for p in islice(pairs(split, seed=3), 4000)} for split in ("pretrain", "train", "heldout")
    }
    assert not seen["pretrain"] & seen["train"] and not seen["pretrain"] & seen["heldout"]
    assert not seen["train"] & seen["heldout"]
    assert split_of(347, 586) == split_of(586, 347)


def test_rows_are_distinct_right_and_always_the_same() -> None:
    held = rows("heldout")
    assert len({row["prompt"] for row in held}) == len(held) == 256
    assert rows("heldout") == held
    for row in held + rows("train", 500):
        a, b = map(int, row["prompt"].split("+"))
        assert int(row["answer"]) == a + b


@pytest.mark.parametrize(
    ("a", "b", "columns", "rounding"),
    [
        (347, 586, "7+6=13 1+4+8=13 1+3+5=9", "350+590=940 -3-4"),
        (100, 100, "0+0=0 0+0=0 1+1=2", "100+100=200 -0-0"),
        (999, 999, "9+9=18 1+9+9=19 1+9+9=19", "1000+1000=2000 -1-1"),
    ],
)
def test_known_workings(a: int, b: int, columns: str, rounding: str) -> None:
    assert working(a, b, "columns") == columns
    assert working(a, b, "rounding") == rounding


def test_every_step_of_every_working_is_correct() -> None:
    for a, b in islice(pairs("train", seed=1), 300):
        for style in ("columns", "rounding"):
            for step in working(a, b, style).split():
                left, equals, right = step.partition("=")
                assert not equals or sum(map(int, left.split("+"))) == int(right)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("933", 933),
        (" 933 ", 933),
        ("<|content_thinking|>7+6=13<|end_message|><|message_model|><|content_text|>933<|end_message|>", 933),
        ("<|content_text|>1<|end_message|><|message_model|><|content_text|>2<|end_message|>", 2),
        ("<|content_thinking|>933<|end_message|>", None),
        ("it is 933", None),
        ("933 or 934", None),
        ("-3", None),
        ("", None),
        ("1234567", None),
    ],
)
def test_answers_are_read_strictly(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_counts_can_be_chosen() -> None:
    assert len(arithmetic.rows("train", 10)) == 10
