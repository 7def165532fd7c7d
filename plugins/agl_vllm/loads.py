"""What servers say of their load, read in the background.

The core counts this service's own calls. Those of others, such as another replica or an evaluation,
only the server sees, and vLLM tells of all of them in ``/metrics``: requests that run and requests
that wait, a line for each engine of the server. Both names are the same from vLLM 0.4 to 0.32
(``vllm/v1/metrics/loggers.py``). Its ``/load`` would be cheaper but says 0 where load is not
tracked, and counts what came to one of several API processes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import Self

import attrs

from agl_core.clock import Clock
from agl_core.errors import UpstreamError
from agl_core.interfaces import ModelServers
from agl_core.records import ModelServer

log = logging.getLogger(__name__)

ServerKey = tuple[str, str]

_METRICS = "/metrics"
# A gauge as the Prometheus text format writes it: name, labels, value, perhaps a time. That it
# begins with fixed text is what makes a search through a whole page fast; the bounds keep it so.
_GAUGE = re.compile(
    rb"\nvllm:num_requests_(running|waiting)(?:\{.{0,4096}\})? (\S{1,40})(?: \S{1,40})?$",
    re.MULTILINE,
)
# vLLM 0.32 writes 70 KB with one engine.
_LIMIT_BYTES = 4 * 2**20
_LONGEST_SECONDS = 5.0
# A server that does not tell its load is asked seldom: it may have been started anew.
_AGAIN_SECONDS = 60.0
# A reading counts for so many periods, so that one answer may fail to come.
_PERIODS_GOOD = 3


@attrs.frozen
class _Reading:
    others: float
    """Requests on the server beyond this service's own calls."""
    until: float
    """Monotonic seconds from which on it is too old."""


@attrs.define
class _Engine:
    """One server as an address, under whatever names it is registered."""

    ask_at: float = 0.0
    """Monotonic seconds."""
    tells: bool = True
    """Whether it told its load when it was last asked, so that a change is logged once."""
    task: asyncio.Task[None] | None = None


class ServerLoads:
    """Reads the load of servers that calls are spread over. An async context manager.

    A policy with one server has nothing to spread, so that server is not asked.

    Args:
        seconds: Between two readings of a server; also the longest wait for one, up to 5.
        clock: Waits and tells the time.
        servers: Who is registered, and how they are asked.
    """

    def __init__(self, seconds: float, clock: Clock, servers: ModelServers) -> None:
        self._seconds = seconds
        self._clock = clock
        self._servers = servers
        self._readings: dict[ServerKey, _Reading] = {}
        self._engines: dict[str, _Engine] = {}
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._run(), name="server-loads")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = [engine.task for engine in self._engines.values() if engine.task is not None]
        if self._loop is not None:
            tasks.append(self._loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def others(self, key: ServerKey) -> float:
        """Requests on a server beyond this service's own calls; 0 where that is not known.

        A call of several choices is as many requests to vLLM.
        """
        reading = self._readings.get(key)
        if reading is None or reading.until <= self._clock.monotonic():
            return 0.0
        return reading.others

    async def _run(self) -> None:
        while True:
            self._ask_all()
            await self._clock.sleep(self._seconds)

    def _ask_all(self) -> None:
        """Ask each server whose turn it is; one that is silent holds up no other."""
        registered = self._servers.registered()
        known = {server.key for server in registered}
        self._readings = {key: kept for key, kept in self._readings.items() if key in known}
        spread = _spread(registered)
        for url in self._engines.keys() - spread.keys():
            gone = self._engines.pop(url).task
            if gone is not None:
                gone.cancel()
        now = self._clock.monotonic()
        for url, names in spread.items():
            engine = self._engines.setdefault(url, _Engine())
            if (engine.task is None or engine.task.done()) and engine.ask_at <= now:
                engine.task = asyncio.create_task(self._ask(engine, names))

    async def _ask(self, engine: _Engine, names: Sequence[ModelServer]) -> None:
        before = [self._servers.inflight(server) for server in names]
        try:
            answer = await self._servers.get(
                names[0],
                _METRICS,
                seconds=min(self._seconds, _LONGEST_SECONDS),
                limit_bytes=_LIMIT_BYTES,
            )
            if answer.status >= 500:
                raise UpstreamError(f"{_METRICS} answered with status {answer.status}")
        except UpstreamError as exc:
            # It may only be busy, or be starting: what it said last counts until it is too old.
            self._note(engine, names[0], exc.message)
            return
        requests = requests_of(answer.body) if answer.status == 200 else None
        now = self._clock.monotonic()
        if requests is None:
            for server in names:
                self._readings.pop(server.key, None)
            engine.ask_at = now + _AGAIN_SECONDS
            self._note(engine, names[0], f"{_METRICS} has no load (status {answer.status})")
            return
        self._note(engine, names[0], None)
        until = now + _PERIODS_GOOD * self._seconds
        for server, own in zip(names, before, strict=True):
            # A call of ours that came or went while the server answered is not taken for another's.
            own_calls = max(own, self._servers.inflight(server))
            self._readings[server.key] = _Reading(max(0.0, requests - own_calls), until)

    def _note(self, engine: _Engine, server: ModelServer, problem: str | None) -> None:
        if engine.tells == (problem is None):
            return
        engine.tells = problem is None
        if problem is None:
            log.info("a model server tells its load again", extra={"endpoint": server.endpoint})
        else:
            log.info(
                "a model server does not tell its load: only calls of this service count there: %s",
                problem,
                extra={"endpoint": server.endpoint},
            )


def requests_of(metrics: bytes) -> float | None:
    """Requests that run or wait on a server, from its ``/metrics``; None: it does not tell."""
    sums: dict[bytes, float] = {}
    for gauge in _GAUGE.finditer(b"\n" + metrics):
        try:
            value = float(gauge[2])
        except ValueError:
            return None
        if not math.isfinite(value):
            return None
        sums[gauge[1]] = sums.get(gauge[1], 0.0) + max(0.0, value)
    return sum(sums.values()) if b"running" in sums else None


def _spread(servers: Iterable[ModelServer]) -> dict[str, list[ModelServer]]:
    """The servers, by address, among which calls of some policy may be spread."""
    by_policy: dict[str, set[str]] = {}
    by_url: dict[str, list[ModelServer]] = {}
    for server in servers:
        by_policy.setdefault(server.policy, set()).add(server.endpoint)
        by_url.setdefault(server.endpoint, []).append(server)
    spread = {url for urls in by_policy.values() if len(urls) > 1 for url in urls}
    return {url: names for url, names in by_url.items() if url in spread}
