"""`inkling-rl convert`: a release checkpoint to BF16 experts and back, a few experts at a time.

The main thread reads and computes, one other thread writes; at most two groups of experts wait between them, so that
memory does not grow with the checkpoint. Everything that is not an expert of a converted layer is copied byte for byte.
The result appears whole, checked if that was asked for, or not at all.

Not arithmetic (`formats`, `requantize`) and no decisions (`conversion`). What the directories hold: docs/checkpoint.md.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from inkling_rl.checkpoint import layout, proof, source
from inkling_rl.checkpoint.conversion import Form, Plan, make_plan
from inkling_rl.checkpoint.directory import new_directory
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.progress import Progress
from inkling_rl.checkpoint.reader import GROUP_BYTES, Checkpoint
from inkling_rl.checkpoint.requantize import Counts, name_non_finite, requantize
from inkling_rl.checkpoint.shards import ShardWriter, plan_shards
from inkling_rl.checkpoint.tensor_file import num_bytes
from inkling_rl.formats import mixed
from inkling_rl.formats.errors import FormatError

_WAITING_GROUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a conversion did."""

    path: Path
    plan: Plan
    counts: Counts
    """Over all converted layers."""

    seconds: float
    check_seconds: float | None
    """Of `seconds`, spent on the check; None without one."""

    @property
    def line(self) -> str:
        """One line of result."""
        size = self.plan.num_bytes / 1e9
        writing = self.seconds - (self.check_seconds or 0)
        parts = [f"{size:.2f} GB in {writing:.1f} s ({size / max(writing, 1e-9):.2f} GB/s)", _outcome(self.counts)]
        if self.check_seconds is not None:
            parts.append(f"checked in {self.check_seconds:.1f} s")
        return f"result: {self.path} ({self.plan.to}), {', '.join(parts)}"


