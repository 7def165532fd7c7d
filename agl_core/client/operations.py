"""What takes more than one request: following, waiting, paging, and pausing around an update.

Each is written once, as a generator of steps (``exchange.py``), and run by both clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import quote

from agl_core.client import requests
from agl_core.client.calls import (
    MAX_QUERY_CHARACTERS,
    Ids,
    RolloutFilter,
    as_ids,
    rollout_filter,
)
from agl_core.client.exchange import Emit, Operation, once
from agl_core.client.feed import PAGE_SIZE, FeedReader
from agl_core.client.results import CancelResult, WaitTimeout
from agl_core.clock import Clock
from agl_core.errors import AglError, ApiError, Invalid, NotFound
from agl_core.records import (
    Event,
    EventDraft,
    PauseMode,
    Rollout,
    RolloutConfig,
    RolloutSpec,
    Tombstone,
)

Until = Literal["complete", "terminal"]
# Events carry token ids: a model request of a long conversation has a hundred kilobytes and more.
_EVENTS_PER_PAGE = 200
_SHOWN_IDS = 5


def enqueue(
    items: Mapping[str, Any] | RolloutSpec | Iterable[Mapping[str, Any] | RolloutSpec],
    *,
    config: RolloutConfig | Mapping[str, Any] | None,
    resources_id: str | None,
    metadata: Mapping[str, Any] | None,
) -> Operation[list[Rollout]]:
    """Enqueue; of nothing comes nothing."""
    several = [items] if isinstance(items, Mapping | RolloutSpec) else list(items)
    if not several:
        return []
    call = requests.enqueue(several, config=config, resources_id=resources_id, metadata=metadata)
    return (yield from once(call))


def cancel_many(ids: Ids | None, group_id: str | None) -> Operation[CancelResult]:
    """Cancel in bulk; no ids are no rollouts, not all of them."""
    chosen = None if ids is None else as_ids(ids)
    if chosen is not None and not chosen:
        return CancelResult()
    return (yield from once(requests.cancel_many(chosen, group_id)))


def iterate_rollouts(chosen: RolloutFilter) -> Operation[None]:
    """Emit every rollout; one that changes meanwhile may come twice, the later state last."""
    cursor = None
    while True:
        page = yield from once(
            requests.list_rollouts(chosen, changed_after=cursor, limit=PAGE_SIZE)
        )
        for item in page.items:
            if isinstance(item, Rollout):
                yield Emit(item)
        if len(page.items) < PAGE_SIZE:
            return
        cursor = page.cursor


def watch(chosen: RolloutFilter, changed_after: str | None, clock: Clock) -> Operation[None]:
    """Emit what exists and then each change, without an end."""
    reader = FeedReader(chosen, clock, cursor=changed_after)
    while True:
        seen = yield from reader.read(None)
        if seen is not None:
            for item in seen.page.items:
                yield Emit(item)


def collect_events(
    rollout_id: str, attempt_id: str | None, type: str | None, all_attempts: bool
) -> Operation[list[Event]]:
    """All events that are asked for."""
    events: list[Event] = []
    cursor = None
    while True:
        page = yield from once(
            requests.list_events(
                rollout_id,
                attempt_id=attempt_id,
                type=type,
                all_attempts=all_attempts,
                after=cursor,
                limit=_EVENTS_PER_PAGE,
            )
        )
        events.extend(page.items)
        if len(page.items) < _EVENTS_PER_PAGE:
            return events
        cursor = page.cursor


def post_events(
    rollout_id: str,
    attempt_id: str,
    drafts: EventDraft | Mapping[str, Any] | Iterable[EventDraft | Mapping[str, Any]],
) -> Operation[list[Event]]:
    """Append events, one or several."""
    several = [drafts] if isinstance(drafts, Mapping | EventDraft) else list(drafts)
    if not several:
        return []
    return (yield from once(requests.post_events(rollout_id, attempt_id, several)))


def post_reward(rollout_id: str, attempt_id: str, draft: EventDraft) -> Operation[Event]:
    """Append one reward."""
    return (yield from post_events(rollout_id, attempt_id, draft))[0]


def weight_update(policy: str | None, mode: PauseMode) -> Operation[None]:
    """Pause, emit the state, and resume, whatever happened in between."""
    is_refused = False
    try:
        try:
            state = yield from once(requests.pause(policy, mode))
        except ApiError as exc:
            is_refused = 400 <= exc.status < 500
            raise
        yield Emit(state)
    except BaseException as exc:
        # A pause that was refused leaves nothing to resume; one whose answer was lost may.
        if not is_refused:
            try:
                yield from once(requests.resume(policy))
            except AglError as failure:
                exc.add_note(f"the gateway could not be resumed either: {failure}")
        raise
    yield from once(requests.resume(policy))


def wait(
    ids: Ids | None,
    group_id: str | None,
    timeout: float | None,
    until: Until,
    clock: Clock,
) -> Operation[list[Rollout]]:
    """Wait until all of them have ended: in the order of ``ids``, or of a group's indexes."""
    if (ids is None) == (group_id is None):
        raise Invalid("wait takes either ids or group_id")
    if until not in ("complete", "terminal"):
        raise Invalid(f"until is 'complete' or 'terminal', not {until!r}")
    deadline = None if timeout is None else clock.monotonic() + timeout
    if group_id is not None:
        waiting = _Waiting(None, until)
        chosen = rollout_filter(group_id=group_id)
        yield from _follow(waiting, FeedReader(chosen, clock), deadline, clock, timeout)
        return sorted(waiting.known.values(), key=lambda r: r.group.index if r.group else 0)
    wanted = as_ids(ids or ())
    done: dict[str, Rollout] = {}
    for part in _parts(wanted):
        waiting = _Waiting(part, until)
        chosen = rollout_filter(ids=part)
        reader = FeedReader(chosen, clock, was_reached=bool(done))
        try:
            yield from _follow(waiting, reader, deadline, clock, timeout)
        except WaitTimeout as exc:
            exc.missing = [i for i in wanted if i not in done and i not in waiting.ended()]
            exc.details["missing"] = exc.missing
            exc.rollouts.update(done)
            raise
        done.update(waiting.known)
    return [done[rollout_id] for rollout_id in wanted]


