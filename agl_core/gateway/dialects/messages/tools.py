"""Tools and tool choice, as chat has them."""

from __future__ import annotations

from typing import Any

from agl_core.gateway.dialects.messages.notes import Notes
from agl_core.gateway.dialects.translation import TranslationError


def missing(loc: str, given: dict[str, Any]) -> TranslationError:
    """Return the error for a missing field, in the words of vLLM's own Messages route."""
    fault = {
        "type": "missing",
        "loc": f"body.{loc}",
        "msg": "Field required",
        "input": f"<dict of {len(given)} items>",
    }
    return TranslationError(f"1 validation error:\n  {fault}", details={"field": loc})


def chat_tools(tools: Any, referenced: set[str], notes: Notes) -> list[dict[str, Any]]:
    """Return the tools as chat functions.

    A tool whose loading is deferred is not shown to the model until a tool search has found it, as
    the API has it. Tools that a server would run (they have no ``input_schema``) do not exist here.
    """
    if not isinstance(tools, list):
        raise TranslationError("tools: Input should be a valid list")
    chat: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise TranslationError(f"tools.{index}: Input should be an object")
        for name in ("name", "input_schema"):
            if name not in tool:
                raise missing(f"tools.{index}.{name}", tool)
        notes.see(tool)
        if tool.get("defer_loading") and tool["name"] not in referenced:
            notes.deferred_tools.append(str(tool["name"]))
            continue
        chat.append({"type": "function", "function": _function(tool, index)})
    return chat


def _function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    schema = tool["input_schema"]
    if not isinstance(schema, dict):
        raise TranslationError(f"tools.{index}.input_schema: Input should be an object")
    function: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return function


def chat_tool_choice(choice: Any) -> dict[str, Any]:
    """Return the chat fields that say what ``tool_choice`` says."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    fields: dict[str, Any] = {}
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        fields["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise TranslationError("tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields
