"""Every status change that a rollout may and may not go through."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import attrs
import pytest

from agl_core.errors import (
    IllegalTransition,
    Invalid,
    RolloutEnded,
    StaleAttempt,
    VersionConflict,
)
from agl_core.records import (
    TERMINAL,
    Attempt,
    Group,
    Rollout,
    RolloutConfig,
    RolloutError,
    RolloutPatch,
    RolloutSpec,
    Status,
)
from agl_core.transitions import (
    NEXT,
    apply_patch,
    is_same_spec,
    new_rollout,
    request_cancel,
    see_attempt,
)

STATUSES: tuple[Status, ...] = get_args(Status)
LEGAL = {
    ("queuing", "running"),
    ("queuing", "failed"),
    ("queuing", "cancelled"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "cancelled"),
}


def rollout(status: Status = "queuing", **fields: Any) -> Rollout:
    return Rollout(rollout_id="r", status=status, version=3, created_at=10.0, **fields)


def running(*attempts: Attempt, **fields: Any) -> Rollout:
    return rollout("running", attempts=attempts, started_at=11.0, **fields)


def patch(current: Rollout, **fields: Any) -> Rollout:
    return apply_patch(current, RolloutPatch(**fields), 20.0)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(STATUSES, 2)])
def test_only_the_legal_status_changes_pass(before: Status, after: Status) -> None:
    current = rollout(before)
    if (before, after) in LEGAL:
        assert patch(current, status=after).status == after
    else:
        with pytest.raises(IllegalTransition) as refused:
            patch(current, status=after)
        assert refused.value.details == {"status": before}
        for allowed in NEXT[before]:
            assert allowed in (refused.value.hint or "")


@pytest.mark.parametrize("status", STATUSES)
def test_saying_the_present_status_again_changes_nothing(status: Status) -> None:
    current = rollout(status)
    assert patch(current, status=status) == current


@pytest.mark.parametrize("status", STATUSES)
def test_an_empty_patch_changes_nothing(status: Status) -> None:
    current = rollout(status)
    assert patch(current) == current


def test_the_start_and_the_end_are_timed() -> None:
    started = patch(rollout(), status="running")
    assert (started.started_at, started.finished_at) == (20.0, None)
    ended = apply_patch(started, RolloutPatch(status="failed"), 30.0)
    assert (ended.started_at, ended.finished_at) == (20.0, 30.0)


def test_a_reported_attempt_means_that_the_rollout_runs_since_it_started() -> None:
    after = patch(rollout(), attempts=(Attempt(attempt_id="a", started_at=15.0),))
    assert (after.status, after.started_at) == ("running", 15.0)


def test_start_and_end_may_be_reported_in_one_patch() -> None:
    attempt = Attempt(attempt_id="a", phase="succeeded", started_at=15.0, finished_at=19.0)
    after = patch(rollout(), attempts=(attempt,), status="succeeded")
    assert (after.status, after.succeeded_attempt_id) == ("succeeded", "a")
    assert after.attempts == (attempt,)


def test_attempts_are_merged_by_id_and_keep_their_order() -> None:
    current = running(Attempt(attempt_id="a", node="n1"), Attempt(attempt_id="b"))
    after = patch(
        current,
        attempts=(
            Attempt(attempt_id="c"),
            Attempt(attempt_id="a", phase="failed", reason="oom", exit_code=137),
        ),
    )
    assert [attempt.attempt_id for attempt in after.attempts] == ["a", "b", "c"]
    merged = after.attempts[0]
    assert (merged.node, merged.phase, merged.reason, merged.exit_code) == (
        "n1",
        "failed",
        "oom",
        137,
    )


def test_an_ended_attempt_does_not_run_again() -> None:
    current = running(Attempt(attempt_id="a", phase="failed"))
    with pytest.raises(IllegalTransition, match="'a' has ended as failed"):
        patch(current, attempts=(Attempt(attempt_id="a", phase="running"),))


def test_success_without_an_id_means_the_latest_attempt() -> None:
    current = running(Attempt(attempt_id="a", phase="failed"), Attempt(attempt_id="b"))
    after = patch(current, status="succeeded")
    assert after.succeeded_attempt_id == "b"
    assert after.default_attempt_id == "b"


def test_success_of_an_attempt_that_nobody_reported_is_refused() -> None:
    with pytest.raises(Invalid, match="'nobody' is no attempt"):
        patch(running(Attempt(attempt_id="a")), status="succeeded", succeeded_attempt_id="nobody")


@pytest.mark.parametrize("status", [None, "failed", "cancelled"])
def test_a_succeeded_attempt_goes_with_success_alone(status: Status | None) -> None:
    with pytest.raises(Invalid, match="goes with status 'succeeded' alone"):
        patch(running(Attempt(attempt_id="a")), status=status, succeeded_attempt_id="a")


def test_a_failure_takes_the_reason_of_the_last_attempt() -> None:
    current = running(
        Attempt(attempt_id="a", phase="failed", reason="infra"),
        Attempt(attempt_id="b", phase="failed", reason="oom"),
    )
    assert patch(current, status="failed").error == RolloutError(code="oom")


def test_a_failure_without_any_reason_is_unknown() -> None:
    assert patch(rollout(), status="failed").error == RolloutError(code="unknown")


def test_a_failure_that_is_explained_keeps_its_explanation() -> None:
    told = RolloutError(code="config", message="no such image")
    assert patch(rollout(), status="failed", error=told).error == told


@pytest.mark.parametrize(
    ("status", "phases", "reason"),
    [
        ("succeeded", ["cancelled", "succeeded"], None),
        ("failed", ["failed", "failed"], "timeout"),
        ("cancelled", ["cancelled", "cancelled"], "cancelled"),
    ],
)
def test_the_end_of_a_rollout_ends_its_attempts(
    status: Status, phases: list[str], reason: str | None
) -> None:
    current = running(Attempt(attempt_id="a"), Attempt(attempt_id="b"))
    error = RolloutError(code="timeout") if status == "failed" else None
    after = patch(current, status=status, error=error)
    assert [attempt.phase for attempt in after.attempts] == phases
    assert after.attempts[1].reason == reason
    assert {attempt.finished_at for attempt in after.attempts} == {20.0}


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_terminal_rollout_takes_no_new_running_attempt(status: Status) -> None:
    with pytest.raises(RolloutEnded):
        patch(rollout(status), attempts=(Attempt(attempt_id="late"),))


def test_a_late_report_on_a_terminal_rollout_completes_its_attempt_but_changes_no_end() -> None:
    current = attrs.evolve(
        running(Attempt(attempt_id="a", phase="cancelled", reason="cancelled")), status="cancelled"
    )
    told = Attempt(attempt_id="a", phase="cancelled", exit_code=143)
    assert patch(current, attempts=(told,)).attempts[0].exit_code == 143
    other_end = Attempt(attempt_id="a", phase="succeeded")
    assert patch(current, attempts=(other_end,)) == current


def test_a_terminal_rollout_keeps_its_succeeded_attempt() -> None:
    current = patch(running(Attempt(attempt_id="a"), Attempt(attempt_id="b")), status="succeeded")
    with pytest.raises(RolloutEnded):
        patch(current, succeeded_attempt_id="a")
    assert patch(current, status="succeeded", succeeded_attempt_id="b") == current


def test_a_grade_may_come_after_the_end() -> None:
    ended = patch(running(grade="pending"), status="succeeded")
    assert not ended.is_complete
    graded = patch(ended, grade="done")
    assert graded.grade == "done"
    assert graded.is_complete


def test_a_stale_version_is_refused_before_anything_else() -> None:
    with pytest.raises(VersionConflict) as refused:
        patch(rollout("failed"), status="running", expected_version=2)
    assert refused.value.details == {"version": 3}
    assert patch(rollout(), status="running", expected_version=3).status == "running"


def test_cancelling_what_has_no_attempt_ends_it_at_once() -> None:
    after = request_cancel(rollout(), 20.0)
    assert (after.status, after.cancel_requested, after.finished_at) == ("cancelled", True, 20.0)


def test_cancelling_what_runs_is_a_request() -> None:
    after = request_cancel(running(Attempt(attempt_id="a")), 20.0)
    assert (after.status, after.cancel_requested) == ("running", True)
    assert request_cancel(after, 21.0) == after


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_what_has_ended_cannot_be_cancelled(status: Status) -> None:
    with pytest.raises(RolloutEnded, match=f"has ended as {status}"):
        request_cancel(rollout(status), 20.0)


def test_the_first_sign_of_an_attempt_creates_it_and_starts_the_rollout() -> None:
    after = see_attempt(rollout(), "pod-1", 20.0)
    assert (after.status, after.started_at) == ("running", 20.0)
    assert after.attempts == (Attempt(attempt_id="pod-1", started_at=20.0),)
    assert see_attempt(after, "pod-1", 21.0) == after


def test_a_retry_that_makes_itself_heard_joins_the_attempts() -> None:
    current = running(Attempt(attempt_id="a", phase="failed"))
    after = see_attempt(current, "b", 20.0)
    assert [attempt.attempt_id for attempt in after.attempts] == ["a", "b"]
    assert after.started_at == 11.0


def test_an_ended_attempt_is_stale_and_an_ended_rollout_takes_none() -> None:
    with pytest.raises(StaleAttempt, match="has ended as failed"):
        see_attempt(running(Attempt(attempt_id="a", phase="failed")), "a", 20.0)
    with pytest.raises(RolloutEnded):
        see_attempt(rollout("succeeded"), "b", 20.0)


def test_a_spec_becomes_a_rollout_with_all_that_was_asked_for() -> None:
    spec = RolloutSpec(
        input={"q": 1},
        mode="val",
        group=Group(id="g", size=2, index=1),
        replaces="old",
        config=RolloutConfig(image="i"),
        resources_id="res",
        metadata={"k": "v"},
        priority=5,
        grade="pending",
    )
    made = new_rollout(spec, "r", 12.0)
    for field in attrs.fields(RolloutSpec):
        if field.name != "rollout_id":
            assert getattr(made, field.name) == getattr(spec, field.name), field.name
    assert (made.rollout_id, made.status, made.created_at) == ("r", "queuing", 12.0)


@pytest.mark.parametrize(
    "change",
    [
        {"input": 2},
        {"mode": "val"},
        {"group": Group(id="g", size=1, index=0)},
        {"replaces": "x"},
        {"config": RolloutConfig(image="i")},
        {"resources_id": "x"},
        {"metadata": {"k": 1}},
        {"priority": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_specs_that_differ_anywhere_are_not_the_same(change: dict[str, Any]) -> None:
    one = new_rollout(RolloutSpec(input=1), "r", 10.0)
    assert not is_same_spec(one, attrs.evolve(one, **change))


def test_a_spec_stays_the_same_whatever_becomes_of_the_rollout() -> None:
    one = new_rollout(RolloutSpec(input=1), "r", 10.0)
    ended = patch(see_attempt(one, "a", 11.0), status="succeeded", grade="done")
    assert is_same_spec(one, attrs.evolve(ended, version=9, created_at=99.0))
