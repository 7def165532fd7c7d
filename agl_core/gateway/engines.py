"""Engines that are asked themselves: to freeze, to go on, and how they are.

An engine is a server without ``/v1``. Freezing is vLLM's ``POST /pause?mode=keep`` (0.32, dev mode
only): the calls in flight stall, their KV cache is dropped and computed anew after ``/resume``.
Calls that come to a frozen engine hang there, so the shared state knows which ones are frozen, from
before they are asked until they have said that they go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import attrs

from agl_core.errors import AglError, UpstreamError, UpstreamRefused, UpstreamTimeout
from agl_core.gateway.registry import root_of
from agl_core.gateway.replies import headers_upstream
from agl_core.gateway.upstream import Timeouts, UpstreamClient, UpstreamRequest, upstream_url
from agl_core.interfaces import ServerAnswer
from agl_core.records import ModelServer, PausedEngine, PolicyPause
from agl_core.settings import GatewaySettings

Pauses = Mapping[str, PolicyPause]

# Such an answer says that the server has no such route.
NOT_SERVED = frozenset({404, 405})
_ANSWER_BYTES = 2**20


class EnginePauseFailed(AglError):
    """An engine could not be frozen, so nothing is."""

    default_code: ClassVar[str] = "engine_pause_failed"
    default_status: ClassVar[int] = 502


@attrs.frozen(kw_only=True)
class Refusal:
    """An engine that was not frozen, or not surely."""

    engine: PausedEngine
    status: int | None
    """None: there was no answer."""
    says: str
    is_running: bool
    """Whether it goes on for certain; an answer that was lost may have been a yes."""


class EngineClient:
    """Asks engines, with the credential that their server is registered with."""

    def __init__(self, settings: GatewaySettings, client: UpstreamClient) -> None:
        self._settings = settings
        self._client = client

    async def ask(
        self,
        method: Literal["GET", "POST"],
        url: str,
        path: str,
        credential: str | None,
    ) -> int:
        """Send a request without a body; returns the answer's status.

        Raises:
            UpstreamError: There was no answer, or none in ``gateway.engine_seconds``.
        """
        seconds = self._settings.engine_seconds
        request = self._request(method, url, path, credential, b"application/json")
        return (await self._send(request, seconds, _ANSWER_BYTES)).status

    async def read(
        self, url: str, path: str, credential: str | None, seconds: float, limit_bytes: int
    ) -> ServerAnswer:
        """Ask for something to read, within bounds (see ``interfaces.ModelServers.get``)."""
        request = self._request("GET", url, path, credential, b"*/*")
        try:
            async with asyncio.timeout(seconds):
                return await self._send(request, seconds, limit_bytes)
        except TimeoutError as exc:
            raise UpstreamTimeout(
                f"the model server did not answer {path} within {seconds:g} seconds"
            ) from exc

    def _request(
        self,
        method: Literal["GET", "POST"],
        url: str,
        path: str,
        credential: str | None,
        accept: bytes,
    ) -> UpstreamRequest:
        secret = self._settings.credentials.get(credential or "")
        return UpstreamRequest(
            method=method,
            url=upstream_url(url, path),
            headers=headers_upstream([(b"accept", accept)], secret.reveal() if secret else None),
            body=b"",
        )

    async def _send(
        self, request: UpstreamRequest, seconds: float, limit_bytes: int
    ) -> ServerAnswer:
        timeouts = Timeouts(
            connect_seconds=self._settings.connect_seconds,
            first_byte_seconds=seconds,
            idle_seconds=seconds,
        )
        answer = await self._client.open(request, timeouts=timeouts)
        async with answer:
            body = await answer.read_all(limit_bytes)
            return ServerAnswer(status=answer.status, body=body)

    async def freeze(self, engine: PausedEngine) -> Refusal | None:
        """Freeze an engine; None: it is frozen."""
        try:
            status = await self.ask("POST", engine.url, "/pause?mode=keep", engine.credential)
        except UpstreamError as exc:
            return Refusal(
                engine=engine,
                status=None,
                says=exc.message,
                is_running=isinstance(exc, UpstreamRefused),
            )
        if status == 200:
            return None
        return Refusal(
            engine=engine,
            status=status,
            says=f"answered with status {status}",
            is_running=status < 500,
        )

    async def thaw(self, engine: PausedEngine) -> str | None:
        """Let an engine go on; returns why it may not, None where it does.

        One that has no such route was started anew since, and so is not frozen.
        """
        try:
            status = await self.ask("POST", engine.url, "/resume", engine.credential)
        except UpstreamError as exc:
            return exc.message
        return None if status == 200 or status in NOT_SERVED else f"status {status}"


def engine_pause_failed(refusals: Iterable[Refusal]) -> EnginePauseFailed:
    """The error of a pause that is undone because engines refused it."""
    refused = list(refusals)
    first = refused[0]
    others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return EnginePauseFailed(
        f"the engine at {first.engine.url} could not be paused{others}: {first.says}; "
        "the policy is as it was before",
        hint="start vLLM with VLLM_SERVER_DEV_MODE=1, which has the route /pause, "
        "or pause in mode 'drain'",
        details={
            "engines": [
                {"url": one.engine.url, "status": one.status, "message": one.says}
                for one in refused
            ]
        },
    )


# What the shared state says of engines


def with_engines(
    pauses: Pauses, servers: Iterable[ModelServer], policies: Iterable[str]
) -> dict[str, PolicyPause]:
    """The pauses of ``policies`` with the engines of their servers noted as frozen."""
    after = dict(pauses)
    for policy in policies:
        engines = {engine.url: engine for engine in after[policy].engines}
        for server in servers:
            if server.policy == policy:
                url = root_of(server.endpoint)
                engines[url] = PausedEngine(url=url, credential=server.credential)
        after[policy] = attrs.evolve(after[policy], engines=tuple(engines.values()))
    return after


def frozen_urls(pauses: Pauses) -> frozenset[str]:
    """Engines that are or may be frozen."""
    return frozenset(engine.url for pause in pauses.values() for engine in pause.engines)


def left_frozen(pauses: Pauses) -> list[PausedEngine]:
    """Engines that are or may be frozen, and that no pause wants so any more."""
    wanted = {
        engine.url for pause in pauses.values() if _wants_frozen(pause) for engine in pause.engines
    }
    left = {
        engine.url: engine
        for pause in pauses.values()
        for engine in pause.engines
        if engine.url not in wanted
    }
    return list(left.values())


def without_engines(pauses: Pauses, urls: Iterable[str]) -> dict[str, PolicyPause]:
    """The pauses with some engines struck out, save where they are to be frozen by now."""
    gone = frozenset(urls)
    return {
        policy: pause
        if _wants_frozen(pause)
        else attrs.evolve(pause, engines=tuple(e for e in pause.engines if e.url not in gone))
        for policy, pause in pauses.items()
    }


def _wants_frozen(pause: PolicyPause) -> bool:
    return pause.paused and pause.mode == "keep"
