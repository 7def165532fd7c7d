"""The load that servers tell of themselves, and where calls go because of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.engines import EngineClient
from agl_core.gateway.model_servers import RegisteredServers
from agl_core.gateway.registry import Registry, ServerState
from agl_core.gateway.upstream import PooledUpstreamClient
from agl_core.interfaces import Candidate, RouteRequest
from agl_core.records import ModelServer
from agl_core.settings import GatewaySettings, Secret
from agl_core.testing.clock import FakeClock
from agl_core.testing.fake_vllm import FakeVllm, saying, silent
from agl_core.testing.raw_http import Exchange
from agl_core.testing.service import RunningService, running_service
from agl_vllm import VllmConfig, VllmRouteResolver
from agl_vllm.loads import ServerLoads, requests_of

WITHIN = 15.0
PERIOD = 2.0
RECORDED = Path(__file__).parents[1] / "data" / "vllm" / "metrics" / "response.body"


# --- what the page says


def test_recorded_page_of_an_idle_server_says_nothing_runs() -> None:
    assert requests_of(RECORDED.read_bytes()) == 0.0


def test_running_and_waiting_of_every_engine_are_added() -> None:
    page = RECORDED.read_bytes()
    for name, value in ((b"running", b"3.0"), (b"waiting", b"4.0")):
        one = b'vllm:num_requests_%b{engine="0",model_name="tiny-qwen"} ' % name
        assert one + b"0.0" in page
        other = one.replace(b'"0"', b'"1"') + b"10.0"
        page = page.replace(one + b"0.0", one + value + b"\n" + other)
    assert requests_of(page) == 27.0


@pytest.mark.parametrize(
    ("page", "requests"),
    [
        (b"", None),
        (b"vllm:num_requests_waiting 2.0\n", None),
        (b"vllm:num_requests_running 2.0\n", 2.0),
        (b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1e1", 12.0),
        (b'vllm:num_requests_running{model_name="a} 7"} 2.0 1700000000000\n', 2.0),
        (b"# HELP vllm:num_requests_running 2.0\n", None),
        (b"vllm:num_requests_running_total 2.0\n", None),
        (b"xvllm:num_requests_running 2.0\n", None),
        (b"vllm:num_requests_running NaN\n", None),
        (b"vllm:num_requests_running +Inf\n", None),
        (b"vllm:num_requests_running two\n", None),
        (b"vllm:num_requests_running -1.0\n", 0.0),
        (b"vllm:num_requests_running 2.0\nvllm:num_requests_waiting NaN\n", None),
        (b"<html>vllm:num_requests_running", None),
    ],
)
def test_only_lines_of_the_gauges_count(page: bytes, requests: float | None) -> None:
    assert requests_of(page) == requests


# --- readings


class World:
    """Two servers of one policy, the gateway's registry of them, and a clock in our hands."""

    def __init__(self, servers: list[FakeVllm], client: PooledUpstreamClient) -> None:
        self.clock = FakeClock()
        self.fakes = servers
        self.servers = [
            ModelServer(model="m", endpoint=fake.endpoint, credential="key") for fake in servers
        ]
        settings = GatewaySettings(credentials={"key": Secret("sk-engine")})
        self.registry = Registry(settings, self.clock)
        self.registry.replace(self.servers)
        registered = RegisteredServers(self.registry, EngineClient(settings, client))
        self.loads = ServerLoads(PERIOD, self.clock, registered)

    def begin(self, number: int = 0) -> ServerState:
        """A call of ours begins."""
        return self.registry.begin(self.servers[number].key)

    def others(self, number: int = 0) -> float:
        return self.loads.others(self.servers[number].key)

    async def until_others(self, wanted: float, number: int = 0) -> None:
        async with asyncio.timeout(WITHIN):
            while self.others(number) != wanted:
                await self.clock.sleep(0)

    async def next_round(self) -> None:
        """Let the time come at which servers are asked again."""
        await self.clock.until_sleeping()
        self.clock.advance(PERIOD)

    async def until_asked(self, count: int, number: int = 0) -> None:
        async with asyncio.timeout(WITHIN):
            while self.fakes[number].asked_of_engine("/metrics") < count:
                await self.clock.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeVllm(saying())) for _ in range(2)]
        client = PooledUpstreamClient()
        stack.push_async_callback(client.close)
        yield World(fakes, client)


