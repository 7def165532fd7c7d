"""The fake cluster: its Job controller, scheduler and nodes do what a cluster was seen to do."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_core.clock import SystemClock, poll
from agl_k8s.testing import FakeCluster, Script, scripts
from agl_k8s.testing.kinds import ApiStatus
from agl_k8s.testing.pod_env import expand
from agl_k8s.testing.reporting import condition_of, is_met

CLOCK = SystemClock()
SECRET = {"metadata": {"name": "r-1"}, "data": {"token": base64.b64encode(b"tok$en").decode()}}
POLICY = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "agent", "operator": "In", "values": [78]},
        },
    ]
}


def sh(script: str, *, name: str = "agent", **changes: Any) -> dict[str, Any]:
    return {"name": name, "image": "busybox:stable", "command": ["sh", "-c", script]} | changes


def job(
    *containers: dict[str, Any],
    name: str = "r-1",
    pod: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    pod_spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [*containers] or [sh("true")],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "backoffLimit": 0,
            "podFailurePolicy": POLICY,
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod_spec | (pod or {})},
        }
        | spec,
    }


class Bench:
    """A cluster, and short words for what tests look at."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.store = cluster.store
        self.history: list[tuple[str, str, dict[str, Any]]] = []
        self.store.subscribe(lambda type_, res, item: self.history.append((type_, res, item)))

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.store.create("jobs", "default", body)

    def job(self, name: str = "r-1") -> dict[str, Any]:
        return self.store.get("jobs", "default", name)

    def pods(self) -> list[dict[str, Any]]:
        found = self.store.list("pods", "default")
        return sorted(found, key=lambda pod: int(pod["metadata"]["resourceVersion"]))

    def pod(self) -> dict[str, Any]:
        (pod,) = self.pods()
        return pod

    def conditions(self, name: str = "r-1") -> list[tuple[str, str]]:
        found = self.job(name)["status"].get("conditions", [])
        return [(c["type"], c["reason"]) for c in found if c["status"] == "True"]

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [e for e in self.store.list("events", "default") if e["reason"] == reason]

    def last_states(self) -> list[dict[str, Any]]:
        """What DELETED events said of pods."""
        return [i for type_, res, i in self.history if (type_, res) == ("DELETED", "pods")]

    async def deleted(self, count: int) -> None:
        """Wait until so many pods are gone."""
        await self.until(lambda: len(self.last_states()) == count)

    async def until(self, holds: Callable[[], Any], seconds: float = 10.0) -> None:
        assert await poll(lambda: bool(holds()), CLOCK, seconds=seconds), self.describe()

    async def finished(self, name: str = "r-1") -> dict[str, Any]:
        ends = {"Complete", "Failed"}
        await self.until(lambda: ends & {c for c, _ in self.conditions(name)})
        return self.job(name)

    async def running(self) -> dict[str, Any]:
        await self.until(lambda: any(p["status"]["phase"] == "Running" for p in self.pods()))
        return next(p for p in self.pods() if p["status"]["phase"] == "Running")

    async def writes(self, text: bytes) -> dict[str, Any]:
        """Wait until the agent's log has a text."""
        pod = await self.running()
        await self.until(lambda: text in self.log(pod))
        return pod

    def log(self, pod: dict[str, Any], container: str = "agent") -> bytes:
        found = self.cluster.node.read("default", pod["metadata"]["name"], container)
        assert isinstance(found, bytes), found
        return found

    def describe(self) -> str:
        return f"jobs: {[j['status'] for j in self.store.list('jobs')]}; " + "; ".join(
            f"{p['metadata']['name']}: {p['status']}" for p in self.store.list("pods")
        )

    def delete(self, propagation: Any = "Foreground") -> None:
        self.store.delete("jobs", "default", "r-1", propagation=propagation)

    def all_complete(self) -> bool:
        return all(is_met(item, "Complete") for item in self.store.list("jobs"))

    def is_gone(self) -> bool:
        return not self.store.list("jobs") and not self.store.list("pods")


@asynccontextmanager
async def opened(script: Script | None = None, **options: Any) -> AsyncIterator[Bench]:
    if script is not None:
        options["script_for"] = lambda pod: script
    async with FakeCluster(**options) as cluster:
        yield Bench(cluster)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as bench:
        yield bench


def state(pod: dict[str, Any], name: str = "agent") -> dict[str, Any]:
    status = pod["status"]
    found = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    return next(c["state"] for c in found if c["name"] == name)


def ended(pod: dict[str, Any], name: str = "agent") -> tuple[int, str]:
    end = state(pod, name)["terminated"]
    return end["exitCode"], end["reason"]


# --- Jobs ----------------------------------------------------------------------------------------


