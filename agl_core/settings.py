"""The settings of agl-lite: one attrs class per table of ``agl.toml``.

Every field has a default, so that without a file everything runs on one machine. Units are in
the names. ``config.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, optional

_positive_or_none: Any = optional(gt(0.0))


class Secret:
    """A value that never shows: not in a repr, a log line, a pickle or ``agl config show``."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself, for the one place that compares or sends it."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(****)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled")


@frozen(kw_only=True)
class ServerSettings:
    """Where and how the service listens."""

    host: str = "127.0.0.1"
    port: int = field(default=8080, validator=[ge(0), le(65535)])
    """0: any free port; the start line says which."""
    use: str = "hypercorn"
    """Name of the plugin that provides the ASGI server."""
    insecure: bool = False
    """Listen beyond loopback without keys."""
    backlog: int = field(default=2048, validator=gt(0))
    """Connections that the kernel keeps waiting: hundreds of agents start at once."""
    grace_seconds: float = field(default=30.0, validator=ge(0))
    """How long calls may go on after the first SIGTERM or SIGINT."""
    keep_alive_seconds: float = field(default=15.0, validator=gt(0))
    """Idle connections are closed after this; above the 5 s of common clients: fewer resets."""
    max_body_bytes: int = field(default=16 * 2**20, validator=gt(0))
    """Of requests to ``/api``; the gateway has a limit of its own."""
    body_seconds: float = field(default=60.0, validator=gt(0))
    """How long a request body to ``/api`` may take to arrive."""
    max_waiters: int = field(default=4096, validator=gt(0))
    """Long-polls at once; each holds about 30 KiB."""
    certificate: str | None = None
    """PEM file of the server's certificate; with it the service speaks TLS."""
    private_key: str | None = None
    client_ca: str | None = None
    """PEM file; with it clients must show a certificate signed by it."""


@frozen(kw_only=True)
class AuthSettings:
    """Keys of the roles. Without role keys everything on loopback counts as ``algorithm``."""

    algorithm_key: Secret | None = None
    controller_key: Secret | None = None
    viewer_key: Secret | None = None
    token_keys: tuple[Secret, ...] = ()
    """Sign rollout tokens: the first signs, all verify (rotation). Empty: made at start."""
    token_seconds: float = field(default=7 * 86400.0, validator=gt(0))
    """A rollout token's life, a bound on a leak; the rollout's end revokes it before."""
    agent_rewards: bool = True
    """Whether agents may post rewards; false keeps a policy from grading itself."""


SamplingPolicy = Literal["force", "default", "agent"]

_POLICIES = ("force", "default", "agent")

# Ranges as in vLLM's SamplingParams: what it would refuse is refused when the file is read.


@frozen(kw_only=True)
class ModeSampling:
    """The sampling of one mode of rollouts; the defaults are the model's own distribution."""

    policy: SamplingPolicy = field(default="force", validator=in_(_POLICIES))
    """``force``: these values, whatever the agent says; ``default``: where it says nothing;
    ``agent``: the agent's request stays as it is."""
    temperature: float = field(default=1.0, validator=[ge(0), le(2)])
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    top_k: int = field(default=0, validator=ge(-1))
    """0 or -1: all tokens."""
    min_p: float = field(default=0.0, validator=[ge(0), le(1)])
    presence_penalty: float = field(default=0.0, validator=[ge(-2), le(2)])
    frequency_penalty: float = field(default=0.0, validator=[ge(-2), le(2)])
    repetition_penalty: float = field(default=1.0, validator=gt(0))


@frozen(kw_only=True)
class SamplingSettings:
    """The sampling of calls to trained policies, by the mode of their rollout."""

    train: ModeSampling = field(factory=ModeSampling)
    val: ModeSampling = field(factory=lambda: ModeSampling(policy="default"))


@frozen(kw_only=True)
class RepeatSettings:
    """How long and how much is kept for repeats."""

    linger_seconds: float = field(default=0.6, validator=ge(0))
    """How long a call goes on after its client left, where that client's repeat would be known:
    beyond the first pause of common SDKs (0.5 s), and with the rest below a second."""
    stall_seconds: float = field(default=2.0, validator=gt(0))
    """A client that takes nothing for so long holds up nobody who joined its call."""
    keep_seconds: float = field(default=120.0, validator=gt(0))
    """How long an answer that nobody got is kept; SDKs wait up to a minute or so."""
    idempotency_seconds: float = field(default=600.0, validator=gt(0))
    """How long an answer is kept under an ``Idempotency-Key``, delivered or not."""
    answer_bytes: int = field(default=4 * 2**20, validator=gt(0))
    """A larger answer is not kept, and its call not joined once it is that far."""
    total_bytes: int = field(default=256 * 2**20, validator=gt(0))
    """All that is kept, of the calls in flight too; past it the oldest answer goes first."""