def _parts(ids: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Ids in portions that fit into a query; waited for one after another, since all must end."""
    part: list[str] = []
    characters = 0
    for rollout_id in ids:
        size = len(quote(rollout_id, safe="")) + len("%2C")
        if part and characters + size > MAX_QUERY_CHARACTERS - 500:
            yield tuple(part)
            part, characters = [], 0
        part.append(rollout_id)
        characters += size
    if part:
        yield tuple(part)


class _Waiting:
    """Rollouts that are waited for, and what is known of them."""

    def __init__(self, wanted: tuple[str, ...] | None, until: Until) -> None:
        self._wanted = wanted
        self._until = until
        self.known: dict[str, Rollout] = {}

    def learn(self, item: Rollout | Tombstone) -> None:
        if isinstance(item, Rollout):
            self.known[item.rollout_id] = item
        elif item.rollout_id in self.known or item.rollout_id in (self._wanted or ()):
            raise NotFound(
                f"rollout {item.rollout_id!r} was deleted while it was waited for",
                details={"rollout_id": item.rollout_id},
            )

    def check_existence(self) -> None:
        """Everything has been listed: what has not been seen does not exist."""
        absent = [i for i in self._wanted or () if i not in self.known]
        if absent:
            raise NotFound(
                f"no such rollout: {_shown(absent)}",
                hint="a memory store forgets all when the service ends",
                details={"rollout_ids": absent},
            )
        if not self.known:
            raise NotFound("the group has no rollouts")

    def ended(self) -> set[str]:
        return {i for i, r in self.known.items() if self._is_over(r)}

    def missing(self) -> list[str]:
        wanted = self._wanted or tuple(self.known)
        ended = self.ended()
        return [i for i in wanted if i not in ended]

    def _is_over(self, rollout: Rollout) -> bool:
        return rollout.is_complete if self._until == "complete" else rollout.is_terminal


def _follow(
    waiting: _Waiting,
    reader: FeedReader,
    deadline: float | None,
    clock: Clock,
    timeout: float | None,
) -> Operation[None]:
    while True:
        seen = yield from reader.read(deadline)
        if seen is not None:
            if seen.is_first:
                waiting.known.clear()
            for item in seen.page.items:
                waiting.learn(item)
            if seen.is_last:
                waiting.check_existence()
                if not waiting.missing():
                    return
        if deadline is not None and clock.monotonic() >= deadline:
            missing = waiting.missing()
            raise WaitTimeout(
                f"after {timeout:g} s these had not ended: {_shown(missing)}"
                if missing
                else f"the service did not answer within {timeout:g} s",
                missing=missing,
                rollouts=waiting.known,
            )


def _shown(ids: list[str]) -> str:
    text = ", ".join(ids[:_SHOWN_IDS])
    return text if len(ids) <= _SHOWN_IDS else f"{text} and {len(ids) - _SHOWN_IDS} more"
