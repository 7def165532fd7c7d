"""Limits of a rollout, checked before a call and counted after it."""

from __future__ import annotations

from attrs import define, field

from agl_core.gateway.capture import CallFacts
from agl_core.gateway.dialects import Answer
from agl_core.gateway.limits import LimitBook
from agl_core.interfaces import EventQuery, Store
from agl_core.records import Limits, Rollout

_NONE = Limits()
# A call that a weight update ended runs again, here or as the agent repeats it.
_UNCOUNTED = ("aborted",)


@define
class CallLimits:
    """Refuses calls of a rollout past its limits, in words that harnesses know."""

    store: Store
    book: LimitBook = field(factory=LimitBook)
    _open: dict[str, set[str]] = field(factory=dict)
    """Of rollouts with limits, the calls that are begun and not yet counted in the book."""

    async def begin(self, rollout: Rollout, facts: CallFacts) -> None:
        """Let a call go on; ``note`` or ``end`` counts it out again.

        Raises:
            ContextExceeded: A limit of the rollout is reached.
        """
        limits = rollout.config.limits
        if limits == _NONE:
            return
        rollout_id = rollout.rollout_id
        if not self.book.knows(rollout_id):
            await self._count_stored(rollout_id)
        opened = self._open.get(rollout_id, set())
        hint = self.book.estimate(rollout_id, len(facts.parsed.body))
        refusal = self.book.check(rollout_id, limits, hint, open_calls=len(opened))
        if refusal is not None:
            raise refusal
        self._open.setdefault(rollout_id, opened).add(facts.call_id)

    async def _count_stored(self, rollout_id: str) -> None:
        """Calls before this service knew the rollout count as well."""
        calls = tokens = context = 0
        after: str | None = None
        while True:
            page = await self.store.list_events(
                EventQuery(rollout_id=rollout_id, event_type="model_request", after=after)
            )
            for event in page.items:
                if event.data.get("server") is None or event.data.get("status") in _UNCOUNTED:
                    continue
                usage = event.data.get("usage") or {}
                completion = usage.get("completion_tokens") or 0
                calls += 1
                tokens += completion
                context = max(context, (usage.get("prompt_tokens") or 0) + completion)
            if not page.items:
                break
            after = page.cursor
        self.book.seed(rollout_id, calls, tokens, context)

    def note(self, facts: CallFacts, answer: Answer, status: str) -> None:
        """Count a call that was made and recorded."""
        self.end(facts)
        if facts.server is not None and status not in _UNCOUNTED:
            self.book.note(facts.rollout_id, answer.usage, len(facts.parsed.body))

    def end(self, facts: CallFacts) -> None:
        """The call goes on no longer, be it counted or not."""
        opened = self._open.get(facts.rollout_id)
        if opened is not None:
            opened.discard(facts.call_id)
            if not opened:
                del self._open[facts.rollout_id]

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self.book.forget(rollout_id)
