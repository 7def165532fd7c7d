"""Who may call a model: keys, tokens, states of rollouts and attempts, and odd requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from agl_core.testing.fake_vllm import FakeVllm, VllmAnswer, answer
from agl_core.testing.service import Answer, RunningService, chat

WITHIN = 10.0
KEYS = {
    "auth": {
        "algorithm_key": {"env": "ALGORITHM"},
        "controller_key": {"env": "CONTROLLER"},
        "viewer_key": {"env": "VIEWER"},
    }
}
ALGORITHM = {"authorization": "Bearer algorithm-secret"}
CONTROLLER = {"authorization": "Bearer controller-secret"}
VIEWER = {"authorization": "Bearer viewer-secret"}


@pytest.fixture
async def guarded(
    open_service: Any, open_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> RunningService:
    """A service with keys, the rollouts r and s, and a model."""
    for name in ("algorithm", "controller", "viewer"):
        monkeypatch.setenv(name.upper(), f"{name}-secret")
    service: RunningService = await open_service(tables=KEYS)
    service.client.headers.update(ALGORITHM)
    await service.register((await open_vllm()).endpoint)
    await service.rollout("r")
    await service.rollout("s")
    return service


async def token_of(service: RunningService, rollout_id: str) -> dict[str, str]:
    minted = await service.api("POST", f"/rollouts/{rollout_id}/token")
    return {"authorization": f"Bearer {minted['token']}"}


async def raw(service: RunningService, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes; the status, headers and body of the answer, read to the connection's end."""
    async with asyncio.timeout(WITHIN):
        reader, writer = await service.connect()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        writer.close()
    return int(head.split(" ")[1]), headers, body


def refusal(called: Answer) -> tuple[int, str]:
    return called.status, called.code


async def test_only_agents_and_the_algorithm_call_models(guarded: RunningService) -> None:
    token = await token_of(guarded, "r")
    assert (await guarded.call("r", headers=token)).status == 200
    assert (await guarded.call("r", headers=ALGORITHM)).status == 200
    assert refusal(await guarded.call("r", headers=CONTROLLER)) == (403, "forbidden")
    assert refusal(await guarded.call("r", headers=VIEWER)) == (403, "forbidden")
    wrong = {"authorization": "Bearer nobody's"}
    assert refusal(await guarded.call("r", headers=wrong)) == (401, "bad_token")
    assert len(await guarded.events("r")) == 2


async def test_token_is_taken_from_the_headers_that_sdks_use(guarded: RunningService) -> None:
    token = (await token_of(guarded, "r"))["authorization"].removeprefix("Bearer ")
    guarded.client.headers.pop("authorization")
    for name in ("x-api-key", "api-key"):
        assert (await guarded.call("r", headers={name: token})).status == 200
    assert refusal(await guarded.call("r")) == (401, "bad_token")
    forged = token[:-2] + ("AA" if not token.endswith("AA") else "BB")
    assert refusal(await guarded.call("r", headers={"x-api-key": forged})) == (401, "bad_token")


async def test_error_has_the_shape_that_sdks_parse(guarded: RunningService) -> None:
    called = await guarded.call("r", headers={"authorization": "Bearer no"})
    assert set(called.json()["error"]) == {"message", "type", "param", "code"}
    assert called.json()["error"]["type"] == "authentication_error"
    messages = await guarded.call("r", path="messages", headers={"authorization": "Bearer no"})
    assert messages.json()["type"] == "error"
    assert messages.json()["error"]["type"] == "authentication_error"


async def test_token_of_another_rollout_is_refused(guarded: RunningService) -> None:
    token = await token_of(guarded, "s")
    assert refusal(await guarded.call("r", headers=token)) == (403, "forbidden")
    assert (await guarded.api("GET", "/rollouts/r"))["attempts"] == []


async def test_unknown_rollout_is_404(world: RunningService) -> None:
    assert refusal(await world.call("nobody")) == (404, "not_found")


