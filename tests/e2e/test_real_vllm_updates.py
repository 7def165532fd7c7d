"""Weight updates in mode ``keep`` with a real vLLM behind the whole service.

Needs ``AGL_TEST_VLLM`` as ``test_real_vllm`` does; the server must have been started with
``VLLM_SERVER_DEV_MODE=1`` and a context of 3000 tokens or more, and nobody else may use it, for it
stands still meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from agl_core.testing.fake_vllm import FakeVllm, saying
from agl_core.testing.service import RunningService, chat, running_service

ENDPOINT = os.environ.get("AGL_TEST_VLLM", "")
ROOT = ENDPOINT.removesuffix("/v1")
WITHIN = 45.0
LENGTH = 800
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not ENDPOINT, reason="needs AGL_TEST_VLLM, the URL of a real vLLM server"),
]


@pytest.fixture
async def engine() -> AsyncIterator[httpx.AsyncClient]:
    """The engine itself; it runs again after the test, whatever that did."""
    async with httpx.AsyncClient(base_url=ROOT) as client:
        if (await client.get("/is_paused")).status_code != 200:
            pytest.skip("needs a vLLM server with VLLM_SERVER_DEV_MODE=1")
        yield client
        await client.post("/resume")


@pytest.fixture
async def service(engine: httpx.AsyncClient) -> AsyncIterator[RunningService]:
    listed = (await engine.get("/v1/models")).json()["data"]
    async with running_service({"gateway": {"heartbeat_seconds": 0.1}}) as service:
        await service.register(ENDPOINT, served_model=listed[0]["id"])
        await service.rollout("r")
        yield service


async def is_paused(engine: httpx.AsyncClient) -> bool:
    told: bool = (await engine.get("/is_paused")).json()["is_paused"]
    return told


def long_chat(length: int = LENGTH, **fields: Any) -> dict[str, Any]:
    """A call of exactly ``length`` tokens."""
    return chat(stream=True, max_tokens=length, min_tokens=length, ignore_eos=True, **fields)


class Reading:
    """A stream that is read as it comes."""

    def __init__(self, service: RunningService, body: dict[str, Any]) -> None:
        self.text = ""
        self.events = 0
        self.is_done = False
        self._moved = asyncio.Event()
        self.task = asyncio.create_task(self._read(service, body))

    async def _read(self, service: RunningService, body: dict[str, Any]) -> None:
        target = f"{service.base('r')}/chat/completions"
        async with service.client.stream("POST", target, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                self.is_done = line == "data: [DONE]"
                if not self.is_done:
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["delta"].get("content") or ""
                self.events += 1
                self._moved.set()

    async def until(self, events: int) -> None:
        while self.events < events and not self.task.done():
            self._moved.clear()
            waiting = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if self.task.done():
            self.task.result()
            raise AssertionError(f"the stream ended after {self.events} events")


async def rest(service: RunningService, seconds: float) -> None:
    """Let a pause last for so long."""
    while (await service.state())["paused_seconds"] < seconds:
        pass


def update(served_model: str, version: int) -> dict[str, Any]:
    item = {"model": "m", "endpoint": ENDPOINT, "served_model": served_model, "version": version}
    return {"items": [item], "resume": True}


async def test_stream_goes_on_across_a_weight_update_with_exact_spans(
    service: RunningService, engine: httpx.AsyncClient
) -> None:
    (item,) = (await service.api("GET", "/models"))["items"]
    async with asyncio.timeout(WITHIN):
        reading = Reading(service, long_chat())
        await reading.until(20)
        await service.api("POST", "/gateway/pause", {"policy": "m", "mode": "keep"})
        assert await is_paused(engine)
        late = asyncio.create_task(service.call("r", chat(max_tokens=8)))
        await service.until_state(held=1)
        await rest(service, 0.3)
        stalled_at = reading.events
        await rest(service, 0.6)
        assert reading.events == stalled_at
        assert not reading.task.done()
        await service.api("PUT", "/models", update(item["served_model"], 1))
        assert not await is_paused(engine)
        assert (await late).status == 200
        await reading.task
    assert reading.is_done
    first, second = sorted(await service.events("r"), key=lambda event: event["version_start"])
    assert (second["version_start"], second["version_end"]) == (1, 1)
    assert (first["status"], first["version_start"], first["version_end"]) == ("ok", 0, 1)
    (choice,) = first["choices"]
    assert choice["tokens"] == "complete"
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == LENGTH
    assert first["usage"]["completion_tokens"] == LENGTH
    (start, old), (border, new) = choice["version_spans"]
    assert (start, old, new) == (0, 0, 1)
    assert 0 < border < LENGTH


async def test_two_updates_under_one_stream_give_three_spans(
    service: RunningService, engine: httpx.AsyncClient
) -> None:
    (item,) = (await service.api("GET", "/models"))["items"]
    async with asyncio.timeout(WITHIN):
        reading = Reading(service, long_chat(n=2))
        for version in (1, 2):
            await reading.until(reading.events + 1)
            before = (await service.state())["paused_seconds"]
            await service.api("POST", "/gateway/pause", {"mode": "keep"})
            await rest(service, before + 0.3)
            await service.api("PUT", "/models", update(item["served_model"], version))
        await reading.task
    (recorded,) = await service.events("r")
    assert recorded["usage"]["completion_tokens"] == 2 * LENGTH
    for choice in recorded["choices"]:
        assert (choice["tokens"], len(choice["token_ids"])) == ("complete", LENGTH)
        assert [version for _, version in choice["version_spans"]] == [0, 1, 2]


async def test_pause_that_another_engine_refuses_lets_the_stream_go_on(
    service: RunningService, engine: httpx.AsyncClient
) -> None:
    async with asyncio.timeout(WITHIN), FakeVllm(saying()) as other:
        other.dev_mode = False
        reading = Reading(service, long_chat())
        await reading.until(20)
        await service.register(other.endpoint)
        problem = await service.api("POST", "/gateway/pause", {"mode": "keep"}, expect=502)
        assert problem["code"] == "engine_pause_failed"
        assert not await is_paused(engine)
        assert not (await service.state())["paused"]
        await reading.task
    (recorded,) = await service.events("r")
    (choice,) = recorded["choices"]
    assert (choice["tokens"], len(choice["token_ids"])) == ("complete", LENGTH)
    assert (recorded["version_start"], recorded["version_end"]) == (0, 0)


async def test_drain_over_keep_lets_a_stalled_stream_end(
    service: RunningService, engine: httpx.AsyncClient
) -> None:
    async with asyncio.timeout(WITHIN):
        reading = Reading(service, long_chat())
        await reading.until(20)
        await service.api("POST", "/gateway/pause", {"mode": "keep"})
        state = await service.api("POST", "/gateway/pause", {"mode": "drain"})
        assert (state["policies"]["m"]["inflight"], state["policies"]["m"]["paused"]) == (0, True)
        assert not await is_paused(engine)
        await reading.task
        await service.api("POST", "/gateway/resume")
    (recorded,) = await service.events("r")
    assert recorded["choices"][0]["tokens"] == "complete"


async def test_call_that_is_cancelled_while_the_engine_stands_still_leaves_it_clean(
    service: RunningService, engine: httpx.AsyncClient
) -> None:
    async with asyncio.timeout(WITHIN):
        reading = Reading(service, long_chat(3 * LENGTH))
        await reading.until(20)
        await service.api("POST", "/gateway/pause", {"mode": "keep"})
        reading.task.cancel()
        await service.until_events("r")
        await service.api("POST", "/gateway/resume")
        assert (await service.call("r", chat(max_tokens=8))).status == 200
    gone, served = await service.events("r")
    assert (gone["status"], served["status"]) == ("client_gone", "ok")