@frozen(kw_only=True)
class GatewaySettings:
    """The model proxy: limits, time-outs and retries."""

    hold_seconds: float = field(default=600.0, validator=ge(0))
    """How long a call waits while its policy is paused or has no server; then 503."""
    drain_seconds: float = field(default=300.0, validator=ge(0))
    """How long ``pause`` in mode ``drain`` waits for the calls in flight."""
    retries: int = field(default=2, validator=ge(0))
    """Upstream tries after the first, before the first byte and for passing errors only."""
    retry_backoff_seconds: float = field(default=0.25, validator=ge(0))
    """Wait before the first retry; doubled for each further one."""
    max_body_bytes: int = field(default=64 * 2**20, validator=gt(0))
    body_idle_seconds: float = field(default=60.0, validator=gt(0))
    """Longest silence while a request body arrives."""
    connect_seconds: float = field(default=5.0, validator=gt(0))
    first_byte_seconds: float | None = field(default=900.0, validator=_positive_or_none)
    """Until the head of the answer; without streaming that is the whole generation."""
    idle_seconds: float | None = field(default=300.0, validator=_positive_or_none)
    """Longest silence within an answer."""
    total_seconds: float | None = field(default=3600.0, validator=_positive_or_none)
    """A whole call; it ends those that nothing else would. Paused time does not count."""
    calls_per_rollout: int = field(default=64, validator=gt(0))
    """Calls of one rollout at once."""
    heartbeat_seconds: float | None = field(default=15.0, validator=_positive_or_none)
    """A quiet stream gets an SSE comment this often; "none" sends none."""
    failures_to_unhealthy: int = field(default=3, validator=gt(0))
    """Failures in a row that take a server out."""
    unhealthy_seconds: float = field(default=10.0, validator=gt(0))
    """How long it stays out before one call tries it again."""
    health_seconds: float | None = field(default=2.0, validator=_positive_or_none)
    """How often a server that is out is asked whether it is back, so that it returns sooner;
    "none" never asks."""
    engine_seconds: float = field(default=10.0, validator=gt(0))
    """For a server's answer to ``/pause``, ``/resume`` and ``/health``."""
    probe: bool = True
    """Ask each trained server for one token when it is registered: do ids and logprobs come?"""
    sink_queue: int = field(default=1000, validator=gt(0))
    """Events waiting for one capture sink; more are dropped, counted and logged."""
    cut_answers_end: Literal["incomplete", "completed"] = "incomplete"
    """How a Responses stream that hit its token limit ends; Codex gives up at "incomplete"."""
    sampling: SamplingSettings = field(factory=SamplingSettings)
    """``[gateway.sampling.train]`` and ``.val``: how trained policies are sampled."""
    repeats: RepeatSettings = field(factory=RepeatSettings)
    """``[gateway.repeats]``: what is kept for an SDK's repeat of a call."""
    credentials: Mapping[str, Secret] = field(factory=dict)
    """Keys sent to model servers, by the name that registrations use."""


@frozen(kw_only=True)
class CaptureSettings:
    """How calls get into the store, and where they wait while it is down."""

    durability: Literal["auto", "commit", "async"] = "auto"
    """Whether the end of an answer waits for the store ("commit") or only for a place in the
    queue ("async": a crash loses what is queued). "auto" is "commit".
    """
    spill_dir: str = ".agl/spill"
    """Where events lie that the store did not take; one folder per store, on a local disk."""
    spill_max_bytes: int = field(default=2**30, validator=gt(0))
    """Past it calls end in a 503 while the store is down."""
    queue: int = field(default=10_000, validator=gt(0))
    """Events in memory with "async"; past it answers wait."""


@frozen(kw_only=True)
class ControllerSettings:
    """The reconcile loop between the store and the runner."""

    url: str = "http://127.0.0.1:8080"
    agent_url: str | None = None
    """How agents reach the service, where that differs from ``url``."""
    key: Secret | None = None
    poll_seconds: float = field(default=20.0, validator=[gt(0), le(60)])
    """How long one long-poll of the change feed lasts."""
    resync_seconds: float = field(default=60.0, validator=gt(0))
    """How often everything is compared with everything, whatever the feeds said."""
    timeout_seconds: float | None = field(default=None, validator=_positive_or_none)
    """Running time of an attempt where the rollout does not say; "none": no limit."""
    stop_agents: bool = False
    """Whether stopping the controller ends what runs; else a new controller adopts it."""


@frozen(kw_only=True)
class PluginsSettings:
    """Which plugins are used, in order, and the table of each."""

    enabled: tuple[str, ...] = ("memory", "vllm", "local", "verl")
    tables: Mapping[str, Any] = field(factory=dict)
    """``[plugins.<name>]`` as built by the plugin's own ``Config`` class."""


@frozen(kw_only=True)
class Settings:
    """The whole configuration."""

    server: ServerSettings = field(factory=ServerSettings)
    auth: AuthSettings = field(factory=AuthSettings)
    gateway: GatewaySettings = field(factory=GatewaySettings)
    capture: CaptureSettings = field(factory=CaptureSettings)
    controller: ControllerSettings = field(factory=ControllerSettings)
    plugins: PluginsSettings = field(factory=PluginsSettings)


TABLES: dict[str, type[Any]] = {
    attribute.name: attribute.default.factory  # type: ignore[union-attr]
    for attribute in attrs.fields(Settings)
}
"""The attrs class of each table of the file."""
