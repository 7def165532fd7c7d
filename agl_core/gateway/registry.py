"""The model servers as the gateway sees them: names, health and what is in flight where.

The store keeps the registrations; this is the copy that the request path reads. What belongs to a
server as an endpoint (in flight, health) outlives a change of its registration.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from attrs import define, frozen

from agl_core.clock import Clock
from agl_core.errors import AglError
from agl_core.interfaces import Candidate
from agl_core.records import LogprobsMode, ModelServer
from agl_core.settings import GatewaySettings

ServerKey = tuple[str, str]


def root_of(endpoint: str) -> str:
    """An endpoint without its ``/v1``: where a server's own routes are, and what an engine is."""
    return endpoint.removesuffix("/v1")


class ModelNotFound(AglError):
    """A request names a model that nothing registered goes by."""

    default_code = "model_not_found"
    default_status = 404


@define
class ServerState:
    """One endpoint: its registration and what is known of it from its traffic."""

    server: ModelServer
    inflight: int = 0
    failures: int = 0
    """In a row."""
    out_until: float | None = None
    """Monotonic seconds; it gets no calls before, unless no other server is left."""
    is_on_trial: bool = False
    """It was out, and a call tries it again."""
    said_well: bool = False
    """It was out, and a health check brought it back before its time."""
    is_distrusted: bool = False
    """It said that it is well and failed its trial all the same."""
    probe_problem: str | None = None
    """What a probe missed in the server's answer."""
    is_probed: bool = False
    context_tokens: int | None = None
    """The server's context length, where it tells."""
    probed_logprobs_mode: LogprobsMode = "unknown"

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """The mode it is registered with, else the one that its answers showed."""
        registered = self.server.logprobs_mode
        return self.probed_logprobs_mode if registered == "unknown" else registered


@frozen(kw_only=True)
class Match:
    """What a request's model name stands for."""

    policy: str
    is_trained: bool
    model: str | None
    """Only servers registered under this name; None: any of the policy."""


