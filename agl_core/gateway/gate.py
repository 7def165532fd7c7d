"""Admission per policy: who may go on, who is held, and how many are inside.

A weight update closes the gate of a policy first. Calls that come then, or while the policy has no
server, wait here; time spent waiting, and time in which a policy is paused, counts against no other
limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define, field

from agl_core.clock import Clock
from agl_core.errors import NotFound, Unavailable
from agl_core.records import PauseMode, PolicyPause


@define
class PolicyGate:
    """One policy's gate."""

    pause: PolicyPause
    inflight: int = 0
    held: int = 0
    waiters: set[asyncio.Future[None]] = field(factory=set)
    emptied: set[asyncio.Future[None]] = field(factory=set)


class Gates:
    """The gates of all policies."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gates: dict[str, PolicyGate] = {}
        self._anything: set[asyncio.Future[None]] = set()
        self._is_closing = False

    def _gate(self, policy: str) -> PolicyGate:
        gate = self._gates.get(policy)
        if gate is None:
            gate = self._gates[policy] = PolicyGate(PolicyPause(policy=policy))
        return gate

    def update(self, policies: Iterable[str], pauses: Mapping[str, PolicyPause]) -> None:
        """Take what the store says now and let everybody who waits look again."""
        for policy in policies:
            self._gate(policy)
        for policy, pause in pauses.items():
            self._gate(policy).pause = pause
        for gate in self._gates.values():
            _wake(gate.waiters)
        _wake(self._anything)

    def is_paused(self, policy: str) -> bool:
        """Whether admission is closed."""
        gate = self._gates.get(policy)
        return gate is not None and gate.pause.paused

    def paused_seconds(self, policy: str) -> float:
        """Seconds that a policy has been paused in all, the present pause included."""
        gate = self._gates.get(policy)
        return 0.0 if gate is None else _paused_seconds(gate.pause, self._clock.now())

    async def enter(
        self, policy: str | None, has_server: Callable[[], bool], hold_seconds: float
    ) -> None:
        """Wait until the policy is open and has a server.

        Args:
            policy: None while nothing is registered at all: returns at the next change.
            has_server: Whether a server could take the call.
            hold_seconds: The longest wait.

        Raises:
            Unavailable: It took longer, the pause is of mode ``reject``, or the service is closing.
        """
        if policy is not None and not self.is_paused(policy) and has_server():
            return
        deadline = asyncio.get_running_loop().time() + hold_seconds
        gate = None if policy is None else self._gate(policy)
        waiters = self._anything if gate is None else gate.waiters
        if gate is not None:
            gate.held += 1
        try:
            while True:
                self._refuse(gate)
                await self._wait(waiters, deadline, policy)
                if gate is None or (not gate.pause.paused and has_server()):
                    return
        finally:
            if gate is not None:
                gate.held -= 1

    def _refuse(self, gate: PolicyGate | None) -> None:
        if self._is_closing:
            raise Unavailable("the service is shutting down", code="shutting_down")
        if gate is not None and gate.pause.paused and gate.pause.mode == "reject":
            raise Unavailable(
                f"policy {gate.pause.policy!r} is paused: {gate.pause.reason or 'no reason given'}",
                code="policy_paused",
                retry_after_seconds=2.0,
            )

    async def _wait(
        self, waiters: set[asyncio.Future[None]], deadline: float, policy: str | None
    ) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(future)
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError as exc:
            what = f"policy {policy!r}" if policy else "any model server"
            raise Unavailable(
                f"waited too long for {what}: it is paused, or no server of it is registered",
                code="held_too_long",
                retry_after_seconds=5.0,
            ) from exc
        finally:
            waiters.discard(future)

    def begin(self, policy: str) -> None:
        """Count a call in."""
        self._gate(policy).inflight += 1

    def end(self, policy: str) -> None:
        """Count a call out."""
        gate = self._gate(policy)
        gate.inflight -= 1
        if not gate.inflight:
            _wake(gate.emptied)

    async def wait_until_empty(self, policy: str, seconds: float) -> bool:
        """Wait until nothing of a policy is in flight; returns whether it came to that."""
        gate = self._gate(policy)
        if not gate.inflight:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gate.emptied.add(future)
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            return False
        finally:
            gate.emptied.discard(future)
        return True

    def close(self) -> None:
        """The service is going down: whoever is held gets a 503."""
        self._is_closing = True
        for gate in self._gates.values():
            _wake(gate.waiters)
        _wake(self._anything)

    def state(self, versions: Mapping[str, int]) -> dict[str, Any]:
        """The ``policies`` of the API's gateway state."""
        now = self._clock.now()
        return {
            name: {
                "paused": gate.pause.paused,
                "mode": gate.pause.mode,
                "reason": gate.pause.reason,
                "inflight": gate.inflight,
                "held": gate.held,
                "version": versions.get(name),
                "paused_seconds": _paused_seconds(gate.pause, now),
            }
            for name, gate in self._gates.items()
        }


def close_gates(
    pauses: Mapping[str, PolicyPause],
    policies: Iterable[str],
    mode: PauseMode,
    reason: str | None,
    now: float,
) -> dict[str, PolicyPause]:
    """The pauses after closing those of ``policies``; one that is closed keeps its beginning.

    Engines that were frozen before stay noted until they are known to go on.
    """
    after = dict(pauses)
    for policy in policies:
        old = after.get(policy) or PolicyPause(policy=policy)
        after[policy] = PolicyPause(
            policy=policy,
            paused=True,
            mode=mode,
            reason=reason,
            since=old.since if old.paused else now,
            paused_seconds=old.paused_seconds,
            engines=old.engines,
        )
    return after


def open_gates(
    pauses: Mapping[str, PolicyPause], policies: Iterable[str], now: float
) -> dict[str, PolicyPause]:
    """The pauses after opening those of ``policies``, their time added up."""
    after = dict(pauses)
    for policy in policies:
        old = after.get(policy)
        if old is not None and old.paused:
            after[policy] = PolicyPause(
                policy=policy, paused_seconds=_paused_seconds(old, now), engines=old.engines
            )
    return after


def policies_meant(
    policy: str | None, trained: Iterable[str], known: Iterable[str]
) -> tuple[str, ...]:
    """The policies that a pause or resume is about.

    Raises:
        NotFound: A named one is not known.
    """
    if policy is None:
        return tuple(trained)
    if policy not in known:
        names = ", ".join(sorted(known)) or "none"
        raise NotFound(f"there is no policy {policy!r}", hint=f"known: {names}")
    return (policy,)


def _paused_seconds(pause: PolicyPause, now: float) -> float:
    running = max(0.0, now - pause.since) if pause.paused and pause.since is not None else 0.0
    return pause.paused_seconds + running


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for future in list(waiters):
        if not future.done():
            future.set_result(None)
