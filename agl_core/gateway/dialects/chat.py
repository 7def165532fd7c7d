"""Chat completions: ``POST /v1/chat/completions`` as OpenAI defines it and vLLM 0.32 answers it.

Where things are. Whole answer: ``prompt_token_ids`` at the top, ``token_ids`` and
``logprobs.content`` in the choice. Stream: each choice's first chunk (the one with the role) has
``prompt_token_ids`` at the top and no ids of its own; later chunks have ``token_ids`` and
``logprobs.content`` in the choice.
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


class ChatTee(TokenTee):
    """The tee of a chat answer."""

    def _is_empty(self, choice: ChunkChoice) -> bool:
        """Tell whether the delta says nothing: vLLM sends those only to carry ids or logprobs."""
        return not choice.delta or not any(choice.delta.values())

    def _has_output(self, choice: ChunkChoice) -> bool:
        """Tell whether the delta has more than the role, which comes before any token."""
        delta = choice.delta or {}
        return any(value for name, value in delta.items() if name != "role")

    def _gather(self, state: ChoiceState, choice: ChunkChoice) -> None:
        if choice.delta:
            _merge_delta(state, choice.delta)
        logprobs = choice.logprobs
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if isinstance(content, list):
            state.add_logprobs(
                [item.get("logprob") if isinstance(item, dict) else None for item in content]
            )
            for item in content:
                if isinstance(item, dict):
                    state.text_tokens.append(str(item.get("token")))
            if self._request.wants_logprobs:
                state.shown_logprobs += content

    def _chosen_logprobs(self, logprobs: WholeLogprobs) -> list[float | None] | None:
        content = logprobs.content
        return None if content is None else [token.logprob for token in content]

    def _assemble(self, states: list[ChoiceState]) -> dict[str, Any]:
        wants = self._request
        choices = []
        for state in states:
            choice: dict[str, Any] = {
                "index": state.index,
                "message": _message(state),
                "logprobs": {"content": state.shown_logprobs} if state.shown_logprobs else None,
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            if wants.wants_token_ids:
                choice["token_ids"] = state.token_ids
            choices.append(choice)
        answer: dict[str, Any] = {"object": "chat.completion", "choices": choices}
        if wants.wants_token_ids:
            answer["prompt_token_ids"] = states[0].prompt_token_ids
        return answer

    @property
    def generated(self) -> dict[str, str]:
        """The arguments of each tool call exactly as the model wrote them, by call id."""
        if self.is_stream:
            calls: list[Any] = [c for state in self._states.values() for c in state.tool_calls]
        elif self._shown is not None and b'"arguments"' in self._shown:
            calls = _calls_of(self._decode_shown())
        else:
            calls = []
        found: dict[str, str] = {}
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str) and isinstance(call.get("id"), str):
                found[call["id"]] = arguments
        return found

    def _text(self, state: ChoiceState) -> str | None:
        """Return the content, unless a parser or ``echo`` stands between it and the tokens."""
        content = _message(state)["content"]
        parsed = state.tool_calls or set(state.parts) - {"role", "content"}
        return None if parsed or self._request.echo or not isinstance(content, str) else content


class ChatDialect(Dialect):
    """Chat completions."""

    api = "chat"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        # vLLM answers with logprobs only where top_logprobs is not null; absent it is 0.
        tops = not request.has("top_logprobs") or request.get("top_logprobs") is not None
        return attrs.evolve(
            describe_common(request),
            wants_logprobs=as_flag(request.get("logprobs")) is True and tops,
            n=count(request.get("n")),
        )

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Ask for ids, logprobs and usage.

        ``top_logprobs`` without ``logprobs`` is refused by the server: adding ``logprobs`` would
        hide that.
        """
        changes = usage_changes(request)
        if request.fields is None:
            return changes
        if as_flag(request.get("return_token_ids")) is False:
            changes["return_token_ids"] = True
        tops = request.get("top_logprobs")
        asked = as_flag(request.get("logprobs"))
        if asked is False and (tops is None or (tops == 0 and not isinstance(tops, bool))):
            changes["logprobs"] = True
        if tops is None and asked is not None:
            changes["top_logprobs"] = 0
        return changes

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> ChatTee:
        """Return the tee for one answer."""
        return ChatTee(request, adjusted, status, content_type)


def _merge_delta(state: ChoiceState, delta: dict[str, Any]) -> None:
    """Add one delta: texts are joined, tool calls go by their index, else the last one stands."""
    parts = state.parts
    for name, value in delta.items():
        if name == "tool_calls" and isinstance(value, list):
            for call in value:
                if isinstance(call, dict):
                    _merge_call(state.tool_calls, call)
        elif name == "role":
            parts.setdefault("role", value)
        elif isinstance(value, str):
            known = parts.get(name)
            if isinstance(known, list):
                known.append(value)
            else:
                parts[name] = [value]
        elif value is not None:
            parts[name] = value


def _merge_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add a delta to the call of its index; another id at that index starts another call."""
    index, call_id = delta.get("index"), delta.get("id")
    call = next((c for c in reversed(calls) if c.get("index") == index), None)
    if index is None and not call_id and calls:
        call = calls[-1]
    if call is None or (call_id and call["id"] and call_id != call["id"]):
        call = {
            "index": index,
            "id": None,
            "type": "function",
            "function": {"name": "", "arguments": ""},
        }
        calls.append(call)
    if call_id:
        call["id"] = call_id
    if delta.get("type"):
        call["type"] = delta["type"]
    function = delta.get("function")
    if isinstance(function, dict):
        for name, value in function.items():
            if isinstance(value, str):
                call["function"][name] = call["function"].get(name, "") + value


def _calls_of(answer: Any) -> list[Any]:
    """Return the tool calls of a whole answer, of all its choices."""
    found: list[Any] = []
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, dict) else None
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        found += calls if isinstance(calls, list) else ()
    return found


def _message(state: ChoiceState) -> dict[str, Any]:
    """Return the message that the deltas make."""
    message: dict[str, Any] = {"role": state.parts.get("role", "assistant"), "content": None}
    for name, value in state.parts.items():
        if name != "role":
            is_text = isinstance(value, list) and all(isinstance(part, str) for part in value)
            message[name] = "".join(value) if is_text else value
    # A stream opens with an empty content even where only tool calls or reasoning follow; a whole
    # answer has null.
    calls = [{k: v for k, v in call.items() if k != "index"} for call in state.tool_calls]
    if message["content"] == "" and (calls or len(message) > 2):
        message["content"] = None
    if calls:
        message["tool_calls"] = calls
    return message
