"""What pods, Jobs and Events mean: one row per sign that a cluster gives."""

from __future__ import annotations

from typing import Any

import pytest

from agl_k8s.times import seconds_of, text_of
from agl_k8s.verdict import (
    Ending,
    attempt_of,
    is_ending,
    judge_job,
    judge_pod,
    why_no_pod,
    why_waiting,
)

CREATED = seconds_of("2026-11-20T10:00:00Z")
SCHEDULED = CREATED + 1
READY = CREATED + 3
STARTED = CREATED + 5
ENDED = CREATED + 100
NOW = CREATED + 102
GRACE = 10

Json = dict[str, Any]


# --- building ------------------------------------------------------------------------------------


def condition(kind: str, status: str = "True", *, at: float = SCHEDULED, **more: str) -> Json:
    return {"type": kind, "status": status, "lastTransitionTime": text_of(at), **more}


def running(name: str = "agent", *, at: float = STARTED) -> Json:
    return {"name": name, "restartCount": 0, "state": {"running": {"startedAt": text_of(at)}}}


def waiting(reason: str, message: str | None = None, *, name: str = "agent") -> Json:
    state = {"reason": reason} | ({"message": message} if message else {})
    return {"name": name, "restartCount": 0, "state": {"waiting": state}}


def ended(
    code: int,
    reason: str | None = None,
    *,
    name: str = "agent",
    at: float | None = ENDED,
    began: float | None = STARTED,
    **more: Any,
) -> Json:
    terminated = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": None if began is None else text_of(began),
        "finishedAt": None if at is None else text_of(at),
        "containerID": f"containerd://{name}",
        **more,
    }
    return {"name": name, "restartCount": 0, "state": {"terminated": terminated}}


def pod(
    phase: str,
    *statuses: Json,
    inits: tuple[Json, ...] = (),
    sidecars: tuple[str, ...] = (),
    conditions: tuple[Json, ...] = (),
    deleted_at: float | None = None,
    grace: int = GRACE,
    node: str | None = "n1",
    **status: Any,
) -> Json:
    """A pod whose deletion was asked for at ``deleted_at``; it is due after its grace."""
    metadata: Json = {
        "name": "r-demo-1a2b3c4d5e-x7k2p",
        "uid": "5f0c",
        "creationTimestamp": text_of(CREATED),
    }
    if deleted_at is not None:
        metadata["deletionTimestamp"] = text_of(deleted_at + grace)
        metadata["deletionGracePeriodSeconds"] = grace
    spec: Json = {
        "terminationGracePeriodSeconds": GRACE,
        "activeDeadlineSeconds": 1800,
        "containers": [{"name": "agent", "image": "img"}],
        "initContainers": [
            {"name": init["name"]}
            | ({"restartPolicy": "Always"} if init["name"] in sidecars else {})
            for init in inits
        ],
    }
    if node is not None:
        spec["nodeName"] = node
    listed = {"initContainerStatuses": list(inits)} if inits else {}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {
            "phase": phase,
            "startTime": text_of(SCHEDULED),
            "conditions": list(conditions) or [condition("PodScheduled")],
            "containerStatuses": list(statuses),
            **listed,
            **status,
        },
    }


def judge(subject: Json, **told: Any) -> Ending | None:
    given: Json = {"asked": None, "is_gone": False, "has_word": False, "now": NOW}
    return judge_pod(subject, **(given | told))


def reason_of(subject: Json, **told: Any) -> str | None:
    """``success``, or why it ended; None: it has not."""
    ending = judge(subject, **told)
    return None if ending is None else ending.reason or "success"


def disrupted(reason: str, message: str = "") -> Json:
    return condition("DisruptionTarget", reason=reason, message=message, at=ENDED - 1)


# --- endings: one row after the other ------------------------------------------------------------

OWN_STORAGE = "Pod ephemeral local storage usage exceeds the total limit of containers 100Mi. "
NO_COMMAND = 'failed to create containerd task: exec: "nosuch": executable file not found in $PATH'

