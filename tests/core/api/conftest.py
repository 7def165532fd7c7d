"""The API on a real loopback server, over the memory store and a gateway that only keeps notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs
import httpx
import pytest
from quart import Quart

from agl_core.api import register
from agl_core.auth import Authority
from agl_core.clock import SystemClock
from agl_core.errors import Invalid, NotFound
from agl_core.feed import ChangeFeed
from agl_core.interfaces import ExportOptions
from agl_core.records import Event, ModelServer, Rollout
from agl_core.services import Services, StateChange
from agl_core.settings import AuthSettings, GatewaySettings, Secret, ServerSettings, Settings
from agl_core.testing.servers import serve_asgi
from agl_core.wire import to_builtins, to_json
from agl_memory.store import MemoryStore

KEYS = AuthSettings(
    algorithm_key=Secret("algorithm-key"),
    controller_key=Secret("controller-key"),
    viewer_key=Secret("viewer-key"),
)


class NotingGateway:
    """A GatewayControl without model calls: it pauses, aborts and publishes on paper."""

    def __init__(self) -> None:
        self.store: MemoryStore | None = None
        self.servers: set[tuple[str, str]] = set()
        self.paused: dict[str, str] = {}
        self.aborted: list[str] = []
        self.barriers: list[str] = []
        self.published: list[Event] = []
        self.registry_reads = 0
        self.reasons: list[dict[str, Any]] = []
        self.pause_calls: list[tuple[Any, ...]] = []
        self.on_barrier: Callable[[str], Awaitable[None]] | None = None

    async def pause(
        self,
        policy: str | None,
        mode: str,
        reason: str | None = None,
        drain_seconds: float | None = None,
        *,
        change: StateChange | None = None,
    ) -> None:
        if policy == "nobody":
            raise NotFound("there is no policy 'nobody'")
        await self._change(change)
        self.pause_calls.append((policy, mode, reason, drain_seconds))
        self.paused[policy or "all"] = mode

    async def resume(self, policy: str | None, *, change: StateChange | None = None) -> None:
        await self._change(change)
        self.paused.pop(policy or "all", None)

    async def _change(self, change: StateChange | None) -> None:
        if change is not None:
            assert self.store is not None
            await self.store.change_gateway_state(change)

    def state(self) -> dict[str, Any]:
        return {
            "policies": {
                name: {
                    "paused": True,
                    "mode": mode,
                    "reason": None,
                    "inflight": 0,
                    "held": 0,
                    "version": 0,
                    "paused_seconds": 0.0,
                }
                for name, mode in self.paused.items()
            }
        }

    def server_view(self, server: ModelServer) -> dict[str, Any]:
        return {**to_builtins(server), "healthy": True, "inflight": 0}

    def abort_calls(self, rollout_id: str) -> int:
        self.aborted.append(rollout_id)
        return 0

    async def registry_changed(self) -> None:
        self.registry_reads += 1

    async def captured(self, rollout_id: str) -> None:
        self.barriers.append(rollout_id)
        if self.on_barrier is not None:
            await self.on_barrier(rollout_id)

    def publish(self, events: Sequence[Event]) -> None:
        self.published.extend(events)

    def unready(self) -> list[dict[str, Any]]:
        return self.reasons

    def metrics(self) -> Sequence[tuple[str, Mapping[str, str], float]]:
        return [("agl_calls_total", {"policy": 'a"b', "status": "ok"}, 3.0)]


class LineExporter:
    """One JSON line per rollout, between a head and a tail."""

    format = "lines"
    media_type = "application/x-ndjson"

    def begin(self, options: ExportOptions) -> bytes:
        unknown = set(options.parameters) - {"shape"}
        if unknown:
            raise Invalid(f"unknown parameter {min(unknown)!r}, did you mean 'shape'?")
        return b'"head"\n'

    def encode(self, rollout: Rollout, events: Sequence[Event], options: ExportOptions) -> bytes:
        if rollout.metadata.get("leave_out"):
            return b""
        if rollout.metadata.get("break"):
            raise RuntimeError("this rollout cannot be encoded")
        if rollout.metadata.get("refuse"):
            options.state["refused"] = rollout.rollout_id
        line = {
            "rollout_id": rollout.rollout_id,
            "seqs": [event.seq for event in events],
            "policy": options.policy,
            "parameters": dict(options.parameters),
            "padding": "x" * rollout.metadata.get("padding_bytes", 0),
        }
        return to_json(line) + b"\n"

    def finish(self, options: ExportOptions) -> bytes:
        if "refused" in options.state:
            raise Invalid(f"not with {options.state['refused']!r}", hint="leave it out")
        return b'"tail"\n'


@attrs.define
class Service:
    """One running service, and what its tests look at."""

    url: str
    client: httpx.AsyncClient
    services: Services
    store: MemoryStore
    gateway: NotingGateway
    app: Quart

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; ``key`` becomes its bearer."""
        key = options.pop("key", None)
        if key is not None:
            options["headers"] = {**options.get("headers", {}), "Authorization": f"Bearer {key}"}
        return await self.client.request(method, path, **options)

    async def enqueue(self, **fields: Any) -> dict[str, Any]:
        """Enqueue one rollout as the algorithm and return it."""
        answer = await self.ask("POST", "/api/rollouts", json=fields, key="algorithm-key")
        assert answer.status_code == 201, answer.text
        rollout: dict[str, Any] = answer.json()
        return rollout

    async def patch(self, rollout_id: str, **fields: Any) -> httpx.Response:
        """PATCH a rollout as the algorithm."""
        path = f"/api/rollouts/{rollout_id}"
        return await self.ask("PATCH", path, json=fields, key="algorithm-key")

    def token(self, rollout_id: str, seconds: float | None = None) -> str:
        """A token for a rollout."""
        return self.services.authority.mint(rollout_id, seconds)[0]


StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start() -> AsyncIterator[StartService]:
    """Start services; all of them are closed after the test."""
    async with AsyncExitStack() as stack:

        async def run(
            *,
            auth: AuthSettings | None = None,
            server: ServerSettings | None = None,
            gateway_settings: GatewaySettings | None = None,
            hooks: Sequence[Any] = (),
            change_app: Callable[[Quart], None] | None = None,
        ) -> Service:
            settings = Settings(
                server=server or ServerSettings(),
                auth=auth or AuthSettings(),
                gateway=gateway_settings or GatewaySettings(),
            )
            clock = SystemClock()
            store = await stack.enter_async_context(MemoryStore(clock))
            feed = ChangeFeed(store, clock, settings.server.max_waiters)
            gateway = NotingGateway()
            gateway.store = store
            services = Services(
                settings=settings,
                clock=clock,
                store=store,
                authority=Authority(settings.auth, clock),
                feed=feed,
                gateway=gateway,
                exporters={"lines": LineExporter()},
                rollout_hooks=hooks,
                plugins=({"name": "memory"},),
            )
            app = Quart("agl_test", static_folder=None)
            register(app, services)
            if change_app is not None:
                change_app(app)
            url = await stack.enter_async_context(serve_asgi(app))
            stack.callback(feed.close)
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=url,
                    trust_env=False,
                    timeout=30,
                    limits=httpx.Limits(max_connections=None),
                )
            )
            return Service(url, client, services, store, gateway, app)

        yield run


@pytest.fixture
async def service(start: StartService) -> Service:
    """A service without keys: this machine is the algorithm."""
    return await start()


@pytest.fixture
async def keyed(start: StartService) -> Service:
    """A service with a key for each role."""
    return await start(auth=KEYS)


@pytest.fixture
def keys() -> AuthSettings:
    """Keys named after their roles."""
    return KEYS


@pytest.fixture
async def bounded() -> AsyncIterator[None]:
    """Ten seconds for what must not hang."""
    async with asyncio.timeout(10):
        yield