async def test_requests_of_others_are_what_is_not_our_own(world: World) -> None:
    world.fakes[0].others, world.fakes[0].waiting = 5, 2
    for _ in range(3):  # ours are among those seven
        world.begin()
    async with world.loads:
        await world.until_others(4)
        assert world.others(1) == 0
        for fake in world.fakes:
            await world.until_asked(1, world.fakes.index(fake))
            (asked,) = fake.engine_requests
            assert (asked.method, asked.target) == ("GET", "/metrics")
            assert asked.header("authorization") == "Bearer sk-engine"


async def test_between_two_readings_only_our_own_calls_move_the_load(world: World) -> None:
    world.fakes[0].others = 5
    ours = [world.begin() for _ in range(3)]
    resolver = VllmRouteResolver(VllmConfig(balance="least_inflight"), world.loads)

    def requests() -> float:
        server = world.servers[0]
        return resolver._requests(
            Candidate(server=server, inflight=world.registry.inflight(server.key))
        )

    async with resolver:
        await world.until_others(2)
        assert requests() == 5
        ours.append(world.begin())
        assert requests() == 6
        for call in ours:
            world.registry.end(call)
        assert requests() == 2
        world.fakes[0].others = 0
        await world.next_round()
        await world.until_others(0)


async def test_load_is_never_below_our_own_calls(world: World) -> None:
    world.fakes[0].others = 6
    for _ in range(4):
        world.begin()
    async with world.loads:
        await world.until_others(2)
        world.fakes[0].others = 1  # three of ours have ended there, and we have not heard of it
        await world.next_round()
        async with asyncio.timeout(WITHIN):
            while (others := world.others()) == 2:
                await world.clock.sleep(0)
        assert others == 0