ROWS: dict[str, tuple[Json, Json, str]] = {
    "succeeded": (pod("Succeeded", ended(0)), {}, "success"),
    "succeeded_before_anybody_deleted_it": (
        pod("Succeeded", ended(0), deleted_at=ENDED + 1, grace=0),
        {},
        "success",
    ),
    "succeeded_though_a_child_was_killed_for_memory": (
        pod("Succeeded", ended(0, "OOMKilled")),
        {},
        "success",
    ),
    "succeeded_after_a_foreign_delete": (
        pod("Succeeded", ended(0), deleted_at=ENDED - 1),
        {},
        "infra",
    ),
    "succeeded_after_a_foreign_delete_and_said_so": (
        pod("Succeeded", ended(0), deleted_at=ENDED - 1),
        {"has_word": True},
        "success",
    ),
    "succeeded_in_the_second_of_a_foreign_delete": (
        pod("Succeeded", ended(0), deleted_at=ENDED),
        {},
        "infra",
    ),
    "evicted_by_the_api_and_exits_zero": (
        pod(
            "Succeeded",
            ended(0),
            deleted_at=ENDED - 1,
            conditions=(disrupted("EvictionByEvictionAPI"),),
        ),
        {},
        "infra",
    ),
    "cancelled": (
        pod("Failed", ended(143), deleted_at=ENDED - 1),
        {"asked": "cancelled"},
        "cancelled",
    ),
    "cancelled_and_deaf": (
        pod("Failed", ended(137), deleted_at=ENDED - GRACE),
        {"asked": "cancelled"},
        "cancelled",
    ),
    "cancelled_and_exits_zero": (
        pod("Succeeded", ended(0), deleted_at=ENDED - 1),
        {"asked": "cancelled"},
        "cancelled",
    ),
    "cancelled_and_exits_zero_with_a_word": (
        pod("Succeeded", ended(0), deleted_at=ENDED - 1),
        {"asked": "cancelled", "has_word": True},
        "cancelled",
    ),
    "cancelled_after_it_had_succeeded": (
        pod("Succeeded", ended(0), deleted_at=ENDED + 1, grace=0),
        {"asked": "cancelled"},
        "success",
    ),
    "cancelled_after_it_had_failed": (
        pod("Failed", ended(3), deleted_at=ENDED + 1, grace=0),
        {"asked": "cancelled"},
        "agent",
    ),
    "cancelled_while_it_is_evicted": (
        pod(
            "Failed",
            ended(137),
            deleted_at=ENDED - 1,
            conditions=(disrupted("EvictionByEvictionAPI"),),
        ),
        {"asked": "cancelled"},
        "cancelled",
    ),
    "cancelled_before_it_started": (
        pod("Pending", deleted_at=NOW - 1, node=None),
        {"asked": "cancelled", "is_gone": True},
        "cancelled",
    ),
    "cancelled_and_its_last_states_went_unseen": (
        pod("Running", running()),
        {"asked": "cancelled", "is_gone": True},
        "cancelled",
    ),
    "timed_out_by_us": (
        pod("Failed", ended(143), deleted_at=ENDED - 1),
        {"asked": "timeout"},
        "timeout",
    ),
    "timed_out_by_us_and_exits_zero": (
        pod("Succeeded", ended(0), deleted_at=ENDED),
        {"asked": "timeout"},
        "timeout",
    ),
    "timed_out_by_us_after_it_had_succeeded": (
        pod("Succeeded", ended(0), deleted_at=ENDED + 1, grace=0),
        {"asked": "timeout"},
        "success",
    ),
    **{
        f"disrupted_{cause}": (
            pod("Failed", ended(137), conditions=(disrupted(cause),)),
            {},
            "infra",
        )
        for cause in (
            "EvictionByEvictionAPI",
            "PreemptionByScheduler",
            "DeletionByTaintManager",
            "TerminationByKubelet",
        )
    },
    "disrupted_and_the_node_object_is_gone": (
        pod("Failed", running(), conditions=(disrupted("DeletionByPodGC"),), deleted_at=NOW - 1),
        {},
        "infra",
    ),
    "disruption_that_was_called_off": (
        pod("Failed", ended(3), conditions=(condition("DisruptionTarget", "False"),)),
        {},
        "agent",
    ),
    "disrupted_by_the_kubelet_which_says_evicted": (
        pod(
            "Failed",
            ended(137),
            conditions=(disrupted("TerminationByKubelet"),),
            reason="Evicted",
        ),
        {},
        "infra",
    ),
    "deadline_of_the_pod": (pod("Failed", ended(137), reason="DeadlineExceeded"), {}, "timeout"),
    "deadline_of_the_pod_and_exits_zero": (
        pod("Failed", ended(0), reason="DeadlineExceeded"),
        {},
        "timeout",
    ),
    "evicted_over_its_own_storage": (
        pod(
            "Failed",
            ended(137, "ContainerStatusUnknown", at=None, began=None),
            reason="Evicted",
            message=OWN_STORAGE,
        ),
        {},
        "agent",
    ),
    "refused_by_the_kubelet": (
        pod("Failed", reason="OutOfcpu", message="Pod was rejected: not enough cpu"),
        {},
        "infra",
    ),
    "ended_by_a_shutdown_and_exits_zero": (
        pod("Failed", ended(0), reason="Terminated", message="imminent node shutdown"),
        {},
        "infra",
    ),
    "deleted_by_others": (pod("Failed", ended(143), deleted_at=ENDED - 1), {}, "infra"),
    "failed_before_others_deleted_it": (
        pod("Failed", ended(3), deleted_at=ENDED + 1, grace=0),
        {},
        "agent",
    ),
    "deleted_by_us_before_a_restart_for_its_timeout": (
        pod("Failed", ended(143), deleted_at=STARTED + 90),
        {"timeout_seconds": 90.0},
        "timeout",
    ),
    "deleted_by_us_before_a_restart_and_exits_zero": (
        pod("Succeeded", ended(0), deleted_at=STARTED + 90),
        {"timeout_seconds": 90.0},
        "timeout",
    ),
    "deleted_by_others_before_its_timeout": (
        pod("Failed", ended(143), deleted_at=STARTED + 89),
        {"timeout_seconds": 90.0},
        "infra",
    ),
    "memory": (pod("Failed", ended(137, "OOMKilled")), {}, "oom"),
    "memory_of_a_child_with_the_parents_code": (pod("Failed", ended(7, "OOMKilled")), {}, "oom"),
    "memory_in_the_last_state": (
        pod(
            "Failed",
            {
                "name": "agent",
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": ended(137, "OOMKilled")["state"],
            },
        ),
        {},
        "oom",
    ),
    "no_such_command": (
        pod("Failed", ended(128, "StartError", began=0.0, message=NO_COMMAND)),
        {},
        "config",
    ),
    "exit_code_128_of_its_own": (pod("Failed", ended(128)), {}, "agent"),
    "init_container_failed": (
        pod(
            "Failed",
            waiting("PodInitializing"),
            inits=(ended(0, name="first"), ended(2, name="fetch")),
        ),
        {},
        "config",
    ),
    "sidecar_failed": (
        pod(
            "Succeeded",
            ended(0),
            inits=(ended(137, name="proxy", at=ENDED + GRACE),),
            sidecars=("proxy",),
        ),
        {},
        "success",
    ),
    "lost_before_its_start_beside_a_sidecar_that_failed": (
        pod(
            "Pending",
            waiting("PodInitializing"),
            inits=(ended(1, name="proxy"),),
            sidecars=("proxy",),
        ),
        {"is_gone": True},
        "infra",
    ),
    "second_container_failed": (pod("Failed", ended(0), ended(1, name="logs")), {}, "success"),
    "lost_by_the_runtime": (
        pod("Failed", ended(137, "ContainerStatusUnknown", at=None, began=None)),
        {},
        "infra",
    ),
    "failed_without_a_word_of_its_containers": (pod("Failed"), {}, "infra"),
    "killed_from_outside": (pod("Failed", ended(137)), {}, "agent"),
    "crashed": (pod("Failed", ended(139)), {}, "agent"),
    "exit_code": (pod("Failed", ended(3)), {}, "agent"),
    "gone_with_its_exit_code": (pod("Running", ended(3)), {"is_gone": True}, "agent"),
    "gone_with_its_success": (pod("Running", ended(0)), {"is_gone": True}, "success"),
    "gone_without_a_word": (pod("Running", running()), {"is_gone": True}, "infra"),
    "gone_after_a_foreign_delete": (
        pod("Running", running(), deleted_at=NOW - 5),
        {"is_gone": True},
        "infra",
    ),
}


