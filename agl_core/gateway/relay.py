"""Handing a model server's answer on to the agent while it comes in.

The event is in the store before the last byte of the answer leaves, and an answer that cannot be
recorded is not delivered as a success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from attrs import define, field

from agl_core.clock import Clock
from agl_core.errors import UpstreamError
from agl_core.gateway.capture import CallFacts
from agl_core.gateway.dialects import Answer, AnswerTee
from agl_core.gateway.dialects.sse import whole_events
from agl_core.gateway.forward import Connected
from agl_core.gateway.incoming import Header
from agl_core.gateway.replies import headers_to_agent, is_overload, with_retry_after
from agl_core.gateway.stream_reply import StreamReply
from agl_core.gateway.upstream import UpstreamAnswer
from agl_core.gateway.versions import SETTLED_SECONDS

# After a stream's own end the connection gets this long to end as well, and be used again.
_TRAILING_SECONDS = 0.5
# An unknown answer up to this size is recorded, a larger one is only passed on.
_RECORDED_BYTES = 8 * 2**20


class Aborted(Exception):
    """The engine ended the call with ``abort``: to be run again, or to end as a retryable error."""


@define(kw_only=True, eq=False)
class Relay:
    """One answer on its way to the agent."""

    facts: CallFacts
    connected: Connected
    stream: StreamReply
    record: Callable[[Answer, str], Awaitable[None]]
    """Writes the call's event: the answer as far as it was seen, and the call's status."""
    clock: Clock
    heartbeat_seconds: float | None
    tee: AnswerTee = field(init=False)
    _reads_since: float | None = None
    """Since when the relay of a stream waits for more, in seconds of the event loop."""

    def __attrs_post_init__(self) -> None:
        answer = self.connected.answer
        content_type = next(
            (v.decode("latin-1") for n, v in answer.headers if n == b"content-type"), ""
        )
        self.tee = self.connected.outgoing.open_tee(answer.status, content_type)

    async def run(self) -> None:
        """Deliver the answer and its record.

        Raises:
            Aborted: The engine ended it before its time.
            UpstreamError: It broke off.
            StoreError: It could not be recorded, so it was not delivered as a success.
        """
        answer, tee = self.connected.answer, self.tee
        self.facts.http_status = answer.status
        headers = headers_to_agent(answer.headers, tee.content_type)
        if self.connected.is_final_failure:
            headers.append((b"x-should-retry", b"false"))
        if is_overload(answer.status):
            headers = with_retry_after(headers)
        if tee.is_stream:
            await self._relay_stream(headers)
        elif self.facts.api == "other":
            await self._relay_other(headers)
        else:
            body = await answer.read_all()
            self._note_first_byte()
            await self._deliver_whole(headers, body)

    def counts_so_far(self, frozen_since: float | None) -> Mapping[int, int] | None:
        """Return how many tokens have come, by choice; None where some may still be on their way.

        Args:
            frozen_since: When the engine said that it stands still, in the event loop's seconds.
        """
        if frozen_since is None or self._reads_since is None:
            return None
        quiet = asyncio.get_running_loop().time() - max(self._reads_since, frozen_since)
        if quiet < SETTLED_SECONDS or self.connected.answer.buffered_bytes:
            return None
        return self.tee.token_counts

    async def _deliver_whole(self, headers: list[Header], body: bytes) -> None:
        answer, tee, reply = self.connected.answer, self.tee, self.stream.reply
        shown = tee.whole(body)
        if tee.aborted:
            raise Aborted
        await self.record(tee.result(), "ok" if answer.status < 400 else "upstream_error")
        if self.facts.method == "HEAD":
            headers += [h for h in answer.headers if h[0] == b"content-length"]
            await reply.begin(answer.status, headers)
            await reply.end()
            return
        await reply.whole(answer.status, headers, shown)

    async def _relay_other(self, headers: list[Header]) -> None:
        """An unknown answer: recorded where it is small, else passed on piece by piece."""
        answer, reply = self.connected.answer, self.stream.reply
        parts: list[bytes] = []
        size = 0
        async for part in answer.chunks():
            self._note_first_byte()
            parts.append(part)
            size += len(part)
            if size > _RECORDED_BYTES:
                break
        else:
            await self._deliver_whole(headers, b"".join(parts))
            return
        await reply.begin(answer.status, headers)
        for part in parts:
            await reply.write(part)
        async for part in answer.chunks():
            await reply.write(part)
        await self.record(self.tee.result(), "ok")
        await reply.end()

    async def _relay_stream(self, headers: list[Header]) -> None:
        answer, tee, stream = self.connected.answer, self.tee, self.stream
        loop = asyncio.get_running_loop()
        heartbeat = stream.start_heartbeat(
            self.heartbeat_seconds, answer.status, headers, lambda: not tee.ends_mid_event
        )
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
                await stream.write(answer.status, headers, out)
        except UpstreamError:
            await stream.write(answer.status, headers, whole_events(tee.finish()))
            raise
        finally:
            heartbeat.cancel()
        await stream.settle()
        await _let_end(answer, tee)
        rest = tee.finish()
        if not tee.complete:
            await stream.write(answer.status, headers, whole_events(rest))
            raise UpstreamError(
                "the model server ended its stream before the answer was complete",
                code="upstream_truncated",
                details={"phase": "body", "source": "server"},
            )
        result = tee.result()
        is_ok = answer.status < 400 and result.error is None
        await self.record(result, "ok" if is_ok else "upstream_error")
        if not stream.reply.has_begun:
            await stream.reply.begin(answer.status, headers)
        await stream.reply.end(rest)

    def _note_first_byte(self) -> None:
        if self.facts.ttft_seconds is None:
            self.facts.ttft_seconds = self.clock.monotonic() - self.facts.began


async def _let_end(answer: UpstreamAnswer, tee: AnswerTee) -> None:
    """Read the transport's end after the dialect's, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_TRAILING_SECONDS):
            while data := await answer.read():
                tee.feed(data)
    except (TimeoutError, UpstreamError):
        pass  # the answer is whole, whatever becomes of its connection
