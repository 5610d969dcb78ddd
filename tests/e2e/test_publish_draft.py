"""A draft published to two real engine servers: both draft with it, or both go on with the one before."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import resolve
from inkling_rl.engine_args import engine_arguments
from tests.benchmarks.drafting_speed import prompts
from tests.rollout.drafting import write_version
from tests.trainer.conftest import build_recipe
from trainer.engine import SERVER_ARGUMENTS, EngineError, EngineProcess, PublicationError, group_members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BASE = resolve("builtin:tiny-arithmetic")
"""Its draft is version 1."""

PROMPTS = prompts(str(BASE), 12)
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("drafts")

    def write(version: int, parent: int | None = None, **noise: Any) -> Path:
        path = folder / f"draft-{version}"
        if not path.exists():
            write_version(BASE, path, version, version - 1 if parent is None else parent, **({"noise": 0.7} | noise))
        return path

    return write


@pytest.fixture(scope="module")
def engines(drafts: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """One on the checkpoint's draft, one on the version after it."""
    logs, started = tmp_path_factory.mktemp("engines"), []
    try:
        for name, draft in (("first", {}), ("second", {"path": str(drafts(2))})):
            recipe = build_recipe(str(BASE), rollout={"max_num_seqs": 16, "kv_cache_gib": 0.05, "draft": draft})
            started.append(EngineProcess(engine_arguments(recipe) | SERVER_ARGUMENTS, port=0, log=logs / name))
        for engine in started:
            engine.wait_until_healthy(240.0)
        yield started
    finally:
        for engine in started:
            engine.end()


Scenario = Callable[[Any], Awaitable[None]]


@pytest.fixture
def play(engines: list[EngineProcess]) -> Iterator[Callable[..., None]]:
    """Runs a scenario with a publisher to both engines."""
    from trainer import vendor

    vendor.prepare()
    from trainer.client import EngineClient
    from trainer.publish_draft import DraftPublisher

    def run(scenario: Scenario, timeout: float = 60.0) -> None:
        async def main() -> None:
            client = EngineClient(
                server_urls=[engine.url for engine in engines],
                tokenizer=None,
                request_timeout=30.0,
                is_alive=lambda: all(engine.is_alive() for engine in engines),
            )
            try:
                await scenario(DraftPublisher(client, timeout))
            finally:
                await client.aclose()

        asyncio.run(main())

    yield run
    vendor.restore()


async def statuses(client: Any) -> list[Any]:
    return [await client.draft_status(url) for url in client.server_urls]


async def versions(client: Any) -> list[int]:
    return [status.version for status in await statuses(client)]


