"""``/api/gateway``: closing and opening admission around a weight update."""

from __future__ import annotations

from typing import TypeVar

from quart import Response

from agl_core.api.routes import READERS, Answer, Call, Route, json_answer
from agl_core.api.shapes import GatewayStateView, PauseRequest, ResumeRequest
from agl_core.services import Services
from agl_core.wire import structure

T = TypeVar("T")


class GatewayRoutes:
    """Handlers of the gateway's routes."""

    def __init__(self, services: Services) -> None:
        self._gateway = services.gateway

    def routes(self) -> list[Route]:
        """The table of this module."""
        state = (Answer(200, GatewayStateView, "Admission by policy."),)
        return [
            Route(
                method="POST",
                path="/api/gateway/pause",
                handler=self.pause,
                says="Close admission to a policy; calls that come meanwhile wait.",
                body=PauseRequest,
                needs_body=False,
                answers=state,
            ),
            Route(
                method="POST",
                path="/api/gateway/resume",
                handler=self.resume,
                says="Open admission again; calls that waited go on.",
                body=ResumeRequest,
                needs_body=False,
                answers=state,
            ),
            Route(
                method="GET",
                path="/api/gateway/state",
                handler=self.state,
                says="See admission, calls in flight and calls that wait, by policy.",
                roles=READERS,
                answers=state,
            ),
        ]

    async def pause(self, call: Call) -> Response:
        asked = _read(call, PauseRequest)
        await self._gateway.pause(asked.policy, asked.mode, asked.reason, asked.drain_seconds)
        return json_answer(self._gateway.state())

    async def resume(self, call: Call) -> Response:
        await self._gateway.resume(_read(call, ResumeRequest).policy)
        return json_answer(self._gateway.state())

    async def state(self, call: Call) -> Response:
        return json_answer(self._gateway.state())


def _read(call: Call, kind: type[T]) -> T:
    """The body; none at all means the defaults."""
    return structure(call.json() if call.body else {}, kind)
