"""What an agent gets for a Responses request, compared with vLLM's own answers on that route."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects.chat import ChatDialect
from agl_core.gateway.dialects.responses import ResponsesDialect, ResponsesTee
from agl_core.gateway.dialects.translation import Translation

DATA = Path(__file__).parents[2] / "data"
VLLM, HARNESS = DATA / "vllm", DATA / "harness"
CHAT, DIALECT = ChatDialect(), ResponsesDialect()
SSE, JSON = "text/event-stream; charset=utf-8", "application/json"
# vLLM's own route, and the same conversation on its chat route, as a capture asks for it.
WHOLE_TWINS = [
    ("responses_plain", "chat_plain"),
    ("responses_plain", "chat_token_ids"),
    ("responses_tools", "chat_tools_auto"),
    ("reasoning_responses", "reasoning_chat"),
]
STREAM_TWINS = [
    ("responses_plain_stream", "chat_plain_stream"),
    ("responses_plain_stream", "chat_token_ids_stream"),
    ("responses_plain_stream", "chat_usage"),
    ("responses_messages_stream", "chat_plain_stream"),
    ("reasoning_responses_stream", "reasoning_chat_stream"),
    ("reasoning_responses_stream", "reasoning_chat_plain_stream"),
]
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
CUSTOM = {"type": "custom", "name": "exec", "format": {"type": "text"}}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def vllm(case: str, name: str = "response.body") -> bytes:
    return (VLLM / case / name).read_bytes()


def translate(asked: dict[str, Any], dialect: ResponsesDialect = DIALECT) -> Translation:
    return dialect.translate(dialect.read_request(json.dumps(asked).encode()))


def open_tee(
    asked: dict[str, Any],
    *,
    status: int = 200,
    content_type: str = SSE,
    dialect: ResponsesDialect = DIALECT,
) -> ResponsesTee:
    translation = translate(asked, dialect)
    request = translation.request
    adjusted = CHAT.reshape(request, CHAT.capture_changes(request)).adjusted
    tee = translation.open_answer(adjusted, status, content_type)
    assert isinstance(tee, ResponsesTee)
    return tee


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        named, _, data = block.rpartition("data: ")
        event = json.loads(data)
        # The recorded error event has no line of its own.
        assert named == f"event: {event['type']}\n" or (not named and event["type"] == "error")
        events.append(event)
    return events


def streamed(asked: dict[str, Any], chat_stream: bytes, **how: Any) -> list[dict[str, Any]]:
    tee = open_tee(asked | {"stream": True}, **how)
    events = events_of(tee.feed(chat_stream) + tee.finish())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def whole(asked: dict[str, Any], body: bytes, status: int = 200) -> dict[str, Any]:
    return json.loads(open_tee(asked, status=status, content_type=JSON).whole(body))


def chunk(delta: dict[str, Any] | None = None, **choice: Any) -> bytes:
    more = {name: choice.pop(name) for name in ("usage",) if name in choice}
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": None, **choice}]
    data = {"id": "chatcmpl-1", "created": 7, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def call_chunk(index: int, *, call_id: str | None = None, **function: str) -> bytes:
    made: dict[str, Any] = {"index": index, "function": function}
    return chunk({"tool_calls": [made | ({"id": call_id, "type": "function"} if call_id else {})]})


def chat_stream(*chunks: bytes, finish: str = "stop") -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    end = [chunk(finish_reason=finish), b'data: {"id": "chatcmpl-1", "choices": [], "usage": ']
    return b"".join([chunk({"role": "assistant", "content": ""}), *chunks, *end]) + (
        json.dumps(usage).encode() + b"}\n\ndata: [DONE]\n\n"
    )


def same(value: Any) -> Any:
    """A value without what differs between two runs: ids, times, and our additional fields."""
    if isinstance(value, dict):
        changed = {"created_at": 0, "sequence_number": 0, "call_id": "call"}
        left_out = {"error", "async", "caller", "allowed_callers", "defer_loading", "output_schema"}
        return {
            name: changed.get(name, same(inner))
            for name, inner in value.items()
            if name not in left_out and not (name == "namespace" and inner is None)
        }
    if isinstance(value, list):
        return [same(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"^(resp|msg|fc|rs|ctc)_[0-9a-f]+$", r"\1", value)
    return value


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with the pieces of one text joined: how it was cut depends on the server's load."""
    out: list[dict[str, Any]] = []
    for event in map(same, events):
        if out and event["type"].endswith(".delta") and out[-1]["type"] == event["type"]:
            out[-1]["delta"] += event["delta"]
        else:
            out.append(event)
    return out