async def test_pod_of_a_job_has_its_labels_owner_and_finalizer(bench: Bench) -> None:
    made = bench.create(job(sh("sleep 60")))
    pod = await bench.running()
    metadata = pod["metadata"]
    assert metadata["name"].startswith("r-1-")
    assert len(metadata["name"]) == len("r-1-") + 5
    assert metadata["labels"]["batch.kubernetes.io/controller-uid"] == made["metadata"]["uid"]
    assert (
        metadata["labels"] | {"batch.kubernetes.io/job-name": "r-1", "a": "b"}
        == (metadata["labels"])
    )
    assert metadata["finalizers"] == ["batch.kubernetes.io/job-tracking"]
    assert metadata["ownerReferences"][0]["controller"] is True
    await bench.until(lambda: bench.job()["status"].get("ready") == 1)
    status = bench.job()["status"]
    assert (status["active"], status["terminating"]) == (1, 0)
    assert "startTime" in status


async def test_success_is_told_in_two_conditions(bench: Bench) -> None:
    bench.create(job(sh("echo fine")))
    found = await bench.finished()
    assert bench.conditions() == [
        ("SuccessCriteriaMet", "CompletionsReached"),
        ("Complete", "CompletionsReached"),
    ]
    assert found["status"]["succeeded"] == 1
    assert "completionTime" in found["status"]
    assert "active" not in found["status"]
    first = [
        [c["type"] for c in item["status"].get("conditions", ())]
        for _, resource, item in bench.history
        if resource == "jobs"
    ]
    assert ["SuccessCriteriaMet"] in first
    pod = bench.pod()
    assert pod["status"]["phase"] == "Succeeded"
    assert ended(pod) == (0, "Completed")
    assert "finalizers" not in pod["metadata"]
    assert bench.log(pod) == b"fine\n"


async def test_failures_are_retried_with_longer_waits_until_the_limit(bench: Bench) -> None:
    started = CLOCK.monotonic()
    bench.create(job(sh("echo no; exit 3"), backoffLimit=2))
    found = await bench.finished()
    assert CLOCK.monotonic() - started > 0.3  # 10 and 20 seconds, scaled
    assert bench.conditions() == [
        ("FailureTarget", "BackoffLimitExceeded"),
        ("Failed", "BackoffLimitExceeded"),
    ]
    assert found["status"]["failed"] == 3
    assert [ended(pod) for pod in bench.pods()] == [(3, "Error")] * 3


async def test_exit_code_of_a_rule_fails_the_job_at_once(bench: Bench) -> None:
    bench.create(job(sh("exit 78"), backoffLimit=5))
    found = await bench.finished()
    assert bench.conditions()[-1] == ("Failed", "PodFailurePolicy")
    name = bench.pod()["metadata"]["name"]
    assert condition_of(found, "Failed")["message"] == (
        f"Container agent for pod default/{name} failed with exit code 78 "
        "matching FailJob rule at index 1"
    )


async def test_disruptions_are_retried_without_counting() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        for count in (1, 2):
            pod = await bench.running()
            bench.cluster.evict(pod)
            await bench.deleted(count)
        bench.cluster.scheduler.preempt(await bench.running())
        await bench.deleted(3)
        assert bench.job()["status"].get("failed", 0) == 0
        assert bench.conditions() == []
        reasons = [condition_of(p, "DisruptionTarget")["reason"] for p in bench.last_states()]
        assert reasons == ["EvictionByEvictionAPI"] * 2 + ["PreemptionByScheduler"]
        assert [ended(p) for p in bench.last_states()] == [(143, "Error")] * 3


async def test_deaf_pod_that_is_evicted_is_killed_after_its_grace() -> None:
    async with opened(scripts.hangs_deaf()) as bench:
        bench.create(job())
        started = CLOCK.monotonic()
        bench.cluster.evict(await bench.running())
        await bench.deleted(1)
        assert CLOCK.monotonic() - started >= 0.9
        (last,) = bench.last_states()
        assert ended(last) == (137, "Error")
        assert condition_of(last, "DisruptionTarget")["reason"] == "EvictionByEvictionAPI"


async def test_plain_pod_delete_counts_and_has_no_disruption() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        pod = await bench.running()
        bench.store.delete("pods", "default", pod["metadata"]["name"])
        await bench.finished()
        assert bench.conditions()[-1] == ("Failed", "BackoffLimitExceeded")
        assert condition_of(bench.last_states()[0], "DisruptionTarget") == {}


async def test_job_deadline_deletes_the_pod() -> None:
    async with opened(scripts.hangs(), deadline_scale=0.01) as bench:
        bench.create(job(activeDeadlineSeconds=10))
        await bench.finished()
        assert bench.conditions() == [
            ("FailureTarget", "DeadlineExceeded"),
            ("Failed", "DeadlineExceeded"),
        ]
        assert bench.pods() == []


