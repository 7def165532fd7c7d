"""What the chat dialect asks for, hides, gathers and proves."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.gateway.dialects import AnswerTee, dialect_for
from agl_core.gateway.dialects.base import as_flag

CHAT = dialect_for("POST", "chat/completions")
SSE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


def open_for(status: int = 200, content_type: str = SSE, **fields: Any) -> AnswerTee:
    """The tee of a captured call whose agent sent ``fields``."""
    parsed = CHAT.read_request(body_of(**fields))
    adjusted = CHAT.reshape(parsed, CHAT.capture_changes(parsed)).adjusted
    return CHAT.open_answer(parsed, adjusted, status, content_type)


def event(value: Any) -> bytes:
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def chunk(
    delta: dict[str, Any] | None = None,
    index: int = 0,
    top: dict[str, Any] | None = None,
    **choice: Any,
) -> dict[str, Any]:
    full = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": None, **choice}
    return {"id": "c-1", "created": 1, "model": "m", "choices": [full], **(top or {})}


def tokens(*pairs: tuple[int, float], texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """The token fields of a choice: ids and logprobs."""
    content = [{"token": "", "logprob": p, "bytes": [], "top_logprobs": []} for _id, p in pairs]
    for item, text in zip(content, texts, strict=False):
        item["token"] = text
    return {"token_ids": [i for i, _p in pairs], "logprobs": {"content": content}}


def usage(count: int, **more: Any) -> dict[str, Any]:
    told = {"prompt_tokens": 2, "total_tokens": 2 + count, "completion_tokens": count, **more}
    return {
        "id": "c-1",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": told,
        "system_fingerprint": "f",
    }


def role(index: int = 0, prompt: list[int] | None = None) -> dict[str, Any]:
    top = {"prompt_token_ids": [8, 9] if prompt is None else prompt, "prompt_text": None}
    return chunk({"role": "assistant", "content": ""}, index, top)


def seen_by(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in data.split(b"\n\n") if part.startswith(b"data: {")]


# Requests


@pytest.mark.parametrize(
    ("method", "path", "api"),
    [
        ("POST", "chat/completions", "chat"),
        ("POST", "completions", "completions"),
        ("GET", "chat/completions", "other"),
        ("POST", "chat/completions/batch", "other"),
        ("POST", "chat/completions/", "other"),
        ("POST", "embeddings", "other"),
    ],
)
def test_only_exact_post_paths_have_a_dialect(method: str, path: str, api: str) -> None:
    assert dialect_for(method, path).api == api


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}),
        (
            {"return_token_ids": None, "logprobs": False, "top_logprobs": 0},
            {"return_token_ids": True, "logprobs": True},
        ),
        ({"return_token_ids": True, "logprobs": True, "top_logprobs": 5}, {}),
        ({"return_token_ids": 1, "logprobs": "true"}, {"top_logprobs": 0}),
        ({"top_logprobs": 2}, {"return_token_ids": True}),
        ({"logprobs": False, "top_logprobs": -1}, {"return_token_ids": True}),
        ({"logprobs": "x", "return_token_ids": "x"}, {}),
        ({"logprobs": True, "stream_options": {}}, {"return_token_ids": True, "top_logprobs": 0}),
    ],
)
def test_capture_asks_for_what_is_missing_and_leaves_faults(
    fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert CHAT.capture_changes(CHAT.read_request(body_of(**fields))) == changes


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        (
            {"include_usage": False, "continuous_usage_stats": True},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"include_usage": True, "x": 1}, None),
        ("nonsense", None),
        ({"include_usage": "nonsense"}, None),
    ],
)
def test_a_stream_is_asked_for_its_usage(options: Any, sent: dict[str, Any] | None) -> None:
    parsed = CHAT.read_request(body_of(stream=True, stream_options=options))
    assert CHAT.capture_changes(parsed).get("stream_options") == sent


def test_reshaping_patches_only_what_changes() -> None:
    body = b'{ "b" : 1.0,"a":[1,  2], "stream":false, "seed": 7, "t":{"x" :"\\u00e9"}}'
    parsed = CHAT.read_request(body)
    same = CHAT.reshape(parsed, {"b": 1.0, "gone": None, "a": [1, 2]})
    assert same.body is parsed.body
    assert same.adjusted == {}
    changed = CHAT.reshape(parsed, {"seed": None, "b": 2, "new": {"k": True}})
    assert changed.body == (
        b'{"b":2,"a":[1,  2],"stream":false,"t":{"x" :"\\u00e9"},"new":{"k":true}}'
    )
    assert changed.adjusted == {"seed": None, "b": 2, "new": {"k": True}}


def test_a_true_is_not_taken_for_a_one() -> None:
    parsed = CHAT.read_request(b'{"logprobs":1}')
    assert CHAT.reshape(parsed, {"logprobs": True}).body == b'{"logprobs":true}'


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":' + b"[" * 9000, b'{"\xff":1}'],
)
def test_an_unreadable_body_passes_untouched(body: bytes) -> None:
    parsed = CHAT.read_request(body)
    changes = CHAT.capture_changes(parsed)
    assert CHAT.reshape(parsed, {**changes, "model": "other"}).body == body
    assert parsed.model is None


@pytest.mark.parametrize(
    "field", ["model", "stream", "n", "echo", "stream_options", "logprobs", "top_logprobs"]
)
@pytest.mark.parametrize("value", [[], {}, "x", -1, 1e300, None, [[1]], True])
def test_odd_values_never_raise(field: str, value: Any) -> None:
    parsed = CHAT.read_request(body_of(**{field: value}))
    reshaped = CHAT.reshape(parsed, CHAT.capture_changes(parsed))
    assert json.loads(reshaped.body)["model"] == (value if field == "model" else "m")


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (None, False),
        (True, True),
        (False, False),
        (1, True),
        (0.0, False),
        ("YES", True),
        ("off", False),
        (2, None),
        ("x", None),
        ([], None),
    ],
)
def test_flags_are_read_as_the_server_reads_them(value: Any, flag: bool | None) -> None:
    assert as_flag(value) is flag


# Streams


def test_c18_a_stream_goes_out_chunk_by_chunk_and_is_recorded() -> None:
    tee = open_for(stream=True)
    texts = ["He", "llo", "!", " you", ""]
    assert seen_by(tee.feed(event(role())))[0]["prompt_token_ids"] is None
    assert not tee.first_token_seen
    for number, text in enumerate(texts[:4]):
        [out] = seen_by(tee.feed(event(chunk({"content": text}, **tokens((number, -0.5))))))
        assert out["choices"][0]["delta"] == {"content": text}
        assert out["choices"][0]["token_ids"] is None
        assert out["choices"][0]["logprobs"] is None
        assert tee.first_token_seen
    # The finish chunk waits for the next event, which has the fingerprint that belongs to it.
    assert tee.feed(event(chunk({}, finish_reason="stop", **tokens((4, -0.5))))) == b""
    [last] = seen_by(tee.feed(event(usage(5))))
    assert last["system_fingerprint"] == "f"
    assert "usage" not in last
    assert tee.feed(DONE) == b""
    assert tee.held == DONE
    assert tee.complete
    answer = tee.result()
    assert tee.finish() == DONE
    [choice] = answer.choices
    assert choice["token_ids"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"] == [-0.5] * 5
    assert choice["prompt_token_ids"] == [8, 9]
    assert choice["tokens"] == "complete"
    assert answer.response["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello! you",
    }
    assert "token_ids" not in answer.response["choices"][0]


CALL = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_c19_stream_logprobs_and_tools_all_give_equal_records(
    stream: bool, logprobs: bool, tools: bool
) -> None:
    pairs = ((1, -0.1), (2, -0.2), (3, -0.3), (4, -0.4))
    fields = {"stream": stream, "logprobs": logprobs, **({"tools": []} if tools else {})}
    delta = {"tool_calls": [CALL]} if tools else {"content": "hi"}
    if stream:
        tee = open_for(**fields)
        parts = [
            role(),
            *(chunk(delta if pair[0] == 1 else {}, **tokens(pair)) for pair in pairs[:3]),
        ]
        parts += [chunk({}, finish_reason="stop", **tokens(pairs[3])), usage(4)]
        out = tee.feed(b"".join(map(event, parts)) + DONE) + tee.finish()
        shown = [c["choices"][0]["logprobs"] for c in seen_by(out)[1:]]
        assert all(shown) if logprobs else not any(shown)
        assert len(shown) == (4 if logprobs else 2)
    else:
        tee = open_for(content_type="application/json", **fields)
        message = {"role": "assistant", "content": None, **delta}
        choice = {"index": 0, "message": message, "finish_reason": "stop", **tokens(*pairs)}
        whole = {"choices": [choice], "usage": usage(4)["usage"], "prompt_token_ids": [8, 9]}
        out = json.loads(tee.whole(json.dumps(whole).encode()))
        assert bool(out["choices"][0]["logprobs"]) == logprobs
        assert out["choices"][0]["token_ids"] is None
        assert out["prompt_token_ids"] is None
        assert out["usage"]["completion_tokens"] == 4
    assert tee.result().choices == [
        {
            "index": 0,
            "prompt_token_ids": [8, 9],
            "token_ids": [1, 2, 3, 4],
            "logprobs": [-0.1, -0.2, -0.3, -0.4],
            "version_spans": None,
            "finish_reason": "stop",
            "tokens": "complete",
            "extras": {},
        }
    ]


def test_c20_interleaved_choices_are_kept_apart() -> None:
    tee = open_for(stream=True, n=2)
    parts = [
        role(0),
        role(1),
        chunk({"content": "a"}, 0, **tokens((1, -1.0), (2, -2.0))),
        chunk({"content": "z"}, 1, finish_reason="stop", **tokens((7, -7.0))),
        chunk({"content": "b"}, 0, finish_reason="stop", **tokens((3, -3.0))),
        usage(4),
    ]
    out = tee.feed(b"".join(map(event, parts)) + DONE) + tee.finish()
    assert [c["choices"][0]["index"] for c in seen_by(out)] == [0, 1, 0, 1, 0]
    answer = tee.result()
    assert [c["token_ids"] for c in answer.choices] == [[1, 2, 3], [7]]
    assert [c["prompt_token_ids"] for c in answer.choices] == [[8, 9], [8, 9]]
    assert [c["tokens"] for c in answer.choices] == ["complete", "complete"]
    assert [c["message"]["content"] for c in answer.response["choices"]] == ["ab", "z"]


def test_c21_parallel_tool_calls_are_assembled_by_their_own_index() -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments}, **more}

    tee = open_for(stream=True)
    parts = [
        chunk({"tool_calls": [call(0, '{"path":', id="a"), call(1, '{"path":"b', id="b")]}),
        chunk({"tool_calls": [call(1, '.rs"}'), call(0, '"a.rs"}')]}),
        chunk({"tool_calls": [call(1, "{}", id="c")]}),
    ]
    tee.feed(b"".join(map(event, parts)))
    calls = tee.result().response["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["a", "b", "c"]
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"path": "a.rs"}, {"path": "b.rs"}, {}]


def test_c25_characters_split_over_reads_stay_whole() -> None:
    parsed = CHAT.read_request(body_of(stream=True))
    tee = CHAT.open_answer(parsed, {}, 200, SSE)
    body = event(chunk({"content": "日本😀"})) + DONE
    out = b"".join([tee.feed(body[at : at + 1]) for at in range(len(body))]) + tee.finish()
    assert out == body
    assert tee.result().response["choices"][0]["message"]["content"] == "日本😀"


def test_c26_a_count_of_zero_is_kept_and_the_usage_chunk_is_hidden() -> None:
    tee = open_for(stream=True)
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    out = tee.feed(event(role()) + event(usage(0, **details)) + DONE) + tee.finish()
    assert tee.result().usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert [len(c["choices"]) for c in seen_by(out)] == [1]


def test_c26_an_agent_that_asks_for_usage_gets_it() -> None:
    tee = open_for(stream=True, stream_options={"include_usage": True})
    finish = chunk({}, finish_reason="stop", **tokens((1, -1.0)))
    out = tee.feed(event(finish) + event(usage(1)) + DONE) + tee.finish()
    assert seen_by(out)[1] == usage(1)
    assert "system_fingerprint" not in seen_by(out)[0]


def test_running_usage_that_the_server_would_not_have_sent_is_taken_out() -> None:
    tee = open_for(stream=True, stream_options={"continuous_usage_stats": True})
    told = {"usage": usage(1)["usage"]}
    out = tee.feed(event(chunk({"content": "a"}, top=told, **tokens((1, -1.0)))) + event(usage(1)))
    assert [c.get("usage") for c in seen_by(out)] == [None]
    assert tee.result().usage["completion_tokens"] == 1


def test_the_total_usage_wins_over_a_running_one() -> None:
    tee = open_for(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    told = {"usage": usage(1)["usage"]}
    tee.feed(event(usage(7)) + event(chunk({"content": "a"}, top=told)))
    assert tee.result().usage["completion_tokens"] == 7


def test_chunks_without_text_stay_when_the_agent_asked_for_ids() -> None:
    body = event(chunk({}, **tokens((1, -1.0))))
    assert open_for(stream=True).feed(body) == b""
    [kept] = seen_by(open_for(stream=True, return_token_ids=True).feed(body))
    assert kept["choices"][0]["token_ids"] == [1]
    assert kept["choices"][0]["logprobs"] is None


def test_an_empty_chunk_without_tokens_is_not_ours_and_stays() -> None:
    body = event(chunk({}, token_ids=None))
    assert open_for(stream=True).feed(body) == body


@pytest.mark.parametrize(
    "odd",
    [
        b": ping\n\n",
        b"data: not json\n\n",
        b"data: [1,2]\n\n",
        b"data: null\n\n",
        b'data: {"choices":null,"usage":null}\n\n',
        b'data: {"choices":"x"}\n\n',
        b'data: {"choices":[{"index":"x","token_ids":["a"]}]}\n\n',
        b'data: {"choices":[{"delta":"x"}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[null,{"function":[]},7]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"x"},"logprobs":null}]}\n\n',
        b'event: e\r\ndata: {"x":1}\r\nretry: 5\r\n\r\n',
        b"data: " + b"[" * 9000 + b"\n\n",
        b'data: {"choices":[{"index":0,"delta":{"content":"\xff"}}]}\n\n',
    ],
)
def test_odd_events_pass_unharmed(odd: bytes) -> None:
    tee = open_for(stream=True)
    assert tee.feed(odd) + tee.feed(DONE) + tee.finish() == odd + DONE
    assert tee.complete
    tee.result()


def test_a_changed_event_keeps_its_line_ends_and_other_fields() -> None:
    tee = open_for(stream=True)
    body = (
        b'id: 1\r\ndata: {"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1]}]}\r\n\r\n'
    )
    assert tee.feed(body) + tee.finish() == body.replace(b"[1]", b"null")


def test_an_error_inside_a_stream_is_told() -> None:
    tee = open_for(stream=True)
    error = {"error": {"message": "engine died", "code": 500}}
    one = event(chunk({"content": "a"}, **tokens((1, -1.0))))
    out = tee.feed(event(role()) + one + event(usage(1)) + event(error) + DONE) + tee.finish()
    assert seen_by(out)[-1] == error
    answer = tee.result()
    assert answer.error == error["error"]
    assert answer.choices[0]["tokens"] == "incomplete"


def test_an_abort_is_held_back_with_all_that_follows() -> None:
    tee = open_for(stream=True)
    first = tee.feed(event(chunk({"content": "a"}, **tokens((1, -1.0)))))
    assert seen_by(first)
    assert (
        tee.feed(event(chunk({"content": "b"}, finish_reason="abort", **tokens((2, -1.0))))) == b""
    )
    assert tee.aborted
    assert tee.feed(event(usage(2)) + DONE) == b""
    assert [c["choices"][0]["finish_reason"] for c in seen_by(tee.held)] == ["abort"]
    answer = tee.result()
    assert answer.aborted
    assert answer.finish_reasons == ["abort"]
    assert answer.usage["completion_tokens"] == 2


@pytest.mark.parametrize("cut", [20, 60, 100])
def test_a_stream_that_breaks_off_is_not_complete_and_shows_no_half_event(cut: int) -> None:
    tee = open_for(stream=True)
    one = event(chunk({"content": "a"}, **tokens((1, -1.0))))
    sent = tee.feed(one + one[:cut]) + tee.finish()
    assert len(seen_by(sent)) == 1
    assert sent.endswith(b"\n\n")
    assert not tee.complete
    assert not tee.ends_mid_event
    assert tee.result().choices[0]["tokens"] == "incomplete"


def test_a_stream_without_its_end_is_never_complete() -> None:
    last = event(chunk({"content": "a"}, finish_reason="stop", **tokens((1, -1.0))))
    for end, proof in ((b"", "incomplete"), (DONE, "complete")):
        tee = open_for(stream=True)
        tee.feed(event(role()) + last + event(usage(1)) + end)
        tee.finish()
        assert tee.result().choices[0]["tokens"] == proof


def test_what_the_agent_asked_for_stays_even_where_we_send_it_anew() -> None:
    parsed = CHAT.read_request(body_of(stream=True, return_token_ids=True, logprobs=True))
    adjusted = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    tee = CHAT.open_answer(parsed, adjusted, 200, SSE)
    body = event(role()) + event(chunk({}, **tokens((1, -1.0))))
    assert tee.feed(body) == body


def test_a_half_event_that_is_passed_on_is_told() -> None:
    tee = CHAT.open_answer(CHAT.read_request(body_of(stream=True)), {}, 200, SSE)
    one = event(chunk({"content": "a"}))
    assert tee.feed(one + one[:40]) + tee.finish() == one + one[:40]
    assert tee.ends_mid_event


def test_an_end_without_its_blank_line_still_counts() -> None:
    tee = open_for(stream=True)
    one = event(chunk({"content": "a"}, **tokens((1, -1.0))))
    sent = tee.feed(one + DONE[:-2]) + tee.finish()
    assert sent.endswith(b"data: [DONE]")
    assert tee.complete


@pytest.mark.parametrize(
    "spoil", ["fewer logprobs", "another count", "no usage", "no prompt", "no ids"]
)
def test_only_what_adds_up_is_complete(spoil: str) -> None:
    choice = tokens((1, -1.0), (2, -1.0))
    if spoil == "fewer logprobs":
        choice["logprobs"]["content"].pop()
    if spoil == "no ids":
        del choice["token_ids"]
    parts = [role(prompt=[] if spoil == "no prompt" else None)]
    if spoil == "no prompt":
        del parts[0]["prompt_token_ids"]
    parts.append(chunk({"content": "a"}, finish_reason="stop", **choice))
    if spoil != "no usage":
        parts.append(usage(3 if spoil == "another count" else 2))
    tee = open_for(stream=True)
    tee.feed(b"".join(map(event, parts)) + DONE)
    expected = "absent" if spoil == "no ids" else "incomplete"
    assert tee.result().choices[0]["tokens"] == expected


def test_c17_text_that_is_not_that_of_the_tokens_is_flagged() -> None:
    texts = ("Hel", "lo", "!")
    for shown, flags in (("Hello", ["text_mismatch"]), ("Hello!", [])):
        tee = open_for(stream=True)
        pairs = ((1, -1.0), (2, -1.0), (3, -1.0))
        tee.feed(
            event(chunk({"content": shown}, finish_reason="stop", **tokens(*pairs, texts=texts)))
        )
        answer = tee.result()
        assert answer.flags == flags
        assert answer.choices[0]["token_ids"] == [1, 2, 3]


def test_c37_nonfinite_logprobs_become_valid_json_and_are_flagged() -> None:
    bad = chunk({"content": "Infinity NaN"}, **tokens((1, -1.0), (2, float("-inf"))))
    for ours in (True, False):
        tee = open_for(stream=True, logprobs=not ours, return_token_ids=not ours)
        out = tee.feed(event(role()) + event(bad) + event(usage(2)) + DONE) + tee.finish()
        # json reads -Infinity unless told not to.
        parsed = [
            json.loads(p[6:], parse_constant=pytest.fail) for p in out.split(b"\n\n") if b"{" in p
        ]
        assert parsed[1]["choices"][0]["delta"] == {"content": "Infinity NaN"}
        answer = tee.result()
        assert answer.flags[0] == "nonfinite_logprob"
        assert answer.choices[0]["logprobs"] == [-1.0, None]
        assert answer.choices[0]["tokens"] == "incomplete"


def test_c37_nonfinite_logprobs_of_a_whole_answer() -> None:
    tee = open_for(content_type="application/json")
    choice = {"index": 0, "message": {"content": "NaN"}, **tokens((1, float("nan")), (2, -1.0))}
    out = tee.whole(json.dumps({"choices": [choice], "usage": usage(2)["usage"]}).encode())
    assert json.loads(out)["choices"][0]["message"]["content"] == "NaN"
    answer = tee.result()
    assert answer.flags == ["nonfinite_logprob"]
    assert answer.choices[0]["logprobs"] == [None, -1.0]


# Whole answers


def test_an_answers_content_type_decides_not_what_was_asked() -> None:
    whole = open_for(stream=True, content_type="application/json")
    assert not whole.is_stream
    assert whole.whole(b'{"choices":[{"index":0,"token_ids":[1]}]}') == (
        b'{"choices":[{"index":0,"token_ids":null}]}'
    )
    stream = open_for(stream=False)
    assert stream.is_stream
    assert seen_by(stream.feed(event(chunk({"content": "a"}, **tokens((1, -1.0))))))


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[1]", b'{"choices":null}', b'{"choices":[7]}', b'"x"', b'{"usage":null}'],
)
@pytest.mark.parametrize("status", [200, 502])
def test_odd_bodies_pass_unharmed(body: bytes, status: int) -> None:
    tee = open_for(status=status, content_type="application/json")
    assert tee.whole(body) == body
    assert tee.result().choices == []


def test_an_error_body_is_passed_and_told() -> None:
    body = b'{"error":{"message":"no","code":400}}'
    tee = open_for(status=400, content_type="application/json")
    assert tee.whole(body) == body
    assert tee.result().error == {"message": "no", "code": 400}


def test_a_truncated_json_body_is_not_complete() -> None:
    tee = open_for(content_type="application/json")
    assert tee.whole(b'{"choices":[{"index":0') == b'{"choices":[{"index":0'
    assert not tee.complete


def test_what_an_unknown_api_sends_is_not_touched() -> None:
    other = dialect_for("POST", "embeddings")
    parsed = other.read_request(b'{"model":"e","input":"x"}')
    assert (parsed.model, other.capture_changes(parsed)) == ("e", {})
    tee = other.open_answer(parsed, {}, 200, "application/json")
    body = b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":0}}'
    assert tee.whole(body) == body
    assert tee.result().usage == {"prompt_tokens": 0}
    stream = other.open_answer(parsed, {}, 200, SSE)
    assert stream.feed(b"data: [DO") == b"data: [DO"
    assert not stream.complete
    assert stream.finish() == b""
    assert stream.ends_mid_event
    assert stream.complete


# Any split

DELTAS = st.sampled_from(
    [{}, {"content": "日"}, {"content": ""}, {"reasoning": "😀"}, {"tool_calls": [CALL]}]
)
CHUNKS = st.one_of(
    st.builds(role, st.integers(0, 1)),
    st.builds(
        lambda d, i, t: chunk(d, i, **tokens((t, -0.25))),
        DELTAS,
        st.integers(0, 1),
        st.integers(0, 9),
    ),
    st.builds(lambda i: chunk({}, i, finish_reason="stop", **tokens((2, -0.5))), st.integers(0, 1)),
    st.just(usage(3)),
)
EVENTS = st.one_of(
    CHUNKS.map(event),
    CHUNKS.map(lambda c: event(c).replace(b"\n\n", b"\r\n\r\n")),
    st.sampled_from([b": ping\n\n", b"data: ?\n\n", b"\r\n", DONE]),
)


@given(
    events=st.lists(EVENTS, max_size=8),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    own=st.booleans(),
)
def test_c25_any_split_gives_one_record_and_the_same_bytes(
    events: list[bytes], cuts: list[int], own: bool
) -> None:
    body = b"".join(events)
    ends = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    fields: dict[str, Any] = {
        "return_token_ids": True,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }
    results = []
    for pieces in ([body], [body[a:b] for a, b in pairwise(ends)]):
        tee = open_for(stream=True, **(fields if own else {}))
        results.append(
            (b"".join([tee.feed(piece) for piece in pieces]) + tee.finish(), tee.result())
        )
    assert results[0] == results[1]
    if own:
        assert results[0][0] == body
