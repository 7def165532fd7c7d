"""The gateway as a whole: its parts put together, and what the API may ask of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Self

from agl_core.auth import Authority
from agl_core.clock import Clock
from agl_core.gateway.admit import Admission
from agl_core.gateway.call import Call
from agl_core.gateway.call_context import CallContext
from agl_core.gateway.call_limits import CallLimits
from agl_core.gateway.capture import SinkQueue
from agl_core.gateway.engines import EngineClient, frozen_urls
from agl_core.gateway.forward import Forwarder
from agl_core.gateway.front import GatewayFront
from agl_core.gateway.gate import Gates
from agl_core.gateway.health import HealthChecks
from agl_core.gateway.memory import ConversationMemory
from agl_core.gateway.model_servers import RegisteredServers
from agl_core.gateway.probe import Prober
from agl_core.gateway.recorder import Recorder
from agl_core.gateway.registry import Registry
from agl_core.gateway.repeats import Repeats
from agl_core.gateway.reshape import RequestShaper
from agl_core.gateway.rounds import Rounds
from agl_core.gateway.updates import WeightUpdates
from agl_core.gateway.upstream import PooledUpstreamClient, UpstreamClient
from agl_core.interfaces import (
    AsgiApp,
    CaptureSink,
    Change,
    ModelServers,
    RequestReshaper,
    RouteResolver,
    Store,
)
from agl_core.records import Event, ModelServer, PauseMode
from agl_core.services import StateChange
from agl_core.settings import CaptureSettings, GatewaySettings
from agl_core.wire import to_builtins

log = logging.getLogger(__name__)

_SINK_STOP_SECONDS = 5.0


class Gateway:
    """Owns registry, gates, upstream client and recorder. An async context manager.

    Args:
        resolvers: Makes the route resolvers, with their plugins' names, from what they may know of
            the servers.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        store: Store,
        authority: Authority,
        *,
        resolvers: Callable[[ModelServers], Sequence[tuple[str, RouteResolver]]],
        reshapers: Sequence[tuple[str, RequestReshaper]] = (),
        sinks: Sequence[tuple[str, CaptureSink]] = (),
        client: UpstreamClient | None = None,
        capture: CaptureSettings | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._authority = authority
        self._raw_sinks = sinks
        self._sinks = {name: SinkQueue(name, sink, settings.sink_queue) for name, sink in sinks}
        self._client: UpstreamClient = client or PooledUpstreamClient()
        self._registry = Registry(settings, clock)
        engines = EngineClient(settings, self._client)
        self._resolvers = resolvers(RegisteredServers(self._registry, engines))
        self._gates = Gates(clock)
        self._prober = Prober(settings, clock, self._registry, self._client)
        self._recorder = Recorder(store, clock, self._sinks, capture)
        self._memory = ConversationMemory()
        self._limits = CallLimits(store)
        self._repeats = Repeats(settings.repeats, clock)
        shaper = RequestShaper(settings.sampling, reshapers, self._memory)
        self._rounds = Rounds()
        self._forwarder = Forwarder(
            settings,
            clock,
            self._registry,
            self._gates,
            self._client,
            self._resolvers,
            shaper,
            self._rounds,
        )
        self._front: GatewayFront | None = None
        self._health = HealthChecks(settings, clock, self._registry, engines, self._gates.is_paused)
        self._updates = WeightUpdates(
            settings,
            clock,
            store,
            self._registry,
            self._gates,
            engines,
            self.registry_changed,
            self._calls_in_flight,
        )
        self._refresh_lock = asyncio.Lock()
        self._refreshes: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    def in_front_of(self, behind: AsgiApp) -> GatewayFront:
        """The application that serves model calls itself and the rest by ``behind``."""
        admission = Admission(
            store=self._store,
            authority=self._authority,
            clock=self._clock,
            calls_per_rollout=self._settings.calls_per_rollout,
        )
        context = CallContext(
            settings=self._settings,
            clock=self._clock,
            registry=self._registry,
            gates=self._gates,
            forwarder=self._forwarder,
            recorder=self._recorder,
            memory=self._memory,
            limits=self._limits,
            rounds=self._rounds,
        )
        self._front = GatewayFront(behind, admission, context, self._repeats)
        return self._front

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            for name, sink in self._raw_sinks:
                await stack.enter_async_context(sink)
                self._sinks[name].start()
                stack.push_async_callback(self._sinks[name].stop, _SINK_STOP_SECONDS)
            await stack.enter_async_context(self._recorder)
            stack.push_async_callback(self._prober.close)
            stack.push_async_callback(self._updates.close)
            stack.push_async_callback(self._health.close)
            self._health.start()
            stack.push_async_callback(self._repeats.close)
            stack.callback(self._store.on_change(self._on_change))
            await self.registry_changed()
            for _, resolver in self._resolvers:
                if isinstance(resolver, AbstractAsyncContextManager):
                    await stack.enter_async_context(resolver)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._refreshes:
            task.cancel()
        await asyncio.gather(*self._refreshes, return_exceptions=True)
        await self._stack.aclose()

    def close_admission(self) -> None:
        """The service is going down: held calls get a 503 now, new ones too."""
        self._gates.close()

    def end_all(self) -> int:
        """End what is still in flight, truthfully; returns how many calls that were."""
        return self._front.kill("shutdown") if self._front is not None else 0

    # What changes

    def _on_change(self, change: Change) -> None:
        if change.kind == "gateway":
            task = asyncio.create_task(self._refresh_logged())
            self._refreshes.add(task)
            task.add_done_callback(self._refreshes.discard)
        elif change.is_end and change.rollout_id is not None:
            for _, resolver in self._resolvers:
                resolver.forget(change.rollout_id)
            self._memory.forget(change.rollout_id)
            self._limits.forget(change.rollout_id)
            self._repeats.forget(change.rollout_id)

    async def _refresh_logged(self) -> None:
        try:
            await self.registry_changed()
        except Exception:
            log.exception("the registry could not be read")

    async def registry_changed(self) -> None:
        """Read registry and pauses anew; probes new servers in the background."""
        async with self._refresh_lock:
            state = await self._store.get_gateway_state()
            fresh = self._registry.replace(state.servers, frozen_urls(state.pauses))
            self._gates.update(self._registry.policies, state.pauses)
        self._updates.look_after(state)
        if self._settings.probe and fresh:
            self._prober.probe(fresh, self._gates.is_paused)

    async def pause(
        self,
        policy: str | None,
        mode: PauseMode,
        reason: str | None = None,
        drain_seconds: float | None = None,
        *,
        change: StateChange | None = None,
    ) -> None:
        """Close admission, then do what the mode says (see ``services.GatewayControl``)."""
        await self._updates.pause(policy, mode, reason, drain_seconds, change, self._kill_policy)

    async def resume(self, policy: str | None, *, change: StateChange | None = None) -> None:
        """Open admission; frozen engines and calls that were held go on."""
        await self._updates.resume(policy, change)

    def _kill_policy(self, policy: str) -> None:
        if self._front is not None:
            self._front.kill("paused", policy=policy)

    def _calls_in_flight(self) -> Iterable[Call]:
        return () if self._front is None else self._front.open_calls

    # What is told

    def state(self) -> dict[str, Any]:
        """``gateway state`` of the API."""
        versions: dict[str, int] = {}
        for server in self._registry.servers:
            versions[server.policy] = max(server.version, versions.get(server.policy, 0))
        return {"policies": self._gates.state(versions)}

    def server_view(self, server: ModelServer) -> dict[str, Any]:
        """A registry entry with ``healthy`` and ``inflight``."""
        view: dict[str, Any] = to_builtins(server)
        view["healthy"] = self._registry.is_healthy(server.key)
        view["inflight"] = self._registry.inflight(server.key)
        return view

    def abort_calls(self, rollout_id: str) -> int:
        """Close the calls in flight of a rollout."""
        if self._front is None:
            return 0
        return self._front.kill("cancelled", rollout_id=rollout_id)

    async def captured(self, rollout_id: str) -> None:
        """Wait until every event accepted for the rollout so far is in the store."""
        await self._recorder.settled(rollout_id)

    def publish(self, events: Sequence[Event]) -> None:
        """Hand stored events to the capture sinks."""
        self._recorder.publish(events)

    def unready(self) -> list[dict[str, Any]]:
        """Trained servers whose answers would train nobody."""
        return [
            {
                "server": state.server.endpoint,
                "model": state.server.model,
                "policy": state.server.policy,
                "field": state.probe_problem,
                "message": f"model server {state.server.endpoint} ({state.server.model}) failed "
                f"the probe for training: {state.probe_problem}",
            }
            for state in self._registry.states
            if state.server.trained and state.probe_problem is not None
        ]

    def metrics(self) -> list[tuple[str, Mapping[str, str], float]]:
        """Counters and gauges; labels come from closed sets."""
        rows: list[tuple[str, Mapping[str, str], float]] = [
            ("agl_gateway_calls_total", {"status": status}, count)
            for status, count in sorted(self._recorder.recorded.items())
        ]
        rows.append(("agl_gateway_retries_total", {}, self._forwarder.retries))
        rows.append(("agl_gateway_repeats_total", {"kind": "joined"}, self._repeats.joined))
        rows.append(("agl_gateway_repeats_total", {"kind": "replayed"}, self._repeats.replayed))
        for policy, values in self.state()["policies"].items():
            rows.extend(
                (f"agl_gateway_{name}", {"policy": policy}, values[name])
                for name in ("inflight", "held", "paused_seconds")
            )
            rows.append(("agl_gateway_paused", {"policy": policy}, float(values["paused"])))
        rows += self._recorder.metrics()
        for name, sink in self._sinks.items():
            rows.append(("agl_sink_dropped_total", {"sink": name}, sink.dropped))
            rows.append(("agl_sink_failed_total", {"sink": name}, sink.failed))
        return rows