def without_token_counts(value: Any) -> Any:
    """The usage details depend on the engine's prefix cache when each twin was recorded."""
    if isinstance(value, dict) and "usage" in value and value["usage"]:
        details = value["usage"]["input_tokens_details"] | {"cached_tokens": 0}
        value = value | {"usage": value["usage"] | {"input_tokens_details": details}}
    return value


def with_usage(stream: bytes, case: str) -> bytes:
    """The recorded chat streams were not asked for usage; a translated one always is."""
    if b'"usage"' in stream:
        return stream
    usage = json.loads(vllm(case.removesuffix("_stream")))["usage"]
    line = json.dumps({"id": "chatcmpl-x", "choices": [], "usage": usage}).encode()
    return stream.replace(b"data: [DONE]", b"data: " + line + b"\n\ndata: [DONE]")


# Whole answers


@pytest.mark.parametrize(("own", "chat"), WHOLE_TWINS)
def test_a_whole_answer_is_vllms_own(own: str, chat: str) -> None:
    ours = whole(json.loads(vllm(own, "request.json")), vllm(chat))
    theirs = json.loads(vllm(own))
    assert set(ours) - set(theirs) == {"error"}
    assert without_token_counts(same(ours)) == without_token_counts(same(theirs))


def test_the_logprobs_of_a_whole_answer_have_vllms_form() -> None:
    asked = json.loads(vllm("responses_logprobs", "request.json"))
    (item,) = whole(asked, vllm("chat_logprobs"))["output"]
    theirs = json.loads(vllm("responses_logprobs"))["output"][0]["content"][0]["logprobs"]
    ours = item["content"][0]["logprobs"]
    # The chat twin was recorded with one more alternative.
    assert [{**t, "top_logprobs": t["top_logprobs"][:2]} for t in ours] == [
        {**t, "top_logprobs": t["top_logprobs"][:2]} for t in theirs
    ]


def test_logprobs_that_only_the_capture_asked_for_are_not_shown() -> None:
    tee = open_tee({"input": "Hello!"}, content_type=JSON)
    answer = json.loads(tee.whole(vllm("chat_token_ids_logprobs")))
    assert answer["output"][0]["content"][0]["logprobs"] is None
    assert "token_ids" not in json.dumps(answer)
    (choice,) = tee.result().choices
    assert choice["tokens"] == "complete"


def test_a_cut_answer_is_incomplete() -> None:
    answer = whole({"input": "x"}, vllm("chat_length"))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][-1]["status"] == "incomplete"


def test_calls_in_parallel_are_items_of_their_own() -> None:
    answer = whole({"input": "x", "tools": [FUNCTION]}, vllm("chat_tools_auto_parallel"))
    message = json.loads(vllm("chat_tools_auto_parallel"))["choices"][0]["message"]
    assert [
        (item["call_id"], item["name"], item["arguments"])
        for item in answer["output"]
        if item["type"] == "function_call"
    ] == [
        (made["id"], made["function"]["name"], made["function"]["arguments"])
        for made in message["tool_calls"]
    ]
    assert len({item["id"] for item in answer["output"]}) == len(answer["output"])


def test_an_empty_answer_has_no_items() -> None:
    body = {"id": "c", "choices": [{"index": 0, "message": {"content": ""}}]}
    answer = whole({"model": "m", "input": "x"}, json.dumps(body).encode())
    assert (answer["output"], answer["status"], answer["usage"]) == ([], "completed", None)


