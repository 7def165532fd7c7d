"""The official ``anthropic`` package reads what the translation of recorded chat answers gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import Unavailable
from agl_core.gateway.dialects.messages import (
    MessagesDialect,
    count_answer,
    count_request,
    error_of,
)
from agl_core.gateway.dialects.translation import TranslationError
from agl_core.testing.servers import serve_asgi
from agl_core.testing.translated import JSON_TYPE, STREAM_TYPE, open_captured, with_usage

anthropic = pytest.importorskip("anthropic", reason="the dev extra brings the anthropic package")

VLLM = Path(__file__).parents[2] / "data" / "vllm"
MESSAGES = MessagesDialect()
HELLO: Any = [{"role": "user", "content": "Hello!"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class ModelBehindMessages:
    """A server of the Messages API whose model is a recording of chat completions.

    Each call takes the next of ``cases``; a case that is no recording is an error body by status.
    """

    def __init__(self, *cases: str) -> None:
        self.cases = list(cases)
        self.sent: list[dict[str, Any]] = []
        self.generated: dict[str, str] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, content_type, parts = self._answer(scope["path"], body)
        headers = [(b"content-type", content_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _answer(self, path: str, body: bytes) -> tuple[int, str, list[bytes]]:
        parsed = MESSAGES.read_request(body)
        if path.endswith("/count_tokens"):
            _path, request = count_request(parsed)
            self.sent.append(json.loads(request.body))
            told = (VLLM / "tokenize_chat" / "response.body").read_bytes()
            status, shown = count_answer(200, told)
            return status, JSON_TYPE, [shown]
        try:
            translation = MESSAGES.translate(parsed, generated=self.generated)
        except TranslationError as exc:
            return exc.status, JSON_TYPE, [json.dumps(error_of(exc)).encode()]
        self.sent.append(json.loads(translation.request.body))
        case = self.cases.pop(0)
        if case.isdigit():
            busy = json.dumps(error_of(Unavailable("busy"))).encode()
            return int(case), JSON_TYPE, [busy]
        folder = VLLM / (f"{case}_stream" if parsed.stream else case)
        chat = (folder / "response.body").read_bytes()
        head = json.loads((folder / "response.headers.json").read_bytes())
        if not parsed.stream or head["status"] != 200:
            tee = open_captured(translation, JSON_TYPE, head["status"])
            parts = [tee.whole(chat)]
        else:
            usage = json.loads((VLLM / case / "response.body").read_bytes()).get("usage")
            chat = with_usage(chat, usage) if usage else chat
            tee = open_captured(translation, STREAM_TYPE)
            parts = [tee.feed(chat[at : at + 300]) for at in range(0, len(chat), 300)]
            parts.append(tee.finish())
        self.generated.update(tee.generated)
        return head["status"], tee.content_type, parts


@asynccontextmanager
async def client_of(model: ModelBehindMessages) -> AsyncIterator[Any]:
    async with (
        serve_asgi(model) as url,
        anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0) as client,
    ):
        yield client


async def test_a_message_is_read() -> None:
    model = ModelBehindMessages("chat_plain")
    async with client_of(model) as client:
        message = await client.messages.create(model="claude-x", max_tokens=9, messages=HELLO)
    assert [block.text for block in message.content] == ["Hello! How can I help you today?"]
    assert (message.model, message.role, message.stop_reason) == (
        "claude-x",
        "assistant",
        "end_turn",
    )
    assert (message.usage.input_tokens, message.usage.output_tokens) == (26, 14)
    assert model.sent[0]["messages"] == HELLO


async def test_a_streamed_message_is_read_by_the_helper() -> None:
    model = ModelBehindMessages("chat_plain")
    async with (
        client_of(model) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert len(texts) == 13
    assert "".join(texts) == message.content[0].text == "Hello! How can I help you today?"
    assert message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (26, 14)


async def test_streamed_thinking_is_read_by_the_helper() -> None:
    model = ModelBehindMessages("reasoning_chat")
    kinds = []
    async with (
        client_of(model) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        async for event in stream:
            if event.type not in kinds:
                kinds.append(event.type)
        message = await stream.get_final_message()
    thinking, said = message.content
    assert thinking.thinking == "\n7 has no divisors but 1 and 7.\n"
    assert thinking.signature
    assert said.text == "\n\nYes, 7 is prime."
    assert "signature" in kinds
    assert kinds[-1] == "message_stop"


@pytest.mark.parametrize("case", ["chat_tools_auto", "chat_tools_auto_parallel"])
async def test_tool_calls_are_the_same_streamed_or_not(case: str) -> None:
    model = ModelBehindMessages(case, case)
    async with client_of(model) as client:
        whole = await client.messages.create(
            model="m", max_tokens=9, messages=HELLO, tools=[WEATHER]
        )
        async with client.messages.stream(
            model="m", max_tokens=9, messages=HELLO, tools=[WEATHER]
        ) as stream:
            streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    calls = [(block.type, block.name, block.input) for block in streamed.content]
    assert calls == [(block.type, block.name, block.input) for block in whole.content]
    assert calls[0] == ("tool_use", "get_weather", calls[0][2])
    assert len(calls) == (2 if case.endswith("parallel") else 1)
    assert len({block.id for block in streamed.content}) == len(calls)


async def test_a_tool_runner_without_threads_works_through_its_turns() -> None:
    model = ModelBehindMessages("chat_tools_auto", "chat_tool_result")
    cities: list[str] = []

    @anthropic.beta_async_tool  # type: ignore[untyped-decorator, unused-ignore]
    async def get_weather(city: str, unit: str = "") -> str:
        """Return the weather of a city.

        Args:
            city: The city.
            unit: The unit.
        """
        cities.append(f"{city} {unit}")
        return "sunny"

    async with client_of(model) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=9, messages=HELLO, tools=[get_weather]
        )
        last = await runner.until_done()
    assert cities == ["Berlin celsius"]
    assert last.content[0].text == "It is 18 degrees and cloudy in Paris."
    first, second = model.sent
    assert second["messages"][:1] == first["messages"]
    sent = second["messages"][1]["tool_calls"][0]
    # The very text that the model wrote, though the SDK sends it back as an object.
    assert sent["function"]["arguments"] == model.generated[sent["id"]]
    assert second["messages"][2] == {
        "role": "tool",
        "tool_call_id": sent["id"],
        "content": "sunny",
    }


async def test_tokens_are_counted() -> None:
    model = ModelBehindMessages()
    async with client_of(model) as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
    assert counted.input_tokens == 26


async def test_errors_are_the_sdks_own_exceptions() -> None:
    model = ModelBehindMessages("error_context_prompt", "503")
    async with client_of(model) as client:
        with pytest.raises(anthropic.BadRequestError, match="maximum context length") as caught:
            await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.APIStatusError) as busy:
            await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert busy.value.status_code == 503
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.post("/v1/messages", cast_to=object, body={"messages": HELLO})


async def test_an_error_inside_a_stream_is_an_exception() -> None:
    model = ModelBehindMessages("error_top_logprobs_many")
    async with client_of(model) as client:
        with pytest.raises(anthropic.APIStatusError, match="sample logprobs"):
            async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
                await stream.get_final_message()
