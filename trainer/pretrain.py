"""Pre-trains the tiny base that the quick start begins from: supervised, correct answers only, on two cores in minutes.

About half of the corpus shows a sum by columns, the rest by rounding (`inkling_rl.arithmetic`). Of the second way the
base learns how it begins but not how it ends: the digits of those answers carry no label. So it *half* knows the task:
sampling picks a way at random, and only one of them ends well. The result is written as a release checkpoint, experts
quantised, and scored as written.

Source: plain AdamW with warm-up and linear decay; router biases follow the sign of the load error (the auxiliary-free
balance of DeepSeek-V3), since a bias that stays zero would leave a mechanism of the model untested.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from inkling_rl import arithmetic, byte_tokenizer, chat
from inkling_rl.checkpoint import layout, tiny
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.writer import export_release

EFFORT = 0.2
IGNORED = -100  # cross_entropy's own default
BIAS_STEP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the result, besides the seed."""

    num_steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    num_warmup_steps: int = 100
    columns_share: float = 0.45
    """Share of the corpus that shows the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Held-out score of a base, and what it is made of."""

    score: float
    greedy_score: float
    columns: float
    """Share of sampled completions that work by columns."""
    columns_score: float
    """Score of those."""
    rounding_score: float
    mean_tokens: float


class Corpus:
    """Documents of the task as token ids: a prompt in the chat format and a correct completion."""

    def __init__(self, renderer: chat.Renderer, seed: int, columns_share: float) -> None:
        self._renderer = renderer
        self._pairs = arithmetic.pairs("pretrain", seed)
        self._random = random.Random(f"styles/{seed}")
        self._columns_share = columns_share

    def document(self) -> tuple[list[int], list[int], list[int]]:
        """Prompt ids, completion ids and labels of the completion of the next document."""
        a, b = next(self._pairs)
        style: arithmetic.Style = "columns" if self._random.random() < self._columns_share else "rounding"
        turn = {"role": "assistant", "reasoning": arithmetic.working(a, b, style), "content": str(a + b)}
        prompt = prompt_ids(self._renderer, f"{a}+{b}")
        question = {"role": "user", "content": f"{a}+{b}"}
        whole = self._renderer.render([question, turn], effort=EFFORT, add_generation_prompt=False)
        assert whole[: len(prompt)] == prompt
        completion = whole[len(prompt) :]
        labels = list(completion)
        if style == "rounding":
            start = completion.index(self._renderer.special(chat.CONTENT_TEXT)) + 1
            labels[start : start + len(str(a + b))] = [IGNORED] * len(str(a + b))
        return prompt, completion, labels

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels [size, longest]; padding and prompts carry none."""
        documents = [self.document() for _ in range(size)]
        longest = max(len(prompt) + len(completion) for prompt, completion, _ in documents)
        inputs = torch.full((size, longest), byte_tokenizer.PAD_TOKEN_ID)
        labels = torch.full((size, longest), IGNORED)
        for row, (prompt, completion, completion_labels) in enumerate(documents):
            end = len(prompt) + len(completion)
            inputs[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion_labels)
        return inputs, labels


def prompt_ids(renderer: chat.Renderer, question: str) -> list[int]:
    return renderer.render([{"role": "user", "content": question}], effort=EFFORT)


def pretrain(
    directory: Path,
    task: Literal["arithmetic"] = "arithmetic",
    seed: int = 0,
    plan: Plan | None = None,
    report: Callable[[int, int, float], None] = lambda step, num_steps, loss: None,
) -> Score:
    """Pre-trains a tiny base and writes it to `directory` as a release checkpoint with `pretrain.json` beside it.

    Args:
        directory: must not exist or be empty.
        task: the corpus; there is one.
        seed: of the weights, the corpus and the scoring.
        plan: steps, batch, learning rate.
        report: called after every step with step (from 1), number of steps and loss.

    Returns:
        The score of the checkpoint as written, experts quantised.

    Raises:
        CheckpointError: the directory is in use.
    """
    assert task == "arithmetic"
    plan = plan or Plan()
    started = time.monotonic()
    renderer = chat.Renderer(_tokenizer())
    model = _train(renderer, seed, plan, report)
    seconds = time.monotonic() - started
    record = {"task": task, "seed": seed, "plan": asdict(plan), "seconds": round(seconds), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch) / "base", model, seed, record)
        score = score_checkpoint(Path(scratch) / "base", seed)
    _write(directory, model, seed, record | {"score": asdict(score)})
    return score


def score_checkpoint(path: Path, seed: int = 0) -> Score:
    """Scores a checkpoint on the held-out problems, sampled at temperature 1 and greedily."""
    model = build_model()
    model.load_state_dict(dict(Checkpoint.open(path).iter_hf(torch.float32)))
    return score_model(model, seed)


def score_model(model: torch.nn.Module, seed: int = 0) -> Score:
    """Scores a model of the tiny shape, an adapter included where it is wrapped in one."""
    renderer = chat.Renderer(_tokenizer())
    rows = arithmetic.rows("heldout")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sampled = _complete(model, renderer, rows, greedy=False)
        greedy = _complete(model, renderer, rows, greedy=True)
    right = [_is_right(text, row) for text, row in zip(sampled, rows, strict=True)]
    columns = [not re.match(rf"{re.escape(chat.CONTENT_THINKING)}\d+0\+\d+0=", text) for text in sampled]
    num_columns = max(1, sum(columns))
    return Score(
        score=sum(right) / len(rows),
        greedy_score=sum(map(_is_right, greedy, rows)) / len(rows),
        columns=sum(columns) / len(rows),
        columns_score=sum(r for r, c in zip(right, columns, strict=True) if c) / num_columns,
        rounding_score=sum(r for r, c in zip(right, columns, strict=True) if not c) / max(1, len(rows) - num_columns),
        mean_tokens=sum(len(renderer.tokenizer.encode(text)) for text in sampled) / len(rows),
    )


def _is_right(text: str, row: dict[str, Any]) -> bool:
    return text.endswith(chat.END_SAMPLING) and arithmetic.extract_answer(text) == int(row["answer"])


def _train(
    renderer: chat.Renderer, seed: int, plan: Plan, report: Callable[[int, int, float], None]
) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model()
    corpus = Corpus(renderer, seed, plan.columns_share)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.98),
    )
    loads = _watch_loads(model)
    for step in range(plan.num_steps):
        factor = _schedule(step, plan)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * factor
        inputs, labels = corpus.batch(plan.batch_size)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for gate, load in loads():
            gate.e_score_correction_bias += BIAS_STEP * factor * torch.sign(load.mean() - load)
        report(step + 1, plan.num_steps, loss.item())
    return model


def _schedule(step: int, plan: Plan) -> float:
    """Warm-up, constant to the middle, then linearly to 2 %."""
    warm = min(1.0, (step + 1) / plan.num_warmup_steps)
    remaining = (plan.num_steps - step) / plan.num_steps
    return warm * max(0.02, min(1.0, 2 * remaining))


def _watch_loads(model: torch.nn.Module) -> Callable[[], Iterator[tuple[Any, torch.Tensor]]]:
    """Tokens per expert of the last forward pass, for every router."""
    gates = [layer.mlp.gate for layer in model.model.layers]  # type: ignore[union-attr]
    chosen: dict[int, torch.Tensor] = {}
    for number, gate in enumerate(gates):
        gate.register_forward_hook(lambda _, __, out, number=number: chosen.__setitem__(number, out[2]))

    def loads() -> Iterator[tuple[Any, torch.Tensor]]:
        for number, gate in enumerate(gates):
            yield gate, torch.bincount(chosen[number].flatten(), minlength=gate.num_experts).float()

    return loads


def build_model() -> torch.nn.Module:
    """transformers' `Inkling2ForCausalLM` in the tiny shape, float32, with transformers' starting values."""
    from transformers.models.inkling2 import Inkling2ForCausalLM
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

    text = {k: v for k, v in tiny.tiny_config()["text_config"].items() if k != "model_type"}
    model = Inkling2ForCausalLM._from_config(Inkling2TextConfig(**text), attn_implementation="eager")
    model.set_experts_implementation("grouped_mm")
    return model


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as scratch:
        for name, content in byte_tokenizer.tokenizer_files().items():
            Path(scratch, name).write_text(content, encoding="utf-8")
        return PreTrainedTokenizerFast.from_pretrained(scratch)


def _write(directory: Path, model: torch.nn.Module, seed: int, record: dict[str, Any]) -> None:
    """Trained text weights; vision tower and draft from the random tiny model of the same seed."""
    rest = {k: v for k, v in tiny.random_tensors(seed).items() if not k.startswith(layout.TEXT_PREFIX)}
    files = byte_tokenizer.tokenizer_files() | {"pretrain.json": json.dumps(record, indent=1) + "\n"}
    export_release(
        directory, tiny.tiny_config(), tiny.tiny_quant_config(), model.state_dict(), rest, files,
        max_shard_bytes=tiny.MAX_SHARD_BYTES,
    )  # fmt: skip


@torch.no_grad()
def _complete(
    model: torch.nn.Module, renderer: chat.Renderer, rows: list[dict[str, Any]], greedy: bool, max_tokens: int = 48
) -> list[str]:
    """Completions of all rows in one batch (every prompt of the task has the same length)."""
    inputs = torch.tensor([prompt_ids(renderer, row["prompt"]) for row in rows])
    cache, done, chosen = None, torch.zeros(len(rows), dtype=torch.bool), []
    for _ in range(max_tokens):
        output = model(input_ids=inputs, cache=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        token = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        token = torch.where(done, byte_tokenizer.PAD_TOKEN_ID, token)
        chosen.append(token)
        done |= token == byte_tokenizer.EOS_TOKEN_ID
        if done.all():
            break
        inputs = token[:, None]
    ids = [[t for t in row if t != byte_tokenizer.PAD_TOKEN_ID] for row in torch.stack(chosen, 1).tolist()]
    return [renderer.tokenizer.decode(row) for row in ids]
