"""Publication of a draft: the state machine of `trainer.publish`, whose switch changes weights in place.

    stage        every engine reads the directory, checks it (`rollout.plugin.draft_versions`) and holds the tensors
    verify       all hold the draft that the directory's manifest speaks of
    switch       engine after engine exchanges the weights between two steps and empties its prefix cache
    acknowledge  every engine says that the new version serves, from the bytes that it staged, and has drafted with it;
                 then the old one is forgotten

A failure anywhere makes every engine that can still be reached forget the new version, which for those that have
switched means to switch back. Whatever an engine drafts with, what it gives out is the policy's: between the first
engine's switch and the last's they differ in speed alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.draft.manifest import MANIFEST_FILE, Manifest
from inkling_rl.types import DraftStatus, Publication
from trainer.client import EngineClient
from trainer.engine import EngineError, PublicationError

FORGET_SECONDS = 10.0

logger = logging.getLogger(__name__)


class DraftPublisher:
    """Replaces the draft of all engines."""

    def __init__(self, client: EngineClient, timeout: float) -> None:
        """Nothing is contacted. `timeout` is in seconds, for one publication."""
        self.client = client
        self.timeout = timeout

    async def publish(self, directory: Path, version: int, replaces: int | None = None) -> Publication:
        """Makes the draft of a directory serve in every engine; nothing where it does already.

        Args:
            directory: of the draft; every engine must be able to read it.
            version: of the draft, as its manifest says.
            replaces: version that must serve; the one that the draft's training began with unless given.

        Raises:
            CheckpointError: no manifest there, or of another version.
            PublicationError: engines do not hold what was written, or not within the time-out.
            EngineError: an engine is gone, hung or refuses.
        """
        started = time.monotonic()
        manifest = _manifest(directory, version)
        before: dict[str, DraftStatus] = {}
        try:
            async with asyncio.timeout(self.timeout):
                urls = list(self.client.server_urls)
                before = dict(zip(urls, await _each(urls, self.client.draft_status), strict=True))
                serving = (version, manifest.digest)
                late = [url for url in urls if (before[url].version, before[url].files) != serving]
                await self._take_over(late, directory.absolute(), manifest, replaces)
        except Exception as error:
            await self._forget_failed(before, version)
            if isinstance(error, TimeoutError):
                raise PublicationError(
                    f"draft version {version} must be published within sync.timeout = {self.timeout:g} s; it was not. "
                    "The version before it still serves. Raise it, or see the engine's log"
                ) from error
            raise
        await self._forget_replaced({url: before[url].version for url in late}, version)
        return Publication(
            version=version,
            kind="draft",
            num_bytes=manifest.num_bytes * len(late),
            seconds=time.monotonic() - started,
            num_engines=len(urls),
        )

    async def _take_over(self, urls: Sequence[str], directory: Path, manifest: Manifest, replaces: int | None) -> None:
        client, version = self.client, manifest.version
        staged = await _each(urls, lambda url: client.stage_draft(url, directory, version, replaces))
        for url, (files, _) in zip(urls, staged, strict=True):
            if files != manifest.digest:
                raise PublicationError(
                    f"{url} must hold the draft of {manifest.path}, whose tensors have the digest {manifest.digest}; "
                    f"it read {files}. Put drafts where every engine reads the same files"
                )
        await _each(urls, lambda url: client.switch_draft(url, version))
        await _each(urls, client.draft_once)
        serving = await _each(urls, lambda url: client.draft_status(url, verify=True))
        for url, (_, memory), status in zip(urls, staged, serving, strict=True):
            if (status.version, status.memory) != (version, memory) or not status.num_blocks:
                raise PublicationError(
                    f"{url} must draft with version {version}, as it was staged (digest {memory}); it says {status}. "
                    "The version before it still serves. See the engine's log"
                )

    async def _forget_replaced(self, versions: Mapping[str, int], version: int) -> None:
        """Let each engine's version before this one go. Where it stays it takes memory until the next one is staged."""
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                await _each(list(versions), lambda url: self.client.forget_draft(url, versions[url]))
        except (EngineError, TimeoutError) as error:
            reason = error if str(error) else f"no answer within {FORGET_SECONDS:g} s"
            logger.warning("draft %d serves; an engine still holds the one before: %s", version, reason)

    async def _forget_failed(self, before: Mapping[str, DraftStatus], version: int) -> None:
        """Leave no engine with the version that did not serve before."""
        urls = [url for url, status in before.items() if status.version != version]
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                await _each(urls, lambda url: self.client.forget_draft(url, version))
        except (EngineError, TimeoutError):
            pass  # the engine is gone or hung; the first error says so


def _manifest(directory: Path, version: int) -> Manifest:
    manifest = Manifest.read(directory)
    if manifest is None or manifest.version != version:
        got = "none" if manifest is None else manifest.version
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: version must be {version}, which is to be published; got {got}. "
            "Publish each draft under its own version"
        )
    return manifest


async def _each[T](urls: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """Every engine's answer. The first error is raised when all have answered: nothing goes on behind the back."""
    answers = await asyncio.gather(*(ask(url) for url in urls), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
