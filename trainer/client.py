"""The engine as the driver talks to it: SkyRL's HTTP client with a clock, a supervised process and policy versions.

What SkyRL's client does not do: give up on an engine that does not answer, notice at once that its process is gone,
name the adapter of a policy version in every request and check that the answer came from it, and count which versions
are in use. Token ids go in and come out; nothing is tokenised twice.

Source: skyrl 0.4.0 `remote_inference_client.py`. Departures: no retries against a dead process; no router process in
front of several engines, the client picks one itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from inkling_rl.types import DraftStatus
from trainer.acceptance import DraftCounts
from trainer.engine import BASE_MODEL_NAME, EngineError

POLL_SECONDS = 0.5


class EngineHungError(EngineError):
    """The engine's process is there and does not answer."""


def model_name(version: int) -> str:
    """What the engine calls a policy version: the base model for 0, else an adapter's name."""
    return BASE_MODEL_NAME if version == 0 else f"policy-v{version}"


def request_seed(*parts: int | str) -> int:
    """A seed below 2**31 that follows from its parts: run seed, phase, step, row, sample, turn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class EngineClient(RemoteInferenceClient):
    """Client of one or more engines that serve versions of one policy."""

    def __init__(
        self,
        *,
        server_urls: list[str],
        tokenizer: Any,
        request_timeout: float,
        max_concurrency: int = 0,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is contacted.

        Args:
            server_urls: of every engine.
            tokenizer: decodes completions for environments.
            request_timeout: seconds without any answer, while one is due, after which the engine counts as hung.
            max_concurrency: requests that the engine sees at once, in order of arrival; 0 for no limit. 1 makes what it
                computes for a request independent of the others' timing.
            is_alive: whether the supervised engine process is there.
        """
        super().__init__(
            proxy_url=server_urls[0],
            server_urls=server_urls,
            data_parallel_size=1,
            model_name=BASE_MODEL_NAME,
            uses_lora_weight_sync=True,
            tokenizer=tokenizer,
        )
        self.request_timeout = request_timeout
        self.is_alive = is_alive
        self.policy_version = 0
        self.in_flight: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._turns: Counter[Any] = Counter()
        self._load: Counter[str] = Counter()
        self._engine_of: dict[Any, str] = {}
        self._last_answer = time.monotonic()
        self._session: aiohttp.ClientSession | None = None

    @property
    def weight_version(self) -> int:
        """SkyRL salts the prefix cache with it."""
        return self.policy_version

    def increment_weight_version(self) -> None:
        """Nothing: the publisher sets `policy_version` when it switches."""

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        """Completions under the current policy version; see SkyRL's `InferenceEngineOutput`.

        A `seed` in the sampling parameters is that of the episode; every turn of it gets one of its own.

        Raises:
            EngineError: the engine is gone, hung, refused, or answered for another version.
        """
        name = model_name(self.policy_version)
        sampling = dict(input_batch.get("sampling_params") or {})
        (session,) = input_batch["session_ids"]
        (token_ids,) = input_batch["prompt_token_ids"]
        if "seed" in sampling:
            sampling["seed"] = request_seed(sampling["seed"], self._turns[session])
        self._turns[session] += 1
        choice = await self._generate_tokens(
            name, token_ids, sampling, session=session, cache_salt=input_batch.get("cache_salt")
        )
        content = (choice["logprobs"] or {}).get("content") or []
        return {
            "responses": [self.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)],
            "response_ids": [choice["token_ids"]],
            "stop_reasons": [choice["finish_reason"]],
            "response_logprobs": [[entry["logprob"] for entry in content]],
        }

    async def _generate_tokens(
        self,
        name: str,
        token_ids: Sequence[int],
        sampling: dict[str, Any],
        session: Any = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        async with self._using(name), self._slots or nullcontext(), self._engine_for(session) as engine:
            body = {"model": name, "token_ids": list(token_ids), "sampling_params": sampling}
            if cache_salt is not None:
                body["cache_salt"] = cache_salt
            answer = await self.request("POST", f"{engine}/inference/v1/generate", body)
        if answer.get("model") != name:
            raise EngineError(f"a request for {name} must be answered by {name}; got {answer.get('model')!r}")
        return {**answer["choices"][0], "prompt_logprobs": answer.get("prompt_logprobs")}

    async def prompt_logprobs(self, version: int, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of every token but the first of each sequence, under a policy version."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        name = model_name(version)
        answers = await asyncio.gather(*(self._generate_tokens(name, ids, sampling) for ids in sequences))
        return [
            [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)]
            for ids, answer in zip(sequences, answers, strict=True)
        ]

    async def served_adapters(self) -> list[dict[str, str]]:
        """For every engine: adapter name -> directory it was loaded from."""
        answers = await asyncio.gather(*(self.request("GET", f"{url}/v1/models") for url in self.server_urls))
        return [{card["id"]: card["root"] for card in answer["data"] if card.get("parent")} for answer in answers]

    async def draft_counts(self) -> DraftCounts:
        """What all engines together have drafted and returned so far."""
        texts = await asyncio.gather(
            *(self.request("GET", f"{url}/metrics", is_json=False) for url in self.server_urls)
        )
        return reduce(DraftCounts.plus, (DraftCounts.parse(text.decode()) for text in texts))

    async def draft_status(self, url: str, verify: bool = False) -> DraftStatus:
        """Which draft an engine drafts with; `verify` has it compute the digest from the weights in use once more."""
        return DraftStatus(**await self.request("GET", f"{url}/v1/draft" + "?verify=true" * verify))

    async def stage_draft(self, url: str, directory: Path, version: int, replaces: int | None) -> tuple[str, str]:
        """Has an engine read and check a draft and hold it beside the one that serves.

        Args:
            url: of the engine.
            directory: of the draft, readable for the engine.
            version: of the draft.
            replaces: version that must serve; the draft's `parent_version` unless given.

        Returns:
            Digests of the tensors in the files and as they are in memory.
        """
        body = {"directory": str(directory), "version": version, "replaces": replaces}
        answer = await self.request("POST", f"{url}/v1/draft/stage", body)
        return answer["files"], answer["memory"]

    async def switch_draft(self, url: str, version: int) -> DraftStatus:
        """Has an engine draft with the version that it holds, from its next step on."""
        return DraftStatus(**await self.request("POST", f"{url}/v1/draft/switch", {"version": version}))

    async def forget_draft(self, url: str, version: int) -> DraftStatus:
        """Has an engine let a version go, and go back to what it replaced if it serves."""
        return DraftStatus(**await self.request("POST", f"{url}/v1/draft/forget", {"version": version}))

    async def draft_once(self, url: str) -> None:
        """A request to one engine that is just long enough to be drafted for."""
        name = model_name(self.policy_version)
        sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        body = {"model": name, "token_ids": [0, 0], "sampling_params": sampling}
        async with self._using(name), self._slots or nullcontext():
            await self.request("POST", f"{url}/inference/v1/generate", body)

    async def load_adapter(self, name: str, directory: str) -> None:
        """Loads an adapter into every engine under a name that was never used before."""
        body = {"lora_name": name, "lora_path": directory}
        await asyncio.gather(
            *(self.request("POST", f"{url}/v1/load_lora_adapter", body, is_json=False) for url in self.server_urls)
        )

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter in every engine. No request may use it."""
        assert not self.in_flight[name], f"{name} is in use"
        body = {"lora_name": name}
        await asyncio.gather(
            *(self.request("POST", f"{url}/v1/unload_lora_adapter", body, is_json=False) for url in self.server_urls)
        )

    async def finish_session(self, session_id: str) -> None:
        """Forgets an episode."""
        self._turns.pop(session_id, None)
        self._engine_of.pop(session_id, None)

    @asynccontextmanager
    async def _engine_for(self, session: Any) -> AsyncIterator[str]:
        """The engine with the fewest open requests, and for later turns of an episode the one that has its cache."""
        engine = self._engine_of.get(session) or min(self.server_urls, key=lambda url: self._load[url])
        if session is not None:
            self._engine_of[session] = engine
        self._load[engine] += 1
        try:
            yield engine
        finally:
            self._load[engine] -= 1

    @asynccontextmanager
    async def _using(self, name: str) -> AsyncIterator[None]:
        self.in_flight[name] += 1
        try:
            yield
        finally:
            self.in_flight[name] -= 1

    async def request(self, method: str, url: str, body: Any = None, *, is_json: bool = True) -> Any:
        """One HTTP request, given up when the engine is gone or hung.

        Raises:
            EngineError: no connection, no answer, or an error status; the message holds what the engine said.
        """
        task = asyncio.ensure_future(self._exchange(method, url, body))
        started = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=POLL_SECONDS)
                if done:
                    break
                if not self.is_alive():
                    raise EngineError("the engine must answer; its server ended while a request was open")
                # Another request's answer shows that the engine works; this one waits for its turn.
                silent = time.monotonic() - max(started, self._last_answer)
                if silent > self.request_timeout:
                    raise EngineHungError(
                        f"the engine must answer within rollout.request_timeout = {self.request_timeout:g} s; nothing "
                        f"came for {silent:.0f} s though its process is there. It hangs"
                    )
        finally:
            task.cancel()
        status, content = task.result()
        self._last_answer = time.monotonic()
        if status != 200:
            raise EngineError(f"the engine answered {method} {url} with {status}: {_reason(content)}")
        return _decoded(content) if is_json else content

    async def _exchange(self, method: str, url: str, body: Any) -> tuple[int, bytes]:
        session = await self._http()
        try:
            async with session.request(method, url, json=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineError(f"the connection to the engine broke: {error}") from error

    async def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Kept alive for less than the server's 5 s, or a closed connection would be reused.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def aclose(self) -> None:
        """Closes the connections; call it from the loop that used them."""
        if self._session is not None:
            await self._session.close()


def _reason(content: bytes) -> str:
    """What an error answer says, in vLLM's form or any other."""
    try:
        return str(_decoded(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(content[:2000])


def _decoded(content: bytes) -> Any:
    import orjson

    return orjson.loads(content)
