"""Messages and their content blocks, as chat messages.

The prompt that a server makes of them is the one that vLLM's own Messages route makes: the texts of
the system blocks are joined, tool results become tool messages whose texts are joined by newlines,
thinking becomes ``reasoning``. Where vLLM drops something that the model should see (documents,
images inside of tool results, system messages in the middle), it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agl_core.gateway.dialects.messages.notes import Notes
from agl_core.gateway.dialects.translation import (
    TranslationError,
    read_arguments,
    same_json,
    write_arguments,
)

# How Claude Code sends back arguments that it could not parse, and how we hand out such arguments.
UNPARSED = "__unparsedToolInput"

Part = dict[str, Any]


def chat_messages(system: Any, messages: Any, notes: Notes) -> list[dict[str, Any]]:
    """Return the chat messages of ``system`` and ``messages``."""
    if not isinstance(messages, list):
        raise TranslationError("messages: Input should be a valid list")
    chat: list[dict[str, Any]] = []
    head = _system_text(system, "system", notes)
    if head:
        chat.append({"role": "system", "content": head})
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise TranslationError(f"{where}: Input should be an object")
        role = message.get("role")
        notes.see(message)
        content = message.get("content")
        if role == "system":
            text = _system_text(content, f"{where}.content", notes)
            if text:
                chat.append({"role": "system", "content": text})
        elif role == "user":
            chat += _user_messages(content, f"{where}.content", notes)
        elif role == "assistant":
            chat.append(_assistant_message(content, f"{where}.content", notes))
        else:
            raise TranslationError(f"{where}.role: Input should be 'user', 'assistant' or 'system'")
    return chat


def referenced_tools(messages: Any) -> set[str]:
    """Return the names of the tools that tool results refer to: a tool search found them."""
    names: set[str] = set()
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if isinstance(block, dict) else None
            for item in inner if isinstance(inner, list) else ():
                if isinstance(item, dict) and item.get("type") == "tool_reference":
                    names.add(str(item.get("tool_name")))
    return names


def _blocks(content: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each block with its place; a string is one text block."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise TranslationError(f"{where}: Input should be a string or a list of content blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise TranslationError(f"{where}.{index}: Input should be an object")
        yield f"{where}.{index}", block


def _text_of(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise TranslationError(f"{where}.text: Input should be a valid string")
    return text


def _system_text(content: Any, where: str, notes: Notes) -> str:
    if content is None:
        return ""
    texts: list[str] = []
    for place, block in _blocks(content, where):
        notes.see(block)
        if block.get("type") != "text":
            raise TranslationError(f"{place}.type: a system block must be a text block")
        texts.append(notes.without_billing(_text_of(block, place)))
    return "".join(texts)


# User messages


def _user_messages(content: Any, where: str, notes: Notes) -> list[dict[str, Any]]:
    """Return the tool messages of a user message, then what else it says as a user message.

    Images of tool results go into the user message, before its own parts: a tool message holds text
    alone.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    images: list[Part] = []
    own: list[Part] = []
    for place, block in _blocks(content, where):
        notes.see(block)
        if block.get("type") == "tool_result":
            parts = _result_parts(block, place, notes)
            texts = [part["text"] for part in parts if part["type"] == "text"]
            images += [part for part in parts if part["type"] != "text"]
            call_id = str(block.get("tool_use_id") or "")
            results.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
        else:
            own += _parts(block, place, notes)
    said = _joined([*images, *own])
    return results if said is None else [*results, {"role": "user", "content": said}]


def _joined(parts: Sequence[Part]) -> str | list[Part] | None:
    """Return one text as a string, so that it does not matter which form the agent sent."""
    if not parts:
        return None
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return list(parts)


def _result_parts(block: dict[str, Any], where: str, notes: Notes) -> list[Part]:
    content = block.get("content")
    if content is None:
        return []
    parts: list[Part] = []
    for place, item in _blocks(content, f"{where}.content"):
        notes.see(item)
        if item.get("type") == "tool_reference":
            parts.append({"type": "text", "text": f"Tool loaded: {item.get('tool_name')}"})
        elif item.get("type") == "text":
            parts.append({"type": "text", "text": _text_of(item, place)})
        else:
            parts += _parts(item, place, notes)
    return parts


def _parts(block: dict[str, Any], where: str, notes: Notes) -> list[Part]:
    """Return the chat parts of a block that a user may send; an empty text is none."""
    kind = block.get("type")
    if kind == "text":
        text = _text_of(block, where)
        return [{"type": "text", "text": text}] if text else []
    if kind == "image":
        return [_image_part(block.get("source"), where)]
    if kind == "document":
        return _document_parts(block.get("source"), where, notes)
    if kind == "search_result":
        found = [_text_of(item, place) for place, item in _blocks(block.get("content"), where)]
        head = [str(block[name]) for name in ("title", "source") if block.get(name)]
        return [{"type": "text", "text": "\n".join([*head, *found])}]
    raise TranslationError(f"{where}.type: a block of type {kind!r} is not supported here")


def _image_part(source: Any, where: str) -> Part:
    kind = source.get("type", "base64") if isinstance(source, dict) else None
    if kind == "url":
        url = str(source.get("url") or "")
    elif kind == "base64":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    else:
        raise TranslationError(f"{where}.source: an image must be of type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _document_parts(source: Any, where: str, notes: Notes) -> list[Part]:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        return [{"type": "text", "text": str(source.get("data") or "")}]
    if kind == "content":
        parts: list[Part] = []
        for place, item in _blocks(source.get("content"), f"{where}.source.content"):
            notes.see(item)
            parts += _parts(item, place, notes)
        return parts
    raise TranslationError(f"{where}.source: only documents of plain text can be read by the model")


# Assistant messages


def _assistant_message(content: Any, where: str, notes: Notes) -> dict[str, Any]:
    parts: list[Part] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in _blocks(content, where):
        notes.see(block)
        kind = block.get("type")
        if kind == "text":
            parts += _parts(block, place, notes)
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":
            # Nobody but the model that wrote it can read it.
            notes.redacted_thinking += 1
        elif kind == "tool_use":
            calls.append(_tool_call(block, place, notes))
        else:
            raise TranslationError(f"{place}.type: a block of type {kind!r} is not supported here")
    message: dict[str, Any] = {"role": "assistant", "content": _joined(parts)}
    if any(reasoning):
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if len(message) == 2 and message["content"] is None:
        message["content"] = ""
    return message


def _tool_call(block: dict[str, Any], where: str, notes: Notes) -> dict[str, Any]:
    call_id, name = block.get("id"), block.get("name")
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise TranslationError(f"{where}: a tool_use block must have an id and a name")
    function = {"name": name, "arguments": _arguments(call_id, block.get("input"), notes)}
    return {"id": call_id, "type": "function", "function": function}


def _arguments(call_id: str, given: Any, notes: Notes) -> str:
    """Return a call's arguments: as the model wrote them where that is what the agent sends back.

    Arguments that were no JSON come back as an empty object, or raw in an object of Claude Code's.
    """
    given = {} if given is None else given
    unparsed = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
    raw = unparsed.get("raw") if isinstance(unparsed, dict) else None
    written = write_arguments(given) if raw is None else str(raw)
    generated = notes.generated.get(call_id)
    if generated is None or generated == written:
        return written
    try:
        is_same = same_json(read_arguments(generated), given)
    except ValueError:
        is_same = given == {}
    if not is_same:
        return written
    notes.arguments_restored.append(call_id)
    return generated
