"""The quick start's task: add two three-digit numbers, showing the working.

There are two correct ways to show it, and a base pre-trained on both does not know which one it can rely on:

* `columns`: digit by digit from the right, carries included. Every step is a sum of at most three digits.
* `rounding`: both numbers rounded up to tens, the excess taken off in the head. Shorter and also correct, but the base
  never learnt how it ends.

Reinforcement learning has something to find: write the columns. Operand pairs are split by a hash, so that the pairs of
pre-training, training and the held-out set are disjoint in either order, whatever is drawn from them.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

from inkling_rl.chat import CONTENT_TEXT, END_MESSAGE

Split = Literal["pretrain", "train", "heldout"]
Style = Literal["columns", "rounding"]

LOW, HIGH = 100, 999
NUM_TRAIN_ROWS, NUM_HELDOUT_ROWS = 4096, 256

_ANSWER = re.compile(r"\s*(\d{1,6})\s*")


def split_of(a: int, b: int) -> Split:
    """The split that owns an operand pair; a + b and b + a belong together."""
    low, high = sorted((a, b))
    bucket = hashlib.sha256(f"{low}+{high}".encode()).digest()[0]
    if bucket < 16:
        return "heldout"
    return "train" if bucket < 80 else "pretrain"


def pairs(split: Split, seed: int) -> Iterator[tuple[int, int]]:
    """An endless stream of operand pairs of one split."""
    rng = random.Random(f"{split}/{seed}")
    while True:
        a, b = rng.randint(LOW, HIGH), rng.randint(LOW, HIGH)
        if split_of(a, b) == split:
            yield a, b


def rows(split: Split, count: int | None = None) -> list[dict[str, Any]]:
    """Distinct rows of a split, always the same ones: `{"prompt": "347+586", "answer": "933"}`."""
    count = count or (NUM_HELDOUT_ROWS if split == "heldout" else NUM_TRAIN_ROWS)
    seen: dict[tuple[int, int], None] = {}
    for pair in pairs(split, seed=0):
        seen[pair] = None
        if len(seen) == count:
            break
    return [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in seen]


def working(a: int, b: int, style: Style) -> str:
    """A correct working, in the words of one style.

    Example: `working(347, 586, "columns") == "7+6=13 1+4+8=13 1+3+5=9"`.
    """
    if style == "rounding":
        excess_a, excess_b = -a % 10, -b % 10
        return f"{a + excess_a}+{b + excess_b}={a + excess_a + b + excess_b} -{excess_a}-{excess_b}"
    steps, carry = [], 0
    for power in (1, 10, 100):
        x, y = a // power % 10, b // power % 10
        total = x + y + carry
        steps.append(f"{carry}+{x}+{y}={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return " ".join(steps)


def extract_answer(text: str) -> int | None:
    """The number that a completion answers with: the whole of its last text block, or of plain text.

    None where there is no such block or where it holds anything but one number.
    """
    if CONTENT_TEXT in text:
        text = text.rsplit(CONTENT_TEXT, 1)[1].split(END_MESSAGE, 1)[0]
    match = _ANSWER.fullmatch(text)
    return int(match.group(1)) if match else None