@pytest.mark.parametrize(("subject", "told", "expected"), ROWS.values(), ids=ROWS.keys())
def test_c60_pod_ends_for_its_reason(subject: Json, told: Json, expected: str) -> None:
    ending = judge(subject, **told)
    assert ending is not None
    assert (ending.reason or "success") == expected
    phases = {"success": "succeeded", "cancelled": "cancelled"}
    assert ending.phase == phases.get(expected, "failed")
    assert ending.message


def test_c60_memory_and_eviction_with_the_same_exit_code_are_told_apart() -> None:
    memory = judge(pod("Failed", ended(137, "OOMKilled")))
    taken = judge(pod("Failed", ended(137), conditions=(disrupted("PreemptionByScheduler"),)))
    assert memory is not None
    assert taken is not None
    assert memory.exit_code == taken.exit_code == 137
    assert (memory.reason, taken.reason) == ("oom", "infra")
    assert "memory" in memory.message
    assert "PreemptionByScheduler" in taken.message


@pytest.mark.parametrize(
    "subject",
    [
        pod("Pending", waiting("ContainerCreating")),
        pod("Running", running()),
        pod("Running", running(), deleted_at=NOW - 1),
        pod("Running", running(), deleted_at=NOW - 1, conditions=(disrupted("DeletionByPodGC"),)),
        pod("Unknown", running(), reason="NodeLost"),
        {"metadata": {"name": "new", "uid": "1"}, "spec": {}},
    ],
    ids=["pending", "running", "terminating", "disrupted", "unknown", "bare"],
)
@pytest.mark.parametrize("asked", [None, "cancelled", "timeout"])
def test_pod_that_may_still_run_has_not_ended(subject: Json, asked: str | None) -> None:
    assert judge(subject, asked=asked) is None


