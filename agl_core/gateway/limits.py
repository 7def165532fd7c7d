"""What each rollout has used of its limits: calls, completion tokens and context.

A policy that loops would otherwise hold its slot until the time-out. Past a limit a call gets the
error of a full context, on which harnesses compact or end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from attrs import define

from agl_core.errors import AglError
from agl_core.gateway.context import ContextExceeded, context_message
from agl_core.records import Limits

CODE: Final = "rollout_limit"


@define
class _Used:
    calls: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    """The largest prompt with its completion."""
    tokens_per_byte: float | None = None
    """Prompt tokens per byte of the request, of the last call."""


class LimitBook:
    """Counts per rollout; the one that was silent longest is given up for a new one.

    A rollout that is not in the book (``knows``) is to be seeded from its stored events first.
    """

    def __init__(self, max_rollouts: int = 100_000) -> None:
        self._max_rollouts = max_rollouts
        self._used: OrderedDict[str, _Used] = OrderedDict()

    def knows(self, rollout_id: str) -> bool:
        """Tell whether the rollout's counts are here."""
        return rollout_id in self._used

    def seed(self, rollout_id: str, calls: int, tokens: int, context_tokens: int = 0) -> None:
        """Take a rollout's counts from the store; what is here already stands.

        Args:
            rollout_id: Whose counts they are.
            calls: Calls made.
            tokens: Completion tokens of all of them.
            context_tokens: The largest prompt with its completion.
        """
        if rollout_id not in self._used:
            self._add(rollout_id, _Used(calls, tokens, context_tokens))

    def _add(self, rollout_id: str, used: _Used) -> None:
        self._used[rollout_id] = used
        if len(self._used) > self._max_rollouts:
            self._used.popitem(last=False)

    def note(
        self, rollout_id: str, usage: Mapping[str, Any] | None, body_bytes: int | None = None
    ) -> None:
        """Count a call that was recorded.

        Args:
            rollout_id: Whose call it was.
            usage: As the server told it; None: the call counts, its tokens do not.
            body_bytes: Size of its request, so that ``estimate`` can tell the next one's prompt.
        """
        if rollout_id not in self._used:
            self._add(rollout_id, _Used())
        used = self._used[rollout_id]
        self._used.move_to_end(rollout_id)
        used.calls += 1
        if usage is None:
            return
        prompt = _count(usage, "prompt_tokens", "input_tokens")
        completion = _count(usage, "completion_tokens", "output_tokens")
        used.completion_tokens += completion
        used.context_tokens = max(used.context_tokens, prompt + completion)
        if body_bytes and prompt:
            used.tokens_per_byte = prompt / body_bytes

    def estimate(self, rollout_id: str, body_bytes: int) -> int | None:
        """Return about how many tokens a request's prompt has; None before a call told it."""
        used = self._used.get(rollout_id)
        if used is None or used.tokens_per_byte is None:
            return None
        return round(used.tokens_per_byte * body_bytes)

    def check(
        self,
        rollout_id: str,
        limits: Limits,
        prompt_tokens_hint: int | None = None,
        *,
        open_calls: int = 0,
    ) -> AglError | None:
        """Return the error that a further call gets, None where it may be made.

        Args:
            rollout_id: Whose call it is.
            limits: Of its rollout.
            prompt_tokens_hint: About how long the prompt is. With it a conversation that was
                compacted may go on; without it the largest context seen decides.
            open_calls: Further calls of the rollout in flight, which are not counted here yet.
        """
        used = self._used.get(rollout_id) or _Used()
        context = used.context_tokens if prompt_tokens_hint is None else prompt_tokens_hint
        for name, limit, count, what in (
            ("calls", limits.calls, used.calls + open_calls, "model calls"),
            (
                "completion_tokens",
                limits.completion_tokens,
                used.completion_tokens,
                "completion tokens",
            ),
            ("context_tokens", limits.context_tokens, context, "context tokens"),
        ):
            if limit is not None and count >= limit:
                return _refusal(name, limit, count, what, limits, used)
        return None

    def forget(self, rollout_id: str) -> None:
        """Drop the counts of a rollout that has ended."""
        self._used.pop(rollout_id, None)


def _refusal(
    name: str, limit: int, count: int, what: str, limits: Limits, used: _Used
) -> ContextExceeded:
    # The words need a length. Where no context is limited, it is the one that was reached.
    length = limits.context_tokens or max(1, used.context_tokens)
    return ContextExceeded(
        context_message(
            length,
            f"the rollout is at {count} {what}, and its limits.{name} is {limit}. "
            "Please reduce the length of the input prompt.",
        ),
        code=CODE,
        details={"limit": name, "allowed": limit, "used": count},
    )


def _count(usage: Mapping[str, Any], *names: str) -> int:
    """Return the first of the counts that is there: dialects name them differently."""
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return 0
