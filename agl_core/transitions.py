"""The changes that a rollout may go through: pure functions from one state to the next.

Every store applies them inside its own transaction (``Store.change_rollout``), so all stores agree.
"""

from __future__ import annotations

from typing import Any, get_args

import attrs

from agl_core.errors import (
    IllegalTransition,
    Invalid,
    RolloutEnded,
    StaleAttempt,
    VersionConflict,
)
from agl_core.records import (
    Attempt,
    Phase,
    Reason,
    Rollout,
    RolloutError,
    RolloutPatch,
    RolloutSpec,
    Status,
)

NEXT: dict[Status, frozenset[Status]] = {
    "queuing": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

_SPEC_FIELDS = (
    "input",
    "mode",
    "group",
    "replaces",
    "config",
    "resources_id",
    "metadata",
    "priority",
)


def new_rollout(spec: RolloutSpec, rollout_id: str, now: float) -> Rollout:
    """The record that an accepted spec becomes."""
    return Rollout(
        rollout_id=rollout_id,
        created_at=now,
        grade=spec.grade,
        **{name: getattr(spec, name) for name in _SPEC_FIELDS},
    )


def is_same_spec(one: Rollout, other: Rollout) -> bool:
    """Whether two rollouts were asked for in the same way, whatever became of them since."""
    return all(getattr(one, name) == getattr(other, name) for name in _SPEC_FIELDS)


def apply_patch(rollout: Rollout, patch: RolloutPatch, now: float) -> Rollout:
    """Apply a PATCH.

    A patch that reports attempts of a queuing rollout means that it runs, so a controller may
    report start and end in one. Saying again what already holds changes nothing and is no error.

    Raises:
        VersionConflict: ``expected_version`` is not the present one.
        IllegalTransition: The status, or an attempt's phase, does not go there.
        RolloutEnded: A running attempt or another succeeded attempt for a terminal rollout.
        Invalid: ``succeeded_attempt_id`` names no attempt, or goes without success.
    """
    if patch.expected_version is not None and patch.expected_version != rollout.version:
        raise VersionConflict(
            f"rollout {rollout.rollout_id!r} is at version {rollout.version}, "
            f"not {patch.expected_version}",
            hint="read it again and decide anew",
            details={"version": rollout.version},
        )
    after = attrs.evolve(rollout, attempts=_merge_attempts(rollout, patch.attempts))
    if patch.grade is not None:
        after = attrs.evolve(after, grade=patch.grade)
    if rollout.is_terminal:
        return _patch_terminal(rollout, after, patch)
    if patch.attempts and after.status == "queuing":
        after = _start(after, now, first=patch.attempts[0].started_at)
    status = patch.status
    if patch.succeeded_attempt_id is not None and status != "succeeded":
        raise Invalid("'succeeded_attempt_id' goes with status 'succeeded' alone")
    if status is None or status == after.status:
        return after if patch.error is None else attrs.evolve(after, error=patch.error)
    if status not in NEXT[after.status]:
        raise _illegal(rollout, status)
    if status == "running":
        return _start(after, now)
    return _end(after, status, patch, now)


def _patch_terminal(rollout: Rollout, after: Rollout, patch: RolloutPatch) -> Rollout:
    if patch.status is not None and patch.status != rollout.status:
        raise _illegal(rollout, patch.status)
    if patch.succeeded_attempt_id not in (None, rollout.succeeded_attempt_id):
        raise RolloutEnded(f"rollout {rollout.rollout_id!r} has ended as {rollout.status}")
    return after


def _illegal(rollout: Rollout, status: Status) -> IllegalTransition:
    allowed = ", ".join(sorted(NEXT[rollout.status])) or "nothing, it has ended"
    return IllegalTransition(
        f"rollout {rollout.rollout_id!r} is {rollout.status} and cannot become {status}",
        hint=f"allowed: {allowed}",
        details={"status": rollout.status},
    )


def _merge_attempts(rollout: Rollout, reported: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    merged = {attempt.attempt_id: attempt for attempt in rollout.attempts}
    for attempt in reported:
        known = merged.get(attempt.attempt_id)
        if known is None:
            if rollout.is_terminal and not attempt.is_ended:
                raise RolloutEnded(f"rollout {rollout.rollout_id!r} has ended as {rollout.status}")
            merged[attempt.attempt_id] = attempt
            continue
        if known.is_ended and attempt.phase != known.phase:
            if rollout.is_terminal:
                continue  # what the end of the rollout decided stands
            raise IllegalTransition(
                f"attempt {attempt.attempt_id!r} has ended as {known.phase} "
                f"and cannot become {attempt.phase}"
            )
        told = {
            field.name: value
            for field in attrs.fields(Attempt)
            if (value := getattr(attempt, field.name)) is not None
        }
        merged[attempt.attempt_id] = attrs.evolve(known, **told)
    return tuple(merged.values())


def _start(rollout: Rollout, now: float, first: float | None = None) -> Rollout:
    return attrs.evolve(rollout, status="running", started_at=first or now)


def _end(rollout: Rollout, status: Status, patch: RolloutPatch, now: float) -> Rollout:
    changes: dict[str, Any] = {"status": status, "finished_at": now}
    if status == "succeeded":
        chosen = patch.succeeded_attempt_id
        if chosen is None and rollout.attempts:
            chosen = rollout.attempts[-1].attempt_id
        if chosen is not None and rollout.attempt(chosen) is None:
            raise Invalid(
                f"'succeeded_attempt_id' {chosen!r} is no attempt of {rollout.rollout_id!r}",
                hint="report the attempt in the same patch",
            )
        changes["succeeded_attempt_id"] = chosen
    if status == "failed":
        changes["error"] = patch.error or _error_of(rollout)
    changes["attempts"] = tuple(
        _close(attempt, status, changes.get("succeeded_attempt_id"), changes.get("error"), now)
        for attempt in rollout.attempts
    )
    return attrs.evolve(rollout, **changes)


def _error_of(rollout: Rollout) -> RolloutError:
    """A failed rollout's code is its last attempt's reason."""
    last = rollout.attempts[-1] if rollout.attempts else None
    return RolloutError(code=(last.reason if last and last.reason else "unknown"))


def _close(
    attempt: Attempt,
    status: Status,
    succeeded_id: str | None,
    error: RolloutError | None,
    now: float,
) -> Attempt:
    """End an attempt that nobody reported the end of, as its rollout ended."""
    if attempt.is_ended:
        return attempt
    phase: Phase
    reason: Reason | None = None
    if attempt.attempt_id == succeeded_id:
        phase = "succeeded"
    elif status == "failed":
        phase = "failed"
        reason = next((r for r in get_args(Reason) if error and r == error.code), None)
    else:
        phase, reason = "cancelled", "cancelled"
    return attrs.evolve(attempt, phase=phase, reason=reason, finished_at=now)


def request_cancel(rollout: Rollout, now: float) -> Rollout:
    """Ask for the end of a rollout; one that never had an attempt ends here.

    Raises:
        RolloutEnded: It is terminal already.
    """
    if rollout.is_terminal:
        raise RolloutEnded(
            f"rollout {rollout.rollout_id!r} has ended as {rollout.status} and cannot be cancelled"
        )
    if not rollout.attempts:
        return attrs.evolve(rollout, cancel_requested=True, status="cancelled", finished_at=now)
    return attrs.evolve(rollout, cancel_requested=True)


def see_attempt(rollout: Rollout, attempt_id: str, now: float) -> Rollout:
    """Note that an attempt made itself heard; one never seen before is created.

    A pod may call before the controller knows it, so the first call makes the rollout run.

    Raises:
        StaleAttempt: The attempt has ended.
        RolloutEnded: The rollout has.
    """
    known = rollout.attempt(attempt_id)
    if known is not None and known.is_ended:
        raise StaleAttempt(
            f"attempt {attempt_id!r} of rollout {rollout.rollout_id!r} has ended as {known.phase}",
            details={"phase": known.phase},
        )
    if rollout.is_terminal:
        raise RolloutEnded(f"rollout {rollout.rollout_id!r} has ended as {rollout.status}")
    if known is not None:
        return rollout
    attempt = Attempt(attempt_id=attempt_id, started_at=now)
    after = attrs.evolve(rollout, attempts=(*rollout.attempts, attempt))
    return _start(after, now) if after.status == "queuing" else after