def test_the_answer_repeats_what_was_asked() -> None:
    asked = {
        "model": "alias",
        "input": "x",
        "metadata": {"run": "7"},
        "instructions": "Be short.",
        "temperature": 0.5,
        "tools": [FUNCTION],
        "tool_choice": "required",
        "text": {"verbosity": "low"},
        "user": "me",
    }
    answer = whole(asked, vllm("chat_tools_auto"))
    for name in ("model", "metadata", "instructions", "temperature", "tool_choice", "user"):
        assert answer[name] == asked[name]
    assert answer["text"] == {"format": None, "verbosity": "low"}
    assert answer["tools"] == [FUNCTION | {"strict": None, "description": None}]


# Streams


@pytest.mark.parametrize(("own", "chat"), STREAM_TWINS)
def test_a_stream_is_vllms_own_event_for_event(own: str, chat: str) -> None:
    asked = json.loads(vllm(own, "request.json"))
    ours = merged(streamed(asked, with_usage(vllm(chat), chat)))
    theirs = merged(events_of(vllm(own)))
    assert [event["type"] for event in ours] == [event["type"] for event in theirs]
    for our, their in zip(ours, theirs, strict=True):
        if "response" in our:
            for event in (our, their):
                event["response"] = without_token_counts(event["response"])
                event["response"].update(input_messages=None, output_messages=None)
        assert our == their


def test_the_logprobs_of_a_stream_have_vllms_form() -> None:
    asked = json.loads(vllm("responses_logprobs_stream", "request.json"))
    ours = streamed(asked, vllm("chat_logprobs_stream"))
    theirs = events_of(vllm("responses_logprobs_stream"))

    def shown(events: list[dict[str, Any]]) -> list[Any]:
        pairs = [
            (event["delta"], event["logprobs"])
            for event in events
            if event["type"] == "response.output_text.delta"
        ]
        for _, logprobs in pairs:
            for token in logprobs:
                token["top_logprobs"] = token["top_logprobs"][:2]
        return pairs

    assert shown(ours) == shown(theirs)
    (done,) = (e["part"] for e in ours if e["type"] == "response.content_part.done")
    assert [token["token"] for token in done["logprobs"]][-1] == "<|im_end|>"


