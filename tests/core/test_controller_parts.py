"""The parts of the controller that keep time and order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agl_core.client.results import GatewayView, PolicyView
from agl_core.controller.deadlines import Deadlines
from agl_core.controller.launch_queue import LaunchQueue
from agl_core.controller.workers import Workers
from agl_core.errors import ApiError
from agl_core.interfaces import RunReport
from agl_core.records import Attempt, Rollout
from agl_core.testing.clock import FakeClock


def waiting(rollout_id: str, priority: int = 0, created_at: float = 0.0) -> Rollout:
    return Rollout(rollout_id=rollout_id, priority=priority, created_at=created_at)


def test_queue_gives_priority_then_age_then_order_of_arrival() -> None:
    queue = LaunchQueue()
    for rollout in (
        waiting("young", created_at=2.0),
        waiting("old-1", created_at=1.0),
        waiting("old-2", created_at=1.0),
        waiting("urgent", priority=1, created_at=3.0),
    ):
        queue.add(rollout)
    assert [queue.pop() for _ in range(5)] == ["urgent", "old-1", "old-2", "young", None]


def test_queue_forgets_what_is_taken_out_and_may_take_it_again() -> None:
    queue = LaunchQueue()
    for name in "abc":
        queue.add(waiting(name))
        queue.add(waiting(name))
    queue.discard("a")
    queue.discard("nobody")
    assert "a" not in queue
    queue.add(waiting("a"))
    assert len(queue) == 3
    assert [queue.pop() for _ in range(4)] == ["b", "c", "a", None]


class Clocked:
    """The two things that deadlines ask for and act upon, kept by hand."""

    def __init__(self) -> None:
        self.paused: dict[str, float] = {}
        self.is_away = False
        self.stopped: list[tuple[str, str]] = []

    async def gateway_state(self) -> GatewayView:
        if self.is_away:
            raise ApiError(0, "unreachable", "nobody answers")
        views = {n: PolicyView(paused=False, paused_seconds=s) for n, s in self.paused.items()}
        return GatewayView(policies=views)

    async def stop(self, rollout_id: str, reason: str) -> None:
        self.stopped.append((rollout_id, reason))


def report_of(attempt_id: str, started_at: float) -> RunReport:
    attempt = Attempt(attempt_id=attempt_id, started_at=started_at)
    return RunReport(rollout_id="r", attempts=(attempt,))


@asynccontextmanager
async def enforcing(
    clocked: Any, clock: FakeClock, reports: dict[str, RunReport]
) -> AsyncIterator[Deadlines]:
    deadlines = Deadlines(clocked, clocked, clock)
    task = asyncio.create_task(deadlines.enforce(reports))
    try:
        async with asyncio.timeout(10):
            yield deadlines
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def advance(clock: FakeClock, seconds: float) -> None:
    """Move on in small steps, each once everybody has had their turn."""
    for _ in range(round(seconds / 0.5)):
        await settle(clock)
        clock.advance(0.5)
    await settle(clock)


async def settle(clock: FakeClock) -> None:
    for _ in range(30):
        await clock.sleep(0)


async def test_pauses_since_the_start_prolong_an_attempt() -> None:
    clock, clocked = FakeClock(), Clocked()
    clocked.paused = {"actor": 100.0, "other": 0.0}
    reports = {"r": report_of("a", clock.now())}
    async with enforcing(clocked, clock, reports) as deadlines:
        await deadlines.watch(reports["r"], 10.0)
        clocked.paused = {"actor": 104.0, "other": 2.0}
        await advance(clock, 13.5)
        assert clocked.stopped == []
        await advance(clock, 1.5)
        assert clocked.stopped == [("r", "timeout")]


async def test_adopted_attempt_has_run_already_and_gets_every_pause_credited() -> None:
    clock, clocked = FakeClock(), Clocked()
    clocked.paused = {"actor": 3.0}
    reports = {"r": report_of("a", clock.now() - 8.0)}
    async with enforcing(clocked, clock, reports) as deadlines:
        deadlines.adopt(["a"])
        await deadlines.watch(reports["r"], 10.0)
        await advance(clock, 4.5)
        assert clocked.stopped == []
        await advance(clock, 1.5)
        assert clocked.stopped == [("r", "timeout")]


async def test_nothing_is_ended_while_the_service_is_away() -> None:
    clock, clocked = FakeClock(), Clocked()
    reports = {"r": report_of("a", clock.now())}
    async with enforcing(clocked, clock, reports) as deadlines:
        await deadlines.watch(reports["r"], 1.0)
        clocked.is_away = True
        await advance(clock, 20.0)
        assert clocked.stopped == []
        clocked.is_away = False
        await advance(clock, 20.0)
        assert clocked.stopped == [("r", "timeout")]


async def test_retry_that_has_begun_meanwhile_is_not_hit() -> None:
    clock, clocked = FakeClock(), Clocked()
    reports = {"r": report_of("a", clock.now())}
    async with enforcing(clocked, clock, reports) as deadlines:
        await deadlines.watch(reports["r"], 1.0)
        reports["r"] = report_of("b", clock.now())
        await advance(clock, 2.0)
        assert clocked.stopped == []
        await deadlines.watch(reports["r"], 1.0)
        await advance(clock, 2.0)
        assert clocked.stopped == [("r", "timeout")]


async def test_steps_of_one_rollout_never_overlap_and_none_is_lost() -> None:
    active: set[str] = set()
    seen: list[str] = []
    blocked = asyncio.Event()

    async def step(rollout_id: str) -> None:
        assert rollout_id not in active
        active.add(rollout_id)
        seen.append(rollout_id)
        await blocked.wait()
        active.discard(rollout_id)

    workers = Workers(step, FakeClock())
    workers.look_at("a", "b")
    await settle(FakeClock())
    workers.look_at("a", "a")
    blocked.set()
    async with asyncio.timeout(10):
        await workers.idle.wait()
    assert sorted(seen) == ["a", "a", "b"]
    assert len(workers) == 0


async def test_failed_step_is_taken_again_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    tries: list[str] = []

    async def step(rollout_id: str) -> None:
        tries.append(rollout_id)
        if rollout_id == "bad" and tries.count("bad") < 3:
            raise RuntimeError("a bug")

    workers = Workers(step, clock)
    workers.look_at("bad", "good")
    async with asyncio.timeout(10):
        await clock.until_sleeping()
        assert tries == ["bad", "good"]
        workers.recover()
        await settle(clock)
        assert tries == ["bad", "good", "bad"]
        clock.advance(1.0)
        await workers.idle.wait()
    assert tries == ["bad", "good", "bad", "bad"]
    assert {r.__dict__["rollout_id"] for r in caplog.records} == {"bad"}


async def test_conflict_is_answered_by_looking_again_at_once() -> None:
    tries = 0

    async def step(_: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ApiError(409, "illegal_transition", "it has ended")

    workers = Workers(step, FakeClock())
    workers.look_at("a")
    async with asyncio.timeout(10):
        await workers.idle.wait()
    assert tries == 2
