"""Reward functions: a completion and a ground truth in, a number and its parts out. Pure, total, no vendor.

A completion may hold anything a model can emit, so none of these raises on it. A ground truth comes from the user's
data: one that cannot be used is an error that says so.

Not here: the episode (`rollout.envs`), shaping, length penalties.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from inkling_rl.arithmetic import extract_answer
from inkling_rl.chat import CONTENT_TEXT, END_MESSAGE


class GroundTruthError(ValueError):
    """The answer column of a row holds something that no completion could match."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A scalar and what it is made of; the parts become metrics of the environment."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


def exact_integer(completion: str, answer: str | int) -> Reward:
    """1 where the completion's answer block is exactly the integer `answer`, else 0.

    Raises:
        GroundTruthError: `answer` is not an integer.
    """
    try:
        wanted = int(answer)
    except (TypeError, ValueError) as error:
        raise GroundTruthError(f"answer must be an integer; got {answer!r}. Correct the data row") from error
    found = extract_answer(completion)
    return _matched(found is not None, found == wanted)


def final_number(completion: str, answer: str | int | float) -> Reward:
    """1 where the completion's final number equals that of `answer`, else 0. Equal as numbers: 18, 18.0 and $18 match.

    Args:
        completion: sampled text, special tokens included or not.
        answer: a number, or a worked solution whose final number counts (GSM8K's `... #### 18`).

    Raises:
        GroundTruthError: `answer` holds no number.
    """
    wanted = find_final_number(str(answer))
    if wanted is None:
        raise GroundTruthError(f"answer must hold a number; got {str(answer)[:80]!r}. Correct the data row")
    found = find_final_number(completion)
    return _matched(found is not None, found == wanted)


# A minus is a sign only where it does not follow a number or a bracket: "12-7" ends with 7.
_NUMBER = r"(?<![\w.)])-?\s?\$?\s?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)|(?:[0-9][0-9,]*(?:\.[0-9]+)?)"
_NUMBERS = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*({_NUMBER})|\\boxed\s*\{{\s*({_NUMBER})")
MAX_DIGITS = 60  # longer digit strings are noise, and comparing them is not free


def find_final_number(text: str) -> Decimal | None:
    """The number a text ends with: the last `#### N` or `\\boxed{N}`, or else the last number of all."""
    if CONTENT_TEXT in text:
        text = text.rsplit(CONTENT_TEXT, 1)[1].split(END_MESSAGE, 1)[0]
    marked = [first or second for first, second in _MARKED.findall(text)]
    for candidate in reversed(marked or _NUMBERS.findall(text)):
        digits = re.sub(r"[\s$,]", "", candidate)
        if len(digits) <= MAX_DIGITS:
            try:
                return Decimal(digits)
            except InvalidOperation:
                continue
    return None


def _matched(parsed: bool, correct: bool) -> Reward:
    return Reward(float(correct), {"parsed": float(parsed), "correct": float(correct)})
