"""A Messages request as a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_core.gateway.dialects.base import NULL, ParsedRequest
from agl_core.gateway.dialects.messages.content import chat_messages, referenced_tools
from agl_core.gateway.dialects.messages.notes import Notes
from agl_core.gateway.dialects.messages.tools import chat_tool_choice, chat_tools, missing
from agl_core.gateway.dialects.translation import TranslationError

# Fields that mean the same in both APIs, or that vLLM reads in both.
_SAME = ("temperature", "top_p", "top_k", "chat_template_kwargs", "kv_transfer_params", "priority")
_TRANSLATED = frozenset(
    {
        "cache_control",
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "stop_sequences",
        "stream",
        "system",
        "tool_choice",
        "tools",
        *_SAME,
    }
)


def chat_request(parsed: ParsedRequest, notes: Notes) -> dict[str, Any]:
    """Return the body of the chat request; what has no meaning there is noted as dropped.

    ``thinking`` is dropped as vLLM's own route drops it: whether a model thinks is the server's
    setting, and the same in each call of a rollout.
    """
    fields = _fields(parsed)
    if fields.get("max_tokens") is None:
        raise missing("max_tokens", fields)
    body = _prompt(fields, notes)
    body["max_tokens"] = fields["max_tokens"]
    for name in _SAME:
        if fields.get(name) is not None:
            body[name] = fields[name]
    if fields.get("stop_sequences"):
        body["stop"] = fields["stop_sequences"]
    if fields.get("tool_choice") is not None:
        body.update(chat_tool_choice(fields["tool_choice"]))
    body.update(_output_fields(fields.get("output_config")))
    if parsed.stream:
        # The first chunk then tells the prompt's length, which message_start has to say.
        body["stream"] = True
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    notes.dropped += [name for name in fields if name not in _TRANSLATED]
    return body


def count_body(parsed: ParsedRequest, notes: Notes) -> dict[str, Any]:
    """Return the body for vLLM's ``/tokenize``: the prompt that the same call would have."""
    fields = _fields(parsed)
    body = _prompt(fields, notes)
    body.setdefault("add_generation_prompt", True)
    options = dict(fields.get("chat_template_kwargs") or {})
    effort = _output_fields(fields.get("output_config")).get("reasoning_effort")
    if effort is not None:
        # In a chat request the server hands it to the template itself.
        options.setdefault("reasoning_effort", effort)
    if options:
        body["chat_template_kwargs"] = options
    return body


def _fields(parsed: ParsedRequest) -> dict[str, Any]:
    if parsed.fields is None:
        raise TranslationError("the body is not a JSON object that can be read")
    fields: dict[str, Any] = {}
    for name, raw in parsed.fields.items():
        fields[name] = parsed.get(name)
        if fields[name] is None and raw != NULL:
            # A number out of range, for instance: the server refuses it too.
            raise TranslationError(f"{name}: Input is not readable JSON")
    if fields.get("thread") is not None:
        raise TranslationError(
            "threads are not supported",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    if fields.get("messages") is None:
        raise missing("messages", fields)
    return fields


def _prompt(fields: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return what makes the prompt: model, messages and tools."""
    notes.see(fields)
    body: dict[str, Any] = {}
    if fields.get("model") is not None:
        body["model"] = fields["model"]
    messages = chat_messages(fields.get("system"), fields["messages"], notes)
    body["messages"] = messages
    if _is_prefill(messages):
        body["add_generation_prompt"] = False
        body["continue_final_message"] = True
    if fields.get("tools"):
        tools = chat_tools(fields["tools"], referenced_tools(fields["messages"]), notes)
        if tools:
            body["tools"] = tools
    return body


def _is_prefill(messages: list[dict[str, Any]]) -> bool:
    """Tell whether the agent began the answer itself: the model then goes on with that text."""
    last = messages[-1] if messages else {}
    text = last.get("content")
    is_text_alone = "tool_calls" not in last and "reasoning" not in last
    return last.get("role") == "assistant" and is_text_alone and bool(text)


def _output_fields(config: Any) -> dict[str, Any]:
    """Return the chat fields for ``output_config``: the effort, and a schema for the answer."""
    if not isinstance(config, dict):
        return {}
    fields: dict[str, Any] = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    form = config.get("format")
    if isinstance(form, dict) and isinstance(form.get("schema"), dict):
        schema = {"name": "answer", "schema": form["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
