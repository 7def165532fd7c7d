"""Rollouts on a cluster, from the service to the pod and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agl_core.client import AsyncAglLiteClient
from agl_core.clock import SystemClock
from agl_core.controller import Controller
from agl_core.records import Rollout
from agl_core.settings import ControllerSettings
from agl_k8s.testing.clusters import ClusterUnderTest

pytestmark = pytest.mark.cluster
CLOCK = SystemClock()
LIMIT_SECONDS = 120.0
SLEEP = ["sh", "-c", "trap 'exit 143' TERM; sleep 600 & wait"]


@asynccontextmanager
async def controlling(cluster: ClusterUnderTest, url: str, **settings: Any) -> AsyncIterator[None]:
    """A controller at work; leaving stops it and leaves its Jobs alone."""
    stop = asyncio.Event()
    async with AsyncAglLiteClient(url) as client, cluster.runner(**settings) as runner:
        controller = Controller(client, runner, ControllerSettings(url=url), CLOCK)
        running = asyncio.create_task(controller.run(stop))
        try:
            yield
        finally:
            stop.set()
            await running


async def rollout_when(
    client: AsyncAglLiteClient, rollout_id: str, condition: Callable[[Rollout], bool]
) -> Rollout:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition(rollout := await client.rollout(rollout_id)):
            await CLOCK.sleep(0.05)
    return rollout


def runs_its(attempt: int) -> Callable[[Rollout], bool]:
    def is_so(rollout: Rollout) -> bool:
        phases = [attempt.phase for attempt in rollout.attempts]
        return phases == ["failed"] * (attempt - 1) + ["running"]

    return is_so


async def evict_the_one(cluster: ClusterUnderTest) -> None:
    """The pod that runs; those that were evicted before leave the API in a moment."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(pods := await cluster.pods()) != 1:
            await CLOCK.sleep(0.05)
    await cluster.evict(pods[0])


async def test_attempts_whose_pods_are_gone_count_for_the_next_controller(
    cluster: ClusterUnderTest, service: Any
) -> None:
    async with AsyncAglLiteClient(service.url) as client:
        async with controlling(cluster, service.url, infra_retries=1):
            (rollout,) = await client.enqueue({"config": {"command": SLEEP}})
            await rollout_when(client, rollout.rollout_id, runs_its(1))
            await evict_the_one(cluster)
            before = await rollout_when(client, rollout.rollout_id, runs_its(2))
        async with controlling(cluster, service.url, infra_retries=1):
            await evict_the_one(cluster)
            (ended,) = await client.wait([rollout.rollout_id], timeout=LIMIT_SECONDS)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message[:22]) == ("infra", "2 attempts were lost, ")
    assert [a.attempt_id for a in ended.attempts] == [a.attempt_id for a in before.attempts]


async def test_attempt_that_vanished_while_nobody_looked_is_lost(
    cluster: ClusterUnderTest, service: Any
) -> None:
    async with AsyncAglLiteClient(service.url) as client:
        async with controlling(cluster, service.url):
            (rollout,) = await client.enqueue({"config": {"command": SLEEP}})
            await rollout_when(client, rollout.rollout_id, runs_its(1))
        (first,) = await cluster.pods()
        await cluster.evict(first)
        async with asyncio.timeout(LIMIT_SECONDS):
            while [p["metadata"]["uid"] for p in await cluster.pods()] in (
                [],
                [first["metadata"]["uid"]],
            ):
                await CLOCK.sleep(0.05)
        async with controlling(cluster, service.url):
            after = await rollout_when(client, rollout.rollout_id, runs_its(2))
            assert (after.attempts[0].phase, after.attempts[0].reason) == ("failed", "infra")
            await client.cancel(rollout.rollout_id)
            (ended,) = await client.wait([rollout.rollout_id], timeout=LIMIT_SECONDS)
            assert ended.status == "cancelled"


async def test_c81_rollout_has_as_many_pods_as_it_may_and_one_job(
    cluster: ClusterUnderTest, service: Any
) -> None:
    config = {"command": ["sh", "-c", "exit 1"], "max_retries": 2}
    async with AsyncAglLiteClient(service.url) as client, controlling(cluster, service.url):
        (rollout,) = await client.enqueue({"config": config})
        (ended,) = await client.wait([rollout.rollout_id], timeout=LIMIT_SECONDS)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "agent"
    assert [(a.phase, a.exit_code) for a in ended.attempts] == [("failed", 1)] * 3
    assert len({a.attempt_id for a in ended.attempts}) == 3
    if cluster.fake is not None:
        created = [r for r in cluster.fake.requests if r.method == "POST" and "/jobs" in r.path]
        assert len(created) == 1


async def test_c64_rollout_whose_job_is_gone_is_not_run_again(
    cluster: ClusterUnderTest, service: Any
) -> None:
    spec = {"rollout_id": "once", "config": {"command": ["sh", "-c", "exit 0"]}}
    async with AsyncAglLiteClient(service.url) as client, controlling(cluster, service.url):
        (first,) = await client.enqueue(spec)
        (ended,) = await client.wait([first.rollout_id], timeout=LIMIT_SECONDS)
        async with asyncio.timeout(LIMIT_SECONDS):
            while await cluster.jobs():
                await CLOCK.sleep(0.05)
        (again,) = await client.enqueue(spec)
        assert again == ended
        # Another one runs meanwhile, so there was time for it.
        (other,) = await client.enqueue({"config": {"command": ["sh", "-c", "exit 0"]}})
        await client.wait([other.rollout_id], timeout=LIMIT_SECONDS)
        assert await client.rollout("once") == ended


async def test_c64_job_that_its_ttl_removed_in_the_dark_is_not_made_again(
    cluster: ClusterUnderTest, service: Any
) -> None:
    async with AsyncAglLiteClient(service.url) as client:
        async with controlling(cluster, service.url):
            (rollout,) = await client.enqueue({"config": {"command": SLEEP}})
            await rollout_when(client, rollout.rollout_id, runs_its(1))
        await cluster.sweep()
        async with asyncio.timeout(LIMIT_SECONDS):
            while await cluster.jobs() or await cluster.pods():
                await CLOCK.sleep(0.05)
        async with controlling(cluster, service.url):
            (ended,) = await client.wait([rollout.rollout_id], timeout=LIMIT_SECONDS)
            assert ended.error is not None
            assert (ended.status, ended.error.code) == ("failed", "infra")
            assert [a.reason for a in ended.attempts] == ["infra"]
            assert await cluster.jobs() == []
