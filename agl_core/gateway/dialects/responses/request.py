"""The Responses API: ``POST /v1/responses``, answered by way of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import msgspec

from agl_core.gateway.dialects.base import AnswerTee, Dialect, ParsedRequest, as_flag
from agl_core.gateway.dialects.native import NativeTee
from agl_core.gateway.dialects.responses.answer import Frame, wants_logprobs
from agl_core.gateway.dialects.responses.items import Conversation, items_of, kind_of, resolve
from agl_core.gateway.dialects.responses.stream import ResponsesTee
from agl_core.gateway.dialects.responses.tools import Tools
from agl_core.gateway.dialects.shapes import UNREADABLE
from agl_core.gateway.dialects.translation import (
    TranslatedTee,
    Translation,
    TranslationError,
    stable_hex,
    translation_of,
)

# What means the same in both APIs of vLLM.
_KEPT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
    "priority",
    "vllm_xargs",
)
_TRANSLATED = frozenset(
    {
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "stream",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
# The levels that every chat API takes; others reach the template as vLLM's own route hands them on.
_EFFORTS = frozenset({"low", "medium", "high"})


@attrs.frozen
class ResponsesDialect(Dialect):
    """The Responses API.

    Attributes:
        cut_answers_end: How the stream of an answer ends that ``max_output_tokens`` cut. The API
            says ``incomplete``, on which Codex gives up at once; with ``completed`` it takes what
            is there. The response's own status is ``incomplete`` either way.
    """

    api = "responses"
    cut_answers_end: Literal["incomplete", "completed"] = "incomplete"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        model = request.get("model")
        return attrs.evolve(
            request,
            stream=as_flag(request.get("stream")) is True,
            model=model if isinstance(model, str) else None,
            wants_logprobs=wants_logprobs({"include": request.get("include")}),
        )

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Return nothing: the API has no token ids, they come with the translation."""
        return {}

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> AnswerTee:
        """Return a tee that changes nothing, for an answer to a request sent untranslated."""
        return NativeTee(status, content_type)

    def references(self, parsed: ParsedRequest) -> tuple[str, ...]:
        """Return the ids of the earlier response and items that a request refers to."""
        found = []
        previous, items = parsed.get("previous_response_id"), parsed.get("input")
        if isinstance(previous, str):
            found.append(previous)
        found += [
            str(item.get("id"))
            for item in (items if isinstance(items, list) else ())
            if isinstance(item, dict) and kind_of(item) == "item_reference"
        ]
        return tuple(found)

    def translate(
        self,
        parsed: ParsedRequest,
        *,
        generated: Mapping[str, str] = {},
        stored: Mapping[str, Any] = {},
    ) -> Translation:
        """Return the chat request for a request.

        Args:
            parsed: The request.
            generated: The arguments that the model wrote, by call id.
            stored: What ``ResponsesTee.remember`` told of earlier answers, by id.

        Raises:
            TranslationError: It cannot be said in chat, or refers to what is not known.
        """
        fields = _read(parsed)
        items = _whole_input(fields, stored)
        tools = Tools()
        tools.add(fields.get("tools"))
        for item in items:
            if kind_of(item) == "additional_tools":
                tools.add(item.get("tools"))
        choice = tools.choice(fields.get("tool_choice"))
        conversation = Conversation(tools, generated)
        if fields.get("instructions"):
            conversation.instruct(_instructions(fields))
        conversation.take(items)

        body: dict[str, Any] = {} if fields.get("model") is None else {"model": fields["model"]}
        body["messages"] = conversation.messages
        if tools.chat:
            body["tools"] = list(tools.chat.values())
            if choice is not None:
                body["tool_choice"] = choice
            if fields.get("parallel_tool_calls") is not None:
                body["parallel_tool_calls"] = fields["parallel_tool_calls"]
        body.update(_settings(fields))
        if parsed.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        frame = Frame(fields=fields, tools=tools, items=items, seed=stable_hex(parsed.body))

        def wrap(inner: AnswerTee, status: int) -> TranslatedTee:
            return ResponsesTee(inner, status, frame, cut_answers_end=self.cut_answers_end)

        normalised = {
            "dropped": _dropped(fields),
            "tools_left_out": tools.left_out,
            "items_left_out": conversation.left_out,
            "arguments_restored": conversation.restored,
        }
        return translation_of(body, wrap, normalised)


def _read(parsed: ParsedRequest) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(parsed.body)
    except UNREADABLE as exc:
        raise TranslationError("the body is not JSON") from exc
    if not isinstance(fields, dict):
        raise TranslationError("the body must be a JSON object")
    for name, why in (
        ("background", "answers are given in the request's own connection"),
        ("prompt", "there is no store of prompt templates"),
        ("conversation", "there is no store of conversations"),
    ):
        if fields.get(name):
            raise TranslationError(f"{name} is not supported: {why}", details={"param": name})
    return fields


def _whole_input(fields: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the input with what came before it, and with what it refers to."""
    if fields.get("input") is None:
        raise TranslationError("input is required", details={"param": "input"})
    items = resolve(items_of(fields["input"]), stored)
    previous_id = fields.get("previous_response_id")
    if previous_id is None:
        return items
    previous = stored.get(str(previous_id))
    if not isinstance(previous, dict) or "input" not in previous or "output" not in previous:
        raise TranslationError(
            f"Previous response with id '{previous_id}' not found.",
            code="previous_response_not_found",
            status=404,
            details={"param": "previous_response_id"},
        )
    return [*previous["input"], *previous["output"], *items]


def _instructions(fields: Mapping[str, Any]) -> str:
    instructions = fields["instructions"]
    if not isinstance(instructions, str):
        raise TranslationError("instructions must be a string", details={"param": "instructions"})
    return instructions


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a request is neither conversation nor tools."""
    settings = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    if fields.get("max_output_tokens") is not None:
        settings["max_tokens"] = fields["max_output_tokens"]
    if wants_logprobs(fields):
        settings["logprobs"] = True
        settings["top_logprobs"] = fields.get("top_logprobs") or 0
    text = fields.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        settings["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(form, dict) and form.get("type") == "json_object":
        settings["response_format"] = {"type": "json_object"}
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if effort in _EFFORTS:
        settings["reasoning_effort"] = effort
    elif isinstance(effort, str):
        known = settings.get("chat_template_kwargs")
        settings["chat_template_kwargs"] = {
            "reasoning_effort": effort,
            **(known if isinstance(known, dict) else {}),
        }
    return settings


def _dropped(fields: Mapping[str, Any]) -> list[str]:
    """Return what had no effect on the request sent, though it may stand in the answer."""
    used = _TRANSLATED.union(_KEPT)
    dropped = [name for name, value in fields.items() if name not in used and value is not None]
    text, reasoning = fields.get("text"), fields.get("reasoning")
    if isinstance(text, dict) and text.get("verbosity") is not None:
        dropped.append("text.verbosity")
    if isinstance(reasoning, dict):
        dropped += [f"reasoning.{n}" for n, v in reasoning.items() if n != "effort" and v]
    return dropped
