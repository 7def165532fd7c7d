"""Every recorded chat and completions exchange goes through the codecs: same bytes, same tokens."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects import Answer, AnswerTee, ParsedRequest, dialect_for
from agl_core.gateway.dialects.sse import EventSplitter

RECORDINGS = Path(__file__).parents[2] / "data" / "vllm"
PATHS = {"/v1/chat/completions": "chat/completions", "/v1/completions": "completions"}
OURS = ("return_token_ids", "logprobs", "top_logprobs", "stream_options")
WHOLE_TWINS = [
    ("chat_token_ids", "chat_plain"),
    ("chat_tools_auto", "chat_tools_auto_plain"),
    ("chat_unicode", "chat_unicode_plain"),
    ("reasoning_chat", "reasoning_chat_plain"),
    ("completion_token_ids", "completion_plain"),
    ("completion_token_ids_logprobs", "completion_plain"),
]
STREAM_TWINS = [
    ("chat_token_ids_stream", "chat_plain_stream"),
    ("chat_tools_auto_stream", "chat_tools_auto_plain_stream"),
    ("reasoning_chat_stream", "reasoning_chat_plain_stream"),
    ("completion_token_ids_stream", "completion_plain_stream"),
    ("completion_token_ids_logprobs_stream", "completion_plain_stream"),
]


class Recording:
    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.meta = json.loads((folder / "meta.json").read_bytes())
        as_json, as_bytes = folder / "request.json", folder / "request.body"
        path = as_json if as_json.exists() else as_bytes
        self.request = path.read_bytes() if path.exists() else b""
        self.body = (folder / "response.body").read_bytes()
        head = json.loads((folder / "response.headers.json").read_bytes())
        self.status: int = head["status"]
        self.content_type = dict(head["headers"]).get("content-type", "")
        self.dialect = dialect_for(self.meta["method"], PATHS[self.meta["path"]])
        self.is_stream = self.content_type.startswith("text/event-stream")

    @property
    def ended(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    def as_sent_by_the_agent(self) -> ParsedRequest:
        return self.dialect.read_request(self.request)

    def as_if_unasked(self) -> tuple[ParsedRequest, dict[str, Any]]:
        """The request without what a capture needs, and the changes that bring it back."""
        fields = json.loads(self.request)
        for name in OURS:
            fields.pop(name, None)
        parsed = self.dialect.read_request(json.dumps(fields).encode())
        return parsed, self.dialect.reshape(parsed, self.dialect.capture_changes(parsed)).adjusted

    def open(self, parsed: ParsedRequest, adjusted: dict[str, Any]) -> AnswerTee:
        return self.dialect.open_answer(parsed, adjusted, self.status, self.content_type)


def names(*, stream: bool) -> list[str]:
    found = []
    for folder in sorted(RECORDINGS.iterdir()):
        head = folder / "response.headers.json"
        if (
            not head.exists()
            or json.loads((folder / "meta.json").read_bytes())["path"] not in PATHS
        ):
            continue
        if load(folder.name).is_stream == stream:
            found.append(folder.name)
    return found


@cache
def load(name: str) -> Recording:
    return Recording(RECORDINGS / name)


STREAMS = names(stream=True)
WHOLES = names(stream=False)


def run(tee: AnswerTee, pieces: list[bytes]) -> tuple[bytes, Answer]:
    out = b"".join([tee.feed(piece) for piece in pieces])
    return out + tee.finish(), tee.result()


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    lines = [part[6:] for part in body.split(b"\n\n") if part.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def with_usage_chunk(body: bytes) -> bytes:
    """The stream as vLLM sends it with include_usage: the usage chunk takes the fingerprint."""
    chunks = chunks_of(body)
    if not chunks or any("usage" in c or "error" in c for c in chunks) or b"[DONE]" not in body:
        return body
    fingerprint = [c["system_fingerprint"] for c in chunks if "system_fingerprint" in c]
    body = re.sub(rb',"system_fingerprint":"[^"]*"', b"", body)
    ids = [c.get("token_ids") or [] for chunk in chunks for c in chunk["choices"]]
    completion = sum(map(len, ids))
    usage = {
        **{name: chunks[0][name] for name in ("id", "object", "created", "model")},
        "choices": [],
        "usage": {
            "prompt_tokens": 1,
            "total_tokens": 1 + completion,
            "completion_tokens": completion,
        },
    }
    if fingerprint:
        usage["system_fingerprint"] = fingerprint[0]
    line = b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\n"
    return body.replace(b"data: [DONE]\n\n", line + b"data: [DONE]\n\n")


def without_chance(body: bytes) -> bytes:
    """The body without what differs between two equal calls: ids, times, how much was cached."""
    body = re.sub(rb'"id":"(chatcmpl|cmpl)-[^"]*"', b'"id":"-"', body)
    body = re.sub(rb'"(cached_tokens|created_cache_tokens)":\d+', rb'"\1":0', body)
    return re.sub(rb'"created":\d+', b'"created":0', body)


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if "token_logprobs" in logprobs:
        return logprobs["token_logprobs"]
    return [item["logprob"] for item in logprobs.get("content") or ()]


def test_the_recordings_are_there() -> None:
    assert len(STREAMS) >= 55
    assert len(WHOLES) >= 90


@pytest.mark.parametrize("name", STREAMS)
def test_c25_every_split_in_two_gives_the_same_events(name: str) -> None:
    body = load(name).body
    splitter = EventSplitter()
    expected = splitter.feed(body)
    assert b"".join(expected) + splitter.rest == body
    for at in range(0, len(body), 1 if len(body) < 30_000 else 11):
        splitter = EventSplitter()
        events = splitter.feed(body[:at]) + splitter.feed(body[at:])
        assert events == expected


@pytest.mark.parametrize("unasked", [False, True], ids=["own", "ours"])
@pytest.mark.parametrize("name", STREAMS)
def test_c25_any_split_gives_the_same_bytes_and_the_same_record(name: str, unasked: bool) -> None:
    case = load(name)
    parsed, adjusted = case.as_if_unasked() if unasked else (case.as_sent_by_the_agent(), {})
    body = with_usage_chunk(case.body) if unasked else case.body
    expected = run(case.open(parsed, adjusted), [body])
    for at in range(1, len(body), max(1, len(body) // 40)):
        assert run(case.open(parsed, adjusted), [body[:at], body[at:]]) == expected
    one_by_one = [body[at : at + 1] for at in range(len(body))]
    assert run(case.open(parsed, adjusted), one_by_one) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_what_the_agent_asked_for_itself_passes_byte_for_byte(name: str) -> None:
    case = load(name)
    tee = case.open(case.as_sent_by_the_agent(), {})
    sent = tee.feed(case.body)
    held = tee.held
    assert sent + tee.finish() == case.body
    assert tee.complete == case.ended
    if case.ended and not tee.aborted:
        assert held == b"data: [DONE]\n\n"


@pytest.mark.parametrize("name", STREAMS)
def test_a_streams_tokens_are_those_of_the_recording(name: str) -> None:
    case = load(name)
    _out, answer = run(case.open(case.as_sent_by_the_agent(), {}), [case.body])
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    prompts: dict[int, list[int]] = {}
    for chunk in chunks_of(case.body):
        for choice in chunk.get("choices", ()):
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            logprobs.setdefault(choice["index"], []).extend(logprobs_of(choice))
            prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt:
                prompts[choice["index"]] = prompt
    assert {c["index"]: c["token_ids"] or [] for c in answer.choices} == ids
    assert {c["index"]: c["logprobs"] or [] for c in answer.choices} == logprobs
    assert {c["index"]: c["prompt_token_ids"] for c in answer.choices if c["prompt_token_ids"]} == (
        prompts
    )
    assert answer.flags == []


@pytest.mark.parametrize("name", STREAMS)
def test_c18_the_agent_of_a_stream_sees_nothing_that_only_we_asked_for(name: str) -> None:
    case = load(name)
    parsed, adjusted = case.as_if_unasked()
    if parsed.echo and case.dialect.api == "completions":
        assert "return_token_ids" not in adjusted
        return
    out, answer = run(case.open(parsed, adjusted), [with_usage_chunk(case.body)])
    for chunk in chunks_of(out):
        assert chunk.get("prompt_token_ids") is None
        assert "usage" not in chunk
        if "error" not in chunk:
            assert chunk["choices"]
        for choice in chunk.get("choices", ()):
            assert choice.get("token_ids") is None
            assert choice.get("prompt_token_ids") is None
            assert choice["logprobs"] is None
    recorded = chunks_of(case.body)
    texts = [
        c.get("delta") or c.get("text") for chunk in recorded for c in chunk.get("choices", ())
    ]
    seen = [c.get("delta") or c.get("text") for o in chunks_of(out) for c in o.get("choices", ())]
    assert [text for text in seen if text] == [text for text in texts if text]
    own = run(case.open(case.as_sent_by_the_agent(), {}), [case.body])[1]
    assert [c["token_ids"] for c in answer.choices] == [c["token_ids"] for c in own.choices]
    assert [c["logprobs"] for c in answer.choices] == [c["logprobs"] for c in own.choices]


@pytest.mark.parametrize(("name", "twin"), STREAM_TWINS)
def test_a_captured_stream_is_its_plain_twin(name: str, twin: str) -> None:
    case = load(name)
    parsed, adjusted = case.as_if_unasked()
    out, _answer = run(case.open(parsed, adjusted), [with_usage_chunk(case.body)])
    assert without_chance(out) == without_chance(load(twin).body)


@pytest.mark.parametrize(("name", "twin"), WHOLE_TWINS)
def test_a_captured_whole_answer_is_its_plain_twin(name: str, twin: str) -> None:
    case = load(name)
    out = case.open(*case.as_if_unasked()).whole(case.body)
    assert without_chance(out) == without_chance(load(twin).body)


@pytest.mark.parametrize("name", WHOLES)
def test_a_whole_answers_tokens_are_those_of_the_recording(name: str) -> None:
    case = load(name)
    tee = case.open(case.as_sent_by_the_agent(), {})
    assert tee.whole(case.body) == case.body
    assert tee.complete
    answer = tee.result()
    recorded = json.loads(case.body)
    assert answer.response == recorded
    assert answer.error == recorded.get("error", None if case.status < 400 else recorded)
    assert answer.usage == recorded.get("usage")
    choices = recorded.get("choices") or []
    assert [c["token_ids"] for c in answer.choices] == [c.get("token_ids") for c in choices]
    if not tee_echoes(case):
        assert [c["logprobs"] or [] for c in answer.choices] == list(map(logprobs_of, choices))
    for seen, choice in zip(answer.choices, choices, strict=True):
        assert seen["prompt_token_ids"] == (
            recorded.get("prompt_token_ids") or choice.get("prompt_token_ids")
        )
        if choice.get("token_ids") is None:
            assert seen["tokens"] == "absent"
        else:
            assert seen["tokens"] == ("complete" if seen["logprobs"] else "incomplete")


def tee_echoes(case: Recording) -> bool:
    return case.as_sent_by_the_agent().echo


@pytest.mark.parametrize("name", WHOLES)
def test_the_agent_of_a_whole_answer_sees_nothing_that_only_we_asked_for(name: str) -> None:
    case = load(name)
    if case.status >= 400:
        tee = case.open(case.as_sent_by_the_agent(), {"return_token_ids": True, "logprobs": True})
        assert tee.whole(case.body) == case.body
        assert tee.result().error is not None
        return
    parsed, adjusted = case.as_if_unasked()
    if parsed.echo:
        adjusted = {"return_token_ids": True, "logprobs": 0}
    shown = json.loads(case.open(parsed, adjusted).whole(case.body))
    expected = json.loads(case.body)
    if "prompt_token_ids" in expected:
        expected["prompt_token_ids"] = None
    for choice in expected["choices"]:
        choice["token_ids"] = choice["logprobs"] = None
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
    assert shown == expected


def greedy_twins() -> list[str]:
    """Streams whose whole twin was answered and, at temperature 0, says the same."""
    twins = [name for name in STREAMS if name.removesuffix("_stream") in WHOLES]
    requests = {name: json.loads(load(name.removesuffix("_stream")).request) for name in twins}
    return [
        name
        for name in twins
        if load(name.removesuffix("_stream")).status == 200 and requests[name]["temperature"] == 0
    ]


@pytest.mark.parametrize("name", greedy_twins())
def test_an_assembled_stream_is_the_whole_answer(name: str) -> None:
    case, twin = load(name), load(name.removesuffix("_stream"))
    _out, answer = run(case.open(case.as_sent_by_the_agent(), {}), [case.body])
    whole = json.loads(twin.body)
    assert len(answer.response["choices"]) == len(whole["choices"])
    for seen, choice in zip(answer.response["choices"], whole["choices"], strict=True):
        assert seen["index"] == choice["index"]
        assert seen["finish_reason"] == choice["finish_reason"]
        assert seen["stop_reason"] == choice["stop_reason"]
        assert seen["logprobs"] == choice["logprobs"]
        assert seen.get("token_ids") == choice.get("token_ids")
        if "text" in choice:
            assert seen["text"] == choice["text"]
            continue
        message = {k: v for k, v in choice["message"].items() if v is not None}
        mine = {k: v for k, v in seen["message"].items() if v is not None}
        if "tool_calls" in message and message.get("content") == "":
            # Named and required tool choice have "" where auto has null; a stream does not tell.
            del message["content"]
        for calls in (message.get("tool_calls", ()), mine.get("tool_calls", ())):
            for call in calls:
                call["id"] = "-"
        assert mine == message
    assert answer.response["model"] == whole["model"]
    assert answer.response["object"] == whole["object"]


@pytest.mark.parametrize("name", [*STREAMS, *WHOLES])
def test_changing_a_request_keeps_every_other_value(name: str) -> None:
    case = load(name)
    parsed = case.as_sent_by_the_agent()
    reshaped = case.dialect.reshape(parsed, case.dialect.capture_changes(parsed))
    if parsed.fields is None:
        assert reshaped.body == case.request
        return
    before, after = json.loads(case.request), json.loads(reshaped.body)
    assert {**before, **reshaped.adjusted} == after
    assert list(after)[: len(before)] == list(before)
    again = case.dialect.read_request(reshaped.body)
    assert case.dialect.capture_changes(again) == {}
