"""The errors of agl-lite: each has a stable code, an HTTP status and often a way out.

``app.py`` alone turns them into HTTP answers; the command line prints ``message`` and ``hint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class AglError(Exception):
    """Base of every error that agl-lite raises on purpose.

    Attributes:
        message: Lower case, names the thing and what is wrong with it.
        hint: What to do about it, or None.
        code: Stable, machine-readable name (``docs/errors.md`` lists all).
        status: The HTTP status it becomes.
        details: JSON-able facts, such as the index of the faulty item of a list.
    """

    default_code: ClassVar[str] = "internal"
    default_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        status: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.status = status or self.default_status
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Children have constructors of their own, and errors must cross processes (Ray)."""
        return _restore, (type(self), self.args, self.__dict__.copy())


def _restore(kind: type[AglError], args: tuple[Any, ...], state: dict[str, Any]) -> AglError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(AglError):
    """The configuration is wrong; ``problems`` has one line per fault."""

    default_code = "bad_config"

    def __init__(self, problems: str | list[str], *, hint: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint=hint)


class PluginError(AglError):
    """A plugin cannot be used."""

    default_code = "plugin_error"


class PluginNotFound(PluginError):
    """No installed distribution offers a plugin of that name."""

    default_code = "plugin_not_found"


class PluginLoadError(PluginError):
    """A plugin was found but its import, its settings or its constructor failed."""

    default_code = "plugin_broken"


class PluginConflict(PluginError):
    """Two plugins claim the same name, or answer a hook that takes one answer."""

    default_code = "plugin_conflict"


class HookError(PluginError):
    """A hook implementation is misspelt, raised, or returned a wrong object."""

    default_code = "hook_error"


class BadRequest(AglError):
    """The request cannot be read at all."""

    default_code = "bad_request"
    default_status = 400


class BadJson(BadRequest):
    """The body is not JSON, or holds NaN or Infinity."""

    default_code = "bad_json"


class Invalid(AglError):
    """The request is well formed but a value in it is not allowed."""

    default_code = "invalid"
    default_status = 422


class BadToken(AglError):
    """No key or token, or one that is forged or expired."""

    default_code = "bad_token"
    default_status = 401


class Forbidden(AglError):
    """A good key or token in the wrong place."""

    default_code = "forbidden"
    default_status = 403


class NotFound(AglError):
    """The named thing does not exist."""

    default_code = "not_found"
    default_status = 404


class Conflict(AglError):
    """The request contradicts the present state; ``code`` says how."""

    default_code = "conflict"
    default_status = 409


class IllegalTransition(Conflict):
    """A rollout's status does not go from where it is to where it was sent."""

    default_code = "illegal_transition"


class VersionConflict(Conflict):
    """Somebody changed it first."""

    default_code = "version_conflict"


class StaleAttempt(Conflict):
    """The attempt has ended."""

    default_code = "stale_attempt"


class RolloutEnded(Conflict):
    """The rollout is terminal."""

    default_code = "rollout_ended"


class RolloutExists(Conflict):
    """The rollout id is taken by another spec."""

    default_code = "rollout_exists"


class CursorExpired(AglError):
    """The cursor belongs to another life of the store."""

    default_code = "cursor_expired"
    default_status = 410


class TooLarge(AglError):
    """A body over its limit."""

    default_code = "too_large"
    default_status = 413


class Unavailable(AglError):
    """For the moment it cannot be done; ``retry_after_seconds`` says when to ask again."""

    default_code = "unavailable"
    default_status = 503

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after_seconds = retry_after_seconds


class TakenOver(Unavailable):
    """Another controller works in this one's place."""

    default_code = "taken_over"


class StoreError(Unavailable):
    """The store cannot take or give records now."""

    default_code = "store_unavailable"


class UpstreamError(AglError):
    """A model server broke off or answered something that is not HTTP."""

    default_code = "upstream_error"
    default_status = 502


class UpstreamTimeout(UpstreamError):
    """A model server took longer than a limit allows."""

    default_code = "upstream_timeout"
    default_status = 504


class UpstreamRefused(UpstreamError):
    """No connection to a model server could be made."""

    default_code = "upstream_refused"


class ApiError(AglError):
    """The service answered a client's request with an error.

    ``status`` is the HTTP status (0 where no answer came), ``code`` the service's code.
    """

    default_code = "api_error"

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code, details=details)
        self.status = status
