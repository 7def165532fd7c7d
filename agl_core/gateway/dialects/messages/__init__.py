"""Anthropic Messages (``POST /v1/messages``), answered by way of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agl_core.gateway.dialects.base import AnswerTee, Dialect, ParsedRequest, as_flag
from agl_core.gateway.dialects.messages.errors import error_of
from agl_core.gateway.dialects.messages.notes import Notes
from agl_core.gateway.dialects.messages.request import chat_request
from agl_core.gateway.dialects.messages.stream import MessagesTee
from agl_core.gateway.dialects.messages.tokens import count_answer, count_request
from agl_core.gateway.dialects.native import NativeTee
from agl_core.gateway.dialects.translation import Translation, translation_of

__all__ = ["MessagesDialect", "MessagesTee", "count_answer", "count_request", "error_of"]


class MessagesDialect(Dialect):
    """Anthropic Messages."""

    api = "messages"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        model = request.get("model")
        return attrs.evolve(
            request,
            stream=as_flag(request.get("stream")) is True,
            model=model if isinstance(model, str) else None,
            wants_usage=True,
        )

    def translate(
        self,
        parsed: ParsedRequest,
        *,
        generated: Mapping[str, str] | None = None,
        stored: Mapping[str, Any] | None = None,
    ) -> Translation:
        """Return the chat request for a message, and how its answer is written.

        Args:
            parsed: The request, as ``read_request`` gives it.
            generated: The arguments that the model wrote in earlier calls of the same rollout, by
                call id; they take the place of what the agent's parser made of them.
            stored: Not used here: a Messages request has all of its conversation.

        Raises:
            TranslationError: The request asks for what chat completions cannot do.
        """
        notes = Notes(generated or {})
        body = chat_request(parsed, notes)

        def wrap(inner: AnswerTee, status: int) -> MessagesTee:
            return MessagesTee(inner, status, parsed.model)

        return translation_of(body, wrap, notes.normalised())

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Return nothing: the API has no token ids to ask for, its translation does."""
        return {}

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> NativeTee:
        """Return the tee for an answer of a server that speaks this API itself: it is passed on."""
        return NativeTee(status, content_type)
