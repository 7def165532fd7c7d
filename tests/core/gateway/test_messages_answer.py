"""A chat answer becomes the message, or the events of one, that vLLM's own route gives."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.gateway.dialects.messages import MessagesDialect, count_answer, count_request
from agl_core.gateway.dialects.translation import TranslatedTee, Translation
from agl_core.testing.translated import (
    JSON_TYPE,
    STREAM_TYPE,
    open_captured,
    read_events,
    with_usage,
)

DATA = Path(__file__).parents[2] / "data"
VLLM, REPLAY = DATA / "vllm", DATA / "harness" / "vllm-replay"
MESSAGES = MessagesDialect()
TWINS = [
    ("messages_plain", "chat_plain"),
    ("messages_tools", "chat_tools_auto"),
    ("messages_tool_result", "chat_tool_result"),
    ("reasoning_messages", "reasoning_chat"),
]
STREAM_TWINS = [
    ("messages_plain_stream", "chat_plain_stream", "chat_plain", "absent"),
    ("messages_tools_stream", "chat_tools_auto_stream", "chat_tools_auto", "complete"),
    ("reasoning_messages_stream", "reasoning_chat_stream", "reasoning_chat", "complete"),
]
DONE = b"data: [DONE]\n\n"


def translate(**fields: Any) -> Translation:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    return MESSAGES.translate(MESSAGES.read_request(json.dumps({**body, **fields}).encode()))


def body_of(case: str) -> bytes:
    return (VLLM / case / "response.body").read_bytes()


def usage_of(case: str) -> dict[str, Any]:
    usage: dict[str, Any] = json.loads(body_of(case))["usage"]
    return usage


def streamed(body: bytes, **fields: Any) -> tuple[TranslatedTee, list[tuple[str, dict[str, Any]]]]:
    tee = open_captured(translate(stream=True, **fields))
    return tee, read_events(tee.feed(body) + tee.finish())


def whole(body: bytes, status: int = 200) -> tuple[TranslatedTee, dict[str, Any]]:
    tee = open_captured(translate(), JSON_TYPE, status)
    shown: dict[str, Any] = json.loads(tee.whole(body))
    return tee, shown


def stream_of(*chunks: dict[str, Any], end: bytes = DONE) -> bytes:
    lines = [b"data: " + json.dumps({"id": "c-1", "model": "x", **c}).encode() for c in chunks]
    return b"".join(line + b"\n\n" for line in lines) + end


def delta(finish: str | None = None, stop: Any = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": fields, "finish_reason": finish, "stop_reason": stop}
    return {"choices": [choice]}


def call(index: int | None, arguments: str = "", **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, "function": {**name, "arguments": arguments}, **more}


def answer_with(message: dict[str, Any], **more: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": "stop", **more}
    return json.dumps({"id": "c-1", "model": "x", "choices": [choice], "usage": {}}).encode()


def without_ids(value: Any) -> Any:
    """Leave out what differs between any two calls: ids, signatures, what was cached."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: without_ids(v) for k, v in value.items() if k not in ("id", "signature", "usage")}
    usage = value.get("usage")
    if usage is not None:
        kept["tokens"] = (usage["input_tokens"] + _cached(usage), usage["output_tokens"])
    return kept


def _cached(usage: dict[str, Any]) -> int:
    names = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in names)


