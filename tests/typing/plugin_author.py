"""A plugin that implements every hook, as its author would type it; mypy --strict reads it.

Nothing here runs except in ``test_hooks.py``, which compares the hooks with their specs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Self

from attrs import field, frozen
from attrs.validators import ge

from agl_core.clock import Clock
from agl_core.config import Secret, ServerSettings
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import (
    AddedRollouts,
    AsgiApp,
    AsgiServer,
    Candidate,
    CaptureSink,
    Change,
    ClientExtension,
    EventQuery,
    Exporter,
    ExportOptions,
    Finding,
    GatewayState,
    ModelServers,
    RequestReshaper,
    ReshapeRequest,
    RolloutHooks,
    RolloutQuery,
    Route,
    RouteRequest,
    RouteResolver,
    Runner,
    RunReport,
    Store,
    WebApp,
    Work,
)
from agl_core.records import (
    Event,
    EventDraft,
    EventPage,
    Resources,
    Rollout,
    RolloutPage,
    RolloutSpec,
)


@frozen(kw_only=True)
class AuthorConfig:
    """The table ``[plugins.author]``."""

    temperature: float = field(default=1.0, validator=ge(0))
    key: Secret | None = None


class Open:
    """An object that is opened and closed by the service."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


class AuthorStore(Open):
    """A store that has never anything."""

    is_durable = False

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> AddedRollouts:
        return AddedRollouts(items=tuple(rollouts), created=(True,) * len(rollouts))

    async def get_rollout(self, rollout_id: str) -> Rollout:
        raise NotImplementedError

    async def change_rollout(
        self, rollout_id: str, change: Callable[[Rollout], Rollout]
    ) -> Rollout:
        return change(await self.get_rollout(rollout_id))

    async def delete_rollout(self, rollout_id: str) -> None: ...

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        return RolloutPage(items=(), cursor=query.changed_after or "")

    async def append_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: Sequence[EventDraft],
        *,
        timestamp: float,
        guard: Callable[[Rollout], None] | None = None,
    ) -> tuple[Event, ...]:
        return ()

    async def list_events(self, query: EventQuery) -> EventPage:
        return EventPage(items=(), cursor=query.after or "")

    async def get_gateway_state(self) -> GatewayState:
        return GatewayState()

    async def change_gateway_state(
        self, change: Callable[[GatewayState], GatewayState]
    ) -> GatewayState:
        return change(GatewayState())

    async def add_resources(self, data: Mapping[str, Any], *, created_at: float) -> Resources:
        return Resources(resources_id="r", version=1, data=data, created_at=created_at)

    async def get_resources(self, resources_id: str | None) -> Resources:
        raise NotImplementedError

    def on_change(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        return lambda: None


class AuthorRunner(Open):
    """A runner that never starts anything."""

    max_active = 1

    async def start(self, work: Work) -> None: ...

    async def stop(self, rollout_id: str, reason: Literal["cancelled", "timeout"]) -> None: ...

    async def release(self, rollout_id: str) -> None: ...

    async def list(self) -> Sequence[RunReport]:
        return ()

    async def watch(self) -> AsyncIterator[RunReport]:
        await asyncio.Event().wait()
        yield RunReport(rollout_id="", attempts=())

    async def examine(self, work: Work, *, with_probe: bool) -> AsyncIterator[Finding]:
        yield Finding(subject="machine", status="ok", message="it is there")

    async def logs(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        container: str | None = None,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[bytes]:
        yield b""

    async def until_ready(self) -> None: ...

    async def until_lost(self) -> None:
        await asyncio.Event().wait()


class AuthorResolver:
    """Takes the first candidate."""

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        return Route(server=candidates[0].server)

    def forget(self, rollout_id: str) -> None: ...


class AuthorReshaper:
    """Sets the temperature."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        return {"temperature": self._temperature, "user": None}


class AuthorSink(Open):
    """Counts events."""

    count = 0

    async def receive(self, event: Event) -> None:
        self.count += event.event_type == "model_request"


class AuthorExporter:
    """Ids, one a line."""

    format = "ids"
    media_type = "text/plain"

    def begin(self, options: ExportOptions) -> bytes:
        return b""

    def encode(self, rollout: Rollout, events: Sequence[Event], options: ExportOptions) -> bytes:
        return rollout.rollout_id.encode() + b"\n"

    def finish(self, options: ExportOptions) -> bytes:
        return b""


class AuthorHooks:
    """Gives every rollout the same reward."""

    async def on_enqueue(self, spec: RolloutSpec) -> RolloutSpec:
        return spec

    async def on_finished(self, rollout: Rollout, events: Sequence[Event]) -> Sequence[EventDraft]:
        return [EventDraft(event_type="reward", data={"value": 1.0})]


class AuthorServer:
    """Serves until it is told to stop."""

    async def serve(
        self,
        app: AsgiApp,
        sockets: Sequence[socket.socket],
        settings: ServerSettings,
        closing: asyncio.Event,
    ) -> None:
        await closing.wait()


class AuthorExtension:
    """``client.author``."""

    name = "author"

    def headers(self) -> Mapping[str, str]:
        return {"x-author": "me"}

    def namespace(self, client: Any) -> object:
        return self


class AuthorPlugin:
    """Every hook of the service and of the controller."""

    Config = AuthorConfig

    def __init__(self, config: AuthorConfig) -> None:
        self._config = config

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        return AuthorStore()

    @hookimpl
    def provide_runner(self, clock: Clock) -> Runner:
        return AuthorRunner()

    @hookimpl
    def provide_route_resolver(self, clock: Clock, servers: ModelServers) -> RouteResolver:
        return AuthorResolver()

    @hookimpl
    def provide_request_reshaper(self) -> RequestReshaper:
        return AuthorReshaper(self._config.temperature)

    @hookimpl
    def provide_capture_sink(self) -> CaptureSink:
        return AuthorSink()

    @hookimpl
    def provide_exporter(self) -> list[Exporter]:
        return [AuthorExporter()]

    @hookimpl
    def provide_rollout_hooks(self) -> RolloutHooks:
        return AuthorHooks()

    @hookimpl
    def provide_asgi_server(self) -> AsgiServer:
        return AuthorServer()

    @hookimpl
    def register_routes(self, app: WebApp) -> None: ...


class AuthorClientPlugin:
    """The hook of the client."""

    @hookimpl
    def provide_client_extension(self) -> ClientExtension:
        return AuthorExtension()
