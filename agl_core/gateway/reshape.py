"""What of an agent's request goes upstream: translated, sampled as the trainer wants it, patched.

Order: translation into chat completions where the dialect needs it; the model's name there; what
capture asks for; sampling, clamp and salt; the route's changes; then plugins. What differs from the
request is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import field, frozen

from agl_core.errors import AglError
from agl_core.gateway.context import clamp
from agl_core.gateway.dialects import (
    AnswerTee,
    ChatDialect,
    CountTokensDialect,
    Dialect,
    MessagesDialect,
    ParsedRequest,
    ResponsesDialect,
    chat_dialect,
    restored,
)
from agl_core.gateway.memory import ConversationMemory
from agl_core.gateway.sampling import is_constrained, sampling_changes
from agl_core.interfaces import RequestReshaper, ReshapeRequest, Route
from agl_core.records import Rollout
from agl_core.settings import SamplingSettings

log = logging.getLogger(__name__)

OpenTee = Callable[[int, str], AnswerTee]


class RouteError(AglError):
    """No resolver could pick a server, or a plugin on the request path failed."""

    default_code = "no_route"
    default_status = 502


@frozen(kw_only=True)
class Outgoing:
    """A request as it goes to a model server."""

    path: str
    """Below ``v1``, or from the server's root where ``is_at_root``."""
    is_at_root: bool = False
    body: bytes = field(repr=False)
    adjusted: dict[str, Any] = field(factory=dict)
    """What was changed, of the translated request where there is a translation."""
    translated: ParsedRequest | None = None
    normalised: dict[str, Any] = field(factory=dict)
    is_constrained: bool = False
    open_tee: OpenTee = field(repr=False)


@frozen(kw_only=True)
class _Draft:
    """A request in the dialect that the server is asked in."""

    dialect: Dialect
    request: ParsedRequest
    path: str
    is_at_root: bool = False
    normalised: dict[str, Any] = field(factory=dict)
    is_translated: bool = False
    open_tee: Callable[[Mapping[str, Any], int, str], AnswerTee]


class RequestShaper:
    """Makes outgoing requests."""

    def __init__(
        self,
        sampling: SamplingSettings,
        reshapers: Sequence[tuple[str, RequestReshaper]],
        memory: ConversationMemory,
    ) -> None:
        self._sampling = sampling
        self._reshapers = reshapers
        self._memory = memory

    def shape(
        self,
        dialect: Dialect,
        path: str,
        parsed: ParsedRequest,
        *,
        route: Route,
        version: int,
        context_tokens: int | None,
        rollout: Rollout,
        attempt_id: str,
    ) -> Outgoing:
        """Make the request for one server.

        Args:
            dialect: What the agent speaks.
            path: What it asked for, below ``v1``.
            parsed: Its request.
            route: Where it goes.
            version: Of the policy there.
            context_tokens: The server's context length, where it is known.
            rollout: Whose call it is.
            attempt_id: Of which attempt.

        Raises:
            TranslationError: It cannot be said in chat completions.
            RouteError: A plugin failed.
        """
        draft = self._draft(dialect, path, parsed, route, rollout.rollout_id)
        request = draft.request
        changes: dict[str, Any] = {}
        if request.fields is not None:
            changes = self._changes(draft, route, version, context_tokens, rollout)
            changes.update(route.changes)
            changes.update(self._plugin_changes(draft, route, rollout, attempt_id))
        reshaped = draft.dialect.reshape(request, changes)
        return Outgoing(
            path=draft.path,
            is_at_root=draft.is_at_root,
            body=reshaped.body,
            adjusted=reshaped.adjusted,
            translated=request if draft.is_translated else None,
            normalised=draft.normalised,
            is_constrained=is_constrained(request),
            open_tee=lambda status, kind: draft.open_tee(reshaped.adjusted, status, kind),
        )

    def _draft(
        self, dialect: Dialect, path: str, parsed: ParsedRequest, route: Route, rollout_id: str
    ) -> _Draft:
        api = "messages" if isinstance(dialect, CountTokensDialect) else dialect.api
        if api in route.server.native or parsed.fields is None:
            return _as_it_is(dialect, path, parsed)
        if isinstance(dialect, CountTokensDialect):
            at_root, request = dialect.count_request(parsed)
            return _Draft(
                dialect=chat_dialect(),
                request=request,
                path=at_root,
                is_at_root=True,
                is_translated=True,
                open_tee=lambda _adjusted, status, _kind: dialect.open_count(status),
            )
        if isinstance(dialect, MessagesDialect | ResponsesDialect):
            translation = dialect.translate(
                parsed,
                generated=self._memory.generated(rollout_id),
                stored=self._memory.stored(rollout_id),
            )
            return _Draft(
                dialect=chat_dialect(),
                request=translation.request,
                path=translation.path,
                normalised=translation.normalised,
                is_translated=True,
                open_tee=translation.open_answer,
            )
        if isinstance(dialect, ChatDialect) and route.server.trained:
            mended = restored(parsed, self._memory.generated(rollout_id))
            if mended is not None:
                return _as_it_is(dialect, path, mended[0], {"arguments_restored": mended[1]})
        return _as_it_is(dialect, path, parsed)

    def _changes(
        self,
        draft: _Draft,
        route: Route,
        version: int,
        context_tokens: int | None,
        rollout: Rollout,
    ) -> dict[str, Any]:
        server, request, api = route.server, draft.request, draft.dialect.api
        changes: dict[str, Any] = {}
        if api != "other" or request.model is not None:
            changes["model"] = server.upstream_model
        if not server.trained or api == "other" or draft.is_at_root:
            return changes
        changes.update(draft.dialect.capture_changes(request))
        changes.update(sampling_changes(self._sampling, rollout.mode, request, api))
        if context_tokens is not None:
            changes.update(clamp(request, context_tokens))
        if server.salt:
            changes["cache_salt"] = f"{server.policy}@{version}"
        return changes

    def _plugin_changes(
        self, draft: _Draft, route: Route, rollout: Rollout, attempt_id: str
    ) -> dict[str, Any]:
        if not self._reshapers or draft.request.fields is None:
            return {}
        request = ReshapeRequest(
            rollout=rollout,
            attempt_id=attempt_id,
            server=route.server,
            api=draft.dialect.api,
            fields={name: msgspec.json.decode(raw) for name, raw in draft.request.fields.items()},
        )
        changes: dict[str, Any] = {}
        for name, reshaper in self._reshapers:
            try:
                changes.update(reshaper.reshape(request))
            except Exception as exc:
                log.exception("request reshaper failed", extra={"plugin": name})
                raise RouteError(
                    f"request reshaper {name!r} failed: {type(exc).__name__}: {exc}"
                ) from exc
        return changes


def _as_it_is(
    dialect: Dialect, path: str, parsed: ParsedRequest, normalised: Mapping[str, Any] | None = None
) -> _Draft:
    return _Draft(
        dialect=dialect,
        request=parsed,
        path=path,
        normalised=dict(normalised or {}),
        open_tee=lambda adjusted, status, kind: dialect.open_answer(parsed, adjusted, status, kind),
    )
