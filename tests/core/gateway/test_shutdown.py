"""``agl serve`` as a process: how it starts, and how it ends without losing a word."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from agl_core.testing.fake_vllm import EVENT_STREAM, FakeVllm, VllmAnswer
from agl_core.testing.replay import chunks_of
from agl_core.testing.servers import bind_loopback
from agl_core.testing.service import chat

WITHIN = 20.0


@attrs.define
class Process:
    """A running ``agl serve`` with a rollout ``r``, and a model ``m`` if one was given."""

    process: asyncio.subprocess.Process
    url: str
    client: httpx.AsyncClient

    def call(self, **fields: Any) -> asyncio.Task[tuple[int, bytes, bool]]:
        """Call a model: status, body, and whether it ended as it should."""

        async def read() -> tuple[int, bytes, bool]:
            body, is_clean = b"", True
            url = f"{self.url}/rollout/r/attempt/a/v1/chat/completions"
            async with self.client.stream("POST", url, json=chat(**fields)) as answer:
                try:
                    async for part in answer.aiter_raw():
                        body += part
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    is_clean = False
            return answer.status_code, body, is_clean

        return asyncio.create_task(read())

    async def until_line(self, text: str) -> None:
        """Wait for a line of the log."""
        assert self.process.stderr is not None
        while text not in (line := (await self.process.stderr.readline()).decode()):
            assert line, f"the process ended without saying {text!r}"


Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the service with settings of ``[server]`` and a model server."""
    started: list[Process] = []

    async def start_(model: FakeVllm | None = None, **server: Any) -> Process:
        file = tmp_path / "agl.toml"
        lines = ["[plugins]", 'enabled = ["memory", "vllm"]', "[gateway]", "probe = false"]
        lines += ["[server]", "port = 0", *(f"{name} = {value}" for name, value in server.items())]
        file.write_text("\n".join(lines))
        process = await run("--config", str(file))
        assert process.stdout is not None
        first = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", first)
        assert found is not None, first
        client = httpx.AsyncClient(trust_env=False, timeout=WITHIN)
        running = Process(process, found[1], client)
        started.append(running)
        items = [{"model": "m", "endpoint": model.endpoint}] if model else []
        (await client.put(f"{found[1]}/api/models", json={"items": items})).raise_for_status()
        enqueued = await client.post(f"{found[1]}/api/rollouts", json={"rollout_id": "r"})
        enqueued.raise_for_status()
        return running

    yield start_
    for running in started:
        await running.client.aclose()
        if running.process.returncode is None:
            running.process.kill()
        await running.process.wait()


async def run(*arguments: str) -> asyncio.subprocess.Process:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AGL")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agl_core.cli", "serve", "--log-level", "info", *arguments),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_open_stream_is_finished_within_the_grace(start: Start) -> None:
    async with asyncio.timeout(WITHIN), FakeVllm() as model:
        service = await start(model, grace_seconds=15.0)
        calling = service.call(stream=True)
        exchange = await model.take()
        pieces = list(VllmAnswer(exchange.request.json()).events())
        exchange.begin(200, EVENT_STREAM)
        exchange.write(pieces[0])
        poll = asyncio.create_task(
            service.client.get(f"{service.url}/api/rollouts?status=failed&wait=50")
        )
        while "agl_api_waiters 1" not in (await service.client.get(f"{service.url}/metrics")).text:
            pass
        service.process.send_signal(signal.SIGTERM)
        await service.until_line("shutting down")
        assert (await poll).status_code == 200
        late = await service.client.get(f"{service.url}/readyz")
        assert late.status_code == 503
        assert late.headers["retry-after"]
        assert late.headers["x-request-id"].startswith("req-")
        refused = await service.call()
        assert refused[0] == 503
        exchange.write(b"".join(pieces[1:]))
        exchange.end()
        status, body, is_clean = await calling
        assert (status, is_clean) == (200, True)
        assert body.endswith(b"data: [DONE]\n\n")
        assert await service.process.wait() == 0
    assert len(model.requests) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stream_that_outlasts_the_grace_is_broken_off_with_an_error_event(
    start: Start, number: signal.Signals
) -> None:
    async with asyncio.timeout(WITHIN), FakeVllm() as model:
        service = await start(model, grace_seconds=0.2)
        calling = service.call(stream=True)
        exchange = await model.take()
        pieces = list(VllmAnswer(exchange.request.json()).events())
        exchange.begin(200, EVENT_STREAM)
        exchange.write(b"".join(pieces[:2]))
        whole = service.call()
        await model.take()
        service.process.send_signal(number)
        status, body, is_clean = await calling
        assert (status, is_clean) == (200, False)
        assert chunks_of(body)[-1]["error"]["code"] == "shutting_down"
        status, body, is_clean = await whole
        assert (status, is_clean) == (503, True)
        assert b'"shutting_down"' in body
        await exchange.gone.wait()
        assert await service.process.wait() == 0


async def test_held_call_gets_503_at_once(start: Start) -> None:
    async with asyncio.timeout(WITHIN):
        service = await start(grace_seconds=15.0)
        calling = service.call()
        while not (await service.client.get(f"{service.url}/api/rollouts/r")).json()["attempts"]:
            pass
        assert not calling.done()
        service.process.send_signal(signal.SIGTERM)
        status, body, _ = await calling
        assert status == 503
        assert b'"shutting_down"' in body
        assert await service.process.wait() == 0


async def test_second_signal_ends_the_process_at_once(start: Start) -> None:
    async with asyncio.timeout(WITHIN), FakeVllm() as model:
        service = await start(model, grace_seconds=600.0)
        calling = service.call()
        await model.take()
        service.process.send_signal(signal.SIGTERM)
        await service.until_line("shutting down")
        service.process.send_signal(signal.SIGINT)
        assert await service.process.wait() == 130
        with pytest.raises(httpx.TransportError):
            await calling


async def refused_start(*arguments: str) -> str:
    async with asyncio.timeout(WITHIN):
        process = await run(*arguments)
        _, said = await process.communicate()
    assert process.returncode not in (0, None)
    text = said.decode()
    assert "Traceback" not in text
    return text


async def test_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    with bind_loopback() as sock:
        port = sock.getsockname()[1]
        said = await refused_start("--port", str(port))
    assert f"127.0.0.1:{port}" in said
    assert "taken" in said


async def test_host_that_does_not_exist_is_an_error_that_names_it() -> None:
    assert "nowhere.invalid" in await refused_start("--port", "0", "--host", "nowhere.invalid")


async def test_without_keys_nothing_beyond_loopback_is_served() -> None:
    said = await refused_start("--port", "0", "--host", "0.0.0.0")
    assert "no key" in said
    assert "--insecure" in said