@pytest.mark.parametrize(
    "case",
    [
        "chat_tools_auto_stream",
        "chat_tools_auto_parallel_stream",
        "chat_tools_required_stream",
        "reasoning_chat_stream",
        "chat_emoji_stream",
        "chat_length_stream",
    ],
)
def test_the_pieces_of_a_stream_make_the_whole_answer(case: str) -> None:
    asked = {"model": "m", "input": "x", "tools": [FUNCTION]}
    tee = open_tee(asked | {"stream": True})
    events = events_of(tee.feed(vllm(case)) + tee.finish())
    final = events[-1]["response"]
    assert events[-1]["type"] in TERMINAL
    assert tee.result().response == final
    chat = whole(asked, json.dumps(as_whole_chat_answer(case)).encode())
    # vLLM says of a whole reasoning item nothing, of a streamed one that it is completed.
    for item in chat["output"]:
        item["status"] = item["status"] or "completed"
    assert same(final["output"]) == same(chat["output"])
    texts: dict[tuple[int, str], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            key = event["output_index"], event["item_id"]
            texts[key] = texts.get(key, "") + event["delta"]
    for (index, item_id), text in texts.items():
        item = final["output"][index]
        assert item["id"] == item_id
        assert text == (item.get("arguments") or item["content"][0]["text"])


def as_whole_chat_answer(case: str) -> dict[str, Any]:
    """The chat tee's own view of a stream, as a whole chat answer."""
    tee = CHAT.open_answer(CHAT.read_request(b'{"stream": true}'), {}, 200, SSE)
    tee.feed(vllm(case))
    tee.finish()
    return tee.result().response


@pytest.mark.parametrize(
    "case", ["reasoning_chat_stream", "chat_tools_auto_parallel_stream", "chat_emoji_stream"]
)
def test_how_the_bytes_are_split_changes_nothing(case: str) -> None:
    body = vllm(case)
    asked = {"model": "m", "input": "x", "tools": [FUNCTION], "stream": True}
    at_once = open_tee(asked)
    expected = at_once.feed(body) + at_once.finish()
    for size in (1, 7, 1000):
        tee = open_tee(asked)
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert b"".join(map(tee.feed, pieces)) + tee.finish() == expected
        assert tee.result() == at_once.result()


def test_the_end_is_held_back_until_it_is_asked_for() -> None:
    tee = open_tee({"input": "Hello!", "stream": True})
    sent = events_of(tee.feed(vllm("chat_plain_stream")))
    assert tee.complete
    assert sent[-1]["type"] == "response.output_text.delta"
    rest = tee.held
    assert [event["type"] for event in events_of(rest)] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert tee.finish() == rest


def test_a_stream_goes_out_as_it_comes_in() -> None:
    tee = open_tee({"input": "x", "stream": True})
    assert b"response.created" in tee.feed(chunk({"role": "assistant", "content": ""}))
    assert not tee.first_token_seen
    assert b'"delta":"Hi"' in tee.feed(chunk({"content": "Hi"}))
    assert tee.first_token_seen


def test_a_stream_that_breaks_off_has_no_end() -> None:
    body = vllm("chat_tools_auto_stream")
    cut = body[: body.index(b'"finish_reason":"tool_calls"')]
    tee = open_tee({"input": "x", "tools": [FUNCTION], "stream": True})
    events = events_of(tee.feed(cut) + tee.finish())
    names = [event["type"] for event in events]
    assert not TERMINAL & set(names)
    # Codex runs a call as soon as its item is done.
    assert "response.output_item.done" not in names
    assert not tee.complete
    assert tee.remember == {}
    assert tee.result().response["status"] == "in_progress"


def test_an_aborted_answer_has_no_end() -> None:
    tee = open_tee({"input": "x", "stream": True})
    events = events_of(tee.feed(vllm("paused_abort_stream")) + tee.finish())
    assert tee.aborted
    assert not TERMINAL & {event["type"] for event in events}
    assert tee.remember == {}


def test_a_cut_stream_ends_as_the_api_says_or_as_it_was_set() -> None:
    body = vllm("chat_length_stream")
    last = streamed({"input": "x"}, body)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    lenient = ResponsesDialect(cut_answers_end="completed")
    last = streamed({"input": "x"}, body, dialect=lenient)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "incomplete")


def test_a_cut_stream_has_the_events_that_codex_was_recorded_with() -> None:
    recorded = HARNESS / "codex/len_text/00_v1_responses/response.body"
    theirs = merged(events_of(recorded.read_bytes()))
    text = chunk({"content": "This answer was cut at the"})
    ours = merged(
        streamed({"model": "tiny-qwen", "input": "x"}, chat_stream(text, finish="length"))
    )
    assert [(e["type"], e.get("item"), e.get("part")) for e in ours] == [
        (e["type"], e.get("item"), e.get("part")) for e in theirs
    ]


def test_c21_calls_go_by_their_index_and_a_new_id_is_another_call() -> None:
    events = streamed(
        {"input": "x", "tools": [FUNCTION]},
        chat_stream(
            chunk(
                {
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "a",
                            "function": {"name": "f", "arguments": '{"p":"a"}'},
                        },
                        {
                            "index": 1,
                            "id": "b",
                            "function": {"name": "f", "arguments": '{"p":"b"}'},
                        },
                    ]
                }
            ),
            call_chunk(1, call_id="c", name="g", arguments="{}"),
            finish="tool_calls",
        ),
    )
    output = events[-1]["response"]["output"]
    assert [(item["call_id"], item["arguments"]) for item in output] == [
        ("a", '{"p":"a"}'),
        ("b", '{"p":"b"}'),
        ("c", "{}"),
    ]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == output


def test_a_namespaced_call_has_its_namespace_and_plain_name() -> None:
    tools = [{"type": "namespace", "name": "multi_agent_v1", "tools": [FUNCTION]}]
    events = streamed(
        {"input": "x", "tools": tools},
        chat_stream(call_chunk(0, call_id="c", name="multi_agent_v1__get_weather", arguments="{}")),
    )
    items = [e["item"] for e in events if "item" in e]
    assert [(item["name"], item["namespace"]) for item in items] == [
        ("get_weather", "multi_agent_v1")
    ] * 2


