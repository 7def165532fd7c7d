"""Servers that are out are asked whether they are back, off the request path.

A server that answers ``/health`` is tried by the next call, one at a time; the call decides. One
that cannot be reached stays out, so that no call is spent on it. What a server has in flight is
none of this module's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agl_core.clock import Clock
from agl_core.errors import UpstreamError
from agl_core.gateway.engines import NOT_SERVED, EngineClient
from agl_core.gateway.registry import Registry, ServerState, root_of
from agl_core.settings import GatewaySettings

log = logging.getLogger(__name__)


class HealthChecks:
    """Asks servers that are out, each by itself: one that is silent holds up no other."""

    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        registry: Registry,
        engines: EngineClient,
        is_paused: Callable[[str], bool],
    ) -> None:
        self._seconds = settings.health_seconds
        self._clock = clock
        self._registry = registry
        self._engines = engines
        self._is_paused = is_paused
        self._loop: asyncio.Task[None] | None = None
        self._checks: dict[asyncio.Task[None], ServerState] = {}

    def start(self) -> None:
        """Begin to ask."""
        if self._seconds is not None:
            self._loop = asyncio.create_task(self._run(self._seconds), name="health-checks")

    async def close(self) -> None:
        """Stop asking."""
        tasks = [*self._checks, *([] if self._loop is None else [self._loop])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, seconds: float) -> None:
        while True:
            await self._clock.sleep(seconds)
            for state in self._registry.out():
                is_asked = any(asked is state for asked in self._checks.values())
                if not is_asked and not self._is_left_alone(state):
                    task = asyncio.create_task(self._check(state))
                    self._checks[task] = state
                    task.add_done_callback(self._checks.pop)

    def _is_left_alone(self, state: ServerState) -> bool:
        """While its policy is paused nothing is learnt of a server."""
        return self._is_paused(state.server.policy) or self._registry.is_frozen(state.server)

    async def _check(self, state: ServerState) -> None:
        server = state.server
        is_well = await self._ask(state)
        if self._is_left_alone(state) or state.server is not server:
            return
        if is_well:
            log.info("a server that was out is well again", extra={"endpoint": server.endpoint})
            self._registry.said_healthy(state)
        elif is_well is False:
            self._registry.said_unhealthy(state)

    async def _ask(self, state: ServerState) -> bool | None:
        """Whether the server is well; None: its answer does not tell."""
        server = state.server
        try:
            status = await self._engines.ask(
                "GET", root_of(server.endpoint), "/health", server.credential
            )
            if status in NOT_SERVED:
                status = await self._engines.ask(
                    "GET", server.endpoint, "/models", server.credential
                )
        except UpstreamError:
            return False
        if status == 200:
            return True
        return False if status >= 500 else None
