"""What the API takes and gives besides the records: queries, request bodies and answers.

The classes check requests (through ``wire.structure``) and describe both sides in
``/openapi.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, le, max_len, min_len, optional

from agl_core.records import (
    Event,
    Group,
    LogprobsMode,
    Mode,
    ModelServer,
    NativeApi,
    PauseMode,
    Rollout,
    RolloutConfig,
    RolloutSpec,
    Status,
    Tombstone,
    usable_id,
)

MAX_WAIT_SECONDS = 60.0
MAX_SIBLINGS = 10_000

_usable: Any = optional(usable_id)

# --- queries -------------------------------------------------------------------------------------


@frozen(kw_only=True)
class NoQuery:
    """A request that takes no query parameters."""


@frozen(kw_only=True)
class RolloutListQuery:
    """Which rollouts to list; lists may be comma-separated or repeated."""

    ids: tuple[str, ...] | None = None
    status: tuple[Status, ...] | None = None
    group_id: str | None = None
    mode: Mode | None = None
    changed_after: str | None = None
    limit: int = field(default=100, validator=[ge(1), le(1000)])
    wait: float = field(default=0.0, validator=[ge(0), le(MAX_WAIT_SECONDS)])


@frozen(kw_only=True)
class EventListQuery:
    """Which events of a rollout to list."""

    rollout_id: str
    attempt_id: str | None = None
    all_attempts: bool = False
    type: str | None = None
    after: str | None = None
    limit: int = field(default=1000, validator=[ge(1), le(10_000)])


@frozen(kw_only=True)
class ModelQuery:
    """Which registry entries are meant."""

    model: str
    endpoint: str | None = None


@frozen(kw_only=True)
class ExportQuery:
    """Which rollouts to export. Further parameters are the format's own."""

    ids: tuple[str, ...] | None = None
    group_id: str | None = None
    policy: str | None = None
    mode: Literal["train", "val", "all"] = "train"


# --- rollouts ------------------------------------------------------------------------------------


@frozen(kw_only=True)
class EnqueueItem:
    """One rollout to enqueue, or with ``n`` a group of siblings."""

    input: Any = None
    rollout_id: str | None = field(default=None, validator=_usable)
    n: int | None = field(default=None, validator=optional(and_(ge(1), le(MAX_SIBLINGS))))
    group_id: str | None = field(default=None, validator=_usable)
    mode: Mode = "train"
    group: Group | None = None
    replaces: str | None = None
    config: RolloutConfig = field(factory=RolloutConfig)
    resources_id: str | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    priority: int = 0
    grade: Literal["none", "pending"] = "none"

    def spec(self) -> RolloutSpec:
        """The item without what makes a group of it."""
        names = [attribute.name for attribute in attrs.fields(RolloutSpec)]
        return RolloutSpec(**{name: getattr(self, name) for name in names})


@frozen(kw_only=True)
class EnqueueBatch:
    """Rollouts with defaults for each; config and metadata are merged key by key."""

    rollouts: tuple[EnqueueItem, ...]
    config: Mapping[str, Any] = field(factory=dict)
    resources_id: str | None = None
    metadata: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class RolloutItems:
    """Rollouts in the order asked for."""

    items: tuple[Rollout, ...]


@frozen(kw_only=True)
class RolloutList:
    """Latest states in change order, deletions as tombstones, and where to go on."""

    items: tuple[Rollout | Tombstone, ...]
    cursor: str


@frozen(kw_only=True)
class CancelRequest:
    """Which rollouts to cancel: ``ids`` or ``group_id``."""

    ids: tuple[str, ...] | None = None
    group_id: str | None = None


@frozen(kw_only=True)
class Refusal:
    """Why one rollout was not cancelled."""

    rollout_id: str
    code: str
    message: str


@frozen(kw_only=True)
class CancelAnswer:
    """Which rollouts were asked to end, and which not."""

    items: tuple[Rollout, ...]
    refused: tuple[Refusal, ...]


@frozen(kw_only=True)
class TokenAnswer:
    """A token for one rollout."""

    token: str
    expires_at: float


# --- events --------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RewardData:
    """The data of a ``reward`` event; ``source`` is set by the service."""

    value: float | None
    metrics: Mapping[str, float] = field(factory=dict)
    message: str | None = None
    call_id: str | None = None
    policy: str | None = None
    source: Any = None


@frozen(kw_only=True)
class EventItems:
    """Events that were appended, all or none."""

    items: tuple[Event, ...]


# --- models and gateway --------------------------------------------------------------------------


@frozen(kw_only=True)
class ModelServerView:
    """A registry entry, and how it does."""

    model: str
    endpoint: str
    version: int
    policy: str
    trained: bool
    served_model: str | None
    aliases: tuple[str, ...]
    logprobs_mode: LogprobsMode
    credential: str | None
    salt: bool
    native: tuple[NativeApi, ...]
    healthy: bool
    inflight: int


@frozen(kw_only=True)
class ModelServerItems:
    """Registry entries."""

    items: tuple[ModelServerView, ...]


@frozen(kw_only=True)
class PauseRequest:
    """What to pause (null: every trained policy), and what becomes of the calls in flight."""

    policy: str | None = None
    mode: PauseMode = "drain"
    reason: str | None = field(default=None, validator=optional(max_len(1000)))
    drain_seconds: float | None = field(default=None, validator=optional(ge(0)))


@frozen(kw_only=True)
class ResumeRequest:
    """What to resume (null: every paused policy)."""

    policy: str | None = None


@frozen(kw_only=True)
class ModelServerSet:
    """The whole registry, and what becomes of admission in the same step.

    ``resume`` opens every policy that is paused, ``pause`` closes what it says.
    """

    items: tuple[ModelServer, ...]
    resume: bool = False
    pause: PauseRequest | None = None


@frozen(kw_only=True)
class PolicyState:
    """Admission to one policy."""

    paused: bool
    mode: PauseMode | None
    reason: str | None
    inflight: int
    held: int
    version: int | None
    paused_seconds: float


@frozen(kw_only=True)
class GatewayStateView:
    """Admission by policy."""

    policies: Mapping[str, PolicyState]


# --- the rest ------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ResourcesDraft:
    """A bundle to keep."""

    data: Mapping[str, Any]


@frozen(kw_only=True)
class Health:
    """The service runs."""

    status: Literal["ok"]
    version: str
    plugins: tuple[Mapping[str, Any], ...]


@frozen(kw_only=True)
class Readiness:
    """Whether calls can be served, and why not."""

    ready: bool
    reasons: tuple[Mapping[str, Any], ...] = ()


@frozen(kw_only=True)
class ProblemDocument:
    """An error (RFC 9457) with a stable code."""

    type: str
    title: str
    status: int
    detail: str
    code: str = field(validator=min_len(1))
    hint: str | None = None
    details: Mapping[str, Any] | None = None
