from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.settings import ServerSettings


async def raw(service: Any, request: bytes) -> bytes:
    """Send bytes as they are and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.split(":")[-1]))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_c93_every_answer_has_a_request_id(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    seen: set[str] = set()
    for method, path, status in (
        ("GET", "/healthz", 200),
        ("GET", "/api/rollouts/a", 200),
        ("GET", "/api/rollouts/none", 404),
        ("GET", "/nothing", 404),
        ("PUT", "/api/rollouts", 405),
        ("POST", "/api/rollouts", 400),
        ("GET", "/api/rollouts?x=1", 422),
        ("DELETE", "/api/rollouts/a", 204),
        ("GET", "/api/rollouts/%FF", 400),
        ("GET", "/api/export/lines", 200),
    ):
        answer = await service.ask(method, path)
        assert answer.status_code == status, path
        assert answer.headers["X-Request-Id"].startswith("req-")
        assert len(answer.headers.get_list("X-Request-Id")) == 1
        seen.add(answer.headers["X-Request-Id"])
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("trace-1", True),
        ("a b:c/d", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("tab\there", False),
        ("ü", False),
    ],
)
async def test_request_id_that_is_usable_is_kept(service: Any, sent: str, is_kept: bool) -> None:
    headers = {"X-Request-Id": sent.encode("latin1")}
    for path in ("/healthz", "/nothing"):
        answer = await service.ask("GET", path, headers=headers)
        assert (answer.headers["X-Request-Id"] == sent) is is_kept


async def test_errors_are_problem_documents(service: Any) -> None:
    for path, status, code in (("/nothing", 404, "not_found"), ("/api/rollouts/x", 404, None)):
        answer = await service.ask("GET", path)
        assert answer.headers["Content-Type"] == "application/problem+json"
        problem = answer.json()
        assert problem["type"] == "about:blank"
        assert (problem["title"], problem["status"]) == ("Not Found", status)
        assert problem["code"] == (code or "not_found")
        assert problem["detail"]


async def test_wrong_method_is_405_with_allow(service: Any) -> None:
    answer = await service.ask("PUT", "/api/rollouts/a")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    allowed = {method.strip() for method in answer.headers["Allow"].split(",")}
    assert {"GET", "PATCH", "DELETE"} <= allowed
    assert "PUT" not in allowed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"input": NaN}',
        b'{"input": Infinity}',
        b'{"input": -Infinity}',
        b'{"input": 1e999}',
        b'{"input": "\\ud800"}',
        b'{"input": "\xff"}',
        b'{"input": 1} x',
        b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_what_is_no_json_is_400(service: Any, body: bytes) -> None:
    answer = await service.ask("POST", "/api/rollouts", content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_json")


async def test_whole_number_may_be_written_with_a_point(service: Any) -> None:
    answer = await service.ask("POST", "/api/rollouts", json={"priority": 3.0, "n": 2.0})
    assert [item["priority"] for item in answer.json()["items"]] == [3, 3]
    answer = await service.ask("POST", "/api/rollouts", json={"priority": 3.5})
    assert answer.status_code == 422


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_over_the_limit_is_413(start: Any, is_chunked: bool) -> None:
    service = await start(server=ServerSettings(max_body_bytes=100_000))

    async def pieces() -> Any:
        for _ in range(300):
            yield b"x" * 1000

    content = pieces() if is_chunked else b"x" * 300_000
    answer = await service.ask("POST", "/api/rollouts", content=content)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    large = {"input": "x" * 90_000, "config": {"input_delivery": "file"}}
    assert (await service.ask("POST", "/api/rollouts", json=large)).status_code == 201


async def test_body_that_does_not_arrive_is_408(start: Any) -> None:
    service = await start(server=ServerSettings(body_seconds=0.05))
    head = b"POST /api/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    async with asyncio.timeout(10):
        answer = await raw(service, head)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api//rollouts", 404),
        ("/api/rollouts/", 404),
        ("/api/rollouts/%2E%2E", 404),
        ("/api/rollouts/%00", 404),
        ("/api/rollouts/%C3%28", 400),
        ("/api/rollouts/" + "x" * 257, 404),
    ],
)
async def test_strange_paths_match_nothing(service: Any, path: str, status: int) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await raw(service, request.encode())
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert b"application/problem+json" in answer


async def test_unexpected_error_is_logged_and_tells_only_the_request_id(
    service: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explode(rollout_id: str) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.store, "get_rollout", explode)
    with caplog.at_level(logging.ERROR):
        answer = await service.ask("GET", "/api/rollouts/a", headers={"X-Request-Id": "id-7"})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret detail" not in answer.text
    assert "id-7" in answer.json()["hint"]
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


async def test_web_page_of_another_origin_cannot_use_a_service_without_keys(service: Any) -> None:
    headers = {"Origin": "https://evil.example"}
    answer = await service.ask("POST", "/api/rollouts", json={}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "bad_token")
    answer = await service.ask("GET", "/api/rollouts", headers={"Host": "evil.example"})
    assert answer.status_code == 401


async def test_enqueue_is_finished_though_its_client_has_gone(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = asyncio.Event(), asyncio.Event()
    add = service.store.add_rollouts

    async def slow(rollouts: Any) -> Any:
        reached.set()
        await go.wait()
        return await add(rollouts)

    monkeypatch.setattr(service.store, "add_rollouts", slow)
    body = b'{"rollout_id": "a"}'
    head = b"POST /api/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    async with asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", int(service.url.split(":")[-1]))
        writer.write(head % len(body) + body)
        await reached.wait()
        writer.close()
        await writer.wait_closed()
        assert (await service.ask("GET", "/healthz")).status_code == 200
        go.set()
        while (await service.ask("GET", "/api/rollouts/a")).status_code != 200:
            await SystemClock().sleep(0.002)