async def test_job_deadline_starts_anew_when_the_job_is_resumed() -> None:
    async with opened(scripts.hangs(), deadline_scale=0.1) as bench:

        def suspend(value: bool) -> float:
            def change(item: dict[str, Any]) -> None:
                item["spec"]["suspend"] = value

            bench.store.update("jobs", "default", "r-1", change)
            return CLOCK.monotonic()

        bench.create(job(activeDeadlineSeconds=10))
        await bench.running()
        suspend(True)
        await bench.until(lambda: not bench.pods())
        resumed = suspend(False)
        await bench.finished()
        assert CLOCK.monotonic() - resumed >= 1.0
        assert bench.conditions()[-1] == ("Failed", "DeadlineExceeded")


async def test_pod_is_replaced_while_the_old_one_ends_only_where_the_job_allows_it() -> None:
    loose: dict[str, Any] = {
        "podReplacementPolicy": "TerminatingOrFailed",
        "podFailurePolicy": None,
    }
    async with opened(scripts.hangs_deaf(), backoff_scale=0.0) as bench:
        bench.create(job(backoffLimit=5, **loose))
        bench.create(job(backoffLimit=5, name="r-2"))
        await bench.until(lambda: [p["status"]["phase"] for p in bench.pods()] == ["Running"] * 2)
        for pod in bench.pods():
            bench.store.delete("pods", "default", pod["metadata"]["name"], grace_seconds=60)
        await bench.until(
            lambda: bench.job()["status"].get("active") == 1 and len(bench.pods()) > 2
        )
        assert bench.job()["status"]["terminating"] == 1
        status = bench.job("r-2")["status"]
        assert (status.get("active", 0), status["terminating"]) == (0, 1)
        assert len(bench.pods()) == 3


async def test_failure_is_decided_before_the_pod_is_gone() -> None:
    async with opened(scripts.hangs_deaf(), deadline_scale=0.01) as bench:
        bench.create(job(activeDeadlineSeconds=10))
        await bench.until(bench.conditions)
        assert bench.conditions() == [("FailureTarget", "DeadlineExceeded")]
        assert "deletionTimestamp" in bench.pod()["metadata"]
        await bench.finished()
        assert bench.pods() == []


async def test_suspending_deletes_the_pod_and_counts_no_failure() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        await bench.running()

        def suspend(item: dict[str, Any], value: bool = True) -> None:
            item["spec"]["suspend"] = value

        bench.store.update("jobs", "default", "r-1", suspend)
        await bench.until(lambda: not bench.pods())
        assert bench.conditions() == [("Suspended", "JobSuspended")]
        assert "startTime" not in bench.job()["status"]
        bench.store.update("jobs", "default", "r-1", lambda item: suspend(item, False))
        await bench.running()
        found = condition_of(bench.job(), "Suspended")
        assert (found["status"], found["reason"]) == ("False", "JobResumed")
        assert "startTime" in bench.job()["status"]
        assert bench.job()["status"].get("failed", 0) == 0


async def test_ttl_takes_a_finished_job_and_its_pods(bench: Bench) -> None:
    bench.create(job(sh("true"), ttlSecondsAfterFinished=0))
    await bench.until(bench.is_gone)
    deleted = [resource for type_, resource, _ in bench.history if type_ == "DELETED"]
    assert deleted == ["pods", "jobs"]


@pytest.mark.parametrize(
    ("resource", "thing", "pod", "text"),
    [
        (
            "resourcequotas",
            {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}},
            {},
            "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0",
        ),
        (
            "resourcequotas",
            {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "1"}}},
            {},
            "failed quota: q: must specify limits.cpu for: agent",
        ),
        (
            "limitranges",
            {
                "metadata": {"name": "l"},
                "spec": {"limits": [{"type": "Container", "max": {"cpu": "500m"}}]},
            },
            {"containers": [sh("true", resources={"limits": {"cpu": "1"}})]},
            "maximum cpu usage per Container is 500m, but limit is 1",
        ),
        (
            None,
            {},
            {"serviceAccountName": "sa"},
            'error looking up service account default/sa: serviceaccount "sa" not found',
        ),
        (None, {}, {"priorityClassName": "p"}, "no PriorityClass with name p was found"),
    ],
)
async def test_c67_pod_that_is_refused_is_only_an_event(
    bench: Bench, resource: str | None, thing: Any, pod: Any, text: str
) -> None:
    if resource is not None:
        bench.store.create(resource, "default", thing)
    bench.create(job(pod=pod))
    await bench.until(lambda: len(bench.events("FailedCreate")) >= 3)
    message = bench.events("FailedCreate")[0]["message"]
    assert message.startswith('Error creating: pods "r-1-')
    assert message.endswith(f'" is forbidden: {text}')
    status = bench.job()["status"]
    assert "startTime" in status
    assert "active" not in status
    assert bench.conditions() == []


