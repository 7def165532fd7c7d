"""Following rollouts: pages of the change feed, whatever happens to the service meanwhile."""

from __future__ import annotations

import logging

from attrs import frozen

from agl_core.client import requests
from agl_core.client.calls import RolloutFilter
from agl_core.client.exchange import Operation, Sleep, once, pause_seconds
from agl_core.clock import Clock
from agl_core.errors import ApiError
from agl_core.records import RolloutPage

log = logging.getLogger(__name__)

PAGE_SIZE = 500
_WAIT_SECONDS = 30.0
# How long a service may be away where nobody set a limit: longer than any restart.
_OUTAGE_SECONDS = 600.0
_AWAY = frozenset({0, 429, 502, 503, 504})
_PATIENCE_SECONDS = 5.0


@frozen
class FeedPage:
    """What one look at the feed gave."""

    page: RolloutPage
    is_first: bool
    """Everything is listed anew from here on: what was known before no longer counts."""
    is_last: bool
    """All that exists has been shown; what follows are changes."""


class FeedReader:
    """Reads the change feed in order.

    It lists anew when its cursor has expired, and goes on when the service comes back after it
    went away.
    """

    def __init__(
        self,
        chosen: RolloutFilter,
        clock: Clock,
        *,
        cursor: str | None = None,
        was_reached: bool = False,
    ) -> None:
        self._filter = chosen
        self._clock = clock
        self._cursor = cursor
        self._is_listed = cursor is not None
        self.was_reached = was_reached
        """Whether the service has answered before: only then is its absence waited out."""

    def read(self, deadline: float | None) -> Operation[FeedPage | None]:
        """The next page, empty if nothing changed for a while; None: the deadline has passed.

        Args:
            deadline: In the clock's monotonic seconds.

        Raises:
            ApiError: The service refuses, or could not be reached even once.
        """
        away_since: float | None = None
        failures = 0
        while True:
            remaining = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            try:
                return (yield from self._ask(remaining))
            except ApiError as exc:
                now = self._clock.monotonic()
                if exc.status == 410 and self._cursor is not None:
                    log.info("the service has another store now; listing rollouts anew")
                    self._cursor = None
                    self._is_listed = False
                    continue
                if exc.code == "timeout" and deadline is not None and now >= deadline:
                    return None
                if exc.status not in _AWAY or not self.was_reached:
                    raise
                if away_since is None:
                    log.warning("the service is away; waiting for it: %s", exc)
                    away_since = now
                if deadline is not None and now >= deadline:
                    return None
                if deadline is None and now - away_since > _OUTAGE_SECONDS:
                    raise
                pause = pause_seconds(failures)
                yield Sleep(pause if deadline is None else min(pause, deadline - now))
                failures += 1

    def _ask(self, remaining: float | None) -> Operation[FeedPage]:
        wait = _WAIT_SECONDS if remaining is None else min(_WAIT_SECONDS, remaining)
        asked_at = self._clock.monotonic()
        call = requests.list_rollouts(
            self._filter,
            changed_after=self._cursor,
            limit=PAGE_SIZE,
            wait=wait if self._is_listed else None,
            # Near its end a wait cannot afford the client's usual patience.
            answer_seconds=None if remaining is None else remaining - wait + _PATIENCE_SECONDS,
            retries=0 if self.was_reached else None,
        )
        page = yield from once(call)
        self.was_reached = True
        is_first = self._cursor is None
        if self._is_listed and not page.items:
            yield from self._slow_down(wait, asked_at)
        self._cursor = page.cursor
        self._is_listed = self._is_listed or len(page.items) < PAGE_SIZE
        return FeedPage(page, is_first=is_first, is_last=self._is_listed)

    def _slow_down(self, wait: float, asked_at: float) -> Operation[None]:
        """A service that is being shut down answers every wait at once: do not ask in a loop."""
        unused = wait - (self._clock.monotonic() - asked_at)
        if unused > 0.0:
            yield Sleep(min(unused, pause_seconds(0)))
