"""Events: agents and graders post them, everybody else reads them; and the rollout's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from quart import Response

from agl_core import transitions
from agl_core.api.reading import iter_events
from agl_core.api.requests import read_one_or_more
from agl_core.api.routes import READERS, Answer, Call, Route, json_answer
from agl_core.api.shapes import EventItems, EventListQuery, RewardData
from agl_core.auth import Identity
from agl_core.errors import Forbidden, Invalid, NotFound, RolloutEnded
from agl_core.interfaces import EventQuery
from agl_core.records import Event, EventDraft, EventPage, Rollout
from agl_core.services import Services
from agl_core.wire import structure, to_builtins

_EVENTS = "/rollout/{rollout_id}/attempt/{attempt_id}/events"
_INPUT = "/rollout/{rollout_id}/attempt/{attempt_id}/input"


class EventRoutes:
    """Handlers of the events' routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    def routes(self) -> list[Route]:
        """The table of this module."""
        return [
            Route(
                method="GET",
                path="/api/events",
                handler=self.read_page,
                says="List a rollout's events; without an attempt, those of the one that counts.",
                roles=READERS,
                query=EventListQuery,
                answers=(Answer(200, EventPage, "A page."),),
            ),
            Route(
                method="POST",
                path=_EVENTS,
                handler=self.post,
                says="Post events of an attempt: one, or a list that is taken as a whole.",
                roles=("agent", "controller"),
                body=EventDraft | tuple[EventDraft, ...],
                answers=(Answer(201, Event | EventItems, "They are stored."),),
            ),
            Route(
                method="GET",
                path=_INPUT,
                handler=self.read_input,
                says="Read the rollout's input.",
                roles=("agent", "controller"),
                answers=(Answer(200, Any, "The input as it was enqueued."),),
            ),
        ]

    async def read_page(self, call: Call) -> Response:
        asked = call.query(EventListQuery)
        if asked.all_attempts and asked.attempt_id is not None:
            raise Invalid("query: 'attempt_id' and 'all_attempts' exclude each other")
        await self._services.gateway.captured(asked.rollout_id)
        rollout = await self._store.get_rollout(asked.rollout_id)
        attempt_id = asked.attempt_id
        if attempt_id is not None and rollout.attempt(attempt_id) is None:
            raise NotFound(f"rollout {rollout.rollout_id!r} has no attempt {attempt_id!r}")
        if attempt_id is None and not asked.all_attempts:
            attempt_id = rollout.default_attempt_id
        page = await self._store.list_events(
            EventQuery(
                rollout_id=asked.rollout_id,
                attempt_id=attempt_id,
                event_type=asked.type,
                after=asked.after,
                limit=asked.limit,
            )
        )
        return json_answer(page)

    async def post(self, call: Call) -> Response:
        drafts, is_list = read_one_or_more(call.json(), EventDraft, "events")
        rollout_id, attempt_id = call.path["rollout_id"], call.path["attempt_id"]
        identity = call.identity
        checked = [
            self._checked(draft, identity, f"events[{index}]." if is_list else "")
            for index, draft in enumerate(drafts)
        ]
        rollout = await self._store.get_rollout(rollout_id)
        self._guard(rollout, attempt_id, identity)
        await self._check_call_ids(rollout_id, attempt_id, checked)
        if rollout.attempt(attempt_id) is None:
            now = self._services.clock.now()
            await self._store.change_rollout(
                rollout_id, lambda present: transitions.see_attempt(present, attempt_id, now)
            )
        events = await self._store.append_events(
            rollout_id,
            attempt_id,
            checked,
            timestamp=self._services.clock.now(),
            guard=lambda present: self._guard(present, attempt_id, identity),
        )
        self._services.gateway.publish(events)
        return json_answer(EventItems(items=tuple(events)) if is_list else events[0], 201)

    def _guard(self, rollout: Rollout, attempt_id: str, identity: Identity) -> None:
        """Keep agents out of what has ended; graders may still post to what there was."""
        if identity.role == "agent" or rollout.attempt(attempt_id) is None:
            transitions.see_attempt(rollout, attempt_id, self._services.clock.now())

    def _checked(self, draft: EventDraft, identity: Identity, where: str) -> EventDraft:
        if draft.event_type == "model_request":
            raise Forbidden(
                f"{where}event_type: only the gateway makes model_request events",
                hint="call the model through the gateway, or use a type of your own",
            )
        if draft.event_type != "reward":
            return draft
        if identity.role == "agent" and not self._services.settings.auth.agent_rewards:
            raise Forbidden(
                "agents may not post rewards here",
                hint="auth.agent_rewards is false: a grader with a key of its own posts them",
            )
        reward = structure(draft.data, RewardData, f"{where}data")
        return attrs.evolve(draft, data=to_builtins(attrs.evolve(reward, source=identity.role)))

    async def _check_call_ids(
        self, rollout_id: str, attempt_id: str, drafts: Sequence[EventDraft]
    ) -> None:
        """A reward that names a call must name one that there was."""
        missing = {
            draft.data["call_id"]: index
            for index, draft in enumerate(drafts)
            if draft.event_type == "reward" and draft.data["call_id"] is not None
        }
        if not missing:
            return
        await self._services.gateway.captured(rollout_id)
        query = EventQuery(rollout_id=rollout_id, attempt_id=attempt_id, event_type="model_request")
        async for event in iter_events(self._store, query):
            missing.pop(event.data.get("call_id"), None)
            if not missing:
                return
        call_id, index = next(iter(missing.items()))
        raise Invalid(
            f"data.call_id: attempt {attempt_id!r} made no call {call_id!r}",
            hint="it is the X-Request-Id of the call's answer",
            details={"index": index, "call_id": call_id},
        )

    async def read_input(self, call: Call) -> Response:
        rollout = await self._store.get_rollout(call.path["rollout_id"])
        if call.identity.role == "agent" and rollout.is_terminal:
            raise RolloutEnded(f"rollout {rollout.rollout_id!r} has ended as {rollout.status}")
        return json_answer(rollout.input)