async def test_refused_pods_are_tried_again_at_longer_and_longer_waits() -> None:
    async with opened(backoff_scale=0.05) as bench:
        times: list[float] = []
        bench.store.subscribe(
            lambda type_, res, item: (
                times.append(CLOCK.monotonic()) if item.get("reason") == "FailedCreate" else None
            )
        )
        started = CLOCK.monotonic()
        bench.create(job(pod={"priorityClassName": "p"}))
        await bench.until(lambda: len(times) == 4)
        since = [time - started for time in times]  # 0, 1, 3 and 7 seconds, scaled
        least = (0.0, 0.05, 0.15, 0.35)
        assert all(time >= limit for time, limit in zip(since, least, strict=True)), since


async def test_freed_quota_lets_the_pod_be_made(bench: Bench) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    bench.store.create("resourcequotas", "default", quota)
    bench.create(job())
    await bench.until(lambda: bench.events("FailedCreate"))
    bench.store.delete("resourcequotas", "default", "q")
    await bench.finished()


async def test_without_the_controller_manager_nothing_is_made_counted_or_deleted() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        await bench.running()
        bench.cluster.job_controller.stop()
        bench.create(job(name="r-2"))
        bench.delete()
        assert bench.job()["metadata"]["finalizers"] == ["foregroundDeletion"]
        assert bench.pod()["status"]["phase"] == "Running"
        assert "deletionTimestamp" not in bench.pod()["metadata"]
        bench.cluster.job_controller.start()
        await bench.until(
            lambda: [j["metadata"]["name"] for j in bench.store.list("jobs")] == ["r-2"]
        )
        await bench.running()


async def test_foreground_delete_ends_when_the_pod_is_gone(bench: Bench) -> None:
    bench.create(job(sh("trap '' TERM; echo started; sleep 60")))
    await bench.writes(b"started")
    started = CLOCK.monotonic()
    bench.delete()
    await bench.until(bench.is_gone)
    assert CLOCK.monotonic() - started >= 0.9  # the grace
    assert ended(bench.last_states()[0]) == (137, "Error")
    deleted = [resource for type_, resource, _ in bench.history if type_ == "DELETED"]
    assert deleted == ["pods", "jobs"]


async def test_background_delete_frees_the_name_while_the_pod_runs() -> None:
    async with opened(scripts.hangs_deaf()) as bench:
        bench.create(job())
        await bench.running()
        bench.delete("Background")
        assert bench.store.list("jobs") == []
        assert bench.pod()["status"]["phase"] == "Running"
        bench.create(job())
        await bench.until(lambda: len(bench.pods()) == 2)


# --- Containers ----------------------------------------------------------------------------------


async def test_c69_environment_is_made_as_kubernetes_makes_it(bench: Bench) -> None:
    bench.store.create("secrets", "default", SECRET)
    secret = {"secretKeyRef": {"name": "r-1", "key": "token"}}
    env: list[dict[str, Any]] = [
        {"name": "EARLY", "value": "<$(UID_)>"},
        {"name": "UID_", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}},
        {"name": "KEY", "valueFrom": secret},
        {"name": "LATE", "value": "<$(UID_)|$(NONE)|$$5|$(KEY)>"},
        {"name": "TWICE", "value": "1"},
        {"name": "TWICE", "value": "2"},
    ]
    names = [entry["name"] for entry in env[:-1]]
    code = "import os,sys; print(sys.argv[1]); [print(os.environ[n]) for n in sys.argv[2:]]"
    container = {
        "name": "agent",
        "image": "python",
        "command": [sys.executable, "-c", code],
        "args": ["$(NAME) $$(NAME)", *names],
        "env": env,
    }
    bench.create(job(container))
    await bench.finished()
    pod = bench.pod()
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    assert bench.log(pod).decode().splitlines() == [
        f"{name} $(NAME)",
        "<$(UID_)>",
        uid,
        name,
        "b",
        "tok$en",
        f"<{uid}|$(NONE)|$5|tok$en>",
        "2",
    ]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A $ $(", "$A $ $("),
        ("$(B) $()", "$(B) $()"),
        ("$$$$5", "$$5"),
    ],
)
def test_dollars_are_read_as_kubernetes_reads_them(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


async def test_container_waits_for_its_secret(bench: Bench) -> None:
    env = [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "r-1", "key": "token"}}}]
    bench.create(job(sh('printf %s "$K"', env=env)))
    await bench.until(
        lambda: (
            bench.pods()
            and bench.pod()["status"].get("containerStatuses")
            and state(bench.pod()).get("waiting", {}).get("reason") == "CreateContainerConfigError"
        )
    )
    assert state(bench.pod())["waiting"]["message"] == 'secret "r-1" not found'
    bench.store.create("secrets", "default", SECRET)
    await bench.finished()
    assert bench.log(bench.pod()) == b"tok$en"


