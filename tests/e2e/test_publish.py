"""Publication against a real engine server: versions served as trained, failures that change nothing, bounded slots."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_rl.engine_args import engine_arguments
from inkling_rl.recipe import Recipe
from lora.files import write_adapter
from lora.model import adapter_parameters, adapter_state
from tests.trainer.conftest import build_recipe
from trainer.engine import SERVER_ARGUMENTS, EngineError, EngineProcess

PROMPTS = [[11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [30, 31, 32] * 12, list(range(40, 110))]
COMPLETIONS = [[5, 6, 7, 8, 9, 10], [99, 98, 97], [200, 201, 202, 203]]
SEQUENCES = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return build_recipe("builtin:tiny-arithmetic", rollout={"max_num_seqs": 8})


@pytest.fixture(scope="module")
def engine(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    from inkling_rl.checkpoint.reader import resolve

    arguments = engine_arguments(recipe, model=str(resolve(recipe.model.path))) | SERVER_ARGUMENTS
    process = EngineProcess(arguments, port=0, log=tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        process.wait_until_healthy(240.0)
        yield process
    finally:
        process.end()


class Policy:
    """The trainer's side: the transformers model with an adapter, in this process."""

    def __init__(self, recipe: Recipe) -> None:
        from trainer.model import build_policy

        self.recipe = recipe
        self.model = build_policy(recipe, torch.device("cpu")).eval()

    def move(self, size: float, seed: int) -> None:
        """A step of the adapter: every weight by up to `size`."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapter_parameters(self.model).values():
                parameter.add_(size * (2 * torch.rand(parameter.shape, generator=generator) - 1))

    def write(self, directory: str, state: dict[str, torch.Tensor] | None = None) -> None:
        lora = self.recipe.lora
        state = state or adapter_state(self.model)
        write_adapter(
            directory, state, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base_model=self.recipe.model.path
        )

    async def export(self, directory: str) -> int:
        self.write(directory)
        return sum(value.numel() * 4 for value in adapter_state(self.model).values())

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        from trainer.logprobs import score_actions

        scored = []
        for ids in sequences:
            tokens = torch.tensor([ids])
            with torch.no_grad():
                scores = score_actions(self.model, tokens, torch.ones_like(tokens), len(ids) - 1, 1.0)
            scored.append(scores.logprobs[0].tolist())
        return scored


@pytest.fixture
def policy(recipe: Recipe) -> Policy:
    return Policy(recipe)


Scenario = Callable[[Any], Awaitable[None]]


@pytest.fixture
def play(engine: EngineProcess, policy: Policy, tmp_path: Path) -> Iterator[Callable[[Scenario], None]]:
    """Runs a scenario with a publisher; afterwards the engine has no adapter left."""
    from trainer import vendor

    vendor.prepare()
    from trainer.client import EngineClient
    from trainer.publish import Publisher

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            client = EngineClient(
                server_urls=[engine.url], tokenizer=None, request_timeout=60.0,
                is_alive=engine.is_alive,
            )  # fmt: skip
            publisher = Publisher(
                client, directory=tmp_path / "adapters", timeout=60.0, export=policy.export, score=policy.score
            )
            try:
                await publisher.publish(0)
                await publisher.start_probe(SEQUENCES, [len(prompt) for prompt in PROMPTS])
                await scenario(publisher)
            finally:
                for name in (await client.served_adapters())[0]:
                    client.in_flight.clear()
                    await client.unload_adapter(name)
                await client.aclose()

        asyncio.run(main())

    yield run
    vendor.restore()


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_every_version_is_served_as_trained(play: Any, policy: Policy) -> None:
    async def scenario(publisher: Any) -> None:
        assert publisher.probe.mismatch < 1e-5
        before = await publisher.client.prompt_logprobs(0, SEQUENCES)
        assert distance(before, await policy.score(SEQUENCES)) < 1e-4
        for version in (1, 2, 3):
            policy.move(0.02, version)
            publication = await publisher.publish(version)
            assert (publication.version, publication.num_engines) == (version, 1)
            assert publication.num_bytes > 0 and publication.seconds > 0
            # The same prompts as under the version before: its cache must not answer.
            served = await publisher.client.prompt_logprobs(version, SEQUENCES)
            assert distance(served, await policy.score(SEQUENCES)) < 1e-4
            assert publisher.last_result.trainer_change > 1e-3
            assert publisher.last_result.difference < 1e-5
        assert distance(served, before) > 1e-2
        # The base is still there, untouched by adapters beside it.
        assert distance(await publisher.client.prompt_logprobs(0, SEQUENCES), before) < 1e-5

    play(scenario)


def test_an_unchanged_policy_changes_nothing(play: Any, policy: Policy) -> None:
    async def scenario(publisher: Any) -> None:
        policy.move(0.02, 1)
        await publisher.publish(1)
        before = await publisher.client.prompt_logprobs(1, SEQUENCES)
        await publisher.publish(2)
        assert publisher.last_result.trainer_change == 0.0
        assert await publisher.client.prompt_logprobs(2, SEQUENCES) == before

    play(scenario)


def test_hundreds_of_versions_hold_two_slots(play: Any, policy: Policy) -> None:
    async def scenario(publisher: Any) -> None:
        publisher.probe = None
        for version in range(1, 201):
            policy.move(0.001, version)
            await publisher.publish(version)
            assert len((await publisher.client.served_adapters())[0]) <= 2
        assert len(list(publisher.directory.iterdir())) == 2
        served = await publisher.client.prompt_logprobs(200, SEQUENCES)
        assert distance(served, await policy.score(SEQUENCES)) < 1e-4

    play(scenario)


def test_an_adapter_that_is_not_the_trainers_is_refused(play: Any, policy: Policy) -> None:
    from trainer.publish import PublicationError

    async def scenario(publisher: Any) -> None:
        policy.move(0.02, 1)
        await publisher.publish(1)
        before = await publisher.client.prompt_logprobs(1, SEQUENCES)
        stale = adapter_state(policy.model)

        async def export_stale(directory: str) -> int:
            policy.write(directory, stale)
            return 1

        policy.move(0.02, 2)
        publisher.export = export_stale
        with pytest.raises(PublicationError, match=r"not served as trained; version 1 still serves"):
            await publisher.publish(2)
        assert publisher.client.policy_version == 1
        assert list((await publisher.client.served_adapters())[0]) == ["policy-v1"]
        assert await publisher.client.prompt_logprobs(1, SEQUENCES) == before
        # And the right one can still be published.
        publisher.export = policy.export
        await publisher.publish(2)
        assert publisher.client.policy_version == 2

    play(scenario)


def test_a_broken_adapter_and_a_slow_one_leave_the_old_version(play: Any, policy: Policy) -> None:
    from trainer.publish import PublicationError

    async def scenario(publisher: Any) -> None:
        policy.move(0.02, 1)
        await publisher.publish(1)

        async def export_broken(directory: str) -> int:
            policy.write(directory)
            (Path(directory) / "adapter_model.safetensors").write_bytes(b"not safetensors")
            return 1

        async def export_never(directory: str) -> int:
            await asyncio.sleep(60)
            return 1

        publisher.export = export_broken
        with pytest.raises(EngineError, match="load_lora_adapter"):
            await publisher.publish(2)
        publisher.export, publisher.timeout = export_never, 0.5
        with pytest.raises(PublicationError, match=r"within sync.timeout = 0.5 s; it was not. Version 1 still serves"):
            await publisher.publish(2)
        assert publisher.client.policy_version == 1
        assert list((await publisher.client.served_adapters())[0]) == ["policy-v1"]
        assert not (publisher.directory / "policy-v2").exists()

    play(scenario)


def test_a_version_in_use_is_not_taken_away(play: Any, policy: Policy) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client
        policy.move(0.02, 1)
        await publisher.publish(1)
        async with client._using("policy-v1"):
            for version in (2, 3):
                policy.move(0.02, version)
                await publisher.publish(version)
            assert sorted((await client.served_adapters())[0]) == ["policy-v1", "policy-v2", "policy-v3"]
            assert len(await client.prompt_logprobs(1, SEQUENCES)) == 3
        await publisher.publish(4)
        assert sorted((await client.served_adapters())[0]) == ["policy-v3", "policy-v4"]

    play(scenario)


def test_seeds_decide_completions(play: Any, policy: Policy) -> None:
    async def scenario(publisher: Any) -> None:
        client = publisher.client

        async def sample(seed: int) -> list[int]:
            sampling = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "logprobs": 0}
            ids: list[int] = (await client._generate_tokens("base", PROMPTS[0], sampling))["token_ids"]
            return ids

        assert await sample(5) == await sample(5)
        drawn = [tuple(await sample(seed)) for seed in range(6)]
        assert len(set(drawn)) > 1

    play(scenario)


def test_a_version_that_nobody_published_is_an_error(play: Any, policy: Policy, tmp_path: Path) -> None:
    async def scenario(publisher: Any) -> None:
        with pytest.raises(EngineError, match="policy-v9"):
            await publisher.client.prompt_logprobs(9, SEQUENCES)

    play(scenario)
    shutil.rmtree(tmp_path / "adapters", ignore_errors=True)
