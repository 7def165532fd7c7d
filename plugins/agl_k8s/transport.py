"""HTTP to the API server: every way to fail is a KubeError, and tokens are current."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from agl_core.clock import Clock
from agl_core.errors import BadJson, ConfigError
from agl_core.wire import read_json
from agl_k8s.credentials import Access, is_loopback
from agl_k8s.errors import IDLE, KubeError, error_of_answer, no_answer

if TYPE_CHECKING:
    import aiohttp
    from kubernetes.aio.client import ApiClient

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
# The API server itself gives up after 60 s; what takes half of that is better asked again.
REQUEST_SECONDS = 30.0
BUSY_TRIES = 3
LONGEST_RETRY_AFTER_SECONDS = 10.0
# An object is at most 1.5 MB in etcd; the rest is room for escapes.
LONGEST_LINE_BYTES = 4 * 1024 * 1024


class Transport:
    """One client, with its pool of connections, for all requests of the process.

    Args:
        access: Where to, and as whom.
        clock: Waits where the server is busy.
        request_seconds: How long a request for one object may take.
    """

    def __init__(
        self, access: Access, clock: Clock, *, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self._access = access
        self._clock = clock
        self._request_seconds = request_seconds
        self._host = access.configuration.host.rstrip("/")
        self._client: ApiClient | None = None

    async def __aenter__(self) -> Transport:
        from kubernetes.aio.client import ApiClient

        configuration = self._access.configuration
        # The client would send requests to this very machine through HTTP_PROXY.
        configuration.client_session_kwargs = {"trust_env": not is_loopback(self._host)}
        try:
            self._client = ApiClient(configuration)
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"the certificates for {self._host} cannot be used: {exc}",
                hint="correct certificate-authority, client-certificate and client-key",
            ) from exc
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        is_repeatable: bool = True,
    ) -> dict[str, Any]:
        """The object that a request answers with.

        Args:
            method: Of HTTP.
            path: Below the server's URL, its parts encoded.
            query: Parameters.
            body: An object.
            is_repeatable: Ask again, a few times, where the server says that it is busy.

        Raises:
            KubeError: It refused, or gave no answer that is an object.
        """
        what = f"{method} {path}"
        for attempt in range(1, BUSY_TRIES + 1):
            try:
                return await self._json_once(what, method, path, query, body)
            except KubeError as exc:
                is_busy = exc.status == 429 or (
                    exc.status == 503 and exc.retry_after_seconds is not None
                )
                if not is_busy or not is_repeatable or attempt == BUSY_TRIES:
                    raise
                wait = min(exc.retry_after_seconds or 1.0, LONGEST_RETRY_AFTER_SECONDS)
            await self._clock.sleep(wait * random.uniform(1.0, 1.25))
        raise AssertionError("the last try returns or raises")

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        total_seconds: float | None,
        idle_seconds: float | None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of a GET as it comes, in pieces of any size.

        Raises:
            KubeError: It was refused or broke off; its reason is ``Idle`` where a limit passed.
        """
        import aiohttp

        what = f"GET {path}"
        timeout = aiohttp.ClientTimeout(
            total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=idle_seconds
        )
        with _telling(what, self._host):
            response = await self._open("GET", path, query, None, timeout)
            try:
                if response.status != 200:
                    raw = await response.read()
                    raise error_of_answer(what, response.status, response.headers, raw)
                yield response.content.iter_any()
            finally:
                response.close()

    async def _json_once(
        self,
        what: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=CONNECT_SECONDS)
        with _telling(what, self._host):
            response = await self._open(method, path, query, body, timeout)
            try:
                raw = await response.read()
            finally:
                response.release()
        if not 200 <= response.status < 300:
            raise error_of_answer(what, response.status, response.headers, raw)
        for warning in response.headers.getall("Warning", []):
            log.warning("the API server warns", extra={"request": what, "problem": warning})
        try:
            found = read_json(raw)
        except BadJson:
            found = None
        if not isinstance(found, dict):
            # A proxy's page, perhaps: whether the API server has seen the request is unknown.
            text = " ".join(raw[:300].decode(errors="replace").split())
            raise no_answer(what, "NoObject", f"the answer is no JSON object: {text}")
        return found

    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request, and once more where its token was refused and there is a newer one."""
        assert self._client is not None, "the API is used inside 'async with'"
        url = self._host + path
        if query:
            url += "?" + urlencode(query, quote_via=quote)
        credentials = self._access.credentials
        for is_last in (False, True):
            header = await credentials.header()
            headers = {"Accept": "application/json", "User-Agent": "agl-lite"}
            if header is not None:
                headers["Authorization"] = header
            answer = await self._client.call_api(
                method, url, header_params=headers, body=body, _request_timeout=timeout
            )
            response: aiohttp.ClientResponse = answer.response
            if response.status != 401 or is_last or not await credentials.renewed(header):
                return response
            response.release()
        raise AssertionError("the last try returns")


async def lines_of(pieces: AsyncIterator[bytes], what: str) -> AsyncIterator[bytes]:
    """Whole lines, without their ends; a last one that has no end too, as it may have been cut.

    Raises:
        KubeError: A line is longer than any object can be.
    """
    pending = bytearray()
    async for piece in pieces:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            pending += piece[start:end]
            if pending:
                yield bytes(pending)
            pending.clear()
            start = end + 1
        pending += piece[start:]
        if len(pending) > LONGEST_LINE_BYTES:
            raise no_answer(what, "LineTooLong", f"a line of over {LONGEST_LINE_BYTES} bytes")
    if pending:
        yield bytes(pending)


@contextmanager
def _telling(what: str, host: str) -> Iterator[None]:
    """Turn the client's many errors into one kind."""
    import aiohttp

    try:
        yield
    except TimeoutError as exc:
        raise no_answer(what, IDLE, f"{host} has been silent for too long") from exc
    except (aiohttp.ClientError, OSError) as exc:
        text = str(exc) or "the connection was cut"
        raise no_answer(what, type(exc).__name__, f"{host}: {text}") from exc
