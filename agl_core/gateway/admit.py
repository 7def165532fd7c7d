"""Admission: whose call it is, and whether its rollout may still make one."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from agl_core.auth import Authority, Identity, require, require_own
from agl_core.clock import Clock
from agl_core.errors import (
    AglError,
    Conflict,
    Forbidden,
    NotFound,
    Unavailable,
)
from agl_core.gateway.incoming import Header
from agl_core.gateway.paths import ProxyPath
from agl_core.interfaces import Store
from agl_core.records import Rollout
from agl_core.transitions import see_attempt


@frozen(kw_only=True)
class Admitted:
    """A call that may be made."""

    identity: Identity
    rollout: Rollout
    attempt_id: str


class TooManyCalls(Unavailable):
    """A rollout has as many calls open as it may."""

    default_code = "too_many_calls"
    default_status = 429


@define(kw_only=True)
class Admission:
    """Checks calls against keys and the store."""

    store: Store
    authority: Authority
    clock: Clock
    calls_per_rollout: int
    open_calls: dict[str, int] = field(factory=dict)

    async def admit(
        self, path: ProxyPath, headers: Sequence[Header], client: tuple[str, int] | None
    ) -> Admitted:
        """Say whether a call may be made.

        An attempt that was never seen is created: a pod may call before the controller knows it.

        Raises:
            BadToken: No key or token, or a bad one (401).
            Forbidden: A good one in the wrong place; the rollout or attempt has ended (403).
            NotFound: There is no such rollout.
        """
        identity = self.authority.identify(headers, client)
        require(identity, "agent", to="call a model")
        rollout_id = self._rollout_id(path, identity)
        require_own(identity, rollout_id)
        rollout = await self.store.get_rollout(rollout_id)
        if rollout.is_terminal or rollout.cancel_requested:
            how = rollout.status if rollout.is_terminal else "asked to cancel"
            raise Forbidden(
                f"rollout {rollout_id!r} has ended ({how}): its agent can make no more calls",
                code="rollout_ended",
            )
        attempt_id = path.attempt_id or _running_attempt(rollout)
        attempt = rollout.attempt(attempt_id)
        if attempt is None or attempt.is_ended:
            rollout = await self._see(rollout_id, attempt_id)
        return Admitted(identity=identity, rollout=rollout, attempt_id=attempt_id)

    def _rollout_id(self, path: ProxyPath, identity: Identity) -> str:
        rollout_id = path.rollout_id or identity.rollout_id
        if rollout_id is None:
            raise Forbidden(
                "a call to /v1 is for the rollout of its token, and this key is no rollout's",
                hint="use /rollout/{id}/attempt/{id}/v1, or a rollout's token",
            )
        return rollout_id

    async def _see(self, rollout_id: str, attempt_id: str) -> Rollout:
        now = self.clock.now()
        try:
            return await self.store.change_rollout(
                rollout_id, lambda rollout: see_attempt(rollout, attempt_id, now)
            )
        except Conflict as exc:
            # SDKs repeat a call that got a 409.
            raise Forbidden(exc.message, code=exc.code, details=exc.details) from exc
        except ValueError as exc:
            raise NotFound(f"no attempt can be called {attempt_id!r}: {exc}") from exc

    def begin(self, rollout_id: str) -> None:
        """Count a call in.

        Raises:
            TooManyCalls: The rollout has too many open.
        """
        count = self.open_calls.get(rollout_id, 0)
        if count >= self.calls_per_rollout:
            raise TooManyCalls(
                f"rollout {rollout_id!r} has {count} calls open",
                hint="raise gateway.calls_per_rollout, or call less at once",
            )
        self.open_calls[rollout_id] = count + 1

    def end(self, rollout_id: str) -> None:
        """Count a call out."""
        count = self.open_calls.get(rollout_id, 0) - 1
        if count > 0:
            self.open_calls[rollout_id] = count
        else:
            self.open_calls.pop(rollout_id, None)


def _running_attempt(rollout: Rollout) -> str:
    for attempt in reversed(rollout.attempts):
        if not attempt.is_ended:
            return attempt.attempt_id
    raise Forbidden(
        f"rollout {rollout.rollout_id!r} has no running attempt",
        code="no_running_attempt",
        hint="use the OPENAI_BASE_URL that the attempt was started with",
    )


def as_agl_error(exc: Exception, request_id: str) -> AglError:
    """An error that nobody foresaw: the log has it, the agent gets the id to look for."""
    return AglError(f"the gateway failed on this call; its log tells more of {request_id}")
