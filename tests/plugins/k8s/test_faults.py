"""What goes wrong on a cluster, made on purpose: the fake shows it as a real one was seen to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.errors import Invalid, Unavailable
from agl_core.interfaces import RunReport
from agl_core.testing.contracts.runner import finished, is_running, report_when
from agl_k8s.runner import K8sRunner
from agl_k8s.testing import FakeCluster, scripts
from agl_k8s.testing.clusters import ClusterUnderTest, work_of

CLOCK = SystemClock()
ANY = work_of("r-1", ["sh", "-c", "exit 0"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await CLOCK.sleep(0.02)


async def run(
    cluster: ClusterUnderTest, script: scripts.Script, *, settings: Any = None, **config: Any
) -> RunReport:
    """The end of one rollout whose pods all do the same."""
    assert cluster.fake is not None
    cluster.fake.node.script_for = lambda pod: script
    async with cluster.runner(**(settings or {})) as runner:
        await runner.start(work_of("r-1", ["agent"], **config))
        return await finished(runner, "r-1")


@pytest.mark.parametrize(
    ("script", "reason", "code"),
    [
        (scripts.exits(3), "agent", 3),
        (scripts.oom_killed(), "oom", 137),
        (scripts.oom_killed(7), "oom", 7),
        (scripts.exits(137), "agent", 137),
        (scripts.evicted_by_storage(), "agent", 137),
    ],
)
async def test_c60_reasons_are_told_apart(
    cluster: ClusterUnderTest, script: scripts.Script, reason: str, code: int
) -> None:
    report = await run(cluster, script)
    assert [(a.phase, a.reason, a.exit_code) for a in report.attempts] == [("failed", reason, code)]
    assert report.error is not None
    assert report.error.code == reason


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (scripts.cannot_pull(), "image"),
        (scripts.has_invalid_image(), "InvalidImageName"),
        (scripts.lacks_configuration(), "CreateContainerConfigError"),
    ],
)
async def test_c56_what_cannot_start_fails_after_its_grace_and_leaves_no_job(
    cluster: ClusterUnderTest, fake: FakeCluster, script: scripts.Script, said: str
) -> None:
    fake.node.script_for = lambda pod: script
    async with cluster.runner(start_grace_seconds=1.5) as runner:
        before = CLOCK.monotonic()
        await runner.start(work_of("r-1", ["agent"], max_retries=3))
        report = await finished(runner, "r-1")
        assert CLOCK.monotonic() - before < 6
        assert [a.reason for a in report.attempts] == ["config"]
        assert report.error is not None
        assert said in report.error.message
        await runner.release("r-1")
        await until(lambda: not fake.store.list("jobs") and not fake.store.list("pods"))


async def test_c56_image_that_nobody_can_pull_fails_further_rollouts_at_once(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    def pulls(pod: Any) -> scripts.Script:
        image = pod["spec"]["containers"][0]["image"]
        return scripts.cannot_pull() if image == "nowhere:1" else scripts.exits(0)

    fake.node.script_for = pulls
    settings = {"start_grace_seconds": 1.0, "image_failures": 2, "image_retry_seconds": 60.0}
    async with cluster.runner(**settings) as runner:
        for name in ("r-1", "r-2"):
            await runner.start(work_of(name, ["agent"], image="nowhere:1"))
        for name in ("r-1", "r-2"):
            report = await finished(runner, name)
            assert report.error is not None
            assert report.error.code == "config"
            await runner.release(name)
        with pytest.raises(
            Invalid, match="'nowhere:1' could not be pulled 2 times in a row"
        ) as told:
            await runner.start(work_of("r-3", ["agent"], image="nowhere:1"))
        assert "ImagePullBackOff" in str(told.value)
        assert not fake.store.list("jobs")
        await runner.start(work_of("r-4", ["agent"]))
        assert (await finished(runner, "r-4")).outcome == "succeeded"


async def test_unschedulable_pod_has_longer_and_is_no_fault_of_the_config(
    cluster: ClusterUnderTest,
) -> None:
    settings = {"start_grace_seconds": 0.2, "pending_seconds": 1.5}
    report = await run(cluster, scripts.never_scheduled(), settings=settings)
    assert [a.reason for a in report.attempts] == ["infra"]
    assert report.error is not None
    assert "Insufficient cpu" in report.error.message


@pytest.mark.parametrize("named", ["service_account", "priority_class"])
async def test_pods_that_are_refused_for_ever_fail_by_config(
    cluster: ClusterUnderTest, named: str
) -> None:
    job = cluster.config().job
    layer = type(job)(image=job.image, **{named: "nobody"})
    async with cluster.runner(job=layer, start_grace_seconds=1.0) as runner:
        await runner.start(ANY)
        report = await finished(runner, "r-1")
    assert report.outcome == "failed"
    assert report.error is not None
    assert report.error.code == "config"
    assert "no pod can be created" in report.error.message


async def test_c67_quota_for_pods_is_waited_for(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    fake.store.create("resourcequotas", "default", quota)
    async with cluster.runner(start_grace_seconds=0.5, pending_seconds=1.0) as runner:
        await runner.start(ANY)
        await until(lambda: len(fake.store.list("events")) > 2)
        await CLOCK.sleep(2.5)  # beyond both limits
        (report,) = await runner.list()
        assert (report.attempts, report.is_finished) == ((), False)
        fake.store.delete("resourcequotas", "default", "few")
        report = await finished(runner, "r-1")
    assert report.outcome == "succeeded"
    assert len(report.attempts) == 1


async def test_c67_quota_for_jobs_holds_starts_up_and_uses_no_attempt(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    fake.store.create("resourcequotas", "default", quota)
    async with cluster.runner() as runner:
        with pytest.raises(Unavailable, match="exceeded quota") as refused:
            await runner.start(ANY)
        assert refused.value.retry_after_seconds > 1
        waiting = asyncio.create_task(runner.until_ready())
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
        waiting.cancel()
        fake.store.delete("resourcequotas", "default", "few")
        await runner.start(ANY)
        assert len((await finished(runner, "r-1")).attempts) == 1


async def test_c67_missing_right_stops_dispatch_and_is_logged(
    cluster: ClusterUnderTest, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.faults.deny("create", "jobs")
    async with cluster.runner() as runner:
        with pytest.raises(Unavailable, match="cannot create resource"):
            await runner.start(ANY)
        assert "no Job can be created" in caplog.text
        fake.faults.allow("create", "jobs")
        await runner.start(ANY)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_what_the_api_server_finds_invalid_fails_at_once_in_its_words(
    cluster: ClusterUnderTest,
) -> None:
    work = work_of("r-1", ["agent"], job_patch={"spec": {"template": {"spec": {"nonsense": 1}}}})
    async with cluster.runner() as runner:
        with pytest.raises(Invalid, match="nonsense"):
            await runner.start(work)
        assert await runner.list() == []


async def test_create_whose_reply_was_lost_makes_one_job(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.faults.lose_reply(r"/jobs\b", method="POST")
    async with cluster.runner() as runner:
        await runner.start(ANY)
        assert (await finished(runner, "r-1")).outcome == "succeeded"
        assert len(fake.store.list("jobs")) == 1


async def test_secret_that_could_not_be_made_is_made_later(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.faults.bad_gateway(r"/secrets\b", method="POST", count=2)
    async with cluster.runner() as runner:
        await runner.start(ANY)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_busy_api_server_is_asked_again_when_it_says(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    async with cluster.runner() as runner:
        fake.faults.busy(r"/jobs\b", method="POST")
        with pytest.raises(Unavailable):
            await runner.start(ANY)
        await runner.until_ready()
        await runner.start(ANY)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_successful_rollout_costs_three_calls(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.node.script_for = lambda pod: scripts.exits(0)
    async with cluster.runner(max_active=50, lease=False, creates_per_second=1000.0) as runner:
        fake.requests.clear()
        for number in range(50):
            await runner.start(work_of(f"r-{number}", ["agent"]))
        for number in range(50):
            assert (await finished(runner, f"r-{number}")).outcome == "succeeded"
            await runner.release(f"r-{number}")
        calls = [(r.method, r.path.rsplit("/", 1)[0]) for r in fake.requests if r.method != "GET"]
        reads = [r for r in fake.requests if r.method == "GET"]
    assert len(calls) == 150, calls
    assert len(reads) <= 4, reads


async def test_c59_c52_end_while_the_watch_was_lost_is_found(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "sleep 1"]))
        await report_when(runner, "r-1", is_running)
        fake.faults.expire_watches()
        await fake.restart_api_server()
        report = await finished(runner, "r-1")
    assert (report.outcome, len(report.attempts)) == ("succeeded", 1)


async def test_api_server_that_is_away_ends_nothing(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "sleep 1.5"]))
        await report_when(runner, "r-1", is_running)
        await fake.api_server.stop()
        await CLOCK.sleep(2.5)
        (report,) = await runner.list()
        assert is_running(report)
        await fake.api_server.start()
        report = await finished(runner, "r-1")
    assert (report.outcome, len(report.attempts)) == ("succeeded", 1)


async def test_c62_failed_pod_with_retries_left_is_no_verdict(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    codes = iter([5, 6, 0])
    fake.node.script_for = lambda pod: scripts.exits(next(codes))
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["agent"], max_retries=2))
        report = await finished(runner, "r-1")
    assert [a.exit_code for a in report.attempts] == [5, 6, 0]
    assert report.succeeded_attempt_id == report.attempts[-1].attempt_id


async def test_c51_pod_of_a_lost_node_ends_by_infra_and_is_taken_away(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    fake.node.script_for = lambda pod: scripts.hangs()
    async with cluster.runner(node_lost_seconds=1.0, stop_grace_seconds=0) as runner:
        await runner.start(work_of("r-1", ["agent"], max_retries=3))
        await report_when(runner, "r-1", is_running)
        fake.node.down()
        (pod,) = fake.store.list("pods")
        fake.store.delete("pods", "default", pod["metadata"]["name"])
        report = await finished(runner, "r-1")
        assert [a.reason for a in report.attempts] == ["infra"]
        assert report.error is not None
        assert "does not answer" in report.error.message
        await runner.release("r-1")
        await until(lambda: not fake.store.list("jobs") and not fake.store.list("pods"))


async def test_cancelled_pod_of_a_dead_node_is_taken_away_by_force(
    cluster: ClusterUnderTest, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_k8s.keeper.FORCE_AFTER_SECONDS", 1.0)
    fake.node.script_for = lambda pod: scripts.hangs()
    async with cluster.runner(stop_grace_seconds=0) as runner:
        await runner.start(work_of("r-1", ["agent"]))
        await report_when(runner, "r-1", is_running)
        fake.node.down()
        await runner.stop("r-1", "cancelled")
        report = await finished(runner, "r-1")
        assert report.outcome == "cancelled"
        assert not fake.store.list("pods")


async def test_c72_suspended_job_is_in_no_hurry(
    cluster: ClusterUnderTest, fake: FakeCluster
) -> None:
    job = cluster.config().job
    layer = type(job)(image=job.image, queue_name="rl")
    settings = {"start_grace_seconds": 1.0, "pending_seconds": 1.9}
    async with cluster.runner(job=layer, **settings) as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "exit 0"], timeout_seconds=0.1))
        await CLOCK.sleep(2.5)
        (report,) = await runner.list()
        assert (report.attempts, report.is_finished) == ((), False)
        (made,) = fake.store.list("jobs")

        def resume(item: dict[str, Any]) -> None:
            item["spec"]["suspend"] = False

        fake.store.update("jobs", "default", made["metadata"]["name"], resume)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_c53_rotated_token_is_read_again(
    cluster: ClusterUnderTest, fake: FakeCluster, tmp_path: Any
) -> None:
    path = tmp_path / "rotating"
    token = tmp_path / "token"
    token.write_text("one")
    text = fake.write_kubeconfig(path).read_text()
    path.write_text(text.replace('token: "fake-token"', f"tokenFile: {token}"))
    fake.faults.accept_tokens("one", "two")
    async with K8sRunner(cluster.config(kubeconfig=str(path)), CLOCK) as runner:
        token.write_text("two")
        fake.faults.expire_token("one")
        await runner.start(ANY)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_time_out_keeps_the_log_of_what_it_ends(
    cluster: ClusterUnderTest,
) -> None:
    script = "trap 'exit 143' TERM; echo so far; sleep 60 & wait"
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", script], timeout_seconds=1))
        await report_when(runner, "r-1", is_running)
        await CLOCK.sleep(0.5)
        await runner.stop("r-1", "timeout")
        report = await finished(runner, "r-1")
    assert [a.reason for a in report.attempts] == ["timeout"]
    (log, *_) = report.evidence[report.attempts[0].attempt_id]
    assert log.data["text"] == "so far\n"
