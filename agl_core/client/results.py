"""What the client returns beside the records, and how answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from agl_core import wire
from agl_core.errors import AglError
from agl_core.records import Event, EventPage, ModelServer, PauseMode, Rollout

T = TypeVar("T")


class WaitTimeout(AglError, TimeoutError):
    """Not all rollouts had ended in time.

    Attributes:
        missing: Ids of those that had not.
        rollouts: The latest states that were seen, by id.
    """

    default_code = "wait_timeout"
    default_status = 504

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        rollouts: Mapping[str, Rollout] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details={"missing": list(missing)})
        self.missing = list(missing)
        self.rollouts = dict(rollouts or {})


@frozen(kw_only=True)
class Refusal:
    """One rollout that a bulk cancel left as it was, and why."""

    rollout_id: str
    code: str
    message: str = ""


@frozen(kw_only=True)
class CancelResult:
    """What a bulk cancel did."""

    items: tuple[Rollout, ...] = ()
    refused: tuple[Refusal, ...] = ()


@frozen(kw_only=True)
class RolloutToken:
    """What an agent authenticates with; it ends with its rollout."""

    token: str = field(repr=False)
    expires_at: float
    """Seconds since the epoch, UTC."""


@frozen(kw_only=True)
class ModelServerView:
    """A registered model server, and how it is doing."""

    server: ModelServer
    healthy: bool | None
    """None: not probed yet."""
    inflight: int


@frozen(kw_only=True)
class PolicyView:
    """One policy in the gateway's state."""

    paused: bool
    mode: PauseMode | None = None
    reason: str | None = None
    inflight: int = 0
    held: int = 0
    """Requests that wait for the resume or for a server."""
    version: int | None = None
    paused_seconds: float = 0.0


@frozen(kw_only=True)
class GatewayView:
    """The gateway's state, by policy."""

    policies: Mapping[str, PolicyView] = field(factory=dict)


@frozen(kw_only=True)
class HealthView:
    """What ``/healthz`` says."""

    status: str
    version: str = ""
    plugins: tuple[Mapping[str, Any], ...] = ()


@frozen(kw_only=True)
class ReadyView:
    """What ``/readyz`` says."""

    ready: bool
    reasons: tuple[Mapping[str, Any], ...] = ()


@frozen(kw_only=True)
class _Health:
    healthy: bool | None = None
    inflight: int = 0


def read_record(value: Any, kind: type[T]) -> T:
    """One record."""
    return wire.structure_answer(value, kind)


def read_items(value: Any, kind: type[T]) -> list[T]:
    """The records of ``{items: [...]}``; a lone record counts as a list of one."""
    items = value.get("items", [value])
    return [wire.structure_answer(item, kind) for item in items]


def read_event_page(value: Any) -> EventPage:
    """A page of events."""
    return EventPage(items=tuple(read_items(value, Event)), cursor=value["cursor"])


def read_server(value: Any) -> ModelServerView:
    """A registry entry, which the API shows as one flat object."""
    health = wire.structure_answer(value, _Health)
    return ModelServerView(
        server=wire.structure_answer(value, ModelServer),
        healthy=health.healthy,
        inflight=health.inflight,
    )


def read_servers(value: Any) -> list[ModelServerView]:
    """Registry entries."""
    return [read_server(item) for item in value["items"]]
