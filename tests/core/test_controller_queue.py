"""The controller and runners that queue by themselves, limit their rate, or lose their lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from agl_core.app import create_app, load
from agl_core.client import AsyncAglLiteClient
from agl_core.clock import SystemClock, poll
from agl_core.config import RawConfig
from agl_core.controller import Controller
from agl_core.errors import TakenOver
from agl_core.interfaces import Finding, RunReport, Work
from agl_core.records import Attempt
from agl_core.reports import LatestReports
from agl_core.settings import ControllerSettings
from agl_core.testing.servers import serve_asgi

CLOCK = SystemClock()


class Cluster:
    """A runner in whose queue work waits until the test lets it run."""

    max_active = 100

    def __init__(self) -> None:
        self.known: dict[str, RunReport] = {}
        self.started: list[str] = []
        self.tokens: list[str] = []
        self.stopped: list[tuple[str, str]] = []
        self.turns = asyncio.Semaphore(1000)
        self.lost = asyncio.Event()
        self._reports = LatestReports()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def start(self, work: Work) -> None:
        self.started.append(work.rollout.rollout_id)
        self.tokens.append(work.token)
        self.tell(RunReport(rollout_id=work.rollout.rollout_id, attempts=()))

    async def stop(self, rollout_id: str, reason: Literal["cancelled", "timeout"]) -> None:
        self.stopped.append((rollout_id, reason))
        self.tell(
            RunReport(rollout_id=rollout_id, attempts=(), is_finished=True, outcome="cancelled")
        )

    async def release(self, rollout_id: str) -> None:
        self.known.pop(rollout_id, None)

    async def list(self) -> Sequence[RunReport]:
        return list(self.known.values())

    def watch(self) -> AsyncIterator[RunReport]:
        return self._reports.watch()

    async def until_ready(self) -> None:
        await self.turns.acquire()

    async def until_lost(self) -> None:
        await self.lost.wait()

    async def examine(self, work: Work, *, with_probe: bool) -> AsyncIterator[Finding]:
        yield Finding(subject="machine", status="ok", message="it is there")

    async def logs(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        container: str | None = None,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[bytes]:
        yield b""

    def tell(self, report: RunReport) -> None:
        self.known[report.rollout_id] = report
        self._reports.put(report)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    service = create_app(load(RawConfig(tables={"plugins": {"enabled": ["memory", "vllm"]}})))
    async with service, serve_asgi(service.app) as url:
        yield url
        service.feed.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAglLiteClient]:
    async with AsyncAglLiteClient(url) as client:
        yield client


@asynccontextmanager
async def controlling(url: str, runner: Cluster) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    async with AsyncAglLiteClient(url) as client, runner:
        controller = Controller(client, runner, ControllerSettings(url=url), CLOCK)
        running = asyncio.create_task(controller.run(stop))
        try:
            yield running
        finally:
            stop.set()
            await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    assert await poll(condition, CLOCK, seconds=20)


async def test_c72_what_waits_in_a_cluster_is_still_queuing(
    url: str, client: AsyncAglLiteClient
) -> None:
    cluster = Cluster()
    async with controlling(url, cluster):
        (rollout,) = await client.enqueue({"rollout_id": "r-1", "config": {"timeout_seconds": 5}})
        await until(lambda: cluster.started == ["r-1"])
        # A second rollout is seen through to its end, so the first one's report was handled.
        await client.enqueue({"rollout_id": "r-2"})
        await until(lambda: "r-2" in cluster.known)
        attempt = Attempt(attempt_id="pod", node="n", phase="succeeded")
        done = RunReport(
            rollout_id="r-2",
            attempts=(attempt,),
            is_finished=True,
            outcome="succeeded",
            succeeded_attempt_id="pod",
        )
        cluster.tell(done)
        await client.wait(["r-2"], timeout=20)
        rollout = await client.rollout("r-1")
        assert (rollout.status, rollout.attempts, rollout.started_at) == ("queuing", (), None)
        await client.cancel("r-1")
        await until(lambda: cluster.stopped == [("r-1", "cancelled")])
        assert (await client.rollout("r-1")).status == "cancelled"
        await until(lambda: not cluster.known)


async def test_c65_what_was_left_halfway_is_started_again_once(
    url: str, client: AsyncAglLiteClient
) -> None:
    await client.enqueue([{"rollout_id": "r-1"}, {"rollout_id": "r-2"}])
    cluster = Cluster()
    async with controlling(url, cluster):
        await until(lambda: len(cluster.started) == 2)
    attempt = Attempt(attempt_id="pod", node="n")
    cluster.known["r-2"] = RunReport(rollout_id="r-2", attempts=(attempt,))
    cluster.started.clear()
    async with controlling(url, cluster):
        await until(lambda: bool(cluster.started))
        cluster.tell(RunReport(rollout_id="r-1", attempts=()))
        await client.enqueue({"rollout_id": "r-3"})
        await until(lambda: "r-3" in cluster.started)
    assert cluster.started == ["r-1", "r-3"]
    assert all(cluster.tokens)


async def test_rate_of_starts_is_the_runners(url: str, client: AsyncAglLiteClient) -> None:
    cluster = Cluster()
    cluster.turns = asyncio.Semaphore(2)
    async with controlling(url, cluster):
        await client.enqueue([{"rollout_id": f"r-{number}"} for number in range(5)])
        await until(lambda: len(cluster.known) == 2)
        # Ends go on while starts wait.
        attempt = Attempt(attempt_id="pod", node="n", phase="failed", reason="agent")
        cluster.tell(
            RunReport(
                rollout_id=cluster.started[0],
                attempts=(attempt,),
                is_finished=True,
                outcome="failed",
            )
        )
        (ended,) = await client.wait([cluster.started[0]], timeout=20)
        assert ended.status == "failed"
        assert len(cluster.started) == 2
        cluster.turns.release()
        await until(lambda: len(cluster.started) == 3)


async def test_controller_whose_lease_is_lost_stops_at_once(
    url: str, client: AsyncAglLiteClient
) -> None:
    cluster = Cluster()
    async with controlling(url, cluster) as running:
        await client.enqueue({"rollout_id": "r-1"})
        await until(lambda: cluster.started == ["r-1"])
        cluster.lost.set()
        with pytest.raises(TakenOver):
            await asyncio.wait_for(running, 5)
    assert cluster.stopped == []
