"""Weight updates: closing and opening the gates of policies, and freezing their engines.

What is wanted stands in the shared state first, and is done then. So a service that dies in between
leaves a state from which the next one, or another replica, goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import attrs

from agl_core.clock import Clock
from agl_core.errors import AglError
from agl_core.gateway.call import Call
from agl_core.gateway.engines import (
    EngineClient,
    engine_pause_failed,
    frozen_urls,
    left_frozen,
    with_engines,
    without_engines,
)
from agl_core.gateway.gate import Gates, close_gates, open_gates, policies_meant
from agl_core.gateway.registry import Registry, root_of
from agl_core.interfaces import GatewayState, Store
from agl_core.records import PausedEngine, PauseMode, PolicyPause
from agl_core.services import StateChange
from agl_core.settings import GatewaySettings

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 2.0
# An engine whose server is no longer registered is asked so many times to go on, and no more.
_TRIES_UNREGISTERED = 5


class WeightUpdates:
    """Pauses and resumes policies.

    Args:
        settings: Time-outs.
        clock: Waits and tells the time.
        store: Has the shared state.
        registry: The servers as the request path sees them.
        gates: The gates as the request path sees them.
        engines: Freezes and thaws.
        refresh: Takes the shared state over into registry and gates.
        calls: The calls in flight.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        store: Store,
        registry: Registry,
        gates: Gates,
        engines: EngineClient,
        refresh: Callable[[], Awaitable[None]],
        calls: Callable[[], Iterable[Call]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._registry = registry
        self._gates = gates
        self._engines = engines
        self._refresh = refresh
        self._calls = calls
        self._lock = asyncio.Lock()
        """One thing at a time is done to engines; never held while calls are waited for."""
        self._frozen_since: dict[str, float] = {}
        """When an engine had said that it is frozen, in seconds of the event loop."""
        self._thawing: asyncio.Task[None] | None = None
        self._tries: Counter[str] = Counter()

    async def pause(
        self,
        policy: str | None,
        mode: PauseMode,
        reason: str | None,
        drain_seconds: float | None,
        change: StateChange | None,
        abort: Callable[[str], None],
    ) -> None:
        """Close admission, then do what the mode says (see ``services.GatewayControl``)."""
        names: tuple[str, ...] = ()
        before: dict[str, PolicyPause] = {}

        def close(state: GatewayState) -> GatewayState:
            nonlocal names, before
            if change is not None:
                state = change(state)
            names = self._meant(policy, state)
            before = dict(state.pauses)
            pauses = close_gates(state.pauses, names, mode, reason, self._clock.now())
            if mode == "keep":
                pauses = with_engines(pauses, state.servers, names)
            return attrs.evolve(state, pauses=pauses)

        async with self._lock:
            await self._refresh()
            state = await self._store.change_gateway_state(close)
            await self._refresh()
            if mode == "keep":
                await self._freeze(names, state, before)
            else:
                if mode == "abort":
                    for name in names:
                        abort(name)
                await self._thaw()
        if mode in ("drain", "abort"):
            seconds = self._settings.drain_seconds if drain_seconds is None else drain_seconds
            await asyncio.gather(*(self._gates.wait_until_empty(name, seconds) for name in names))

    async def resume(self, policy: str | None, change: StateChange | None) -> None:
        """Open admission; frozen engines go on, and then the calls that were held."""

        def open_(state: GatewayState) -> GatewayState:
            if change is not None:
                state = change(state)
            names = set(self._meant(policy, state))
            if policy is None:
                names |= {name for name, pause in state.pauses.items() if pause.paused}
            pauses = open_gates(state.pauses, names, self._clock.now())
            return attrs.evolve(state, pauses=pauses)

        async with self._lock:
            await self._refresh()
            await self._store.change_gateway_state(open_)
            await self._refresh()
            # The engines stand still until the next line, so what came until now is all that the
            # old weights gave.
            for call in self._calls():
                call.note_version(self._frozen_since)
            await self._thaw()

    def _meant(self, policy: str | None, state: GatewayState) -> tuple[str, ...]:
        known = self._registry.policies
        known.update({server.policy: server.trained for server in state.servers})
        trained = [name for name, is_trained in known.items() if is_trained]
        return policies_meant(policy, trained, known)

    # Engines

    async def _freeze(
        self, names: Iterable[str], state: GatewayState, before: dict[str, PolicyPause]
    ) -> None:
        engines = {e.url: e for name in names for e in state.pauses[name].engines}
        answers = await asyncio.gather(*map(self._engines.freeze, engines.values()))
        refusals = [answer for answer in answers if answer is not None]
        if not refusals:
            now = asyncio.get_running_loop().time()
            self._frozen_since.update(dict.fromkeys(engines, now))
            return
        running = {refusal.engine.url for refusal in refusals if refusal.is_running}

        def undo(state: GatewayState) -> GatewayState:
            pauses = open_gates(state.pauses, names, self._clock.now())
            for name in names:
                engines = tuple(e for e in pauses[name].engines if e.url not in running)
                old = before.get(name)
                undone = old if old is not None and old.paused else pauses[name]
                pauses[name] = attrs.evolve(undone, engines=engines)
            return attrs.evolve(state, pauses=pauses)

        await self._store.change_gateway_state(undo)
        await self._refresh()
        await self._thaw()
        raise engine_pause_failed(refusals)

    async def _thaw(self) -> None:
        """Let engines go on that no pause wants frozen; those that do not answer are asked again.

        Until one has said that it goes on, its server gets no calls: they would hang there.
        """
        engines = left_frozen((await self._store.get_gateway_state()).pauses)
        if not engines:
            return
        answers = await asyncio.gather(*map(self._engines.thaw, engines))
        done: set[str] = set()
        for engine, problem in zip(engines, answers, strict=True):
            if problem is None or self._is_given_up(engine, problem):
                done.add(engine.url)
                self._frozen_since.pop(engine.url, None)
                self._tries.pop(engine.url, None)
        await self._store.change_gateway_state(
            lambda state: attrs.evolve(state, pauses=without_engines(state.pauses, done))
        )
        await self._refresh()

    def _is_given_up(self, engine: PausedEngine, problem: str) -> bool:
        self._tries[engine.url] += 1
        is_registered = any(root_of(s.endpoint) == engine.url for s in self._registry.servers)
        is_given_up = not is_registered and self._tries[engine.url] >= _TRIES_UNREGISTERED
        log.warning(
            "an engine was not resumed and is given up"
            if is_given_up
            else "an engine was not resumed: it gets no calls until it is",
            extra={"engine": engine.url, "problem": problem, "tries": self._tries[engine.url]},
        )
        return is_given_up

    def look_after(self, state: GatewayState) -> None:
        """See to it that engines go on that were left frozen, here, by another replica or before.

        The first try is left to whoever resumes.
        """
        is_busy = self._thawing is not None and not self._thawing.done()
        if not is_busy and left_frozen(state.pauses):
            self._thawing = asyncio.create_task(self._thaw_all())

    async def _thaw_all(self) -> None:
        while True:
            await self._clock.sleep(self._settings.health_seconds or _AGAIN_SECONDS)
            try:
                async with self._lock:
                    await self._thaw()
                if not left_frozen((await self._store.get_gateway_state()).pauses):
                    return
            except AglError:
                log.exception("the shared state could not be read or changed")

    async def close(self) -> None:
        """Stop asking; engines that stay frozen are named in the log."""
        if self._thawing is not None:
            self._thawing.cancel()
            await asyncio.gather(self._thawing, return_exceptions=True)
        try:
            frozen = frozen_urls((await self._store.get_gateway_state()).pauses)
        except AglError:
            return
        if frozen:
            log.warning("engines are still paused", extra={"engines": sorted(frozen)})