# --- C73: the phase lags -------------------------------------------------------------------------


def test_c73_memory_kill_ends_the_attempt_beside_a_living_sidecar() -> None:
    subject = pod("Running", ended(137, "OOMKilled", at=NOW), running("proxy"))
    assert reason_of(subject) == "oom"
    assert is_ending(subject)


@pytest.mark.parametrize(("code", "expected"), [(0, "success"), (3, "agent")])
def test_c73_containers_word_counts_when_the_phase_does_not_follow(
    code: int, expected: str
) -> None:
    subject = pod("Running", ended(code), running("proxy"))
    assert reason_of(subject, now=ENDED + GRACE + 5) is None
    assert reason_of(subject, now=ENDED + GRACE + 6) == expected


@pytest.mark.parametrize("code", [0, 137])
def test_end_is_not_told_before_the_phase_can_say_that_it_was_the_deadlines(code: int) -> None:
    assert reason_of(pod("Running", ended(code))) is None
    assert is_ending(pod("Running", ended(code)))
    subject = pod("Failed", ended(code), reason="DeadlineExceeded")
    assert reason_of(subject) == "timeout"
    assert not is_ending(subject)


def test_child_killed_for_memory_may_still_be_a_success() -> None:
    assert reason_of(pod("Running", ended(0, "OOMKilled"))) is None
    assert reason_of(pod("Running", ended(0, "OOMKilled")), now=ENDED + 60) == "oom"


# --- what an ending says -------------------------------------------------------------------------


def test_ending_has_the_containers_time_and_code() -> None:
    ending = judge(pod("Failed", ended(3)))
    assert ending is not None
    assert (ending.exit_code, ending.finished_at) == (3, ENDED)


