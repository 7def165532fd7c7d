"""Servers that speak an agent's API themselves, and paths that nobody serves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from agl_core.testing.fake_vllm import EVENT_STREAM, FakeVllm, answering
from agl_core.testing.service import RunningService
from agl_core.testing.translated import read_events

WITHIN = 10.0
RESPONSE = {"id": "resp-1", "object": "response", "status": "completed", "output": []}
USAGE = {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}
BODIES: dict[str, Any] = {
    "responses": {"model": "m", "input": "Hi", "stream": True},
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    },
}


def named(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


BEGINNINGS = {
    "responses": [
        named("response.created", response={**RESPONSE, "status": "in_progress"}),
        named("response.output_text.delta", delta="Hello"),
    ],
    "messages": [
        named("message_start", message={"id": "msg", "usage": {"input_tokens": 4}}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello"}),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
    ],
}


@pytest.fixture
async def native(open_service: Any, manual_vllm: FakeVllm) -> RunningService:
    service: RunningService = await open_service()
    await service.register(manual_vllm.endpoint, native=["messages", "responses"])
    await service.rollout("r")
    return service


async def streamed(
    service: RunningService, server: FakeVllm, path: str, parts: list[bytes], ending: str
) -> Any:
    """Call, answer with these parts, and end as said."""
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", BODIES[path], path))
        exchange = await server.take()
        assert exchange.request.json() == BODIES[path]
        if ending == "close":  # the connection's end is the answer's, as in HTTP/1.0
            exchange.begin(200, [*EVENT_STREAM, ("connection", "close")], chunked=False)
        else:
            exchange.begin(200, EVENT_STREAM)
        for part in parts:
            exchange.write(part)
        if ending == "chunked":
            exchange.end()
        elif ending != "none":
            exchange.cut()
        return await calling


@pytest.mark.parametrize("ending", ["chunked", "close", "cut", "none"])
@pytest.mark.parametrize(
    ("last", "status"),
    [
        (named("response.completed", response={**RESPONSE, "usage": USAGE}), "ok"),
        (named("response.incomplete", response={**RESPONSE, "usage": USAGE}), "ok"),
        (named("response.failed", response={"error": {"code": "x"}, "usage": USAGE}), None),
    ],
    ids=["completed", "incomplete", "failed"],
)
async def test_c23_response_ends_with_its_own_last_event(
    native: RunningService, manual_vllm: FakeVllm, last: bytes, status: str | None, ending: str
) -> None:
    parts = [*BEGINNINGS["responses"], last]
    got = await streamed(native, manual_vllm, "responses", parts, ending)
    assert (got.status, got.is_clean, got.body) == (200, True, b"".join(parts))
    (event,) = await native.events("r")
    assert event["status"] == (status or "upstream_error")
    assert event["response"] == read_events(last)[0][1]["response"]
    assert event["usage"] == USAGE
    assert event["ttft_ms"] is not None


@pytest.mark.parametrize("ending", ["chunked", "close", "none"])
async def test_c23_message_ends_with_its_own_last_event(
    native: RunningService, manual_vllm: FakeVllm, ending: str
) -> None:
    parts = [*BEGINNINGS["messages"], named("message_stop")]
    got = await streamed(native, manual_vllm, "messages", parts, ending)
    assert (got.status, got.is_clean, got.body) == (200, True, b"".join(parts))
    (event,) = await native.events("r")
    assert event["status"] == "ok"
    assert event["usage"] == {"input_tokens": 4, "output_tokens": 2}


@pytest.mark.parametrize("ending", ["chunked", "close", "cut"])
@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_c23_native_stream_without_its_last_event_is_broken(
    native: RunningService, manual_vllm: FakeVllm, path: str, ending: str
) -> None:
    parts = [*BEGINNINGS[path], b'event: half\ndata: {"ty']
    got = await streamed(native, manual_vllm, path, parts, ending)
    assert (got.status, got.is_clean) == (200, False)
    assert got.body.startswith(b"".join(BEGINNINGS[path]))
    *_, (name, last) = read_events(got.body)
    assert (name, last["error"]["code"]) == ("error", "upstream_truncated")
    (event,) = await native.events("r")
    assert event["status"] == "truncated"


async def test_native_error_event_ends_a_message_and_is_recorded(
    native: RunningService, manual_vllm: FakeVllm
) -> None:
    error = {"type": "overloaded_error", "message": "full"}
    parts = [BEGINNINGS["messages"][0], named("error", error=error)]
    got = await streamed(native, manual_vllm, "messages", parts, "chunked")
    assert (got.is_clean, got.body) == (True, b"".join(parts))
    (event,) = await native.events("r")
    assert (event["status"], event["error"]) == ("upstream_error", error)


async def test_c23_record_is_there_before_the_native_stream_ends(
    native: RunningService, manual_vllm: FakeVllm
) -> None:
    url = f"{native.base('r')}/responses"
    last = named("response.completed", response=RESPONSE)
    received = b""
    async with asyncio.timeout(WITHIN):

        async def answer() -> None:
            exchange = await manual_vllm.take()
            exchange.begin(200, EVENT_STREAM)
            for part in (*BEGINNINGS["responses"], last):
                exchange.write(part)

        answering_ = asyncio.create_task(answer())
        async with native.client.stream("POST", url, json=BODIES["responses"]) as stream:
            async for part in stream.aiter_raw():
                received += part
                if b"response.completed" in received:
                    assert len(await native.events("r")) == 1
        await answering_
    assert received.endswith(last)


# Paths


async def test_c11_head_of_every_base_url_is_answered(native: RunningService) -> None:
    for base in ("", "/rollout/r/attempt/a", "/rollout/r/attempt/a/v1"):
        for slash in ("", "/"):
            answered = await native.client.head(f"{native.url}{base}{slash}")
            assert (answered.status_code, answered.content) == (200, b"")
            assert answered.headers["x-request-id"]
    assert (await native.client.get(f"{native.url}/")).status_code == 404


@pytest.mark.parametrize(
    ("path", "error_type"),
    [
        ("messages", "not_found_error"),
        ("messages/batches", "not_found_error"),
        ("responses", "invalid_request_error"),
        ("responses/r-1/cancel", "invalid_request_error"),
        ("chat/completions", "not_found_error"),
        ("completions", "not_found_error"),
    ],
)
@pytest.mark.parametrize("base", ["/rollout/r/attempt/a/", "/", "/rollout/gone/attempt/a/v1/"])
async def test_c11_path_that_leads_nowhere_is_an_error_in_its_dialect(
    native: RunningService, base: str, path: str, error_type: str
) -> None:
    answered = await native.client.post(native.url + base + path, json={"model": "m"})
    assert answered.status_code == 404
    assert answered.headers["content-type"] == "application/json"
    told = answered.json()
    assert told["error"]["type"] == error_type
    assert told["error"]["code"] == "not_found"
    assert told.get("type") == ("error" if path.startswith("messages") else None)
    assert "/v1" in told["error"]["message"] or "gone" in told["error"]["message"]


async def test_c11_wrong_base_url_is_named_by_both_sdks(native: RunningService) -> None:
    wrong = native.base("r").removesuffix("/v1")
    async with openai.AsyncOpenAI(base_url=wrong, api_key="k") as client:
        with pytest.raises(openai.NotFoundError, match="below /v1"):
            await client.chat.completions.create(model="m", messages=[])
    async with anthropic.AsyncAnthropic(base_url=f"{native.url}/no", api_key="k") as claude:
        with pytest.raises(anthropic.NotFoundError):
            await claude.messages.create(model="m", max_tokens=9, messages=[])


async def test_c11_servers_own_404_passes_as_it_came(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm(answering(404, {"detail": "Not Found"}))
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    for path in ("messages/batches", "responses/r-1/cancel", "no/such"):
        got = await service.call("r", {"model": "m"}, path)
        assert (got.status, got.json()) == (404, {"detail": "Not Found"})
    assert len(server.requests) == 3
