"""A store whose every operation is one step of the event loop, which is what makes it atomic."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import attrs
from attrs.validators import ge

from agl_core.clock import Clock
from agl_core.errors import CursorExpired, Invalid, NotFound, RolloutExists, StoreError
from agl_core.interfaces import AddedRollouts, Change, EventQuery, GatewayState, RolloutQuery
from agl_core.records import Event, EventDraft, EventPage, Resources, Rollout, RolloutPage
from agl_core.transitions import is_same_spec
from agl_core.wire import cursor_position, cursor_text
from agl_memory.order import ChangeOrder

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """Bounds of what is kept."""

    max_rollouts: int = attrs.field(default=1_000_000, validator=ge(1))
    """Rollouts, ended ones included. A full store refuses new ones, since throwing away what
    nobody archived would lose training data unseen.
    """
    max_tombstones: int = attrs.field(default=100_000, validator=ge(0))
    """Deletions that a reader of the change feed may be late for; one that is later lists anew."""


class MemoryStore:
    """Keeps everything in memory, and nothing across a restart.

    Records are frozen, so none can change under the store. The mappings inside them (an event's
    ``data``, a rollout's ``metadata``) are kept as they were given, for token lists are too long
    to copy: whoever hands one over, or is handed one, leaves it as it is. Resources are small and
    promised never to change; they are copied both ways.
    """

    is_durable = False

    def __init__(self, clock: Clock, config: MemoryConfig | None = None) -> None:
        self._config = config or MemoryConfig()
        # The time tells a reader of logs which life a cursor is of; chance makes lives differ.
        self._epoch = f"{int(clock.now()):x}-{secrets.token_hex(8)}"
        self._order = ChangeOrder(self._config.max_tombstones)
        self._events: dict[str, list[Event]] = {}
        self._gateway = GatewayState()
        self._resources: dict[str, Resources] = {}
        self._latest: Resources | None = None
        self._listeners: dict[object, Callable[[Change], None]] = {}

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listeners.clear()

    # --- rollouts

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> AddedRollouts:
        new: dict[str, Rollout] = {}
        items: list[Rollout] = []
        created: list[bool] = []
        for index, rollout in enumerate(rollouts):
            rollout_id = rollout.rollout_id
            known = self._order.get(rollout_id) or new.get(rollout_id)
            if known is not None and not is_same_spec(known, rollout):
                raise RolloutExists(
                    f"rollout {rollout_id!r} exists with another spec",
                    hint="choose another id, or send the same spec",
                    details={"index": index, "rollout_id": rollout_id},
                )
            if known is None:
                new[rollout_id] = attrs.evolve(rollout, version=1)
            items.append(known or new[rollout_id])
            created.append(known is None)
        self._check_room(len(new))
        for rollout in new.values():
            self._order.put(rollout)
        self._notify(*map(_change_of, new.values()))
        return AddedRollouts(items=tuple(items), created=tuple(created))

    def _check_room(self, wanted: int) -> None:
        if wanted and len(self._order) + wanted > self._config.max_rollouts:
            raise StoreError(
                f"the memory store is full: it has {len(self._order)} rollouts of at most "
                f"{self._config.max_rollouts}, and {wanted} more were sent",
                hint="archive or delete ended rollouts, or raise plugins.memory.max_rollouts",
                code="store_full",
                details={"rollouts": len(self._order), "max_rollouts": self._config.max_rollouts},
            )

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return self._present(rollout_id)

    async def change_rollout(
        self, rollout_id: str, change: Callable[[Rollout], Rollout]
    ) -> Rollout:
        before = self._present(rollout_id)
        after = change(before)
        if after == before:
            return before
        after = attrs.evolve(after, version=before.version + 1)
        self._order.put(after)
        self._notify(_change_of(after))
        return after

    async def delete_rollout(self, rollout_id: str) -> None:
        rollout = self._present(rollout_id)
        self._order.bury(rollout)
        self._events.pop(rollout_id, None)
        self._notify(attrs.evolve(_change_of(rollout), is_end=True))

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        _check_limit(query.limit)
        after = None if query.changed_after is None else self._position(query.changed_after)
        if after is not None and after < self._order.oldest:
            raise CursorExpired(
                "the cursor is older than the deletions that are still known",
                hint="list again from the start",
            )
        items, end = self._order.select(query, after)
        return RolloutPage(items=items, cursor=cursor_text(self._epoch, end))

    def _present(self, rollout_id: str) -> Rollout:
        rollout = self._order.get(rollout_id)
        if rollout is None:
            raise NotFound(f"there is no rollout {rollout_id!r}")
        return rollout

    def _position(self, cursor: str) -> int:
        position = cursor_position(cursor, self._epoch)
        if position < 0:
            raise Invalid(f"{cursor!r} is no cursor", hint="use one that a list returned")
        return position

    # --- events

    async def append_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: Sequence[EventDraft],
        *,
        timestamp: float,
        guard: Callable[[Rollout], None] | None = None,
    ) -> tuple[Event, ...]:
        rollout = self._present(rollout_id)
        if guard is not None:
            guard(rollout)
        if not drafts:
            return ()
        kept = self._events.setdefault(rollout_id, [])
        events = tuple(
            Event(
                seq=seq,
                event_type=draft.event_type,
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                timestamp=timestamp,
                data=draft.data,
            )
            for seq, draft in enumerate(drafts, start=len(kept) + 1)
        )
        kept.extend(events)
        return events

    async def list_events(self, query: EventQuery) -> EventPage:
        _check_limit(query.limit)
        self._present(query.rollout_id)
        seq = 0 if query.after is None else self._position(query.after)
        kept = self._events.get(query.rollout_id, [])
        items: list[Event] = []
        # ``seq`` counts without gaps from 1, so it is also the index of what comes next.
        while seq < len(kept) and len(items) < query.limit:
            event = kept[seq]
            seq += 1
            if query.attempt_id in (None, event.attempt_id) and query.event_type in (
                None,
                event.event_type,
            ):
                items.append(event)
        return EventPage(items=tuple(items), cursor=cursor_text(self._epoch, seq))

    # --- gateway and resources

    async def get_gateway_state(self) -> GatewayState:
        return self._gateway

    async def change_gateway_state(
        self, change: Callable[[GatewayState], GatewayState]
    ) -> GatewayState:
        after = change(self._gateway)
        if after != self._gateway:
            self._gateway = after
            self._notify(Change(kind="gateway"))
        return self._gateway

    async def add_resources(self, data: Mapping[str, Any], *, created_at: float) -> Resources:
        resources = Resources(
            resources_id=f"resources-{secrets.token_hex(8)}",
            version=len(self._resources) + 1,
            data=copy.deepcopy(dict(data)),
            created_at=created_at,
        )
        self._resources[resources.resources_id] = self._latest = resources
        return _copy_of(resources)

    async def get_resources(self, resources_id: str | None) -> Resources:
        if resources_id is None:
            if self._latest is None:
                raise NotFound("there are no resources yet", hint="post some first")
            return _copy_of(self._latest)
        if resources_id not in self._resources:
            raise NotFound(f"there are no resources {resources_id!r}")
        return _copy_of(self._resources[resources_id])

    # --- listeners

    def on_change(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        key = object()  # the same listener may be put on twice
        self._listeners[key] = listener

        def take_off() -> None:
            self._listeners.pop(key, None)

        return take_off

    def _notify(self, *changes: Change) -> None:
        for change in changes:
            for key, listener in tuple(self._listeners.items()):
                if key not in self._listeners:
                    continue  # one that was called before took it off
                try:
                    listener(change)
                except Exception:
                    # The change is made: whoever made it must not hear of somebody else's fault.
                    log.exception("a listener of the memory store failed")


def _change_of(rollout: Rollout) -> Change:
    return Change(
        kind="rollout",
        rollout_id=rollout.rollout_id,
        group_id=rollout.group.id if rollout.group else None,
        is_end=rollout.is_terminal,
    )


def _copy_of(resources: Resources) -> Resources:
    return attrs.evolve(resources, data=copy.deepcopy(resources.data))


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise Invalid(f"'limit' must be at least 1: {limit}")