def convert(
    src: str | Path,
    dst: str | Path,
    to: Form,
    *,
    layers: Collection[int] | None = None,
    check: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write `src` as a new checkpoint `dst` whose experts have another form.

    Args:
        src: checkpoint directory or builtin:NAME.
        dst: new or empty directory.
        to: `bf16` dequantises and keeps the companions beside; `release` quantises, and gives experts that are as they
            were dequantised their old bytes.
        layers: whose experts to convert; all others are copied. All that can be unless given.
        check: read the result again and prove it, before it becomes visible.
        progress: where to show what happens; nowhere unless given.

    Raises:
        CheckpointError: `src` is damaged or has nothing to convert, `dst` is in use, the disk is full.
        ProofError: the result is not what it must be.
        FormatError: values that are not finite, with tensor, expert and count.
    """
    started = time.monotonic()
    checkpoint = Checkpoint.open(src)
    if checkpoint.path.resolve() == Path(dst).expanduser().resolve():
        raise CheckpointError(f"DST must not be SRC; got {src} twice. Choose another directory")
    checkpoint.check()
    plan = make_plan(checkpoint, to, layers)
    dst = Path(dst).expanduser()
    with _one_core_left(), new_directory(dst, plan.num_bytes) as hidden:
        work = _Conversion(checkpoint, plan, hidden, str(dst), progress)
        work.run()
        check_started = time.monotonic()
        if check:
            proof.check(checkpoint, hidden, dst, plan, work.untouched, progress)
        checked = time.monotonic() - check_started if check else None
    return Summary(path=dst, plan=plan, counts=work.counts, seconds=time.monotonic() - started, check_seconds=checked)


@contextmanager
def _one_core_left() -> Iterator[None]:
    """Compute on one thread less: it is the writer's core, and threads that wait for a busy one cost more than it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Conversion:
    """One pass over the tensors of the result."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, directory: Path, where: str, progress: Progress | None
    ) -> None:
        self.checkpoint, self.plan, self.directory, self.where = checkpoint, plan, directory, where
        self.progress = progress
        self.counts = Counts()
        self.untouched: dict[str, torch.Tensor] = {}
        """Expert matrix -> bool `[E]`, of conversions to the release form with companions."""

    def run(self) -> None:
        plan, directory = self.plan, self.directory
        if self.progress:
            self.progress.phase(f"convert to {plan.to}", plan.num_bytes)
        with ExitStack() as stack:
            model_shards = plan_shards(plan.model, like=plan.like)
            self.model = stack.enter_context(ShardWriter(directory, plan.model, model_shards, self.where))
            self.scales = stack.enter_context(
                ShardWriter(directory, plan.scales, plan_shards(plan.scales), self.where, source.SCALES)
            )
            self.background = stack.enter_context(_Background())
            if self.progress:
                stack.callback(self.progress.stop)
            self._tensors()
            self.background.drain()
            self.model.finish()
            self.scales.finish()
        for name, text in plan.texts.items():
            (directory / name).write_bytes(text)
        for path in plan.copied:
            shutil.copyfile(path, directory / path.name)

    def _tensors(self) -> None:
        done: set[int] = set()
        layer_counts = Counts()
        for name in self.plan.model:
            layer = layout.layer_of_experts(name)
            if layer not in self.plan.layers:
                self._copy(self.model, name)
            elif name.endswith(layout.EXPERT_MATRICES):
                assert layer is not None
                layer_counts.add(self._matrix(name, layer))
                done.add(layer)
                if name.endswith(layout.EXPERT_MATRICES[-1]):
                    self._report(layer, layer_counts, len(done))
                    layer_counts = Counts()
        for name in self.plan.scales:
            if name in self.checkpoint.source_shards:
                self._copy(self.scales, name)

    def _copy(self, shards: ShardWriter, name: str) -> None:
        file, place = self.checkpoint.file(name), self.checkpoint.place(name)
        for start, stop in place.chunks(GROUP_BYTES):
            self.background.submit(partial(shards.copy_rows, name, file, start, stop))
            if self.progress:
                self.progress.advance((stop - start) * place.row_bytes)

    def _matrix(self, name: str, layer: int) -> Counts:
        matrix = name.rpartition(".")[2]
        convert_group = self._to_bf16 if self.plan.to == "bf16" else self._to_release
        counts = Counts()
        for start, stop in self.checkpoint.expert_groups(name):
            counts.add(convert_group(name, layer, matrix, start, stop))
            if self.progress:
                spec = self.plan.model[name]
                self.progress.advance(num_bytes(spec) * (stop - start) // spec.shape[0])
        return counts

    def _to_bf16(self, name: str, layer: int, matrix: str, start: int, stop: int) -> Counts:
        stored = self.checkpoint.stored_experts(layer, matrix, start, stop)
        dtype = getattr(torch, self.plan.model[name].dtype)
        values = mixed.dequantize_matrix(stored, matrix, dtype, name=layout.experts_prefix(layer))
        name_non_finite(values, start, name)

        def write() -> None:
            self.model.put_rows(name, values, start)
            self.scales.put_rows(name + source.DIGEST, source.digests(stored, matrix), start)
            self._put_companions(self.scales, name, matrix, stored, start)

        self.background.submit(write)
        return Counts(converted=stop - start)

    def _to_release(self, name: str, layer: int, matrix: str, start: int, stop: int) -> Counts:
        weight = self.checkpoint.rows(name, start, stop)
        companions = source.source_companions(self.checkpoint, name, matrix, start, stop)
        try:
            stored, untouched, counts = requantize(weight, matrix, self.plan.formats[layer], companions, name)
        except FormatError:
            name_non_finite(weight, start, name)  # numbers the experts from the matrix's first, not the group's
            raise
        if companions is not None:
            flags = self.untouched.setdefault(name, torch.zeros(self.plan.model[name].shape[0], dtype=torch.bool))
            flags[start:stop] = untouched

        def write() -> None:
            self.model.put_rows(name, stored[matrix], start)
            self._put_companions(self.model, name, matrix, stored, start)

        self.background.submit(write)
        return counts

    def _put_companions(
        self, shards: ShardWriter, name: str, matrix: str, stored: Mapping[str, torch.Tensor], start: int
    ) -> None:
        for key, value in stored.items():
            if key != matrix and (value.ndim or start == 0):
                shards.put_rows(name + key.removeprefix(matrix), value, start)

    def _report(self, layer: int, counts: Counts, num_done: int) -> None:
        self.counts.add(counts)
        if self.progress:
            now, then = self.checkpoint.expert_formats[layer], self.plan.formats[layer]
            self.progress.line(
                f"layer {layer} ({num_done}/{len(self.plan.layers)}): {now} -> {then}, {_outcome(counts)}"
            )


class _Background:
    """One thread that does things in the order in which they are given, a few at most waiting."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> _Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> None:
        """Raises what earlier work raised."""
        while len(self._pending) >= _WAITING_GROUPS:
            self._pending.popleft().result()
        self._pending.append(self._executor.submit(work))

    def drain(self) -> None:
        """Wait for all work. Raises what it raised."""
        while self._pending:
            self._pending.popleft().result()


def _outcome(counts: Counts) -> str:
    parts = [f"{counts.converted} expert matrices"]
    for label, count in (
        ("untouched", counts.untouched),
        ("exact under old scales", counts.exact),
        ("requantised", counts.requantized),
        ("re-anchored", counts.reanchored),
        ("quantised anew", counts.new),
        ("saturated blocks", counts.saturated_blocks),
    ):
        if count:
            parts.append(f"{count} {label}")
    return ", ".join(parts)
