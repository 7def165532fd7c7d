"""What harnesses really send over the Messages API, translated and labelled."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects.base import ParsedRequest
from agl_core.gateway.dialects.labels import labels_of
from agl_core.gateway.dialects.messages import MessagesDialect, count_request
from agl_core.gateway.dialects.translation import TranslationError

HARNESS = Path(__file__).parents[2] / "data" / "harness"
MESSAGES = MessagesDialect()
REQUESTS = sorted(HARNESS.glob("*/*/*_v1_messages/request.json"))
# Cases whose calls go on with one conversation each, as their labels tell them apart.
CONVERSATIONS = [
    "ai-sdk/anthropic",
    "ai-sdk/anthropic_stream",
    "anthropic-node/create",
    "anthropic-python/create",
    "claude-code/edit",
    "claude-code/edit_2_1_197",
    "claude-code/edit_alias_model",
    "claude-code/subagent",
    "claude-code/think",
    "langgraph/anthropic",
    "mini-swe-agent/anthropic",
    "opencode/anthropic",
    "openhands/anthropic",
    "qwen-code/anthropic",
]


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(HARNESS).parts[:-1])


def parsed_at(path: Path) -> ParsedRequest:
    return MESSAGES.read_request(path.read_bytes())


def headers_at(path: Path) -> list[tuple[bytes, bytes]]:
    given = json.loads((path.parent / "request.headers.json").read_bytes())
    return [(name.encode(), value.encode()) for name, value in given]


def translated(path: Path, generated: dict[str, str] | None = None) -> dict[str, Any]:
    translation = MESSAGES.translate(parsed_at(path), generated=generated)
    body: dict[str, Any] = json.loads(translation.request.body)
    return body


@pytest.mark.parametrize("path", REQUESTS, ids=name_of)
def test_every_recorded_request_is_translated(path: Path) -> None:
    parsed = parsed_at(path)
    if parsed.get("thread") is not None:
        with pytest.raises(TranslationError, match="threads"):
            MESSAGES.translate(parsed)
        return
    translation = MESSAGES.translate(parsed)
    body = json.loads(translation.request.body)
    assert body["max_tokens"] == parsed.get("max_tokens")
    assert translation.request.stream is parsed.stream
    roles = {message["role"] for message in body["messages"]}
    assert roles <= {"system", "user", "assistant", "tool"}
    called = {c["id"] for m in body["messages"] for c in m.get("tool_calls", ())}
    answered = {m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"}
    assert answered == called
    sent = translation.request.body
    for volatile in (b"x-anthropic-billing-header", b"cache_control", b"defer_loading", b"user_id"):
        assert volatile not in sent
    counted = json.loads(count_request(parsed)[1].body)
    assert counted["messages"] == body["messages"]
    assert counted.get("tools") == body.get("tools")


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_c12_each_call_extends_the_one_before_it_in_its_conversation(case: str) -> None:
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in REQUESTS:
        if name_of(path).rpartition("/")[0] != case:
            continue
        parsed = parsed_at(path)
        labels = labels_of(headers_at(path), parsed)
        if labels.get("kind") != "side":
            calls[labels.get("agent", "")].append(translated(path))
    assert calls
    compared = 0
    for conversation in calls.values():
        for one, two in pairwise(conversation):
            compared += 1
            assert one.get("tools") == two.get("tools")
            count = len(one["messages"])
            assert two["messages"][:count] == one["messages"]
            assert two["messages"][count]["role"] == "assistant"
    assert compared


def test_claude_codes_sub_agent_is_told_apart_from_its_parent() -> None:
    paths = [p for p in REQUESTS if name_of(p).startswith("claude-code/subagent/")]
    labels = [labels_of(headers_at(path), parsed_at(path)) for path in paths]
    session = labels[0]["agent"]
    main = {"agent": session, "kind": "main"}
    child = {"agent": "af91a6ee8f6d398e7", "parent": session, "kind": "subagent"}
    assert labels == [main, child, child, main]


def test_claude_codes_sub_agent_is_known_by_its_billing_line_alone() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cc_is_subagent=true;"
    parsed = MESSAGES.read_request(json.dumps({"system": line, "tools": [{}]}).encode())
    labels = labels_of([(b"X-Claude-Code-Session-Id", b"s")], parsed)
    assert labels == {"parent": "s", "kind": "subagent"}


def test_codex_threads_are_told_apart_and_so_is_its_compaction() -> None:
    def labels_in(case: str) -> list[dict[str, str]]:
        folders = sorted((HARNESS / "codex" / case).glob("*_v1_responses"))
        empty = ParsedRequest(body=b"")
        return [labels_of(headers_at(folder / "request.json"), empty) for folder in folders]

    labels = labels_in("subagent")
    root, child = labels[0]["agent"], labels[2]["agent"]
    assert root != child
    main = {"agent": root, "kind": "main"}
    spawned = {"agent": child, "parent": root, "kind": "subagent"}
    assert labels == [main, main, spawned, spawned, main]
    kinds = [label["kind"] for label in labels_in("compact")]
    assert kinds == ["main", "compaction"] * 4


def test_a_codex_thread_with_a_parent_is_a_sub_agents() -> None:
    headers = [(b"thread-id", b"t2"), (b"x-codex-parent-thread-id", b"t1")]
    labels = labels_of(headers, ParsedRequest(body=b""))
    assert labels == {"agent": "t2", "parent": "t1", "kind": "subagent"}
    reviewed = labels_of(
        [(b"thread-id", b"t2"), (b"x-openai-subagent", b"review")], ParsedRequest(body=b"")
    )
    assert reviewed == {"agent": "t2", "kind": "side"}


def test_opencodes_title_generator_is_a_side_call() -> None:
    folders = sorted((HARNESS / "opencode" / "edit").glob("*_v1_chat_completions"))
    labels = [
        labels_of(headers_at(folder / "request.json"), parsed_at(folder / "request.json"))
        for folder in folders
    ]
    assert [label["kind"] for label in labels] == ["side", "main", "main"]
    assert len({label["agent"] for label in labels}) == 1


def test_opencodes_sub_agent_names_its_parent() -> None:
    headers = [(b"x-session-id", b"ses_2"), (b"x-parent-session-id", b"ses_1")]
    assert labels_of(headers, ParsedRequest(body=b"")) == {
        "agent": "ses_2",
        "parent": "ses_1",
        "kind": "subagent",
    }


def test_other_clients_get_no_labels() -> None:
    headers = [(b"user-agent", b"x"), (b"x-codex-turn-metadata", b"{not json")]
    assert labels_of(headers, ParsedRequest(body=b"")) == {}
