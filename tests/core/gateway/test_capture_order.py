"""The record comes first: no answer is complete, and none a success, before it is in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.app import Loaded
from agl_core.errors import StoreError
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Store
from agl_core.plugin_manager import LoadedPlugin, Plugins
from agl_core.testing.fake_vllm import EVENT_STREAM, FakeVllm, VllmAnswer, answer
from agl_core.testing.replay import chunks_of
from agl_core.testing.service import RunningService, chat, running_service

WITHIN = 10.0


class Gatekeeper:
    """A store in front of the real one, whose appends wait for a release or fail.

    Attributes:
        arrived: Set when an append has come.
        release: Appends go on when it is set.
        fails_with: Raised in place of appending.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.arrived = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.fails_with: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def __aenter__(self) -> Gatekeeper:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._store.__aexit__(*exc_info)

    async def append_events(self, *args: Any, **kwargs: Any) -> Any:
        self.arrived.set()
        await self.release.wait()
        if self.fails_with is not None:
            raise self.fails_with
        return await self._store.append_events(*args, **kwargs)


class GatekeeperPlugin:
    """Provides another plugin's store behind a gatekeeper."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self.store: Any = None

    @hookimpl
    def provide_store(self, clock: Any) -> Store:
        self.store = Gatekeeper(self._behind.provide_store(clock))
        found: Store = self.store
        return found


@attrs.frozen
class Kept:
    """A service whose store is under control, with a rollout ``r`` and a model ``m``.

    It has nowhere to spill to, so that what the store does not take is lost.
    """

    service: RunningService
    store: Gatekeeper


@pytest.fixture
async def kept(stack: AsyncExitStack, manual_vllm: FakeVllm, tmp_path: Path) -> Kept:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    tables = {"capture": {"spill_dir": str(no_folder)}}
    plugins: list[GatekeeperPlugin] = []

    def wrap(loaded: Loaded) -> Loaded:
        changed = []
        for plugin in loaded.plugins.loaded:
            if plugin.name == "memory":
                plugins.append(GatekeeperPlugin(plugin.instance))
                plugin = LoadedPlugin(name="memory", origin="test", instance=plugins[0])
            changed.append(plugin)
        return attrs.evolve(loaded, plugins=Plugins(changed))

    service = await stack.enter_async_context(running_service(tables, wrap=wrap))
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    return Kept(service, plugins[0].store)


class Sink:
    """A capture sink that waits, fails or listens."""

    def __init__(self, receive: Callable[[Any], Any]) -> None:
        self._receive = receive

    @hookimpl
    def provide_capture_sink(self) -> Sink:
        return self

    async def __aenter__(self) -> Sink:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def receive(self, event: Any) -> None:
        await self._receive(event)


async def metric(service: RunningService, name: str) -> float:
    text = (await service.client.get(f"{service.url}/metrics")).text
    return sum(float(line.split(" ")[-1]) for line in text.splitlines() if line.startswith(name))


async def test_whole_answer_waits_for_its_record(kept: Kept, manual_vllm: FakeVllm) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        await kept.store.arrived.wait()
        for _ in range(5):
            await kept.service.state()
        assert not calling.done()
        kept.store.release.set()
        assert (await calling).status == 200
    assert len(await kept.service.events("r")) == 1


async def test_last_bytes_of_a_stream_wait_for_its_record(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.release.clear()
    received = b""
    url = f"{kept.service.base('r')}/chat/completions"
    async with asyncio.timeout(WITHIN):
        ended = asyncio.Event()

        async def read() -> None:
            nonlocal received
            async with kept.service.client.stream("POST", url, json=chat(stream=True)) as streamed:
                async for part in streamed.aiter_raw():
                    received += part
            ended.set()

        reading = asyncio.create_task(read())
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        await kept.store.arrived.wait()
        while b'"finish_reason":"stop"' not in received.replace(b": ", b":"):
            await kept.service.state()
        assert not ended.is_set()
        assert b"[DONE]" not in received
        kept.store.release.set()
        await reading
    assert received.endswith(b"data: [DONE]\n\n")


async def test_unknown_stream_ends_after_its_record(kept: Kept, manual_vllm: FakeVllm) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r", path="made/up"))
        exchange = await manual_vllm.take()
        exchange.begin(200, EVENT_STREAM)
        exchange.write(b"data: x\n\n")
        exchange.end()
        await kept.store.arrived.wait()
        for _ in range(5):
            await kept.service.state()
        assert not calling.done()
        kept.store.release.set()
        called = await calling
    assert (called.body, called.is_clean) == (b"data: x\n\n", True)


@pytest.mark.parametrize("failure", [StoreError("full"), OSError("disk")])
@pytest.mark.parametrize("path", ["chat/completions", "made/up"])
async def test_answer_whose_record_is_lost_is_a_503(
    kept: Kept, manual_vllm: FakeVllm, failure: Exception, path: str
) -> None:
    kept.store.fails_with = failure
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r", path=path))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        called = await calling
    assert (called.status, called.code) == (503, "store_unavailable")
    assert "retry-after" in called.headers
    assert "x-should-retry" not in called.headers
    assert b"Hello" not in called.body
    await kept.service.until_state(inflight=0)


async def test_stream_whose_record_is_lost_ends_in_an_error_event(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.fails_with = StoreError("full")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r", chat(stream=True)))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        called = await calling
    assert not called.is_clean
    assert b"[DONE]" not in called.body
    assert chunks_of(called.body)[-1]["error"]["code"] == "store_unavailable"


async def test_failed_call_tells_its_own_failure_when_the_store_fails_too(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.fails_with = StoreError("full")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        for _ in range(3):
            (await manual_vllm.take()).cut()
        called = await calling
    assert (called.status, called.code) == (502, "upstream_truncated")


async def test_reading_events_waits_for_what_was_accepted(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        await kept.store.arrived.wait()
        reading = asyncio.create_task(kept.service.events("r"))
        exporting = asyncio.create_task(kept.service.api("GET", "/export/triplet?ids=r&mode=all"))
        for _ in range(5):
            await kept.service.state()
        assert not reading.done()
        assert not exporting.done()
        kept.store.release.set()
        assert len(await reading) == 1
        assert len((await exporting)["triplets"]) == 1
        await calling


async def test_client_that_leaves_while_its_record_is_written_is_recorded_as_served(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        await kept.store.arrived.wait()
        calling.cancel()
        await kept.service.state()
        kept.store.release.set()
        (recorded,) = await kept.service.until_events("r")
        await kept.service.until_state(inflight=0)
    assert recorded["status"] == "ok"


async def test_rollout_cancelled_while_an_abort_is_recorded_is_not_called_for_again(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        await manual_vllm.take()
        pausing = asyncio.create_task(kept.service.api("POST", "/gateway/pause", {"mode": "abort"}))
        await kept.store.arrived.wait()
        await pausing
        cancelling = asyncio.create_task(kept.service.api("POST", "/rollouts/r/cancel"))
        while not (await kept.service.api("GET", "/rollouts/r"))["cancel_requested"]:
            pass
        kept.store.release.set()
        await cancelling
        await kept.service.api("POST", "/gateway/resume")
        called = await calling
    assert (called.status, called.code) == (403, "rollout_ended")
    assert len(manual_vllm.requests) == 1


async def test_call_of_a_deleted_rollout_is_not_a_success(
    kept: Kept, manual_vllm: FakeVllm
) -> None:
    kept.store.release.clear()
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(kept.service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        await kept.store.arrived.wait()
        await kept.store.delete_rollout("r")
        kept.store.release.set()
        called = await calling
    assert called.status == 404


async def test_slow_sink_is_bounded_and_holds_nothing_up(open_service: Any, open_vllm: Any) -> None:
    release = asyncio.Event()
    got: list[Any] = []

    async def receive(event: Any) -> None:
        await release.wait()
        got.append(event)

    service = await open_service(plugins=(Sink(receive),), sink_queue=3)
    await service.register((await open_vllm()).endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        for _ in range(10):
            assert (await service.call("r")).status == 200
        # One is with the sink, three wait for it.
        assert await metric(service, "agl_sink_dropped_total") == 6
        release.set()
        while len(got) < 4:
            await service.state()
    assert [event.seq for event in got] == [1, 2, 3, 4]
    assert len(await service.events("r")) == 10


async def test_failing_sink_touches_no_answer(open_service: Any, open_vllm: Any) -> None:
    got: list[Any] = []

    async def receive(event: Any) -> None:
        got.append(event)
        raise RuntimeError("no space")

    service = await open_service(plugins=(Sink(receive),))
    await service.register((await open_vllm()).endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        for _ in range(3):
            assert (await service.call("r")).status == 200
        while await metric(service, "agl_sink_failed_total") < 3:
            pass
    assert len(got) == 3


async def test_sinks_get_what_is_queued_before_the_service_ends(
    stack: AsyncExitStack, open_vllm: Any
) -> None:
    got: list[Any] = []
    began, release = asyncio.Event(), asyncio.Event()

    async def receive(event: Any) -> None:
        began.set()
        await release.wait()
        got.append(event)

    async with asyncio.timeout(WITHIN):
        async with running_service(plugins=(Sink(receive),)) as service:
            await service.register((await open_vllm()).endpoint)
            await service.rollout("r")
            for _ in range(3):
                await service.call("r")
            await began.wait()
            release.set()
        assert len(got) == 3
