"""Cases that other systems got wrong, by their numbers, against the whole service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agl_core.hookspecs import hookimpl
from agl_core.interfaces import ReshapeRequest
from agl_core.serving import _hypercorn_config
from agl_core.settings import GatewaySettings, ServerSettings
from agl_core.testing.fake_vllm import (
    DONE,
    EVENT_STREAM,
    PROMPT,
    FakeVllm,
    Output,
    VllmAnswer,
    answer,
    answering,
    cutting,
    each,
    event,
    saying,
)
from agl_core.testing.replay import chunks_of
from agl_core.testing.service import PLUGINS, RunningService, chat, running_service

WITHIN = 10.0
AT_ONCE = 1.0


class Sampling:
    """A plugin that sets a field and adds one."""

    @hookimpl
    def provide_request_reshaper(self) -> Sampling:
        return self

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        return {"temperature": 1.0, "x": 1}


class Listening:
    """A plugin that keeps what is captured."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    @hookimpl
    def provide_capture_sink(self) -> Listening:
        return self

    async def __aenter__(self) -> Listening:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def receive(self, event: Any) -> None:
        self.received.append(event)


# C1, C2: the caller goes away


@pytest.mark.parametrize("end", ["close", "reset", "half-close"])
@pytest.mark.parametrize(
    "phase", ["whole", "stream before its head", "stream before a byte", "mid"]
)
async def test_c01_upstream_is_closed_at_once_when_the_caller_goes(
    world: RunningService, manual_vllm: FakeVllm, phase: str, end: str
) -> None:
    await gone_caller(world, manual_vllm, phase, end)


@pytest.mark.parametrize("phase", ["whole", "stream before a byte", "mid"])
async def test_c02_also_with_every_built_in_plugin_on(
    stack: AsyncExitStack, manual_vllm: FakeVllm, phase: str
) -> None:
    sink = Listening()
    service = await stack.enter_async_context(
        running_service(plugins=(Sampling(), sink), enabled=(*PLUGINS, "local"))
    )
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    await gone_caller(service, manual_vllm, phase, "close")
    assert [received.data["status"] for received in sink.received] == ["client_gone"]


async def gone_caller(service: RunningService, server: FakeVllm, phase: str, end: str) -> None:
    body = json.dumps(chat(stream=phase != "whole")).encode()
    async with asyncio.timeout(WITHIN):
        reader, writer = await service.connect()
        writer.write(service.head("r", f"content-length: {len(body)}") + body)
        exchange = await server.take()
        assert (await service.state())["inflight"] == 1
        if phase in ("stream before a byte", "mid"):
            exchange.begin(200, EVENT_STREAM)
        if phase == "mid":
            for piece in list(VllmAnswer(exchange.request.json()).events())[:3]:
                exchange.write(piece)
            await reader.readuntil(b'"lo"')
        async with asyncio.timeout(AT_ONCE):
            if end == "half-close":
                writer.write_eof()
            elif end == "reset":
                writer.transport.abort()
            else:
                writer.close()
            await exchange.gone.wait()
        await service.until_state(inflight=0)
        (recorded,) = await service.until_events("r")
        writer.close()
    assert recorded["status"] == "client_gone"
    assert {choice["tokens"] for choice in recorded["choices"]} <= {"incomplete"}
    assert len(recorded["choices"]) == (1 if phase == "mid" else 0)


# C3: the agent's own mistakes


async def test_c03_permanent_400_passes_untouched_and_costs_the_server_nothing(
    open_service: Any, open_vllm: Any
) -> None:
    body = b'{"error": {"code":"context_length_exceeded",  "message":"no\\u0020room"}}\n'
    headers = [("content-type", "application/json"), ("x-vllm", "yes")]

    async def refusing(exchange: Any) -> None:
        exchange.whole(400, body, headers)

    server = await open_vllm(each(*[refusing] * 5, saying()))
    service = await open_service(failures_to_unhealthy=1)
    await service.register(server.endpoint)
    await service.rollout("r")
    for count in range(1, 6):
        refused = await service.call("r")
        assert (refused.status, refused.body) == (400, body)
        assert refused.headers["x-vllm"] == "yes"
        assert "x-should-retry" not in refused.headers
        assert len(server.requests) == count
    assert (await service.api("GET", "/models"))["items"][0]["healthy"]
    assert (await service.call("r")).status == 200


# C7: failing fast is not being fast


