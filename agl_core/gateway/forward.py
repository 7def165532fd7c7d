"""Sending a call to a model server: route, reshape, try, and try elsewhere until one answers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from attrs import define, frozen

from agl_core.clock import Clock
from agl_core.errors import UpstreamError, UpstreamTimeout
from agl_core.gateway.capture import CallFacts
from agl_core.gateway.dialects import Dialect
from agl_core.gateway.gate import Gates
from agl_core.gateway.incoming import Header
from agl_core.gateway.registry import Match, Registry, ServerKey, ServerState
from agl_core.gateway.replies import headers_upstream
from agl_core.gateway.reshape import Outgoing, RequestShaper, RouteError
from agl_core.gateway.rounds import LONG_WORK_BYTES, Rounds
from agl_core.gateway.upstream import (
    Timeouts,
    UpstreamAnswer,
    UpstreamClient,
    UpstreamRequest,
    is_before_head,
    is_ours,
    upstream_url,
)
from agl_core.interfaces import (
    Route,
    RouteRequest,
    RouteResolver,
)
from agl_core.records import ModelServer, Rollout
from agl_core.settings import GatewaySettings

log = logging.getLogger(__name__)

_PASSING_STATUSES = frozenset({408, 409, 429})
_LONGEST_RETRY_AFTER_SECONDS = 10.0


class NoServer(Exception):
    """Every server of the policy is gone: the call goes back to the gate and waits."""


@frozen(kw_only=True)
class Outbound:
    """What of a call goes upstream."""

    rollout: Rollout
    attempt_id: str
    dialect: Dialect
    method: str
    path: str
    """Below ``v1``, percent-encoded, without a slash in front."""
    query: str
    headers: Sequence[Header]
    match: Match


@define
class Connected:
    """A server that answers: the head is in."""

    answer: UpstreamAnswer
    state: ServerState
    outgoing: Outgoing
    is_final_failure: bool = False
    """It was tried again in vain: its status asks for a retry, and there are none left."""

    def close(self) -> None:
        """Break the answer off where it has not ended."""
        self.answer.abort()


class Forwarder:
    """Finds a server for a call and gets an answer's head from it."""

    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        registry: Registry,
        gates: Gates,
        client: UpstreamClient,
        resolvers: Sequence[tuple[str, RouteResolver]],
        shaper: RequestShaper,
        rounds: Rounds,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._gates = gates
        self._client = client
        self._resolvers = resolvers
        self._shaper = shaper
        self._rounds = rounds
        self._jitter = random.Random()
        self.retries = 0
        """Tries after the first, of all calls."""

    async def connect(self, out: Outbound, facts: CallFacts) -> Connected:
        """Send the call until a server answers for good, and count it in there.

        Raises:
            NoServer: Nobody is registered any more.
            UpstreamError: The last try failed before an answer; the retries are used up.
            RouteError: A resolver or reshaper failed, or none picked a server.
        """
        failed: frozenset[ServerKey] = frozenset()
        tries_left = self._settings.retries
        while True:
            route = await self._route(out, failed)
            state = self._registry.begin(route.server.key)
            facts.server, facts.logprobs_mode = route.server, state.logprobs_mode
            facts.version_start = facts.version_end = self._registry.version_of(route.server)
            facts.marks.clear()
            try:
                connected = await self._try(out, facts, route, state)
            except BaseException as exc:
                self._registry.end(state)
                if not isinstance(exc, UpstreamError):
                    raise
                if not is_ours(exc):
                    self._note_failure(state, out.match.policy)
                if not self._may_retry(exc) or tries_left <= 0:
                    if tries_left < self._settings.retries:
                        exc.details["retried"] = True
                    raise
                wait: float | None = None
            else:
                status = connected.answer.status
                if not _is_passing(status):
                    self._registry.answered(state)
                    return connected
                if status >= 500:
                    self._note_failure(state, out.match.policy)
                if tries_left <= 0 or not self._is_still_registered(out):
                    connected.is_final_failure = tries_left < self._settings.retries
                    return connected
                wait = _retry_after(connected.answer)
                connected.close()
                self._registry.end(state)
            failed |= {route.server.key}
            tries_left -= 1
            facts.retries += 1
            self.retries += 1
            log.info(
                "retrying a model call",
                extra={"rollout_id": facts.rollout_id, "call_id": facts.call_id},
            )
            await self._back_off(facts.retries, wait, failed, out)

    def note_end(self, connected: Connected) -> None:
        """An answer has come to its end."""
        if not _is_passing(connected.answer.status):
            self._registry.succeeded(connected.state)

    def note_break(self, connected: Connected, policy: str, exc: UpstreamError) -> None:
        """An answer that had begun has broken off."""
        if not is_ours(exc):
            self._note_failure(connected.state, policy)

    def _note_failure(self, state: ServerState, policy: str) -> None:
        """A pause makes servers fail on purpose: it moves no breaker."""
        if not self._gates.is_paused(policy):
            self._registry.failed(state)

    def _may_retry(self, exc: UpstreamError) -> bool:
        if isinstance(exc, UpstreamTimeout) and exc.code != "connect_timeout":
            return False  # the engine may still be at it
        return is_before_head(exc)

    def _is_still_registered(self, out: Outbound) -> bool:
        return bool(self._registry.candidates(out.match, frozenset()))

    async def _back_off(
        self, retry: int, wait: float | None, failed: frozenset[ServerKey], out: Outbound
    ) -> None:
        elsewhere = any(
            candidate.server.key not in failed
            for candidate in self._registry.candidates(out.match, failed)
        )
        if elsewhere:
            return
        seconds = self._settings.retry_backoff_seconds * 2 ** (retry - 1)
        if wait is not None:
            seconds = max(seconds, min(wait, _LONGEST_RETRY_AFTER_SECONDS))
        await self._clock.sleep(seconds * self._jitter.uniform(0.8, 1.2))

    async def _route(self, out: Outbound, failed: frozenset[ServerKey]) -> Route:
        candidates = self._registry.candidates(out.match, failed)
        if not candidates:
            raise NoServer
        request = RouteRequest(
            rollout_id=out.rollout.rollout_id,
            attempt_id=out.attempt_id,
            policy=out.match.policy,
            model=out.match.model,
            api=out.dialect.api,
            failed=failed,
        )
        offered = {candidate.server.key for candidate in candidates}
        for name, resolver in self._resolvers:
            try:
                route = await resolver.resolve(request, candidates)
            except Exception as exc:
                log.exception("route resolver failed", extra={"plugin": name})
                raise RouteError(
                    f"route resolver {name!r} failed: {type(exc).__name__}: {exc}"
                ) from exc
            if route is None:
                continue
            if route.server.key not in offered:
                raise RouteError(f"route resolver {name!r} picked a server that was not offered")
            return route
        names = ", ".join(name for name, _ in self._resolvers)
        raise RouteError(f"no route resolver picked a server (asked: {names})")

    async def _try(
        self, out: Outbound, facts: CallFacts, route: Route, state: ServerState
    ) -> Connected:
        if len(facts.parsed.body) >= LONG_WORK_BYTES:
            await self._rounds.take()
        outgoing = self._shaper.shape(
            out.dialect,
            out.path,
            facts.parsed,
            route=route,
            version=self._registry.version_of(route.server),
            context_tokens=state.context_tokens,
            rollout=out.rollout,
            attempt_id=out.attempt_id,
        )
        facts.outgoing = outgoing
        credential = self._credential(route.server)
        path = f"/{outgoing.path}"
        if out.query and outgoing.translated is None:
            path += f"?{out.query}"
        endpoint = route.server.endpoint
        if outgoing.is_at_root:
            endpoint = endpoint.removesuffix("/v1")
        request = UpstreamRequest(
            method=out.method,
            url=upstream_url(endpoint, path),
            headers=headers_upstream(out.headers, credential),
            body=outgoing.body,
        )
        loop = asyncio.get_running_loop()
        policy, gates = out.match.policy, self._gates
        timeouts = Timeouts(
            connect_seconds=self._settings.connect_seconds,
            first_byte_seconds=self._settings.first_byte_seconds,
            idle_seconds=self._settings.idle_seconds,
            now=lambda: loop.time() - gates.paused_seconds(policy),
        )
        answer = await self._client.open(request, timeouts=timeouts)
        return Connected(answer, state, outgoing)

    def _credential(self, server: ModelServer) -> str | None:
        if server.credential is None:
            return None
        secret = self._settings.credentials.get(server.credential)
        if secret is None:
            raise RouteError(
                f"model server {server.model!r} wants credential {server.credential!r}, "
                "which is not configured",
                hint="add it to [gateway.credentials]",
            )
        return secret.reveal()


def _is_passing(status: int) -> bool:
    """Whether another try may fare better; other 4xx are the agent's own and pass untouched."""
    return status >= 500 or status in _PASSING_STATUSES


def _retry_after(answer: UpstreamAnswer) -> float | None:
    for name, value in answer.headers:
        if name == b"retry-after":
            try:
                return float(value)
            except ValueError:
                return None
    return None
