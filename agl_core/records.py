"""The records that the store keeps and the API shows: frozen attrs classes.

Times are seconds since the epoch, UTC. ``wire.py`` turns records into JSON and back; the changes
that a rollout may go through are in ``transitions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen
from attrs.validators import ge, gt, max_len, min_len, optional

Status = Literal["queuing", "running", "succeeded", "failed", "cancelled"]
Mode = Literal["train", "val"]
Grade = Literal["none", "pending", "done", "failed"]
Phase = Literal["running", "succeeded", "failed", "cancelled"]
Reason = Literal["agent", "oom", "infra", "config", "timeout", "cancelled"]
InputDelivery = Literal["env", "url", "file"]
PauseMode = Literal["drain", "keep", "abort", "reject"]
NativeApi = Literal["messages", "responses"]
LogprobsMode = Literal["raw", "processed", "unknown"]

TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
MAX_ID_CHARACTERS = 256
MAX_ENV_INPUT_BYTES = 65_536


def usable_id(_instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Ids go into paths, file names and logs: no control characters, and never a dot segment."""
    if not isinstance(value, str) or not value or len(value) > MAX_ID_CHARACTERS:
        raise ValueError(f"'{attribute.name}' must have 1 to {MAX_ID_CHARACTERS} characters")
    if (
        value in (".", "..")
        or not value.isprintable()
        or any(0xD800 <= ord(c) < 0xE000 for c in value)
    ):
        raise ValueError(f"'{attribute.name}' must be printable and not '.' or '..': {value!r}")


@frozen(kw_only=True)
class Group:
    """Rollouts of one task that are compared with each other (GRPO siblings)."""

    id: str = attrs.field(validator=usable_id)
    size: int = attrs.field(validator=ge(1))
    index: int = attrs.field(validator=ge(0))


@frozen(kw_only=True)
class Limits:
    """Bounds of one rollout's model calls; past one, a call gets the context-length error."""

    calls: int | None = attrs.field(default=None, validator=optional(ge(1)))
    completion_tokens: int | None = attrs.field(default=None, validator=optional(ge(1)))
    context_tokens: int | None = attrs.field(default=None, validator=optional(ge(1)))


@frozen(kw_only=True)
class RolloutConfig:
    """How a rollout's agent is run."""

    image: str | None = None
    """Container image; runners without containers ignore it."""
    command: tuple[str, ...] | None = None
    """Program and its first arguments; None: the image's or the runner's default."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)
    timeout_seconds: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Running time of one attempt, pauses of the policy not counted; None: the runner's default."""
    max_retries: int = attrs.field(default=0, validator=ge(0))
    """Attempts after the first after the agent's own failures; retrying selects for luck."""
    input_delivery: InputDelivery = "env"
    resources: Mapping[str, Any] = attrs.field(factory=dict)
    """Kubernetes requests and limits of the agent's container."""
    job_patch: Mapping[str, Any] = attrs.field(factory=dict)
    """The last word on the Job's manifest."""
    limits: Limits = attrs.field(factory=Limits)


@frozen(kw_only=True)
class RolloutError:
    """Why a rollout failed: its last attempt's reason, and a sentence for a person."""

    code: str
    message: str = ""


@frozen(kw_only=True)
class Attempt:
    """One try at a rollout. Its id is chosen by the runner; in Kubernetes it is the pod's UID."""

    attempt_id: str = attrs.field(validator=usable_id)
    phase: Phase = "running"
    reason: Reason | None = None
    exit_code: int | None = None
    node: str | None = None
    started_at: float | None = None
    finished_at: float | None = None

    @property
    def is_ended(self) -> bool:
        return self.phase != "running"


@frozen(kw_only=True)
class RolloutSpec:
    """What is asked for at enqueue; two specs are the same when they compare equal."""

    input: Any = None
    rollout_id: str | None = attrs.field(default=None, validator=optional(usable_id))
    mode: Mode = "train"
    group: Group | None = None
    replaces: str | None = None
    config: RolloutConfig = attrs.field(factory=RolloutConfig)
    resources_id: str | None = None
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    priority: int = 0
    """Higher starts first; the order of enqueueing decides among equals."""
    grade: Literal["none", "pending"] = "none"
    """``pending``: somebody will grade it after its end, and it is not complete before."""


