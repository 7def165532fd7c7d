"""The fake API server: the store over real HTTP, on loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from agl_core.clock import Clock
from agl_core.errors import BadJson
from agl_core.wire import read_json, to_json
from agl_k8s.testing import operations
from agl_k8s.testing.faults import Fault, Faults
from agl_k8s.testing.kinds import KINDS, ApiStatus, Object
from agl_k8s.testing.logs import LogSource, NoLogs, answer_log
from agl_k8s.testing.objects import ObjectStore, copied
from agl_k8s.testing.operations import Result
from agl_k8s.testing.paths import REVIEWS, Target, target_of
from agl_k8s.testing.schema import read_object
from agl_k8s.testing.watching import Watch

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

LARGEST_BODY_BYTES = 3 * 1024 * 1024
BOOKMARK_SECONDS = 60.0
_HEALTH = ("/healthz", "/livez", "/readyz")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "GET": "get", "DELETE": "delete"}
_REVIEWED_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")


@frozen
class SeenRequest:
    """A request as it came, whatever became of it."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    """As JSON, or None where it was none."""


class FakeApiServer:
    """Serves a store; open as an async context manager.

    Args:
        store: What is served.
        clock: Times watches, delays and tokens.
        logs: Where logs come from; without it no container has one.
        namespaces: Made at the start where they are missing.
        bookmark_seconds: Between the bookmarks of a watch.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        *,
        logs: LogSource | None = None,
        namespaces: tuple[str, ...] = ("default",),
        bookmark_seconds: float = BOOKMARK_SECONDS,
    ) -> None:
        self.requests: list[SeenRequest] = []
        self.faults = Faults(clock)
        self.logs: LogSource = logs or NoLogs()
        self._store = store
        self._clock = clock
        self._namespaces = namespaces
        self._bookmark_seconds = bookmark_seconds
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it is, or was, reached."""
        assert self._port, "the server has been started"
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> FakeApiServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; at the same port as before, where every old version has expired then."""
        from aiohttp import web

        if self._runner is not None:
            return
        for namespace in self._namespaces:
            if self._store.peek(("namespaces", "", namespace)) is None:
                self._store.create("namespaces", None, {"metadata": {"name": namespace}})
        if self._port:
            self._store.compact()
        listening = socket.create_server(("127.0.0.1", self._port), backlog=1024)
        self._port = listening.getsockname()[1]
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._take)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=1024).start()

    async def stop(self) -> None:
        """Cut all connections and listen no more, as when the process dies."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for connection in runner.server.connections if runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def restart(self) -> None:
        """Stop and start. Where this is cancelled half way, it ends when the server is up again."""
        # A test that ends its troublemaker must not be left without a server.
        restarting = asyncio.ensure_future(self._restart())
        cancelled: asyncio.CancelledError | None = None
        while not restarting.done():
            try:
                await asyncio.wait({restarting})
            except asyncio.CancelledError as exc:
                cancelled = exc
        restarting.result()
        if cancelled is not None:
            raise cancelled

    # ---------------------------------------------------------------------------------------------

    async def _restart(self) -> None:
        await self.stop()
        await self.start()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = read_json(raw) if raw else None
        except BadJson:
            body = None
        query = dict(request.query)
        self.requests.append(SeenRequest(request.method, request.path, query, copied(body)))
        fault = self._take_fault(request)
        if fault is not None and fault.act == "delay":
            await self._clock.sleep(fault.seconds)
        if fault is not None and fault.act == "black_hole":
            await asyncio.Event().wait()
        if fault is not None and fault.answer is not None:
            return _plain(fault.answer.status, fault.answer.body, fault.answer.headers)
        try:
            response = await self._answer(request, raw, body)
        except ApiStatus as exc:
            response = _json(exc.to_object(), exc.code)
        except Exception:
            log.exception("a request was not understood", extra={"path": request.path_qs})
            text = "Internal error occurred: the fake API server failed; its log says how"
            response = _json(ApiStatus(500, "InternalError", text).to_object(), 500)
        if fault is not None and fault.act == "lose_reply" and request.transport is not None:
            request.transport.abort()
        return response

    def _take_fault(self, request: web.Request) -> Fault | None:
        return self.faults.take_request(request.method, request.path_qs)

    async def _answer(self, request: web.Request, raw: bytes, body: Any) -> web.StreamResponse:
        if request.path in _HEALTH:
            return _plain(200, b"ok", {"Content-Type": "text/plain"})
        self.faults.authenticate(request.headers.get("Authorization"))
        if request.path == "/version":
            return _json({"major": "1", "minor": "36", "gitVersion": "v1.36.0"})
        if len(raw) > LARGEST_BODY_BYTES:
            message = f"Request entity too large: limit is {LARGEST_BODY_BYTES}"
            raise ApiStatus(413, "RequestEntityTooLarge", message)
        if raw and body is None:
            raise ApiStatus(400, "BadRequest", "the request body is no JSON")
        target = target_of(request.path)
        if target.kind.resource in REVIEWS:
            return _json(self._review(request, target, body), 201)
        verb = _verb(request, target)
        kind, namespace = target.kind, target.namespace
        self.faults.authorize(verb, kind, target.subresource, namespace, target.name)
        if verb == "watch":
            watch = Watch(
                self._store, self._clock, self.faults, self._bookmark_seconds, request, target
            )
            return await watch.run()
        if target.subresource == "log" and verb == "get":
            pod = self._store.get("pods", namespace, target.name)
            return await answer_log(request, self.logs, pod)
        result = self._operate(verb, request, target, body)
        return _json(result.object, result.status, result.warnings)

    def _operate(self, verb: str, request: web.Request, target: Target, body: Any) -> Result:
        store, query = self._store, request.query
        if target.subresource == "eviction" and verb == "create":
            return operations.evict(store, target.namespace, target.name, body)
        is_whole = target.subresource in ("", "status")
        if verb == "create" and not target.name:
            return operations.create(store, target, query, body)
        if verb == "list":
            return operations.get_list(store, target, query)
        if verb == "deletecollection":
            return operations.delete_collection(store, target, query, body)
        if target.name and is_whole:
            if verb == "get":
                return Result(store.get(target.kind.resource, target.namespace, target.name))
            if verb == "update":
                return operations.replace(store, target, query, body)
            if verb == "patch":
                return operations.patch(store, target, query, body, request.content_type)
            if verb == "delete" and not target.subresource:
                return operations.delete(store, target, query, body)
        message = "the server does not allow this method on the requested resource"
        raise ApiStatus(405, "MethodNotAllowed", message, {})

    def _review(self, request: web.Request, target: Target, body: Any) -> Object:
        """What the sender may do; anyone may ask that."""
        if request.method != "POST" or target.name:
            message = "the server does not allow this method on the requested resource"
            raise ApiStatus(405, "MethodNotAllowed", message, {})
        read_object(target.kind, body)
        spec = body.get("spec") or {}
        status: Object
        if target.kind.kind == "SelfSubjectAccessReview":
            asked = spec.get("resourceAttributes") or {}
            resource, subresource = asked.get("resource", ""), asked.get("subresource")
            if subresource:
                resource = f"{resource}/{subresource}"
            status = {"allowed": self.faults.is_allowed(asked.get("verb", ""), resource)}
        else:
            status = {
                "resourceRules": self._rules(),
                "nonResourceRules": [],
                "incomplete": False,
            }
        kind = target.kind
        return {
            "kind": kind.kind,
            "apiVersion": kind.api_version,
            "metadata": {},
            "spec": spec,
            "status": status,
        }

    def _rules(self) -> list[Object]:
        """What may be done, resource by resource."""
        subresources = {"pods": ("log", "eviction", "status"), "jobs": ("status",)}
        rules = []
        for kind in KINDS.values():
            names = [f"{kind.resource}/{sub}" for sub in subresources.get(kind.resource, ())]
            for name in (kind.resource, *names):
                verbs = [v for v in _REVIEWED_VERBS if self.faults.is_allowed(v, name)]
                if verbs:
                    rules.append({"verbs": verbs, "apiGroups": [kind.group], "resources": [name]})
        return rules


def _verb(request: web.Request, target: Target) -> str:
    """The verb by which rights are given."""
    verb = _VERBS.get(request.method, "")
    if target.name:
        return verb
    if verb == "get":
        return "watch" if request.query.get("watch") in ("true", "1") else "list"
    return "deletecollection" if verb == "delete" else verb


def _plain(status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
    from aiohttp import web

    return web.Response(status=status, body=body, headers=headers)


def _json(item: Object, status: int = 200, warnings: list[str] | None = None) -> web.Response:
    from aiohttp import web
    from multidict import CIMultiDict

    headers = CIMultiDict({"Content-Type": "application/json"})
    for warning in warnings or ():
        headers.add("Warning", warning)
    return web.Response(status=status, body=to_json(item) + b"\n", headers=headers)
