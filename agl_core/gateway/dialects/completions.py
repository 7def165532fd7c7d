"""Completions: ``POST /v1/completions`` as OpenAI defines it and vLLM 0.32 answers it.

Ids and logprobs are all in the choice: ``prompt_token_ids`` (of a stream in each choice's first
chunk only), ``token_ids`` and ``logprobs.token_logprobs``. Chunks without text are sent whether ids
were asked for or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agl_core.gateway.dialects.base import Dialect, ParsedRequest, as_flag
from agl_core.gateway.dialects.choices import ChoiceState
from agl_core.gateway.dialects.describe import count, describe_common, usage_changes
from agl_core.gateway.dialects.shapes import ChunkChoice, WholeLogprobs
from agl_core.gateway.dialects.tee import TokenTee


class CompletionsTee(TokenTee):
    """The tee of a completion."""

    def _is_empty(self, choice: ChunkChoice) -> bool:
        return False

    def _has_output(self, choice: ChunkChoice) -> bool:
        return bool(choice.text)

    def _gather(self, state: ChoiceState, choice: ChunkChoice) -> None:
        if choice.text:
            state.parts.setdefault("text", []).append(choice.text)
        logprobs = choice.logprobs
        if not isinstance(logprobs, dict):
            return
        values, tokens = logprobs.get("token_logprobs"), logprobs.get("tokens")
        if isinstance(values, list):
            state.add_logprobs(values)
        if isinstance(tokens, list):
            state.text_tokens += map(str, tokens)
        if self._request.wants_logprobs:
            state.shown_logprobs.append(logprobs)

    def _chosen_logprobs(self, logprobs: WholeLogprobs) -> list[float | None] | None:
        return logprobs.token_logprobs

    def _assemble(self, states: list[ChoiceState]) -> dict[str, Any]:
        choices = []
        for state in states:
            choice: dict[str, Any] = {
                "index": state.index,
                "text": "".join(state.parts.get("text", ())),
                "logprobs": _joined(state.shown_logprobs),
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            if self._request.wants_token_ids:
                choice["token_ids"] = state.token_ids
                choice["prompt_token_ids"] = state.prompt_token_ids
            choices.append(choice)
        return {"object": "text_completion", "choices": choices}

    def _text(self, state: ChoiceState) -> str | None:
        return None if self._request.echo else "".join(state.parts.get("text", ()))


class CompletionsDialect(Dialect):
    """Completions."""

    api = "completions"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        return attrs.evolve(
            describe_common(request),
            wants_logprobs=request.get("logprobs") is not None,
            tops_field="logprobs",
            n=count(request.get("n")),
        )

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Ask for ids, the chosen tokens' logprobs and usage.

        Not with ``echo``: asked for ids, vLLM leaves the echoed prompt out of the text, and asked
        for logprobs it computes the prompt's too. Such a call stays what it is and is recorded
        without tokens.
        """
        changes = usage_changes(request)
        if request.fields is None or request.echo:
            return changes
        if as_flag(request.get("return_token_ids")) is False:
            changes["return_token_ids"] = True
        if request.get("logprobs") is None:
            changes["logprobs"] = 0
        return changes

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> CompletionsTee:
        """Return the tee for one answer."""
        return CompletionsTee(request, adjusted, status, content_type)


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Join the logprobs of chunks, which are lists of equal length under each name."""
    if not pieces:
        return None
    joined: dict[str, Any] = {}
    for piece in pieces:
        for name, value in piece.items():
            if isinstance(value, list) and isinstance(joined.get(name, []), list):
                joined.setdefault(name, []).extend(value)
            else:
                joined.setdefault(name, value)
    return joined
