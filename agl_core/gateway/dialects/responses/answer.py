"""Responses and their items, as vLLM 0.32 writes them on its own Responses route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from agl_core.gateway.dialects.responses.tools import ToolName, Tools, custom_input
from agl_core.gateway.dialects.translation import reasoning_of, stable_hex

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
LOGPROBS = "message.output_text.logprobs"
"""What ``include`` has where the logprobs of the text are wanted."""


@frozen(kw_only=True)
class Frame:
    """What of a request its answer repeats or depends on.

    Attributes:
        fields: The request's top-level fields.
        tools: Its tools, to name calls as the agent does.
        items: The whole input, what it referred to put in.
        seed: Makes the ids where the model server gives none.
    """

    fields: Mapping[str, Any] = field(repr=False)
    tools: Tools = field(repr=False)
    items: list[dict[str, Any]] = field(repr=False)
    seed: str

    @property
    def wants_logprobs(self) -> bool:
        """Whether the agent asked for the logprobs of the text."""
        return wants_logprobs(self.fields)

    @property
    def is_stored(self) -> bool:
        """Whether later requests may refer to the answer."""
        return self.fields.get("store") is not False

    def response_id(self, upstream_id: Any) -> str:
        """Return the answer's id, the same for the same upstream answer."""
        return f"resp_{self.hex_of(upstream_id)}"

    def hex_of(self, upstream_id: Any) -> str:
        """Return what all ids of an answer are made of."""
        return stable_hex(upstream_id if isinstance(upstream_id, str) else self.seed)

    def response(
        self,
        *,
        upstream_id: Any,
        created: Any,
        model: Any,
        status: str,
        output: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a response object with all keys that vLLM's has."""
        asked = self.fields
        tools = asked.get("tools") or []
        return {
            "id": self.response_id(upstream_id),
            "created_at": created if isinstance(created, int) else 0,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata"),
            "model": asked.get("model") or model,
            "object": "response",
            "output": list(output),
            "parallel_tool_calls": _given(asked, "parallel_tool_calls", True),
            "temperature": _given(asked, "temperature", 1.0),
            "tool_choice": _given(asked, "tool_choice", "auto" if tools else "none"),
            "tools": [_shown_tool(tool) for tool in tools],
            "top_p": _given(asked, "top_p", 1.0),
            "background": False,
            "max_output_tokens": asked.get("max_output_tokens"),
            "max_tool_calls": asked.get("max_tool_calls"),
            "previous_response_id": asked.get("previous_response_id"),
            "prompt": None,
            "reasoning": _with_keys(
                asked.get("reasoning"), ("context", "effort", "generate_summary", "mode", "summary")
            ),
            "service_tier": _given(asked, "service_tier", "auto"),
            "status": status,
            "text": _with_keys(asked.get("text"), ("format", "verbosity")),
            "top_logprobs": asked.get("top_logprobs"),
            "truncation": _given(asked, "truncation", "disabled"),
            "usage": None if usage is None else usage_of(usage),
            "user": asked.get("user"),
            "presence_penalty": _given(asked, "presence_penalty", 0.0),
            "frequency_penalty": _given(asked, "frequency_penalty", 0.0),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def read_whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole chat answer as a response."""
        choice = chat["choices"][0]
        message = choice.get("message") or {}
        finish_reason = choice.get("finish_reason")
        seed = self.hex_of(chat.get("id"))
        output: list[dict[str, Any]] = []

        def item_id(prefix: str) -> str:
            return f"{prefix}_{stable_hex(seed, len(output))}"

        reasoning = reasoning_of(message)
        if reasoning:
            output.append(reasoning_item(item_id("rs"), reasoning, None))
        content = message.get("content")
        if isinstance(content, str) and content:
            logprobs = logprobs_of(choice.get("logprobs")) if self.wants_logprobs else None
            output.append(message_item(item_id("msg"), content, logprobs, "completed"))
        for at, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            name = self.tools.original(str(function.get("name")))
            call_id = call.get("id") or made_up_call_id(seed, at)
            output.append(
                call_item(
                    item_id(prefix_of(name)),
                    call_id,
                    name,
                    function.get("arguments") or "",
                    "completed",
                )
            )
        reason = incomplete_reason(finish_reason)
        if reason and output:
            output[-1]["status"] = "incomplete"
        return self.response(
            upstream_id=chat.get("id"),
            created=chat.get("created"),
            model=chat.get("model"),
            status="incomplete" if reason else "completed",
            output=output,
            usage=chat.get("usage"),
            reason=reason,
        )

    def remember(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """Return what later requests may refer to, by id; nothing where ``store`` is false."""
        if not self.is_stored:
            return {}
        output = response["output"]
        remembered: dict[str, Any] = {item["id"]: item for item in output}
        remembered[response["id"]] = {"input": self.items, "output": output}
        return remembered


def wants_logprobs(fields: Mapping[str, Any]) -> bool:
    """Tell whether a request asks for the logprobs of the text."""
    include = fields.get("include")
    return isinstance(include, list) and LOGPROBS in include


def incomplete_reason(finish_reason: Any) -> str | None:
    """Return why an answer is not complete; None where it is."""
    return _REASONS.get(finish_reason) if isinstance(finish_reason, str) else None


def made_up_call_id(seed: str, at: int) -> str:
    """Return an id for a call that the model server gave none."""
    return f"call_{stable_hex(seed, 'call', at)}"


def prefix_of(name: ToolName) -> str:
    """Return what the ids of a tool's calls begin with."""
    return "ctc" if name.is_custom else "fc"


# Items


def text_part(text: str, logprobs: Sequence[Any] | None) -> dict[str, Any]:
    """Return the part of a message that has its text."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def message_item(
    item_id: str, text: str | None, logprobs: Sequence[Any] | None, status: str
) -> dict[str, Any]:
    """Return a message; one that has just begun has no text."""
    return {
        "id": item_id,
        "content": [] if text is None else [text_part(text, logprobs)],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def reasoning_item(item_id: str, text: str | None, status: str | None) -> dict[str, Any]:
    """Return a reasoning item; one that has just begun has no text."""
    return {
        "id": item_id,
        "summary": [],
        "type": "reasoning",
        "content": None if text is None else [{"text": text, "type": "reasoning_text"}],
        "encrypted_content": None,
        "status": status,
    }


def call_item(
    item_id: str, call_id: str, name: ToolName, arguments: str, status: str
) -> dict[str, Any]:
    """Return a call as its tool's kind has it, the arguments as the model wrote them."""
    item: dict[str, Any]
    if name.is_custom:
        item = {"input": custom_input(arguments) if arguments else "", "type": "custom_tool_call"}
    else:
        item = {"arguments": arguments, "type": "function_call"}
    item.update(call_id=call_id, name=name.name, id=item_id, status=status)
    if name.namespace is not None:
        item["namespace"] = name.namespace
    return item


# Parts


def logprobs_of(logprobs: Any) -> list[dict[str, Any]]:
    """Return a chat choice's logprobs as the text of a message has them."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_logprob(token), "top_logprobs": [_logprob(top) for top in token["top_logprobs"] or ()]}
        for token in content or ()
    ]


def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token.get("token"), "bytes": token.get("bytes"), "logprob": token["logprob"]}


def delta_logprobs(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return logprobs as the event of a piece of text has them: without bytes."""
    return [
        {
            "token": token["token"],
            "logprob": token["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in token["top_logprobs"]
            ],
        }
        for token in logprobs
    ]


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat answer's usage; counts that chat does not have are 0, as in vLLM."""
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage.get("prompt_tokens") or 0,
        "input_tokens_details": {
            "cached_tokens": prompt.get("cached_tokens") or 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {
            "reasoning_tokens": completion.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.get("total_tokens") or 0,
    }


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _with_keys(value: Any, names: Sequence[str]) -> Any:
    return {**dict.fromkeys(names), **value} if isinstance(value, dict) else value


def _shown_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {**dict.fromkeys(("name", "parameters", "strict", "type", "description")), **tool}
