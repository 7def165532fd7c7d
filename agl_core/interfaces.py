"""What plugins implement. The core calls these objects; hooks (``hookspecs.py``) hand them over.

Objects that hold something open are async context managers: the service enters them before it
serves and leaves them, in reverse order, after the last request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from attrs import field, frozen

from agl_core.records import (
    Attempt,
    Event,
    EventDraft,
    EventPage,
    Mode,
    ModelServer,
    PolicyPause,
    Resources,
    Rollout,
    RolloutError,
    RolloutPage,
    RolloutSpec,
    Status,
)
from agl_core.settings import ServerSettings

# --- store ---------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RolloutQuery:
    """Which rollouts a list shows. Filters that are None let everything through."""

    ids: frozenset[str] | None = None
    statuses: frozenset[Status] | None = None
    group_id: str | None = None
    mode: Mode | None = None
    changed_after: str | None = None
    """Cursor; None: from the start, without tombstones."""
    limit: int = 100


@frozen(kw_only=True)
class EventQuery:
    """Which events of one rollout a list shows."""

    rollout_id: str
    attempt_id: str | None = None
    """None: of every attempt (the API fills in the default attempt before it asks the store)."""
    event_type: str | None = None
    after: str | None = None
    limit: int = 1000


@frozen(kw_only=True)
class AddedRollouts:
    """What ``add_rollouts`` did: the records in the order asked for, and which of them are new."""

    items: tuple[Rollout, ...]
    created: tuple[bool, ...]


@frozen(kw_only=True)
class GatewayState:
    """What all replicas of the service share about model servers."""

    servers: tuple[ModelServer, ...] = ()
    pauses: Mapping[str, PolicyPause] = field(factory=dict)


@frozen(kw_only=True)
class Change:
    """Says that something changed, so that waiters look again."""

    kind: Literal["rollout", "gateway"]
    rollout_id: str | None = None
    group_id: str | None = None
    is_end: bool = False
    """The rollout became terminal or was deleted."""


class Store(AbstractAsyncContextManager["Store"], Protocol):
    """Keeps rollouts, events, the registry of model servers and resources.

    A store is right when it passes ``agl_core.testing.contracts.StoreContract``. Rules of state
    live in the core: a store applies the functions it is given, atomically, and keeps what they
    return.
    """

    is_durable: bool
    """Whether what was accepted survives a restart."""

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> AddedRollouts:
        """Add all or none; each gets version 1 and the next place in the change order.

        One whose id exists with the same spec (``transitions.is_same_spec``) is returned as it is.

        Raises:
            RolloutExists: An id is taken by another spec, or stands twice with different specs;
                ``details["index"]`` says which.
            StoreError: The store is full or cannot be reached.
        """
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout.

        Raises:
            NotFound: There is none of that id.
        """
        ...

    async def change_rollout(
        self, rollout_id: str, change: Callable[[Rollout], Rollout]
    ) -> Rollout:
        """Read, change and write as one step; whatever ``change`` raises goes to the caller.

        Where ``change`` returns an equal record nothing happens. Else ``version`` is raised by one
        and the rollout moves to the end of the change order. ``change`` is pure and may be called
        more than once.

        Raises:
            NotFound: There is none of that id.
        """
        ...

    async def delete_rollout(self, rollout_id: str) -> None:
        """Remove a rollout and its events and leave a tombstone in the change order.

        Raises:
            NotFound: There is none of that id.
        """
        ...

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        """Latest states in change order. With a cursor, deletions after it stand as tombstones.

        An empty page returns the cursor it was given (or one for the present end).

        Raises:
            CursorExpired: The cursor is of another epoch, or older than the oldest tombstone kept.
        """
        ...

    async def append_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: Sequence[EventDraft],
        *,
        timestamp: float,
        guard: Callable[[Rollout], None] | None = None,
    ) -> tuple[Event, ...]:
        """Append all or none; ``seq`` counts on within the rollout.

        Args:
            rollout_id: Whose events.
            attempt_id: Of which attempt.
            drafts: In order.
            timestamp: Seconds since the epoch.
            guard: Called with the present record in the same transaction; raises to refuse.

        Raises:
            NotFound: There is no such rollout.
            StoreError: They could not be kept.
        """
        ...

    async def list_events(self, query: EventQuery) -> EventPage:
        """Events in order.

        Raises:
            NotFound: There is no such rollout.
        """
        ...

    async def get_gateway_state(self) -> GatewayState:
        """Registry and pauses."""
        ...

    async def change_gateway_state(
        self, change: Callable[[GatewayState], GatewayState]
    ) -> GatewayState:
        """Read, change and write as one step, as ``change_rollout`` does."""
        ...

    async def add_resources(self, data: Mapping[str, Any], *, created_at: float) -> Resources:
        """Keep a bundle under a new id and the next version."""
        ...

    async def get_resources(self, resources_id: str | None) -> Resources:
        """One bundle; None: the latest.

        Raises:
            NotFound: There is none.
        """
        ...

    def on_change(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call ``listener`` in the event loop after each change; returns what removes it."""
        ...


# --- gateway -------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RouteRequest:
    """What a resolver may know of a call."""

    rollout_id: str
    attempt_id: str
    policy: str
    model: str | None
    api: str
    failed: frozenset[tuple[str, str]] = frozenset()
    """Keys (model, endpoint) of servers that this call has failed on."""


@frozen(kw_only=True)
class Candidate:
    """A healthy server of the policy that was asked for, and what is in flight there now."""

    server: ModelServer
    inflight: int


@frozen(kw_only=True)
class Route:
    """Where a call goes: a server, and changes to the request (None removes a field)."""

    server: ModelServer
    changes: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class ServerAnswer:
    """What a model server said when it was asked beside the calls."""

    status: int
    body: bytes


class ModelServers(Protocol):
    """The registered model servers, and a way to ask them something beside the calls."""

    def registered(self) -> Sequence[ModelServer]:
        """Every registered server, healthy or not, in the order of registration."""
        ...

    def inflight(self, server: ModelServer) -> int:
        """Calls of this service that are in flight on a server now."""
        ...

    async def get(
        self, server: ModelServer, path: str, *, seconds: float, limit_bytes: int
    ) -> ServerAnswer:
        """Ask a server by GET, with the credential that it is registered with.

        It says nothing about the server's health, whatever the answer.

        Args:
            server: Whom to ask.
            path: Of the server's own routes, such as ``/metrics``: below its root, which is its
                endpoint without ``/v1``.
            seconds: For the whole answer, the connection included.
            limit_bytes: The largest body that is read.

        Raises:
            UpstreamError: There was no whole answer within these bounds.
        """
        ...


class RouteResolver(Protocol):
    """Picks a model server for each call.

    One that holds something open is an async context manager besides.
    """

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        """Pick one of ``candidates`` (never empty), or None to leave it to the next resolver."""
        ...

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended: drop what is kept for it."""
        ...


@frozen(kw_only=True)
class ReshapeRequest:
    """A request to a model server, before it is sent."""

    rollout: Rollout
    attempt_id: str
    server: ModelServer
    api: str
    fields: Mapping[str, Any]
    """The agent's request, decoded; empty where its body is not a JSON object."""


class RequestReshaper(Protocol):
    """Changes requests on their way."""

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        """Fields to set in the request's JSON; None removes one. What changed is recorded."""
        ...


class CaptureSink(AbstractAsyncContextManager["CaptureSink"], Protocol):
    """Receives every captured event, beside the store, off the request path."""

    async def receive(self, event: Event) -> None:
        """Take one event. An exception is logged, counted, and loses it to this sink alone."""
        ...


# --- export --------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ExportOptions:
    """What was asked for with an export."""

    policy: str | None = None
    parameters: Mapping[str, str] = field(factory=dict)
    """Other query parameters, for the exporter to check."""
    state: dict[str, Any] = field(factory=dict, eq=False, repr=False)
    """What the exporter keeps between the pieces of this one export; several may run at once."""


class Exporter(Protocol):
    """Gives rollouts in a trainer's form, one piece of bytes per rollout."""

    format: str
    media_type: str

    def begin(self, options: ExportOptions) -> bytes:
        """What stands before the first rollout.

        Raises:
            Invalid: An option is not one of this format's.
        """
        ...

    def encode(self, rollout: Rollout, events: Sequence[Event], options: ExportOptions) -> bytes:
        """One rollout, with the events of the attempt that counts; b"" leaves it out.

        Raises:
            AglError: The whole export is refused. Early on that is the answer, later it breaks the
                answer off.
        """
        ...

    def finish(self, options: ExportOptions) -> bytes:
        """What stands after the last one.

        Raises:
            AglError: The whole export is refused, as in ``encode``, for what it has as a whole.
        """
        ...


class RolloutHooks(Protocol):
    """Looks at rollouts as they come and go."""

    async def on_enqueue(self, spec: RolloutSpec) -> RolloutSpec:
        """Return the spec or another in its place; raising ``Invalid`` refuses the request."""
        ...

    async def on_finished(self, rollout: Rollout, events: Sequence[Event]) -> Sequence[EventDraft]:
        """Called once when a rollout has ended; what is returned is appended (a reward, say)."""
        ...


# --- execution -----------------------------------------------------------------------------------


@frozen(kw_only=True)
class Work:
    """What a runner needs to run a rollout."""

    rollout: Rollout
    agent_url: str
    """How agents reach the service, without a slash at the end."""
    token: str = field(repr=False)
    job_defaults: Mapping[str, Any] = field(factory=dict)
    """From the rollout's resources."""


@frozen(kw_only=True)
class RunReport:
    """What a runner knows of one rollout: its attempts, and whether another may follow."""

    rollout_id: str
    attempts: tuple[Attempt, ...]
    is_finished: bool = False
    """No attempt runs and none follows."""
    outcome: Literal["succeeded", "failed", "cancelled"] | None = None
    """Set when finished."""
    succeeded_attempt_id: str | None = None
    error: RolloutError | None = None
    evidence: Mapping[str, tuple[EventDraft, ...]] = field(factory=dict)
    """Events to keep by attempt id, such as the log tail of one that failed."""


@frozen(kw_only=True)
class Finding:
    """What a look at one thing showed, before the first rollout needs it."""

    subject: str
    """A word or two: what was looked at."""
    status: Literal["ok", "warning", "failed", "skipped"]
    message: str
    """What was seen, in a line."""
    hint: str | None = None
    """What to do about it."""


class Runner(AbstractAsyncContextManager["Runner"], Protocol):
    """Starts and stops attempts: it makes them and their retries, the controller reports."""

    max_active: int
    """How many rollouts may be active at once."""

    async def start(self, work: Work) -> None:
        """Run a rollout; idempotent by its id, also across restarts of the controller.

        For one that runs already, only the token is renewed; attempts that the rollout's record
        has and the runner does not know any more still count as made.

        Raises:
            Invalid: It can never run as it is asked for.
            Unavailable: Not now; ask again later.
        """
        ...

    async def stop(self, rollout_id: str, reason: Literal["cancelled", "timeout"]) -> None:
        """End what runs of a rollout; after ``timeout`` a retry may follow.

        Returns at once; the end is reported by ``watch``. Unknown ids are no error.
        """
        ...

    async def release(self, rollout_id: str) -> None:
        """The end has been stored: forget the rollout, clean up. Unknown ids are no error."""
        ...

    async def list(self) -> Sequence[RunReport]:
        """Everything that exists, running or finished and not yet released."""
        ...

    def watch(self) -> AsyncIterator[RunReport]:
        """Reports as they change. It begins with nothing: call ``list`` for the present state."""
        ...

    def logs(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        container: str | None = None,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[bytes]:
        """What an attempt has printed, in pieces of any size, tokens blacked out.

        The runner need not be entered: whoever looks at a log disturbs no controller.

        Args:
            rollout_id: Whose attempt.
            attempt_id: One that a report had.
            container: Of an attempt that has several; None: the agent's.
            tail_lines: Only the last ones; None: all that is kept.
            follow: Go on with what is written, until the attempt has ended.

        Raises:
            NotFound: There is no log, or not any more; the hint says where else to look.
            Invalid: It has no such container.
            Unavailable: It cannot be read now.
        """
        ...

    def examine(self, work: Work, *, with_probe: bool) -> AsyncIterator[Finding]:
        """Look whether rollouts could run, and say of each thing how it is.

        As for ``logs``, the runner need not be entered. What is wrong is a finding, never raised;
        what could not be looked at because of that is ``skipped``.

        Args:
            work: A rollout as users' are, that the service does not know: its config is looked at,
                and its time-out says how long a probe may take. Its command is not run.
            with_probe: Start something where agents run, which tries to reach ``agent_url``; it
                is gone afterwards.
        """
        ...

    async def until_ready(self) -> None:
        """Return when the next rollout may be started, where starts are limited by rate.

        The controller calls it before each start, one call at a time.
        """
        ...

    async def until_lost(self) -> None:
        """Return when another controller has, or may soon have, taken over: work ends at once.

        A runner that is never taken over does not return.
        """
        ...


# --- serving and the client ----------------------------------------------------------------------

AsgiApp = Callable[[dict[str, Any], Callable[[], Any], Callable[[dict[str, Any]], Any]], Any]


class AsgiServer(Protocol):
    """Runs the application on sockets that are bound already."""

    async def serve(
        self,
        app: AsgiApp,
        sockets: Sequence[socket.socket],
        settings: ServerSettings,
        closing: asyncio.Event,
    ) -> None:
        """Serve until ``closing`` is set; open requests are the application's business.

        The sockets listen already and are taken over: the server closes them. Only HTTP/1.1 is
        spoken over TLS unless the settings say otherwise, and no time-out cuts a long answer.
        """
        ...


class WebApp(Protocol):
    """What ``register_routes`` may add to."""

    def register_blueprint(self, blueprint: Any, **options: Any) -> None:
        """Add a Quart blueprint."""
        ...


class ClientExtension(Protocol):
    """Adds to the client: headers for each request, and a namespace (``client.verl``)."""

    name: str

    def headers(self) -> Mapping[str, str]:
        """Headers to add to each request, read anew for each."""
        ...

    def namespace(self, client: Any) -> object:
        """The object that ``client.<name>`` is; called once per client, on first use."""
        ...
