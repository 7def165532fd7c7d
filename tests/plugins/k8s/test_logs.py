"""Logs of pods that run, as ``agl logs`` reads them beside the controller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.errors import Invalid, NotFound, Unavailable
from agl_core.testing.contracts.runner import finished, is_running, report_when
from agl_k8s.config import JobLayer
from agl_k8s.manifest import build_job
from agl_k8s.testing import FakeCluster, scripts
from agl_k8s.testing.clusters import ClusterUnderTest, work_of

CLOCK = SystemClock()
LIMIT_SECONDS = 120.0
COUNTS = ["sh", "-c", "trap 'exit 143' TERM; echo started; while :; do sleep 0.1; echo more; done"]


async def attempt_of(runner: Any, rollout_id: str) -> str:
    report = await report_when(runner, rollout_id, is_running)
    return str(report.attempts[-1].attempt_id)


@pytest.mark.cluster
async def test_log_of_a_sidecar_is_its_own(cluster: ClusterUnderTest) -> None:
    sidecar = {
        "name": "tool",
        "image": cluster.image,
        "command": ["sh", "-c", "trap 'exit 0' TERM; echo from the tool; sleep 600 & wait"],
    }
    job = JobLayer(image=cluster.image, sidecars=(sidecar,))
    async with cluster.runner(job=job) as runner, asyncio.timeout(LIMIT_SECONDS):
        await runner.start(work_of("r-1", COUNTS))
        attempt_id = await attempt_of(runner, "r-1")
        text = b""
        while text != b"from the tool\n":
            pieces = runner.logs("r-1", attempt_id, container="tool")
            text = b"".join([piece async for piece in pieces])
        with pytest.raises(Invalid, match="no container 'other'") as told:
            await anext(runner.logs("r-1", attempt_id, container="other"))
        assert told.value.hint == "it has tool, agent"
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")


@pytest.mark.cluster
async def test_followed_log_waits_for_the_container_to_start(cluster: ClusterUnderTest) -> None:
    """The token's Secret is late, as after a restart of the controller: the pod waits for it."""
    work = work_of("r-1", ["sh", "-c", "echo at last"])
    async with cluster.runner() as runner, asyncio.timeout(LIMIT_SECONDS):
        async with cluster.api() as api:
            await api.create("jobs", build_job(cluster.config(), work))
            while not (pods := await cluster.pods()):
                await CLOCK.sleep(0.1)
        uid = pods[0]["metadata"]["uid"]
        with pytest.raises(NotFound, match="has not started"):
            await anext(runner.logs("r-1", uid))
        following = asyncio.create_task(anext(runner.logs("r-1", uid, follow=True)))
        done, _ = await asyncio.wait([following], timeout=1.5)
        assert not done
        await runner.start(work)
        assert await following == b"at last\n"
        assert (await finished(runner, "r-1")).outcome == "succeeded"


@pytest.mark.cluster
async def test_pods_of_others_are_not_shown(cluster: ClusterUnderTest) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", COUNTS))
        attempt_id = await attempt_of(runner, "r-1")
        with pytest.raises(NotFound, match="no pod with the uid"):
            await anext(runner.logs("r-2", attempt_id))
        elsewhere = cluster.runner(instance="another")
        with pytest.raises(NotFound):
            await anext(elsewhere.logs("r-1", attempt_id))
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")


async def test_followed_log_goes_on_after_its_connection_was_cut(
    cluster: ClusterUnderTest, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster.runner() as runner, asyncio.timeout(LIMIT_SECONDS):
        await runner.start(work_of("r-1", COUNTS))
        attempt_id = await attempt_of(runner, "r-1")
        pieces = runner.logs("r-1", attempt_id, follow=True)
        text = await anext(pieces)
        await fake.restart_api_server()
        seen = len(text)
        async for piece in pieces:
            text += piece
            if len(text) > 3 * seen + 100:
                break
        assert text.startswith(b"started\n")
        assert "some lines may come twice" in caplog.text
        assert [r for r in fake.requests if "sinceSeconds" in r.query]
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")


async def test_log_that_the_node_has_lost_is_said_so(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.node.script_for = lambda pod: scripts.hangs(log=b"unable to retrieve container logs for x")
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["agent"]))
        attempt_id = await attempt_of(runner, "r-1")
        with pytest.raises(NotFound, match="the node no longer has the log"):
            await anext(runner.logs("r-1", attempt_id))
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")


async def test_cluster_that_refuses_is_no_missing_log(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", COUNTS))
        attempt_id = await attempt_of(runner, "r-1")
        fake.faults.deny("get", "pods/log")
        with pytest.raises(Unavailable, match="cannot get resource"):
            await anext(runner.logs("r-1", attempt_id))
        fake.faults.allow("get", "pods/log")
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")


async def test_dead_connection_is_asked_for_anew_and_not_told_of(
    cluster: ClusterUnderTest,
    fake: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agl_k8s.logs.QUIET_SECONDS", 0.5)
    async with cluster.runner() as runner, asyncio.timeout(LIMIT_SECONDS):
        await runner.start(work_of("r-1", COUNTS))
        attempt_id = await attempt_of(runner, "r-1")
        fake.faults.black_hole("/log")
        assert (await anext(runner.logs("r-1", attempt_id, follow=True))).startswith(b"started\n")
        assert "cut" not in caplog.text
        await runner.stop("r-1", "cancelled")
        await finished(runner, "r-1")
