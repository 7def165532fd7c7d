"""What a rollout's later calls may refer to: arguments that the model wrote, answers by their id.

Kept per rollout and dropped at its end; bounded, oldest rollout first. It is a convenience of the
running service: what is missing is translated as the agent sent it, or refused by its id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from attrs import define, field

_MAX_ROLLOUTS = 10_000
_MAX_ENTRIES = 4_096


@define
class _Remembered:
    generated: OrderedDict[str, str] = field(factory=OrderedDict)
    stored: OrderedDict[str, Any] = field(factory=OrderedDict)


class ConversationMemory:
    """Remembers per rollout."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, _Remembered] = OrderedDict()

    def generated(self, rollout_id: str) -> Mapping[str, str]:
        """The arguments of tool calls exactly as the model wrote them, by call id."""
        known = self._rollouts.get(rollout_id)
        return known.generated if known else {}

    def stored(self, rollout_id: str) -> Mapping[str, Any]:
        """Responses and items by id, as ``ResponsesTee.remember`` gives them."""
        known = self._rollouts.get(rollout_id)
        return known.stored if known else {}

    def note(
        self, rollout_id: str, generated: Mapping[str, str], stored: Mapping[str, Any]
    ) -> None:
        """Take in what an answer brought."""
        if not generated and not stored:
            return
        known = self._rollouts.setdefault(rollout_id, _Remembered())
        self._rollouts.move_to_end(rollout_id)
        if len(self._rollouts) > _MAX_ROLLOUTS:
            self._rollouts.popitem(last=False)
        for kept, new in ((known.generated, generated), (known.stored, stored)):
            kept.update(new)
            while len(kept) > _MAX_ENTRIES:
                kept.popitem(last=False)

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._rollouts.pop(rollout_id, None)