async def greedy(client: Any, url: str, prompt: list[int], **sampling: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    body = {
        "model": "base",
        "token_ids": prompt,
        "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 0} | sampling,
    }
    choice = (await client.request("POST", f"{url}/inference/v1/generate", body))["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def one_by_one(client: Any, url: str) -> tuple[list[Any], Any]:
    """Answers to all prompts, and what the engine has drafted for them."""
    before = await counts(client, url)
    answers = [await greedy(client, url, prompt) for prompt in PROMPTS]
    return answers, (await counts(client, url)).plus(before, -1)


async def counts(client: Any, url: str) -> Any:
    from trainer.acceptance import DraftCounts

    return DraftCounts.parse((await client.request("GET", f"{url}/metrics", is_json=False)).decode())


def test_an_engine_with_the_old_draft_becomes_like_one_started_on_the_new(play: Any, drafts: Any) -> None:
    """Also for prompts whose pages in the cache the old draft wrote."""

    async def scenario(publisher: Any) -> None:
        client = publisher.client
        first, second = client.server_urls
        assert await versions(client) == [1, 2]
        answers, old = await one_by_one(client, first)
        expected, new = await one_by_one(client, second)
        assert answers == expected  # whatever the draft
        assert old.metrics()["rollout/acceptance_length"] > new.metrics()["rollout/acceptance_length"] + 0.5

        publication = await publisher.publish(drafts(2), 2)
        assert (publication.version, publication.kind, publication.num_engines) == (2, "draft", 2)
        assert publication.num_bytes == 2 * 270849 and publication.seconds > 0
        one, other = await statuses(client)
        assert (one.version, one.files, one.memory, one.held) == (2, other.files, other.memory, None)
        again, now = await one_by_one(client, first)
        assert again == expected
        assert (now.drafts, now.accepted) == (new.drafts, new.accepted)

    play(scenario)


def test_a_draft_that_serves_is_not_published_again(play: Any, drafts: Any) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client
        before, (_, counted) = await statuses(client), await one_by_one(client, client.server_urls[0])
        publication = await publisher.publish(drafts(2), 2)
        assert (publication.num_bytes, publication.num_engines) == (0, 2)
        # The same weights under the next version are taken over, and nothing else changes.
        publication = await publisher.publish(drafts(3, seed=2), 3)
        assert publication.num_bytes == 2 * 2 * 270849
        after, (_, again) = await statuses(client), await one_by_one(client, client.server_urls[0])
        assert [status.version for status in after] == [3, 3]
        assert [(s.files, s.memory) for s in after] == [(s.files, s.memory) for s in before]
        assert (again.drafts, again.accepted) == (counted.drafts, counted.accepted)

    play(scenario)


def test_requests_that_run_while_drafts_change_come_out_the_same(play: Any, drafts: Any) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client
        long = {"max_tokens": 80, "ignore_eos": True}
        is_over = asyncio.Event()

        async def again_and_again(url: str, prompt: list[int], expected: Any) -> int:
            rounds = 0
            while rounds == 0 or not is_over.is_set():
                assert await greedy(client, url, prompt, **long) == expected
                rounds += 1
            return rounds

        asked = [(url, prompt) for url in client.server_urls for prompt in PROMPTS]
        expected = await asyncio.gather(*(greedy(client, url, prompt, **long) for url, prompt in asked))
        before = await preemptions(client)
        running = [
            asyncio.ensure_future(again_and_again(*request, answer))
            for request, answer in zip(asked, expected, strict=True)
        ]
        for version in range(4, 8):
            await publisher.publish(drafts(version), version)
        is_over.set()
        assert sum(await asyncio.gather(*running)) >= len(asked)
        assert all(now > was for was, now in zip(before, await preemptions(client), strict=True))
        assert await versions(client) == [7, 7]

    play(scenario)


async def preemptions(client: Any) -> list[float]:
    """Requests that had to be computed again, by engine."""
    texts = [await client.request("GET", f"{url}/metrics", is_json=False) for url in client.server_urls]
    return [float(re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", text.decode(), re.M)[0]) for text in texts]


def refused(publisher: Any, directory: Path, version: int, message: str, error: Any = EngineError, **more: Any) -> Any:
    """A publication that must fail and leave nothing behind."""

    async def check() -> None:
        client = publisher.client
        before = [(s.version, s.memory, s.held) for s in await statuses(client)]
        with pytest.raises(error, match=message):
            await publisher.publish(directory, version, **more)
        assert [(s.version, s.memory, s.held) for s in await statuses(client)] == before
        for url in client.server_urls:
            assert (await greedy(client, url, PROMPTS[0]))[0]

    return check()


def test_what_cannot_be_published_is_refused_with_its_reason(play: Any, drafts: Any, tmp_path: Path) -> None:
    async def scenario(publisher: Any) -> None:
        await refused(publisher, drafts(8), 9, "version must be 9, which is to be published; got 8", CheckpointError)
        await refused(publisher, tmp_path, 8, "version must be 8, .* got none", CheckpointError)
        shutil.copytree(drafts(8), tmp_path / "damaged")
        (file,) = (tmp_path / "damaged").glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-7] ^= 1
        file.write_bytes(content)
        # With the directory's path, which vLLM cuts out of its own errors.
        await refused(publisher, tmp_path / "damaged", 8, rf"400: {tmp_path}/damaged: \S+ must have the SHA-256")
        await refused(publisher, drafts(20), 20, "parent_version of draft version 20 must be 7, which serves; got 19")
        await refused(publisher, drafts(8), 8, "replaces of draft version 8 must be 7, which serves; got 6", replaces=6)
        await publisher.publish(drafts(20), 20, replaces=7)
        assert await versions(publisher.client) == [20, 20]

    play(scenario)


def test_when_one_engine_cannot_switch_the_other_switches_back(play: Any, drafts: Any, monkeypatch: Any) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client
        first, second = client.server_urls
        switch, once, stage = client.switch_draft, client.draft_once, client.stage_draft
        switched = []

        async def forgetful(url: str, version: int) -> Any:
            if url == second:
                await client.forget_draft(second, version)
            status = await switch(url, version)
            switched.append((url, status.version))
            return status

        async def elsewhere(url: str, *arguments: Any) -> Any:
            files, memory = await stage(url, *arguments)
            return ("0" * 64 if url == second else files), memory

        async def idle(url: str) -> None:
            if url == first:
                await once(url)

        for name, method, message, error in (
            ("switch_draft", forgetful, "draft version 21 must be staged before it is switched to", EngineError),
            ("stage_draft", elsewhere, f"{second} must hold the draft of .*draft-21/draft.json", PublicationError),
            ("draft_once", idle, f"{second} must draft with version 21, as it was staged", PublicationError),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(client, name, method)
                await refused(publisher, drafts(21), 21, message, error)
        assert switched == [(first, 21)]

    play(scenario)


def test_an_engine_that_hangs_leaves_the_old_version_everywhere(
    play: Any, drafts: Any, engines: list[EngineProcess], monkeypatch: Any
) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client
        switch = client.switch_draft

        async def hang(url: str, version: int) -> Any:
            if url == client.server_urls[1]:
                for pid in group_members(engines[1].process.pid):
                    os.kill(pid, signal.SIGSTOP)
            return await switch(url, version)

        monkeypatch.setattr("trainer.publish_draft.FORGET_SECONDS", 3.0)
        monkeypatch.setattr(client, "switch_draft", hang)
        with pytest.raises(PublicationError, match=r"within sync.timeout = 6 s; it was not. The version before it"):
            await publisher.publish(drafts(21), 21)
        assert (await client.draft_status(client.server_urls[0])).version == 20
        for pid in group_members(engines[1].process.pid):
            os.kill(pid, signal.SIGCONT)
        # It gets everything that was sent to it, in order.
        assert await versions(client) == [20, 20]
        monkeypatch.setattr(client, "switch_draft", switch)
        publisher.timeout = 60.0
        await publisher.publish(drafts(21), 21)
        assert await versions(client) == [21, 21]

    play(scenario, timeout=6.0)


def test_an_engine_that_dies_leaves_the_old_version_in_the_other(
    play: Any, drafts: Any, engines: list[EngineProcess], monkeypatch: Any
) -> None:
    """The last test: one engine is gone."""

    async def scenario(publisher: Any) -> None:
        client = publisher.client
        client.is_alive = lambda: True  # of the other one; the dead one closes its connections
        switch = client.switch_draft

        async def die(url: str, version: int) -> Any:
            if url == client.server_urls[1]:
                os.killpg(engines[1].process.pid, signal.SIGKILL)
            return await switch(url, version)

        monkeypatch.setattr(client, "switch_draft", die)
        with pytest.raises(EngineError, match="the connection to the engine broke"):
            await publisher.publish(drafts(22), 22)
        assert (await client.draft_status(client.server_urls[0])).version == 21
        assert (await client.draft_status(client.server_urls[0])).held is None
        assert await one_by_one(client, client.server_urls[0])

    play(scenario)