@pytest.mark.parametrize(
    ("deleted_at", "finished_at"),
    [(NOW - 50, NOW - 50 + GRACE), (NOW - 5, NOW), (None, NOW)],
    ids=["when_it_was_due", "not_in_the_future", "now"],
)
def test_end_of_a_pod_without_a_time_is_known_roughly(
    deleted_at: float | None, finished_at: float
) -> None:
    ending = judge(pod("Running", running(), deleted_at=deleted_at), is_gone=True)
    assert ending is not None
    assert (ending.exit_code, ending.finished_at) == (None, finished_at)


def test_failed_init_container_gives_the_time() -> None:
    init = ended(2, name="fetch", at=ENDED - 40)
    ending = judge(pod("Failed", waiting("PodInitializing"), inits=(init,)))
    assert ending is not None
    assert (ending.exit_code, ending.finished_at) == (None, ENDED - 40)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("exit_code", ["'agent'", "code 3", "node n1"]),
        ("killed_from_outside", ["137 (SIGKILL)"]),
        ("crashed", ["139 (SIGSEGV)"]),
        ("memory", ["memory", "'agent'", "n1"]),
        ("evicted_over_its_own_storage", ["evicted", "ephemeral local storage", "n1"]),
        ("refused_by_the_kubelet", ["OutOfcpu", "not enough cpu"]),
        ("no_such_command", ["'agent'", "nosuch", "correct its command"]),
        ("init_container_failed", ["'fetch'", "code 2", "correct its command"]),
        ("deadline_of_the_pod", ["1800 seconds"]),
        ("deleted_by_us_before_a_restart_for_its_timeout", ["longer than 90 seconds"]),
        ("deleted_by_others", ["deleted by someone else", "143 (SIGTERM)"]),
        ("gone_without_a_word", ["lost", "n1"]),
        ("cancelled", ["cancelled", "SIGTERM"]),
    ],
)
def test_message_names_what_a_person_needs(row: str, words: list[str]) -> None:
    subject, told, _ = ROWS[row]
    ending = judge(subject, **told)
    assert ending is not None
    assert [word for word in words if word not in ending.message] == []


def test_message_is_one_line_of_bearable_length_without_the_log() -> None:
    secret = "printed by the agent\nagl1.k1.secret"
    plain = judge(pod("Failed", ended(3, message=secret)))
    long = judge(pod("Failed", ended(128, "StartError", message="bad\n" * 1000)))
    assert plain is not None
    assert long is not None
    assert "agl1" not in plain.message
    assert "\n" not in long.message
    assert len(long.message) < 500


# --- attempts ------------------------------------------------------------------------------------


def test_attempt_exists_from_the_containers_start() -> None:
    assert attempt_of(pod("Pending", waiting("ContainerCreating"))) is None
    assert attempt_of(pod("Pending", inits=(running("fetch"),))) is None
    for subject in (pod("Running", running()), pod("Failed", ended(3))):
        attempt = attempt_of(subject)
        assert attempt is not None
        assert (attempt.attempt_id, attempt.node, attempt.phase) == ("5f0c", "n1", "running")
        assert attempt.started_at == STARTED


def test_container_that_could_not_start_did_not_start_in_1970() -> None:
    attempt = attempt_of(pod("Failed", ended(128, "StartError", began=0.0)))
    assert attempt is not None
    assert attempt.started_at is None


# --- Jobs ----------------------------------------------------------------------------------------


def job(*conditions: Json, **status: Any) -> Json:
    return {"metadata": {"name": "r"}, "status": {"conditions": list(conditions), **status}}


def test_c62_failed_pods_of_a_job_that_goes_on_are_no_verdict() -> None:
    assert judge_job(job(active=1, failed=1)) is None
    assert judge_job(job(active=0, failed=1)) is None  # between two pods
    assert judge_job(job(condition("Suspended", reason="JobSuspended"))) is None
    assert judge_job(job(condition("Failed", "False", reason="BackoffLimitExceeded"))) is None
    assert judge_job({"metadata": {"name": "new"}}) is None


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([("SuccessCriteriaMet", "CompletionsReached")], ("complete", "CompletionsReached", False)),
        (
            [("SuccessCriteriaMet", "CompletionsReached"), ("Complete", "CompletionsReached")],
            ("complete", "CompletionsReached", True),
        ),
        ([("FailureTarget", "PodFailurePolicy")], ("failed", "PodFailurePolicy", False)),
        (
            [("FailureTarget", "BackoffLimitExceeded"), ("Failed", "BackoffLimitExceeded")],
            ("failed", "BackoffLimitExceeded", True),
        ),
        ([("FailureTarget", "DeadlineExceeded")], ("failed", "DeadlineExceeded", False)),
    ],
)
def test_c62_job_is_judged_by_its_conditions(
    conditions: list[tuple[str, str]], expected: tuple[str, str, bool]
) -> None:
    # The counters are behind.
    subject = job(*(condition(kind, reason=reason) for kind, reason in conditions), active=1)
    verdict = judge_job(subject)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason, verdict.is_final) == expected


