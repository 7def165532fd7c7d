"""What the Kubernetes runner does on any cluster, fake or real."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from agl_core.clock import SystemClock
from agl_core.errors import Invalid, Unavailable
from agl_core.interfaces import RunReport
from agl_core.testing.contracts.runner import finished, is_running, report_when
from agl_k8s.manifest import build_job
from agl_k8s.testing.clusters import TOKEN, ClusterUnderTest, work_of

pytestmark = pytest.mark.cluster
CLOCK = SystemClock()
LIMIT_SECONDS = 300.0
SLEEP = ["sh", "-c", "trap 'exit 143' TERM; echo started; sleep 600 & wait"]


async def until_gone(cluster: ClusterUnderTest) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while await cluster.jobs() or await cluster.pods():
            await CLOCK.sleep(0.1)


async def until_only_one_pod(cluster: ClusterUnderTest) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(await cluster.pods()) != 1:
            await CLOCK.sleep(0.1)


async def test_agent_gets_the_contract_and_its_own_variables(cluster: ClusterUnderTest) -> None:
    script = (
        'echo "$OPENAI_BASE_URL|$ANTHROPIC_BASE_URL|$AGL_EVENT_URL|$AGL_ROLLOUT_ID"; '
        'echo "$AGL_TASK_INPUT|$MINE|$AGL_ATTEMPT_ID|$1"; '
        'test "$OPENAI_API_KEY" = "$ANTHROPIC_API_KEY" && echo "key ${#OPENAI_API_KEY}"; exit 9'
    )
    work = work_of(
        "a b",
        ["sh", "-c", script, "sh", "$(MINE) $$5"],
        task={"cost": "$5 $(PATH) ä"},
        env={"MINE": "$$ and $(PATH)"},
    )
    async with cluster.runner() as runner:
        await runner.start(work)
        report = await finished(runner, "a b")
    (attempt,) = report.attempts
    (log, *_) = report.evidence[attempt.attempt_id]
    base = f"http://127.0.0.1:9/rollout/a%20b/attempt/{attempt.attempt_id}"
    assert log.data["text"].splitlines() == [
        f"{base}/v1|{base}|{base}/events|a b",
        f'{{"cost":"$5 $(PATH) ä"}}|$$ and $(PATH)|{attempt.attempt_id}|$(MINE) $$5',
        f"key {len(TOKEN)}",
    ]
    assert attempt.node


async def test_released_rollout_leaves_nothing_on_the_cluster(cluster: ClusterUnderTest) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "exit 0"]))
        assert (await finished(runner, "r-1")).outcome == "succeeded"
        await runner.release("r-1")
        await until_gone(cluster)


async def test_c66_cancel_is_told_when_the_pods_are_gone(cluster: ClusterUnderTest) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", SLEEP))
        await report_when(runner, "r-1", is_running)
        await runner.stop("r-1", "cancelled")
        report = await finished(runner, "r-1")
        assert report.outcome == "cancelled"
        assert await cluster.pods() == []
        assert await cluster.jobs() == []


async def test_c65_job_that_was_made_before_the_controller_died_is_adopted(
    cluster: ClusterUnderTest,
) -> None:
    work = work_of("r-1", ["sh", "-c", "exit 0"])
    async with cluster.api() as api:
        made = await api.create("jobs", build_job(cluster.config(), work))
    async with cluster.runner() as runner:
        (report,) = await runner.list()
        assert (report.rollout_id, report.is_finished) == ("r-1", False)
        # Its pod waits for the Secret, which nobody has made yet.
        await runner.start(work)
        assert (await finished(runner, "r-1")).outcome == "succeeded"
        (job,) = await cluster.jobs()
    assert job["metadata"]["uid"] == made["metadata"]["uid"]


async def test_c65_job_of_the_same_name_that_is_not_ours_is_left_alone(
    cluster: ClusterUnderTest,
) -> None:
    work = work_of("r-1", ["sh", "-c", "sleep 600"])
    foreign = build_job(cluster.config(instance="somebody"), work)
    async with cluster.api() as api:
        await api.create("jobs", foreign)
        try:
            async with cluster.runner() as runner:
                assert await runner.list() == []
                with pytest.raises(Invalid, match="is not this rollout's"):
                    await runner.start(work)
            assert (await api.get("jobs", foreign["metadata"]["name"]))["metadata"]["uid"]
        finally:
            await api.delete("jobs", foreign["metadata"]["name"], propagation="Background")


async def test_c60_memory_that_runs_out_is_told_from_other_exits(cluster: ClusterUnderTest) -> None:
    if cluster.fake is not None:
        pytest.skip("the fake has no memory limits: test_faults.py has the status")
    script = "x=a; while :; do x=$x$x; done"
    work = work_of(
        "r-1", ["sh", "-c", script], resources={"limits": {"memory": "24Mi", "cpu": "1"}}
    )
    async with cluster.runner() as runner:
        await runner.start(work)
        report = await finished(runner, "r-1")
    assert [a.reason for a in report.attempts] == ["oom"]


async def test_eviction_is_nobodys_failure_and_another_attempt_follows(
    cluster: ClusterUnderTest,
) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", SLEEP, max_retries=0))
        await report_when(runner, "r-1", is_running)
        (pod,) = await cluster.pods()
        await cluster.evict(pod)

        def has_second(report: RunReport) -> bool:
            return len(report.attempts) == 2 and is_running(report)

        report = await report_when(runner, "r-1", has_second)
        assert (report.attempts[0].phase, report.attempts[0].reason) == ("failed", "infra")
        await runner.stop("r-1", "cancelled")
        assert (await finished(runner, "r-1")).outcome == "cancelled"


async def test_infrastructure_is_retried_as_often_as_is_set_and_no_more(
    cluster: ClusterUnderTest,
) -> None:
    async with cluster.runner(infra_retries=0) as runner:
        await runner.start(work_of("r-1", SLEEP, max_retries=5))
        await report_when(runner, "r-1", is_running)
        (pod,) = await cluster.pods()
        await cluster.evict(pod)
        report = await finished(runner, "r-1")
        assert report.outcome == "failed"
        assert report.error is not None
        assert report.error.code == "infra"
        assert [a.reason for a in report.attempts] == ["infra"]
        await runner.release("r-1")
        await until_gone(cluster)


async def test_attempts_that_were_lost_count_after_a_restart(cluster: ClusterUnderTest) -> None:
    def has_second(report: RunReport) -> bool:
        return len(report.attempts) == 2 and is_running(report)

    work = work_of("r-1", SLEEP)
    async with cluster.runner(infra_retries=1) as runner:
        await runner.start(work)
        await report_when(runner, "r-1", is_running)
        (pod,) = await cluster.pods()
        await cluster.evict(pod)
        before = await report_when(runner, "r-1", has_second)
        await until_only_one_pod(cluster)
    record = attrs.evolve(work.rollout, status="running", attempts=before.attempts)
    async with cluster.runner(infra_retries=1) as runner:
        assert len((await report_when(runner, "r-1", is_running)).attempts) == 1
        await runner.start(attrs.evolve(work, rollout=record))
        assert (await report_when(runner, "r-1", has_second)).attempts == before.attempts
        (pod,) = await cluster.pods()
        await cluster.evict(pod)
        report = await finished(runner, "r-1")
        assert report.error is not None
        assert "2 attempts were lost" in report.error.message
        assert [a.reason for a in report.attempts] == ["infra", "infra"]
        await runner.release("r-1")
        await until_gone(cluster)


async def test_job_that_somebody_deleted_is_not_run_again(cluster: ClusterUnderTest) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", SLEEP))
        await report_when(runner, "r-1", is_running)
        (job,) = await cluster.jobs()
        async with cluster.api() as api:
            await api.delete("jobs", job["metadata"]["name"], propagation="Background")
        report = await finished(runner, "r-1")
        assert report.outcome == "failed"
        assert [a.reason for a in report.attempts] == ["infra"]
        await runner.release("r-1")
        await until_gone(cluster)


async def test_exit_code_that_no_retry_mends_is_not_retried(cluster: ClusterUnderTest) -> None:
    async with cluster.runner() as runner:
        await runner.start(work_of("r-1", ["sh", "-c", "exit 78"], max_retries=3))
        report = await finished(runner, "r-1")
    assert [(a.reason, a.exit_code) for a in report.attempts] == [("agent", 78)]


async def test_file_input_travels_in_the_secret(cluster: ClusterUnderTest) -> None:
    if cluster.fake is not None:
        pytest.skip("processes of the fake have no volumes: test_manifest.py has the mount")
    script = 'test "$(cat "$AGL_TASK_INPUT_FILE")" = \'{"q":"$5"}\''
    work = work_of("r-1", ["sh", "-c", script], task={"q": "$5"}, input_delivery="file")
    async with cluster.runner() as runner:
        await runner.start(work)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


async def test_c73_sidecar_does_not_keep_the_rollout_alive(cluster: ClusterUnderTest) -> None:
    sidecar = {
        "name": "tool",
        "image": cluster.image,
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"],
    }
    work = work_of("r-1", ["sh", "-c", "exit 0"])
    job = cluster.config().job
    async with cluster.runner(job=type(job)(image=cluster.image, sidecars=(sidecar,))) as runner:
        await runner.start(work)
        assert (await finished(runner, "r-1")).outcome == "succeeded"


class TestTwoControllers:
    async def test_second_one_waits_and_takes_over_what_runs(
        self, cluster: ClusterUnderTest
    ) -> None:
        first = cluster.runner()
        await first.__aenter__()
        await first.start(work_of("r-1", SLEEP))
        before = await report_when(first, "r-1", is_running)
        second = cluster.runner()
        entering = asyncio.create_task(second.__aenter__())
        done, _ = await asyncio.wait([entering], timeout=1.0)
        assert not done
        await first.__aexit__(None, None, None)
        await asyncio.wait_for(entering, LIMIT_SECONDS)
        try:
            after = await report_when(second, "r-1", is_running)
            assert after.attempts == before.attempts
            await second.stop("r-1", "cancelled")
            assert (await finished(second, "r-1")).outcome == "cancelled"
        finally:
            await second.__aexit__(None, None, None)

    async def test_one_that_lost_its_lease_changes_nothing_any_more(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.runner() as runner:
            await cluster.steal_lease()
            await asyncio.wait_for(runner.until_lost(), LIMIT_SECONDS)
            with pytest.raises(Unavailable):
                await runner.start(work_of("r-1", SLEEP))
        assert await cluster.jobs() == []
