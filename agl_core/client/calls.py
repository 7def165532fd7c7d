"""What a call to the service is made of: its request, how it is treated, how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

from attrs import field, frozen

from agl_core.errors import Invalid
from agl_core.records import Status

T = TypeVar("T")
Ids = str | Iterable[str]
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]

# Servers take request lines of 8 KiB at least; more goes into a body where the API has one.
MAX_QUERY_CHARACTERS = 6_000


@frozen(kw_only=True)
class ApiRequest:
    """One HTTP request, and how it may be treated."""

    method: Method
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = field(default=None, repr=False)
    accept: str = "application/json"
    is_safe: bool = True
    """Sending it twice does the same as sending it once."""
    is_stream: bool = False
    """The answer is handed on while it arrives."""
    good_statuses: frozenset[int] = frozenset()
    """Answers beside 2xx that are no errors."""
    gone_is_done: bool = False
    """404 in answer to a repeat means that the request whose answer was lost has been obeyed."""
    waits_seconds: float = 0.0
    """How long the service may take on purpose."""
    answer_seconds: float | None = None
    """Shortens the client's ``timeout_seconds``."""
    retries: int | None = None
    """Replaces the client's ``retries``."""


@frozen
class ApiCall(Generic[T]):
    """A request, and what makes the result of the JSON in its answer."""

    request: ApiRequest
    read: Callable[[Any], T]


@frozen(kw_only=True)
class RolloutFilter:
    """Which rollouts are meant; None lets everything through."""

    ids: tuple[str, ...] | None = None
    statuses: tuple[str, ...] | None = None
    group_id: str | None = None
    mode: str | None = None


def path_of(*segments: str) -> str:
    """A path below the service's URL; each segment is quoted whole."""
    for segment in segments:
        if not segment or segment in (".", ".."):
            raise Invalid(f"{segment!r} is no id", hint="give the id of a record")
    return "/" + "/".join(quote(segment, safe="") for segment in segments)


def as_ids(ids: Ids) -> tuple[str, ...]:
    """Ids as a tuple; one id may stand alone, and each counts once."""
    return (ids,) if isinstance(ids, str) else tuple(dict.fromkeys(ids))


def rollout_filter(
    ids: Ids | None = None,
    status: Status | Iterable[Status] | None = None,
    group_id: str | None = None,
    mode: str | None = None,
) -> RolloutFilter:
    """Check a selection.

    Raises:
        Invalid: It has an empty list, which the API would read as "all".
    """
    chosen = RolloutFilter(
        ids=None if ids is None else as_ids(ids),
        statuses=None if status is None else as_ids(status),
        group_id=group_id,
        mode=mode,
    )
    for name, values in (("ids", chosen.ids), ("status", chosen.statuses)):
        if values is not None and not values:
            raise Invalid(f"{name} is empty, so nothing is selected", hint="None selects all")
    return chosen


def query_of(**values: object) -> tuple[tuple[str, str], ...]:
    """Query parameters; None leaves one out."""
    pairs = []
    for name, value in values.items():
        if isinstance(value, tuple):
            pairs.append((name, ",".join(value)))
        elif isinstance(value, bool):
            pairs.append((name, "true" if value else "false"))
        elif isinstance(value, float):
            pairs.append((name, f"{value:.3f}".rstrip("0").rstrip(".")))
        elif value is not None:
            pairs.append((name, str(value)))
    return tuple(pairs)


def fits(query: tuple[tuple[str, str], ...]) -> bool:
    """Whether a query is short enough to be sent as one."""
    return len(urlencode(query)) <= MAX_QUERY_CHARACTERS