def test_jobs_message_is_kept() -> None:
    message = "Container agent for pod ns/r-x failed with exit code 78 matching FailJob rule at 1"
    verdict = judge_job(job(condition("Failed", reason="PodFailurePolicy", message=message)))
    assert verdict is not None
    assert verdict.message == message


# --- waiting -------------------------------------------------------------------------------------

SET_UP = (
    condition("PodScheduled", at=SCHEDULED),
    condition("PodReadyToStartContainers", at=READY),
    condition("Initialized", at=SCHEDULED),
)


@pytest.mark.parametrize(
    ("reason", "code", "is_config"),
    [
        ("ErrImagePull", "ImagePullBackOff", True),
        ("ImagePullBackOff", "ImagePullBackOff", True),
        ("ErrImageNeverPull", "ErrImageNeverPull", True),
        ("InvalidImageName", "InvalidImageName", True),
        ("CreateContainerConfigError", "CreateContainerConfigError", True),
        ("RegistryUnavailable", "RegistryUnavailable", False),
        ("ContainerCreating", "ContainerCreating", False),
    ],
)
def test_c56_reason_for_waiting_is_told(reason: str, code: str, is_config: bool) -> None:
    subject = pod("Pending", waiting(reason, 'image "img" not found'), conditions=SET_UP)
    found = why_waiting(subject, NOW)
    assert found is not None
    assert (found.code, found.is_config, found.since) == (code, is_config, READY)
    if code != "ContainerCreating":
        assert "'agent'" in found.message
        assert 'image "img" not found' in found.message
    if is_config:
        assert "; " in found.message  # and what to do


def test_c56_flipping_pull_is_one_wait() -> None:
    pulls = [
        why_waiting(pod("Pending", waiting(reason), conditions=SET_UP), NOW)
        for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull")
    ]
    assert len({(found.code, found.since) for found in pulls if found is not None}) == 1
    assert None not in pulls


def test_unschedulable_pod_waits_for_room() -> None:
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    lacking = condition("PodScheduled", "False", reason="Unschedulable", message=message)
    found = why_waiting(pod("Pending", node=None, conditions=(lacking,)), NOW)
    assert found is not None
    assert (found.code, found.is_config, found.since) == ("Unschedulable", False, SCHEDULED)
    assert "Insufficient nvidia.com/gpu" in found.message


def test_pod_that_nobody_has_looked_at_waits_since_its_creation() -> None:
    subject = {"metadata": {"uid": "1", "creationTimestamp": text_of(CREATED)}, "spec": {}}
    found = why_waiting(subject, NOW)
    assert found is not None
    assert (found.code, found.is_config, found.since) == ("Unscheduled", False, CREATED)


def test_scheduled_pod_without_statuses_waits_for_its_node() -> None:
    found = why_waiting(pod("Pending"), NOW)
    assert found is not None
    assert (found.code, found.since) == ("ContainerCreating", SCHEDULED)
    assert "n1" in found.message


def test_wait_of_the_agent_begins_after_its_init_containers() -> None:
    subject = pod(
        "Pending",
        waiting("ImagePullBackOff"),
        inits=(ended(0, name="fetch", at=CREATED + 80),),
        conditions=(*SET_UP[:2], condition("Initialized", at=CREATED + 80)),
    )
    found = why_waiting(subject, NOW)
    assert found is not None
    assert found.since == CREATED + 80


