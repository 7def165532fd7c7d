"""How a call ends: the record of it, and what its agent is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import attrs
from attrs import define

from agl_core.errors import AglError, NotFound, UpstreamError, UpstreamTimeout
from agl_core.gateway.call_context import CallContext
from agl_core.gateway.capture import CallFacts, as_event
from agl_core.gateway.dialects import Answer, AnswerTee
from agl_core.gateway.dialects.translation import TranslationError
from agl_core.gateway.incoming import Header
from agl_core.gateway.kills import KILL_ERRORS, STATUS_OF_KILL, Killer
from agl_core.gateway.registry import ModelNotFound
from agl_core.gateway.replies import error_event, send_error
from agl_core.gateway.rounds import LONG_WORK_BYTES
from agl_core.gateway.stream_reply import StreamReply
from agl_core.media import find_media, media_request, media_to_wire
from agl_core.records import EventDraft

log = logging.getLogger(__name__)

# An agent that reads nothing any more is not told of its call's failure for longer than this.
_LAST_WORDS_SECONDS = 2.0

# What is less is digested in well below a millisecond.
_MUCH_MEDIA_CHARACTERS = 2**15

_ASKED_IN_VAIN = (ModelNotFound, TranslationError)


@define(kw_only=True, eq=False)
class CallEnd:
    """Writes a call's record and tells its agent, with whatever end the call takes."""

    context: CallContext
    facts: CallFacts
    stream: StreamReply
    is_gone: Callable[[], bool]
    """Whether nobody waits for the answer any more."""
    tee: AnswerTee | None = None
    """Of the answer, once one comes in."""
    is_sealed: bool = False
    """Whether the record is being written: the call then ends by itself."""
    killed_meanwhile: Killer | None = None
    """Why it was to be ended after that, or once more."""
    _aborts: int = 0

    async def record(self, answer: Answer, status: str) -> None:
        """Write the call's event. From here on the call can no longer be killed.

        Raises:
            StoreError: It could not be written, so the answer must not be delivered.
        """
        self.is_sealed = True
        facts, context = self.facts, self.context
        if len(facts.parsed.body) >= LONG_WORK_BYTES:
            await context.rounds.take()
        if facts.server is not None:
            facts.version_end = context.registry.version_of(facts.server)
        draft = await _with_media(as_event(facts, answer, status, context.clock.monotonic()))
        await context.recorder.record(facts.rollout_id, facts.attempt_id, draft)
        context.limits.note(facts, answer, status)
        if status == "ok" and self.tee is not None:
            context.memory.note(facts.rollout_id, self.tee.generated, self.tee.remember)

    async def _record_quietly(self, status: str, error: AglError | None = None) -> None:
        """Write the event of a call that failed anyway; a failing store is logged."""
        answer = self.tee.result() if self.tee is not None else Answer()
        if error is not None:
            self.facts.error = {"code": error.code, "message": error.message}
        try:
            await self.record(answer, status)
        except NotFound:
            log.info("a call of a deleted rollout ended", extra=self._ids())
        except AglError:
            log.exception("the record of a failed call is lost", extra=self._ids())

    def _ids(self) -> dict[str, str]:
        return {"rollout_id": self.facts.rollout_id, "call_id": self.facts.call_id}

    # Ends after which the call may run again

    async def by_kill(self, why: Killer) -> bool:
        """End a call that was killed; return whether it is to be run again."""
        await self._record_quietly(STATUS_OF_KILL[why])
        if why == "paused" and self._may_run_again():
            self._begin_again()
            return True
        await self._fail_killed(why)
        return False

    async def by_abort(self) -> bool:
        """End a call that the engine aborted; return whether it is to be run again.

        Unseen by the agent it runs again after the pause.
        """
        await self._record_quietly("aborted")
        if self._may_run_again() and self._is_worth_running_again():
            self._begin_again()
            return True
        await self._fail_killed("paused")
        return False

    def _may_run_again(self) -> bool:
        """Whether the agent has seen nothing of the call, and still wants it."""
        return (
            not self.stream.reply.has_begun
            and not self.is_gone()
            and self.killed_meanwhile in (None, "paused")
        )

    def _is_worth_running_again(self) -> bool:
        """A server that aborts while its policy is open does so on its own: not for ever."""
        policy = self.facts.policy
        if policy is not None and self.context.gates.is_paused(policy):
            return True
        self._aborts += 1
        return self._aborts <= self.context.settings.retries

    def _begin_again(self) -> None:
        self.is_sealed = False
        self.killed_meanwhile = None
        facts = self.facts
        facts.http_status = facts.ttft_seconds = facts.version_start = facts.version_end = None
        facts.server, facts.error, facts.logprobs_mode = None, None, "unknown"
        facts.retries += 1
        facts.marks.clear()
        self.tee = None

    async def _fail_killed(self, why: Killer) -> None:
        if why == "paused":
            why = self.killed_meanwhile or why
        if why != "client_gone":
            await self._fail(KILL_ERRORS[why]())

    # Ends for good

    async def by_upstream_error(self, exc: UpstreamError) -> None:
        """End a call whose model server failed."""
        if isinstance(exc, UpstreamTimeout):
            status = "timeout"
        else:
            status = "truncated" if exc.details.get("phase") == "body" else "upstream_error"
        await self._record_quietly(status, exc)
        # What we tried again in vain the SDK's own retries would only multiply.
        await self._fail(exc, is_final=bool(exc.details.get("retried")))

    async def by_refusal(self, exc: AglError) -> None:
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
        reply, tee = self.stream.reply, self.tee
        if not reply.has_begun:
            extra: list[Header] = [(b"x-should-retry", b"false")] if is_final else []
            await send_error(reply, exc, self.facts.path, extra)
            return
        # A stream ends in an error event and without its proper end, never politely.
        await self.stream.settle()
        if tee is not None and tee.is_stream:
            blank = b"\n\n" if tee.ends_mid_event else b""
            await reply.write(blank + error_event(exc, self.facts.path))


async def _with_media(draft: EventDraft) -> EventDraft:
    """Add the digests of a prompt's media; of much of it they are made beside the event loop."""
    media = find_media(media_request(draft.data))
    if not media:
        return draft
    if sum(len(medium.reference) for medium in media) < _MUCH_MEDIA_CHARACTERS:
        told = media_to_wire(media)
    else:
        told = await asyncio.to_thread(media_to_wire, media)
    return attrs.evolve(draft, data={**draft.data, "media": told})
