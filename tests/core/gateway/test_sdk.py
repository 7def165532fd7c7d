"""The official OpenAI SDK, against the gateway and recorded answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
import pytest_asyncio

from agl_core.testing.fake_vllm import FakeVllm, answering, cutting, each, saying
from agl_core.testing.replay import CASE_HEADER, ReplayServer, load_recordings
from agl_core.testing.service import RunningService, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDINGS = load_recordings(Path(__file__).parents[2] / "data" / "vllm")
OURS = ("return_token_ids", "logprobs", "top_logprobs", "stream_options", "model", "stream")
CASES = ["chat_token_ids", "chat_unicode", "chat_tools_auto", "chat_tools_auto_parallel", "chat_n2"]


@attrs.define
class Sdk:
    """The SDK as an agent has it: base URL and key from its environment."""

    service: RunningService
    client: openai.AsyncOpenAI
    fake: FakeVllm
    rollout_id: str = "r"


@pytest_asyncio.fixture(loop_scope="module")
async def sdk() -> AsyncIterator[Sdk]:
    async with (
        ReplayServer(RECORDINGS) as server,
        FakeVllm(saying()) as fake,
        running_service({"gateway": {"retries": 1}}) as service,
    ):
        await service.register(server.endpoint, "tiny-qwen")
        await service.register(fake.endpoint, "fake")
        await service.rollout("r")
        token = (await service.api("POST", "/rollouts/r/token"))["token"]
        async with openai.AsyncOpenAI(base_url=service.base("r"), api_key=token) as client:
            yield Sdk(service, client, fake)


def arguments(name: str) -> dict[str, Any]:
    """A recorded request as the SDK takes it, without what captures tokens."""
    fields = json.loads(RECORDINGS[name].request)
    known = {"messages", "tools", "tool_choice", "temperature", "seed", "n", "max_tokens", "stop"}
    extra = {k: v for k, v in fields.items() if k not in known and k not in OURS}
    return {
        **{k: v for k, v in fields.items() if k in known},
        "model": "tiny-qwen",
        "extra_headers": {CASE_HEADER: name},
        "extra_body": extra,
    }


@pytest.mark.parametrize("name", CASES)
async def test_whole_answer_is_the_recorded_one_and_its_id_the_calls(sdk: Sdk, name: str) -> None:
    raw = await sdk.client.chat.completions.with_raw_response.create(**arguments(name))
    parsed = raw.parse()
    recorded = json.loads(RECORDINGS[name].body)
    assert len(parsed.choices) == len(recorded["choices"])
    for choice, expected in zip(parsed.choices, recorded["choices"], strict=True):
        assert choice.message.content == expected["message"]["content"]
        assert choice.finish_reason == expected["finish_reason"]
        assert choice.logprobs is None
        calls = [call.function.arguments for call in choice.message.tool_calls or ()]
        wanted = [c["function"]["arguments"] for c in expected["message"].get("tool_calls") or ()]
        assert calls == wanted
    (event,) = await sdk.service.events("r")
    assert raw.headers["x-request-id"] == event["call_id"]
    assert parsed._request_id == event["call_id"]
    assert [c["token_ids"] for c in event["choices"]] == [
        choice["token_ids"] for choice in recorded["choices"]
    ]


@pytest.mark.parametrize("name", [f"{case}_stream" for case in CASES if case != "chat_unicode"])
async def test_stream_is_read_to_its_end_and_has_only_what_was_asked_for(
    sdk: Sdk, name: str
) -> None:
    stream = await sdk.client.chat.completions.create(**arguments(name), stream=True)
    texts: dict[int, str] = {}
    tools = ""
    finished: dict[int, str] = {}
    async for chunk in stream:
        assert chunk.usage is None
        choice = chunk.choices[0]
        assert choice.logprobs is None
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            tools += (call.function.name or "") + (call.function.arguments or "")
        if choice.finish_reason is not None:
            finished[choice.index] = choice.finish_reason
    (event,) = await sdk.service.events("r")
    assert event["status"] == "ok"
    for choice in event["response"]["choices"]:
        assert texts[choice["index"]] == (choice["message"]["content"] or "")
        assert finished[choice["index"]] == choice["finish_reason"]
        functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert tools == "".join(f["name"] + f["arguments"] for f in functions)
    ids = event["choices"][0]["token_ids"]
    assert len(ids) > 3
    assert stream.response.headers["x-request-id"] == event["call_id"]


async def test_completions_are_served(sdk: Sdk) -> None:
    name = "completion_token_ids"
    fields = json.loads(RECORDINGS[name].request)
    completed = await sdk.client.completions.create(
        model="tiny-qwen", prompt=fields["prompt"], extra_headers={CASE_HEADER: name}
    )
    recorded = json.loads(RECORDINGS[name].body)
    assert completed.choices[0].text == recorded["choices"][0]["text"]
    (event,) = await sdk.service.events("r")
    assert event["choices"][0]["token_ids"] == recorded["choices"][0]["token_ids"]


async def ask(sdk: Sdk, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    return await sdk.client.chat.completions.create(model="fake", messages=messages, **fields)


async def test_errors_are_those_that_the_sdk_knows(sdk: Sdk) -> None:
    error = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    sdk.fake.script = answering(400, error)
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(sdk)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.request_id == (await sdk.service.events("r"))[-1]["call_id"]
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.client.chat.completions.create(model="nobody", messages=[])
    assert unknown.value.code == "model_not_found"
    await sdk.service.api("POST", "/rollouts/r/cancel")
    with pytest.raises(openai.PermissionDeniedError) as ended:
        await ask(sdk)
    assert ended.value.code == "rollout_ended"


async def test_sdks_own_retries_do_not_multiply_ours(sdk: Sdk) -> None:
    sdk.fake.script = answering(503, {"error": {"message": "full"}})
    with pytest.raises(openai.InternalServerError):
        await ask(sdk)
    assert len(sdk.fake.requests) == 2
    assert len(await sdk.service.events("r")) == 1


async def test_stream_that_breaks_off_raises_in_the_sdk(sdk: Sdk) -> None:
    sdk.fake.script = each(cutting(3), saying())
    texts: list[str] = []

    async def read() -> None:
        async for chunk in await ask(sdk, stream=True):
            texts.extend(choice.delta.content or "" for choice in chunk.choices)

    with pytest.raises(openai.APIError) as broken:
        await read()
    assert broken.value.code == "upstream_truncated"
    assert "".join(texts) == "Hello"
    assert len(sdk.fake.requests) == 1
