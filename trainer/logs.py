"""Where the driver's log messages go: vendors' talk to a file, our own warnings to the console too.

SkyRL sends everything to the console with loguru, and takes the standard library's root logger over whenever a trainer
is made; `theirs_to` is therefore called once before and once after.
"""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.progress import Progress

PACKAGES = ("inkling_rl", "trainer", "lora", "rollout")


def theirs_to(file: Path) -> None:
    """SkyRL's, Ray's and transformers' messages of this process go to `file` only."""
    import skyrl.utils.log  # installs a console handler when it is first imported
    from loguru import logger

    assert skyrl.utils.log
    logger.remove()
    logger.add(file, level="INFO", backtrace=False, diagnose=False)
    for name in ("skyrl", "transformers", "ray"):
        logging.getLogger(name).handlers = [logging.FileHandler(file)]


def ours_to(progress: Progress) -> None:
    """Our warnings are shown on the console. Safe to call again."""
    for package in PACKAGES:
        ours = logging.getLogger(package)
        ours.setLevel(logging.INFO)
        ours.handlers = [handler for handler in ours.handlers if not isinstance(handler, _Console)]
        ours.addHandler(_Console(progress))


class _Console(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.line(f"{record.levelname.lower()}: {record.getMessage()}")
