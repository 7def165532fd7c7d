"""One proxied call, from admission to its end.

The order of things is the promise: the event is in the store before the last byte of the answer
leaves, and an answer that cannot be recorded is not delivered as a success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from attrs import define, field

from agl_core.errors import AglError, UpstreamError
from agl_core.gateway.call_context import CallContext
from agl_core.gateway.call_end import CallEnd
from agl_core.gateway.call_headers import call_headers, server_name
from agl_core.gateway.capture import CallFacts
from agl_core.gateway.forward import NoServer, Outbound
from agl_core.gateway.incoming import Reply
from agl_core.gateway.kills import Killer
from agl_core.gateway.registry import Match, root_of
from agl_core.gateway.relay import Aborted, Relay
from agl_core.gateway.stream_reply import StreamReply
from agl_core.gateway.timers import TotalTimer
from agl_core.gateway.versions import VersionMark
from agl_core.records import Rollout


@define(kw_only=True, eq=False)
class Call:
    """One call of an agent."""

    context: CallContext
    facts: CallFacts
    rollout: Rollout
    outbound: Callable[[Match], Outbound]
    reply: Reply
    is_gone: Callable[[], bool]
    """Whether nobody waits for the answer any more."""
    task: asyncio.Task[None] = field(factory=lambda: _current_task())
    killed: Killer | None = None
    policy: str | None = None
    _stream: StreamReply = field(init=False)
    _end: CallEnd = field(init=False)
    _relay: Relay | None = None
    """Of the answer that is coming in."""
    _is_inflight: bool = False

    def __attrs_post_init__(self) -> None:
        self._stream = StreamReply(self.reply)
        self._end = CallEnd(
            context=self.context, facts=self.facts, stream=self._stream, is_gone=self.is_gone
        )

    def kill(self, why: Killer) -> bool:
        """End the call now, and return whether that was to be done.

        Once its record is being written it ends by itself. A pause ends what is in flight, not
        what waits for the end of a pause.
        """
        if self.task.done() or (why == "paused" and not self._is_inflight):
            return False
        end = self._end
        if end.is_sealed or self.killed is not None:
            end.killed_meanwhile = end.killed_meanwhile or why
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
                if await self._end.by_kill(self.killed):
                    pause_seconds = 0.0
                    continue
            except Aborted:
                if await self._end.by_abort():
                    # A server that aborts without a pause of ours is not asked again at once.
                    pause_seconds = self.context.settings.retry_backoff_seconds
                    continue
            except UpstreamError as exc:
                await self._end.by_upstream_error(exc)
            except AglError as exc:
                await self._end.by_refusal(exc)
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
                await self._forward(match)
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

    async def _forward(self, match: Match) -> None:
        """Get an answer from a model server and hand it on."""
        context = self.context
        connected = await context.forwarder.connect(self.outbound(match), self.facts)
        try:
            self._name_server()
            self._relay = relay = Relay(
                facts=self.facts,
                connected=connected,
                stream=self._stream,
                record=self._end.record,
                clock=context.clock,
                heartbeat_seconds=context.settings.heartbeat_seconds,
            )
            self._end.tee = relay.tee
            await relay.run()
            context.forwarder.note_end(connected)
        except UpstreamError as exc:
            context.forwarder.note_break(connected, match.policy, exc)
            raise
        finally:
            self._relay = None
            connected.close()
            context.registry.end(connected.state)

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
        facts, relay = self.facts, self._relay
        if not self._is_inflight or facts.server is None or self._end.is_sealed:
            return
        version = self.context.registry.version_of(facts.server)
        if version != (facts.marks[-1].version if facts.marks else facts.version_start):
            since = frozen_since.get(root_of(facts.server.endpoint))
            counts = relay.counts_so_far(since) if relay is not None else None
            facts.marks.append(VersionMark(version, counts))


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
