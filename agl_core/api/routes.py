"""Routes as data: what each takes, gives and who may use it.

One table per module drives registration, the checks before a handler runs, and ``/openapi.json``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from attrs import field, frozen
from quart import Blueprint, Quart, Response, request
from werkzeug.routing import BaseConverter, ValidationError

from agl_core.api.front import SLASH
from agl_core.api.requests import read_body, read_query
from agl_core.api.shapes import NoQuery
from agl_core.auth import Identity, Role, require, require_own
from agl_core.records import Attempt, usable_id
from agl_core.services import Services
from agl_core.wire import to_json

log = logging.getLogger(__name__)

T = TypeVar("T")

READERS: tuple[Role, ...] = ("viewer", "controller")
JSON = "application/json"


@frozen(kw_only=True)
class Call:
    """A request whose sender, path and query have been checked."""

    identity: Identity
    path: Mapping[str, str]
    body: bytes
    parsed_query: Any
    other_query: Mapping[str, str]

    def query(self, kind: type[T]) -> T:
        """The query as the class that the route names."""
        assert isinstance(self.parsed_query, kind)
        return self.parsed_query

    def json(self) -> Any:
        """The body's JSON.

        Raises:
            BadJson: It is none.
        """
        return read_body(self.body)


@frozen
class Answer:
    """One thing that a route may answer."""

    status: int
    kind: Any
    """A type for the schema; None: no body."""
    says: str
    media_type: str = JSON


Handler = Callable[[Call], Awaitable[Response]]


@frozen(kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    """With parameters in braces, as OpenAPI writes them."""
    handler: Handler
    says: str
    """First line of its documentation."""
    answers: tuple[Answer, ...]
    roles: tuple[Role, ...] | None = ()
    """Who may use it besides ``algorithm``; None: everybody, without a key."""
    query: type[Any] = NoQuery
    is_open_query: bool = False
    """Whether query parameters besides those of ``query`` are the handler's business."""
    body: Any = None
    """A type for the schema; the handler checks the body."""
    needs_body: bool = True

    @property
    def rule(self) -> str:
        """The path as Quart writes it."""
        return self.path.replace("{format}", "<format>").replace("{", "<id:").replace("}", ">")


def json_answer(value: Any, status: int = 200) -> Response:
    """A record, or anything made of them, as an answer."""
    return Response(to_json(value), status, content_type=JSON)


def raw_json_answer(encoded: bytes) -> Response:
    """JSON that is encoded already."""
    return Response(encoded, 200, content_type=JSON)


class IdConverter(BaseConverter):
    """One part of a path that is an id; an encoded slash in it is part of the id."""

    def to_python(self, value: str) -> str:
        """Decode, or let the path match nothing."""
        text = value.replace(SLASH, "/")
        try:
            usable_id(None, attrs.fields(Attempt).attempt_id, text)
        except ValueError as exc:
            raise ValidationError from exc
        return text


@frozen
class RouteBinder:
    """Puts routes into an application.

    Args:
        services: What decides who may use a route.
    """

    services: Services
    requests: Counter[tuple[str, str, int]] = field(factory=Counter)
    """How often each (method, path template, status) was answered."""
    _running: set[asyncio.Task[Response]] = field(factory=set)

    def bind(self, app: Quart, name: str, routes: Sequence[Route]) -> None:
        """Add routes as a blueprint called ``name``."""
        blueprint = Blueprint(name, __name__)
        for route in routes:
            blueprint.add_url_rule(
                route.rule,
                endpoint=f"{route.method.lower()}{route.path}".replace("/", "_").replace(".", "_"),
                view_func=self._view(route),
                methods=[route.method],
            )
        app.register_blueprint(blueprint)

    def _view(self, route: Route) -> Callable[..., Awaitable[Response]]:
        async def view(**path: str) -> Response:
            identity = self._admit(route, path)
            query, others = read_query(
                request.scope["query_string"], route.query, is_open=route.is_open_query
            )
            body = b""
            if route.method != "GET":
                body = bytes(await request.get_data(cache=False, as_text=False))  # type: ignore[arg-type]
            call = Call(
                identity=identity, path=path, body=body, parsed_query=query, other_query=others
            )
            if route.method == "GET":
                return await route.handler(call)
            return await self._run_to_end(route.handler(call))

        return view

    def _admit(self, route: Route, path: Mapping[str, str]) -> Identity:
        if route.roles is None:
            return Identity("viewer")
        scope = request.scope
        identity = self.services.authority.identify(scope["headers"], client_of(scope))
        require(identity, *route.roles, to=f"{route.method} {route.path}")
        if "rollout_id" in path:
            require_own(identity, path["rollout_id"])
        return identity

    async def _run_to_end(self, handling: Awaitable[Response]) -> Response:
        """Finish what was begun though the client has gone: a change and what follows from it."""

        async def run() -> Response:
            return await handling

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(_note_failure)
        return await asyncio.shield(task)


def _note_failure(task: asyncio.Task[Response]) -> None:
    """Take an error off a task whose client has gone; one that waits gets it as well."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.debug("a request ended in an error", exc_info=exc)


def client_of(scope: Any) -> tuple[str, int] | None:
    """The peer's address; None for a Unix socket."""
    client = scope.get("client")
    return None if client is None else (str(client[0]), int(client[1] or 0))
