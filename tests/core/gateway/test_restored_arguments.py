"""Tool arguments that a client wrote anew go upstream as the model wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from agl_core.gateway.dialects import ParsedRequest, chat_dialect, restored
from agl_core.testing.fake_vllm import FakeVllm, Output, each, saying
from agl_core.testing.service import RunningService

HARNESS = Path(__file__).parents[2] / "data" / "harness" / "vllm-replay"
WRITTEN = '{"city": "Köln", "unit": "c", "days": [1, 2.0]}'


def request_with(arguments: str, call_id: str = "c1", **fields: Any) -> ParsedRequest:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Hi", "x": 1.10},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]
    body = {"model": "m", "messages": messages, **fields}
    return chat_dialect().read_request(json.dumps(body).encode())


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def reordered(value: Any) -> str:
    return json.dumps(dict(reversed(value.items())))


@pytest.mark.parametrize("write", [compact, reordered, json.dumps])
def test_rewritten_arguments_are_put_back_and_nothing_else_changes(
    write: Callable[[Any], str],
) -> None:
    sent = request_with(write(json.loads(WRITTEN)), temperature=0.5, big=12345678901234567890123)
    mended = restored(sent, {"c1": WRITTEN, "c2": "{}"})
    assert mended is not None
    parsed, ids = mended
    assert ids == ["c1"]
    expected = json.loads(sent.body)
    expected["messages"][1]["tool_calls"][0]["function"]["arguments"] = WRITTEN
    assert json.loads(parsed.body) == expected
    assert list(json.loads(parsed.body)) == list(expected)
    assert b"12345678901234567890123" in parsed.body
    assert parsed.fields is not None
    assert json.loads(bytes(parsed.fields["messages"])) == expected["messages"]
    assert (parsed.model, parsed.stream) == ("m", False)


@pytest.mark.parametrize(
    "generated",
    [
        {},
        {"other": WRITTEN},
        {"c1": compact(json.loads(WRITTEN))},
        {"c1": '{"city": "Bonn"}'},
        {"c1": '{"city": "K'},
        {"c1": '{"city": "K\\u00f6ln", "unit": "c", "days": [true, 2.0]}'},
    ],
    ids=["nothing", "another call", "the same text", "another value", "no JSON", "true is not 1"],
)
def test_arguments_that_say_something_else_stay(generated: dict[str, str]) -> None:
    assert restored(request_with(compact(json.loads(WRITTEN))), generated) is None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        7,
        "tool_calls",
        [{"tool_calls": 7}],
        [{"tool_calls": [7]}],
        [{"tool_calls": None}],
        [{"tool_calls": [{"id": 7, "function": {"arguments": "{}"}}]}],
        [{"tool_calls": [{"id": "c1"}]}],
        [{"tool_calls": [{"id": "c1", "function": 7}]}],
        [{"tool_calls": [{"id": "c1", "function": {}}]}],
        [{"tool_calls": [{"id": "c1", "function": {"arguments": {"a": 1}}}]}],
        [{"tool_calls": [{"id": "c1", "function": {"arguments": "[" * 100_000}}]}],
    ],
)
def test_what_is_no_request_is_left_to_the_server(messages: Any) -> None:
    body = json.dumps({"messages": messages}).encode()
    assert restored(chat_dialect().read_request(body), {"c1": '{"a": 1}'}) is None
    assert restored(chat_dialect().read_request(b"no json"), {"c1": '{"a": 1}'}) is None


def test_recorded_requests_differ_only_in_how_their_arguments_are_written() -> None:
    """vLLM's answers tell that arguments which are no JSON make another prompt: they stay."""
    spaced = (HARNESS / "args_spaced" / "request.json").read_bytes()
    invalid = (HARNESS / "args_invalid" / "request.json").read_bytes()
    written = json.loads(spaced)["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert restored(chat_dialect().read_request(spaced), {"c1": written}) is None
    mended = restored(
        chat_dialect().read_request(spaced.replace(b'\\", \\"unit', b'\\",\\"unit')),
        {"c1": written},
    )
    assert mended is not None
    assert json.loads(mended[0].body) == json.loads(spaced)
    assert restored(chat_dialect().read_request(invalid), {"c1": written}) is None

    def prompt(case: str) -> list[int]:
        answer = json.loads((HARNESS / case / "response.body").read_bytes())
        ids: list[int] = answer["prompt_token_ids"]
        return ids

    assert prompt("args_spaced") != prompt("args_invalid")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("trained", [True, False])
async def test_arguments_of_an_earlier_answer_are_put_back_for_trained_servers(
    world: RunningService, open_vllm: Any, stream: bool, trained: bool
) -> None:
    written = Output(texts=('{"city": ', '"Köln"', "}", ""), tool="get_weather")
    server: FakeVllm = await open_vllm(each(saying(written), saying()))
    await world.register(server.endpoint, "tools", trained=trained)
    async with openai.AsyncOpenAI(base_url=world.base("r"), api_key="k", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        if stream:
            async with client.chat.completions.stream(model="tools", messages=messages) as answer:
                first: Any = await answer.get_final_completion()
        else:
            first = await client.chat.completions.create(model="tools", messages=messages)
        (call,) = first.choices[0].message.tool_calls
        function = {"name": "get_weather", "arguments": '{"city":"K\\u00f6ln"}'}
        rewritten = {"id": call.id, "type": "function", "function": function}
        history: Any = [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": [rewritten]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        await client.chat.completions.create(model="tools", messages=history)
    sent = server.requests[-1].json()["messages"][1]["tool_calls"][0]["function"]["arguments"]
    event = (await world.events("r"))[-1]
    assert event["request"]["messages"] == history
    if trained:
        assert sent == '{"city": "Köln"}'
        assert event["normalised"] == {"arguments_restored": [call.id]}
    else:
        assert sent == '{"city":"K\\u00f6ln"}'
        assert "normalised" not in event
