"""Four ways to spread calls over servers.

All of them choose among the healthy servers that the core offers, and among those only the ones
that the call has not failed on, as long as there is one. How much is in flight where is counted by
the core alone and read from what it offers; nothing here counts calls, so nothing here can drift.
What others send to a server is added where the server tells of it. Ties go to the server that
stands first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, Literal, Protocol, Self

import attrs
from attrs.validators import ge, gt, in_, optional

from agl_core.interfaces import Candidate, Route, RouteRequest
from agl_vllm.loads import ServerLoads

Balance = Literal["least_loaded_sticky", "rendezvous", "round_robin", "least_inflight"]
ServerKey = tuple[str, str]

_BALANCES: tuple[Balance, ...] = (
    "least_loaded_sticky",
    "rendezvous",
    "round_robin",
    "least_inflight",
)
_positive_or_none: Any = optional(gt(0.0))
_BALANCES_BY_LOAD: tuple[Balance, ...] = ("least_loaded_sticky", "least_inflight")


@attrs.frozen(kw_only=True)
class VllmConfig:
    """How calls are spread."""

    balance: Balance = attrs.field(default="least_loaded_sticky", validator=in_(_BALANCES))
    """``least_loaded_sticky`` keeps a rollout's calls on one server, where the prefix that they
    share is cached; ``rendezvous`` does so too, by a hash that every replica of the service
    computes alike, at the price of a less even spread; ``round_robin`` and ``least_inflight`` look
    at each call alone.
    """
    sticky_rollouts: int = attrs.field(default=100_000, validator=ge(1))
    """Rollouts whose server is remembered; past it, the one that was silent longest is chosen for
    anew. Only rollouts that run at the same time count.
    """
    load_seconds: float | None = attrs.field(default=5.0, validator=_positive_or_none)
    """How often a server's ``/metrics`` is read for the requests that others sent to it, which
    ``least_loaded_sticky`` and ``least_inflight`` count as their own; "none" never reads it.
    A read takes vLLM some milliseconds, and only servers that share a policy are read.
    """


class _Strategy(Protocol):
    def pick(self, request: RouteRequest, pool: Sequence[Candidate]) -> Candidate: ...

    def forget(self, rollout_id: str) -> None: ...


class VllmRouteResolver:
    """Picks a server for each call, as ``balance`` says. An async context manager.

    Args:
        config: How.
        loads: What others send to servers; read while the resolver is open, and only where
            ``balance`` asks for it. None: not known.
    """

    def __init__(self, config: VllmConfig | None = None, loads: ServerLoads | None = None) -> None:
        config = config or VllmConfig()
        self._loads = loads if config.balance in _BALANCES_BY_LOAD else None
        self._stack = AsyncExitStack()
        self._strategy: _Strategy
        if config.balance == "round_robin":
            self._strategy = _RoundRobin()
        elif config.balance == "least_inflight":
            self._strategy = _LeastInflight(self._requests)
        elif config.balance == "rendezvous":
            self._strategy = _Rendezvous()
        else:
            self._strategy = _LeastLoadedSticky(config.sticky_rollouts, self._requests)

    async def __aenter__(self) -> Self:
        if self._loads is not None:
            await self._stack.enter_async_context(self._loads)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        untried = [c for c in candidates if c.server.key not in request.failed]
        pool = untried or candidates
        if not pool:
            return None
        return Route(server=self._strategy.pick(request, pool).server)

    def forget(self, rollout_id: str) -> None:
        self._strategy.forget(rollout_id)

    def _requests(self, candidate: Candidate) -> float:
        """Requests on a server: our own as they are now, those of others as it told last."""
        if self._loads is None:
            return candidate.inflight
        return candidate.inflight + self._loads.others(candidate.server.key)


class _LeastInflight:
    """The server with the fewest calls in flight."""

    def __init__(self, requests: Callable[[Candidate], float]) -> None:
        self._requests = requests

    def pick(self, _request: RouteRequest, pool: Sequence[Candidate]) -> Candidate:
        return min(pool, key=self._requests)

    def forget(self, rollout_id: str) -> None:
        pass


class _Rendezvous:
    """The server whose hash with the rollout's id is highest.

    A server that comes or goes moves only the rollouts that it wins or had, and they return to a
    server that is back: its cache is still the best one there is. Nothing is remembered.
    """

    def pick(self, request: RouteRequest, pool: Sequence[Candidate]) -> Candidate:
        rollout = request.rollout_id.encode()
        return max(pool, key=lambda candidate: _hash(rollout, candidate.server.key))

    def forget(self, rollout_id: str) -> None:
        pass


def _hash(rollout: bytes, key: ServerKey) -> bytes:
    """A hash that is the same in every process, unlike ``hash``."""
    digest = blake2b(rollout, digest_size=8)
    for part in key:
        digest.update(b"\0" + part.encode())
    return digest.digest()


class _RoundRobin:
    """Per policy, the server whose last turn is longest ago.

    A server that was away has one turn when it comes back, not all that it missed.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[str, dict[ServerKey, int]] = {}

    def pick(self, request: RouteRequest, pool: Sequence[Candidate]) -> Candidate:
        turns = self._turns.setdefault(request.policy, {})
        chosen = min(pool, key=lambda candidate: turns.get(candidate.server.key, 0))
        self._turn += 1
        # Taken out and put in, so that the dict's first keys are those of servers long gone.
        turns.pop(chosen.server.key, None)
        turns[chosen.server.key] = self._turn
        while len(turns) > 2 * len(pool) + 64:
            del turns[next(iter(turns))]
        return chosen

    def forget(self, rollout_id: str) -> None:
        pass


@attrs.frozen
class _Assignment:
    key: ServerKey
    version: int


class _LeastLoadedSticky:
    """A rollout's first call goes to the least loaded server, and the others follow it.

    The load of a server is the rollouts that are assigned to it, whether or not they are calling
    just now, and the requests that are on it. A rollout is assigned anew when its server is not in
    the pool (unhealthy, or this call failed there), and when that server has got new weights: its
    cache is empty then, so evening out costs nothing.
    """

    def __init__(self, max_rollouts: int, requests: Callable[[Candidate], float]) -> None:
        self._max_rollouts = max_rollouts
        self._requests = requests
        self._assignments: OrderedDict[str, dict[str, _Assignment]] = OrderedDict()
        """By rollout, the one heard of longest ago first, and by policy."""
        self._assigned: Counter[ServerKey] = Counter()

    def pick(self, request: RouteRequest, pool: Sequence[Candidate]) -> Candidate:
        of_rollout = self._assignments.setdefault(request.rollout_id, {})
        self._assignments.move_to_end(request.rollout_id)
        present = of_rollout.get(request.policy)
        if present is not None:
            for candidate in pool:
                server = candidate.server
                if server.key == present.key and server.version == present.version:
                    return candidate
            self._release(present)
        chosen = min(pool, key=self._load)
        self._assigned[chosen.server.key] += 1
        of_rollout[request.policy] = _Assignment(chosen.server.key, chosen.server.version)
        while len(self._assignments) > self._max_rollouts:
            self.forget(next(iter(self._assignments)))
        return chosen

    def forget(self, rollout_id: str) -> None:
        for assignment in self._assignments.pop(rollout_id, {}).values():
            self._release(assignment)

    def _load(self, candidate: Candidate) -> float:
        return self._assigned[candidate.server.key] + self._requests(candidate)

    def _release(self, assignment: _Assignment) -> None:
        self._assigned[assignment.key] -= 1
        if not self._assigned[assignment.key]:
            del self._assigned[assignment.key]
