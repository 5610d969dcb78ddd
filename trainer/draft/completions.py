"""What a draft is trained on: completions of the target, and blocks that start at tokens sampled from them.

Completions come from a file that holds their tokens (an engine's, say), or are sampled from the target for prompts of
a recipe's kind. Anchors follow from seed, epoch and completion alone, so that training can be continued anywhere.

Letters: N completions, T tokens of the longest, A anchors, B rows of a block.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, batched, cycle, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inkling_rl.chat import Renderer
from trainer.dataset import DataError, Prompts, read_table, read_tokenizer
from trainer.draft.target import Target

TOKEN_COLUMNS = ("prompt_token_ids", "token_ids")


class Completion(NamedTuple):
    """Tokens of a prompt and of what the target made of it, its stop token included."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are made where `--data` holds prompts only."""

    num_completions: int = 8192
    """Prompts are taken in turns, shuffled, until there are so many."""
    temperature: float = 1.0
    max_tokens: int = 48
    effort: float = 0.2
    max_prompt_length: int = 1024
    batch_size: int = 256


class Blocks(NamedTuple):
    """A batch, padded on the right: `tokens` [N, T], `anchors` [N, A], the others [N, A, B].

    Rows without a token have weight 0.
    """

    tokens: torch.Tensor
    anchors: torch.Tensor
    inputs: torch.Tensor
    """The anchor's token, then mask tokens."""

    previous: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(value.to(device) for value in self))

    def padded(self, num_sequences: int, num_tokens: int, num_anchors: int) -> Blocks:
        """As many or more of each. What is added has weight 0 and is otherwise like the last sequence's or anchor's."""
        rows = torch.arange(num_sequences).clamp(max=len(self.tokens) - 1)
        places = torch.arange(num_anchors).clamp(max=self.anchors.shape[1] - 1)
        tokens_NT = torch.nn.functional.pad(self.tokens, (0, num_tokens - self.tokens.shape[1]))[rows]
        padded = Blocks(tokens_NT, *(value[rows][:, places] for value in self[1:]))
        padded.weights[len(self.tokens) :] = 0
        padded.weights[:, self.anchors.shape[1] :] = 0
        return padded


def make_blocks(
    completions: Sequence[Completion], anchors: Sequence[Sequence[int]], mask_token: int, decay_B: torch.Tensor
) -> Blocks:
    """Put completions and the positions of their anchors into one batch.

    Args:
        completions: N of them.
        anchors: positions in prompt and completion together, increasing, of each.
        mask_token: fills the rows after the anchor.
        decay_B: weight of each row of a block.
    """
    sequences = [torch.tensor(c.prompt + c.tokens) for c in completions]
    lengths_N1 = torch.tensor([[len(sequence)] for sequence in sequences])
    tokens_NT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    counts_N1 = torch.tensor([[len(positions)] for positions in anchors])
    anchors_NA = torch.nn.utils.rnn.pad_sequence([torch.tensor(p, dtype=torch.long) for p in anchors], batch_first=True)
    is_anchor_NA = torch.arange(anchors_NA.shape[1]) < counts_N1
    at_NAB = anchors_NA[..., None] + torch.arange(len(decay_B))
    last = tokens_NT.shape[1] - 1
    rows_N11 = torch.arange(len(sequences))[:, None, None]
    has_token_NAB = (at_NAB + 1 < lengths_N1[..., None]) & is_anchor_NA[..., None]
    previous_NAB = tokens_NT[rows_N11, at_NAB.clamp(max=last)]
    inputs_NAB = torch.full_like(previous_NAB, mask_token)
    inputs_NAB[..., 0] = previous_NAB[..., 0]
    labels_NAB = tokens_NT[rows_N11, (at_NAB + 1).clamp(max=last)]
    return Blocks(tokens_NT, anchors_NA, inputs_NAB, previous_NAB, labels_NAB, has_token_NAB * decay_B)


def sample_anchors(completion: Completion, max_anchors: int, seed: object) -> list[int]:
    """Positions of up to `max_anchors` anchors: completion tokens that another one follows."""
    first, count = len(completion.prompt), max(0, len(completion.tokens) - 1)
    places = range(first, first + count)
    if count <= max_anchors:
        return list(places)
    return sorted(random.Random(f"anchors/{seed}").sample(places, max_anchors))