async def test_missing_key_waits_unless_it_is_optional(bench: Bench) -> None:
    bench.store.create("secrets", "default", SECRET)
    bench.store.create("configmaps", "default", {"metadata": {"name": "c"}, "data": {"k": "v"}})
    missing = {"name": "r-1", "key": "none"}
    env: list[dict[str, Any]] = [
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": missing | {"optional": True}}},
    ]
    bench.create(job(sh('echo "$A${B-unset}"', env=env)))
    await bench.finished()
    assert bench.log(bench.pod()) == b"vunset\n"
    env = [{"name": "B", "valueFrom": {"secretKeyRef": missing}}]
    bench.create(job(sh("true", env=env), name="r-2"))
    text = "couldn't find key none in Secret default/r-1"
    await bench.until(lambda: any(text in str(pod["status"]) for pod in bench.pods()))


@pytest.mark.parametrize(
    "volume",
    [
        {"secret": {"secretName": "r-1"}},
        {"projected": {"sources": [{"secret": {"name": "r-1"}}]}},
    ],
    ids=["secret", "projected"],
)
async def test_volume_of_a_missing_secret_is_only_in_an_event(
    bench: Bench, volume: dict[str, Any]
) -> None:
    bench.create(job(pod={"volumes": [{"name": "data"} | volume]}))
    await bench.until(lambda: bench.events("FailedMount"))
    assert 'secret "r-1" not found' in bench.events("FailedMount")[0]["message"]
    assert state(bench.pod())["waiting"] == {"reason": "ContainerCreating"}
    bench.store.create("secrets", "default", SECRET)
    await bench.finished()


async def test_missing_program_is_a_start_error(bench: Bench) -> None:
    bench.create(job({"name": "agent", "image": "i", "command": ["no-such-program"]}))
    await bench.finished()
    end = state(bench.pod())["terminated"]
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert '"no-such-program": executable file not found in $PATH' in end["message"]
    assert end["startedAt"] == "1970-01-01T00:00:00Z"


async def test_c69_too_long_a_variable_looks_like_the_agents_fault(bench: Bench) -> None:
    bench.create(job(sh("true", env=[{"name": "A", "value": "x" * 140_000}])))
    await bench.finished()
    assert ended(bench.pod()) == (1, "Error")
    assert b"argument list too long" in bench.log(bench.pod())


async def test_end_of_the_log_is_kept_in_the_status_of_a_failure(bench: Bench) -> None:
    script = "seq 1 200; exit 4"
    bench.create(job(sh(script, terminationMessagePolicy="FallbackToLogsOnError")))
    await bench.finished()
    assert state(bench.pod())["terminated"]["message"].split() == [str(n) for n in range(121, 201)]


async def test_signal_is_128_and_its_number(bench: Bench) -> None:
    bench.create(job(sh("kill -SEGV $$$$")))
    await bench.finished()
    assert ended(bench.pod()) == (139, "Error")


async def test_failed_init_container_keeps_the_agent_from_starting(bench: Bench) -> None:
    bench.create(job(pod={"initContainers": [sh("exit 2", name="prepare")]}))
    await bench.finished()
    pod = bench.pod()
    assert pod["status"]["phase"] == "Failed"
    assert ended(pod, "prepare") == (2, "Error")
    assert state(pod)["waiting"]["reason"] == "PodInitializing"


async def test_init_containers_run_one_after_the_other_in_one_folder(bench: Bench) -> None:
    inits = [sh("echo 1 >> f", name="one"), sh("echo 2 >> f", name="two")]
    bench.create(job(sh("cat f"), pod={"initContainers": inits}))
    await bench.finished()
    assert bench.log(bench.pod()) == b"1\n2\n"


async def test_sidecar_is_told_to_end_after_the_agent_and_its_code_does_not_matter(
    bench: Bench,
) -> None:
    sidecar = sh("trap 'exit 9' TERM; touch f; sleep 60 & wait", name="proxy")
    agent = sh("until test -e f; do sleep 0.02; done")
    bench.create(job(agent, pod={"initContainers": [sidecar | {"restartPolicy": "Always"}]}))
    await bench.finished()
    assert bench.conditions()[-1][0] == "Complete"
    assert ended(bench.pod(), "proxy") == (9, "Error")


