"""One proxied call, from admission to its record.

The order of things is the promise: the event is in the store before the last byte of the answer
leaves, and an answer that cannot be recorded is not delivered as a success.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from attrs import define, field

from agl_core.clock import Clock
from agl_core.errors import (
    AglError,
    NotFound,
    UpstreamError,
    UpstreamTimeout,
)
from agl_core.gateway.call_headers import call_headers, server_name
from agl_core.gateway.call_limits import CallLimits
from agl_core.gateway.capture import CallFacts, as_event
from agl_core.gateway.dialects import Answer, AnswerTee, Dialect
from agl_core.gateway.dialects.sse import whole_events
from agl_core.gateway.dialects.translation import TranslationError
from agl_core.gateway.forward import Connected, Forwarder, NoServer, Outbound
from agl_core.gateway.gate import Gates
from agl_core.gateway.incoming import Header, Incoming, Reply
from agl_core.gateway.kills import KILL_ERRORS, STATUS_OF_KILL, Killer
from agl_core.gateway.memory import ConversationMemory
from agl_core.gateway.recorder import Recorder
from agl_core.gateway.registry import Match, ModelNotFound, Registry, root_of
from agl_core.gateway.replies import (
    error_event,
    headers_to_agent,
    is_overload,
    send_error,
    with_retry_after,
)
from agl_core.gateway.timers import Heartbeat, TotalTimer
from agl_core.gateway.upstream import UpstreamAnswer
from agl_core.gateway.versions import SETTLED_SECONDS, VersionMark
from agl_core.records import Rollout
from agl_core.settings import GatewaySettings

log = logging.getLogger(__name__)

HEARTBEAT = b": keep-alive\n\n"
# After a stream's own end the connection gets this long to end as well, and be used again.
_TRAILING_SECONDS = 0.5
# An agent that reads nothing any more is not told of its call's failure for longer than this.
_LAST_WORDS_SECONDS = 2.0
# An unknown answer up to this size is recorded, a larger one is only passed on.
_RECORDED_BYTES = 8 * 2**20


class Aborted(Exception):
    """The engine ended the call with ``abort``: to be run again, or to end as a retryable error."""


_ASKED_IN_VAIN = (ModelNotFound, TranslationError)


@define(kw_only=True)
class CallContext:
    """What calls share."""

    settings: GatewaySettings
    clock: Clock
    registry: Registry
    gates: Gates
    forwarder: Forwarder
    recorder: Recorder
    memory: ConversationMemory
    limits: CallLimits


@define(kw_only=True, eq=False)
class Call:
    """One call of an agent."""

    context: CallContext
    facts: CallFacts
    rollout: Rollout
    dialect: Dialect
    outbound: Callable[[Match], Outbound]
    incoming: Incoming
    reply: Reply
    is_gone: Callable[[], bool]
    """Whether nobody waits for the answer any more."""
    task: asyncio.Task[None] = field(factory=lambda: _current_task())
    killed: Killer | None = None
    policy: str | None = None
    _is_sealed: bool = False
    _is_inflight: bool = False
    _killed_meanwhile: Killer | None = None
    _aborts: int = 0
    _tee: AnswerTee | None = None
    _connected: Connected | None = None
    _beat: asyncio.Task[None] | None = None
    _last_write: float = 0.0
    _reads_since: float | None = None
    """Since when the relay of a stream waits for more, in seconds of the event loop."""

    def kill(self, why: Killer) -> bool:
        """End the call now, and return whether that was to be done.

        Once its record is being written it ends by itself. A pause ends what is in flight, not
        what waits for the end of a pause.
        """
        if self.task.done() or (why == "paused" and not self._is_inflight):
            return False
        if self._is_sealed or self.killed is not None:
            self._killed_meanwhile = self._killed_meanwhile or why
            return False
        self.killed = why
        self.task.cancel()
        return True

    async def run(self) -> None:
        """Serve the call, with whatever end it takes."""
        pause_seconds = 0.0
        while True:
            self.killed = None
            try:
                if pause_seconds:
                    await self.context.clock.sleep(pause_seconds)
                await self._admit_and_serve()
            except asyncio.CancelledError:
                if self.killed is None:
                    raise
                self.task.uncancel()
                if await self._end_killed(self.killed):
                    pause_seconds = 0.0
                    continue
            except Aborted:
                if await self._end_aborted():
                    # A server that aborts without a pause of ours is not asked again at once.
                    pause_seconds = self.context.settings.retry_backoff_seconds
                    continue
            except UpstreamError as exc:
                await self._end_upstream_error(exc)
            except AglError as exc:
                await self._refuse(exc)
            return

    async def _admit_and_serve(self) -> None:
        match = await self._match()
        context = self.context
        self.policy = self.facts.policy = match.policy
        self.facts.trained = match.is_trained
        while True:
            await context.gates.enter(
                match.policy,
                lambda: bool(context.registry.candidates(match, frozenset())),
                context.settings.hold_seconds,
            )
            await context.limits.begin(self.rollout, self.facts)
            if context.gates.is_paused(match.policy):
                # Closed while the limits were looked up: whoever drains must not miss this call.
                context.limits.end(self.facts)
                continue
            context.gates.begin(match.policy)
            self._is_inflight = True
            timer = self._start_timer(match.policy)
            try:
                connected = await context.forwarder.connect(self.outbound(match), self.facts)
                self._connected = connected
                try:
                    self._name_server()
                    await self._relay(connected)
                    context.forwarder.note_end(connected)
                except UpstreamError as exc:
                    context.forwarder.note_break(connected, match.policy, exc)
                    raise
                finally:
                    self._connected = None
                    connected.close()
                    context.registry.end(connected.state)
                return
            except NoServer:
                continue
            finally:
                timer.cancel()
                self._is_inflight = False
                context.gates.end(match.policy)
                context.limits.end(self.facts)

    async def _match(self) -> Match:
        context = self.context
        while True:
            match = context.registry.match(self.facts.parsed.model)
            if match is not None:
                return match
            await context.gates.enter(None, lambda: False, context.settings.hold_seconds)

    def _start_timer(self, policy: str) -> TotalTimer:
        gates = self.context.gates
        return TotalTimer(
            self.context.settings.total_seconds,
            lambda: gates.paused_seconds(policy),
            lambda: self.kill("timeout"),
        )

    def _name_server(self) -> None:
        """Say in the answer's head what its record says: whose call it is and who answers it."""
        facts = self.facts
        name = server_name(facts.server) if facts.server is not None else None
        self.reply.label(
            call_headers(
                facts.rollout_id, facts.attempt_id, facts.policy, facts.version_start, name
            )
        )

    def note_version(self, frozen_since: Mapping[str, float]) -> None:
        """The registry changed: note it where the server has new weights by now.

        Args:
            frozen_since: By engine that stands still, when it had said so (event loop's seconds).
        """
        facts = self.facts
        if not self._is_inflight or facts.server is None or self._is_sealed:
            return
        version = self.context.registry.version_of(facts.server)
        if version != (facts.marks[-1].version if facts.marks else facts.version_start):
            since = frozen_since.get(root_of(facts.server.endpoint))
            facts.marks.append(VersionMark(version, self._counts_so_far(since)))

    def _counts_so_far(self, frozen_since: float | None) -> Mapping[int, int] | None:
        """How many tokens have come; None where some may still be on their way."""
        tee, connected, reads_since = self._tee, self._connected, self._reads_since
        if frozen_since is None or tee is None or connected is None or reads_since is None:
            return None
        quiet = asyncio.get_running_loop().time() - max(reads_since, frozen_since)
        if quiet < SETTLED_SECONDS or connected.answer.buffered_bytes:
            return None
        return tee.token_counts

    # The answer

    async def _relay(self, connected: Connected) -> None:
        answer, facts = connected.answer, self.facts
        facts.http_status = answer.status
        content_type = next(
            (v.decode("latin-1") for n, v in answer.headers if n == b"content-type"), ""
        )
        tee = connected.outgoing.open_tee(answer.status, content_type)
        self._tee = tee
        headers = headers_to_agent(answer.headers, tee.content_type)
        if connected.is_final_failure:
            headers.append((b"x-should-retry", b"false"))
        if is_overload(answer.status):
            headers = with_retry_after(headers)
        if tee.is_stream:
            await self._relay_stream(connected, tee, headers)
        elif self.dialect.api == "other":
            await self._relay_other(connected, tee, headers)
        else:
            body = await answer.read_all()
            self._note_first_byte()
            await self._deliver_whole(connected, tee, headers, body)

    async def _deliver_whole(
        self, connected: Connected, tee: AnswerTee, headers: list[Header], body: bytes
    ) -> None:
        shown = tee.whole(body)
        if tee.aborted:
            raise Aborted
        status = "ok" if connected.answer.status < 400 else "upstream_error"
        await self._record(tee.result(), status)
        if self.facts.method == "HEAD":
            headers += [h for h in connected.answer.headers if h[0] == b"content-length"]
            await self.reply.begin(connected.answer.status, headers)
            await self.reply.end()
            return
        await self.reply.whole(connected.answer.status, headers, shown)

    async def _relay_other(
        self, connected: Connected, tee: AnswerTee, headers: list[Header]
    ) -> None:
        """An unknown answer: recorded where it is small, else passed on piece by piece."""
        parts: list[bytes] = []
        size = 0
        async for part in connected.answer.chunks():
            self._note_first_byte()
            parts.append(part)
            size += len(part)
            if size > _RECORDED_BYTES:
                break
        else:
            await self._deliver_whole(connected, tee, headers, b"".join(parts))
            return
        await self.reply.begin(connected.answer.status, headers)
        for part in parts:
            await self.reply.write(part)
        async for part in connected.answer.chunks():
            await self.reply.write(part)
        await self._record(tee.result(), "ok")
        await self.reply.end()

    async def _relay_stream(
        self, connected: Connected, tee: AnswerTee, headers: list[Header]
    ) -> None:
        answer, loop = connected.answer, asyncio.get_running_loop()
        heartbeat = self._start_heartbeat(connected, headers)
        try:
            while not tee.complete:
                self._reads_since = loop.time()
                data = await answer.read()
                self._reads_since = None
                if not data:
                    break
                out = tee.feed(data)
                if self.facts.ttft_seconds is None and tee.first_token_seen:
                    self._note_first_byte()
                if tee.aborted:
                    raise Aborted
                await self._write_stream(answer.status, headers, out)
        except UpstreamError:
            await self._write_stream(answer.status, headers, whole_events(tee.finish()))
            raise
        finally:
            heartbeat.cancel()
        await self._settle_beat()
        await _let_end(answer, tee)
        rest = tee.finish()
        if not tee.complete:
            await self._write_stream(answer.status, headers, whole_events(rest))
            raise UpstreamError(
                "the model server ended its stream before the answer was complete",
                code="upstream_truncated",
                details={"phase": "body", "source": "server"},
            )
        result = tee.result()
        is_ok = answer.status < 400 and result.error is None
        await self._record(result, "ok" if is_ok else "upstream_error")
        if not self.reply.has_begun:
            await self.reply.begin(answer.status, headers)
        await self.reply.end(rest)

    async def _write_stream(self, status: int, headers: list[Header], out: bytes) -> None:
        if not out:
            return
        await self._settle_beat()
        if not self.reply.has_begun:
            await self.reply.begin(status, headers)
        self._last_write = asyncio.get_running_loop().time()
        await self.reply.write(out)

    def _note_first_byte(self) -> None:
        if self.facts.ttft_seconds is None:
            self.facts.ttft_seconds = self.context.clock.monotonic() - self.facts.began

    # A quiet stream gets comments, so that nothing between us and the agent cuts it

    def _start_heartbeat(self, connected: Connected, headers: list[Header]) -> Heartbeat:
        seconds = self.context.settings.heartbeat_seconds
        self._last_write = asyncio.get_running_loop().time()
        return Heartbeat(
            seconds,
            lambda: self._last_write,
            lambda: self._send_comment(connected.answer.status, headers),
        )

    def _send_comment(self, status: int, headers: list[Header]) -> None:
        # The relay waits for this task before it writes itself, so that nothing comes in between.
        is_between_events = self._tee is None or not self._tee.ends_mid_event
        if is_between_events and (self._beat is None or self._beat.done()):
            self._beat = asyncio.create_task(self._write_comment(status, headers))

    async def _write_comment(self, status: int, headers: list[Header]) -> None:
        if not self.reply.has_begun:
            await self.reply.begin(status, headers)
        self._last_write = asyncio.get_running_loop().time()
        await self.reply.write(HEARTBEAT)

    async def _settle_beat(self) -> None:
        """Wait for a comment that is being sent; a cancelled wait leaves it whole."""
        if self._beat is not None and not self._beat.done():
            await asyncio.wait({self._beat})

    # Ends

    async def _record(self, answer: Answer, status: str) -> None:
        """Write the call's event. From here on the call can no longer be killed.

        Raises:
            StoreError: It could not be written, so the answer must not be delivered.
        """
        self._is_sealed = True
        facts, context = self.facts, self.context
        if facts.server is not None:
            facts.version_end = context.registry.version_of(facts.server)
        draft = as_event(facts, answer, status, context.clock.monotonic())
        await context.recorder.record(facts.rollout_id, facts.attempt_id, draft)
        context.limits.note(facts, answer, status)
        if status == "ok" and self._tee is not None:
            context.memory.note(facts.rollout_id, self._tee.generated, self._tee.remember)

    async def _record_quietly(self, status: str, error: AglError | None = None) -> None:
        """Write the event of a call that failed anyway; a failing store is logged."""
        answer = self._tee.result() if self._tee is not None else Answer()
        if error is not None:
            self.facts.error = {"code": error.code, "message": error.message}
        try:
            await self._record(answer, status)
        except NotFound:
            log.info("a call of a deleted rollout ended", extra=self._ids())
        except AglError:
            log.exception("the record of a failed call is lost", extra=self._ids())

    def _ids(self) -> dict[str, str]:
        return {"rollout_id": self.facts.rollout_id, "call_id": self.facts.call_id}

    async def _end_killed(self, why: Killer) -> bool:
        """Returns whether the call is to be run again."""
        await self._record_quietly(STATUS_OF_KILL[why])
        if why == "paused" and self._may_run_again():
            self._begin_again()
            return True
        await self._fail_killed(why)
        return False

    async def _end_aborted(self) -> bool:
        """The engine aborted. Unseen by the agent, the call runs again after the pause."""
        await self._record_quietly("aborted")
        if self._may_run_again() and self._is_worth_running_again():
            self._begin_again()
            return True
        await self._fail_killed("paused")
        return False

    def _may_run_again(self) -> bool:
        """Whether the agent has seen nothing of the call, and still wants it."""
        return (
            not self.reply.has_begun
            and not self.is_gone()
            and self._killed_meanwhile in (None, "paused")
        )

    def _is_worth_running_again(self) -> bool:
        """A server that aborts while its policy is open does so on its own: not for ever."""
        if self.policy is not None and self.context.gates.is_paused(self.policy):
            return True
        self._aborts += 1
        return self._aborts <= self.context.settings.retries

    async def _fail_killed(self, why: Killer) -> None:
        if why == "paused":
            why = self._killed_meanwhile or why
        if why != "client_gone":
            await self._fail(KILL_ERRORS[why]())

    def _begin_again(self) -> None:
        self._is_sealed = False
        self._killed_meanwhile = None
        facts = self.facts
        facts.http_status = facts.ttft_seconds = facts.version_start = facts.version_end = None
        facts.server, facts.error, facts.logprobs_mode = None, None, "unknown"
        facts.retries += 1
        facts.marks.clear()
        self._tee, self._reads_since = None, None

    async def _end_upstream_error(self, exc: UpstreamError) -> None:
        if isinstance(exc, UpstreamTimeout):
            status = "timeout"
        else:
            status = "truncated" if exc.details.get("phase") == "body" else "upstream_error"
        await self._record_quietly(status, exc)
        # What we tried again in vain the SDK's own retries would only multiply.
        await self._fail(exc, is_final=bool(exc.details.get("retried")))

    async def _refuse(self, exc: AglError) -> None:
        """Answer with an error of ours; what the agent asked for in vain is recorded too."""
        if isinstance(exc, _ASKED_IN_VAIN):
            self.facts.http_status = exc.status
            await self._record_quietly("upstream_error", exc)
        await self._fail(exc)

    async def _fail(self, exc: AglError, *, is_final: bool = False) -> None:
        """Tell the agent of the failure, in whatever form its answer has taken so far."""
        if self.is_gone():
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._tell(exc, is_final)
        except TimeoutError:
            log.info("an agent did not take the end of its answer", extra=self._ids())

    async def _tell(self, exc: AglError, is_final: bool) -> None:
        if not self.reply.has_begun:
            extra: list[Header] = [(b"x-should-retry", b"false")] if is_final else []
            await send_error(self.reply, exc, self.facts.path, extra)
            return
        # A stream ends in an error event and without its proper end, never politely.
        await self._settle_beat()
        if self._is_event_stream:
            blank = b"\n\n" if self._tee is not None and self._tee.ends_mid_event else b""
            await self.reply.write(blank + error_event(exc, self.facts.path))

    @property
    def _is_event_stream(self) -> bool:
        return self._tee is not None and self._tee.is_stream


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _let_end(answer: UpstreamAnswer, tee: AnswerTee) -> None:
    """Read the transport's end after the dialect's, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_TRAILING_SECONDS):
            while data := await answer.read():
                tee.feed(data)
    except (TimeoutError, UpstreamError):
        pass  # the answer is whole, whatever becomes of its connection
