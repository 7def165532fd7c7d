"""What failed attempts leave behind, such as the end of their log, goes to the store as events."""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.controller.service import ControllerClient, is_passing
from agl_core.controller.workers import complain
from agl_core.errors import ApiError
from agl_core.interfaces import RunReport
from agl_core.records import Event, EventDraft


class Evidence:
    """Posts evidence once, also across restarts and replies that were lost."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._kept: dict[str, set[str]] = {}

    async def keep(self, report: RunReport) -> None:
        """Post what is new in a report.

        Raises:
            ApiError: The service cannot take it now. One that refuses it does not keep the
                rollout from its end.
        """
        kept = self._kept.setdefault(report.rollout_id, set())
        for attempt_id, drafts in report.evidence.items():
            if attempt_id in kept or not drafts:
                continue
            try:
                kind = drafts[0].event_type
                present = await self._client.events(report.rollout_id, attempt_id, kind)
                if not _holds(present, drafts[0]):
                    await self._client.post_events(report.rollout_id, attempt_id, drafts)
            except ApiError as exc:
                if is_passing(exc):
                    raise
                complain("the log of an attempt was refused", exc, report.rollout_id)
            kept.add(attempt_id)

    def forget(self, rollout_id: str) -> None:
        """The rollout is done with."""
        self._kept.pop(rollout_id, None)


def _holds(events: Sequence[Event], draft: EventDraft) -> bool:
    """Whether a draft was posted before; agents may post events of the same type."""
    return any(
        all(event.data.get(name) == value for name, value in draft.data.items()) for event in events
    )
