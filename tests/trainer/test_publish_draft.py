"""What the driver does when a draft serves already and the engines fail after that. Publication itself: `tests.e2e`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inkling_rl.checkpoint.reader import resolve
from inkling_rl.draft.manifest import Manifest

BASE = resolve("builtin:tiny-arithmetic")


class Engines:
    """In the place of a client to two engines: each drafts with a version and may be unable to forget one."""

    server_urls = ("first", "second")

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault  # None: it never answers
        self.serving = dict.fromkeys(self.server_urls, 0)
        self.forgotten: list[tuple[str, int]] = []

    async def draft_status(self, url: str, **_: bool) -> Any:
        return SimpleNamespace(version=self.serving[url], files=None, memory="in memory", num_blocks=1)

    async def stage_draft(self, url: str, directory: Path, version: int, replaces: int | None) -> tuple[str, str]:
        manifest = Manifest.read(directory)
        assert manifest is not None and manifest.version == version
        return manifest.digest, "in memory"

    async def switch_draft(self, url: str, version: int) -> None:
        self.serving[url] = version

    async def draft_once(self, url: str) -> None:
        pass

    async def forget_draft(self, url: str, version: int) -> None:
        self.forgotten.append((url, version))
        if url == "second":
            if self.fault is None:
                await asyncio.sleep(60)
            else:
                raise self.fault


@pytest.fixture
def publisher_module() -> Any:
    from trainer import vendor

    vendor.prepare()
    from trainer import publish_draft

    return publish_draft


@pytest.mark.parametrize(
    ("is_hung", "reason"),
    [(False, "refused by the engine"), (True, "no answer within 0.1 s")],
    ids=["refuses", "hangs"],
)
def test_a_draft_that_serves_is_published_though_an_engine_keeps_the_old_one(
    publisher_module: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_hung: bool,
    reason: str,
) -> None:
    from trainer.engine import EngineError

    monkeypatch.setattr(publisher_module, "FORGET_SECONDS", 0.1)
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    engines = Engines(None if is_hung else EngineError("refused by the engine"))
    publisher = publisher_module.DraftPublisher(engines, timeout=30.0)
    publication = asyncio.run(publisher.publish(BASE, 1))
    assert (publication.version, publication.num_engines) == (1, 2) and publication.seconds < 10
    # The old one was to go, and nothing took the new one back.
    assert engines.forgotten == [("first", 0), ("second", 0)]
    assert engines.serving == {"first": 1, "second": 1}
    (record,) = [r for r in caplog.records if r.name == publisher_module.__name__]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"draft 1 serves; an engine still holds the one before: {reason}"
