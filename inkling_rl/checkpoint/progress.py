"""What a user sees of long work on files: a bar of bytes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Console of one piece of work. On a terminal lines go above the bar."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.is_terminal = sys.stdout.isatty()
        self._bar: Any = None
        self._task: Any = None

    def line(self, text: str) -> None:
        """One line with the time since the work began."""
        shown = f"[{time.monotonic() - self.started:6.1f} s] {text}"
        if self._bar is not None:
            self._bar.console.print(shown, markup=False, highlight=False)
        else:
            print(shown, flush=True)

    def phase(self, name: str, num_bytes: int) -> None:
        """Begin a phase of `num_bytes`; the one before has ended."""
        self.stop()
        if not self.is_terminal:
            self.line(f"{name}: {num_bytes / 1e9:.2f} GB")
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), SpeedColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), transient=True)
        self._bar.start()
        self._task = self._bar.add_task(name, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        """So many bytes of the phase are done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=num_bytes)

    def stop(self) -> None:
        """Take the bar away. Safe to call again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
