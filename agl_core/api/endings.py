"""What follows once from a rollout's end: calls are closed and graders look at it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from agl_core.api.reading import default_events
from agl_core.records import Event, EventDraft, Rollout
from agl_core.services import Services

log = logging.getLogger(__name__)


class Endings:
    """Changes rollouts, and sees to it that an end has its consequences, once."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.hook_errors: Counter[str] = Counter()
        """Failures of ``on_finished``, by the class of the hook."""

    async def change(self, rollout_id: str, change: Callable[[Rollout], Rollout]) -> Rollout:
        """Apply ``change``; whoever makes the rollout terminal calls the hooks.

        The store makes changes one after another, so exactly one caller sees the step from a live
        rollout to a terminal one.

        Raises:
            NotFound: There is no such rollout.
        """
        before: Rollout | None = None

        def noting(rollout: Rollout) -> Rollout:
            nonlocal before
            before = rollout
            return change(rollout)

        after = await self._services.store.change_rollout(rollout_id, noting)
        assert before is not None
        if after.status in ("cancelled", "failed") or after.cancel_requested:
            self._services.gateway.abort_calls(rollout_id)
        if after.is_terminal and not before.is_terminal:
            await self._ask_hooks(after)
        return after

    async def _ask_hooks(self, rollout: Rollout) -> None:
        if not self._services.rollout_hooks:
            return
        events = await default_events(self._services, rollout)
        for hook in self._services.rollout_hooks:
            name = type(hook).__qualname__
            try:
                drafts = await hook.on_finished(rollout, events)
                events = (*events, *await self._append(rollout, name, drafts))
            except Exception:
                self.hook_errors[name] += 1
                log.exception(
                    "on_finished of %s failed", name, extra={"rollout_id": rollout.rollout_id}
                )

    async def _append(
        self, rollout: Rollout, hook_name: str, drafts: Sequence[EventDraft]
    ) -> Sequence[Event]:
        if not drafts:
            return ()
        attempt_id = rollout.default_attempt_id
        if attempt_id is None:
            log.warning(
                "on_finished of %s returned events for a rollout that never ran; they are dropped",
                hook_name,
                extra={"rollout_id": rollout.rollout_id},
            )
            return ()
        stored = await self._services.store.append_events(
            rollout.rollout_id,
            attempt_id,
            [_with_source(draft) for draft in drafts],
            timestamp=self._services.clock.now(),
        )
        self._services.gateway.publish(stored)
        return stored


def _with_source(draft: EventDraft) -> EventDraft:
    """A hook grades with the service's authority, so its rewards are never an agent's."""
    if draft.event_type != "reward":
        return draft
    return attrs.evolve(draft, data={**draft.data, "source": "hook"})
