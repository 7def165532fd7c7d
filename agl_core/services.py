"""What the HTTP API works with: the parts that ``app.py`` builds and hands to each blueprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from agl_core.auth import Authority
from agl_core.clock import Clock
from agl_core.feed import ChangeFeed
from agl_core.interfaces import Exporter, GatewayState, RolloutHooks, Store
from agl_core.records import Event, ModelServer, PauseMode
from agl_core.settings import Settings

StateChange = Callable[[GatewayState], GatewayState]
"""A change of the shared state, made in one step with a pause or resume."""


class GatewayControl(Protocol):
    """The gateway as the API sees it."""

    async def pause(
        self,
        policy: str | None,
        mode: PauseMode,
        reason: str | None = None,
        drain_seconds: float | None = None,
        *,
        change: StateChange | None = None,
    ) -> None:
        """Close admission for a policy (None: all trained), then do what the mode says.

        ``drain`` returns when nothing of it is in flight, or after ``drain_seconds``. ``keep``
        returns when its engines are frozen.

        Raises:
            NotFound: The policy is neither registered nor paused.
            AglError: ``engine_pause_failed``: an engine could not be frozen, and the pause is
                undone; ``change`` is not.
        """
        ...

    async def resume(self, policy: str | None, *, change: StateChange | None = None) -> None:
        """Open admission; frozen engines and calls that were held go on."""
        ...

    def state(self) -> dict[str, Any]:
        """``gateway state`` of the API: {policies: {name: {...}}}."""
        ...

    def server_view(self, server: ModelServer) -> dict[str, Any]:
        """A registry entry with ``healthy`` and ``inflight``; a credential by its name alone."""
        ...

    def abort_calls(self, rollout_id: str) -> int:
        """Close the calls in flight of a rollout; returns how many there were."""
        ...

    async def registry_changed(self) -> None:
        """Read registry and pauses anew, now; probes new servers in the background."""
        ...

    async def captured(self, rollout_id: str) -> None:
        """Wait until every event accepted for the rollout so far is in the store (read barrier)."""
        ...

    def publish(self, events: Sequence[Event]) -> None:
        """Hand stored events to the capture sinks; never waits."""
        ...

    def unready(self) -> list[dict[str, Any]]:
        """Why the service is not ready: [{server, policy, field, message}]; empty when it is."""
        ...

    def metrics(self) -> Sequence[tuple[str, Mapping[str, str], float]]:
        """Counters and gauges as (name, labels of closed sets, value)."""
        ...


@frozen(kw_only=True)
class Services:
    """Everything a blueprint may use."""

    settings: Settings
    clock: Clock
    store: Store
    authority: Authority
    feed: ChangeFeed
    gateway: GatewayControl
    exporters: Mapping[str, Exporter] = field(factory=dict)
    rollout_hooks: Sequence[RolloutHooks] = ()
    plugins: Sequence[Mapping[str, Any]] = ()
    """What ``agl plugins`` shows, for ``/healthz``."""