def blocks(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Put each block together from its events: its kind, then its text."""
    found: list[str] = []
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(found), "a block starts before the one before has ended"
            found.append(data["content_block"].get("name", data["content_block"]["type"]) + ":")
        elif name == "content_block_delta":
            assert data["index"] == len(found) - 1
            text = {k: v for k, v in data["delta"].items() if k not in ("type", "signature")}
            found[-1] += "".join(text.values())
        elif name == "content_block_stop":
            assert data["index"] == len(found) - 1
            found[-1] += "."
    return found


# Whole answers


@pytest.mark.parametrize(("case", "twin"), TWINS)
def test_a_whole_answer_is_that_of_vllms_own_route(case: str, twin: str) -> None:
    _tee, shown = whole(body_of(twin))
    wanted = json.loads(body_of(case))
    assert without_ids(shown) == without_ids({**wanted, "model": "m", "stop_sequence": None})


def test_usage_is_that_of_vllms_own_route_where_the_cache_was_read() -> None:
    told = usage_of("chat_tool_result")
    assert told["prompt_tokens_details"]["cached_tokens"] == 256
    assert (
        whole(body_of("chat_tool_result"))[1]["usage"]
        == json.loads(body_of("messages_tool_result"))["usage"]
    )


def test_c26_a_count_of_zero_is_told_and_an_absent_one_is_not() -> None:
    known = whole(body_of("chat_plain"))[1]["usage"]
    assert known["cache_read_input_tokens"] == 0
    unknown = whole(body_of("reasoning_chat"))[1]["usage"]
    assert unknown == json.loads(body_of("reasoning_messages"))["usage"]


def test_the_record_has_the_tokens_and_the_answer_as_the_agent_got_it() -> None:
    tee, shown = whole(body_of("chat_tools_auto"))
    answer = tee.result()
    assert answer.response == shown
    assert [choice["tokens"] for choice in answer.choices] == ["complete"]
    assert answer.usage == usage_of("chat_tools_auto")
    assert b"token_ids" not in json.dumps(shown).encode()
    call_id = shown["content"][0]["id"]
    assert tee.generated == {call_id: '{"city": "Berlin", "unit": "celsius"}'}


def test_ids_are_the_messages_own_and_the_same_each_time() -> None:
    first, second = (whole(body_of("reasoning_chat"))[1] for _ in range(2))
    assert first == second
    assert first["id"].startswith("msg_")
    assert first["content"][0]["signature"]
    assert first["id"] != whole(body_of("chat_plain"))[1]["id"]


@pytest.mark.parametrize(
    ("finish", "stop", "wanted"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 2, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
        (None, None, ("end_turn", None)),
    ],
)
def test_stop_reasons(finish: str | None, stop: Any, wanted: tuple[str, str | None]) -> None:
    body = answer_with({"content": "x"}, finish_reason=finish, stop_reason=stop)
    shown = whole(body)[1]
    assert (shown["stop_reason"], shown["stop_sequence"]) == wanted
    events = streamed(stream_of(delta(content="x"), delta(finish, stop)))[1]
    last = next(data["delta"] for name, data in events if name == "message_delta")
    assert (last["stop_reason"], last["stop_sequence"]) == wanted


def test_a_recorded_stop_string_is_told() -> None:
    shown = whole(body_of("chat_stop"))[1]
    assert (shown["stop_reason"], shown["stop_sequence"]) == ("stop_sequence", "server")


def test_a_call_is_a_tool_use_also_where_the_server_says_stop() -> None:
    # vLLM does where the tool was named in the request.
    assert json.loads(body_of("chat_tools_named"))["choices"][0]["finish_reason"] == "stop"
    assert whole(body_of("chat_tools_named"))[1]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", "null"])
def test_arguments_that_are_no_object_are_kept_raw(arguments: str) -> None:
    calls = [{"id": "t", "function": {"name": "f", "arguments": arguments}}]
    shown = whole(answer_with({"content": None, "tool_calls": calls}))[1]
    raw = {"raw": arguments, "len": len(arguments)}
    assert shown["content"][0]["input"] == {"__unparsedToolInput": raw}


def test_no_arguments_are_an_empty_object() -> None:
    calls = [{"id": None, "function": {"name": "f", "arguments": ""}}]
    block = whole(answer_with({"content": None, "tool_calls": calls}))[1]["content"][0]
    assert block["input"] == {}
    assert block["id"].startswith("toolu_")


# Streams


@pytest.mark.parametrize(("case", "twin", "total", "proof"), STREAM_TWINS)
def test_a_stream_is_event_for_event_that_of_vllms_own_route(
    case: str, twin: str, total: str, proof: str
) -> None:
    tee, events = streamed(with_usage(body_of(twin), usage_of(total)))
    wanted = read_events(body_of(case))
    assert [name for name, _ in events] == [name for name, _ in wanted]
    for (name, data), (_, told) in zip(events, wanted, strict=True):
        if name == "message_start":
            told["message"]["model"] = "m"
        assert data["type"] == name
        assert without_ids(data) == without_ids(told)
        assert list(data) == list(told)
    assert tee.complete
    answer = tee.result()
    assert [choice["tokens"] for choice in answer.choices] == [proof]
    assert without_ids(answer.response) == without_ids(whole(body_of(total))[1])


@pytest.mark.parametrize(
    "case", ["chat_tools_auto_parallel_stream", "reasoning_chat_stream", "chat_emoji_stream"]
)
@given(data=st.data())
def test_any_split_of_the_bytes_gives_the_same_events(case: str, data: st.DataObject) -> None:
    body = with_usage(body_of(case), {"prompt_tokens": 3, "completion_tokens": 4})
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=20)))
    tee = open_captured(translate(stream=True))
    out = [tee.feed(body[a:b]) for a, b in pairwise([0, *cuts, len(body)])]
    for part in out:
        read_events(part)
    at_once = open_captured(translate(stream=True))
    assert b"".join(out) + tee.finish() == at_once.feed(body) + at_once.finish()
    assert tee.result() == at_once.result()


def test_what_was_said_goes_out_at_once_and_the_end_is_held() -> None:
    tee = open_captured(translate(stream=True))
    body = with_usage(body_of("chat_token_ids_logprobs_stream"), usage_of("chat_plain"))
    before, end = body[: -len(DONE)], DONE
    shown = read_events(tee.feed(before))
    assert shown[-1][0] == "content_block_stop"
    assert tee.first_token_seen
    assert not tee.complete
    assert tee.feed(end) == b""
    assert tee.complete
    assert [name for name, _ in read_events(tee.held)] == ["message_delta", "message_stop"]
    held = tee.held
    assert tee.finish() == held
    assert tee.result().response["stop_reason"] == "end_turn"


def test_a_stream_that_broke_off_gets_no_end() -> None:
    body = with_usage(body_of("chat_token_ids_logprobs_stream"), usage_of("chat_plain"))
    tee, events = streamed(body[: len(body) // 2])
    assert not tee.complete
    assert not tee.ends_mid_event
    assert {name for name, _ in events} == {
        "message_start",
        "content_block_start",
        "content_block_delta",
    }
    assert tee.result().response["stop_reason"] is None
    assert [choice["tokens"] for choice in tee.result().choices] == ["incomplete"]


def test_an_abort_is_no_end() -> None:
    tee = open_captured(translate(stream=True))
    tee.feed(body_of("paused_abort_stream"))
    assert tee.aborted
    assert tee.held == b""
    assert "message_stop" not in [name for name, _ in read_events(tee.finish())]


def test_an_error_inside_the_stream_is_the_dialects_error_event() -> None:
    tee, events = streamed(body_of("kill_engine_stream"))
    assert events[-1] == (
        "error",
        {
            "type": "error",
            "error": {
                "type": "api_error",
                "message": "EngineCore encountered an issue. "
                "See stack trace (above) for the root cause.",
            },
        },
    )
    assert tee.complete
    assert tee.result().error["code"] == 500


def test_an_error_before_anything_else_is_the_only_event() -> None:
    tee, events = streamed(body_of("error_top_logprobs_many_stream"))
    assert [(name, data["error"]["type"]) for name, data in events] == [
        ("error", "invalid_request_error")
    ]
    assert tee.result().response is None


def test_nothing_follows_an_error() -> None:
    _tee, events = streamed(
        stream_of(delta(content="a"), {"error": {"message": "x"}}, delta("stop", content="b"))
    )
    assert [name for name, _ in events][-1] == "error"
    assert blocks(events) == ["text:a"]


def test_only_the_first_choice_is_the_message() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": None}]}
    _tee, events = streamed(stream_of(delta(content="a"), other, delta("stop")))
    assert blocks(events) == ["text:a."]


def test_an_empty_answer_is_a_whole_message() -> None:
    _tee, events = streamed(stream_of(delta(role="assistant", content=""), delta("stop")))
    assert [name for name, _ in events] == ["message_start", "message_delta", "message_stop"]
    assert events[1][1]["usage"] == {"input_tokens": 0, "output_tokens": 0}


# Tool calls in streams


def test_recorded_parallel_calls_are_blocks_of_their_own() -> None:
    _tee, events = streamed(body_of("chat_tools_auto_parallel_stream"))
    assert blocks(events) == [
        'get_weather:{"city": "Paris", "unit": "celsius"}.',
        'get_weather:{"city": "Berlin", "unit": "celsius"}.',
    ]


def test_c21_calls_in_one_chunk_and_mixed_deltas_are_kept_apart() -> None:
    _tee, events = streamed(
        stream_of(
            delta(
                tool_calls=[
                    call(0, '{"path":', id="a", name="read"),
                    call(1, '{"path":', id="b", name="write"),
                ]
            ),
            delta(tool_calls=[call(1, '"b.rs"}'), call(0, '"a.rs"}')]),
            delta("tool_calls"),
        )
    )
    assert blocks(events) == ['read:{"path":"a.rs"}.', 'write:{"path":"b.rs"}.']


def test_c21_another_id_at_the_same_index_is_another_call() -> None:
    tee, events = streamed(
        stream_of(
            delta(tool_calls=[call(0, "{}", id="a", name="one")]),
            delta(tool_calls=[call(0, '{"x":', id="b", name="two")]),
            delta(tool_calls=[call(0, "1}")]),
            delta("tool_calls"),
        )
    )
    assert blocks(events) == ["one:{}.", 'two:{"x":1}.']
    assert tee.generated == {"a": "{}", "b": '{"x":1}'}


def test_a_delta_without_index_and_id_goes_on_with_the_last_call() -> None:
    _tee, events = streamed(
        stream_of(
            delta(tool_calls=[call(0, '{"x":', id="a", name="one")]),
            delta(tool_calls=[call(None, "1}")]),
            delta("tool_calls"),
        )
    )
    assert blocks(events) == ['one:{"x":1}.']


def test_a_call_is_sent_while_it_is_written() -> None:
    tee = open_captured(translate(stream=True))
    tee.feed(stream_of(delta(role="assistant"), end=b""))
    first = tee.feed(stream_of(delta(tool_calls=[call(0, '{"x', id="a", name="f")]), end=b""))
    assert [name for name, _ in read_events(first)] == [
        "content_block_start",
        "content_block_delta",
    ]
    second = tee.feed(stream_of(delta(tool_calls=[call(0, '": 1}')]), end=b""))
    assert read_events(second)[0][1]["delta"]["partial_json"] == '": 1}'


def test_calls_without_arguments_and_text_between_them() -> None:
    _tee, events = streamed(
        stream_of(
            delta(content="I do."),
            delta(tool_calls=[call(0, id="a", name="list")]),
            delta(content="And:"),
            delta(tool_calls=[call(1, "{}", id="b", name="read")]),
            delta("tool_calls"),
        )
    )
    assert blocks(events) == ["text:I do..", "list:.", "text:And:.", "read:{}."]


def test_a_cut_call_is_passed_on_as_it_is() -> None:
    tee, events = streamed(
        stream_of(delta(tool_calls=[call(0, '{"a": "b', id="a", name="f")]), delta("length"))
    )
    assert blocks(events) == ['f:{"a": "b.']
    assert events[-2][1]["delta"]["stop_reason"] == "max_tokens"
    assert "__unparsedToolInput" in tee.result().response["content"][0]["input"]


def test_reasoning_by_its_other_name_is_thinking() -> None:
    _tee, events = streamed(stream_of(delta(reasoning_content="Hm."), delta("stop", content="A")))
    assert blocks(events) == ["thinking:Hm..", "text:A."]
    assert events[3][1]["delta"]["type"] == "signature_delta"


# Errors


@pytest.mark.parametrize(
    ("case", "status", "kind"),
    [
        ("error_context_prompt", 400, "invalid_request_error"),
        ("error_unknown_model", 404, "not_found_error"),
        ("auth_missing", 401, "authentication_error"),
    ],
)
def test_an_error_answer_keeps_its_text(case: str, status: int, kind: str) -> None:
    folder = VLLM / case
    body = (
        (folder / "response.body").read_bytes() if folder.exists() else b'{"error":"Unauthorized"}'
    )
    tee, shown = whole(body, status)
    told = json.loads(body)["error"]
    message = told if isinstance(told, str) else told["message"]
    assert shown == {"type": "error", "error": {"type": kind, "message": message}}
    assert tee.result().response == shown
    assert tee.result().error is not None


def test_the_text_that_makes_harnesses_compact_is_that_of_vllms_own_route() -> None:
    body = (REPLAY / "too_long_messages" / "response.body").read_bytes()
    told = json.loads(body)["error"]["message"]
    chat = json.dumps({"error": {"message": told, "type": "BadRequestError", "code": 400}})
    shown = whole(chat.encode(), 400)[1]
    assert "maximum context length" in shown["error"]["message"]
    assert shown["error"]["message"] == told


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), (529, "overloaded_error")],
)
def test_overload_is_told_by_its_type(status: int, kind: str) -> None:
    shown = whole(b'{"error": {"message": "busy", "code": 500}}', status)[1]
    assert shown["error"] == {"type": kind, "message": "busy"}


def test_a_body_that_is_no_json_is_wrapped() -> None:
    tee, shown = whole(b"<html>Bad Gateway</html>", 502)
    assert shown["error"] == {"type": "api_error", "message": "<html>Bad Gateway</html>"}
    assert tee.content_type == "application/json"
    assert whole(b"", 502)[1]["error"]["message"] == "the model server answered 502"


def test_an_error_to_a_stream_is_a_whole_body() -> None:
    tee = open_captured(translate(stream=True), JSON_TYPE, 400)
    assert not tee.is_stream
    assert json.loads(tee.whole(b'{"error": {"message": "no"}}'))["error"]["message"] == "no"


def test_a_whole_answer_to_a_stream_that_was_asked_for_is_a_message() -> None:
    tee = open_captured(translate(stream=True), JSON_TYPE)
    assert json.loads(tee.whole(body_of("chat_plain")))["type"] == "message"
    assert open_captured(translate(stream=True), STREAM_TYPE).content_type == STREAM_TYPE


# Counting tokens


def test_c86_counting_is_asked_of_the_very_prompt_of_the_call() -> None:
    request = json.loads((VLLM / "messages_tool_result" / "request.json").read_bytes())
    request["system"] = [{"type": "text", "text": "x-anthropic-billing-header: 1\nBe short."}]
    call_body = MESSAGES.translate(MESSAGES.read_request(json.dumps(request).encode())).request
    request.pop("max_tokens")
    path, counted = count_request(MESSAGES.read_request(json.dumps(request).encode()))
    assert path == "tokenize"
    sent, wanted = json.loads(counted.body), json.loads(call_body.body)
    assert sent == {
        "model": wanted["model"],
        "messages": wanted["messages"],
        "tools": wanted["tools"],
        "add_generation_prompt": True,
    }


def test_c86_the_count_of_a_recorded_call_is_its_prompts_length() -> None:
    given = json.loads((VLLM / "messages_count_tokens" / "request.json").read_bytes())
    _path, counted = count_request(MESSAGES.read_request(json.dumps(given).encode()))
    assert json.loads(counted.body) == json.loads(
        (VLLM / "tokenize_chat" / "request.json").read_bytes()
    )
    status, body = count_answer(200, body_of("tokenize_chat"))
    assert status == 200
    told = json.loads(body)
    assert told == {"input_tokens": 26}
    assert told["input_tokens"] == json.loads(body_of("messages_count_tokens"))["input_tokens"]
    prompt = json.loads(body_of("chat_max_tokens_1"))["prompt_token_ids"]
    assert told["input_tokens"] == len(prompt)


def test_what_the_template_reads_is_counted_too() -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    parsed = MESSAGES.read_request(
        json.dumps(
            {
                **request,
                "output_config": {"effort": "low"},
                "chat_template_kwargs": {"enable_thinking": True},
            }
        ).encode()
    )
    sent = json.loads(count_request(parsed)[1].body)
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}


def test_counting_errors_are_the_dialects() -> None:
    status, body = count_answer(404, b'{"error": {"message": "no model", "code": 404}}')
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
    status, body = count_answer(200, b"[]")
    assert (status, json.loads(body)["error"]["type"]) == (502, "api_error")