def test_a_custom_call_has_the_events_that_codex_was_recorded_with() -> None:
    folder = HARNESS / "codex/model_gpt-6-sol"
    theirs = merged(events_of((folder / "00_v1_responses/response.body").read_bytes()))
    call = theirs[-1]["response"]["output"][-1]
    arguments = json.dumps({"input": call["input"]})
    pieces = [arguments[at : at + 5] for at in range(0, len(arguments), 5)]
    asked = json.loads((folder / "00_v1_responses/request.json").read_bytes())
    ours = merged(
        streamed(
            asked,
            chat_stream(
                chunk({"content": "I will do it."}),
                call_chunk(0, call_id="call_1", name="functions__exec"),
                *[call_chunk(0, arguments=piece) for piece in pieces],
                finish="tool_calls",
            ),
        )
    )

    def shown(event: dict[str, Any]) -> Any:
        kept = ("type", "item", "part", "delta", "input", "output_index", "text")
        return {name: event[name] for name in kept if name in event}

    assert list(map(shown, ours)) == list(map(shown, theirs))
    assert ours[-1]["response"]["output"] == theirs[-1]["response"]["output"]


@pytest.mark.parametrize("arguments", ['{"input": "a\\u00e9b"}', "not json", '{"input": "cut \\u0'])
def test_the_pieces_of_a_custom_input_make_the_input(arguments: str) -> None:
    events = streamed(
        {"input": "x", "tools": [CUSTOM]},
        chat_stream(
            call_chunk(0, call_id="c", name="exec"),
            *[call_chunk(0, arguments=character) for character in arguments],
        ),
    )
    (item,) = events[-1]["response"]["output"]
    pieces = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == item["input"]


def test_text_between_calls_is_an_item_between_them() -> None:
    events = streamed(
        {"input": "x", "tools": [FUNCTION]},
        chat_stream(
            chunk({"reasoning_content": "hm"}),
            chunk({"content": "a"}),
            call_chunk(0, call_id="c", name="get_weather", arguments="{}"),
            chunk({"content": "b"}),
        ),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    opened = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    closed = [e["output_index"] for e in events if e["type"] == "response.output_item.done"]
    assert opened == closed == [0, 1, 2, 3]


def test_a_call_that_the_server_gave_no_id_gets_one_that_stays_the_same() -> None:
    body = chat_stream(call_chunk(0, name="get_weather", arguments="{}"))
    ids = {
        streamed({"input": "x", "tools": [FUNCTION]}, body)[-1]["response"]["output"][0]["call_id"]
        for _ in range(2)
    }
    (call_id,) = ids
    assert call_id.startswith("call_")


def test_ids_depend_on_the_answer_alone() -> None:
    asked = {"input": "x"}
    assert streamed(asked, vllm("chat_plain_stream")) == streamed(asked, vllm("chat_plain_stream"))
    other = vllm("chat_plain_stream").replace(b"chatcmpl-", b"chatcmpl-f")
    assert (
        streamed(asked, other)[0]["response"]["id"]
        != (streamed(asked, vllm("chat_plain_stream"))[0]["response"]["id"])
    )


# Errors


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("kill_engine_stream", "server_error"),
        ("error_top_logprobs_many_stream", "invalid_request_error"),
    ],
)
def test_an_error_inside_a_stream_is_an_error_event_and_the_last_one(case: str, code: str) -> None:
    message = re.search(rb'"message": "([^"]*)"', vllm(case).rsplit(b"error", 1)[-1])
    assert message
    tee = open_tee({"input": "x", "stream": True})
    last = events_of(tee.feed(vllm(case)) + tee.finish())[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", code, message[1].decode())
    # The official packages raise on this one.
    assert last["error"]["message"] == last["message"]
    assert tee.complete
    assert tee.result().error is not None
    assert tee.remember == {}


def test_an_error_event_has_the_fields_that_codex_was_recorded_with() -> None:
    recorded = HARNESS / "codex/f_err_event/00_v1_responses/response.body"
    theirs = events_of(recorded.read_bytes())[-1]
    tee = open_tee({"input": "x", "stream": True})
    error = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    (ours,) = events_of(tee.feed(b"data: " + json.dumps(error).encode() + b"\n\n"))
    assert {k: v for k, v in ours.items() if k not in ("error", "sequence_number")} == {
        k: v for k, v in theirs.items() if k != "sequence_number"
    }


def test_a_context_error_is_word_for_word_vllms() -> None:
    body = (HARNESS / "vllm-replay/too_long_responses/response.body").read_bytes()
    assert whole({"input": "x"}, body, 400) == json.loads(body)
    assert b"maximum context length is 1024 tokens" in body
    chat_error = vllm("error_context_prompt")
    assert whole({"input": "x"}, chat_error, 400) == json.loads(chat_error)


@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (401, b'{"error":"Unauthorized"}', "Unauthorized", "invalid_request_error"),
        (502, b"<html>bad gateway</html>", "<html>bad gateway</html>", "server_error"),
        (404, b'{"detail":"Not Found"}', "Not Found", "invalid_request_error"),
        (422, b'{"detail":[{"loc":"x"}]}', '{"detail":[{"loc":"x"}]}', "invalid_request_error"),
        (503, b"", "the model server answered 503", "server_error"),
        (500, b'{"message":"m","type":"T"}', "m", "T"),
    ],
)
def test_any_error_body_becomes_one_that_sdks_read(
    status: int, body: bytes, message: str, kind: str
) -> None:
    assert whole({"input": "x"}, body, status) == {
        "error": {"message": message, "type": kind, "param": None, "code": status}
    }


