"""No call without a record: what happens to events while the store fails, and after."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.app import Loaded
from agl_core.clock import SystemClock
from agl_core.errors import ConfigError, Invalid, NotFound, StoreError
from agl_core.gateway.capture import SinkQueue
from agl_core.gateway.recorder import Recorder
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import SpilledEvent
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import EventQuery
from agl_core.plugin_manager import LoadedPlugin, Plugins
from agl_core.records import Event, EventDraft, Rollout
from agl_core.settings import CaptureSettings
from agl_core.testing.clock import FakeClock
from agl_core.testing.failing_store import FailingStore, is_down
from agl_core.testing.fake_vllm import FakeVllm, VllmAnswer, answer
from agl_core.testing.service import running_service
from agl_memory.store import MemoryStore

WITHIN = 20.0


def draft(call_id: str, **data: Any) -> EventDraft:
    fields = {"call_id": call_id, "retries": 0, "status": "ok", **data}
    return EventDraft(event_type="model_request", data=fields)


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Event] = []

    async def __aenter__(self) -> Sink:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def receive(self, event: Event) -> None:
        self.got.append(event)


@attrs.define
class World:
    """A store that fails on command, and recorders on it one after the other."""

    folder: Path
    clock: FakeClock
    store: FailingStore
    sink: Sink

    @asynccontextmanager
    async def recorder(
        self, *, barrier: float = WITHIN, flush: float = WITHIN, **capture: Any
    ) -> AsyncIterator[Recorder]:
        queue = SinkQueue("sink", self.sink, 10_000)
        queue.start()
        settings = CaptureSettings(spill_dir=str(self.folder), **capture)
        made = Recorder(
            self.store,
            self.clock,
            {"sink": queue},
            settings,
            barrier_seconds=barrier,
            flush_seconds=flush,
        )
        async with made:
            yield made
        await queue.stop(WITHIN)

    async def add(self, *rollout_ids: str) -> None:
        await self.store.inner.add_rollouts([Rollout(rollout_id=name) for name in rollout_ids])

    async def events(self, rollout_id: str = "r") -> list[Event]:
        page = await self.store.inner.list_events(EventQuery(rollout_id=rollout_id, limit=10_000))
        return list(page.items)

    async def calls(self, rollout_id: str = "r") -> list[str]:
        return [event.data["call_id"] for event in await self.events(rollout_id)]

    async def next_try(self) -> None:
        """Let the replay's pause pass."""
        await self.clock.until_sleeping()
        self.clock.advance(60.0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    clock = FakeClock()
    # The memory store stands for one that outlives the service: these tests keep it alive.
    store = FailingStore(MemoryStore(clock), is_durable=True)
    world = World(tmp_path / "spill", clock, store, Sink())
    await world.add("r")
    async with asyncio.timeout(2 * WITHIN):
        yield world


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await SystemClock().sleep(0)


def metric(recorder: Recorder, name: str) -> float:
    return {row[0]: row[2] for row in recorder.metrics()}[f"agl_capture_{name}"]


def spill_files(world: World) -> list[Path]:
    return list(world.folder.glob("*/*.spill"))


async def test_c47_every_accepted_call_is_stored_once_and_in_order_after_an_outage(
    world: World,
) -> None:
    names = [f"r-{number}" for number in range(20)]
    await world.add(*names)
    accepted: dict[str, list[str]] = {name: [] for name in names}
    store = world.store

    async with world.recorder() as recorder:

        async def agent(name: str) -> None:
            for number in range(10):
                # The store fails, says that it failed after it had appended, and comes back.
                if name == names[0]:
                    store.fault = None if number in (0, 1, 8, 9) else is_down
                    store.is_done_before_fault = number in (2, 5)
                call_id = f"{name}/{number}"
                world.clock.advance(1.0)
                await recorder.record(name, "a", draft(call_id))
                accepted[name].append(call_id)

        await asyncio.gather(*map(agent, names))
        store.fault = None
        for name in names:
            await recorder.settled(name)
        for name in names:
            assert await world.calls(name) == accepted[name] == [f"{name}/{n}" for n in range(10)]
        assert recorder.recorded == {"ok": 200}
        assert metric(recorder, "spilled_total") > 20
        assert metric(recorder, "spill_events") == 0
        assert metric(recorder, "lost_total") == 0
    assert spill_files(world) == []
    stored = [event for name in names for event in await world.events(name)]
    assert sorted(e.data["call_id"] for e in world.sink.got) == sorted(
        e.data["call_id"] for e in stored
    )


async def test_replay_happens_by_itself_and_keeps_the_time_of_the_call(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.fault = is_down
        at = world.clock.now()
        await recorder.record("r", "a", draft("c-1"))
        await world.next_try()
        await world.clock.until_sleeping()
        assert await world.calls() == []
        world.store.fault = None
        world.clock.advance(60.0)
        await until(lambda: metric(recorder, "spill_events") == 0)
        (event,) = await world.events()
        assert event.timestamp == at
        assert metric(recorder, "replayed_total") == 1


async def test_later_events_of_a_spilled_rollout_wait_behind_it(world: World) -> None:
    await world.add("other")
    async with world.recorder() as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        await world.clock.until_sleeping()
        world.store.fault = None
        await recorder.record("r", "a", draft("c-2"))
        await recorder.record("other", "a", draft("o-1"))
        assert await world.calls() == []
        assert await world.calls("other") == ["o-1"]
        await recorder.settled("r")
        assert await world.calls() == ["c-1", "c-2"]
        await recorder.record("r", "a", draft("c-3"))
        assert await world.calls() == ["c-1", "c-2", "c-3"]
        assert metric(recorder, "spilled_total") == 2


@pytest.mark.parametrize("fault", [is_down, lambda: OSError("disk"), lambda: RuntimeError("bug")])
async def test_an_append_whose_end_is_unknown_is_not_repeated(
    world: World, fault: Callable[[], Exception]
) -> None:
    async with world.recorder() as recorder:
        world.store.fault, world.store.is_done_before_fault = fault, True
        await recorder.record("r", "a", draft("c-1"))
        world.store.fault = None
        await recorder.settled("r")
        assert await world.calls() == ["c-1"]
    assert [event.data["call_id"] for event in world.sink.got] == ["c-1"]


async def test_tries_of_one_call_are_events_of_their_own(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1", status="aborted"))
        await recorder.record("r", "a", draft("c-1", retries=1))
        world.store.fault = None
        await recorder.settled("r")
        assert [event.data["status"] for event in await world.events()] == ["aborted", "ok"]


async def test_many_events_are_looked_through_for_what_is_there(world: World) -> None:
    async with world.recorder() as recorder:
        for number in range(450):
            await recorder.record("r", "a", draft(f"c-{number}"))
        world.store.fault, world.store.is_done_before_fault = is_down, True
        await recorder.record("r", "a", draft("c-450"))
        world.store.fault = None
        await recorder.settled("r")
    assert await world.calls() == [f"c-{number}" for number in range(451)]


async def test_c47_a_full_disk_refuses_the_call_and_nothing_else(world: World) -> None:
    async with world.recorder(spill_max_bytes=400) as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        with pytest.raises(StoreError, match=r"cannot be recorded.*spill is full"):
            await recorder.record("r", "a", draft("c-2", text="x" * 400))
        assert metric(recorder, "lost_total") == 1
        assert recorder.recorded == {"ok": 1}
        world.store.fault = None
        await recorder.settled("r")
        await recorder.record("r", "a", draft("c-3", text="x" * 400))
        assert await world.calls() == ["c-1", "c-3"]


async def test_a_refused_event_takes_no_other_with_it(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.fault = lambda: Invalid("not this one")
        with pytest.raises(Invalid):
            await recorder.record("r", "a", draft("c-1"))
        world.store.fault = None
        await recorder.record("r", "a", draft("c-2"))
        assert await world.calls() == ["c-2"]
        assert metric(recorder, "spilled_total") == 0


async def test_a_deleted_rollout_is_told_and_its_spilled_events_are_dropped(world: World) -> None:
    async with world.recorder() as recorder:
        with pytest.raises(NotFound):
            await recorder.record("never", "a", draft("c-0"))
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        await recorder.record("r", "a", draft("c-2"))
        await world.store.inner.delete_rollout("r")
        world.store.fault = None
        await recorder.settled("r")
        assert metric(recorder, "dropped_total") == 3
        assert metric(recorder, "lost_total") == 0
        assert metric(recorder, "spill_events") == 0


async def test_a_rollout_that_the_store_cannot_take_does_not_hold_up_the_others(
    world: World,
) -> None:
    bad = [f"bad-{number}" for number in range(5)]
    await world.add(*bad, "good")
    async with world.recorder() as recorder:
        world.store.fault = is_down
        for name in [*bad, "good"]:
            await recorder.record(name, "a", draft(name))
        await world.clock.until_sleeping()
        append = world.store.inner.append_events

        async def picky(rollout_id: str, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
            if rollout_id in bad:
                raise RuntimeError("cannot")
            return await append(rollout_id, *args, **kwargs)

        world.store.inner.append_events = picky  # type: ignore[method-assign]
        world.store.fault = None
        for _ in range(3):
            await world.next_try()
        await until(lambda: metric(recorder, "spill_events") == 5)
        assert await world.calls("good") == ["good"]
        world.store.inner.append_events = append  # type: ignore[method-assign]
        for name in bad:
            await recorder.settled(name)
            assert await world.calls(name) == [name]


# --- a restart


async def test_what_was_spilled_is_replayed_by_the_next_service(world: World) -> None:
    world.store.fault = is_down
    async with world.recorder() as recorder:
        for number in range(3):
            await recorder.record("r", "a", draft(f"c-{number}"))
    assert len(spill_files(world)) == 1
    world.store.fault = None
    async with world.recorder() as recorder:
        await until(lambda: metric(recorder, "spill_events") == 0)
    assert await world.calls() == ["c-0", "c-1", "c-2"]


async def test_a_kill_between_append_and_note_makes_no_duplicate(world: World) -> None:
    """A process that was killed after it had appended the first leaves both in its spill."""
    program = """
import os, signal, sys
from pathlib import Path
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import SpilledEvent
from agl_core.records import EventDraft

file = SpillFile(Path(sys.argv[1]), max_bytes=10**6)
for n in (1, 2):
    data = {"call_id": f"c-{n}", "retries": 0, "status": "ok"}
    draft = EventDraft(event_type="model_request", data=data)
    file.append([SpilledEvent(rollout_id="r", attempt_id="a", timestamp=1.0, draft=draft)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(world.folder))
    assert await killed.wait() == -signal.SIGKILL
    assert len(spill_files(world)) == 1
    await world.store.inner.append_events("r", "a", [draft("c-1")], timestamp=1.0)
    async with world.recorder() as recorder:
        await recorder.settled("r")
        assert await world.calls() == ["c-1", "c-2"]
        assert metric(recorder, "replayed_total") == 1
    assert spill_files(world) == []


async def test_events_that_rot_on_disk_are_counted_as_lost(world: World) -> None:
    world.store.fault = is_down
    async with world.recorder() as recorder:
        await recorder.record("r", "a", draft("c-1"))
        await recorder.record("r", "a", draft("c-2"))
        (path,) = spill_files(world)
        path.write_bytes(path.read_bytes().replace(b"c-1", b"c-9"))
        world.store.fault = None
        await recorder.settled("r")
        assert await world.calls() == ["c-2"]
        assert metric(recorder, "lost_total") == 1


async def test_a_memory_store_leaves_no_folder_and_no_old_events(world: World) -> None:
    world.store.is_durable = False
    async with world.recorder():
        assert not world.folder.exists()
    old = SpillFile(world.folder, max_bytes=10**6, keeps=False)
    old.append([SpilledEvent(rollout_id="r", attempt_id="a", timestamp=1.0, draft=draft("of-old"))])
    old.close()
    async with world.recorder() as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        world.store.fault = None
        await recorder.settled("r")
    assert await world.calls() == ["c-1"]


async def test_a_durable_store_without_a_place_to_spill_to_does_not_start(world: World) -> None:
    world.folder.write_text("")
    with pytest.raises(ConfigError, match=r"capture\.spill_dir"):
        async with world.recorder():
            pass


# --- reading


async def test_c49_a_reader_waits_for_what_was_accepted_before(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.held = asyncio.Event()
        writing = [
            asyncio.create_task(recorder.record("r", "a", draft(f"c-{number}")))
            for number in range(3)
        ]
        await until(lambda: world.store.appends > 0)
        reading = asyncio.create_task(recorder.settled("r"))
        await recorder.settled("other")
        assert not reading.done()
        world.store.held.set()
        await reading
        assert await world.calls() == ["c-0", "c-1", "c-2"]
        await asyncio.gather(*writing)


async def test_a_reader_is_refused_while_the_store_is_down(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        with pytest.raises(StoreError):
            await recorder.settled("r")
        await recorder.settled("other")
        world.store.fault = None
        await recorder.settled("r")
        assert await world.calls() == ["c-1"]


async def test_a_reader_waits_within_a_bound(world: World) -> None:
    async with world.recorder(barrier=0.05) as recorder:
        world.store.held = asyncio.Event()
        writing = asyncio.create_task(recorder.record("r", "a", draft("c-1")))
        await until(lambda: world.store.appends > 0)
        with pytest.raises(StoreError, match="not in the store yet"):
            await recorder.settled("r")
        world.store.held.set()
        await writing


async def test_readers_that_leave_or_crowd_do_not_append_twice(world: World) -> None:
    async with world.recorder() as recorder:
        world.store.fault = is_down
        await recorder.record("r", "a", draft("c-1"))
        await world.clock.until_sleeping()
        world.store.fault, world.store.held = None, asyncio.Event()
        before = world.store.appends
        gone = asyncio.create_task(recorder.settled("r"))
        await until(lambda: world.store.appends > before)
        gone.cancel()
        readers = [asyncio.create_task(recorder.settled("r")) for _ in range(5)]
        await asyncio.wait({gone})
        world.store.held.set()
        await asyncio.gather(*readers)
        assert await world.calls() == ["c-1"]
        assert world.store.appends == before + 1


@pytest.mark.parametrize("fault", [None, is_down])
async def test_a_caller_that_is_cancelled_leaves_its_event(
    world: World, fault: Callable[[], Exception] | None
) -> None:
    async with world.recorder() as recorder:
        world.store.held = asyncio.Event()
        writing = asyncio.create_task(recorder.record("r", "a", draft("c-1")))
        await until(lambda: world.store.appends > 0)
        writing.cancel()
        await asyncio.wait({writing})
        world.store.fault = fault
        world.store.held.set()
        if fault is not None:
            await until(lambda: metric(recorder, "spilled_total") == 1)
            world.store.fault = None
        await recorder.settled("r")
        assert await world.calls() == ["c-1"]


# --- durability


async def test_c48_async_does_not_wait_for_the_store_and_commit_does(world: World) -> None:
    world.store.held = asyncio.Event()
    async with world.recorder(durability="async") as recorder:
        for number in range(20):
            await recorder.record("r", "a", draft(f"c-{number}"))
        assert await world.calls() == []
        world.store.held.set()
        await recorder.settled("r")
        assert await world.calls() == [f"c-{number}" for number in range(20)]
        # The first was on its way when the others came; those went as one.
        assert world.store.appends <= 2
    for durability in ("commit", "auto"):
        world.store.held = asyncio.Event()
        async with world.recorder(durability=durability) as recorder:
            writing = asyncio.create_task(recorder.record("r", "a", draft(durability)))
            before = world.store.appends
            await until(lambda before=before: world.store.appends > before)  # type: ignore[misc]
            assert not writing.done()
            world.store.held.set()
            await writing


async def test_async_keeps_attempts_and_times_apart(world: World) -> None:
    async with world.recorder(durability="async") as recorder:
        times = []
        for number, attempt_id in enumerate(["a", "b", "a"]):
            world.clock.advance(10.0)
            times.append(world.clock.now())
            await recorder.record("r", attempt_id, draft(f"c-{number}"))
        await recorder.settled("r")
        found = [(event.attempt_id, event.timestamp) for event in await world.events()]
        assert found == list(zip(["a", "b", "a"], times, strict=True))


async def test_async_waits_when_its_queue_is_full(world: World) -> None:
    world.store.held = asyncio.Event()
    async with world.recorder(durability="async", queue=3) as recorder:
        for number in range(3):
            await recorder.record("r", "a", draft(f"c-{number}"))
        fourth = asyncio.create_task(recorder.record("r", "a", draft("c-3")))
        fifth = asyncio.create_task(recorder.record("r", "a", draft("c-4")))
        await asyncio.wait({fourth, fifth}, timeout=0.05)
        assert not fourth.done()
        assert metric(recorder, "queued") == 3
        world.store.held.set()
        await asyncio.gather(fourth, fifth)
        await recorder.settled("r")
    assert await world.calls() == [f"c-{number}" for number in range(5)]


async def test_async_spills_what_the_store_does_not_take(world: World) -> None:
    async with world.recorder(durability="async") as recorder:
        world.store.fault = is_down
        for number in range(5):
            await recorder.record("r", "a", draft(f"c-{number}"))
        await until(lambda: metric(recorder, "spilled_total") == 5)
        world.store.fault = None
        await recorder.settled("r")
    assert await world.calls() == [f"c-{number}" for number in range(5)]


@pytest.mark.parametrize("is_done_before_fault", [False, True])
async def test_async_keeps_in_memory_what_nobody_takes_and_accepts_no_more(
    world: World, is_done_before_fault: bool
) -> None:
    async with world.recorder(durability="async", spill_max_bytes=1) as recorder:
        world.store.fault = is_down
        world.store.is_done_before_fault = is_done_before_fault
        await recorder.record("r", "a", draft("c-1"))
        await world.clock.until_sleeping()
        with pytest.raises(StoreError, match="spill is full"):
            await recorder.record("r", "a", draft("c-2"))
        world.store.fault = None
        world.clock.advance(60.0)
        await recorder.settled("r")
        await recorder.record("r", "a", draft("c-3"))
        await recorder.settled("r")
        assert metric(recorder, "lost_total") == 0
    assert await world.calls() == ["c-1", "c-3"]


async def test_a_full_queue_is_refused_once_nobody_takes_anything(world: World) -> None:
    async with world.recorder(
        durability="async", spill_max_bytes=1, queue=1, flush=0.01
    ) as recorder:
        world.store.held = asyncio.Event()
        await recorder.record("r", "a", draft("c-1"))
        waiting = asyncio.create_task(recorder.record("r", "a", draft("c-2")))
        await until(lambda: world.store.appends > 0)
        world.store.fault = is_down
        world.store.held.set()
        with pytest.raises(StoreError):
            await waiting
    assert recorder.lost == 1


# --- the end


@pytest.mark.parametrize("durability", ["commit", "async"])
async def test_the_end_waits_for_what_is_being_written(world: World, durability: str) -> None:
    world.store.held = asyncio.Event()
    async with world.recorder(durability=durability) as recorder:
        writing = [
            asyncio.create_task(recorder.record("r", "a", draft(f"c-{number}")))
            for number in range(5)
        ]
        await until(lambda: world.store.appends > 0)
        asyncio.get_running_loop().call_soon(world.store.held.set)
    await asyncio.gather(*writing)
    assert await world.calls() == [f"c-{number}" for number in range(5)]
    assert spill_files(world) == []


@pytest.mark.parametrize("durability", ["commit", "async"])
async def test_what_the_store_does_not_take_before_the_end_is_spilled(
    world: World, durability: str
) -> None:
    world.store.held = asyncio.Event()
    async with world.recorder(durability=durability, flush=0.05) as recorder:
        writing = [
            asyncio.create_task(recorder.record("r", "a", draft(f"c-{number}")))
            for number in range(5)
        ]
        await until(lambda: world.store.appends > 0)
    await asyncio.gather(*writing)
    assert recorder.spilled == 5
    assert await world.calls() == []
    world.store.held = None
    async with world.recorder() as recorder:
        await recorder.settled("r")
    assert await world.calls() == [f"c-{number}" for number in range(5)]


# --- the whole service


class StorePlugin:
    """The memory store behind one that fails on command."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self.store: Any = None

    @hookimpl
    def provide_store(self, clock: Any) -> Any:
        self.store = FailingStore(self._behind.provide_store(clock))
        return self.store


async def test_an_agent_gets_its_answer_while_the_store_fails(
    stack: AsyncExitStack, manual_vllm: FakeVllm, tmp_path: Path
) -> None:
    made: list[StorePlugin] = []

    def wrap(loaded: Loaded) -> Loaded:
        changed = []
        for plugin in loaded.plugins.loaded:
            if plugin.name == "memory":
                made.append(StorePlugin(plugin.instance))
                plugin = LoadedPlugin(name="memory", origin="test", instance=made[0])
            changed.append(plugin)
        return attrs.evolve(loaded, plugins=Plugins(changed))

    tables = {"capture": {"spill_dir": str(tmp_path / "spill")}}
    service = await stack.enter_async_context(running_service(tables, wrap=wrap))
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    store = made[0].store
    async with asyncio.timeout(WITHIN):
        store.fault = is_down
        calling = asyncio.create_task(service.call("r"))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        called = await calling
        assert (called.status, called.is_clean) == (200, True)
        refused = await service.api("GET", "/events?rollout_id=r", expect=503)
        assert refused["code"] == "store_unavailable"
        text = (await service.client.get(f"{service.url}/metrics")).text
        assert "agl_capture_spill_events 1" in text
        store.fault = None
        (event,) = await service.events("r")
    assert event["call_id"] == called.call_id
