"""Reward functions: known completions, and anything at all."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_rl.arithmetic import rows
from inkling_rl.chat import CONTENT_TEXT, CONTENT_THINKING, END_MESSAGE, MESSAGE_MODEL
from rollout.rewards import GroundTruthError, exact_integer, final_number, find_final_number

WORKED = f"{CONTENT_THINKING}7+6=13 1+4+8=13 1+3+5=9{END_MESSAGE}{MESSAGE_MODEL}{CONTENT_TEXT}933{END_MESSAGE}"


@pytest.mark.parametrize(
    ("completion", "value", "parsed"),
    [
        (WORKED, 1.0, 1.0),
        (WORKED.replace("933", "934"), 0.0, 1.0),
        ("933", 1.0, 1.0),
        ("the answer is 933", 0.0, 0.0),
        (f"{CONTENT_THINKING}933{END_MESSAGE}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_an_integer_matches_exactly_or_not_at_all(completion: str, value: float, parsed: float) -> None:
    reward = exact_integer(completion, "933")
    assert (reward.value, reward.parts) == (value, {"parsed": parsed, "correct": value})


def test_every_answer_of_the_task_can_be_matched() -> None:
    for row in rows("heldout", 50):
        assert exact_integer(f"{CONTENT_TEXT}{row['answer']}{END_MESSAGE}", row["answer"]).value == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she has 12 left.\n#### 1,234", "1234"),
        ("#### 5 ... no: #### $6.50 in total 99", "6.5"),
        (r"hence \boxed{ -18 } and 7 more words", "-18"),
        ("She pays $1,050.00.", "1050"),
        ("12-7", "7"),
        ("it is -7", "-7"),
        ("(3)-2=1", "1"),
        ("half: .5", "0.5"),
        (f"{CONTENT_THINKING}try 4{END_MESSAGE}{MESSAGE_MODEL}{CONTENT_TEXT}It is 3 dollars{END_MESSAGE} 9", "3"),
        ("9" * 100, None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: str | None) -> None:
    assert find_final_number(text) == (None if number is None else Decimal(number))


def test_numbers_match_as_numbers_and_the_reference_may_be_a_solution() -> None:
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    assert final_number("#### 72.0", solution).value == 1.0
    assert final_number("she sold 72 clips altogether", 72).value == 1.0
    wrong = final_number("#### 73", solution)
    assert (wrong.value, wrong.parts) == (0.0, {"parsed": 1.0, "correct": 0.0})
    assert final_number("I do not know", solution).parts == {"parsed": 0.0, "correct": 0.0}


def test_a_ground_truth_that_nothing_can_match_is_an_error() -> None:
    with pytest.raises(GroundTruthError, match="answer must be an integer; got 'many'"):
        exact_integer("3", "many")
    with pytest.raises(GroundTruthError, match="answer must hold a number; got 'many'"):
        final_number("3", "many")


@given(st.text(alphabet=st.sampled_from("0123456789.,-$# \\boxed{}()\n\u0663\u00b2<|content_text|>")))
def test_no_completion_raises(text: str) -> None:
    for reward in (exact_integer(text, 3), final_number(text, 3)):
        assert reward.value == reward.parts["correct"] <= reward.parts["parsed"] <= 1.0


@given(st.integers(-(10**12), 10**12))
def test_any_integer_is_found_in_its_usual_spelling(number: int) -> None:
    assert final_number(f"the answer is\n#### {number:,}", number).value == 1.0
