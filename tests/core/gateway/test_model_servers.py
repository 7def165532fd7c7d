"""What resolvers may know of servers, and how they are opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import pytest

from agl_core.errors import UpstreamError, UpstreamRefused, UpstreamTimeout
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Candidate, ModelServers, Route, RouteRequest, RouteResolver
from agl_core.records import ModelServer
from agl_core.testing.fake_vllm import FakeVllm
from agl_core.testing.raw_http import Exchange
from agl_core.testing.service import running_service

WITHIN = 15.0


class Looking:
    """A resolver that keeps what it was given and notes when it is open."""

    def __init__(self) -> None:
        self.life: list[str] = []
        self.servers: ModelServers | None = None

    @hookimpl
    def provide_route_resolver(self, servers: ModelServers) -> RouteResolver:
        self.servers = servers
        return self

    async def __aenter__(self) -> Self:
        self.life.append("opened")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.life.append("closed")

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        self.life.append("asked")
        return None

    def forget(self, rollout_id: str) -> None: ...

    def sole(self) -> tuple[ModelServers, ModelServer]:
        assert self.servers is not None
        (server,) = self.servers.registered()
        return self.servers, server


class TakingTheRest:
    """A resolver that takes what the one before leaves, and has nothing to open."""

    @hookimpl
    def provide_route_resolver(self) -> RouteResolver:
        return self

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        return Route(server=candidates[0].server)

    def forget(self, rollout_id: str) -> None: ...


async def test_resolver_is_open_while_calls_come(open_vllm: Any) -> None:
    looking, server = Looking(), await open_vllm()
    async with running_service(plugins=(looking, TakingTheRest()), enabled=["memory"]) as service:
        assert looking.life == ["opened"]
        await service.register(server.endpoint)
        await service.rollout("r")
        assert (await service.call("r")).status == 200
    assert looking.life == ["opened", "asked", "closed"]


@pytest.fixture
async def looking(
    open_service: Any, manual_vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> Looking:
    """A resolver beside the usual one, in a service with the manual server as its model."""
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    looking = Looking()
    service = await open_service(plugins=(looking,), credentials={"e": {"env": "ENGINE_KEY"}})
    await service.register(manual_vllm.endpoint, credential="e")
    return looking


async def test_server_is_asked_at_its_root_with_its_credential(
    looking: Looking, manual_vllm: FakeVllm
) -> None:
    servers, server = looking.sole()
    asking = asyncio.create_task(servers.get(server, "/tell?me=1", seconds=5.0, limit_bytes=4))
    async with asyncio.timeout(WITHIN):
        exchange = await manual_vllm.take()
        assert (exchange.request.method, exchange.request.target) == ("GET", "/tell?me=1")
        assert exchange.request.header("authorization") == "Bearer sk-engine"
        exchange.whole(404, b"what")
        answer = await asking
    assert (answer.status, answer.body) == (404, b"what")
    assert servers.inflight(server) == 0


async def test_answer_beyond_the_bounds_is_an_error(
    looking: Looking, manual_vllm: FakeVllm
) -> None:
    servers, server = looking.sole()

    async def dripping(exchange: Exchange) -> None:
        exchange.begin(200)
        while not exchange.gone.is_set():
            exchange.write(b".")
            await exchange.flush()

    manual_vllm.script = dripping
    with pytest.raises(UpstreamError, match="larger than 10 bytes"):
        await servers.get(server, "/drip", seconds=5.0, limit_bytes=10)
    with pytest.raises(UpstreamTimeout, match=r"did not answer /drip within 0\.2 seconds"):
        await servers.get(server, "/drip", seconds=0.2, limit_bytes=2**40)
    manual_vllm.refuse()
    with pytest.raises(UpstreamRefused):
        await servers.get(server, "/drip", seconds=5.0, limit_bytes=10)


async def test_asking_a_server_in_vain_says_nothing_of_its_health(
    looking: Looking, open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(plugins=(other := Looking(),), failures_to_unhealthy=1)
    await service.register(manual_vllm.endpoint)
    servers, server = other.sole()
    with pytest.raises(UpstreamTimeout):
        await servers.get(server, "/hang", seconds=0.05, limit_bytes=10)
    (item,) = (await service.api("GET", "/models"))["items"]
    assert item["healthy"] is True
