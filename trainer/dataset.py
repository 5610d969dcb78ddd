"""Prompts of a recipe: read, checked, rendered to token ids, and served in batches that follow from seed and step.

Rows come from a .jsonl or .parquet file, or from the built-in arithmetic task. A batch is a pure function of the seed
and of the number of batches before it, so the data cursor of a checkpoint is that number. This replaces SkyRL's
`PromptDataset` and its loader, whose cursor lives in a library's private state and whose workers cost 38 s at start.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inkling_rl import arithmetic
from inkling_rl.chat import CONTENT_IMAGE, Renderer
from inkling_rl.checkpoint.layout import CheckpointError

BUILTIN = {"arithmetic/train": "train", "arithmetic/heldout": "heldout"}


class DataError(ValueError):
    """A data file that cannot be used."""


def read_rows(source: str, prompt_key: str, answer_key: str, field: str) -> list[dict[str, Any]]:
    """Rows of a source: dictionaries with at least the prompt and the answer column.

    Args:
        source: `arithmetic/train`, `arithmetic/heldout`, or a .jsonl or .parquet file.
        prompt_key, answer_key: columns that must be there.
        field: dotted path of the recipe field that named the source, for messages.

    Raises:
        DataError: no such file, no such column, no rows.
    """
    rows = read_table(source, field)
    if source in BUILTIN:
        return rows
    for key, name in ((prompt_key, "data.prompt_key"), (answer_key, "data.answer_key")):
        missing = [number for number, row in enumerate(rows) if row.get(key) is None]
        if missing:
            columns = ", ".join(sorted(rows[missing[0]])) or "none"
            raise DataError(
                f"{field} must have the column {key!r} ({name}) in every row; row {missing[0]} of {source} has "
                f"{columns}. Set {name} to the right column"
            )
    return rows


def read_table(source: str, field: str) -> list[dict[str, Any]]:
    """All rows of a source, whatever their columns; arguments and errors as in `read_rows`."""
    if source in BUILTIN:
        return arithmetic.rows(BUILTIN[source])  # type: ignore[arg-type]
    path = Path(source).expanduser()
    if path.suffix not in (".jsonl", ".parquet") or not path.is_file():
        raise DataError(
            f"{field} must be {', '.join(BUILTIN)} or an existing .jsonl or .parquet file; got {source!r}. "
            "Check the path"
        )
    rows = _load(path, field)
    if not rows:
        raise DataError(f"{field} must have rows; {source} is empty. Give another file")
    return rows


def _load(path: Path, field: str) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return _load_parquet(path, field)
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{field} must be a readable file of UTF-8 text; got {path}: {error}. Mend the file") from error
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{field} must have one JSON object a line; line {number + 1} of {path}: {error}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{field} must have one JSON object a line; line {number + 1} of {path} is {line[:80]!r}")
        rows.append(row)
    return rows


def _load_parquet(path: Path, field: str) -> list[dict[str, Any]]:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    try:
        return [dict(row) for row in datasets.Dataset.from_parquet(str(path), keep_in_memory=True)]
    except (DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{field} must be a readable parquet file; got {path}: {error}. Mend the file") from error


class Prompts:
    """Rendered, length-checked rows of one source. A row that the chat format cannot express is a DataError."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        renderer: Renderer,
        *,
        prompt_key: str,
        answer_key: str,
        effort: float,
        environment: str,
        max_prompt_length: int,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.num_dropped = 0
        image = renderer.special(CONTENT_IMAGE)
        for number, row in enumerate(rows):
            messages, ids = _rendered(row[prompt_key], renderer, effort, f"row {number}, column {prompt_key!r}")
            if image in ids:
                raise DataError(
                    f"row {number}, column {prompt_key!r}: a prompt must be text; got an image, which is not trained "
                    "on yet. Leave the row out"
                )
            if len(ids) > max_prompt_length:
                self.num_dropped += 1
                continue
            extras = {key: value for key, value in row.items() if key != prompt_key} | {"answer": row[answer_key]}
            # The key names are SkyRL's; uid is the row's number in the source, which request seeds follow from.
            self.items.append({"prompt": messages, "env_class": environment, "env_extras": extras, "uid": str(number)})

    def __len__(self) -> int:
        return len(self.items)


def _rendered(prompt: Any, renderer: Renderer, effort: float, where: str) -> tuple[list[dict[str, Any]], list[int]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise DataError(f"{where}: a prompt must be text or a list of messages; got {str(prompt)[:80]!r}. Correct it")
    try:
        return messages, renderer.render(messages, effort=effort)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: messages must be those of the chat format; {error}. Correct them") from error


class Batches:
    """Batches of rows for SkyRL's loop, one epoch per iteration.

    With `seed` every epoch is a permutation of its own and an incomplete batch at its end is left out; without, rows
    come in order and the last batch may be short (evaluation).
    """

    def __init__(self, items: Sequence[dict[str, Any]], size: int, *, is_shuffled: bool, seed: int | None) -> None:
        self.items = items
        self.size = size
        self.is_shuffled = is_shuffled
        self.seed = seed
        self.num_served = 0

    def __len__(self) -> int:
        return len(self.items) // self.size if self.seed is not None else -(-len(self.items) // self.size)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self.seed is None:
            for start in range(0, len(self.items), self.size):
                yield list(self.items[start : start + self.size])
            return
        epoch = self.num_served // len(self)
        order = self._order(epoch)
        while self.num_served < (epoch + 1) * len(self):
            start = self.num_served % len(self) * self.size
            self.num_served += 1
            yield [self.items[n] for n in order[start : start + self.size]]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.items)))
        if self.is_shuffled:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, int]:
        """The cursor: batches served since the run began."""
        return {"num_served": self.num_served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_served = state["num_served"]


def read_tokenizer(checkpoint_path: Path) -> Any:
    """The checkpoint's tokenizer, a `PreTrainedTokenizerFast`.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(checkpoint_path))
    except Exception as error:  # whatever the tokenizers library raises, it is about these files
        raise CheckpointError(
            f"{checkpoint_path}/tokenizer.json must be a readable tokenizer; got: {str(error).splitlines()[0][:200]}. "
            "Copy the checkpoint again"
        ) from error
