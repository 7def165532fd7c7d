"""``/api/resources``: immutable bundles that rollouts refer to."""

from __future__ import annotations

from quart import Response

from agl_core.api.routes import READERS, Answer, Call, Route, json_answer
from agl_core.api.shapes import ResourcesDraft
from agl_core.records import Resources
from agl_core.services import Services
from agl_core.wire import structure


class ResourceRoutes:
    """Handlers of the resources' routes."""

    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._clock = services.clock

    def routes(self) -> list[Route]:
        """The table of this module."""
        one = (Answer(200, Resources, "The bundle."),)
        return [
            Route(
                method="POST",
                path="/api/resources",
                handler=self.add,
                says="Keep a bundle under a new id; it never changes.",
                body=ResourcesDraft,
                answers=(Answer(201, Resources, "The bundle."),),
            ),
            Route(
                method="GET",
                path="/api/resources/latest",
                handler=self.latest,
                says="Read the bundle that was posted last.",
                roles=READERS,
                answers=one,
            ),
            Route(
                method="GET",
                path="/api/resources/{resources_id}",
                handler=self.read,
                says="Read one bundle.",
                roles=READERS,
                answers=one,
            ),
        ]

    async def add(self, call: Call) -> Response:
        draft = structure(call.json(), ResourcesDraft)
        bundle = await self._store.add_resources(draft.data, created_at=self._clock.now())
        return json_answer(bundle, 201)

    async def latest(self, call: Call) -> Response:
        return json_answer(await self._store.get_resources(None))

    async def read(self, call: Call) -> Response:
        return json_answer(await self._store.get_resources(call.path["resources_id"]))
