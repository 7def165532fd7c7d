"""The official ``openai`` package reads what the translation of recorded chat answers gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects.responses import ResponsesDialect, ResponsesTee, error_of
from agl_core.gateway.dialects.translation import TranslationError
from agl_core.testing.raw_http import Exchange, RawServer
from agl_core.testing.translated import JSON_TYPE, STREAM_TYPE, open_captured

openai = pytest.importorskip("openai", reason="the demo extra brings the openai package")

VLLM = Path(__file__).parents[2] / "data" / "vllm"
DIALECT = ResponsesDialect()
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class ModelBehindResponses:
    """A server of the Responses API whose model is a recording of chat completions, or bytes.

    Each call takes the next of ``answers``.
    """

    def __init__(self, *answers: str | tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.sent: list[dict[str, Any]] = []
        self.stored: dict[str, Any] = {}
        self.generated: dict[str, str] = {}

    async def __call__(self, exchange: Exchange) -> None:
        parsed = DIALECT.read_request(exchange.request.body)
        try:
            translation = DIALECT.translate(parsed, generated=self.generated, stored=self.stored)
        except TranslationError as exc:
            exchange.whole_json(exc.status, error_of(exc))
            return
        self.sent.append(json.loads(translation.request.body))
        answer = self.answers.pop(0)
        status, chat = answer if isinstance(answer, tuple) else (200, self._recorded(answer))
        is_stream = parsed.stream and status == 200
        tee = open_captured(translation, STREAM_TYPE if is_stream else JSON_TYPE, status)
        assert isinstance(tee, ResponsesTee)
        if is_stream:
            exchange.begin(200, [("content-type", tee.content_type)])
            for at in range(0, len(chat), 300):
                piece = tee.feed(chat[at : at + 300])
                if piece:
                    exchange.write(piece)
            rest = tee.finish()
            if rest:
                exchange.write(rest)
            exchange.end()
        else:
            exchange.whole(status, tee.whole(chat), [("content-type", tee.content_type)])
        self.stored |= tee.remember
        self.generated |= tee.generated

    @staticmethod
    def _recorded(case: str) -> bytes:
        return (VLLM / case / "response.body").read_bytes()


@asynccontextmanager
async def client_of(model: ModelBehindResponses) -> AsyncIterator[Any]:
    async with (
        RawServer(model) as server,
        openai.AsyncOpenAI(api_key="k", base_url=server.endpoint, max_retries=0) as client,
    ):
        yield client


async def test_a_response_is_read() -> None:
    async with client_of(ModelBehindResponses("chat_plain")) as client:
        response = await client.responses.create(model="m", input="Hello!")
    assert response.output_text == "Hello! How can I help you today?"
    assert (response.status, response.model, response.error) == ("completed", "m", None)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (26, 14)
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.output[0].id.startswith("msg_")


async def test_every_type_that_the_package_declares_holds() -> None:
    model = ModelBehindResponses("reasoning_chat", "chat_tools_auto", "chat_length")
    async with client_of(model) as client:
        for _ in range(3):
            response = await client.responses.create(model="m", input="x", tools=[WEATHER])
            # ``create`` builds objects leniently; this reads the same JSON strictly.
            type(response).model_validate(json.loads(response.model_dump_json(by_alias=True)))


async def test_a_stream_helper_gives_the_events_and_the_response() -> None:
    async with (
        client_of(ModelBehindResponses("chat_plain_stream")) as client,
        client.responses.stream(model="m", input="Hello!") as stream,
    ):
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert response.output_text == "Hello! How can I help you today?"
    snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots[-1] == response.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


async def test_reasoning_is_read_whole_and_streamed() -> None:
    model = ModelBehindResponses("reasoning_chat", "reasoning_chat_stream")
    thought, said = "\n7 has no divisors but 1 and 7.\n", "\n\nYes, 7 is prime."
    async with client_of(model) as client:
        whole = await client.responses.create(model="m", input="Is 7 prime?")
        async with client.responses.stream(model="m", input="Is 7 prime?") as stream:
            pieces = [e.delta async for e in stream if e.type == "response.reasoning_text.delta"]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        reasoning, message = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", thought)
        assert (message.type, response.output_text) == ("message", said)
    assert whole.usage.output_tokens_details.reasoning_tokens == 14
    assert "".join(pieces) == thought


async def test_a_tool_is_called_and_the_conversation_goes_on_by_its_id() -> None:
    model = ModelBehindResponses("chat_tools_auto", "chat_tool_result_stream")
    async with client_of(model) as client:
        first = await client.responses.create(model="m", input="Weather?", tools=[WEATHER])
        (call,) = first.output
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments) == {"city": "Berlin", "unit": "celsius"}
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        async with client.responses.stream(
            model="m", input=[output], previous_response_id=first.id, tools=[WEATHER]
        ) as stream:
            second = await stream.get_final_response()
    assert second.output_text
    user, turn, result = model.sent[1]["messages"]
    assert (user["content"], result["content"]) == ("Weather?", "sunny")
    assert turn["tool_calls"][0]["function"]["arguments"] == call.arguments
    assert second.previous_response_id == first.id


async def test_output_items_sent_back_are_the_models_turn() -> None:
    model = ModelBehindResponses("reasoning_chat", "chat_plain")
    async with client_of(model) as client:
        first = await client.responses.create(model="m", input="Is 7 prime?")
        history: Any = [{"role": "user", "content": "Is 7 prime?"}, *first.output]
        history.append({"role": "user", "content": "And 8?"})
        await client.responses.create(model="m", input=history)
    assert model.sent[1]["messages"] == [
        {"role": "user", "content": "Is 7 prime?"},
        {
            "role": "assistant",
            "content": "\n\nYes, 7 is prime.",
            "reasoning": "\n7 has no divisors but 1 and 7.\n",
        },
        {"role": "user", "content": "And 8?"},
    ]


async def test_streamed_calls_in_parallel_are_put_together() -> None:
    case = "chat_tools_auto_parallel_stream"
    async with (
        client_of(ModelBehindResponses(case)) as client,
        client.responses.stream(model="m", input="x", tools=[WEATHER]) as stream,
    ):
        snapshots: dict[str, str] = {}
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshots[event.item_id] = event.snapshot
        response = await stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == 2
    assert snapshots == {call.id: call.arguments for call in calls}


async def test_a_custom_tool_is_called_with_text() -> None:
    arguments = json.dumps({"input": "*** Begin Patch\n"})
    function = {"name": "apply_patch", "arguments": arguments}
    message = {"content": None, "tool_calls": [{"id": "c1", "function": function}]}
    chat = {"id": "c", "created": 1, "choices": [{"message": message, "finish_reason": "stop"}]}
    model = ModelBehindResponses((200, json.dumps(chat).encode()), "chat_plain")
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools: Any = [{"type": "custom", "name": "apply_patch", "format": grammar}]
    async with client_of(model) as client:
        response = await client.responses.create(model="m", input="x", tools=tools)
        (call,) = response.output
        assert (call.type, call.input) == ("custom_tool_call", "*** Begin Patch\n")
        output: Any = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
        await client.responses.create(model="m", input=[call, output], tools=tools)
    turn, result = model.sent[1]["messages"]
    assert turn["tool_calls"][0]["function"] == function
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}


async def test_logprobs_are_read() -> None:
    async with client_of(ModelBehindResponses("chat_logprobs")) as client:
        response = await client.responses.create(
            model="m", input="x", include=["message.output_text.logprobs"], top_logprobs=3
        )
    logprobs = response.output[0].content[0].logprobs
    assert [token.token for token in logprobs][:2] == ["Hel", "lo"]
    assert len(logprobs[0].top_logprobs) == 3


async def test_a_cut_answer_is_read_as_incomplete() -> None:
    model = ModelBehindResponses("chat_length", "chat_length_stream")
    async with client_of(model) as client:
        whole = await client.responses.create(model="m", input="x", max_output_tokens=4)
        stream = await client.responses.create(model="m", input="x", stream=True)
        events = [event async for event in stream]
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


async def test_an_error_inside_a_stream_is_raised() -> None:
    async with client_of(ModelBehindResponses("kill_engine_stream")) as client:
        stream = await client.responses.create(model="m", input="x", stream=True)
        with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
            async for _event in stream:
                pass


async def test_an_unknown_previous_response_is_a_not_found_error() -> None:
    async with client_of(ModelBehindResponses()) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id="resp_gone")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_a_context_error_is_a_bad_request_in_vllms_words() -> None:
    body = (VLLM / "error_context_prompt" / "response.body").read_bytes()
    async with client_of(ModelBehindResponses((400, body))) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.responses.create(model="m", input="x", stream=True)