async def test_deaf_sidecar_delays_the_end_by_the_grace(bench: Bench) -> None:
    sidecar = sh("trap '' TERM; touch f; sleep 60", name="proxy")
    agent = sh("until test -e f; do sleep 0.02; done")
    bench.create(job(agent, pod={"initContainers": [sidecar | {"restartPolicy": "Always"}]}))
    await bench.until(lambda: bench.pods() and "terminated" in str(bench.pod()["status"]))
    assert ended(bench.pod()) == (0, "Completed")
    assert bench.pod()["status"]["phase"] == "Running"
    await bench.finished()
    assert bench.pod()["status"]["phase"] == "Succeeded"
    assert ended(bench.pod(), "proxy") == (137, "Error")


async def test_c73_plain_second_container_keeps_the_pod_running(bench: Bench) -> None:
    bench.create(job(sh("exit 3"), sh("sleep 60", name="other")))
    await bench.until(lambda: bench.pods() and "terminated" in str(bench.pod()["status"]))
    assert ended(bench.pod()) == (3, "Error")
    assert bench.pod()["status"]["phase"] == "Running"


async def test_c63_what_a_container_leaves_behind_is_killed(bench: Bench) -> None:
    bench.create(job(sh("sleep 60 & echo $!")))
    await bench.finished()
    await all_dead([int(bench.log(bench.pod()))])


LEAVES = "setsid sh -c 'echo $$$$ > f; exec sleep 60'"
HAS_LEFT = "until test -s f; do sleep 0.02; done"
needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize(
    "start", [f"{LEAVES} >g 2>&1 &", f"HOME=/ {LEAVES} &"], ids=["known by home", "known by log"]
)
async def test_c63_what_leaves_the_session_of_a_container_dies_with_it(
    bench: Bench, start: str
) -> None:
    bench.create(job(sh(f"{start} {HAS_LEFT}; cat f")))
    await bench.finished()
    await all_dead([int(bench.log(bench.pod()))])


@needs_proc
async def test_what_leaves_its_session_lives_as_long_as_its_own_container(bench: Bench) -> None:
    other = sh(f"{LEAVES} >g 2>&1 & {HAS_LEFT}; cat f; sleep 60", name="other")
    bench.create(job(sh(HAS_LEFT), other))
    await bench.until(lambda: bench.pods() and "terminated" in str(bench.pod()["status"]))
    assert ended(bench.pod()) == (0, "Completed")
    await bench.until(lambda: bench.log(bench.pod(), "other"))
    number = int(bench.log(bench.pod(), "other"))
    assert is_alive(number)
    bench.delete()
    await bench.until(bench.is_gone)
    await all_dead([number])


async def test_politely_ended_agent_succeeds(bench: Bench) -> None:
    bench.create(job(sh("trap 'exit 0' TERM; echo started; sleep 60 & wait")))
    bench.cluster.evict(await bench.writes(b"started"))
    await bench.finished()
    assert bench.conditions()[-1][0] == "Complete"
    pod = bench.last_states()[0]
    assert pod["status"]["phase"] == "Succeeded"
    assert "deletionTimestamp" in pod["metadata"]


async def test_pod_deadline_is_a_reason_of_the_pod_whatever_the_exit_code() -> None:
    async with opened(scripts.hangs_politely(), deadline_scale=0.01) as bench:
        bench.create(job(pod={"activeDeadlineSeconds": 10}))
        await bench.finished()
        status = bench.pod()["status"]
        assert (status["phase"], status["reason"]) == ("Failed", "DeadlineExceeded")
        assert ended(bench.pod()) == (0, "Completed")
        assert bench.conditions()[-1] == ("Failed", "BackoffLimitExceeded")


async def test_closing_the_cluster_kills_its_processes() -> None:
    async with opened() as bench:
        bench.create(job(sh("trap '' TERM; echo $$$$; sleep 60")))
        pod = await bench.writes(b"\n")
        number, root = int(bench.log(pod)), bench.cluster.node.root
        assert is_alive(number)
    assert not is_alive(number)
    assert not root.exists()


async def test_closing_the_cluster_while_containers_start_leaves_no_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "numbers"
    for turns in range(4, 40, 4):
        async with opened() as bench:
            for number in range(8):
                agent = sh(f"sleep 60 & echo $! >> {path}; wait")
                bench.create(job(agent, name=f"r-{number}"))
            for _ in range(turns):
                await CLOCK.sleep(0)
            if turns == 36:
                await bench.until(path.exists)
    started = [int(line) for line in path.read_text().split()]
    await all_dead(started)


async def all_dead(numbers: list[int]) -> None:
    """What was killed may take a moment to die."""
    dead = await poll(lambda: not any(map(is_alive, numbers)), CLOCK, seconds=5.0)
    assert dead, [number for number in numbers if is_alive(number)]


