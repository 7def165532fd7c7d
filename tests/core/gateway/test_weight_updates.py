"""Weight updates through the engines: freezing, going on, and what is known of versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.clock import Clock
from agl_core.gateway.versions import VersionMark, with_spans
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import EventQuery, Store
from agl_core.records import PausedEngine, PolicyPause
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
from agl_core.testing.service import RunningService, chat
from agl_memory import MemoryStore

WITHIN = 15.0
RECORDED = Path(__file__).parents[2] / "data" / "vllm"


def finish(exchange: Exchange) -> None:
    answer(exchange, VllmAnswer(exchange.request.json()))


async def pause(service: RunningService, mode: str = "keep", **fields: Any) -> dict[str, Any]:
    state = await service.api("POST", "/gateway/pause", {"mode": mode, **fields})
    found: dict[str, Any] = state["policies"]
    return found


async def resume(service: RunningService) -> None:
    await service.api("POST", "/gateway/resume")


async def health(service: RunningService) -> dict[str, bool]:
    items = (await service.api("GET", "/models"))["items"]
    return {item["endpoint"]: item["healthy"] for item in items}


async def paused_for(service: RunningService, seconds: float) -> None:
    while (await service.state())["paused_seconds"] < seconds:
        pass


async def until_asked(server: FakeVllm, path: str, count: int, service: RunningService) -> None:
    while server.asked_of_engine(path) < count:
        await service.state()


def entry(server: FakeVllm, version: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "endpoint": server.endpoint, "version": version, **fields}


# --- the engines


async def test_keep_freezes_every_engine_of_the_policy_until_the_resume(
    open_service: Any, open_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    mine, other = [await open_vllm(), await open_vllm()], await open_vllm()
    service = await open_service(credentials={"engine": {"env": "ENGINE_KEY"}})
    for server in mine:
        await service.register(server.endpoint, credential="engine")
    await service.register(other.endpoint, "n")
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        await pause(service, policy="m")
        assert [server.is_paused for server in (*mine, other)] == [True, True, False]
        held = asyncio.create_task(service.call("r"))
        await service.until_state(held=1)
        assert await health(service) == {
            mine[0].endpoint: False,
            mine[1].endpoint: False,
            other.endpoint: True,
        }
        await resume(service)
        assert (await held).status == 200
    for server in mine:
        asked = [(r.method, r.target) for r in server.engine_requests]
        assert asked == [("POST", "/pause?mode=keep"), ("POST", "/resume")]
        assert {r.header("authorization") for r in server.engine_requests} == {"Bearer sk-engine"}
        assert not server.is_paused
    assert other.engine_requests == []
    assert all((await health(service)).values())


async def test_two_models_on_one_engine_freeze_it_once(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "a", policy="m")
    await service.register(server.endpoint, "b", policy="m")
    await pause(service)
    await resume(service)
    assert [server.asked_of_engine(path) for path in ("/pause", "/resume")] == [1, 1]


async def test_engine_of_two_policies_goes_on_when_both_are_resumed(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    for name in ("m", "n"):
        await service.register(server.endpoint, name)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        await pause(service)
        await service.api("POST", "/gateway/resume", {"policy": "n"})
        assert server.is_paused
        calling = asyncio.create_task(service.call("r", chat(model="n")))
        await service.until_state("n", held=1, paused=False)
        await service.api("POST", "/gateway/resume", {"policy": "m"})
        assert (await calling).status == 200
    assert not server.is_paused


@pytest.mark.parametrize("way", ["dev mode is off", "it fails", "it is down", "it is silent"])
async def test_pause_that_one_engine_refuses_is_undone_as_a_whole(
    open_service: Any, open_vllm: Any, way: str
) -> None:
    good, bad = await open_vllm(), await open_vllm()
    if way == "dev mode is off":
        bad.dev_mode = False
    elif way == "it is down":
        bad.refuse()
    else:
        bad.engine_answers["/pause"] = 500 if way == "it fails" else None
    service = await open_service(engine_seconds=0.2, health_seconds=0.05)
    for server in (good, bad):
        await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        problem = await service.api("POST", "/gateway/pause", {"mode": "keep"}, expect=502)
        assert problem["code"] == "engine_pause_failed"
        assert bad.url in problem["detail"]
        assert good.url not in problem["detail"]
        assert "VLLM_SERVER_DEV_MODE=1" in problem["hint"]
        status = {"dev mode is off": 404, "it fails": 500}.get(way)
        (told,) = problem["details"]["engines"]
        assert (told["url"], told["status"]) == (bad.url, status)
        state = await service.state()
        assert (state["paused"], state["mode"]) == (False, None)
        assert not good.is_paused
        assert await health(service) == {good.endpoint: True, bad.endpoint: True}
        assert (await service.call("r")).status == 200
    # An answer that never came may have been a yes, so that engine is told to go on as well.
    assert bad.asked_of_engine("/resume") == (1 if way in ("it fails", "it is silent") else 0)


async def test_pause_that_fails_leaves_the_pause_that_was_there(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    server.dev_mode = False
    service = await open_service()
    await service.register(server.endpoint)
    await pause(service, "drain", reason="first")
    await service.api("POST", "/gateway/pause", {"mode": "keep"}, expect=502)
    state = await service.state()
    assert (state["paused"], state["mode"], state["reason"]) == (True, "drain", "first")


async def test_engine_that_does_not_resume_gets_no_calls_until_it_does(
    open_service: Any, open_vllm: Any
) -> None:
    good, stuck = await open_vllm(), await open_vllm()
    service = await open_service(health_seconds=0.02)
    for server in (good, stuck):
        await service.register(server.endpoint)
    async with asyncio.timeout(WITHIN):
        await pause(service)
        stuck.engine_answers["/resume"] = 500
        await resume(service)
        assert not (await service.state())["paused"]
        assert await health(service) == {good.endpoint: True, stuck.endpoint: False}
        for number in range(4):
            rollout_id = await service.rollout(f"r{number}")
            assert (await service.call(rollout_id)).status == 200
        assert len(stuck.requests) == 0
        await until_asked(stuck, "/resume", 4, service)
        stuck.engine_answers.clear()
        while not (await health(service))[stuck.endpoint]:
            pass
        assert not stuck.is_paused
        for number in range(4, 12):
            await service.call(await service.rollout(f"r{number}"))
    assert len(stuck.requests) > 0


async def test_calls_wait_while_the_only_engine_has_not_resumed(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service(health_seconds=0.02)
    await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        await pause(service)
        server.engine_answers["/resume"] = 503
        await resume(service)
        calling = asyncio.create_task(service.call("r"))
        await service.until_state(held=1, paused=False)
        assert server.requests == []
        server.engine_answers.clear()
        assert (await calling).status == 200


async def test_engine_that_was_started_anew_without_dev_mode_is_taken_for_running(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    await pause(service)
    server.dev_mode = False
    server.restart_engine()
    await resume(service)
    assert (await service.call("r")).status == 200


async def test_server_that_left_the_registry_while_frozen_is_resumed_all_the_same(
    open_service: Any, open_vllm: Any
) -> None:
    old, new = await open_vllm(), await open_vllm()
    service = await open_service()
    await service.register(old.endpoint)
    await service.rollout("r")
    await pause(service)
    await service.api("PUT", "/models", {"items": [entry(new, 1)], "resume": True})
    assert not old.is_paused
    assert (await service.call("r")).status == 200
    assert (len(old.requests), len(new.requests), new.engine_requests) == (0, 1, [])


async def test_drain_over_keep_lets_the_engines_finish(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r"))
        exchange = await manual_vllm.take()
        await pause(world)
        draining = asyncio.create_task(pause(world, "drain"))
        await until_asked(manual_vllm, "/resume", 1, world)
        finish(exchange)
        assert (await draining)["m"]["inflight"] == 0
        assert (await calling).status == 200
        assert (await world.state())["paused"]


class LeftFrozen:
    """A store of an earlier life that ended before its engines were resumed."""

    def __init__(self, url: str) -> None:
        self.url = url

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        return StoreOfLeftFrozen(clock, self.url)


class StoreOfLeftFrozen(MemoryStore):
    def __init__(self, clock: Clock, url: str) -> None:
        super().__init__(clock)
        self.url = url

    async def __aenter__(self) -> MemoryStore:
        left = PolicyPause(policy="m", engines=(PausedEngine(url=self.url),))
        await self.change_gateway_state(lambda s: attrs.evolve(s, pauses={"m": left}))
        return await super().__aenter__()


async def test_engine_that_an_earlier_life_left_frozen_is_resumed(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service(
        tables={"plugins": {"enabled": ["vllm"]}},
        plugins=(LeftFrozen(server.url),),
        health_seconds=0.02,
    )
    await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        assert (await service.call("r")).status == 200
    assert server.asked_of_engine("/resume") == 1


# --- the calls


async def test_stalled_stream_outlives_its_time_outs_and_is_kept_alive(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(idle_seconds=0.3, total_seconds=0.5, heartbeat_seconds=0.05)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        pieces = list(VllmAnswer(exchange.request.json()).events())
        exchange.begin(200, EVENT_STREAM)
        exchange.write(b"".join(pieces[:3]))
        await pause(service)
        await paused_for(service, 0.8)
        assert (await service.state())["inflight"] == 1
        await resume(service)
        exchange.write(b"".join(pieces[3:]))
        exchange.end()
        called = await calling
    assert (called.status, called.is_clean) == (200, True)
    assert called.body.count(b": keep-alive") >= 3
    assert [item["status"] for item in await service.events("r")] == ["ok"]


async def update_under_a_stream(
    service: RunningService, server: FakeVllm, body: Any, path: str, updates: int, before: int
) -> dict[str, Any]:
    """Begin a stream, update the weights under it that often, and return its record.

    Args:
        before: Events that are sent before the first update; one more follows each update.
    """
    calling = asyncio.create_task(service.call("r", body, path))
    exchange = await server.take()
    outputs = [Output()] * exchange.request.json().get("n", 1)
    pieces = list(VllmAnswer(exchange.request.json(), outputs).events())
    exchange.begin(200, EVENT_STREAM)
    exchange.write(b"".join(pieces[:before]))
    for version in range(1, updates + 1):
        await pause(service)
        await paused_for(service, 0.1 * version)
        await service.api("PUT", "/models", {"items": [entry(server, version)], "resume": True})
        if version < updates:
            exchange.write(pieces[before + version - 1])
    exchange.write(b"".join(pieces[before + updates - 1 :]))
    exchange.end()
    assert (await calling).is_clean
    (recorded,) = await service.events("r")
    return recorded


async def test_stream_over_updates_has_the_exact_spans_of_its_versions(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        recorded = await update_under_a_stream(
            world, manual_vllm, chat(stream=True), "chat/completions", updates=2, before=3
        )
    (choice,) = recorded["choices"]
    assert (choice["tokens"], len(choice["token_ids"])) == ("complete", 4)
    assert choice["version_spans"] == [[0, 0], [2, 1], [3, 2]]
    assert (recorded["version_start"], recorded["version_end"]) == (0, 2)


async def test_each_choice_has_spans_of_its_own(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        # Two roles, then a token of each choice in turn: two of the first and one of the second.
        recorded = await update_under_a_stream(
            world, manual_vllm, chat(stream=True, n=2), "chat/completions", updates=1, before=5
        )
    spans = [choice["version_spans"] for choice in recorded["choices"]]
    assert spans == [[[0, 0], [2, 1]], [[0, 0], [1, 1]]]


async def test_translated_stream_has_spans_too(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    body = {
        "model": "m",
        "max_tokens": 64,
        "stream": True,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    async with asyncio.timeout(WITHIN):
        recorded = await update_under_a_stream(
            world, manual_vllm, body, "messages", updates=1, before=3
        )
    assert recorded["api"] == "messages"
    assert recorded["choices"][0]["version_spans"] == [[0, 0], [2, 1]]


async def test_spans_are_null_where_the_engine_was_not_frozen(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        pieces = list(VllmAnswer(exchange.request.json()).events())
        exchange.begin(200, EVENT_STREAM)
        exchange.write(b"".join(pieces[:3]))
        await pause(world, "drain", drain_seconds=0.1)
        await world.register(manual_vllm.endpoint, version=1)
        await resume(world)
        exchange.write(b"".join(pieces[3:]))
        exchange.end()
        await calling
    (recorded,) = await world.events("r")
    assert (recorded["version_start"], recorded["version_end"]) == (0, 1)
    assert recorded["choices"][0]["version_spans"] is None


async def test_spans_are_null_for_an_answer_that_comes_whole(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(world.call("r"))
        exchange = await manual_vllm.take()
        await pause(world)
        await paused_for(world, 0.1)
        body = {"items": [entry(manual_vllm, 1)], "resume": True}
        await world.api("PUT", "/models", body)
        finish(exchange)
        await calling
    (recorded,) = await world.events("r")
    assert (recorded["version_start"], recorded["version_end"]) == (0, 1)
    assert recorded["choices"][0]["version_spans"] is None


@pytest.mark.parametrize(
    ("marks", "end", "spans"),
    [
        ([], 7, None),
        ([VersionMark(8, {0: 2})], 8, [[0, 7], [2, 8]]),
        ([VersionMark(8, {0: 0})], 8, [[0, 8]]),
        ([VersionMark(8, {})], 8, [[0, 8]]),
        ([VersionMark(8, {0: 1}), VersionMark(9, {0: 1})], 9, [[0, 7], [1, 9]]),
        ([VersionMark(8, {0: 3})], 8, [[0, 7]]),
        ([VersionMark(8, None)], 8, None),
        ([VersionMark(8, {0: 1}), VersionMark(9, None)], 9, None),
        ([VersionMark(8, {0: 1})], 9, None),
    ],
)
def test_spans_are_told_where_every_change_is_exactly_known(
    marks: list[VersionMark], end: int, spans: Any
) -> None:
    choice = {"index": 0, "token_ids": [1, 2, 3], "version_spans": None}
    (told,) = with_spans([choice], 7, end, marks)
    assert told["version_spans"] == spans


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_as_vllm_was_recorded_to_answer_it_is_no_answer(
    open_service: Any, open_vllm: Any, stream: bool
) -> None:
    recorded = RECORDED / ("paused_abort_stream" if stream else "paused_abort") / "response.body"
    body = recorded.read_bytes()
    assert b'"finish_reason":"abort"' in body

    async def aborting(exchange: Exchange) -> None:
        kind = "text/event-stream" if stream else "application/json"
        exchange.whole(200, body, [("content-type", kind)])

    server = await open_vllm(each(aborting, saying()))
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r", chat(stream=stream))
    assert b'"abort"' not in called.body
    statuses = [item["status"] for item in await service.events("r")]
    if statuses == ["aborted"]:  # its first tokens had reached the agent
        assert stream
        assert not called.is_clean
    else:
        assert statuses == ["aborted", "ok"]
        assert (called.status, called.is_clean) == (200, True)


class SlowToCount:
    """A store that tells of a rollout's events when it is let."""

    def __init__(self) -> None:
        self.asked, self.release = asyncio.Event(), asyncio.Event()

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        plugin = self

        class Slow(MemoryStore):
            async def list_events(self, query: EventQuery) -> Any:
                plugin.asked.set()
                await plugin.release.wait()
                return await super().list_events(query)

        return Slow(clock)


async def test_c43_call_whose_limits_are_looked_up_while_the_gate_closes_is_held(
    open_service: Any, open_vllm: Any
) -> None:
    server, slow = await open_vllm(), SlowToCount()
    service = await open_service(tables={"plugins": {"enabled": ["vllm"]}}, plugins=(slow,))
    await service.register(server.endpoint)
    await service.rollout("r", config={"limits": {"calls": 5}})
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r"))
        await slow.asked.wait()
        assert (await pause(service, "drain"))["m"]["inflight"] == 0
        slow.release.set()
        await service.until_state(held=1)
        assert server.requests == []
        await service.api("PUT", "/models", {"items": [entry(server, 1)], "resume": True})
        assert (await calling).status == 200
    (recorded,) = await service.events("r")
    assert (recorded["version_start"], recorded["version_end"]) == (1, 1)


# --- registry and gates in one step


async def test_put_with_resume_ends_an_update_in_one_step(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, version=7)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        await pause(service, "drain")
        calls = [asyncio.create_task(service.call("r")) for _ in range(3)]
        await service.until_state(held=3)
        refused = {"items": [entry(server, 6)], "resume": True}
        await service.api("PUT", "/models", refused, expect=409)
        state = await service.state()
        assert (state["paused"], state["held"], state["version"]) == (True, 3, 7)
        await service.api("PUT", "/models", {"items": [entry(server, 8)], "resume": True})
        assert [called.status for called in await asyncio.gather(*calls)] == [200] * 3
    versions = {(e["version_start"], e["version_end"]) for e in await service.events("r")}
    assert versions == {(8, 8)}


async def test_put_with_pause_closes_admission_to_what_it_registers(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    body = {"items": [entry(server)], "pause": {"mode": "keep", "reason": "loading"}}
    await service.api("PUT", "/models", body)
    state = await service.state()
    assert (state["paused"], state["mode"], state["reason"]) == (True, "keep", "loading")
    assert server.is_paused
    await service.api("PUT", "/models", {**body, "resume": True}, expect=422)


async def test_state_shows_a_known_policy_that_has_no_server(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint)
    await service.api("DELETE", "/models?model=m")
    state = await service.state()
    assert (state["version"], state["paused"], state["inflight"], state["held"]) == (
        None,
        False,
        0,
        0,
    )