def load_completions(
    source: str,
    target: Target,
    checkpoint_path: Path,
    sampling: Sampling,
    seed: int,
    cache: Path | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Completion]:
    """Completions of a source: read where it holds tokens, sampled from the target where it holds prompts.

    Args:
        source: arithmetic/train, arithmetic/heldout, or a .jsonl or .parquet file with the columns of `TOKEN_COLUMNS`
            or with `prompt` (text, or messages).
        target: samples completions.
        checkpoint_path: directory with the tokenizer.
        sampling: how.
        seed: of the sampling.
        cache: file for sampled completions; what it holds from an earlier call of the same kind is not sampled again.
        report: called with completions done and wanted.

    Raises:
        DataError: the source cannot be used. CheckpointError: no tokenizer.
    """
    rows = read_data(source, target.model.config.unpadded_vocab_size)
    if isinstance(rows[0], Completion):
        return rows
    prompts = _prompts(rows, source, checkpoint_path, sampling)
    random.Random(f"completions/{seed}").shuffle(prompts)
    wanted = list(islice(cycle(prompts), sampling.num_completions))
    wanted.sort(key=len)  # batches of one length need no padding and no mask
    batches = [list(batch) for _, group in groupby(wanted, key=len) for batch in batched(group, sampling.batch_size)]
    completions = _cached(cache, [len(batch) for batch in batches]) if cache else []
    for batch in batches[_whole(len(completions), [len(batch) for batch in batches]) :]:
        made = _sample(batch, target, sampling, f"completions/{seed}/{len(completions)}")
        if cache:
            with cache.open("a", encoding="utf-8") as file:
                file.write(write_lines(made))
        completions += made
        report(len(completions), len(wanted))
    random.Random(f"order/{seed}").shuffle(completions)
    return completions


def read_data(source: str, vocabulary: int) -> list[Any]:
    """Completions of a source with tokens, else its rows, each with a prompt; errors as in `load_completions`."""
    rows = read_table(source, "--data")
    if TOKEN_COLUMNS[1] in rows[0]:
        return [_checked(row, number, source, vocabulary) for number, row in enumerate(rows)]
    missing = [number for number, row in enumerate(rows) if row.get("prompt") is None]
    if missing:
        raise DataError(
            f"--data must have the columns {' and '.join(TOKEN_COLUMNS)}, or prompt, in every row; row {missing[0]} of "
            f"{source} has {', '.join(sorted(rows[missing[0]])) or 'none'}. Rename the columns"
        )
    return rows


def _sample(prompts: list[tuple[int, ...]], target: Target, sampling: Sampling, seed: str) -> list[Completion]:
    stop = target.model.config.eos_token_id
    stop_token = stop[0] if isinstance(stop, list) else stop
    drawn = random.Random(seed).getrandbits(32)
    made = target.complete(torch.tensor(prompts), sampling.temperature, sampling.max_tokens, stop_token, drawn)
    return [Completion(prompt, tuple(tokens)) for prompt, tokens in zip(prompts, made, strict=True)]


def _cached(cache: Path, sizes: Sequence[int]) -> list[Completion]:
    """Whole batches that an earlier call left; what it wrote of a further one is cut off."""
    if not cache.is_file():
        return []
    *lines, _ = cache.read_text(encoding="utf-8").split("\n")
    lines = lines[: sum(sizes[: _whole(len(lines), sizes)])]
    completions = read_lines("\n".join(lines))
    cache.write_text(write_lines(completions), encoding="utf-8")
    return completions


def _whole(count: int, sizes: Sequence[int]) -> int:
    """How many batches of these sizes `count` completions fill."""
    return bisect_right(list(accumulate(sizes)), count)


def read_lines(text: str) -> list[Completion]:
    """What `write_lines` wrote."""
    return [Completion(*(tuple(json.loads(line)[name]) for name in TOKEN_COLUMNS)) for line in text.splitlines()]


def write_lines(completions: Iterable[Completion]) -> str:
    """Completions as `--data` takes them, one JSON object a line."""
    return "".join(json.dumps(dict(zip(TOKEN_COLUMNS, c, strict=True))) + "\n" for c in completions)


def _checked(row: dict[str, Any], number: int, source: str, vocabulary: int) -> Completion:
    for name in TOKEN_COLUMNS:
        ids = row.get(name)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            raise DataError(
                f"--data: {name} must be a list of token ids from 0 to {vocabulary - 1}; row {number} of {source} has "
                f"{str(ids)[:60]}. Write the tokens that the engine gave"
            )
    return Completion(*(tuple(row[name]) for name in TOKEN_COLUMNS))


def _prompts(
    rows: Sequence[dict[str, Any]], source: str, checkpoint_path: Path, sampling: Sampling
) -> list[tuple[int, ...]]:
    renderer = Renderer(read_tokenizer(checkpoint_path))
    prompts = Prompts(
        rows,
        renderer,
        prompt_key="prompt",
        answer_key="prompt",
        effort=sampling.effort,
        environment="",
        max_prompt_length=sampling.max_prompt_length,
    )
    if not len(prompts):
        raise DataError(
            f"--data must have prompts of up to --max-prompt-length {sampling.max_prompt_length} tokens; all "
            f"{prompts.num_dropped} of {source} are longer. Raise it"
        )
    return [tuple(renderer.render(item["prompt"], effort=sampling.effort)) for item in prompts.items]
