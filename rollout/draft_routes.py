"""Routes of an engine's API server by which a draft is replaced while the engine runs.

    POST /v1/draft/stage   {"directory", "version", "replaces"?}   read, check and hold it in every worker
    POST /v1/draft/switch  {"version"}                             it serves from the next step on
    POST /v1/draft/forget  {"version"}                             let it go; if it serves, go back to what it replaced
    GET  /v1/draft         ?verify=true                            what serves; with a look at all its weights

Answers are those of `rollout.plugin.draft_versions`; a refusal has status 400 and its reason in the form of vLLM's
errors. Nothing is switched unless every worker holds the same, and when one cannot switch the others switch back.

A switch needs a moment between two steps and an empty prefix cache, running requests included: their pages, too, were
written by the old draft. So the engine is paused, which puts running requests back to the queue without their pages;
they are computed again and go on with the token that they would have had.

Not a plugin of vLLM's for routes: those need VLLM_PLUGINS, which would exclude every other plugin, too. vLLM's servers
and SkyRL's take an ASGI class by name (`--middleware rollout.draft_routes.DraftRoutes`); this one adds the routes when
the application starts, so that they lie behind the authentication as vLLM's own do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from inkling_rl.engine_args import DRAFT_WORKER

Answer = dict[str, Any]


class RefusedError(Exception):
    """What was asked for cannot be done, and why."""


class RefusingRoute(APIRoute):
    """Answers a refusal in the form of vLLM's errors, but with the paths in it, which vLLM would cut out."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_refuse(request: Request) -> Response:
            try:
                return await answer(request)
            except RefusedError as error:
                status = HTTPStatus.BAD_REQUEST
                details = {"message": str(error), "type": "DraftRefused", "param": None, "code": status.value}
                return JSONResponse({"error": details}, status)

        return answer_or_refuse


router = APIRouter(prefix="/v1/draft", route_class=RefusingRoute)
_turn = asyncio.Lock()
"""One change at a time: what was asked for later is answered later, also when nobody waits for the first any more."""


class Version(BaseModel):
    """A draft by its version."""

    version: int


class Staged(Version):
    """A draft to be read."""

    directory: str
    replaces: int | None = None


class DraftRoutes:
    """ASGI class that adds the routes to the application that it is part of."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            scope["app"].include_router(router)
        await self.app(scope, receive, send)


@router.get("")
async def status(request: Request, verify: bool = False) -> Answer:
    """What serves."""
    async with _turn:
        return _same(await _call(request, "draft_status", verify))


@router.post("/stage")
async def stage(request: Request, draft: Staged) -> Answer:
    """Read, check and hold a draft in every worker, or in none."""
    async with _turn:
        answers = await _call(request, "stage_draft", draft.directory, draft.version, draft.replaces)
        try:
            return _same(answers)
        except RefusedError:
            await _call(request, "forget_draft", draft.version)
            raise


@router.post("/switch")
async def switch(request: Request, draft: Version) -> Answer:
    """Make a held draft serve in every worker, or in none."""
    async with _turn:
        now = _same(await _call(request, "draft_status"))
        if now["version"] == draft.version:
            return now
        async with _paused(request):
            return await _switch(request, draft.version, now["version"])


@router.post("/forget")
async def forget(request: Request, draft: Version) -> Answer:
    """Let a draft go, and go back to the one that it replaced if it serves."""
    async with _turn:
        # Not `_same`: this is what brings workers that differ together again.
        serving = [answer for answer in await _call(request, "draft_status") if answer.get("version") == draft.version]
        if serving:
            before, held = serving[0]["previous"], serving[0]["held"]
            if before is None:
                other = (
                    "no other is held" if held is None else f"version {held}, which is held, is not what it replaced"
                )
                raise RefusedError(
                    f"draft version {draft.version} must not serve to be forgotten; it does, and {other}. Switch to "
                    "another one first"
                )
            async with _paused(request):
                await _call(request, "switch_draft", before)
        return _same(await _call(request, "forget_draft", draft.version))


async def _switch(request: Request, version: int, before: int) -> Answer:
    answers = await _call(request, "switch_draft", version)
    try:
        return _same(answers)
    except RefusedError:
        await _call(request, "switch_draft", before)
        raise


@asynccontextmanager
async def _paused(request: Request) -> AsyncIterator[None]:
    """Inside, no step runs, no request has pages and the prefix cache is empty; requests wait and go on afterwards."""
    engine = request.app.state.engine_client
    was_paused = await engine.is_paused()
    try:
        await engine.pause_generation(mode="keep", clear_cache=True)
        yield
    finally:
        if not was_paused:
            await engine.resume_generation()


async def _call(request: Request, method: str, *arguments: Any) -> list[Answer]:
    """A method of `rollout.plugin.draft_versions.DraftTransfer` in every worker.

    Raises:
        RefusedError: this engine has no draft that could be replaced.
    """
    state = request.app.state
    if state.vllm_config.parallel_config.worker_extension_cls != DRAFT_WORKER:
        raise RefusedError(
            "rollout.draft must be given where a draft is to be replaced; this engine was started without. Start it "
            "with one"
        )
    answers: list[Answer] = await state.engine_client.collective_rpc(method, args=arguments)
    return answers


def _same(answers: list[Answer]) -> Answer:
    """The answer of all workers.

    Raises:
        RefusedError: one of them refused, or they do not say the same.
    """
    for answer in answers:
        if "refused" in answer:
            raise RefusedError(answer["refused"])
    if any(answer != answers[0] for answer in answers):
        raise RefusedError(f"every worker of an engine must hold the same draft; got {answers}. Stage it again")
    return answers[0]
