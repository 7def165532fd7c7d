"""Which conversation of an attempt a call belongs to, as far as harnesses tell it in headers.

Sub-agents run at the same time under one base URL, and harnesses make calls of their own (titles,
summaries) that are no part of the agent's work. Seen in Claude Code 2.1, Codex 0.171 and OpenCode
1.18; other harnesses send nothing, and their calls get no labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from agl_core.gateway.dialects.base import ParsedRequest
from agl_core.gateway.dialects.shapes import UNREADABLE

Kind = Literal["main", "subagent", "side", "compaction"]

# Claude Code writes this into the billing line of a sub-agent's system text.
_SUBAGENT_MARK = b"cc_is_subagent=true"


def labels_of(headers: Sequence[tuple[bytes, bytes]], parsed: ParsedRequest) -> dict[str, str]:
    """Return ``agent``, ``parent`` and ``kind`` of a call, those of them that are known.

    ``agent`` is the same in all calls of one conversation, ``parent`` is the ``agent`` that started
    it. ``kind`` is ``main``, ``subagent``, ``side`` (a call that is not the agent's: harnesses send
    their agents' calls with tools, a title generator's without) or ``compaction``.
    """
    given = {
        name.lower().decode("latin-1"): value.decode("latin-1").strip() for name, value in headers
    }
    for read in (_claude_code, _codex, _opencode):
        labels = read(given, parsed)
        if labels is not None:
            return {name: value for name, value in labels.items() if value}
    return {}


def _claude_code(given: Mapping[str, str], parsed: ParsedRequest) -> dict[str, str] | None:
    session = given.get("x-claude-code-session-id")
    if session is None:
        return None
    agent = given.get("x-claude-code-agent-id", "")
    parent = given.get("x-claude-code-parent-agent-id", session)
    if agent:
        return {"agent": agent, "parent": parent, "kind": "subagent"}
    if _is_marked(parsed):
        return {"parent": session, "kind": "subagent"}
    return {"agent": session, "kind": _kind_by_tools(parsed)}


def _codex(given: Mapping[str, str], parsed: ParsedRequest) -> dict[str, str] | None:
    thread = given.get("thread-id")
    subagent = given.get("x-openai-subagent")
    parent = given.get("x-codex-parent-thread-id", "")
    metadata = _json_object(given.get("x-codex-turn-metadata"))
    if thread is None and subagent is None and not metadata:
        return None
    agent = thread or str(metadata.get("thread_id") or "")
    kind: Kind = "main"
    if metadata.get("request_kind") == "compaction" or subagent == "compact":
        kind = "compaction"
    elif parent or subagent == "collab_spawn":
        kind = "subagent"
    elif subagent:
        kind = "side"
    return {"agent": agent, "parent": parent, "kind": kind}


def _opencode(given: Mapping[str, str], parsed: ParsedRequest) -> dict[str, str] | None:
    session = given.get("x-session-id") or given.get("x-session-affinity")
    if not session:
        return None
    parent = given.get("x-parent-session-id", "")
    kind = "subagent" if parent else _kind_by_tools(parsed)
    return {"agent": session, "parent": parent, "kind": kind}


def _kind_by_tools(parsed: ParsedRequest) -> Kind:
    return "main" if parsed.get("tools") else "side"


def _is_marked(parsed: ParsedRequest) -> bool:
    system = None if parsed.fields is None else parsed.fields.get("system")
    return system is not None and _SUBAGENT_MARK in bytes(system)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text) if text else None
    except UNREADABLE:
        value = None
    return value if isinstance(value, dict) else {}