async def test_call_that_ends_while_the_server_answers_is_not_taken_for_anothers(
    world: World,
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slowly(exchange: Exchange) -> None:
        asked.set()
        await answer.wait()
        exchange.whole(200, b"vllm:num_requests_running 3.0\n")

    world.fakes[0].engine_scripts["/metrics"] = slowly
    ours = [world.begin() for _ in range(2)]
    async with world.loads:
        await asked.wait()
        for call in ours:
            world.registry.end(call)
        answer.set()
        await world.until_others(1)


@pytest.mark.parametrize("way", ["it hangs", "it is down", "it is busy"])
async def test_server_that_does_not_answer_counts_as_it_did_for_three_periods(
    world: World, way: str
) -> None:
    fake = world.fakes[0]
    fake.others = 5
    async with world.loads:
        await world.until_others(5)
        if way == "it is down":
            fake.refuse()
        else:
            fake.engine_answers["/metrics"] = None if way == "it hangs" else 503
        for _ in range(2):
            await world.next_round()
            world.fakes[1].others += 1  # the other server is read on time
            await world.until_others(world.fakes[1].others, 1)
            assert world.others() == 5
        await world.next_round()
        assert world.others() == 0
        assert world.others(1) == 2


async def test_server_that_does_not_tell_is_asked_seldom_and_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agl_vllm")
    silent_one = world.fakes[0]
    silent_one.tells_load = False
    async with world.loads:
        async with asyncio.timeout(WITHIN):
            while not caplog.records:
                await world.clock.sleep(0)
        for count in range(1, 30):  # 58 seconds
            await world.next_round()
            world.fakes[1].others = count
            await world.until_others(count, 1)
        assert silent_one.asked_of_engine("/metrics") == 1
        (said,) = [record for record in caplog.records if record.name == "agl_vllm.loads"]
        assert said.levelno == logging.INFO
        assert said.endpoint == silent_one.endpoint  # type: ignore[attr-defined]
        silent_one.tells_load, silent_one.others = True, 3
        await world.next_round()
        await world.until_others(3)
    assert "again" in caplog.records[-1].getMessage()


async def test_load_that_a_server_no_longer_tells_is_forgotten_at_once(world: World) -> None:
    world.fakes[0].others = 5
    async with world.loads:
        await world.until_others(5)
        world.fakes[0].tells_load = False
        await world.next_round()
        await world.until_others(0)


async def test_call_waits_for_nothing_while_a_page_hangs(world: World) -> None:
    hanging, other = world.fakes
    hanging.engine_answers["/metrics"] = None
    other.others = 2
    request = RouteRequest(rollout_id="r", attempt_id="a", policy="m", model=None, api="chat")
    candidates = [Candidate(server=server, inflight=1) for server in world.servers]
    async with VllmRouteResolver(VllmConfig(), world.loads) as resolver:
        await world.until_others(2, 1)
        await world.until_asked(1)
        resolving = resolver.resolve(request, candidates)
        with pytest.raises(StopIteration) as returned:
            resolving.send(None)  # it would return what it waits for
    assert returned.value.value.server == world.servers[0]


async def test_page_beyond_the_bound_is_not_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agl_vllm")

    async def lengthy(exchange: Exchange) -> None:
        exchange.whole(200, b"# nothing\n" * 500_000 + b"vllm:num_requests_running 5.0\n")

    world.fakes[0].engine_scripts["/metrics"] = lengthy
    async with world.loads, asyncio.timeout(WITHIN):
        while not caplog.records and not world.others():
            await world.clock.sleep(0)
    assert world.others() == 0
    assert "larger than 4194304 bytes" in caplog.text


async def test_sole_server_of_a_policy_is_not_asked(world: World) -> None:
    alone, helper = world.fakes
    world.registry.replace(
        [
            ModelServer(model="m", endpoint=alone.endpoint),
            ModelServer(model="adapter", endpoint=alone.endpoint, policy="m"),
            ModelServer(model="judge", endpoint=helper.endpoint, trained=False),
        ]
    )
    async with world.loads:
        for _ in range(3):
            await world.next_round()
        await world.clock.until_sleeping()
    assert alone.engine_requests == helper.engine_requests == []


async def test_server_that_left_is_asked_no_more_and_forgotten(world: World) -> None:
    world.fakes[0].others = 5
    async with world.loads:
        await world.until_others(5)
        world.registry.replace(world.servers[1:])
        await world.next_round()
        await world.clock.until_sleeping()
        assert world.others() == 0
    assert world.fakes[0].asked_of_engine("/metrics") == 1


async def test_names_of_one_server_share_a_reading(world: World) -> None:
    one, two = world.fakes
    base = ModelServer(model="base", endpoint=one.endpoint, policy="m")
    adapter = ModelServer(model="adapter", endpoint=one.endpoint, policy="m")
    world.registry.replace([base, adapter, ModelServer(model="m", endpoint=two.endpoint)])
    world.servers = [base, adapter]
    one.others = 5
    world.begin(1)
    async with world.loads:
        await world.until_others(5)
        assert world.others(1) == 4
        assert one.asked_of_engine("/metrics") == 1


# --- where calls go


Open = Callable[..., Any]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def service_of(
    stack: AsyncExitStack, servers: list[FakeVllm], **config: Any
) -> RunningService:
    tables = {
        "plugins": {"vllm": {"load_seconds": 0.05, **config}},
        "gateway": {"failures_to_unhealthy": 1, "unhealthy_seconds": 600.0, "retries": 0},
    }
    service = await stack.enter_async_context(running_service(tables))
    for server in servers:
        await service.register(server.endpoint)
    return service


async def until_read(service: RunningService, server: FakeVllm) -> None:
    """Until what the server says now has been taken over."""
    before = server.asked_of_engine("/metrics")
    while server.asked_of_engine("/metrics") < before + 2:
        await service.state()


@pytest.mark.parametrize("balance", ["least_loaded_sticky", "least_inflight"])
async def test_load_from_elsewhere_shifts_first_placements(
    stack: AsyncExitStack, balance: str
) -> None:
    busy, idle = [await stack.enter_async_context(FakeVllm(saying())) for _ in range(2)]
    service = await service_of(stack, [busy, idle], balance=balance)
    busy.others = 6
    async with asyncio.timeout(WITHIN):
        await until_read(service, busy)
        for number in range(5):
            assert (await service.call(await service.rollout(f"r{number}"))).status == 200
        assert (busy.model_calls, idle.model_calls) == (0, 5)
        busy.others, idle.waiting = 0, 20
        await until_read(service, busy)
        await until_read(service, idle)
        for number in range(5, 10):
            await service.call(await service.rollout(f"r{number}"))
    assert (busy.model_calls, idle.model_calls) == (5, 5)


async def test_rollout_stays_on_its_server_whatever_others_send_there(
    stack: AsyncExitStack,
) -> None:
    first, other = [await stack.enter_async_context(FakeVllm(saying())) for _ in range(2)]
    service = await service_of(stack, [first, other])
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        await service.call("r")
        first.others = 100
        await until_read(service, first)
        for _ in range(3):
            await service.call("r")
    assert (first.model_calls, other.model_calls) == (4, 0)


async def test_our_own_calls_are_not_counted_twice(stack: AsyncExitStack) -> None:
    one, two = [await stack.enter_async_context(FakeVllm(silent)) for _ in range(2)]
    service = await service_of(stack, [one, two], balance="least_inflight")
    calls: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.timeout(WITHIN):
            for number in range(4):
                if number == 3:  # two there, and here one of ours and one of another's: a tie
                    two.others = 1
                    await until_read(service, one)
                    await until_read(service, two)
                rollout_id = await service.rollout(f"r{number}")
                calls.append(asyncio.create_task(service.call(rollout_id)))
                await service.until_state(inflight=number + 1)
            while one.model_calls + two.model_calls < 4:
                await service.state()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    # Were ours counted twice, there would be four against three, and the last gone to the second.
    assert (one.model_calls, two.model_calls) == (3, 1)


async def test_server_that_is_out_gets_no_calls_however_idle_it_says_it_is(
    stack: AsyncExitStack,
) -> None:
    async def failing(exchange: Exchange) -> None:
        exchange.whole_json(500, {"error": "broken"})

    broken = await stack.enter_async_context(FakeVllm(failing))
    busy = await stack.enter_async_context(FakeVllm(saying()))
    service = await service_of(stack, [broken, busy])
    await service.rollout("first")
    async with asyncio.timeout(WITHIN):
        assert (await service.call("first")).status == 500
        busy.others = 50
        await until_read(service, busy)
        for number in range(3):
            assert (await service.call(await service.rollout(f"r{number}"))).status == 200
    assert broken.model_calls == 1


@pytest.mark.parametrize(
    "config", [{"balance": "round_robin"}, {"balance": "rendezvous"}, {"load_seconds": "none"}]
)
async def test_servers_are_not_asked_where_their_load_does_not_matter(
    stack: AsyncExitStack, config: dict[str, Any]
) -> None:
    servers = [await stack.enter_async_context(FakeVllm(saying())) for _ in range(2)]
    service = await service_of(stack, servers, **config)
    async with asyncio.timeout(WITHIN):
        for number in range(20):
            await service.call(await service.rollout(f"r{number}"))
    assert [server.engine_requests for server in servers] == [[], []]
