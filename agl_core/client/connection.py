"""How the service is reached: the settings of a client, and what httpx is told.

An httpx client can be neither pickled nor shared across a fork, so clients keep these settings and
make one when they need it.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from attrs import field, frozen
from attrs.validators import ge, gt

from agl_core import __version__
from agl_core.client.calls import ApiRequest
from agl_core.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8080"
_CONNECT_SECONDS = 10.0
CALLS_AT_ONCE = 64
"""Of one client in one process or event loop; long-polls come on top."""
# Shorter than the 5 s after which common servers close an idle connection, so that a request
# seldom meets one that is just being closed.
_IDLE_SECONDS = 4.0


@frozen(kw_only=True)
class ClientSettings:
    """All that a client keeps."""

    url: str
    """Without a slash at the end."""
    key: str | None = field(repr=False)
    timeout_seconds: float = field(validator=gt(0))
    """For one answer, what the service was told to wait not counted."""
    retries: int = field(validator=ge(0))
    """Repeats of a call that may be repeated."""

    @property
    def is_loopback(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost" or host.endswith(".localhost")


def make_settings(
    url: str | None, key: str | None, timeout_seconds: float, retries: int
) -> ClientSettings:
    """Fill in what is not given from ``AGL_URL`` and ``AGL_KEY``.

    Raises:
        ConfigError: A value cannot be used.
    """
    try:
        return ClientSettings(
            url=_checked_url(url or os.environ.get("AGL_URL") or DEFAULT_URL),
            key=_checked_key(key if key is not None else os.environ.get("AGL_KEY")),
            timeout_seconds=timeout_seconds,
            retries=retries,
        )
    except ValueError as exc:
        raise ConfigError(f"client: {exc}") from exc


def _checked_url(url: str) -> str:
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{url!r} is no http or https URL",
            hint=f"set AGL_URL or pass url, such as {DEFAULT_URL}",
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} has a query or fragment", hint="give the base URL alone")
    if parts.port == 0:
        raise ConfigError(f"{url!r} has no usable port")
    return url.strip().rstrip("/")


def _checked_key(key: str | None) -> str | None:
    stripped = (key or "").strip()
    if not stripped:
        return None
    if not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise ConfigError("the key has characters that no HTTP header may hold")
    return stripped


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Made once per process: reading the certificates takes 50 ms."""
    return httpx.create_ssl_context()


def http_options(settings: ClientSettings, *, is_waiting: bool) -> dict[str, Any]:
    """Arguments of ``httpx.Client`` and ``httpx.AsyncClient``.

    Args:
        settings: Of our client.
        is_waiting: For calls that the service may hold for long. They have no bound of their own
            and go apart from the others, which would else queue behind them.
    """
    is_plain_loopback = settings.is_loopback and settings.url.startswith("http:")
    return {
        # httpx obeys HTTP_PROXY even for 127.0.0.1, where no proxy can help.
        "trust_env": not settings.is_loopback,
        "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if is_plain_loopback
        else _trusted_certificates(),
        "limits": httpx.Limits(
            max_connections=None if is_waiting else CALLS_AT_ONCE,
            max_keepalive_connections=CALLS_AT_ONCE,
            keepalive_expiry=_IDLE_SECONDS,
        ),
        "follow_redirects": False,
    }


def message_options(
    request: ApiRequest, settings: ClientSettings, more_headers: Mapping[str, str]
) -> dict[str, Any]:
    """Arguments of ``build_request`` of either httpx client."""
    headers = {"accept": request.accept, "user-agent": f"agl-lite/{__version__}"}
    if settings.key is not None:
        headers["authorization"] = f"Bearer {settings.key}"
    if request.body is not None:
        headers["content-type"] = "application/json"
    headers.update({name.lower(): value for name, value in more_headers.items()})
    seconds = min(request.answer_seconds or math.inf, settings.timeout_seconds)
    return {
        "method": request.method,
        "url": settings.url + request.path,
        "params": list(request.query),
        "content": request.body,
        "headers": headers,
        "timeout": httpx.Timeout(
            connect=min(seconds, _CONNECT_SECONDS),
            read=seconds + request.waits_seconds,
            write=seconds,
            # To queue for one of the pool's connections is no fault.
            pool=None,
        ),
    }
