"""Rows are checked before a run; batches follow from seed and step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_rl.chat import Renderer
from trainer.dataset import Batches, DataError, Prompts, read_rows


@pytest.fixture(scope="module")
def renderer(checkpoint: Path) -> Renderer:
    from transformers import PreTrainedTokenizerFast

    return Renderer(PreTrainedTokenizerFast.from_pretrained(str(checkpoint)))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_builtin_and_files(tmp_path: Path) -> None:
    import datasets

    assert len(read_rows("arithmetic/heldout", "prompt", "answer", "data.eval")) == 256
    rows = [{"question": "1+1", "answer": "2", "level": 3}]
    assert read_rows(jsonl(tmp_path / "a.jsonl", rows), "question", "answer", "data.train") == rows
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert read_rows(str(tmp_path / "a.parquet"), "question", "answer", "data.train") == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"data.train must be arithmetic/train, arithmetic/heldout or an existing .jsonl"),
        ("", r"data.train must have rows; .* is empty"),
        (
            '{"question": "1+1", "answer": "2"}\n',
            r"must have the column 'prompt' \(data.prompt_key\).*answer, question",
        ),
        ('{"prompt": "1+1"}\n', r"must have the column 'answer' \(data.answer_key\)"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "3"}\n', r"row 1 of"),
        ("[1]\n", r"line 1 of .* is '\[1\]'"),
        ("no json", r"data.train must have one JSON object a line; line 1"),
        (b"\xff\xfe", r"data.train must be a readable file of UTF-8 text"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        read_rows(str(path), "prompt", "answer", "data.train")


def test_separators_that_json_allows_inside_text_split_no_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b\x85c\x0bd", "answer": "1"}]
    path = tmp_path / "data.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode())
    assert read_rows(str(path), "prompt", "answer", "data.train") == rows


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, r"row 0, column 'q': a prompt must be text or a list of messages; got '5'"),
        ([], "a prompt must be text or a list of messages"),
        (["hello"], "a prompt must be text or a list of messages"),
        ({"role": "user"}, "a prompt must be text or a list of messages"),
        ([{"role": "wizard", "content": "x"}], r"row 0, column 'q': messages must be .*wizard"),
        ([{"role": "user", "content": 5}], "messages must be those of the chat format"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text; got an image"),
    ],
)
def test_prompts_that_cannot_be_rendered_are_named(renderer: Renderer, prompt: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Prompts(
            [{"q": prompt, "a": "2"}], renderer, prompt_key="q", answer_key="a", effort=0.2, environment="arithmetic",
            max_prompt_length=64,
        )  # fmt: skip


def test_prompts_are_rendered_and_long_ones_counted(renderer: Renderer) -> None:
    rows = [{"q": "1+1", "a": "2"}, {"q": "9" * 100, "a": "0"}, {"q": [{"role": "user", "content": "2+2"}], "a": "4"}]
    prompts = Prompts(
        rows, renderer, prompt_key="q", answer_key="a", effort=0.2, environment="arithmetic", max_prompt_length=64
    )
    assert (len(prompts), prompts.num_dropped) == (2, 1)
    assert prompts.items[0] == {
        "prompt": [{"role": "user", "content": "1+1"}],
        "env_class": "arithmetic",
        "env_extras": {"a": "2", "answer": "2"},
        "uid": "0",
    }
    assert prompts.items[1]["uid"] == "2"


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 9),
    stop=st.integers(0, 12),
    seed=st.integers(0, 3),
    is_shuffled=st.booleans(),
)
def test_batches_after_a_stop_are_those_of_a_run_without(
    count: int, size: int, stop: int, seed: int, is_shuffled: bool
) -> None:
    size = min(size, count)
    items = [{"uid": str(n)} for n in range(count)]

    def serve(batches: Batches, number: int) -> list[list[str]]:
        served: list[list[str]] = []
        while len(served) < number:
            for batch in batches:
                served.append([item["uid"] for item in batch])
                if len(served) == number:
                    break
        return served

    whole = serve(Batches(items, size, is_shuffled=is_shuffled, seed=seed), 20)
    first = Batches(items, size, is_shuffled=is_shuffled, seed=seed)
    served = serve(first, stop)
    second = Batches(items, size, is_shuffled=is_shuffled, seed=seed)
    second.load_state_dict(first.state_dict())
    assert served + serve(second, 20 - stop) == whole
    # Within an epoch no row is served twice, and all batches are full.
    epoch = [uid for batch in whole[: count // size] for uid in batch]
    assert len(epoch) == len(set(epoch)) and all(len(batch) == size for batch in whole)


def test_epochs_differ_and_evaluation_serves_everything() -> None:
    items = [{"uid": str(n)} for n in range(10)]
    shuffled = Batches(items, 10, is_shuffled=True, seed=1)
    assert list(shuffled) != list(shuffled)
    heldout = Batches(items, 4, is_shuffled=False, seed=None)
    assert [len(batch) for batch in heldout] == [4, 4, 2] == [len(batch) for batch in heldout]
    assert len(heldout) == 3