def test_image_of_an_init_container_holds_up_the_start() -> None:
    subject = pod(
        "Pending",
        waiting("PodInitializing"),
        inits=(waiting("ErrImagePull", "no such image", name="fetch"),),
        conditions=(*SET_UP[:2], condition("Initialized", "False")),
    )
    found = why_waiting(subject, NOW)
    assert found is not None
    assert (found.code, found.is_config) == ("ImagePullBackOff", True)
    assert "'fetch'" in found.message


def test_working_init_container_is_no_fault_of_the_settings() -> None:
    subject = pod("Pending", waiting("PodInitializing"), inits=(running("fetch", at=STARTED),))
    found = why_waiting(subject, NOW)
    assert found is not None
    assert (found.code, found.is_config, found.since) == ("PodInitializing", False, STARTED)
    assert "'fetch'" in found.message


@pytest.mark.parametrize(
    "subject",
    [
        pod("Running", running()),
        pod("Running", running(), waiting("ImagePullBackOff", name="logs")),
        pod("Running", running(), inits=(waiting("CrashLoopBackOff", name="proxy"),)),
        pod("Failed", ended(3)),
        pod("Failed", waiting("PodInitializing"), inits=(ended(2, name="fetch"),)),
        pod("Pending", waiting("ImagePullBackOff"), deleted_at=NOW),
    ],
    ids=["running", "other_image", "sidecar", "ended", "init_failed", "deleted"],
)
def test_pod_that_started_or_is_over_does_not_wait(subject: Json) -> None:
    assert why_waiting(subject, NOW) is None


# --- no pod --------------------------------------------------------------------------------------


def refusal(text: str, *, at: float = NOW, **more: Any) -> Json:
    return {
        "reason": "FailedCreate",
        "type": "Warning",
        "message": f"Error creating: {text}",
        "lastTimestamp": text_of(at),
        **more,
    }


POD = 'pods "r-demo-timeout-1a2b3c4d5e-x7k2p" is forbidden: '


@pytest.mark.parametrize(
    "text",
    [
        POD + "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2",
        POD + "status unknown for quota: q, resources: pods",
    ],
)
def test_c67_quota_is_waited_for(text: str) -> None:
    found = why_no_pod([refusal(text)])
    assert found is not None
    assert found.is_quota
    assert "quota: q" in found.message


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("failed quota: q: must specify limits.cpu for: agent", "set the resources"),
        ("maximum cpu usage per Container is 1, but limit is 4", "LimitRange"),
        (
            'error looking up service account ns/ghost: serviceaccount "ghost" not found',
            "service_account",
        ),
        ("no PriorityClass with name ghost was found", "priority_class"),
        ('violates PodSecurity "restricted:latest": runAsNonRoot != true', "security context"),
        ("denied by a policy of this cluster", ""),
    ],
)
def test_c67_other_refusals_need_a_person(text: str, advice: str) -> None:
    found = why_no_pod([refusal(POD + text)])
    assert found is not None
    assert not found.is_quota
    assert text in found.message
    assert advice in found.message
    assert not found.message.startswith("Error creating")


def test_latest_refusal_counts() -> None:
    quota = refusal(POD + "exceeded quota: q", at=NOW - 20)
    account = refusal(POD + "error looking up service account ns/ghost", at=NOW)
    for events in ([quota, account], [account, quota]):
        found = why_no_pod(events)
        assert found is not None
        assert not found.is_quota
    modern = refusal(POD + "exceeded quota: q") | {
        "lastTimestamp": None,
        "eventTime": "2026-11-20T11:00:00.123456Z",
    }
    found = why_no_pod([account, modern])
    assert found is not None
    assert found.is_quota


@pytest.mark.parametrize(
    "events",
    [
        [],
        [refusal("whatever") | {"reason": "SuccessfulCreate"}],
        [refusal('Internal error occurred: failed calling webhook "w": connection refused')],
        [refusal("Timeout: request did not complete within requested timeout")],
    ],
    ids=["none", "other_event", "webhook", "timeout"],
)
def test_trouble_that_may_pass_is_not_blamed_on_the_job(events: list[Json]) -> None:
    assert why_no_pod(events) is None