class Registry:
    """Matches names to policies and keeps each server's health and counts."""

    def __init__(self, settings: GatewaySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._states: dict[ServerKey, ServerState] = {}
        self._retired: dict[ServerKey, ServerState] = {}
        self._known: dict[str, Match] = {}
        """Exact names ever seen, so that a policy whose servers are away is waited for."""
        self._patterns: dict[str, Match] = {}
        self._frozen: frozenset[str] = frozenset()

    @property
    def servers(self) -> list[ModelServer]:
        """The registered servers, in the order of registration."""
        return [state.server for state in self._states.values()]

    @property
    def states(self) -> Iterable[ServerState]:
        """The registered servers with what is known of them."""
        return self._states.values()

    @property
    def policies(self) -> dict[str, bool]:
        """Each policy ever seen, and whether it is trained."""
        found: dict[str, bool] = {}
        for match in (*self._known.values(), *self._patterns.values()):
            found[match.policy] = match.is_trained
        return found

    def replace(
        self, servers: Sequence[ModelServer], frozen: frozenset[str] = frozenset()
    ) -> list[ServerState]:
        """Take the registrations from the store; returns those to be probed.

        Args:
            servers: All that are registered.
            frozen: URLs of the engines that are paused: a call there would hang.
        """
        self._frozen = frozen
        states: dict[ServerKey, ServerState] = {}
        fresh: list[ServerState] = []
        for server in servers:
            state = self._states.get(server.key) or self._retired.pop(server.key, None)
            if state is None:
                state = ServerState(server)
            elif state.server != server:
                state.server = server
                self.succeeded(state)
            if server.trained and not state.is_probed:
                fresh.append(state)
            states[server.key] = state
        self._learn_all(servers)
        for key, state in self._states.items():
            if key not in states:
                state.is_probed, state.probe_problem = False, None
                if state.inflight:
                    self._retired[key] = state
        self._states = states
        return fresh

    def _learn_all(self, servers: Sequence[ModelServer]) -> None:
        """Names of registered policies stand as registered; those of others are remembered."""
        present = {server.policy for server in servers}
        for names in (self._known, self._patterns):
            for name in [name for name, match in names.items() if match.policy in present]:
                del names[name]
        for server in servers:
            self._learn(server)

    def _learn(self, server: ModelServer) -> None:
        any_of_policy = Match(policy=server.policy, is_trained=server.trained, model=None)
        self._known[server.policy] = any_of_policy
        for alias in server.aliases:
            where = self._patterns if any(c in alias for c in "*?[") else self._known
            where[alias] = any_of_policy
        self._known[server.model] = Match(
            policy=server.policy, is_trained=server.trained, model=server.model
        )

    def match(self, model: str | None) -> Match | None:
        """What a model name stands for; None where nothing is registered that could tell.

        Raises:
            ModelNotFound: No model, policy, alias or alias pattern is called that, or no name was
                given and there is more than one policy that could be meant.
        """
        found = self._sole() if model is None else self._known.get(model)
        if found is not None:
            return found
        if not self._states:
            return None
        if model is None:
            raise ModelNotFound(
                "the request names no model, and there is more than one policy",
                hint=f"name one of: {', '.join(self.names())}",
            )
        fitting = [pattern for pattern in self._patterns if fnmatch.fnmatchcase(model, pattern)]
        if fitting:
            return self._patterns[max(fitting, key=len)]
        raise ModelNotFound(
            f"the model {model!r} is not registered",
            hint=f"registered: {', '.join(self.names())}; give the server an alias, "
            "or the agent one of these names",
        )

    def _sole(self) -> Match | None:
        """What a request without a model means: the one trained policy, else the one there is."""
        policies = self.policies
        trained = [name for name, is_trained in policies.items() if is_trained]
        meant = trained or list(policies)
        if len(meant) != 1:
            return None
        return Match(policy=meant[0], is_trained=policies[meant[0]], model=None)

    def names(self) -> list[str]:
        """Every name that a request may use."""
        return sorted({*self._known, *self._patterns})

    def candidates(self, match: Match, failed: frozenset[ServerKey]) -> list[Candidate]:
        """Servers that may take a call: the healthy ones, else whatever is registered.

        One that this very call has failed on is left out while another one is there. One whose
        engine is paused is none.
        """
        now = self._clock.monotonic()
        fitting = [
            state
            for state in self._states.values()
            if state.server.policy == match.policy
            and match.model in (None, state.server.model)
            and not self.is_frozen(state.server)
        ]
        for wanted in (
            [s for s in fitting if self._is_in(s, now) and s.server.key not in failed],
            [s for s in fitting if s.server.key not in failed],
            fitting,
        ):
            if wanted:
                return [Candidate(server=s.server, inflight=s.inflight) for s in wanted]
        return []

    def _is_in(self, state: ServerState, now: float) -> bool:
        return state.out_until is None or state.out_until <= now

    def is_healthy(self, key: ServerKey) -> bool:
        """Whether a registered server takes calls."""
        state = self._states.get(key)
        return (
            state is not None
            and self._is_in(state, self._clock.monotonic())
            and not self.is_frozen(state.server)
        )

    def is_frozen(self, server: ModelServer) -> bool:
        """Whether the server's engine is paused, as far as is known."""
        return bool(self._frozen) and root_of(server.endpoint) in self._frozen

    def inflight(self, key: ServerKey) -> int:
        """Calls begun and not ended on a server."""
        state = self._states.get(key)
        return state.inflight if state else 0

    def begin(self, key: ServerKey) -> ServerState:
        """Count a call in; give the state back to ``end``, whatever is registered by then."""
        state = self._states[key]
        state.inflight += 1
        if state.out_until is not None:
            # One call tries it again; others do when that one has fared well, or after as long.
            state.out_until = self._clock.monotonic() + self._settings.unhealthy_seconds
            state.is_on_trial = True
        return state

    def end(self, state: ServerState) -> None:
        """Count a call out."""
        state.inflight -= 1
        if not state.inflight:
            state.is_on_trial = False
            self._retired.pop(state.server.key, None)

    def answered(self, state: ServerState) -> None:
        """The server has begun an answer as one that works does: it is taken in again."""
        state.out_until = None

    def succeeded(self, state: ServerState) -> None:
        """The server gave a whole answer (a 4xx of the agent's making counts too)."""
        state.failures, state.out_until = 0, None
        state.is_on_trial = state.said_well = state.is_distrusted = False

    def failed(self, state: ServerState) -> None:
        """The server refused, broke off or answered that it cannot; past a few it is taken out."""
        state.failures += 1
        if state.is_on_trial:
            state.is_on_trial = False
            state.is_distrusted = state.said_well
        if state.failures >= self._settings.failures_to_unhealthy:
            state.out_until = self._clock.monotonic() + self._settings.unhealthy_seconds

    def out(self) -> list[ServerState]:
        """Servers that get no calls because they failed."""
        now = self._clock.monotonic()
        return [state for state in self._states.values() if not self._is_in(state, now)]

    def said_healthy(self, state: ServerState) -> None:
        """A server that is out says that it is well: the next call tries it.

        One that said so before and failed its call all the same waits its time out.
        """
        if state.out_until is not None and not state.is_distrusted and not state.is_on_trial:
            state.out_until = self._clock.monotonic()
            state.said_well = True

    def said_unhealthy(self, state: ServerState) -> None:
        """A server that is out cannot be reached, or says that it is not well: it stays out."""
        if state.out_until is not None and not state.is_on_trial:
            state.out_until = self._clock.monotonic() + self._settings.unhealthy_seconds

    def version_of(self, server: ModelServer) -> int:
        """The version that the server is registered with now."""
        state = self._states.get(server.key)
        return state.server.version if state else server.version
