"""``/api/rollouts``: enqueue, list and watch, change, cancel, delete, and tokens."""

from __future__ import annotations

from collections.abc import Sequence

from quart import Response

from agl_core import transitions
from agl_core.api.endings import Endings
from agl_core.api.enqueue import Enqueuer, name_item, read_enqueue
from agl_core.api.reading import iter_rollouts
from agl_core.api.routes import READERS, Answer, Call, Route, json_answer, raw_json_answer
from agl_core.api.shapes import (
    CancelAnswer,
    CancelRequest,
    EnqueueBatch,
    EnqueueItem,
    Refusal,
    RolloutItems,
    RolloutList,
    RolloutListQuery,
    TokenAnswer,
)
from agl_core.errors import Invalid, NotFound, RolloutEnded, RolloutExists
from agl_core.interfaces import RolloutQuery
from agl_core.records import Rollout, RolloutPatch
from agl_core.services import Services
from agl_core.wire import structure

_LIST = "/api/rollouts"
_ONE = "/api/rollouts/{rollout_id}"


class RolloutRoutes:
    """Handlers of the rollouts' routes."""

    def __init__(self, services: Services, endings: Endings) -> None:
        self._services = services
        self._store = services.store
        self._endings = endings
        self._enqueuer = Enqueuer(services.store, services.rollout_hooks)

    def routes(self) -> list[Route]:
        """The table of this module."""
        rollout = Answer(200, Rollout, "The rollout.")
        return [
            Route(
                method="POST",
                path=_LIST,
                handler=self.enqueue,
                says="Enqueue rollouts: one, a list, or a batch with defaults; all or none.",
                body=EnqueueItem | tuple[EnqueueItem, ...] | EnqueueBatch,
                answers=(
                    Answer(201, Rollout | RolloutItems, "At least one is new."),
                    Answer(200, Rollout | RolloutItems, "All of them existed already."),
                ),
            ),
            Route(
                method="GET",
                path=_LIST,
                handler=self.read_page,
                says="List, page, watch and long-poll rollouts in the order of their changes.",
                roles=READERS,
                query=RolloutListQuery,
                answers=(Answer(200, RolloutList, "A page."),),
            ),
            Route(
                method="POST",
                path=f"{_LIST}/cancel",
                handler=self.cancel_many,
                says="Cancel several rollouts; those that cannot be are listed with the reason.",
                roles=("controller",),
                body=CancelRequest,
                answers=(Answer(200, CancelAnswer, "What was done."),),
            ),
            Route(
                method="GET",
                path=_ONE,
                handler=self.read,
                says="Read one rollout with its attempts.",
                roles=READERS,
                answers=(rollout,),
            ),
            Route(
                method="PATCH",
                path=_ONE,
                handler=self.patch,
                says="Change status, attempts, error or grade of a rollout.",
                roles=("controller",),
                body=RolloutPatch,
                answers=(rollout,),
            ),
            Route(
                method="DELETE",
                path=_ONE,
                handler=self.delete,
                says="Delete a rollout and its events; its calls are closed first.",
                answers=(Answer(204, None, "It is gone."),),
            ),
            Route(
                method="POST",
                path=f"{_ONE}/cancel",
                handler=self.cancel,
                says="Ask for the end of a rollout and close its calls at once.",
                roles=("controller",),
                answers=(rollout,),
            ),
            Route(
                method="POST",
                path=f"{_ONE}/token",
                handler=self.mint,
                says="Mint the token that the rollout's agent shows.",
                roles=("controller",),
                answers=(Answer(200, TokenAnswer, "The token."),),
            ),
        ]

    async def enqueue(self, call: Call) -> Response:
        asked = read_enqueue(call.json())
        specs = await self._enqueuer.specs(asked)
        now = self._services.clock.now()
        rollouts: list[Rollout] = []
        for _, spec in specs:
            assert spec.rollout_id is not None
            rollouts.append(transitions.new_rollout(spec, spec.rollout_id, now))
        try:
            added = await self._store.add_rollouts(rollouts)
        except RolloutExists as exc:
            place = exc.details.get("index")
            if asked.is_single:
                exc.details.pop("index", None)
            elif isinstance(place, int):
                name_item(exc, specs[place][0])
            raise
        status = 201 if any(added.created) else 200
        if asked.is_single:
            return json_answer(added.items[0], status)
        return json_answer(RolloutItems(items=added.items), status)

    async def read_page(self, call: Call) -> Response:
        asked = call.query(RolloutListQuery)
        query = RolloutQuery(
            ids=None if asked.ids is None else frozenset(asked.ids),
            statuses=None if asked.status is None else frozenset(asked.status),
            group_id=asked.group_id,
            mode=asked.mode,
            changed_after=asked.changed_after,
            limit=asked.limit,
        )
        return raw_json_answer(await self._services.feed.page(query, asked.wait))

    async def read(self, call: Call) -> Response:
        return json_answer(await self._store.get_rollout(call.path["rollout_id"]))

    async def patch(self, call: Call) -> Response:
        patch = structure(call.json(), RolloutPatch)
        now = self._services.clock.now()
        return json_answer(
            await self._endings.change(
                call.path["rollout_id"],
                lambda rollout: transitions.apply_patch(rollout, patch, now),
            )
        )

    async def delete(self, call: Call) -> Response:
        rollout_id = call.path["rollout_id"]
        await self._store.get_rollout(rollout_id)
        self._services.gateway.abort_calls(rollout_id)
        await self._services.gateway.captured(rollout_id)
        await self._store.delete_rollout(rollout_id)
        return Response(b"", 204)

    async def cancel(self, call: Call) -> Response:
        return json_answer(await self._cancel(call.path["rollout_id"]))

    async def cancel_many(self, call: Call) -> Response:
        asked = structure(call.json(), CancelRequest)
        cancelled: list[Rollout] = []
        refused: list[Refusal] = []
        for rollout_id in await self._ids_to_cancel(asked):
            try:
                cancelled.append(await self._cancel(rollout_id))
            except (NotFound, RolloutEnded) as exc:
                refused.append(Refusal(rollout_id=rollout_id, code=exc.code, message=exc.message))
        return json_answer(CancelAnswer(items=tuple(cancelled), refused=tuple(refused)))

    async def _ids_to_cancel(self, asked: CancelRequest) -> Sequence[str]:
        if (asked.ids is None) == (asked.group_id is None):
            raise Invalid("send either 'ids' or 'group_id'")
        if asked.ids is not None:
            return list(dict.fromkeys(asked.ids))
        query = RolloutQuery(group_id=asked.group_id)
        siblings = [rollout.rollout_id async for rollout in iter_rollouts(self._store, query)]
        if not siblings:
            raise NotFound(f"there is no rollout of a group {asked.group_id!r}")
        return siblings

    async def _cancel(self, rollout_id: str) -> Rollout:
        now = self._services.clock.now()
        return await self._endings.change(
            rollout_id, lambda rollout: transitions.request_cancel(rollout, now)
        )

    async def mint(self, call: Call) -> Response:
        rollout = await self._store.get_rollout(call.path["rollout_id"])
        if rollout.is_terminal:
            raise RolloutEnded(
                f"rollout {rollout.rollout_id!r} has ended as {rollout.status}",
                hint="a token ends with its rollout",
            )
        token, expires_at = self._services.authority.mint(rollout.rollout_id)
        return json_answer(TokenAnswer(token=token, expires_at=expires_at))