def is_alive(number: int) -> bool:
    """Zombies, whose parent has not looked yet, are dead."""
    try:
        os.kill(number, 0)
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


# --- Nodes ---------------------------------------------------------------------------------------


async def test_kubelet_that_was_down_reports_late_and_loses_nothing(bench: Bench) -> None:
    bench.create(job(sh("echo $$$$; sleep 0.2; exit 5"), sh("sleep 0.4", name="other")))
    pod = await bench.writes(b"\n")
    number = int(bench.log(pod))
    bench.cluster.node.down()
    await bench.until(lambda: not is_alive(number))
    assert "running" in state(bench.pod())
    bench.cluster.node.up()
    await bench.finished()
    assert ended(bench.pod()) == (5, "Error")


async def test_kubelet_that_is_down_starts_and_ends_nothing(bench: Bench) -> None:
    bench.create(job(sh("echo $$$$; sleep 60")))
    number = int(bench.log(await bench.writes(b"\n")))
    bench.cluster.node.down()
    bench.create(job(name="r-2"))
    bench.delete()
    await bench.until(lambda: len([p for p in bench.pods() if p["spec"].get("nodeName")]) == 2)
    assert is_alive(number)
    assert bench.job()["metadata"]["name"] == "r-1"
    log = bench.cluster.node.read("default", bench.pods()[0]["metadata"]["name"], "agent")
    assert isinstance(log, ApiStatus)
    assert log.code == 500
    bench.cluster.node.up()
    await bench.finished("r-2")
    await bench.until(lambda: [j["metadata"]["name"] for j in bench.store.list("jobs")] == ["r-2"])
    await all_dead([number])


async def test_lost_node_leaves_its_pod_terminating_for_ever() -> None:
    async with opened(backoff_scale=0.001) as bench:
        bench.create(job(sh("echo $$$$; sleep 60")))
        pod = await bench.writes(b"\n")
        number = int(bench.log(pod))
        await bench.cluster.node.lose()
        await all_dead([number])
        bench.create(job(name="r-2"))
        await bench.until(lambda: bench.events("FailedScheduling"))
        bench.cluster.add_node("node-2")
        await bench.finished("r-2")
        bench.store.delete("jobs", "default", "r-2", propagation="Background")
        await bench.until(lambda: bench.job()["status"].get("terminating") == 1)
        name = pod["metadata"]["name"]
        found = bench.pod()
        assert condition_of(found, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
        assert found["status"]["phase"] == "Running"
        bench.store.delete("pods", "default", name, grace_seconds=0)
        assert bench.pod()["metadata"]["uid"] == pod["metadata"]["uid"]  # held by its finalizer
        bench.delete()
        await bench.until(bench.is_gone)


async def test_pod_of_a_deleted_node_is_replaced_elsewhere() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        await bench.running()
        await bench.cluster.node.lose()
        bench.cluster.add_node("node-2")
        bench.store.delete("nodes", None, "node-1")
        await bench.until(lambda: [p["spec"].get("nodeName") for p in bench.pods()] == ["node-2"])
        (last,) = bench.last_states()
        assert condition_of(last, "DisruptionTarget")["reason"] == "DeletionByPodGC"
        assert last["status"]["phase"] == "Failed"
        assert "running" in state(last)
        assert bench.job()["status"].get("failed", 0) == 0


async def test_node_that_runs_short_evicts_as_infrastructure() -> None:
    async with opened(scripts.hangs()) as bench:
        bench.create(job())
        bench.cluster.node.evict(await bench.running())
        await bench.until(lambda: len(bench.pods()) == 2)
        first = bench.pods()[0]
        assert first["status"]["reason"] == "Evicted"
        assert condition_of(first, "DisruptionTarget")["reason"] == "TerminationByKubelet"
        assert bench.job()["status"].get("failed", 0) == 0


async def test_node_selector_that_nothing_matches_is_unschedulable(bench: Bench) -> None:
    bench.create(job(pod={"nodeSelector": {"gpu": "h200"}}))
    await bench.until(lambda: bench.events("FailedScheduling"))
    found = condition_of(bench.pod(), "PodScheduled")
    assert (found["status"], found["reason"]) == ("False", "Unschedulable")
    assert found["message"].startswith("0/1 nodes are available: ")
    bench.cluster.add_node("node-2", {"gpu": "h200"})
    await bench.finished()
    assert bench.pod()["spec"]["nodeName"] == "node-2"


async def test_evicted_pod_that_was_never_scheduled_is_freed() -> None:
    async with opened(scripts.never_scheduled(), backoff_scale=0.001) as bench:
        bench.create(job())
        await bench.until(bench.pods)
        first = bench.pod()["metadata"]["uid"]
        bench.cluster.evict(bench.pod())
        await bench.until(lambda: first not in {p["metadata"]["uid"] for p in bench.pods()})


# --- Scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "phase"), [(137, "Failed"), (7, "Failed"), (0, "Succeeded")])
async def test_c73_oom_comes_with_the_code_of_the_parent(code: int, phase: str) -> None:
    async with opened(scripts.oom_killed(code)) as bench:
        bench.create(job())
        await bench.finished()
        assert ended(bench.pod()) == (code, "OOMKilled")
        assert bench.pod()["status"]["phase"] == phase


async def test_c56_failing_pull_flips_between_two_reasons() -> None:
    async with opened(scripts.cannot_pull(turn_seconds=0.01)) as bench:
        bench.create(job())

        def reasons() -> list[str]:
            pods = [item for _, resource, item in bench.history if resource == "pods"]
            shown = [state(pod) for pod in pods if pod["status"].get("containerStatuses")]
            return [s["waiting"]["reason"] for s in shown]

        await bench.until(lambda: reasons().count("ErrImagePull") >= 2)
        assert "ImagePullBackOff" in reasons()
        assert bench.pod()["status"]["phase"] == "Pending"
        bench.delete()
        await bench.until(bench.is_gone)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (scripts.has_invalid_image(), "InvalidImageName"),
        (scripts.lacks_configuration(), "CreateContainerConfigError"),
        (scripts.cannot_mount(), "ContainerCreating"),
    ],
)
async def test_waiting_script_shows_its_reason(script: Script, reason: str) -> None:
    async with opened(script) as bench:
        bench.create(job())
        await bench.until(
            lambda: (
                bench.pods()
                and bench.pod()["status"].get("containerStatuses")
                and state(bench.pod())["waiting"]["reason"] == reason
            )
        )
        assert (script.event is not None) == bool(bench.events("FailedMount"))