async def test_c07_server_that_fails_fast_is_not_picked_again_and_again(
    open_service: Any, open_vllm: Any
) -> None:
    good = [await open_vllm(), await open_vllm()]
    bad = await open_vllm(answering(503, {"error": {"message": "no"}}))
    service = await open_service(retries=1)
    for server in (good[0], bad, good[1]):
        await service.register(server.endpoint)
    for number in range(30):
        rollout_id = await service.rollout(f"r{number}")
        for _ in range(10):
            assert (await service.call(rollout_id)).status == 200
    threshold = GatewaySettings().failures_to_unhealthy
    assert 1 <= len(bad.requests) <= threshold + 1
    assert sum(len(server.requests) for server in good) == 300


# C14: what a plugin returns is what is sent


async def test_c14_what_a_plugin_changes_is_sent_and_recorded(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service(plugins=(Sampling(),))
    await service.register(server.endpoint)
    await service.rollout("r")
    assert (await service.call("r", chat(temperature=0.5))).status == 200
    (request,) = server.requests
    assert request.json()["temperature"] == 1.0
    assert request.json()["x"] == 1
    assert request.header("content-length") == str(len(request.body))
    (recorded,) = await service.events("r")
    assert recorded["request"] == chat(temperature=0.5)
    assert recorded["adjusted"]["temperature"] == 1.0
    assert recorded["adjusted"]["x"] == 1
    assert recorded["sampling"]["temperature"] == 1.0


# C15: limits are ours and configured


async def test_c15_body_of_40_mib_passes(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    message = {"role": "user", "content": "x" * (40 * 2**20)}
    body = json.dumps(chat(messages=[message])).encode()
    assert (await service.call("r", body)).status == 200
    assert server.requests[0].json()["messages"] == [message]


@pytest.mark.parametrize("way", ["declared", "chunked", "trickled"])
async def test_c15_body_over_the_limit_gets_413_and_the_service_goes_on(
    open_service: Any, open_vllm: Any, way: str
) -> None:
    server = await open_vllm()
    service = await open_service(max_body_bytes=100_000)
    await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        reader, writer = await service.connect()
        size = 200_000
        framing = f"content-length: {size}" if way == "declared" else "transfer-encoding: chunked"
        writer.write(service.head("r", framing))
        if way == "declared":
            writer.write(bytes(size))
        else:
            step = size if way == "chunked" else 1000
            for _ in range(0, size, step):
                writer.write(b"%x\r\n%b\r\n" % (step, bytes(step)))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
        writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"x-request-id: " in head
    assert b"connection: close" in head
    assert json.loads(rest)["error"]["code"] == "too_large"
    assert (await service.call("r")).status == 200
    assert len(server.requests) == 1


async def test_c15_refused_body_that_never_ends_holds_nothing_up(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service(max_body_bytes=1000)
    await service.register(server.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        reader, writer = await service.connect()
        writer.write(service.head("r", "content-length: 5000") + bytes(2000))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()
        assert (await service.call("r")).status == 200


async def test_c15_silent_body_and_long_call_end_at_the_configured_limits(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(body_idle_seconds=0.2, total_seconds=0.2)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        reader, writer = await service.connect()
        writer.write(service.head("r", "content-length: 50") + b"{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
        assert json.loads(await reader.read())["error"]["code"] == "body_timeout"
        writer.close()
        late = await service.call("r")
    assert (late.status, late.code) == (504, "total_timeout")


async def test_c15_limits_of_quart_and_hypercorn_are_set_and_long(open_service: Any) -> None:
    service = await open_service()
    web = service.service.app._behind
    assert web.config["RESPONSE_TIMEOUT"] is None
    assert web.config["MAX_CONTENT_LENGTH"] == ServerSettings().max_body_bytes
    assert web.config["BODY_TIMEOUT"] == ServerSettings().body_seconds
    assert _hypercorn_config(ServerSettings()).read_timeout is None
    defaults = GatewaySettings()
    assert defaults.max_body_bytes == 64 * 2**20
    for seconds in (defaults.first_byte_seconds, defaults.idle_seconds, defaults.total_seconds):
        assert seconds is not None
        assert seconds > 75


# C18 to C20: tokens of streams


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_c18_each_chunk_comes_when_it_is_sent_and_without_ids(
    world: RunningService, manual_vllm: FakeVllm, path: str
) -> None:
    output = Output(
        texts=tuple("abcde"), token_ids=(1, 2, 3, 4, 5), logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0)
    )
    body = chat(stream=True) if path.startswith("chat") else {"prompt": "Hi", "stream": True}
    async with (
        asyncio.timeout(WITHIN),
        asyncio.TaskGroup() as group,
    ):
        seen = asyncio.Queue[bytes]()

        async def read() -> None:
            url = f"{world.base('r')}/{path}"
            async with world.client.stream("POST", url, json=body) as streamed:
                async for part in streamed.aiter_raw():
                    seen.put_nowait(part)

        group.create_task(read())
        exchange = await manual_vllm.take()
        made = VllmAnswer(exchange.request.json(), [output])
        exchange.begin(200, EVENT_STREAM)
        received = b""
        for piece in made.events():
            exchange.write(piece)
            shown = [choice for chunk in chunks_of(piece) for choice in chunk["choices"]]
            # The finish chunk waits for its fingerprint, the end for the record.
            if shown and shown[0]["finish_reason"] is None:
                received += await seen.get()
        exchange.end()
    while not seen.empty():
        received += seen.get_nowait()
    choices = [choice for chunk in chunks_of(received) for choice in chunk["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert "".join(text or "" for text in texts) == "abcde"
    for choice in choices:
        assert choice.get("token_ids") is None
        assert choice.get("logprobs") is None
    (recorded,) = await world.events("r")
    assert recorded["choices"][0]["token_ids"] == [1, 2, 3, 4, 5]
    assert recorded["choices"][0]["logprobs"] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert recorded["choices"][0]["tokens"] == "complete"


async def test_c19_every_combination_gives_the_same_record(
    open_service: Any, open_vllm: Any
) -> None:
    service = await open_service()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def script(exchange: Any) -> None:
        fields = exchange.request.json()
        output = Output(tool="f" if "tools" in fields else None)
        answer(exchange, VllmAnswer(fields, [output]))

    server = await open_vllm(script)
    await service.register(server.endpoint)
    records = []
    for number in range(8):
        extra: dict[str, Any] = {}
        if number & 1:
            extra["stream"] = True
        if number & 2:
            extra["logprobs"] = True
        if number & 4:
            extra["tools"] = tools
        rollout_id = await service.rollout(f"r{number}")
        called = await service.call(rollout_id, chat(**extra))
        assert (called.status, called.is_clean) == (200, True)
        shows_logprobs = b'"logprob"' in called.body
        assert shows_logprobs == bool(number & 2)
        records += [recorded["choices"] for recorded in await service.events(rollout_id)]
    assert len(records) == 8
    for (choice,) in records:
        assert choice["token_ids"] == list(Output().token_ids)
        assert choice["logprobs"] == list(Output().logprobs)
        assert choice["prompt_token_ids"] == list(PROMPT)
        assert choice["tokens"] == "complete"


async def test_c20_interleaved_choices_keep_their_index(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    calling = asyncio.create_task(world.call("r", chat(stream=True, n=2)))
    async with asyncio.timeout(WITHIN):
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        for index in (0, 1):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}}
            exchange.write(event({"choices": [first], "prompt_token_ids": [9, 8]}))
        for index, ids, end in ((0, [1, 2], None), (1, [7], "stop"), (0, [3], "stop")):
            logprobs = {"content": [{"token": "t", "logprob": -float(i)} for i in ids]}
            choice = {
                "index": index,
                "delta": {"content": "t" * len(ids)},
                "logprobs": logprobs,
                "finish_reason": end,
                "token_ids": ids,
            }
            exchange.write(event({"choices": [choice]}))
        usage = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
        exchange.write(event({"choices": [], "usage": usage}) + DONE)
        exchange.end()
        called = await calling
    indices = [choice["index"] for chunk in chunks_of(called.body) for choice in chunk["choices"]]
    assert indices == [0, 1, 0, 1, 0]
    (recorded,) = await world.events("r")
    assert [choice["token_ids"] for choice in recorded["choices"]] == [[1, 2, 3], [7]]
    assert [choice["tokens"] for choice in recorded["choices"]] == ["complete", "complete"]
    attempt = {"attempt_id": "a-1", "phase": "succeeded"}
    await world.api("PATCH", "/rollouts/r", {"status": "succeeded", "attempts": [attempt]})
    exported = await world.api("GET", "/export/triplet?ids=r")
    triplets = exported["triplets"]
    assert [triplet["response_token_ids"] for triplet in triplets] == [[1, 2, 3], [7]]
    assert [triplet["prompt_token_ids"] for triplet in triplets] == [[9, 8], [9, 8]]


# C24 to C26: streams to the letter


async def test_c24_quiet_stream_gets_comments_between_whole_events_alone(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(heartbeat_seconds=0.02)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    received = b""

    async def until_comments(count: int) -> None:
        nonlocal received
        target = received.count(b": keep-alive\n\n") + count
        while received.count(b": keep-alive\n\n") < target:
            received += await parts.get()

    parts = asyncio.Queue[bytes]()

    async def read() -> None:
        url = f"{service.base('r')}/chat/completions"
        async with service.client.stream("POST", url, json=chat(stream=True)) as streamed:
            async for part in streamed.aiter_raw():
                parts.put_nowait(part)

    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        group.create_task(read())
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        await until_comments(30)
        pieces = list(VllmAnswer(exchange.request.json()).events())
        exchange.write(pieces[0] + pieces[1][:40])
        await until_comments(10)
        exchange.write(pieces[1][40:] + b"".join(pieces[2:]))
        exchange.end()
    while not parts.empty():
        received += parts.get_nowait()
    assert received.count(b": keep-alive\n\n") >= 40
    events = [part for part in received.split(b"\n\n") if part]
    assert all(part == b": keep-alive" or part.startswith(b"data: ") for part in events)
    texts = [c["choices"][0]["delta"].get("content") for c in chunks_of(received)]
    assert "".join(text or "" for text in texts) == "Hello!"
    (recorded,) = await service.events("r")
    assert recorded["response"]["choices"][0]["message"]["content"] == "Hello!"


async def test_c24_comment_never_falls_into_an_unknown_stream(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(heartbeat_seconds=0.02)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    calling = asyncio.create_task(service.call("r", {"model": "m"}, "made/up"))
    async with asyncio.timeout(WITHIN):
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        exchange.write(b"data: ha")
        # A neighbour's comments say that the time for one has come and gone.
        neighbour = asyncio.create_task(service.call("r", chat(stream=True)))
        other = await manual_vllm.take()
        other.begin(200, EVENT_STREAM)
        for _ in range(200):
            await service.state()
        answer_pieces = b"".join(VllmAnswer(other.request.json()).events())
        other.write(answer_pieces)
        other.end()
        assert (await neighbour).body.count(b": keep-alive\n\n") > 1
        exchange.write(b"lf\n\n")
        exchange.end()
        called = await calling
    assert b"data: half\n\n" in called.body


async def test_c25_character_split_over_reads_arrives_whole(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    text = "日本😀"
    output = Output(texts=(text,), token_ids=(5,), logprobs=(-0.5,))
    body = chat(
        stream=True,
        return_token_ids=True,
        logprobs=True,
        top_logprobs=0,
        stream_options={"include_usage": True},
    )
    calling = asyncio.create_task(world.call("r", body))
    async with asyncio.timeout(WITHIN):
        exchange = await manual_vllm.take()
        whole = b"".join(VllmAnswer(exchange.request.json(), [output]).events())
        exchange.begin(200, EVENT_STREAM)
        for at in range(len(whole)):
            exchange.write(whole[at : at + 1])
            await exchange.flush()
        exchange.end()
        called = await calling
    assert called.body == whole
    (recorded,) = await world.events("r")
    assert recorded["adjusted"] == {}
    assert recorded["response"]["choices"][0]["message"]["content"] == text
    assert recorded["choices"][0]["tokens"] == "complete"


@pytest.mark.parametrize("stream", [False, True])
async def test_c26_usage_of_zero_is_kept_and_only_shown_to_who_asked(
    open_service: Any, open_vllm: Any, stream: bool
) -> None:
    server = await open_vllm(saying(usage={"prompt_tokens_details": {"cached_tokens": 0}}))
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r", chat(stream=stream))
    (recorded,) = await service.events("r")
    assert recorded["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    if stream:
        assert all("usage" not in chunk for chunk in chunks_of(called.body))
        options = {"include_usage": True}
        asked = await service.call("r", chat(stream=True, stream_options=options))
        assert chunks_of(asked.body)[-1]["choices"] == []
        assert chunks_of(asked.body)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# C33: no training on servers that return no tokens


async def test_c33_not_ready_while_a_trained_server_returns_no_ids(
    open_service: Any, open_vllm: Any
) -> None:
    strips = await open_vllm(saying(ignores=["return_token_ids"]))
    helper = await open_vllm(saying(ignores=["return_token_ids"]))
    good = await open_vllm()
    service = await open_service(probe=True)

    async def ready() -> tuple[int, dict[str, Any]]:
        asked = await service.client.get(f"{service.url}/readyz")
        return asked.status_code, asked.json()

    assert (await ready())[0] == 200
    await service.register(helper.endpoint, "judge", trained=False)
    assert (await ready())[0] == 200
    await service.register(strips.endpoint)
    assert (await ready())[0] == 503
    async with asyncio.timeout(WITHIN):
        while "not yet" in (await ready())[1]["reasons"][0]["message"]:
            pass
    status, found = await ready()
    (reason,) = found["reasons"]
    assert status == 503
    assert reason["server"] == strips.endpoint
    assert reason["field"].startswith("prompt_token_ids")
    assert strips.endpoint in reason["message"]
    items = [{"model": "m", "endpoint": good.endpoint}]
    await service.api("PUT", "/models", {"items": items})
    async with asyncio.timeout(WITHIN):
        while (await ready())[0] != 200:
            pass
    assert helper.requests == []
    assert good.requests[0].target == "/v1/chat/completions"


async def test_c33_server_registered_anew_while_it_was_unreachable_is_probed_anew(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(probe=True)
    async with asyncio.timeout(WITHIN):
        await service.register(manual_vllm.endpoint)
        (await manual_vllm.take()).whole_json(503, {})
        await service.api("DELETE", "/models?model=m")
        await service.register(manual_vllm.endpoint)
        exchange = await manual_vllm.take()
        assert (await service.client.get(f"{service.url}/readyz")).status_code == 503
        answer(exchange, VllmAnswer(exchange.request.json()))
        while (await service.client.get(f"{service.url}/readyz")).status_code != 200:
            pass


# C42, C43: weight updates


async def test_c42_salt_names_policy_and_version_where_it_is_asked_for(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.rollout("r")
    await service.register(server.endpoint, version=3, salt=True)
    for version in (3, 3, 4):
        await service.register(server.endpoint, version=version, salt=True)
        assert (await service.call("r")).status == 200
    await service.register(server.endpoint, version=5)
    assert (await service.call("r")).status == 200
    salts = [request.json().get("cache_salt") for request in server.requests]
    assert salts == ["m@3", "m@3", "m@4", None]
    recorded = await service.events("r")
    assert recorded[0]["adjusted"]["cache_salt"] == "m@3"


async def test_c43_nothing_is_admitted_while_draining_and_each_call_has_one_version(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service()
    await service.register(manual_vllm.endpoint, version=7)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        early = [asyncio.create_task(service.call("r")) for _ in range(2)]
        exchanges = [await manual_vllm.take() for _ in range(2)]
        pausing = asyncio.create_task(
            service.api("POST", "/gateway/pause", {"mode": "drain", "reason": "weights"})
        )
        await service.until_state(paused=True)
        late = [asyncio.create_task(service.call("r")) for _ in range(5)]
        await service.until_state(held=5)
        assert (await service.state())["inflight"] == 2
        assert not pausing.done()
        for exchange in exchanges:
            assert not pausing.done()
            answer(exchange, VllmAnswer(exchange.request.json()))
        state = (await pausing)["policies"]["m"]
        assert (state["inflight"], state["held"], state["paused"]) == (0, 5, True)
        await asyncio.gather(*early)
        await service.register(manual_vllm.endpoint, version=8)
        assert (await service.state())["held"] == 5
        assert len(manual_vllm.requests) == 2
        await service.api("POST", "/gateway/resume", {})
        for _ in range(5):
            exchange = await manual_vllm.take()
            answer(exchange, VllmAnswer(exchange.request.json()))
        answers = await asyncio.gather(*late)
    assert [called.status for called in answers] == [200] * 5
    recorded = await service.events("r")
    versions = [(item["version_start"], item["version_end"]) for item in recorded]
    assert versions == [(7, 7)] * 2 + [(8, 8)] * 5


# C93: every answer can be found


async def test_c93_every_answer_has_an_id_and_model_calls_are_found_by_it(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(
        each(
            saying(),
            answering(400, {"error": {}}),
            cutting(0),
            saying(),
            cutting(2),
        )
    )
    service = await open_service(retries=0)
    await service.register(server.endpoint)
    await service.rollout("r")
    made = [
        (await service.call("r"), 200, "ok"),
        (await service.call("r"), 400, "upstream_error"),
        (await service.call("r"), 502, "truncated"),
        (await service.call("r", chat(stream=True)), 200, "ok"),
        (await service.call("r", chat(stream=True)), 200, "truncated"),
        (await service.call("r", chat(model="nobody")), 404, "upstream_error"),
    ]
    by_id = {item["call_id"]: item for item in await service.events("r")}
    assert len(by_id) == len(made)
    for called, status, recorded_status in made:
        assert called.status == status
        assert by_id[called.call_id]["status"] == recorded_status
    others = [
        await service.call("nobody"),
        await service.call("r", url=f"{service.url}/rollout/r/attempt/a//v1/x"),
        await service.call("r", url=f"{service.url}/nowhere"),
        await service.call("r", url=f"{service.url}/api/rollouts", method="DELETE"),
        await service.call("r", url=f"{service.url}/healthz", method="GET"),
    ]
    assert all(other.headers["x-request-id"] for other in others)
    assert [other.status for other in others] == [404, 404, 404, 405, 200]
