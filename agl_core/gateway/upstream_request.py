"""What is sent to a model server: where to, within which time, and the bytes of the head.

Everything that could smuggle a second request past the gateway is refused here, before a
connection is taken: line breaks, malformed names, framing headers of the caller's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import attrs

from agl_core.errors import AglError, UpstreamError

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port: what a connection can be reused for."""

Phase: TypeAlias = Literal["request", "connect", "head", "body"]

_VISIBLE = re.compile(r"[\x21-\x7e]+")
# The zone of an IPv6 address is not taken: it has no place in a host header.
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
# Visible ASCII without "#": a fragment is never sent.
_TARGET = re.compile(rb"[/*][\x21\x22\x24-\x7e]*")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# How a message is framed is this client's business alone.
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})
# RFC 9110, 8.6: these say nothing about a body that they do not have.
_METHODS_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


def fault_details(phase: Phase, *, ours: bool = False) -> dict[str, str]:
    """Give the ``details`` of an upstream error.

    Args:
        phase: How far the call had come: up to ``head`` it may be sent again, since no byte of
            an answer was handed on; in ``body`` it may not.
        ours: The fault is the gateway's (its request, its descriptors, its shutdown) and says
            nothing about the model server's health.
    """
    return {"phase": phase, "source": "gateway" if ours else "server"}


def is_before_head(error: AglError) -> bool:
    """Tell whether an upstream error came before any answer: nothing has been handed on yet."""
    return error.details.get("phase") in ("connect", "head")


def is_ours(error: AglError) -> bool:
    """Tell whether an upstream error is the gateway's own and not the model server's."""
    return error.details.get("source") == "gateway"


def _refuse(message: str, *, hint: str | None = None) -> UpstreamError:
    return UpstreamError(
        message,
        hint=hint,
        code="upstream_bad_request",
        status=400,
        details=fault_details("request", ours=True),
    )


@attrs.frozen
class UpstreamUrl:
    """A parsed address; ``upstream_url`` makes (and remembers) them.

    Attributes:
        scheme: ``http`` or ``https``.
        host: A name or an IP address, without brackets.
        port: The TCP port.
        target: What follows the method in the request line: path and query, percent-encoded.
        authority: The value of the host header.
        origin: Scheme, host and port.
    """

    scheme: str
    host: str
    port: int
    target: bytes
    authority: bytes = attrs.field(init=False, eq=False)
    origin: Origin = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if self.scheme not in _DEFAULT_PORTS:
            raise _refuse(f"scheme {self.scheme!r} is not http or https")
        if not _HOST.fullmatch(self.host) or not all(
            0 < len(label) < 64 for label in self.host.removesuffix(".").split(".")
        ):
            raise _refuse(f"host {self.host!r} is not a name or an IP address")
        if not _TARGET.fullmatch(self.target):
            raise _refuse(f"target {self.target!r} is not a percent-encoded path")
        authority = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != _DEFAULT_PORTS[self.scheme]:
            authority = f"{authority}:{self.port}"
        object.__setattr__(self, "authority", authority.encode())
        object.__setattr__(self, "origin", (self.scheme, self.host, self.port))


@lru_cache(maxsize=4096)
def upstream_url(endpoint: str, path: str) -> UpstreamUrl:
    """Join a model server's endpoint and a request's path; costs a dictionary look-up when known.

    Args:
        endpoint: Such as ``http://10.0.0.7:8000`` or ``https://models.example/v1``.
        path: Begins with a slash, percent-encoded, with the query where there is one.

    Raises:
        UpstreamError: ``upstream_bad_request``: one of them is not what it should be.
    """
    hint = "write it as http://host:port, without a user name, a query or a fragment"
    if not _VISIBLE.fullmatch(endpoint):
        raise _refuse("endpoint has spaces or is not ASCII", hint=hint)
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        # Neither the endpoint nor the cause is shown: they may hold a password.
        raise _refuse("endpoint is not a URL", hint=hint) from None
    if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        raise _refuse("endpoint is not of the form scheme://host:port/path", hint=hint)
    if not path.startswith("/") or not path.isascii():
        raise _refuse(f"path {path!r} is not a percent-encoded path")
    return UpstreamUrl(
        scheme=parts.scheme,
        host=parts.hostname,
        port=_DEFAULT_PORTS.get(parts.scheme, 0) if port is None else port,
        target=(parts.path.rstrip("/") + path).encode("ascii"),
    )


@attrs.frozen
class UpstreamRequest:
    """One request, whole.

    Attributes:
        method: Any token but CONNECT, upper case as a rule.
        url: Where it goes.
        headers: Sent in this order and as they are, but for host, content-length,
            transfer-encoding and connection, which are dropped: this client frames the message.
        body: Sent with its own content-length.
    """

    method: str
    url: UpstreamUrl
    headers: list[tuple[bytes, bytes]] = attrs.field(factory=list)
    body: bytes = attrs.field(default=b"", repr=False)


@attrs.frozen
class Timeouts:
    """Limits of one call, in seconds; None is no limit.

    Attributes:
        connect_seconds: Name look-up, TCP and TLS together.
        first_byte_seconds: From the request's being written to the whole head of the answer.
        idle_seconds: The longest single wait for more of the body. Time in which nobody reads
            does not count.
        now: The clock that first_byte_seconds and idle_seconds are counted on, in seconds;
            the event loop's where None. One that stands still while a policy is paused makes
            paused time count against no limit.
    """

    connect_seconds: float | None = 5.0
    first_byte_seconds: float | None = None
    idle_seconds: float | None = None
    now: Callable[[], float] | None = None


@lru_cache(maxsize=1024)
def _is_sent(name: bytes) -> bool:
    # Names repeat from call to call, so each is looked at once.
    if not _TOKEN.fullmatch(name):
        raise _refuse(f"header name {name!r} is not a token")
    return name.lower() not in _FRAMING


def encode_head(request: UpstreamRequest) -> bytes:
    """Write the request line and the headers, with the empty line that ends them.

    Raises:
        UpstreamError: ``upstream_bad_request``: the method, a header's name or its value would
            change how the message is read.
    """
    method = request.method.encode()
    if not _TOKEN.fullmatch(method) or method == b"CONNECT":
        raise _refuse(f"method {request.method!r} cannot be sent")
    lines = [
        b"%b %b HTTP/1.1" % (method, request.url.target),
        b"host: " + request.url.authority,
    ]
    lines += [b"%b: %b" % header for header in request.headers if _is_sent(header[0])]
    if request.body or request.method not in _METHODS_WITHOUT_BODY:
        lines.append(b"content-length: %d" % len(request.body))
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    # One count over the whole is cheaper than a look at each value, and as strict.
    breaks = len(lines)
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        broken = [
            name
            for name, value in request.headers
            if any(sign in value for sign in (b"\r", b"\n", b"\0"))
        ]
        names = b", ".join(broken).decode()
        raise _refuse(f"the value of header {names} holds a line break or a zero byte")
    return head