async def test_eviction_for_own_storage_has_no_disruption() -> None:
    async with opened(scripts.evicted_by_storage()) as bench:
        bench.create(job())
        await bench.finished()
        pod = bench.pod()
        assert pod["status"]["reason"] == "Evicted"
        assert ended(pod) == (137, "ContainerStatusUnknown")
        assert condition_of(pod, "DisruptionTarget") == {}
        assert bench.job()["status"]["failed"] == 1


async def test_c72_a_thousand_scripted_pods_are_cheap() -> None:
    async with opened(scripts.exits(0, log=b"done\n")) as bench:
        for number in range(1000):
            bench.create(job(name=f"r-{number}"))
        await bench.until(
            lambda: bench.job("r-999")["status"].get("succeeded") and bench.all_complete(), 40.0
        )


# --- HTTP ----------------------------------------------------------------------------------------


async def test_job_made_over_http_can_be_watched_and_its_log_followed(bench: Bench) -> None:
    url = bench.cluster.url
    jobs = f"{url}/apis/batch/v1/namespaces/default/jobs"
    async with aiohttp.ClientSession() as session:
        body = job(sh("echo one; sleep 0.1; echo two; exit 1"))
        async with session.post(jobs, json=body) as answer:
            assert answer.status == 201
        pod = await bench.running()
        log = f"{url}/api/v1/namespaces/default/pods/{pod['metadata']['name']}/log"
        async with session.get(log, params={"follow": "true"}) as answer:
            assert await answer.text() == "one\ntwo\n"
        await bench.finished()
        async with session.get(log, params={"tailLines": "1"}) as answer:
            assert await answer.text() == "two\n"
        options = {"propagationPolicy": "Foreground"}
        async with session.delete(f"{jobs}/r-1", json=options) as answer:
            assert answer.status == 200
        await bench.until(bench.is_gone)
        async with session.get(log) as answer:
            assert answer.status == 404


async def test_pods_run_on_while_the_api_server_restarts(bench: Bench) -> None:
    bench.create(job(sh("echo started; sleep 0.2")))
    await bench.writes(b"started")
    url = bench.cluster.url
    await bench.cluster.restart_api_server()
    assert bench.cluster.url == url
    await bench.finished()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
        assert answer.status == 200


async def test_kubeconfig_is_read_by_the_client(bench: Bench, tmp_path: Path) -> None:
    from agl_k8s.api import KubeApi
    from agl_k8s.config import K8sConfig

    path = bench.cluster.write_kubeconfig(tmp_path / "kubeconfig")
    bench.create(job())
    async with KubeApi(K8sConfig(kubeconfig=str(path)), CLOCK) as api:
        listing = await api.list("jobs")
        assert api.namespace == "default"
    assert [item["metadata"]["name"] for item in listing.items] == ["r-1"]