async def test_call_makes_the_attempt_and_the_rollout_runs(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    assert (await world.api("GET", "/rollouts/r"))["status"] == "queuing"
    calling = asyncio.create_task(world.call("r", attempt_id="pod-1"))
    async with asyncio.timeout(WITHIN):
        exchange = await manual_vllm.take()
        rollout = await world.api("GET", "/rollouts/r")
        answer(exchange, VllmAnswer(exchange.request.json()))
        await calling
    assert rollout["status"] == "running"
    assert [attempt["attempt_id"] for attempt in rollout["attempts"]] == ["pod-1"]
    assert rollout["attempts"][0]["phase"] == "running"


async def test_ended_rollout_makes_no_more_calls(guarded: RunningService) -> None:
    token = await token_of(guarded, "r")
    await guarded.call("r", headers=token)
    await guarded.api("PATCH", "/rollouts/r", {"status": "succeeded"})
    assert refusal(await guarded.call("r", headers=token)) == (403, "rollout_ended")
    assert refusal(await guarded.call("r", attempt_id="new")) == (403, "rollout_ended")


async def test_rollout_that_is_to_be_cancelled_makes_no_more_calls(
    guarded: RunningService,
) -> None:
    await guarded.call("r")
    await guarded.api("POST", "/rollouts/r/cancel")
    assert refusal(await guarded.call("r")) == (403, "rollout_ended")


async def test_c45_ended_attempt_makes_no_more_calls_and_its_successor_does(
    guarded: RunningService,
) -> None:
    await guarded.call("r", attempt_id="uid-1")
    attempts = [
        {"attempt_id": "uid-1", "phase": "failed", "reason": "infra"},
        {"attempt_id": "uid-2", "phase": "running"},
    ]
    await guarded.api("PATCH", "/rollouts/r", {"attempts": attempts})
    assert refusal(await guarded.call("r", attempt_id="uid-1")) == (403, "stale_attempt")
    assert (await guarded.call("r", attempt_id="uid-2")).status == 200
    late = await guarded.client.post(
        f"{guarded.url}/rollout/r/attempt/uid-1/events",
        json={"event_type": "note", "data": {}},
        headers=await token_of(guarded, "r"),
    )
    assert (late.status_code, late.json()["code"]) == (409, "stale_attempt")


async def test_fixed_base_url_takes_rollout_and_attempt_from_the_token(
    guarded: RunningService,
) -> None:
    token = await token_of(guarded, "r")
    url = f"{guarded.url}/v1/chat/completions"
    assert refusal(await guarded.call("r", url=url, headers=token)) == (403, "no_running_attempt")
    await guarded.call("r", attempt_id="a-1")
    await guarded.call("r", attempt_id="a-2")
    called = await guarded.call("r", url=url, headers=token)
    assert called.status == 200
    page = await guarded.api("GET", "/events?rollout_id=r&all_attempts=true")
    found = [item["attempt_id"] for item in page["items"]]
    assert found == ["a-1", "a-2", "a-2"]
    assert page["items"][-1]["data"]["call_id"] == called.call_id
    assert refusal(await guarded.call("r", url=url, headers=ALGORITHM)) == (403, "forbidden")


async def test_calls_at_once_of_a_rollout_are_limited(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(calls_per_rollout=2)
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    await service.rollout("s")
    async with asyncio.timeout(WITHIN):
        first = [asyncio.create_task(service.call("r")) for _ in range(2)]
        exchanges = [await manual_vllm.take() for _ in range(2)]
        third = await service.call("r")
        assert refusal(third) == (429, "too_many_calls")
        assert "retry-after" in third.headers
        other = asyncio.create_task(service.call("s"))
        exchanges.append(await manual_vllm.take())
        for exchange in exchanges:
            answer(exchange, VllmAnswer(exchange.request.json()))
        await asyncio.gather(*first, other)
        again = asyncio.create_task(service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        assert (await again).status == 200


async def test_refused_client_may_keep_its_connection(guarded: RunningService) -> None:
    """The body of a refused request is read, so the next request is not taken for its rest."""
    body = json.dumps(chat(filler="x" * 300_000)).encode()
    head = guarded.head("nobody", f"content-length: {len(body)}", "x-api-key: algorithm-secret")
    async with asyncio.timeout(WITHIN):
        reader, writer = await guarded.connect()
        for _ in range(3):
            writer.write(head + body)
            first = await reader.readuntil(b"\r\n\r\n")
            assert first.startswith(b"HTTP/1.1 404 ")
            length = re.search(rb"content-length: (\d+)", first)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.close()


@pytest.mark.parametrize(
    "target",
    [
        "/rollout/r/attempt/a/v1/../../../../api/rollouts",
        "/rollout/r/attempt/a/v1/./chat/completions",
        "/rollout/r/attempt/a/v1/%2e%2e/x",
        "/rollout/r/attempt/a/v1//chat/completions",
        "/rollout/%ff/attempt/a/v1/chat/completions",
        "/v1/chat/../completions",
    ],
)
async def test_path_that_servers_read_differently_is_refused(
    world: RunningService, target: str
) -> None:
    body = b"x" * 1_000_000
    head = f"POST {target} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    status, headers, sent = await raw(world, head.encode() + body)
    assert (status, json.loads(sent)["error"]["code"]) == (400, "bad_path")
    assert headers["x-request-id"]


async def test_encoded_slash_belongs_to_its_id(world: RunningService) -> None:
    target = "/rollout/a%2Fb/attempt/a/v1/models"
    status, _, sent = await raw(world, f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    assert status == 404
    assert "'a/b'" in json.loads(sent)["error"]["message"]


async def test_length_told_in_two_ways_is_refused(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    head = world.head("r", "content-length: 5", "transfer-encoding: chunked")
    status, _, _ = await raw(world, head + b"0\r\n\r\n")
    assert status == 400
    assert manual_vllm.requests == []


async def test_http2_is_told_that_it_cannot_be_served(world: RunningService) -> None:
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/rollout/r/attempt/a/v1/chat/completions"),
        (b":authority", b"127.0.0.1"),
    ]
    # RFC 7541, 6.2.2: a literal with a new name, without indexing and without Huffman coding.
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields
    )
    request = len(block).to_bytes(3, "big") + b"\x01\x05" + (1).to_bytes(4, "big") + block
    async with asyncio.timeout(WITHIN):
        reader, writer = await world.connect()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + request)
        body = b""
        while True:
            frame = await reader.readexactly(9)
            length, kind, flags = int.from_bytes(frame[:3], "big"), frame[3], frame[4]
            payload = await reader.readexactly(length)
            if kind == 0:
                body += payload
                if flags & 1:
                    break
        writer.close()
    assert json.loads(body)["error"]["code"] == "http_version"
    assert "HTTP/2" in json.loads(body)["error"]["message"]


# --- what changes a model server -----------------------------------------------------------------

HOSTILE = [
    "load_lora_adapter",
    "load_lora_adapter/",
    "load_lora_adapter?x=1",
    "v1/load_lora_adapter",
    "%6coad_lora_adapter",
    "%256coad_lora_adapter",
    "%25256coad_lora_adapter",
    "load%5Flora%5fadapter",
    "load_lora_adapter%2f",
    "load_lora_adapter%3Fx=1",
    "load_lora_adapter%00",
    "load_lora_adapter;x=1",
    "chat%2f..%2funload_lora_adapter",
    "chat/%252e%252e/%252e%252e/pause",
    "..%5cpause",
    "Unload_LoRA_Adapter",
    "PAUSE",
    "pause?mode=abort",
    "wake_up",
    "sleep%20",
    "admin/drain",
    "messages/pause",
    "responses/pause",
    "update_weights_from_disk",
]
# What such a path means differs from server to server, so these are nobody's.
BAD_PATHS = [
    "../pause",
    "%2e%2e/sleep",
    "%2E./sleep",
    "./load_lora_adapter",
    "/pause",
    "chat//load_lora_adapter",
    "chat/../load_lora_adapter",
]


@pytest.fixture
async def reached(
    open_service: Any, open_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunningService, FakeVllm]:
    """A service with keys, the rollout r, and its model server."""
    for name in ("algorithm", "controller", "viewer"):
        monkeypatch.setenv(name.upper(), f"{name}-secret")
    service: RunningService = await open_service(tables=KEYS)
    service.client.headers.update(ALGORITHM)
    vllm: FakeVllm = await open_vllm()
    await service.register(vllm.endpoint)
    await service.rollout("r")
    return service, vllm


async def as_written(
    service: RunningService, path: str, key: dict[str, str], method: str = "POST"
) -> tuple[int, Any]:
    """Send a path below ``v1`` as it is written; the status and the body's JSON."""
    lines = [f"authorization: {key['authorization']}", "content-length: 2", "connection: close"]
    head = service.head("r", *lines, path=path, method=method)
    status, _, body = await raw(service, head + b"{}")
    return status, json.loads(body)


@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
@pytest.mark.parametrize("path", HOSTILE)
async def test_an_agent_cannot_reach_what_changes_a_model_server(
    reached: tuple[RunningService, FakeVllm],
    path: str,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service, vllm = reached
    before = len(vllm.requests)
    with caplog.at_level("WARNING", "agl_core.gateway.administration"):
        status, body = await as_written(service, path, await token_of(service, "r"), method)
    error = body["error"]
    assert status == 403
    assert "may not change a model server" in error["message"]
    if path.startswith("messages"):  # the shape of Anthropic's SDK has no code
        assert (body["type"], error["type"]) == ("error", "permission_error")
    else:
        assert error["code"] == "forbidden"
    assert len(vllm.requests) == before
    assert [record.rollout_id for record in caplog.records] == ["r"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", BAD_PATHS)
async def test_a_path_that_servers_read_differently_reaches_none(
    reached: tuple[RunningService, FakeVllm], path: str
) -> None:
    service, vllm = reached
    before = len(vllm.requests)
    for key in (await token_of(service, "r"), ALGORITHM):
        status, body = await as_written(service, path, key)
        assert (status, body["error"]["code"]) == (400, "bad_path")
    assert len(vllm.requests) == before


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter", "pause"])
async def test_whoever_trains_changes_the_server_through_the_gateway(
    reached: tuple[RunningService, FakeVllm], path: str
) -> None:
    service, vllm = reached
    await service.call("r", path=path, headers=ALGORITHM)
    assert vllm.requests[-1].target == f"/v1/{path}"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "embeddings"),
        ("POST", "tokenize"),
        ("POST", "chat/completions/render"),
        ("POST", "responses/pause-1/cancel_later"),
        ("GET", "is_paused"),
        ("GET", "is_sleeping"),
        ("GET", "weight_info"),
        ("GET", "files/pausing"),
        ("GET", "load"),
    ],
)
async def test_an_agent_reaches_every_other_path(
    reached: tuple[RunningService, FakeVllm], method: str, path: str
) -> None:
    service, vllm = reached
    await service.call("r", path=path, method=method, headers=await token_of(service, "r"))
    assert vllm.requests[-1].target == f"/v1/{path}"


async def test_a_model_may_be_called_what_a_path_is_called(
    reached: tuple[RunningService, FakeVllm],
) -> None:
    service, vllm = reached
    await service.register(vllm.endpoint, "pause", policy="q")
    token = await token_of(service, "r")
    card = await service.call("r", path="models/pause", method="GET", headers=token)
    assert (card.status, card.json()["id"]) == (200, "pause")
