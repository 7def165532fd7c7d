"""Limits of a rollout, checked before a call and counted after it."""

from __future__ import annotations

from attrs import define, field

from agl_core.gateway.capture import CallFacts
from agl_core.gateway.dialects import Answer
from agl_core.gateway.limits import LimitBook
from agl_core.interfaces import EventQuery, Store
from agl_core.records import Limits, Rollout

_NONE = Limits()


@define
class CallLimits:
    """Refuses calls of a rollout past its limits, in words that harnesses know."""

    store: Store
    book: LimitBook = field(factory=LimitBook)

    async def check(self, rollout: Rollout, facts: CallFacts) -> None:
        """Let a call go on.

        Raises:
            ContextExceeded: A limit of the rollout is reached.
        """
        limits = rollout.config.limits
        if limits == _NONE:
            return
        if not self.book.knows(rollout.rollout_id):
            await self._count_stored(rollout.rollout_id)
        hint = self.book.estimate(rollout.rollout_id, len(facts.parsed.body))
        refusal = self.book.check(rollout.rollout_id, limits, hint)
        if refusal is not None:
            raise refusal

    async def _count_stored(self, rollout_id: str) -> None:
        """Calls before this service knew the rollout count as well."""
        calls = tokens = context = 0
        after: str | None = None
        while True:
            page = await self.store.list_events(
                EventQuery(rollout_id=rollout_id, event_type="model_request", after=after)
            )
            for event in page.items:
                usage = event.data.get("usage") or {}
                completion = usage.get("completion_tokens") or 0
                calls += 1
                tokens += completion
                context = max(context, (usage.get("prompt_tokens") or 0) + completion)
            if not page.items:
                break
            after = page.cursor
        self.book.seed(rollout_id, calls, tokens, context)

    def note(self, facts: CallFacts, answer: Answer) -> None:
        """Count a call that was made."""
        if facts.server is not None:
            self.book.note(facts.rollout_id, answer.usage, len(facts.parsed.body))

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self.book.forget(rollout_id)
