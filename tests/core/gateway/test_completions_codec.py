"""What the completions dialect asks for, hides, gathers and proves."""

import json
from typing import Any

import pytest

from agl_core.gateway.dialects import AnswerTee, dialect_for

COMPLETIONS = dialect_for("POST", "completions")
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def open_for(content_type: str = SSE, **fields: Any) -> AnswerTee:
    parsed = COMPLETIONS.read_request(json.dumps({"model": "m", "prompt": "p", **fields}).encode())
    adjusted = COMPLETIONS.reshape(parsed, COMPLETIONS.capture_changes(parsed)).adjusted
    return COMPLETIONS.open_answer(parsed, adjusted, 200, content_type)


def logprobs(*values: float | None, tokens: list[str] | None = None) -> dict[str, Any]:
    return {
        "text_offset": [0] * len(values),
        "token_logprobs": list(values),
        "tokens": tokens or [],
    }


def event(*choices: dict[str, Any], **top: Any) -> bytes:
    value = {"id": "c-1", "created": 1, "model": "m", "choices": list(choices), **top}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def choice(text: str, ids: list[int], *values: float | None, **more: Any) -> dict[str, Any]:
    fixed = {"index": 0, "text": text, "logprobs": logprobs(*values), "finish_reason": None}
    return {**fixed, "stop_reason": None, "prompt_token_ids": None, "token_ids": ids, **more}


