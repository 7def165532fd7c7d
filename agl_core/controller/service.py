"""The service as the controller sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agl_core.errors import ApiError
from agl_core.records import (
    Attempt,
    Event,
    EventDraft,
    Resources,
    Rollout,
    RolloutError,
    RolloutPage,
    Status,
)


class Token(Protocol):
    """A minted token."""

    @property
    def token(self) -> str: ...


class PolicyState(Protocol):
    """What the gateway says of a policy."""

    @property
    def paused_seconds(self) -> float: ...


class PolicyStates(Protocol):
    """The gateway's state."""

    @property
    def policies(self) -> Mapping[str, PolicyState]: ...


class ControllerClient(Protocol):
    """What the controller needs of ``AsyncAglLiteClient``; its errors are ``ApiError``."""

    async def rollout(self, rollout_id: str) -> Rollout:
        """One rollout."""
        ...

    async def rollouts(
        self,
        *,
        status: Sequence[Status] | None = None,
        changed_after: str | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> RolloutPage:
        """A page of the change feed."""
        ...

    async def patch(
        self,
        rollout_id: str,
        *,
        status: Status | None = None,
        attempts: Sequence[Attempt] = (),
        succeeded_attempt_id: str | None = None,
        error: RolloutError | None = None,
    ) -> Rollout:
        """Change a rollout."""
        ...

    async def mint_token(self, rollout_id: str) -> Token:
        """A token for the rollout's agent."""
        ...

    async def events(
        self, rollout_id: str, attempt_id: str | None = None, type: str | None = None
    ) -> Sequence[Event]:
        """All events of an attempt."""
        ...

    async def post_events(
        self, rollout_id: str, attempt_id: str, drafts: Sequence[EventDraft]
    ) -> Sequence[Event]:
        """Append events."""
        ...

    async def resources(self, id: str | None = None) -> Resources:
        """One bundle of resources."""
        ...

    async def gateway_state(self) -> PolicyStates:
        """Pauses by policy."""
        ...


def is_passing(error: ApiError) -> bool:
    """Whether the same call may work a little later."""
    return error.status == 0 or error.status >= 500 or error.status in (408, 429)
