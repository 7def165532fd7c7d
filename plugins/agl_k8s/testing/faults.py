"""What goes wrong with the fake API server, when a test wants it to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal

from attrs import define, field, frozen

from agl_core.clock import Clock
from agl_k8s.testing.kinds import ApiStatus, Kind

RequestAct = Literal["answer", "delay", "black_hole", "lose_reply"]
StreamAct = Literal["cut", "close", "silence", "expire"]

USER = "system:serviceaccount:default:agl-lite"

_BAD_GATEWAY = b"""<html>\r
<head><title>502 Bad Gateway</title></head>\r
<body>\r
<center><h1>502 Bad Gateway</h1></center>\r
</body>\r
</html>\r
"""


@frozen(kw_only=True)
class Answer:
    """A response that the API server did not write, or not as usual."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@define(kw_only=True)
class Fault:
    """Something that goes wrong ``left`` times."""

    act: RequestAct | StreamAct
    path: re.Pattern[str]
    method: str | None = None
    left: float = 1
    answer: Answer | None = None
    seconds: float = 0.0
    after_events: int = 0

    def fits(self, method: str, path: str) -> bool:
        return (
            self.left > 0 and self.method in (None, method) and self.path.search(path) is not None
        )


@define
class Faults:
    """All that goes wrong at present, and who may do what.

    Each fault names the requests that it hits by a regular expression that is searched for in the
    path with its query, such as ``/jobs``; where a method can be given it must be that one. It
    happens ``count`` times, or until ``clear()`` where that is None. The first one that was asked
    for comes first.
    """

    _clock: Clock
    _requests: list[Fault] = field(factory=list, init=False)
    _streams: list[Fault] = field(factory=list, init=False)
    _listeners: list[Callable[[], None]] = field(factory=list, init=False)
    _tokens: dict[str, float] | None = field(default=None, init=False)
    _denied: set[tuple[str, str]] = field(factory=set, init=False)

    # -- Requests ---------------------------------------------------------------------------------

    def busy(
        self,
        path: str = "",
        *,
        method: str | None = None,
        count: int | None = 1,
        retry_after_seconds: int = 1,
    ) -> None:
        """429 as the server's own protection against too much at once sends it."""
        self.answer(
            429,
            b"Too many requests, please try again later.\n",
            path,
            method=method,
            count=count,
            headers={
                "Content-Type": "text/plain; charset=utf-8",
                "Retry-After": str(retry_after_seconds),
            },
        )

    def bad_gateway(
        self, path: str = "", *, method: str | None = None, count: int | None = 1
    ) -> None:
        """502 with a page of HTML, of a proxy before the server."""
        headers = {"Content-Type": "text/html"}
        self.answer(502, _BAD_GATEWAY, path, method=method, count=count, headers=headers)

    def answer(
        self,
        status: int,
        body: bytes,
        path: str = "",
        *,
        method: str | None = None,
        count: int | None = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Any answer in place of the server's; nothing is done."""
        found = Answer(status=status, body=body, headers=headers or {})
        self._add_request("answer", path, method, count, answer=found)

    def delay(
        self,
        seconds: float,
        path: str = "",
        *,
        method: str | None = None,
        count: int | None = 1,
    ) -> None:
        """Wait before the request is handled; no other fault hits it."""
        self._add_request("delay", path, method, count, seconds=seconds)

    def black_hole(
        self, path: str = "", *, method: str | None = None, count: int | None = 1
    ) -> None:
        """Take the request, do nothing, say nothing, keep the connection open."""
        self._add_request("black_hole", path, method, count)

    def lose_reply(
        self, path: str = "", *, method: str | None = None, count: int | None = 1
    ) -> None:
        """Do what is asked, then cut the connection instead of answering."""
        self._add_request("lose_reply", path, method, count)

    # -- Watches, open ones too -------------------------------------------------------------------

    def cut_watches(self, path: str = "", *, after_events: int = 0, count: int | None = 1) -> None:
        """Cut the connection in the middle of the line that follows ``after_events`` events."""
        self._add_stream("cut", path, count, after_events)

    def close_watches(
        self, path: str = "", *, after_events: int = 0, count: int | None = 1
    ) -> None:
        """End the stream as if its time were over."""
        self._add_stream("close", path, count, after_events)

    def silence_watches(
        self, path: str = "", *, after_events: int = 0, count: int | None = 1
    ) -> None:
        """Send nothing more, bookmarks neither, and keep the connection open."""
        self._add_stream("silence", path, count, after_events)

    def expire_watches(
        self, path: str = "", *, after_events: int = 0, count: int | None = 1
    ) -> None:
        """End the stream with an ERROR line of code 410."""
        self._add_stream("expire", path, count, after_events)

    def clear(self) -> None:
        """Nothing more goes wrong; what is silent already stays so. Access is as it was."""
        self._requests.clear()
        self._streams.clear()

    # -- Access -----------------------------------------------------------------------------------

    def accept_tokens(self, *tokens: str) -> None:
        """From now on only these bearer tokens are good; none at all where none is given."""
        self._tokens = dict.fromkeys(tokens, math.inf)

    def expire_token(self, token: str, *, at: float | None = None) -> None:
        """Refuse a token from a time on.

        Args:
            token: One that is accepted.
            at: Seconds since the epoch; now where None.
        """
        if self._tokens is not None and token in self._tokens:
            self._tokens[token] = self._clock.now() if at is None else at

    def deny(self, verb: str, resource: str) -> None:
        """Take a right away, such as ``create`` on ``pods/log``; ``*`` is any."""
        self._denied.add((verb, resource))

    def allow(self, verb: str, resource: str) -> None:
        """Give back what ``deny`` took."""
        self._denied.discard((verb, resource))

    def is_allowed(self, verb: str, resource: str) -> bool:
        return not any(
            denied in self._denied
            for denied in ((verb, resource), ("*", resource), (verb, "*"), ("*", "*"))
        )

    def authenticate(self, authorization: str | None) -> None:
        """Check the token of a request.

        Raises:
            ApiStatus: 401.
        """
        if self._tokens is None:
            return
        token = (authorization or "").removeprefix("Bearer ")
        if self._clock.now() >= self._tokens.get(token, -math.inf):
            raise ApiStatus(401, "Unauthorized", "Unauthorized")

    def authorize(
        self, verb: str, kind: Kind, subresource: str, namespace: str | None, name: str
    ) -> None:
        """Check the rights to do something.

        Raises:
            ApiStatus: 403.
        """
        resource = f"{kind.resource}/{subresource}" if subresource else kind.resource
        if self.is_allowed(verb, resource):
            return
        scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        why = (
            f'User "{USER}" cannot {verb} resource "{resource}" in API group "{kind.group}" {scope}'
        )
        raise kind.forbidden(name, why)

    # -- The server's side ------------------------------------------------------------------------

    def take_request(self, method: str, path: str) -> Fault | None:
        """What goes wrong with a request; counted as done."""
        return _take(self._requests, lambda fault: fault.fits(method, path))

    def take_stream(self, path: str, events: int, *, has_line: bool) -> Fault | None:
        """What goes wrong with a watch that has sent so many events; counted as done.

        Args:
            path: Of the watch.
            events: Sent so far, bookmarks not among them.
            has_line: Whether there is a line to send now, and to cut.
        """
        return _take(
            self._streams,
            lambda fault: (
                fault.fits("GET", path)
                and events >= fault.after_events
                and (has_line or fault.act != "cut")
            ),
        )

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Hear of new faults of watches; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _add_request(
        self,
        act: RequestAct,
        path: str,
        method: str | None,
        count: int | None,
        *,
        answer: Answer | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._requests.append(
            Fault(
                act=act,
                path=re.compile(path),
                method=method,
                left=_times(count),
                answer=answer,
                seconds=seconds,
            )
        )

    def _add_stream(self, act: StreamAct, path: str, count: int | None, after_events: int) -> None:
        self._streams.append(
            Fault(act=act, path=re.compile(path), left=_times(count), after_events=after_events)
        )
        for listener in tuple(self._listeners):
            listener()


def _times(count: int | None) -> float:
    return math.inf if count is None else count


def _take(faults: list[Fault], fits: Callable[[Fault], bool]) -> Fault | None:
    for fault in faults:
        if fits(fault):
            fault.left -= 1
            return fault
    return None