def seen_by(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in data.split(b"\n\n") if part.startswith(b"data: {")]


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {"return_token_ids": True, "logprobs": 0}),
        ({"logprobs": None, "return_token_ids": False}, {"return_token_ids": True, "logprobs": 0}),
        ({"logprobs": 0}, {"return_token_ids": True}),
        ({"logprobs": 5, "return_token_ids": True}, {}),
        ({"logprobs": "x"}, {"return_token_ids": True}),
        ({"echo": True}, {}),
        ({"echo": "nonsense", "stream": True}, {"stream_options": {"include_usage": True}}),
        ({"echo": False}, {"return_token_ids": True, "logprobs": 0}),
    ],
)
def test_capture_asks_for_what_is_missing(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    parsed = COMPLETIONS.read_request(json.dumps({"prompt": "p", **fields}).encode())
    assert COMPLETIONS.capture_changes(parsed) == changes


def test_a_batch_keeps_each_choices_own_prompt() -> None:
    tee = open_for(stream=True, prompt=["a", "b"])
    body = b"".join(
        [
            event(choice("x", [1], -1.0, prompt_token_ids=[10])),
            event(choice("", [5], -5.0, index=1, prompt_token_ids=[20, 21])),
            event(choice("y", [2], -2.0, finish_reason="stop")),
            event(choice("z", [6], -6.0, index=1, finish_reason="length")),
            event(usage={"prompt_tokens": 3, "completion_tokens": 4}, system_fingerprint="f"),
        ]
    )
    out = seen_by(tee.feed(body + DONE) + tee.finish())
    assert [c["choices"][0]["text"] for c in out] == ["x", "", "y", "z"]
    assert out[-1]["system_fingerprint"] == "f"
    for shown in out:
        assert shown["choices"][0]["logprobs"] is None
        assert shown["choices"][0]["token_ids"] is None
        assert shown["choices"][0]["prompt_token_ids"] is None
    answer = tee.result()
    assert [c["prompt_token_ids"] for c in answer.choices] == [[10], [20, 21]]
    assert [c["token_ids"] for c in answer.choices] == [[1, 2], [5, 6]]
    assert [c["logprobs"] for c in answer.choices] == [[-1.0, -2.0], [-5.0, -6.0]]
    assert [c["tokens"] for c in answer.choices] == ["complete", "complete"]
    assert [c["text"] for c in answer.response["choices"]] == ["xy", "z"]
    assert answer.finish_reasons == ["stop", "length"]


@pytest.mark.parametrize("stream", [False, True])
def test_with_echo_the_prompts_logprobs_are_not_the_samples(stream: bool) -> None:
    asked = {"echo": True, "logprobs": 1, "return_token_ids": True, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    only = choice(
        "xy", [1, 2], None, -9.0, -1.0, -2.0, prompt_token_ids=[7, 8], finish_reason="stop"
    )
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    if stream:
        tee = open_for(**asked)
        body = event(only) + event(usage=usage) + DONE
        assert tee.feed(body) + tee.finish() == body
    else:
        tee = open_for(content_type="application/json", **asked)
        body = json.dumps({"choices": [only], "usage": usage}).encode()
        assert tee.whole(body) == body
    answer = tee.result()
    assert answer.choices[0]["logprobs"] == [-1.0, -2.0]
    assert answer.choices[0]["tokens"] == "complete"
    assert answer.flags == []


def test_an_echo_that_does_not_add_up_is_incomplete() -> None:
    tee = open_for(content_type="application/json", echo=True, logprobs=1, return_token_ids=True)
    only = choice("xy", [1, 2], None, -1.0, -2.0, prompt_token_ids=[7, 8])
    tee.whole(json.dumps({"choices": [only], "usage": {"completion_tokens": 2}}).encode())
    answer = tee.result()
    assert answer.choices[0]["tokens"] == "incomplete"
    assert answer.flags == ["nonfinite_logprob"]


def test_the_agents_own_logprobs_are_joined_in_the_record() -> None:
    tee = open_for(stream=True, logprobs=1)
    tee.feed(
        event(choice("a", [1], logprobs=logprobs(-1.0, tokens=["a"])))
        + event(choice("b", [2], logprobs=logprobs(-2.0, tokens=["b"])))
    )
    answer = tee.result()
    assert answer.response["choices"][0]["logprobs"] == {
        "text_offset": [0, 0],
        "token_logprobs": [-1.0, -2.0],
        "tokens": ["a", "b"],
    }
    assert "token_ids" not in answer.response["choices"][0]
    assert answer.choices[0]["token_ids"] == [1, 2]


def test_token_id_strings_are_no_text_and_no_ids() -> None:
    tee = open_for(stream=True, logprobs=1, return_tokens_as_token_ids=True)
    tee.feed(event(choice("a", [1], logprobs=logprobs(-1.0, tokens=["token_id:99"]))))
    answer = tee.result()
    assert answer.flags == []
    assert answer.choices[0]["token_ids"] == [1]


@pytest.mark.parametrize(
    ("text", "stop_reason", "flags"),
    [
        ("ab", None, []),
        ("a", None, ["text_mismatch"]),
        ("a", "b", []),
        ("ax", "b", ["text_mismatch"]),
    ],
)
def test_c17_a_text_that_differs_is_flagged(
    text: str, stop_reason: str | None, flags: list[str]
) -> None:
    tee = open_for(stream=True)
    shown = logprobs(-1.0, -1.0, -1.0, tokens=["a", "b", "</s>"])
    tee.feed(
        event(
            choice(text, [1, 2, 3], logprobs=shown, finish_reason="stop", stop_reason=stop_reason)
        )
    )
    assert tee.result().flags == flags


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"choices":[{"text":"a","logprobs":{"token_logprobs":7,"tokens":{}}}]}\n\n',
        b'data: {"choices":[{"text":"a","logprobs":{"token_logprobs":[1'
        + b"0" * 400
        + b"]}}]}\n\n",
        b'data: {"choices":[{"index":0,"text":"a","logprobs":{"token_logprobs":["x",null]}}]}\n\n',
        b'data: {"choices":[{"index":0,"text":null,"logprobs":[]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":5}]}\n\n',
    ],
)
def test_odd_chunks_pass_unharmed(odd: bytes) -> None:
    tee = open_for(stream=True, logprobs=0)
    assert tee.feed(odd) + tee.finish() == odd
    tee.result()
