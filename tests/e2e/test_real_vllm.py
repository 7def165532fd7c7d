"""A real vLLM behind the whole service.

Needs ``AGL_TEST_VLLM``, such as ``http://127.0.0.1:8101/v1``: a server of a small chat model with a
tool parser, started with ``--enable-auto-tool-choice``. The first model that it lists is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agl_core.testing.fake_vllm import FakeVllm, saying
from agl_core.testing.service import RunningService, chat, running_service
from agl_vllm.loads import requests_of

ENDPOINT = os.environ.get("AGL_TEST_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not ENDPOINT, reason="needs AGL_TEST_VLLM, the URL of a real vLLM server"),
]
HELLO: Any = [{"role": "user", "content": "Hello!"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


@pytest.fixture
async def service() -> AsyncIterator[RunningService]:
    async with running_service() as service:
        async with httpx.AsyncClient() as client:
            listed = (await client.get(f"{ENDPOINT}/models")).json()["data"]
        await service.register(ENDPOINT, "m", served_model=listed[0]["id"])
        await service.rollout("r")
        yield service


def openai_client(service: RunningService) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.base("r"), api_key="none", max_retries=0)


def anthropic_client(service: RunningService) -> anthropic.AsyncAnthropic:
    base = service.base("r").removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)


async def proved(service: RunningService) -> list[str]:
    """The APIs of the calls recorded, all of whose choices are complete."""
    events = await service.events("r")
    assert {choice["tokens"] for event in events for choice in event["choices"]} == {"complete"}
    return [event["api"] for event in events]


async def test_chat_streamed_and_not_is_proved(service: RunningService) -> None:
    async with openai_client(service) as client:
        whole = await client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=16, temperature=0
        )
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=16, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text
    assert await proved(service) == ["chat", "chat"]


async def test_messages_are_proved_and_counted_exactly(service: RunningService) -> None:
    async with anthropic_client(service) as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO, tools=TOOLS)
        async with client.messages.stream(
            model="m", max_tokens=40, messages=HELLO, tools=TOOLS
        ) as stream:
            message = await stream.get_final_message()
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert await proved(service) == ["other", "messages"]


async def test_responses_continue_from_each_other(service: RunningService) -> None:
    async with openai_client(service) as client:
        first = await client.responses.create(model="m", input="Hello!", max_output_tokens=24)
        async with client.responses.stream(
            model="m", input="Thanks", previous_response_id=first.id, max_output_tokens=24
        ) as stream:
            ends = [event async for event in stream if hasattr(event, "response")]
    assert first.usage is not None
    assert ends[-1].type in ("response.completed", "response.incomplete")
    assert ends[-1].response.usage.input_tokens > first.usage.input_tokens
    assert await proved(service) == ["responses", "responses"]


async def test_load_from_elsewhere_is_known() -> None:
    tables = {"plugins": {"vllm": {"load_seconds": 0.2}}}
    # The real server comes first, so that it gets the call while nobody is known to be there.
    async with (
        running_service(tables) as service,
        FakeVllm(saying()) as idle,
        httpx.AsyncClient(base_url=ENDPOINT, timeout=60) as client,
    ):
        model = (await client.get("/models")).json()["data"][0]["id"]
        body = chat(model=model, max_tokens=1000, min_tokens=1000, ignore_eos=True)
        elsewhere = [
            asyncio.create_task(client.post("/chat/completions", json=body)) for _ in range(3)
        ]
        try:
            async with asyncio.timeout(30):
                page = b""
                while requests_of(page) != 3:
                    page = (await client.get(ENDPOINT.removesuffix("/v1") + "/metrics")).content
                for endpoint in (ENDPOINT, idle.endpoint):
                    await service.register(endpoint, served_model=model)
                while idle.asked_of_engine("/metrics") < 3:
                    await service.state()
                await service.call(await service.rollout("r"), chat(max_tokens=4))
            assert not any(call.done() for call in elsewhere)
            (recorded,) = await service.events("r")
            assert recorded["server"]["endpoint"] == idle.endpoint
        finally:
            for call in elsewhere:
                call.cancel()
            await asyncio.gather(*elsewhere, return_exceptions=True)
