"""One request until it is answered: repeats, waiting in between, and errors in words.

These are generators that say what to do next (``Send``, ``Sleep``) and are told what came of it, so
that the blocking and the asynchronous client share every decision and differ in the doing alone.
"""

from __future__ import annotations

import email.utils
import itertools
import random
from collections.abc import Generator, Mapping
from typing import Any, Generic, TypeVar

import httpx
from attrs import frozen

from agl_core import wire
from agl_core.client.calls import ApiCall, ApiRequest
from agl_core.client.connection import ClientSettings
from agl_core.clock import Clock
from agl_core.errors import AglError, ApiError

T = TypeVar("T")

_BUSY = frozenset({429, 502, 503, 504})
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
# A service that asks for more than this is better reported than waited for.
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_EXCERPT_CHARACTERS = 200


@frozen
class Send:
    """Send the request once; the answer is an ``httpx.Response``, read unless it is a stream."""

    request: ApiRequest


@frozen
class Sleep:
    """Wait."""

    seconds: float


@frozen
class Emit(Generic[T]):
    """Hand a value to the caller and go on when the next one is wanted."""

    value: T


Step = Send | Sleep | Emit[Any] | ApiRequest
"""What an operation may ask for; an ``ApiRequest`` stands for a whole ``exchange``."""
Operation = Generator[Step, Any, T]


def exchange(
    request: ApiRequest, settings: ClientSettings, clock: Clock
) -> Operation[httpx.Response]:
    """Send a request, again where that is safe and of use, until there is an answer.

    Raises:
        ApiError: The answer is an error, or there is none (status 0).
    """
    repeats = settings.retries if request.retries is None else request.retries
    is_obeyed_perhaps = False
    for count in itertools.count():
        try:
            response: httpx.Response = yield Send(request)
        except httpx.TransportError as exc:
            if count >= repeats or not _is_worth_a_repeat(exc, request):
                raise no_answer(exc, request, settings) from exc
            is_obeyed_perhaps |= not _is_unsent(exc)
            yield Sleep(pause_seconds(count))
            continue
        except httpx.InvalidURL as exc:
            raise no_answer(exc, request, settings) from exc
        if response.is_success or response.status_code in request.good_statuses:
            return response
        if response.status_code == 404 and request.gone_is_done and is_obeyed_perhaps:
            return response
        asked = _retry_after(response, clock)
        if (
            count >= repeats
            or response.status_code not in _BUSY
            # 429 says that nothing was done; the others leave that open.
            or not (request.is_safe or response.status_code == 429)
            or (asked or 0.0) > _LONGEST_RETRY_AFTER_SECONDS
        ):
            raise error_of(response, request)
        is_obeyed_perhaps |= response.status_code != 429
        yield Sleep(pause_seconds(count) if asked is None else asked + pause_seconds(0))
    raise AssertionError("the loop has no end")


def once(call: ApiCall[T]) -> Operation[T]:
    """One call: its exchange, and its result."""
    response: httpx.Response = yield call.request
    try:
        return call.read(wire.read_json(response.content, "the answer") if response.content else {})
    except (AglError, LookupError, TypeError, AttributeError) as exc:
        raise ApiError(
            response.status_code,
            "bad_answer",
            f"{call.request.method} {response.url} was answered with something unexpected: {exc}",
            hint="is this URL an agl-lite service of this version?",
        ) from exc


def opened(request: ApiRequest) -> Operation[httpx.Response]:
    """A stream: the open answer, whose body the caller reads and closes."""
    response: httpx.Response = yield request
    return response


def pause_seconds(count: int) -> float:
    """How long to wait before repeat ``count`` (from 0): doubling, with jitter."""
    longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(count, 16))
    return longest * random.uniform(0.5, 1.0)


def _is_unsent(exc: httpx.TransportError) -> bool:
    return isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError)


def _is_worth_a_repeat(exc: httpx.TransportError, request: ApiRequest) -> bool:
    if _is_unsent(exc):
        return True
    # After a time-out the service is busy with the first one still.
    return request.is_safe and isinstance(exc, httpx.NetworkError | httpx.RemoteProtocolError)


def _retry_after(response: httpx.Response, clock: Clock) -> float | None:
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - clock.now())


def no_answer(exc: Exception, request: ApiRequest, settings: ClientSettings) -> ApiError:
    """The error for a request that got no answer, or not the whole of one."""
    if isinstance(exc, httpx.TimeoutException) and not isinstance(exc, httpx.ConnectTimeout):
        return ApiError(
            0,
            "timeout",
            f"{request.method} {settings.url}{request.path} was not answered in time",
            hint="raise timeout_seconds, or look at the service's log",
        )
    if isinstance(exc, httpx.ReadError | httpx.RemoteProtocolError):
        return ApiError(
            0,
            "broken_off",
            f"the answer to {request.method} {settings.url}{request.path} broke off: {exc}",
            hint="look at the service's log",
        )
    reason = str(exc) or type(exc).__name__
    return ApiError(
        0,
        "unreachable",
        f"nothing answers at {settings.url}: {reason}",
        hint="start the service with `agl serve`, or set AGL_URL or url to where it runs",
    )


def error_of(response: httpx.Response, request: ApiRequest) -> ApiError:
    """The error in an answer: a problem document, a model API's error, or whatever came."""
    try:
        body = wire.read_json(response.content)
    except AglError:
        body = None
    problem = body if isinstance(body, dict) else {}
    inner = problem.get("error")
    if isinstance(inner, dict):
        problem = {"detail": inner.get("message"), "code": inner.get("code") or inner.get("type")}
    if problem.get("hint") is None and response.status_code == 401:
        problem = {**problem, "hint": "set AGL_KEY or pass key"}
    return problem_error(problem, response.status_code, _described(response, request))


def problem_error(problem: Mapping[str, Any], status: int, described: str) -> ApiError:
    """The error of a problem document; ``described`` is for one without words of its own."""
    message = problem.get("detail") or problem.get("title")
    details = problem.get("details")
    return ApiError(
        status,
        str(problem.get("code") or "api_error"),
        str(message) if message else described,
        hint=problem.get("hint"),
        details=details if isinstance(details, dict) else None,
    )


def _described(response: httpx.Response, request: ApiRequest) -> str:
    text = f"{request.method} {response.url} was answered with HTTP {response.status_code}"
    target = response.headers.get("location")
    if target:
        return f"{text}, a redirect to {target}"
    excerpt = " ".join(response.text.split())[:_EXCERPT_CHARACTERS]
    return f"{text}: {excerpt}" if excerpt else text
