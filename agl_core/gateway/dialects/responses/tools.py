"""The tools of a Responses request as functions of a chat request, and back.

Chat completions know functions alone, in one flat list. A function inside a namespace gets a name
that has both; a custom tool, whose input is free text, becomes a function with one string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from agl_core.gateway.dialects.translation import (
    TranslationError,
    read_arguments,
    same_json,
    stable_hex,
    write_arguments,
)

INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""

_LONGEST_NAME = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@frozen
class ToolName:
    """A tool as the agent knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@define
class Tools:
    """The tools that a request offers, from its ``tools`` and its ``additional_tools`` items."""

    chat: dict[str, dict[str, Any]] = field(factory=dict)
    """The chat tools by their names, in the order of the request."""
    left_out: list[str] = field(factory=list)
    """The types of tools that a model server does not have, such as ``web_search``."""
    _known: dict[str, ToolName] = field(factory=dict)
    _chat_names: dict[tuple[str | None, str], str] = field(factory=dict)

    def add(self, tools: Any, namespace: str | None = None) -> None:
        """Take a list of tools; a tool that is defined again takes the place of the first.

        Raises:
            TranslationError: The list cannot be read.
        """
        if tools is None:
            return
        if not isinstance(tools, list):
            raise TranslationError("tools must be a list")
        for tool in tools:
            if not isinstance(tool, dict):
                raise TranslationError("each tool must be an object")
            kind = tool.get("type")
            if kind == "namespace" and namespace is None:
                self.add(tool.get("tools"), _name_of(tool))
            elif kind in ("function", "custom"):
                name = ToolName(_name_of(tool), namespace, kind == "custom")
                self._define(name, tool)
            else:
                self.left_out.append(str(kind))

    def _define(self, name: ToolName, tool: Mapping[str, Any]) -> None:
        chat_name = self.chat_name(name.name, name.namespace)
        known = self._known.get(chat_name)
        if known is not None and (known.name, known.namespace) != (name.name, name.namespace):
            chat_name = _cut(chat_name, stable_hex(name.namespace, name.name, length=8))
        self._known[chat_name] = name
        self._chat_names[name.namespace, name.name] = chat_name
        function = _custom_function(tool) if name.is_custom else _function(tool)
        self.chat[chat_name] = {"type": "function", "function": {"name": chat_name, **function}}

    def chat_name(self, name: str, namespace: str | None) -> str:
        """Return the name that a tool has in chat; also of one that is not offered now.

        Clients that know no namespaces leave it out when they send a call back.
        """
        known = self._chat_names.get((namespace, name))
        if known is not None:
            return known
        if namespace is not None:
            return _flat(namespace, name)
        inside = [
            flat for (space, inner), flat in self._chat_names.items() if space and inner == name
        ]
        return inside[0] if len(inside) == 1 else name

    def original(self, chat_name: str) -> ToolName:
        """Return the agent's name of a tool that the model called, be it one it made up."""
        return self._known.get(chat_name) or ToolName(chat_name)

    def choice(self, choice: Any) -> Any:
        """Return a tool choice as chat has it, None for none; ``allowed_tools`` drops the others.

        Raises:
            TranslationError: It asks for a tool that is not there.
        """
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            return self._keep_allowed(choice)
        if isinstance(choice, dict):
            if choice.get("type") not in ("function", "custom"):
                raise TranslationError(
                    f"tool_choice {choice.get('type')!r} names a tool that the model server "
                    "does not have",
                    details={"param": "tool_choice"},
                )
            return {"type": "function", "function": {"name": self._offered(choice)}}
        if choice not in (None, "auto", "none", "required"):
            raise TranslationError(
                f"tool_choice {choice!r} is not known", details={"param": "tool_choice"}
            )
        if choice == "required" and not self.chat:
            raise TranslationError(
                "tool_choice is 'required', but there is no tool that the model server could call",
                details={"param": "tool_choice"},
            )
        # vLLM refuses a choice between no tools.
        return choice if self.chat else None

    def _offered(self, tool: Mapping[str, Any]) -> str:
        namespace = tool.get("namespace")
        chat_name = self.chat_name(_name_of(tool), namespace)
        if chat_name not in self.chat:
            raise TranslationError(
                f"tool_choice names tool {tool['name']!r}, which is not in tools",
                details={"param": "tool_choice"},
            )
        return chat_name

    def _keep_allowed(self, choice: Mapping[str, Any]) -> Any:
        allowed = choice.get("tools")
        if not isinstance(allowed, Sequence) or isinstance(allowed, str):
            raise TranslationError("tool_choice.tools must be a list")
        names = {
            self._offered(tool)
            for tool in allowed
            if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
        }
        self.chat = {name: tool for name, tool in self.chat.items() if name in names}
        return self.choice(choice.get("mode", "auto"))


def _name_of(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise TranslationError("a tool has no name", details={"param": "tools"})
    return name


def _flat(namespace: str, name: str) -> str:
    """Return a chat name for a function in a namespace, the same one each time."""
    flat = f"{namespace}__{name}"
    if _NAME.match(flat):
        return flat
    return _cut(_NOT_IN_NAME.sub("_", flat), stable_hex(namespace, name, length=8))


def _cut(name: str, mark: str) -> str:
    return f"{name[: _LONGEST_NAME - len(mark) - 1]}_{mark}"


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    parameters = tool.get("parameters")
    function["parameters"] = _NO_PARAMETERS if parameters is None else parameters
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return function


def _custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    texts = [tool["description"]] if isinstance(tool.get("description"), str) else []
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        texts.append(
            f"The input must match this {form.get('syntax', '')} grammar:\n"
            f"{form.get('definition', '')}"
        )
    return {
        "description": "\n\n".join(text for text in texts if text),
        "parameters": {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": "The input, as plain text."}},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }


# What a custom tool is given


def custom_arguments(text: str) -> str:
    """Return the arguments of the function for a custom tool's input."""
    return write_arguments({INPUT: text})


def custom_input(arguments: str) -> str:
    """Return a custom tool's input out of the arguments that the model wrote.

    Arguments of another form than was asked for are handed over as they are, so that the agent can
    tell the model; of arguments that were cut, what was there.
    """
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        reader = InputReader()
        text = reader.feed(arguments)
        return text if reader.is_input else arguments
    if isinstance(value, dict):
        value = value.get(INPUT)
    return value if isinstance(value, str) else arguments


def same_arguments(one: str, other: str) -> bool:
    """Tell whether two argument texts are the same JSON, or the same text."""
    try:
        return same_json(read_arguments(one), read_arguments(other))
    except ValueError:
        return one == other


# Between the braces: the key, then whole characters and escapes of the string. A surrogate that
# waits for its other half is not whole.
_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]'
    r'|\\["\\/bfnrt]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


class InputReader:
    """Takes a custom tool's input out of the function's arguments while they come in."""

    def __init__(self) -> None:
        self.is_input = False
        self._buffer = ""
        self._ended = False

    def feed(self, text: str) -> str:
        """Return what of the input has become certain."""
        if self._ended:
            return ""
        self._buffer += text
        if not self.is_input:
            start = _BEFORE_INPUT.match(self._buffer)
            if start is None:
                return ""
            self.is_input = True
            self._buffer = self._buffer[start.end() :]
        end = _match_end(self._buffer)
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        self._ended = self._buffer.startswith('"')
        return str(json.loads(f'"{whole}"', strict=False)) if whole else ""


def _match_end(text: str) -> int:
    match = _WHOLE.match(text)
    return match.end() if match else 0
