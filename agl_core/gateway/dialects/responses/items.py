"""The items of a Responses input as chat messages.

A turn of the model is several items (reasoning, a message, calls) and one chat message: the chat
template has to write it as the model did, or the next prompt does not continue the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl_core.gateway.dialects.responses.tools import (
    Tools,
    custom_arguments,
    custom_input,
    same_arguments,
)
from agl_core.gateway.dialects.translation import TranslationError, write_arguments

Item = dict[str, Any]

# What tools that a model server does not have leave in a history. They cannot be told to the model;
# how many were left out is recorded.
_LEFT_OUT = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def items_of(value: Any) -> list[Item]:
    """Return an ``input`` as a list of items; a string is the user's message.

    Raises:
        TranslationError: It is neither a string nor a list of objects.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise _invalid("input must be a string or a list of items", "input")
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise _invalid(f"input[{at}] must be an object", f"input[{at}]")
    return value


def kind_of(item: Item) -> str:
    """Return an item's type; clients leave it out of messages and references."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "message" if "role" in item or "id" not in item else "item_reference"


def resolve(items: Sequence[Item], stored: Mapping[str, Any]) -> list[Item]:
    """Put what was remembered in the place of references to it.

    Raises:
        TranslationError: Nothing is known under an id.
    """
    resolved: list[Item] = []
    for at, item in enumerate(items):
        if kind_of(item) != "item_reference":
            resolved.append(item)
            continue
        known = stored.get(str(item.get("id")))
        if not isinstance(known, dict) or ("output" in known and "input" in known):
            raise TranslationError(
                f"Item with id '{item.get('id')}' not found.",
                code="item_not_found",
                status=404,
                details={"param": f"input[{at}].id"},
            )
        resolved.append(known)
    return resolved


class Conversation:
    """Gathers chat messages out of items."""

    def __init__(self, tools: Tools, generated: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out: dict[str, int] = {}
        """How many items were left out, by type."""
        self.restored: list[str] = []
        """The ids of the calls whose arguments the client had written anew."""
        self._tools = tools
        self._generated = generated
        # The model's message that further items of the same turn go into.
        self._turn: dict[str, Any] | None = None
        # Images of tool results: chat has them in a user's message, after all results of the turn.
        self._images: list[dict[str, Any]] = []

    def instruct(self, content: Any) -> None:
        """Add instructions, in the content of a chat message.

        Those that open the conversation become one message, as on vLLM's own route: many templates
        take no other system message than the first.
        """
        if self.messages and all(message["role"] == "system" for message in self.messages):
            before, after = _text(self.messages[-1]["content"]), _text(content)
            if before is not None and after is not None:
                self.messages[-1]["content"] = f"{before}\n{after}"
                return
        self.messages.append({"role": "system", "content": content})

    def take(self, items: Sequence[Item]) -> None:
        """Add items, in order.

        Raises:
            TranslationError: One cannot be said in chat.
        """
        for at, item in enumerate(items):
            self._take(item, f"input[{at}]")
        self._show_images()

    def _take(self, item: Item, where: str) -> None:
        kind = kind_of(item)
        if kind in ("function_call_output", "custom_tool_call_output"):
            self._take_result(item, where)
            return
        self._show_images()
        if kind == "message":
            self._take_message(item, where)
        elif kind == "reasoning":
            self._take_reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            self._take_call(item, where, is_custom=kind == "custom_tool_call")
        elif kind in _LEFT_OUT:
            self._leave_out(kind)
        elif kind != "additional_tools":
            raise _invalid(f"{where} has type {kind!r}, which is not known", f"{where}.type")

    def _leave_out(self, kind: str) -> None:
        self.left_out[kind] = self.left_out.get(kind, 0) + 1

    # What the model wrote

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn

    def _take_reasoning(self, item: Item) -> None:
        text = _text_of(item.get("content")) or _text_of(item.get("summary"))
        if not text:
            self._leave_out("reasoning")
            return
        # After a message without calls it opens the next turn: nothing else stood between them.
        if self._turn is not None and self._turn["content"] and "tool_calls" not in self._turn:
            self._turn = None
        turn = self._open_turn()
        turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def _take_call(self, item: Item, where: str, *, is_custom: bool) -> None:
        call_id, name = item.get("call_id"), item.get("name")
        if not isinstance(call_id, str) or not isinstance(name, str):
            raise _invalid(f"{where} needs a call_id and a name", where)
        text = item.get("input" if is_custom else "arguments")
        if text is None:
            text = ""
        elif not isinstance(text, str):
            text = write_arguments(text)
        arguments = self._arguments(call_id, text, is_custom=is_custom)
        namespace = item.get("namespace")
        function = {"name": self._tools.chat_name(name, namespace), "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _arguments(self, call_id: str, text: str, *, is_custom: bool) -> str:
        """Return the arguments as the model generated them, where they still say the same."""
        generated = self._generated.get(call_id)
        if is_custom:
            sent = custom_arguments(text)
            is_same = generated is not None and custom_input(generated) == text
        else:
            sent = text
            is_same = generated is not None and same_arguments(generated, text)
        if generated is None or not is_same or generated == sent:
            return sent
        if not is_custom:
            self.restored.append(call_id)
        return generated

    def _take_message(self, item: Item, where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            self._take_answer(_text_of(content))
        elif role in ("user", "system", "developer"):
            self._turn = None
            said = _content(content, where)
            if role == "user":
                self.messages.append({"role": role, "content": said})
            else:
                # Templates know no developer.
                self.instruct(said)
        else:
            raise _invalid(f"{where} has role {role!r}, which is not known", f"{where}.role")

    def _take_answer(self, text: str) -> None:
        turn = self._turn
        if turn is not None and "tool_calls" in turn:
            # Text that came after a call, before its result, is of the same turn.
            turn["content"] = (turn["content"] or "") + text
            return
        if turn is not None and turn["content"] is not None:
            self._turn = None
        self._open_turn()["content"] = text

    # What tools answered

    def _take_result(self, item: Item, where: str) -> None:
        self._turn = None
        output = item.get("output")
        if isinstance(output, list):
            parts = [_part(part, f"{where}.output") for part in output]
            self._images += [part for part in parts if part["type"] != "text"]
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        elif isinstance(output, str):
            text = output
        else:
            text = "" if output is None else write_arguments(output)
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise _invalid(f"{where} needs a call_id", f"{where}.call_id")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _show_images(self) -> None:
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []


def _text_of(content: Any) -> str:
    """Return the text of a message, a summary or a reasoning; its parts are pieces of one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [
        part.get("refusal" if part.get("type") == "refusal" else "text")
        for part in content
        if isinstance(part, dict)
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _content(content: Any, where: str) -> Any:
    """Return a content for chat; a single text is the same as a string, and is sent as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where}.content must be a string or a list of parts", f"{where}.content")
    parts = [_part(part, f"{where}.content") for part in content]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _text(content: Any) -> str | None:
    """Return a chat content as one text, its parts joined as vLLM does; None where it has more."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        return None
    return "\n".join(part["text"] for part in content)


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _invalid(f"a part of {where} must be an object", where)
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        text = part.get("text")
        return {"type": "text", "text": text if isinstance(text, str) else ""}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image: dict[str, Any] = {"url": part["image_url"]}
        if part.get("detail") in ("auto", "low", "high"):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind in ("input_image", "input_file"):
        raise _invalid(
            f"a part of {where} is a file that the model server cannot read: "
            "send text, or an image with its image_url",
            where,
        )
    raise _invalid(f"a part of {where} has type {kind!r}, which is not known", where)


def _invalid(message: str, param: str) -> TranslationError:
    return TranslationError(message, details={"param": param})
