"""Trying, trying again, giving up: what becomes of a call whose model server fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agl_core.testing.fake_vllm import (
    EVENT_STREAM,
    FakeVllm,
    VllmAnswer,
    answer,
    answering,
    cutting,
    each,
    hanging_up,
    saying,
    silent,
)
from agl_core.testing.own_time import own_seconds
from agl_core.testing.replay import chunks_of
from agl_core.testing.service import chat

WITHIN = 10.0


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_passing_status_is_tried_again_and_the_agent_sees_the_success(
    open_service: Any, open_vllm: Any, status: int
) -> None:
    server = await open_vllm(each(*[answering(status, {"error": {}})] * 2, saying()))
    service = await open_service(retries=2)
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r")
    assert called.status == 200
    assert "x-should-retry" not in called.headers
    assert len({request.body for request in server.requests}) == 1
    assert len(server.requests) == 3
    (recorded,) = await service.events("r")
    assert (recorded["status"], recorded["retries"]) == ("ok", 2)


@pytest.mark.parametrize("status", [429, 503])
async def test_what_was_tried_again_in_vain_tells_the_sdk_to_stop(
    open_service: Any, open_vllm: Any, status: int
) -> None:
    error = {"error": {"message": "full", "code": status}}
    server = await open_vllm(answering(status, error, [("retry-after", "0")]))
    service = await open_service(retries=1)
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r")
    assert (called.status, called.json()) == (status, error)
    assert called.headers["x-should-retry"] == "false"
    assert called.headers["retry-after"] == "0"
    assert len(server.requests) == 2
    (recorded,) = await service.events("r")
    assert (recorded["status"], recorded["http_status"]) == ("upstream_error", status)
    assert recorded["error"] == error["error"]


async def test_what_was_not_tried_again_says_nothing_of_it(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(each(answering(503, {"error": {}}), hanging_up))
    service = await open_service(retries=0)
    await service.register(server.endpoint)
    await service.rollout("r")
    for expected in (503, 502):
        called = await service.call("r")
        assert called.status == expected
        assert "x-should-retry" not in called.headers


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_other_4xx_passes_at_once_byte_for_byte(
    open_service: Any, open_vllm: Any, status: int
) -> None:
    body = b'{"object" : "error", "detail":["\xc3\xa9", 1.0]}'

    async def script(exchange: Any) -> None:
        exchange.whole(status, body, [("content-type", "application/json; charset=x")])

    server = await open_vllm(script)
    service = await open_service(retries=3)
    await service.register(server.endpoint)
    await service.rollout("r")
    for stream in (False, True):
        called = await service.call("r", chat(stream=stream))
        assert (called.status, called.body) == (status, body)
        assert called.headers["content-type"] == "application/json; charset=x"
        assert "x-should-retry" not in called.headers
    assert len(server.requests) == 2


async def test_refused_connection_is_tried_elsewhere(open_service: Any, open_vllm: Any) -> None:
    dead, live = await open_vllm(), await open_vllm()
    service = await open_service(retries=1)
    await service.register(dead.endpoint)
    await service.register(live.endpoint)
    dead.refuse()
    for number in range(4):
        rollout_id = await service.rollout(f"r{number}")
        assert (await service.call(rollout_id)).status == 200
    assert len(live.requests) == 4


async def test_failover_never_goes_to_the_server_that_just_failed(
    open_service: Any, open_vllm: Any
) -> None:
    bad = [await open_vllm(hanging_up), await open_vllm(answering(500, {}))]
    good = await open_vllm()
    service = await open_service(retries=2, failures_to_unhealthy=1000)
    for server in (*bad, good):
        await service.register(server.endpoint)
    for number in range(9):
        rollout_id = await service.rollout(f"r{number}")
        assert (await service.call(rollout_id)).status == 200
    assert len(good.requests) == 9
    assert all(len(server.requests) <= 9 for server in bad)
    recorded = [(await service.events(f"r{number}"))[0] for number in range(9)]
    assert {item["server"]["endpoint"] for item in recorded} == {good.endpoint}
    assert max(item["retries"] for item in recorded) <= 2


async def test_nothing_is_tried_again_once_a_byte_has_come(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(each(cutting(2), cutting(0)))
    service = await open_service(retries=5)
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r", chat(stream=True))
    assert (called.status, called.is_clean) == (200, False)
    assert chunks_of(called.body)[-1]["error"]["code"] == "upstream_truncated"
    assert len(server.requests) == 1
    late = await service.call("r", chat(stream=True))
    assert (late.status, late.code) == (502, "upstream_truncated")
    assert "x-should-retry" not in late.headers
    assert len(server.requests) == 2
    assert [item["status"] for item in await service.events("r")] == ["truncated", "truncated"]


async def test_stream_that_ends_politely_but_too_early_is_not_passed_off_as_whole(
    open_service: Any, open_vllm: Any
) -> None:
    async def script(exchange: Any) -> None:
        exchange.begin(200, EVENT_STREAM)
        pieces = list(VllmAnswer(exchange.request.json()).events())
        # Up to the finish chunk, which waits here for its fingerprint, then half an event.
        exchange.write(b"".join(pieces[:5]) + pieces[5][:20])
        exchange.end()

    server = await open_vllm(script)
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r", chat(stream=True))
    assert not called.is_clean
    *chunks, last = chunks_of(called.body)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["error"]["code"] == "upstream_truncated"
    assert b"[DONE]" not in called.body
    assert all(part.startswith(b"data: ") for part in called.body.split(b"\n\n") if part)
    (recorded,) = await service.events("r")
    assert recorded["status"] == "truncated"
    assert recorded["choices"][0]["tokens"] == "incomplete"


async def test_whole_answer_cut_short_is_an_error(open_service: Any, open_vllm: Any) -> None:
    async def script(exchange: Any) -> None:
        exchange.begin(200, [("content-length", "500")], chunked=False)
        exchange.raw(b'{"choices": [')
        exchange.cut()

    server = await open_vllm(script)
    service = await open_service(retries=3)
    await service.register(server.endpoint)
    await service.rollout("r")
    for path in ("chat/completions", "made/up"):
        called = await service.call("r", path=path)
        assert (called.status, called.code, called.is_clean) == (502, "upstream_truncated", True)
    assert len(server.requests) == 2


async def test_answer_that_is_no_http_is_an_error(open_service: Any, open_vllm: Any) -> None:
    async def script(exchange: Any) -> None:
        exchange.raw(b"SSH-2.0-OpenSSH_9\r\n\r\n")

    service = await open_service(retries=0)
    await service.register((await open_vllm(script)).endpoint)
    await service.rollout("r")
    called = await service.call("r")
    assert (called.status, called.code) == (502, "upstream_malformed")


async def test_servers_wait_is_kept_where_there_is_no_other(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(
        each(answering(429, {"error": {}}, [("retry-after", "0.3")]), saying())
    )
    service = await open_service(retries=1)
    await service.register(server.endpoint)
    await service.rollout("r")
    assert (await service.call("r")).status == 200
    (recorded,) = await service.events("r")
    assert recorded["latency_ms"] >= 0.3 * 0.8 * 1000


@pytest.mark.parametrize("fault", [answering(500, {}), hanging_up, cutting(1), silent])
async def test_server_is_taken_out_after_failures_in_a_row(
    open_service: Any, open_vllm: Any, fault: Any
) -> None:
    server = await open_vllm(fault)
    service = await open_service(retries=0, failures_to_unhealthy=3, first_byte_seconds=0.05)
    await service.register(server.endpoint)
    await service.rollout("r")

    async def is_healthy() -> bool:
        return bool((await service.api("GET", "/models"))["items"][0]["healthy"])

    for _ in range(3):
        assert await is_healthy()
        await service.call("r", chat(stream=True))
    assert not await is_healthy()


async def test_success_in_between_keeps_a_server_in(open_service: Any, open_vllm: Any) -> None:
    failing = answering(500, {})
    server = await open_vllm(each(failing, failing, saying(), failing, failing, saying()))
    service = await open_service(retries=0, failures_to_unhealthy=3)
    await service.register(server.endpoint)
    await service.rollout("r")
    for _ in range(6):
        await service.call("r")
    assert (await service.api("GET", "/models"))["items"][0]["healthy"]


async def test_server_comes_back_when_one_call_has_fared_well(
    open_service: Any, open_vllm: Any
) -> None:
    bad = await open_vllm(each(answering(500, {}), saying()))
    service = await open_service(failures_to_unhealthy=1, unhealthy_seconds=0.05, retries=1)
    await service.register(bad.endpoint)
    await service.register((await open_vllm()).endpoint)
    async with asyncio.timeout(WITHIN):
        number = 0
        while len(bad.requests) < 3:
            number += 1
            rollout_id = await service.rollout(f"r{number}")
            assert (await service.call(rollout_id)).status == 200
    assert all(item["healthy"] for item in (await service.api("GET", "/models"))["items"])


async def test_c05_silent_server_delays_only_its_own_calls(
    open_service: Any, open_vllm: Any
) -> None:
    quiet, live = await open_vllm(silent), await open_vllm()
    # Long enough for the live server's answers on a machine that is busy with other things.
    service = await open_service(first_byte_seconds=2.0, retries=0, unhealthy_seconds=60.0)
    await service.register(quiet.endpoint)
    await service.register(live.endpoint)
    for number in range(100):
        await service.rollout(f"r{number}")
    async with asyncio.timeout(30):
        calls = [asyncio.create_task(service.bare_call(f"r{number}")) for number in range(100)]
        slowest = 0.0
        while not all(call.done() for call in calls):
            began = own_seconds()
            assert (await service.client.get(f"{service.url}/healthz")).status_code == 200
            slowest = max(slowest, own_seconds() - began)
        statuses = [call.result() for call in calls]
    assert set(statuses) == {200, 504}
    assert len(quiet.requests) == statuses.count(504)
    assert slowest < 0.2
    before = len(quiet.requests)
    for number in range(100):
        assert (await service.call(f"r{number}")).status == 200
    assert len(quiet.requests) == before


@pytest.mark.parametrize(
    ("limit", "code"),
    [("first_byte_seconds", "first_byte_timeout"), ("total_seconds", "total_timeout")],
)
async def test_silent_server_ends_at_the_limit_and_is_let_go(
    open_service: Any, manual_vllm: FakeVllm, limit: str, code: str
) -> None:
    service = await open_service(**{limit: 0.1}, retries=3)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        called = await service.call("r")
        exchange = await manual_vllm.take()
        await exchange.gone.wait()
    assert (called.status, called.code) == (504, code)
    assert "x-should-retry" not in called.headers
    assert len(manual_vllm.requests) == 1
    (recorded,) = await service.events("r")
    assert recorded["status"] == "timeout"


@pytest.mark.parametrize(
    ("limit", "code"), [("idle_seconds", "idle_timeout"), ("total_seconds", "total_timeout")]
)
async def test_stream_that_stalls_ends_at_the_limit_with_an_error_event(
    open_service: Any, manual_vllm: FakeVllm, limit: str, code: str
) -> None:
    service = await open_service(**{limit: 0.1})
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        for piece in list(VllmAnswer(exchange.request.json()).events())[:3]:
            exchange.write(piece)
        called = await calling
        await exchange.gone.wait()
    assert (called.status, called.is_clean) == (200, False)
    assert chunks_of(called.body)[-1]["error"]["code"] == code
    (recorded,) = await service.events("r")
    assert recorded["status"] == "timeout"
    assert recorded["choices"][0]["token_ids"] == [11, 12]
    assert recorded["choices"][0]["tokens"] == "incomplete"


async def test_connect_time_out_is_tried_again(open_service: Any, open_vllm: Any) -> None:
    live = await open_vllm()
    service = await open_service(connect_seconds=0.1, retries=1)
    # RFC 5737 keeps this network for documentation: where nothing answers, or nothing routes.
    await service.register("http://192.0.2.1:9/v1")
    await service.register(live.endpoint)
    async with asyncio.timeout(WITHIN):
        for number in range(2):
            rollout_id = await service.rollout(f"r{number}")
            assert (await service.call(rollout_id)).status == 200
    assert len(live.requests) == 2


@pytest.mark.parametrize("limit", ["first_byte_seconds", "idle_seconds", "total_seconds"])
async def test_paused_time_counts_against_no_limit(
    open_service: Any, manual_vllm: FakeVllm, limit: str
) -> None:
    service = await open_service(**{limit: 0.3})
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        if limit != "first_byte_seconds":
            exchange.begin(200, EVENT_STREAM)
        await service.api("POST", "/gateway/pause", {"mode": "keep"})
        until = loop.time() + 0.6
        while loop.time() < until:
            assert (await service.state())["inflight"] == 1
        await service.api("POST", "/gateway/resume")
        if limit == "first_byte_seconds":
            exchange.begin(200, EVENT_STREAM)
        for piece in VllmAnswer(exchange.request.json()).events():
            exchange.write(piece)
        exchange.end()
        called = await calling
    assert (called.status, called.is_clean) == (200, True)
    assert called.body.endswith(b"data: [DONE]\n\n")


async def test_agent_that_reads_nothing_is_ended_by_the_total_time_out(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    """One that pipelines and then vanishes is seen by no server: only the clock ends its call."""
    service = await open_service(total_seconds=0.3)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    body = json.dumps(chat(stream=True)).encode()
    request = service.head("r", f"content-length: {len(body)}") + body
    async with asyncio.timeout(WITHIN):
        _, writer = await service.connect()
        writer.transport.pause_reading()
        writer.write(request * 2)
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        filler = b"data: " + json.dumps({"choices": [], "x": "y" * 100_000}).encode() + b"\n\n"
        while not exchange.gone.is_set():
            exchange.write(filler)
            await exchange.flush()
        recorded = await service.until_events("r")
        await service.until_state(inflight=0)
        writer.transport.abort()
    assert recorded[0]["status"] == "timeout"


async def test_upstream_connections_are_used_again(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    for stream in (False, True, False, True):
        await service.call("r", chat(stream=stream))
    assert server.open_connections == 1


async def test_interim_answer_is_not_taken_for_the_answer(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service()
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", chat(stream=False)))
        exchange = await manual_vllm.take()
        exchange.raw(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        answer(exchange, VllmAnswer(exchange.request.json()))
        called = await calling
    assert called.status == 200
    assert "link" not in called.headers


@pytest.mark.parametrize(
    ("status", "given", "wanted"),
    [(429, [], "2"), (503, [("retry-after", "7")], "7"), (500, [], None)],
)
async def test_overload_always_says_when_to_come_again(
    open_service: Any, open_vllm: Any, status: int, given: list[tuple[str, str]], wanted: str | None
) -> None:
    server = await open_vllm(answering(status, {"error": {"message": "busy"}}, given))
    service = await open_service(retries=0)
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r")
    assert (called.status, called.headers.get("retry-after")) == (status, wanted)
