"""``POST /v1/messages/count_tokens``: how long the prompt of a Messages call would be.

Not a sample: nothing is captured for training, and the answer is a number from ``/tokenize``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agl_core.errors import UpstreamError
from agl_core.gateway.dialects.base import AnswerTee, Dialect, ParsedRequest
from agl_core.gateway.dialects.messages import count_answer, count_request
from agl_core.gateway.dialects.other import OtherTee


class CountTokensTee(OtherTee):
    """Turns the tokenizer's answer into the API's."""

    def __init__(self, status: int) -> None:
        super().__init__(status, "application/json")
        self._upstream_status = status

    @property
    def content_type(self) -> str:
        """The content type of what is written, whatever the model server's was."""
        return "application/json"

    def whole(self, body: bytes) -> bytes:
        """Return ``{"input_tokens": n}``, or the error in the API's shape.

        Raises:
            UpstreamError: The model server answered something else than a count.
        """
        status, shown = count_answer(self._upstream_status, body)
        if status != self._upstream_status:
            raise UpstreamError(
                "the model server's tokenizer gave no count",
                code="upstream_malformed",
                details={"phase": "body", "source": "server"},
            )
        return super().whole(shown)


class CountTokensDialect(Dialect):
    """The token count of Anthropic Messages."""

    api = "other"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        model = request.get("model")
        return attrs.evolve(request, model=model if isinstance(model, str) else None)

    def count_request(self, parsed: ParsedRequest) -> tuple[str, ParsedRequest]:
        """Return the path at the server's root and the request that counts.

        Raises:
            TranslationError: The call itself could not be translated.
        """
        return count_request(parsed)

    def open_count(self, status: int) -> AnswerTee:
        """Return the tee for the tokenizer's answer."""
        return CountTokensTee(status)

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Return nothing: there are no tokens to capture."""
        return {}

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> AnswerTee:
        """Return the tee for a server that counts itself: its answer is passed on."""
        return OtherTee(status, content_type)
