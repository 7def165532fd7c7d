"""Weight updates: what happens to calls in flight, to calls that come, and to those that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agl_core.testing.fake_vllm import (
    EVENT_STREAM,
    FakeVllm,
    Output,
    VllmAnswer,
    answer,
    each,
    saying,
)
from agl_core.testing.raw_http import Exchange
from agl_core.testing.replay import chunks_of
from agl_core.testing.service import RunningService, chat

WITHIN = 10.0
ABORTED = Output(texts=("Hel",), token_ids=(11,), logprobs=(-0.5,), finish_reason="abort")


def finish(exchange: Exchange) -> None:
    answer(exchange, VllmAnswer(exchange.request.json()))


def begin(exchange: Exchange) -> list[bytes]:
    """Begin a stream and send two tokens; returns the events that are still to come."""
    pieces = list(VllmAnswer(exchange.request.json()).events())
    exchange.begin(200, EVENT_STREAM)
    exchange.write(b"".join(pieces[:3]))
    return pieces[3:]


async def pause(service: RunningService, mode: str, **fields: Any) -> dict[str, Any]:
    state = await service.api("POST", "/gateway/pause", {"mode": mode, **fields})
    found: dict[str, Any] = state["policies"]
    return found


async def resume(service: RunningService) -> dict[str, Any]:
    found: dict[str, Any] = (await service.api("POST", "/gateway/resume"))["policies"]
    return found


async def test_drain_returns_after_its_time_and_says_what_is_left(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r"))
        exchange = await manual_vllm.take()
        state = await pause(world, "drain", drain_seconds=0.05, reason="weights")
        assert state["m"]["inflight"] == 1
        assert (state["m"]["mode"], state["m"]["reason"]) == ("drain", "weights")
        finish(exchange)
        assert (await calling).status == 200


async def test_keep_returns_at_once_and_the_call_goes_on_over_the_update(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        rest = begin(exchange)
        assert (await pause(world, "keep"))["m"]["inflight"] == 1
        await world.register(manual_vllm.endpoint, version=1)
        await resume(world)
        for piece in rest:
            exchange.write(piece)
        exchange.end()
        called = await calling
    assert (called.status, called.is_clean) == (200, True)
    (recorded,) = await world.events("r")
    assert (recorded["version_start"], recorded["version_end"]) == (0, 1)
    assert recorded["choices"][0]["tokens"] == "complete"


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_runs_a_call_again_that_the_agent_has_seen_nothing_of(
    world: RunningService, manual_vllm: FakeVllm, stream: bool
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r", chat(stream=stream)))
        exchange = await manual_vllm.take()
        assert (await pause(world, "abort"))["m"]["inflight"] == 0
        await exchange.gone.wait()
        await world.until_state(held=1)
        await world.register(manual_vllm.endpoint, version=1)
        await resume(world)
        finish(await manual_vllm.take())
        called = await calling
    assert (called.status, called.is_clean) == (200, True)
    aborted, good = await world.events("r")
    assert (aborted["status"], aborted["version_start"]) == ("aborted", 0)
    assert (good["status"], good["version_start"], good["version_end"]) == ("ok", 1, 1)
    assert good["call_id"] == called.call_id
    assert good["choices"][0]["tokens"] == "complete"


async def test_abort_ends_a_call_that_has_begun_with_an_error_event(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    received = b""
    begun = asyncio.Event()

    async def read() -> None:
        nonlocal received
        url = f"{world.base('r')}/chat/completions"
        async with world.client.stream("POST", url, json=chat(stream=True)) as streamed:
            async for part in streamed.aiter_raw():
                received += part
                begun.set()

    async with asyncio.timeout(WITHIN):
        reading = asyncio.create_task(read())
        exchange = await manual_vllm.take()
        begin(exchange)
        await begun.wait()
        assert (await pause(world, "abort"))["m"]["inflight"] == 0
        await exchange.gone.wait()
        with pytest.raises(httpx.RemoteProtocolError):
            await reading
    assert chunks_of(received)[-1]["error"]["code"] == "aborted"
    assert [item["status"] for item in await world.events("r")] == ["aborted"]
    assert len(manual_vllm.requests) == 1


async def test_abort_leaves_those_alone_that_wait_already(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        await pause(world, "drain")
        calling = asyncio.create_task(world.call("r"))
        await world.until_state(held=1)
        assert (await pause(world, "abort"))["m"]["held"] == 1
        await resume(world)
        finish(await manual_vllm.take())
        assert (await calling).status == 200
    assert [item["status"] for item in await world.events("r")] == ["ok"]


async def test_reject_refuses_at_once_also_those_that_wait(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        running = asyncio.create_task(world.call("r"))
        exchange = await manual_vllm.take()
        await pause(world, "keep")
        waiting = asyncio.create_task(world.call("r"))
        await world.until_state(held=1)
        await pause(world, "reject", reason="down")
        refused = [await waiting, await world.call("r")]
        finish(exchange)
        assert (await running).status == 200
    for called in refused:
        assert (called.status, called.code) == (503, "policy_paused")
        assert int(called.headers["retry-after"]) >= 1
        assert "x-should-retry" not in called.headers
    assert len(manual_vllm.requests) == 1


async def test_call_that_is_held_too_long_gets_503(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(hold_seconds=0.1)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    await pause(service, "drain")
    async with asyncio.timeout(WITHIN):
        called = await service.call("r")
    assert (called.status, called.code) == (503, "held_too_long")
    assert "retry-after" in called.headers
    assert (await service.state())["held"] == 0


async def test_pause_of_one_policy_is_none_of_the_others(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    await world.register(manual_vllm.endpoint, "judge", trained=False)
    await world.register(manual_vllm.endpoint, "n")
    async with asyncio.timeout(WITHIN):
        await pause(world, "drain", policy="m")
        for name in ("judge", "n"):
            calling = asyncio.create_task(world.call("r", chat(model=name)))
            finish(await manual_vllm.take())
            assert (await calling).status == 200
        state = await pause(world, "drain")
        assert {name: policy["paused"] for name, policy in state.items()} == {
            "m": True,
            "n": True,
            "judge": False,
        }
        state = await resume(world)
        assert not any(policy["paused"] for policy in state.values())
    await world.api("POST", "/gateway/pause", {"policy": "nobody"}, expect=404)


async def test_paused_seconds_add_up(world: RunningService) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(2):
        await pause(world, "drain")
        until = loop.time() + 0.1
        while loop.time() < until:
            await world.state()
        await resume(world)
    first = (await world.state())["paused_seconds"]
    assert 0.2 <= first <= loop.time() - began + 0.01
    assert (await world.state())["paused_seconds"] == first


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_aborts_is_sent_again_after_the_pause(
    world: RunningService, manual_vllm: FakeVllm, stream: bool
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r", chat(stream=stream)))
        exchange = await manual_vllm.take()
        await pause(world, "keep")
        made = VllmAnswer(exchange.request.json(), [ABORTED])
        if stream:
            # The agent has not seen a byte of it: the role comes with the chunk that aborts.
            pieces = list(made.events())
            exchange.begin(200, EVENT_STREAM)
            exchange.write(b"".join(pieces[1:]))
            exchange.end()
        else:
            answer(exchange, made)
        await world.until_state(held=1, inflight=0)
        await resume(world)
        finish(await manual_vllm.take())
        called = await calling
    assert (called.status, called.is_clean) == (200, True)
    assert b"abort" not in called.body
    assert [item["status"] for item in await world.events("r")] == ["aborted", "ok"]


async def test_engine_that_aborts_on_its_own_is_asked_again_but_not_for_ever(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(each(saying(ABORTED), saying(), saying(ABORTED)))
    service = await open_service(retries=2)
    await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        assert (await service.call("r")).status == 200
        assert len(server.requests) == 2
        called = await service.call("r")
    assert (called.status, called.code) == (503, "aborted")
    assert "retry-after" in called.headers
    assert len(server.requests) == 5


async def test_stream_that_the_engine_aborts_after_a_token_ends_in_an_error_event(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    output = Output(
        texts=("Hel", "lo"), token_ids=(11, 12), logprobs=(-0.5, -0.5), finish_reason="abort"
    )
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        answer_ = VllmAnswer(exchange.request.json(), [output])
        exchange.begin(200, EVENT_STREAM)
        pieces = list(answer_.events())
        exchange.write(b"".join(pieces[:2]))
        await exchange.flush()
        for _ in range(3):  # so that what came before the abort is on its way
            await world.state()
        exchange.write(b"".join(pieces[2:]))
        exchange.end()
        called = await calling
    assert not called.is_clean
    assert b'"abort"' not in called.body
    assert chunks_of(called.body)[-1]["error"]["code"] == "aborted"
    (recorded,) = await world.events("r")
    assert recorded["status"] == "aborted"
    assert recorded["choices"][0]["finish_reason"] == "abort"


async def test_client_that_leaves_while_it_waits_is_counted_out(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        await pause(world, "drain")
        calling = asyncio.create_task(world.call("r"))
        await world.until_state(held=1)
        calling.cancel()
        await world.until_state(held=0)
        (recorded,) = await world.until_events("r")
        await resume(world)
    assert recorded["status"] == "client_gone"
    assert manual_vllm.requests == []


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_end_of_a_rollout_ends_its_calls_at_once(
    world: RunningService, manual_vllm: FakeVllm, way: str
) -> None:
    await world.rollout("other")
    async with asyncio.timeout(WITHIN):
        streamed = asyncio.create_task(world.call("r", chat(stream=True)))
        first = await manual_vllm.take()
        begin(first)
        whole = asyncio.create_task(world.call("r"))
        second = await manual_vllm.take()
        spared = asyncio.create_task(world.call("other"))
        third = await manual_vllm.take()
        await pause(world, "keep")
        held = asyncio.create_task(world.call("r"))
        await world.until_state(held=1)
        if way == "cancel":
            await world.api("POST", "/rollouts/r/cancel")
        else:
            await world.api("DELETE", "/rollouts/r", expect=204)
        await first.gone.wait()
        await second.gone.wait()
        ended = await streamed
        for called in (await whole, await held):
            assert (called.status, called.code) == (403, "rollout_ended")
        finish(third)
        assert (await spared).status == 200
        await world.until_state(inflight=0, held=0)
    assert not ended.is_clean
    assert chunks_of(ended.body)[-1]["error"]["code"] == "rollout_ended"
    if way == "cancel":
        assert {item["status"] for item in await world.events("r")} == {"aborted"}
