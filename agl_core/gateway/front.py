"""The raw ASGI application in front of Quart: it serves the proxied paths itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from agl_core.errors import AglError, BadRequest, NotFound
from agl_core.gateway.administration import check_reach
from agl_core.gateway.admit import Admission, Admitted, as_agl_error
from agl_core.gateway.broadcast import Follower
from agl_core.gateway.call import Call
from agl_core.gateway.call_context import CallContext
from agl_core.gateway.call_headers import call_headers
from agl_core.gateway.capture import CallFacts
from agl_core.gateway.dialects import dialect_for
from agl_core.gateway.dialects.labels import labels_of
from agl_core.gateway.forward import Outbound
from agl_core.gateway.incoming import ClientGone, Header, Incoming, Receive, Reply, Send
from agl_core.gateway.kills import Killer
from agl_core.gateway.own_answers import own_answer
from agl_core.gateway.paths import ProxyPath, is_base_path, path_without_v1, proxy_path
from agl_core.gateway.registry import Match
from agl_core.gateway.repeats import Repeats, call_key
from agl_core.gateway.replies import send_error
from agl_core.interfaces import AsgiApp

log = logging.getLogger(__name__)


class GatewayFront:
    """Serves model calls and hands everything else to the application behind."""

    def __init__(
        self, behind: AsgiApp, admission: Admission, context: CallContext, repeats: Repeats
    ) -> None:
        self._behind = behind
        self._repeats = repeats
        self._admission = admission
        self._context = context
        self._calls: dict[str, set[Call]] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
            return
        if scope["type"] != "http":
            await self._behind(scope, receive, send)
            return
        if scope["method"] == "HEAD" and is_base_path(scope):
            await _reply(send, _new_call_id()).whole(200, [], b"")
            return
        try:
            path = proxy_path(scope)
        except BadRequest as exc:
            await _refuse(scope, receive, send, exc, "")
            return
        if path is not None:
            await self._serve(path, scope, receive, send)
        elif (below := path_without_v1(scope)) is not None:
            error = NotFound(
                "model calls are served below /v1", hint="the path lacks it: look at the base URL"
            )
            await _refuse(scope, receive, send, error, below)
        else:
            await self._behind(scope, receive, send)

    async def _serve(
        self, path: ProxyPath, scope: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        call_id = _new_call_id()
        reply = _reply(send, call_id)
        headers: list[Header] = list(scope["headers"])
        incoming = Incoming(receive, headers)
        try:
            if scope.get("http_version", "1.1").startswith("2"):
                raise AglError(
                    "model calls are served over HTTP/1.1 alone: a stream that breaks off "
                    "cannot be told from one that ends on HTTP/2",
                    code="http_version",
                    status=505,
                    hint="turn HTTP/2 off in the client",
                )
            admitted = await self._admission.admit(path, headers, scope.get("client"))
            own = own_answer(scope["method"], path.below, self._context.registry)
            if own is not None:
                await reply.whole(200, [(b"content-type", b"application/json")], own)
                return
            check_reach(admitted.identity, path.below)
            self._admission.begin(admitted.rollout.rollout_id)
            try:
                await self._call(call_id, path, scope, admitted, incoming, reply, send)
            finally:
                self._admission.end(admitted.rollout.rollout_id)
        except ClientGone:
            pass
        except AglError as exc:
            await incoming.discard()
            await send_error(reply, exc, path.below)
        except Exception as exc:
            log.exception("a call failed unexpectedly", extra={"call_id": call_id})
            if not reply.has_begun:
                await send_error(reply, as_agl_error(exc, call_id), path.below)
        finally:
            incoming.close()

    async def _call(
        self,
        call_id: str,
        path: ProxyPath,
        scope: dict[str, Any],
        admitted: Admitted,
        incoming: Incoming,
        reply: Reply,
        send: Send,
    ) -> None:
        settings = self._context.settings
        began = self._context.clock.monotonic()
        body = await incoming.body(
            settings.max_body_bytes, settings.body_idle_seconds, self._context.rounds
        )
        method: str = scope["method"]
        query = scope.get("query_string", b"").decode("ascii", "replace")
        headers: list[Header] = scope["headers"]
        dialect = dialect_for(method, path.below, settings.cut_answers_end)
        parsed = dialect.read_request(body)
        rollout, attempt_id = admitted.rollout, admitted.attempt_id
        reply.label(call_headers(rollout.rollout_id, attempt_id, None, None, None))
        key = call_key(rollout.rollout_id, attempt_id, method, path.below, query, headers, body)
        part = self._repeats.open(key) if key is not None else None
        if isinstance(part, Follower):
            incoming.watch(part.leave)
            try:
                await part.relay(send)
            finally:
                part.leave()
            return

        def outbound(match: Match) -> Outbound:
            return Outbound(
                rollout=rollout,
                attempt_id=attempt_id,
                dialect=dialect,
                method=method,
                path=path.below,
                query=query,
                headers=headers,
                match=match,
            )

        call = Call(
            context=self._context,
            facts=CallFacts(
                call_id=call_id,
                rollout_id=rollout.rollout_id,
                attempt_id=attempt_id,
                api=dialect.api,
                method=method,
                path=path.below,
                parsed=parsed,
                began=began,
                labels=labels_of(headers, parsed),
            ),
            rollout=rollout,
            outbound=outbound,
            reply=reply,
            is_gone=lambda: incoming.is_gone if part is None else part.is_forsaken,
        )
        calls = self._calls.setdefault(rollout.rollout_id, set())
        calls.add(call)
        if part is None:
            incoming.watch(lambda: call.kill("client_gone"))
        else:
            reply.through(part.through)
            part.on_forsaken = lambda: call.kill("client_gone")
            incoming.watch(part.client_left)
        try:
            await call.run()
        except asyncio.CancelledError:
            if call.killed is None:
                raise
            call.task.uncancel()  # ended while it was telling of its end
        finally:
            if part is not None:
                part.close()
            calls.discard(call)
            if not calls:
                self._calls.pop(rollout.rollout_id, None)

    @property
    def open_calls(self) -> list[Call]:
        """Every call that has not ended, those that wait included."""
        return [call for calls in self._calls.values() for call in calls]

    def kill(self, why: Killer, *, rollout_id: str | None = None, policy: str | None = None) -> int:
        """End calls in flight: of a rollout, of a policy, or all; returns how many."""
        groups = (
            [self._calls.get(rollout_id, set())]
            if rollout_id is not None
            else list(self._calls.values())
        )
        count = 0
        for call in [call for group in groups for call in group]:
            if (policy is None or call.policy == policy) and call.kill(why):
                count += 1
        return count


async def _refuse(
    scope: dict[str, Any], receive: Receive, send: Send, error: AglError, below: str
) -> None:
    """Answer a request whose path is wrong, in the dialect of ``below``."""
    incoming = Incoming(receive, scope["headers"])
    try:
        await incoming.discard()
        await send_error(_reply(send, _new_call_id()), error, below)
    finally:
        incoming.close()


async def _refuse_websocket(send: Send) -> None:
    """Model calls are plain HTTP; 426 makes harnesses that try a websocket first use it at once."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "websocket.http.response.start", "status": 426, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": b"", "more_body": False})


def _new_call_id() -> str:
    return f"call-{secrets.token_hex(12)}"


def _reply(send: Send, call_id: str) -> Reply:
    return Reply(send, [(b"x-request-id", call_id.encode())])