# What is kept for later


def test_generated_arguments_are_told_by_call_id() -> None:
    tee = open_tee({"input": "x", "tools": [FUNCTION], "stream": True})
    tee.feed(vllm("chat_tools_auto_stream"))
    tee.finish()
    (item,) = tee.result().response["output"]
    assert tee.generated == {item["call_id"]: item["arguments"]}


@pytest.mark.parametrize("as_stream", [True, False])
def test_a_conversation_goes_on_from_what_was_remembered(as_stream: bool) -> None:
    first = {
        "model": "m",
        "input": "What is the weather?",
        "tools": [FUNCTION],
        "stream": as_stream,
    }
    tee = open_tee(first, content_type=SSE if as_stream else JSON)
    if as_stream:
        tee.feed(vllm("chat_tools_auto_stream"))
        tee.finish()
    else:
        tee.whole(vllm("chat_tools_auto"))
    answer = tee.result().response
    stored = tee.remember
    (call,) = answer["output"]
    assert stored[call["id"]] == call
    second = {
        "model": "m",
        "previous_response_id": answer["id"],
        "input": [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}],
    }
    translation = DIALECT.translate(
        DIALECT.read_request(json.dumps(second).encode()), stored=stored
    )
    user, turn, result = json.loads(translation.request.body)["messages"]
    assert user == {"role": "user", "content": "What is the weather?"}
    assert turn["tool_calls"][0]["function"]["arguments"] == call["arguments"]
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"] == call["call_id"]


def test_a_third_request_has_all_of_the_conversation() -> None:
    stored: dict[str, Any] = {}
    previous = None
    for text in ("one", "two", "three"):
        asked = {"input": text, "previous_response_id": previous}
        parsed = DIALECT.read_request(json.dumps(asked).encode())
        translation = DIALECT.translate(parsed, stored=stored)
        tee = translation.open_answer({}, 200, JSON)
        assert isinstance(tee, ResponsesTee)
        said = {"id": f"c-{text}", "choices": [{"message": {"content": text.upper()}}]}
        previous = json.loads(tee.whole(json.dumps(said).encode()))["id"]
        stored |= tee.remember
    contents = [m["content"] for m in json.loads(translation.request.body)["messages"]]
    assert contents == ["one", "ONE", "two", "TWO", "three"]


def test_what_is_not_to_be_stored_is_not_remembered() -> None:
    tee = open_tee({"input": "x", "store": False}, content_type=JSON)
    tee.whole(vllm("chat_plain"))
    assert tee.remember == {}