@frozen(kw_only=True)
class Rollout:
    """One execution of an agent on one input, with its attempts."""

    rollout_id: str = attrs.field(validator=usable_id)
    status: Status = "queuing"
    mode: Mode = "train"
    input: Any = None
    group: Group | None = None
    replaces: str | None = None
    config: RolloutConfig = attrs.field(factory=RolloutConfig)
    resources_id: str | None = None
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    priority: int = 0
    cancel_requested: bool = False
    grade: Grade = "none"
    attempts: tuple[Attempt, ...] = ()
    succeeded_attempt_id: str | None = None
    error: RolloutError | None = None
    version: int = 0
    """Raised by the store with every change."""
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_complete(self) -> bool:
        """Terminal and graded, so that a trainer may read it."""
        return self.is_terminal and self.grade != "pending"

    def attempt(self, attempt_id: str) -> Attempt | None:
        """The attempt of that id, or None."""
        return next((a for a in self.attempts if a.attempt_id == attempt_id), None)

    @property
    def default_attempt_id(self) -> str | None:
        """The attempt that is meant when none is named: the succeeded one, else the latest."""
        if self.succeeded_attempt_id is not None:
            return self.succeeded_attempt_id
        return self.attempts[-1].attempt_id if self.attempts else None


@frozen(kw_only=True)
class RolloutPatch:
    """A change to a rollout; attempts are merged by id, absent fields stay as they are."""

    status: Status | None = None
    attempts: tuple[Attempt, ...] = ()
    succeeded_attempt_id: str | None = None
    error: RolloutError | None = None
    grade: Grade | None = None
    expected_version: int | None = None


@frozen(kw_only=True)
class Tombstone:
    """What the change feed shows of a rollout that was deleted."""

    rollout_id: str
    version: int
    deleted: Literal[True] = True


@frozen(kw_only=True)
class RolloutPage:
    """Latest states in change order, and the cursor to go on from."""

    items: tuple[Rollout | Tombstone, ...]
    cursor: str


@frozen(kw_only=True)
class EventDraft:
    """An event as posted: the store gives it its place and time."""

    event_type: str = attrs.field(validator=attrs.validators.and_(min_len(1), max_len(128)))
    data: Mapping[str, Any] = attrs.field(factory=dict)


@frozen(kw_only=True)
class Event:
    """One appended, ordered fact of an attempt. ``seq`` counts from 1 within the rollout."""

    seq: int
    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float
    data: Mapping[str, Any]


@frozen(kw_only=True)
class EventPage:
    """Events in order, and the cursor (``after``) to go on from."""

    items: tuple[Event, ...]
    cursor: str


@frozen(kw_only=True)
class ModelServer:
    """One inference endpoint serving a model at a version (training step)."""

    model: str = attrs.field(validator=usable_id)
    """The name that agents ask for."""
    endpoint: str
    """Base URL that ends in ``/v1``."""
    version: int = attrs.field(default=0, validator=ge(0))
    policy: str = ""
    """The model being trained that this server serves; the model's name unless told otherwise."""
    trained: bool = True
    served_model: str | None = None
    """The name that the server knows it by, where that differs from ``model``."""
    aliases: tuple[str, ...] = ()
    """More names, also patterns such as ``claude-*``."""
    logprobs_mode: LogprobsMode = "unknown"
    credential: str | None = None
    """Name of a credential in ``[gateway.credentials]``, never its value."""
    salt: bool = False
    """Whether requests carry ``cache_salt`` = policy@version."""
    native: tuple[NativeApi, ...] = ()
    """APIs that this server is asked in directly, though no tokens are captured there; else
    they are translated to chat completions."""

    def __attrs_post_init__(self) -> None:
        if not self.policy:
            object.__setattr__(self, "policy", self.model)

    @property
    def key(self) -> tuple[str, str]:
        return (self.model, self.endpoint)

    @property
    def upstream_model(self) -> str:
        return self.served_model or self.model


@frozen(kw_only=True)
class PausedEngine:
    """An engine that was told to freeze, and how it is told to go on."""

    url: str
    """Of the server, without ``/v1``."""
    credential: str | None = None
    """Name of a credential in ``[gateway.credentials]``."""


@frozen(kw_only=True)
class PolicyPause:
    """Whether a policy is paused, and for how long it has been in all."""

    policy: str
    paused: bool = False
    mode: PauseMode | None = None
    reason: str | None = None
    since: float | None = None
    paused_seconds: float = 0.0
    """Of ended pauses; the present one is counted by whoever reads the clock."""
    engines: tuple[PausedEngine, ...] = ()
    """Frozen by mode ``keep``; after the pause, those that did not yet say that they go on."""


@frozen(kw_only=True)
class Resources:
    """An immutable bundle that rollouts refer to: prompts, ``job_defaults``, anything."""

    resources_id: str = attrs.field(validator=usable_id)
    version: int
    """Counts from 1 in the order of posting."""
    data: Mapping[str, Any]
    created_at: float
