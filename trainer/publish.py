"""Publication of the policy: one state machine that makes a version visible to every engine, or leaves the old one.

    stage        the adapter is written as a PEFT directory, whole or not at all, and loaded into every engine under a
                 name of its own; nobody uses that name yet
    verify       every engine lists that name from that directory, and a probe scores fixed completions on engine and
                 trainer: the engine must have changed as the trainer did
    switch       requests name the new version from here on; its name also separates the prefix cache
    acknowledge  a request without a version of its own is answered by the new one; the version before the last one is
                 forgotten once no request uses it, so that an engine holds two however long the run is

A failure before the switch forgets the new name again and raises; what served before still serves.

Not here: the draft's publication (`trainer.publish_draft`), full weights, and the adapter's arithmetic.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from inkling_rl.types import Publication
from trainer.client import EngineClient, model_name
from trainer.engine import EngineError, PublicationError
from trainer.probe import Probe, ProbeResult, compare_changes, mean_abs
from trainer.publish_draft import DraftPublisher


class Publisher:
    """Owns the versions that the engines serve. Lives in the driver."""

    def __init__(
        self,
        client: EngineClient,
        *,
        directory: Path,
        timeout: float,
        export: Callable[[str], Awaitable[int]],
        score: Callable[[list[list[int]]], Awaitable[list[list[float]]]],
    ) -> None:
        """Nothing is contacted.

        Args:
            client: of the engines.
            directory: for staged adapters; every engine must be able to read it.
            timeout: seconds for one publication.
            export: writes the live adapter to a directory, returns its bytes.
            score: log-probabilities of sequences under the live adapter, as `PolicyWorkerCore.score`.
        """
        self.client = client
        self.directory = directory
        self.timeout = timeout
        self.export = export
        self.score = score
        self.probe: Probe | None = None
        self.last_result: ProbeResult | None = None
        self.drafts = DraftPublisher(client, timeout)

    async def publish_draft(self, directory: Path, version: int, replaces: int | None = None) -> Publication:
        """Makes the draft of a directory serve in every engine; see `DraftPublisher.publish`."""
        return await self.drafts.publish(directory, version, replaces)

    async def publish(self, version: int) -> Publication:
        """Makes the trainer's live adapter visible as `version`. Version 0 is the base, which needs no staging.

        Raises:
            PublicationError: not served as trained, or not within the time-out.
            EngineError: an engine is gone, hung or refuses.
        """
        started = time.monotonic()
        num_bytes = 0
        if version > 0:
            try:
                async with asyncio.timeout(self.timeout):
                    num_bytes = await self._stage_and_verify(version)
            except Exception as error:
                await self._forget_failed(version)
                if isinstance(error, TimeoutError):
                    raise PublicationError(
                        f"version {version} must be published within sync.timeout = {self.timeout:g} s; it was not. "
                        f"Version {self.client.policy_version} still serves. Raise it, or see the engine's log"
                    ) from error
                raise
        previous = self.client.policy_version
        self.client.policy_version = version
        await self._acknowledge(version, previous)
        engines = len(self.client.server_urls)
        return Publication(
            version=version,
            kind="adapter",
            num_bytes=num_bytes * engines,
            seconds=time.monotonic() - started,
            num_engines=engines,
        )

    async def _stage_and_verify(self, version: int) -> int:
        name, directory = model_name(version), self.directory / model_name(version)
        num_bytes = await self.export(str(directory))
        await self.client.load_adapter(name, str(directory))
        for url, adapters in zip(self.client.server_urls, await self.client.served_adapters(), strict=True):
            if adapters.get(name) != str(directory):
                raise PublicationError(
                    f"{url} must serve {name} from {directory}; it serves {adapters.get(name)}. Version "
                    f"{self.client.policy_version} still serves"
                )
        if self.probe is not None:
            await self._check_probe(version, self.probe)
        return num_bytes

    async def _check_probe(self, version: int, probe: Probe) -> None:
        engine, trainer = await self._scores(version, probe)
        result = compare_changes(probe, engine, trainer)
        self.last_result = result
        # "not <=" and not ">": a NaN on either side must fail.
        if not result.difference <= result.limit:
            raise PublicationError(
                f"version {version} must change the engine's log-probabilities as it changed the trainer's: mean "
                f"|engine change - trainer change| on the probe is {result.difference:.3g}, the trainer changed by "
                f"{result.trainer_change:.3g}, the limit is {result.limit:.3g}. The adapter is not served as trained; "
                f"version {self.client.policy_version} still serves"
            )
        probe.engine, probe.trainer = engine, trainer

    async def _scores(self, version: int, probe: Probe) -> tuple[list[float], list[float]]:
        engine, trainer = await asyncio.gather(
            self.client.prompt_logprobs(version, probe.sequences), self.score(probe.sequences)
        )
        return probe.completions(engine), probe.completions(trainer)

    async def start_probe(self, sequences: list[list[int]], prompt_lengths: list[int]) -> Probe:
        """Makes the probe from sampled sequences and scores it under the version that serves now.

        Its mismatch is that between engine and trainer at this moment.
        """
        probe = Probe(sequences, prompt_lengths)
        probe.engine, probe.trainer = await self._scores(self.client.policy_version, probe)
        probe.mismatch = mean_abs([e - t for e, t in zip(probe.engine, probe.trainer, strict=True)])
        self.probe = probe
        return probe

    async def _acknowledge(self, version: int, previous: int) -> None:
        if self.probe is None and version > 0:
            # Without a probe nothing has been computed by the new version yet.
            await self.client.prompt_logprobs(version, [[0, 0]])
        kept = {model_name(version), model_name(previous)}
        served = {name for adapters in await self.client.served_adapters() for name in adapters}
        for name in sorted(served - kept):
            if not self.client.in_flight[name]:
                await self.client.unload_adapter(name)
                shutil.rmtree(self.directory / name, ignore_errors=True)

    async def _forget_failed(self, version: int) -> None:
        name = model_name(version)
        try:
            async with asyncio.timeout(10.0):
                if any(name in adapters for adapters in await self.client.served_adapters()):
                    await self.client.unload_adapter(name)
        except (EngineError, TimeoutError):
            pass  # the engine is gone or hung; the first error says so
        shutil.rmtree(self.directory / name, ignore_errors=True)
