"""Servers that are out: who asks them whether they are back, and what follows from the answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agl_core.testing.fake_vllm import (
    FakeVllm,
    VllmAnswer,
    answer,
    answering,
    each,
    saying,
    silent,
)
from agl_core.testing.own_time import own_seconds
from agl_core.testing.raw_http import Exchange
from agl_core.testing.service import RunningService

WITHIN = 15.0
NO = answering(503, {"error": {"message": "no"}})
# Only health checks bring a server back in time for a test.
FAR = {"unhealthy_seconds": 3600.0, "failures_to_unhealthy": 1, "retries": 1}


async def is_healthy(service: RunningService, server: FakeVllm) -> bool:
    items = (await service.api("GET", "/models"))["items"]
    (found,) = [item["healthy"] for item in items if item["endpoint"] == server.endpoint]
    return bool(found)


async def until_healthy(service: RunningService, server: FakeVllm) -> None:
    while not await is_healthy(service, server):
        pass


async def until_asked(service: RunningService, server: FakeVllm, count: int) -> None:
    while server.asked_of_engine("/health") < count:
        await service.state()


async def take_out(service: RunningService, bad: FakeVllm, good: FakeVllm) -> None:
    """Register a server, let one call fail there, and register another one."""
    # Else a check between two lines could bring it back.
    keeps_out = "/health" not in bad.engine_answers
    if keeps_out:
        bad.engine_answers["/health"] = 503
    await service.register(bad.endpoint)
    await service.rollout("first")
    assert (await service.call("first")).status == 503
    assert not await is_healthy(service, bad)
    bad.requests.clear()
    await service.register(good.endpoint)
    if keeps_out:
        del bad.engine_answers["/health"]


async def test_server_that_answers_health_is_tried_and_taken_in_again(
    open_service: Any, open_vllm: Any
) -> None:
    bad, good = await open_vllm(each(NO, NO, saying())), await open_vllm()
    service = await open_service(**FAR, health_seconds=0.02)
    bad.engine_answers["/health"] = 503
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        bad.engine_answers.clear()
        await until_healthy(service, bad)
        for number in range(4):
            assert (await service.call(await service.rollout(f"r{number}"))).status == 200
    assert len(bad.requests) > 1
    assert await is_healthy(service, bad)


async def test_one_call_at_a_time_tries_a_server_that_is_back(
    open_service: Any, open_vllm: Any
) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        answer(exchange, VllmAnswer(exchange.request.json()))

    bad, good = await open_vllm(each(NO, NO, slow)), await open_vllm()
    service = await open_service(**FAR, health_seconds=0.02)
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        await until_healthy(service, bad)
        ids = [await service.rollout(f"r{number}") for number in range(10)]
        calls = [asyncio.create_task(service.call(rollout_id)) for rollout_id in ids]
        while sum(call.done() for call in calls) < 9:
            await service.state()
        # Asked again and again meanwhile, and well: still one trial at a time.
        assert len(bad.requests) == 1
        release.set()
        assert {called.status for called in await asyncio.gather(*calls)} == {200}
    assert len(good.requests) == 9


async def test_server_that_is_well_but_fails_its_trial_waits_its_time_out(
    open_service: Any, open_vllm: Any
) -> None:
    bad, good = await open_vllm(NO), await open_vllm()
    service = await open_service(**FAR, health_seconds=0.02)
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        await until_healthy(service, bad)
        for number in range(10):
            assert (await service.call(await service.rollout(f"r{number}"))).status == 200
        assert len(bad.requests) == 1
        for number in range(10, 20):
            await until_asked(service, bad, bad.asked_of_engine("/health") + 1)
            assert (await service.call(await service.rollout(f"r{number}"))).status == 200
    assert len(bad.requests) == 1


async def test_server_that_is_not_well_costs_no_call_a_trial(
    open_service: Any, open_vllm: Any
) -> None:
    bad, good = await open_vllm(NO), await open_vllm()
    bad.engine_answers["/health"] = 503
    service = await open_service(
        unhealthy_seconds=0.1, failures_to_unhealthy=1, retries=1, health_seconds=0.02
    )
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        began = time.monotonic()
        while time.monotonic() < began + 0.4:
            await until_asked(service, bad, bad.asked_of_engine("/health") + 1)
            assert (await service.call("first")).status == 200
    assert bad.requests == []


async def test_server_without_health_is_asked_for_its_models(
    open_service: Any, open_vllm: Any
) -> None:
    bad, good = await open_vllm(each(NO, NO, saying())), await open_vllm()
    bad.engine_answers["/health"] = 404
    service = await open_service(**FAR, health_seconds=0.02)
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        while not any(request.target == "/v1/models" for request in bad.requests):
            await service.state()
        assert not await is_healthy(service, bad)
        bad.cards = [{"id": "m"}]
        await until_healthy(service, bad)


async def test_nothing_moves_while_the_policy_is_paused(open_service: Any, open_vllm: Any) -> None:
    bad, good = await open_vllm(NO), await open_vllm()
    bad.engine_answers["/health"] = 503
    service = await open_service(**FAR, health_seconds=0.02)
    async with asyncio.timeout(WITHIN):
        await take_out(service, bad, good)
        await until_asked(service, bad, 2)
        await service.api("POST", "/gateway/pause", {"mode": "drain"})
        bad.engine_answers.clear()
        asked = bad.asked_of_engine("/health")
        while (await service.state())["paused_seconds"] < 0.3:
            pass
        assert bad.asked_of_engine("/health") <= asked + 1  # one may have been on its way
        assert not await is_healthy(service, bad)
        await service.api("POST", "/gateway/resume")
        await until_healthy(service, bad)


async def test_server_whose_health_is_silent_holds_up_no_other(
    open_service: Any, open_vllm: Any
) -> None:
    mute, bad, good = await open_vllm(NO), await open_vllm(NO), await open_vllm()
    mute.engine_answers["/health"] = None
    service = await open_service(**{**FAR, "retries": 0}, health_seconds=0.02)
    for server in (mute, bad):
        await service.register(server.endpoint)
    async with asyncio.timeout(WITHIN):
        await service.rollout("first")
        for _ in range(2):
            assert (await service.call("first")).status == 503
        await service.register(good.endpoint)
        await until_healthy(service, bad)
        assert not await is_healthy(service, mute)
    assert mute.asked_of_engine("/health") == 1


async def test_c05_silent_server_delays_its_own_calls_alone(
    open_service: Any, open_vllm: Any
) -> None:
    mute, good = await open_vllm(silent), await open_vllm()
    mute.engine_answers["/health"] = None
    service = await open_service(
        connect_seconds=1.0, first_byte_seconds=2.0, health_seconds=0.2, calls_per_rollout=200
    )
    for server in (mute, good):
        await service.register(server.endpoint)
    for number in range(100):
        await service.rollout(f"r{number}")
    times: list[float] = []
    async with asyncio.timeout(60):
        calls = [asyncio.create_task(service.bare_call(f"r{number}")) for number in range(100)]
        while not all(call.done() for call in calls):
            began = own_seconds()
            assert (await service.client.get(f"{service.url}/healthz")).status_code == 200
            times.append(own_seconds() - began)
        statuses = [call.result() for call in calls]
        assert set(statuses) == {200, 504}
        # Nothing waits for the silent server, whose time-outs are 1 and 2 seconds. What other
        # programs take of the processor does not count.
        assert max(times) < 0.2
        assert len(mute.requests) == statuses.count(504)
        assert not await is_healthy(service, mute)
        again = await asyncio.gather(*(service.call(f"r{number}") for number in range(100)))
    assert {called.status for called in again} == {200}


async def test_c06_health_rounds_leave_the_counts_of_calls_in_flight_alone(
    open_service: Any, manual_vllm: FakeVllm, open_vllm: Any
) -> None:
    other = await open_vllm()
    manual_vllm.engine_answers["/health"] = 503
    service = await open_service(
        **{**FAR, "retries": 0},
        health_seconds=0.02,
        tables={"plugins": {"enabled": ["memory", "vllm"], "vllm": {"balance": "least_inflight"}}},
    )

    async def inflight() -> list[int]:
        return [item["inflight"] for item in (await service.api("GET", "/models"))["items"]]

    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        long = [asyncio.create_task(service.call("r")) for _ in range(10)]
        exchanges = [await manual_vllm.take() for _ in range(10)]
        failing = asyncio.create_task(service.call("r"))
        (await manual_vllm.take()).cut()
        assert (await failing).status == 502
        await service.register(other.endpoint)
        await until_asked(service, manual_vllm, 5)
        assert await inflight() == [10, 0]
        manual_vllm.engine_answers.clear()
        await until_healthy(service, manual_vllm)
        for _ in range(10):
            assert (await service.call("r")).status == 200
        assert (len(other.requests), await inflight()) == (10, [10, 0])
        for exchange in exchanges:
            answer(exchange, VllmAnswer(exchange.request.json()))
        await asyncio.gather(*long)
    assert await inflight() == [0, 0]
