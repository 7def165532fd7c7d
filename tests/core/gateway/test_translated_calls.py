"""Messages and Responses through the whole service, to a model server that speaks only chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import attrs
import openai
import pytest
import pytest_asyncio

from agl_core.testing.fake_vllm import (
    FakeVllm,
    Output,
    VllmAnswer,
    answering,
    cutting,
    each,
    hanging_up,
    saying,
)
from agl_core.testing.raw_http import Exchange, SeenRequest
from agl_core.testing.replay import CASE_HEADER, ReplayServer, load_recordings
from agl_core.testing.service import RunningService, running_service
from agl_core.testing.translated import read_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = Path(__file__).parents[2] / "data"
RECORDINGS = load_recordings(DATA / "vllm")
HARNESS = DATA / "harness"
REQUESTS = sorted(
    path
    for pattern in ("*/*/*/request.json", "vllm-replay/*/request.json")
    for path in HARNESS.glob(pattern)
    if path.parent.name.rpartition("_")[2] != "tokens"
)
HELLO: Any = [{"role": "user", "content": "Hello!"}]
MESSAGE: Any = {"model": "replayed", "max_tokens": 9, "messages": HELLO}
LAST_EVENTS = {
    "chat": b"data: [DONE]",
    "messages": b"event: message_stop",
    "responses": b"event: response.completed",
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FUNCTION: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": WEATHER["input_schema"],
    "strict": False,
}
CASES = ["chat_token_ids_logprobs", "chat_tools_auto", "chat_tools_auto_parallel", "reasoning_chat"]


@attrs.define
class Agents:
    """Both SDKs as an agent has them, a server that replays recordings and one of scripts."""

    service: RunningService
    claude: anthropic.AsyncAnthropic
    client: openai.AsyncOpenAI
    replay: ReplayServer
    fake: FakeVllm

    async def event(self) -> dict[str, Any]:
        """The record of the last call."""
        return (await self.service.events("r"))[-1]

    async def triplets(self) -> list[dict[str, Any]]:
        """What is exported of the rollout."""
        (line,) = await self.lines("triplet")
        found: list[dict[str, Any]] = line["triplets"]
        return found

    async def lines(self, name: str) -> list[Any]:
        url = f"{self.service.url}/api/export/{name}?ids=r"
        return [json.loads(line) for line in (await self.service.client.get(url)).text.splitlines()]


@pytest_asyncio.fixture(loop_scope="module")
async def agents() -> AsyncIterator[Agents]:
    async with (
        ReplayServer(RECORDINGS) as replay,
        FakeVllm(saying()) as fake,
        running_service() as service,
    ):
        await service.register(replay.endpoint, "replayed")
        await service.register(fake.endpoint, "fake", aliases=["*"])
        await service.rollout("r")
        token = (await service.api("POST", "/rollouts/r/token"))["token"]
        base = service.base("r")
        async with (
            anthropic.AsyncAnthropic(
                base_url=base.removesuffix("/v1"), api_key=token, max_retries=0
            ) as claude,
            openai.AsyncOpenAI(base_url=base, api_key=token, max_retries=0) as client,
        ):
            yield Agents(service, claude, client, replay, fake)


def replayed(name: str) -> dict[str, str]:
    return {CASE_HEADER: name}


def recorded_choice(name: str) -> dict[str, Any]:
    """The choice of a recorded whole answer."""
    choice: dict[str, Any] = json.loads(RECORDINGS[name].body)["choices"][0]
    return choice


def stream_ids(name: str) -> list[int]:
    """The ids of a recorded stream's first choice."""
    ids: list[int] = []
    for part in RECORDINGS[name].body.split(b"\n\n"):
        if part.startswith(b"data: {"):
            for choice in json.loads(part[6:])["choices"]:
                ids += choice.get("token_ids") or ()
    return ids


def check_tokens(event: dict[str, Any], ids: list[int]) -> None:
    (choice,) = event["choices"]
    assert (event["status"], choice["tokens"]) == ("ok", "complete")
    assert choice["token_ids"] == ids
    assert len(choice["logprobs"]) == len(ids)


# Anthropic Messages


@pytest.mark.parametrize("name", CASES)
async def test_message_is_captured_with_the_tokens_of_the_chat_answer(
    agents: Agents, name: str
) -> None:
    raw = await agents.claude.messages.with_raw_response.create(
        **MESSAGE, tools=[WEATHER], extra_headers=replayed(name)
    )
    message: Any = await raw.parse()
    expected, event = recorded_choice(name), await agents.event()
    check_tokens(event, expected["token_ids"])
    assert (event["api"], event["path"]) == ("messages", "messages")
    assert raw.headers["x-request-id"] == event["call_id"]
    calls = expected["message"].get("tool_calls") or ()
    used = [block for block in message.content if block.type == "tool_use"]
    assert [(b.name, b.input) for b in used] == [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls
    ]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    if name.startswith("reasoning"):
        assert [block.type for block in message.content] == ["thinking", "text"]
    # The agent's own words, what was sent in their place, and the answer as the agent got it.
    assert event["request"] == {**MESSAGE, "tools": [WEATHER]}
    assert event["response"] == json.loads(await raw.text())
    sent = agents.replay.requests[-1].json()
    assert agents.replay.requests[-1].target == "/v1/chat/completions"
    assert event["sent"] == sent
    assert sent["return_token_ids"] is True
    (triplet,) = await agents.triplets()
    assert triplet["response_token_ids"] == expected["token_ids"]


@pytest.mark.parametrize("name", CASES)
async def test_streamed_message_is_the_record_of_it(agents: Agents, name: str) -> None:
    async with agents.claude.messages.stream(
        **MESSAGE, tools=[WEATHER], extra_headers=replayed(f"{name}_stream")
    ) as stream:
        message = await stream.get_final_message()
    event = await agents.event()
    check_tokens(event, stream_ids(f"{name}_stream"))
    kept = event["response"]
    assert [b["type"] for b in kept["content"]] == [b.type for b in message.content]
    for block, seen in zip(kept["content"], message.content, strict=True):
        for field in {"text", "input", "thinking", "id", "name"} & block.keys():
            assert block[field] == getattr(seen, field)
    assert kept["stop_reason"] == message.stop_reason
    assert kept["usage"]["output_tokens"] == message.usage.output_tokens
    assert len(await agents.triplets()) == 1


async def test_tool_runner_whose_thread_is_refused_sends_its_whole_history(
    agents: Agents,
) -> None:
    city = Output(texts=('{"city": ', '"Berlin"', "}", ""), tool="get_weather")
    agents.fake.script = each(saying(city), saying())
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return "sunny"

    answers: list[tuple[int, bool]] = []

    async def note(response: Any) -> None:
        answers.append((response.status_code, "thread" in json.loads(response.request.content)))

    async with anthropic.AsyncAnthropic(
        base_url=agents.service.base("r").removesuffix("/v1"),
        api_key="k",
        http_client=anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [note]}),
    ) as client:
        runner = client.beta.messages.tool_runner(
            model="fake", max_tokens=9, messages=HELLO, tools=[get_weather]
        )
        last = await runner.until_done()
    assert answers == [(400, True), (200, False), (200, False)]
    assert asked == ["Berlin"]
    assert [block.type for block in last.content] == ["text"]
    first, second = (request.json() for request in agents.fake.requests)
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Berlin"}'
    assert second["messages"][2]["content"] == "sunny"
    assert len(await agents.triplets()) == 2


async def test_c11_c86_counted_tokens_are_those_of_the_call_that_follows(agents: Agents) -> None:
    agents.fake.script = counting
    fields: Any = {
        "model": "fake",
        "system": "word " * 500,
        "messages": HELLO,
        "tools": [WEATHER, {**WEATHER, "name": "other"}],
    }
    counted = await agents.claude.messages.count_tokens(**fields)
    message = await agents.claude.messages.create(**fields, max_tokens=9)
    tokenize, call = agents.fake.requests
    assert tokenize.target == "/tokenize"
    event = await agents.event()
    assert counted.input_tokens == message.usage.input_tokens > 500
    assert counted.input_tokens == len(event["choices"][0]["prompt_token_ids"])
    assert tokenize.json()["messages"] == call.json()["messages"]
    assert not {"return_token_ids", "logprobs", "temperature"} & tokenize.json().keys()


async def counting(exchange: Exchange) -> None:
    """A server whose prompt has a token for each word of messages and tools."""
    asked = exchange.request.json()
    words = json.dumps([asked["messages"], asked.get("tools")]).split()
    if exchange.request.target == "/tokenize":
        exchange.whole_json(200, {"count": len(words), "max_model_len": 1024, "tokens": []})
        return
    whole = VllmAnswer(asked).whole()
    whole["prompt_token_ids"] = list(range(len(words)))
    whole["usage"]["prompt_tokens"] = len(words)
    exchange.whole_json(200, whole)


async def test_c12_calls_with_different_billing_lines_have_one_prefix(agents: Agents) -> None:
    async def ask(billing: str, messages: Any) -> Any:
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version={billing};"},
            {"type": "text", "text": "You write code."},
        ]
        return await agents.claude.messages.create(
            model="fake", max_tokens=9, system=system, messages=messages
        )

    first = await ask("a1", HELLO)
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": "more"},
    ]
    await ask("b2", history)
    sent = [request.json()["messages"] for request in agents.fake.requests]
    assert sent[1][: len(sent[0])] == sent[0]
    assert sent[1][len(sent[0])] == {"role": "assistant", "content": "Hello!"}
    assert "billing" not in json.dumps(sent)
    kept = await agents.service.events("r")
    for event, billing in zip(kept, ("a1", "b2"), strict=True):
        line = f"x-anthropic-billing-header: cc_version={billing};"
        assert event["request"]["system"][0]["text"] == line
        assert event["normalised"]["billing_lines"] == [line]


# OpenAI Responses


@pytest.mark.parametrize("name", CASES)
async def test_response_is_captured_with_the_tokens_of_the_chat_answer(
    agents: Agents, name: str
) -> None:
    response = await agents.client.responses.create(
        model="replayed", input="Hello!", tools=[FUNCTION], extra_headers=replayed(name)
    )
    expected, event = recorded_choice(name), await agents.event()
    check_tokens(event, expected["token_ids"])
    assert (event["api"], event["request"]["input"]) == ("responses", "Hello!")
    calls = expected["message"].get("tool_calls") or ()
    made = [item for item in response.output if item.type == "function_call"]
    assert [(c.call_id, c.arguments) for c in made] == [
        (c["id"], c["function"]["arguments"]) for c in calls
    ]
    assert event["response"]["id"] == response.id
    assert event["sent"] == agents.replay.requests[-1].json()
    assert len(await agents.triplets()) == 1


@pytest.mark.parametrize("name", CASES)
async def test_c21_c23_streamed_response_is_the_record_of_it(agents: Agents, name: str) -> None:
    async with agents.client.responses.stream(
        model="replayed",
        input="Hello!",
        tools=[FUNCTION],
        extra_headers=replayed(f"{name}_stream"),
    ) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    event = await agents.event()
    check_tokens(event, stream_ids(f"{name}_stream"))
    assert event["response"]["id"] == response.id
    assert [item["type"] for item in event["response"]["output"]] == [
        item.type for item in response.output
    ]
    made = [item for item in response.output if item.type == "function_call"]
    if name.startswith("chat_tools"):
        assert len(made) == (2 if name.endswith("parallel") else 1)
        assert all(json.loads(call.arguments)["city"] for call in made)


async def test_response_goes_on_from_the_one_before(agents: Agents) -> None:
    city = Output(texts=('{"city": ', '"Berlin"', "}", ""), tool="get_weather")
    agents.fake.script = each(saying(city), saying())
    first = await agents.client.responses.create(model="fake", input="Hello!", tools=[FUNCTION])
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await agents.client.responses.create(
        model="fake", previous_response_id=first.id, input=[result], tools=[FUNCTION]
    )
    assert second.output_text == "Hello!"
    messages = agents.fake.requests[-1].json()["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Berlin"}'
    assert len(await agents.triplets()) == 2


async def test_response_of_another_rollout_cannot_be_gone_on_from(agents: Agents) -> None:
    first = await agents.client.responses.create(model="fake", input="Hello!")
    await agents.service.rollout("other")
    async with openai.AsyncOpenAI(
        base_url=agents.service.base("other"), api_key="k", max_retries=0
    ) as stranger:
        with pytest.raises(openai.NotFoundError) as unknown:
            await stranger.responses.create(
                model="fake", input="and?", previous_response_id=first.id
            )
    assert unknown.value.code == "previous_response_not_found"
    assert len(agents.fake.requests) == 1


async def test_c26_usage_of_zero_is_kept_and_the_translated_stream_has_usage(
    agents: Agents,
) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    agents.fake.script = saying(usage=details)
    async with agents.client.responses.stream(model="fake", input="Hello!") as stream:
        response = await stream.get_final_response()
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 0
    event = await agents.event()
    assert event["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert event["usage"]["completion_tokens"] == response.usage.output_tokens == 4


# What harnesses send


def below_v1(path: Path) -> str:
    target: str = json.loads((path.parent / "meta.json").read_bytes())["path"]
    return target.split("/v1/", 1)[1]


def body_of(path: Path) -> bytes:
    return path.read_bytes()


def headers_of(path: Path) -> dict[str, str]:
    """Recorded headers, but for those that belong to a connection and a key."""
    told = path.parent / "request.headers.json"
    given = dict(json.loads(told.read_bytes())) if told.exists() else {}
    own = {"host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key"}
    return {name: value for name, value in given.items() if name.lower() not in own}


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(HARNESS).parts[:-1])


def refusal_of(below: str, request: dict[str, Any]) -> str | None:
    """Why a recorded request is refused, or None."""
    if request.get("thread") is not None:
        return "threads are not supported"
    if request.get("previous_response_id") or "item_reference" in json.dumps(request.get("input")):
        return "not found"  # it goes on from an answer of the recorded server
    tools = request.get("tools") or ()
    if below.startswith("messages") and any("input_schema" not in tool for tool in tools):
        return "Field required"
    return None


@pytest.mark.parametrize("harness", sorted({name_of(p).partition("/")[0] for p in REQUESTS}))
async def test_recorded_harness_requests_are_served_and_captured(
    agents: Agents, harness: str
) -> None:
    for path in REQUESTS:
        if name_of(path).startswith(f"{harness}/"):
            await check_request(agents, path)


async def check_request(agents: Agents, path: Path) -> None:
    count = len(agents.fake.requests)
    body, below = body_of(path), below_v1(path)
    request = json.loads(body)
    got = await agents.service.call("r", body, below, headers=headers_of(path))
    refusal = refusal_of(below, request)
    if refusal is not None:
        assert got.status in (400, 404)
        assert refusal in got.json()["error"]["message"]
        assert len(agents.fake.requests) == count
        return
    assert (got.status, got.is_clean) == (200, True), name_of(path)
    event = await agents.event()
    assert event["api"] == below.partition("?")[0].replace("chat/completions", "chat")
    assert [choice["tokens"] for choice in event["choices"]] == ["complete"]
    assert event["request"] == request
    check_chat_request(agents.fake.requests[-1])
    if request.get("stream"):
        assert got.body.count(LAST_EVENTS[event["api"]]) == 1
    else:
        assert got.json() == event["response"]


def check_chat_request(sent: SeenRequest) -> None:
    """What vLLM's chat route would take."""
    assert sent.target.partition("?")[0] == "/v1/chat/completions"
    body = sent.json()
    assert body["messages"]
    for message in body["messages"]:
        assert message["role"] in ("system", "developer", "user", "assistant", "tool")
        for call in message.get("tool_calls") or ():
            assert isinstance(call["function"]["arguments"], str)
    for tool in body.get("tools") or ():
        assert tool["type"] == "function"
        assert tool["function"]["parameters"]["type"] == "object"
    assert body["return_token_ids"] is True
    assert not {"system", "input", "thinking", "instructions", "thread"} & body.keys()


# Errors


@pytest.mark.parametrize("name", ["error_context_prompt", "error_context_max_tokens"])
async def test_c82_full_context_is_a_400_with_vllms_own_words(agents: Agents, name: str) -> None:
    says: str = json.loads(RECORDINGS[name].body)["error"]["message"]
    with pytest.raises(anthropic.BadRequestError) as claude:
        await agents.claude.messages.create(**MESSAGE, extra_headers=replayed(name))
    with pytest.raises(openai.BadRequestError) as client:
        await agents.client.responses.create(
            model="replayed", input="Hello!", extra_headers=replayed(name)
        )
    body: Any = claude.value.body
    assert body["error"] == {"type": "invalid_request_error", "message": says}
    assert says in client.value.message
    statuses = [(e["status"], e["http_status"]) for e in await agents.service.events("r")]
    assert statuses == [("upstream_error", 400)] * 2
    (line,) = await agents.lines("triplet")
    expected = {"context_exhausted": 2} if "maximum context length is" in says else None
    assert line["skipped"] == (expected or {"upstream_error": 2})


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_refused_calls_say_when_to_come_again(agents: Agents, path: str) -> None:
    body = {**MESSAGE, "model": "fake", "input": "Hello!"}
    agents.fake.script = answering(429, {"error": {"message": "full"}}, [("retry-after", "0.01")])
    busy = await agents.service.call("r", body, path)
    assert (busy.status, busy.headers["retry-after"]) == (429, "0.01")
    assert busy.headers["x-should-retry"] == "false"
    assert busy.json()["error"]["message"] == "full"
    await agents.service.api("POST", "/gateway/pause", {"policy": "fake", "mode": "reject"})
    paused = await agents.service.call("r", body, path)
    assert (paused.status, paused.code) == (503, "policy_paused")
    assert int(paused.headers["retry-after"]) >= 1
    kinds = {"messages": "overloaded_error", "responses": "server_error"}
    assert paused.json()["error"]["type"] == kinds[path]
    assert "x-should-retry" not in paused.headers


@pytest.mark.parametrize(("path", "error_type"), [("messages", "error"), ("responses", "error")])
async def test_stream_that_breaks_off_ends_in_the_dialects_error_and_uncleanly(
    agents: Agents, path: str, error_type: str
) -> None:
    agents.fake.script = cutting(3)
    body = {**MESSAGE, "model": "fake", "input": "Hello!", "stream": True}
    got = await agents.service.call("r", body, path)
    assert not got.is_clean
    name, last = read_events(got.body)[-1]
    assert name == "error"
    assert last.get("type", error_type) == error_type
    assert last["error"]["code"] == "upstream_truncated"
    event = await agents.event()
    assert event["status"] == "truncated"
    assert event["choices"][0]["tokens"] == "incomplete"
    assert event["choices"][0]["token_ids"] == [11, 12]
    assert await agents.triplets() == []


async def test_sdks_raise_on_a_stream_that_breaks_off(agents: Agents) -> None:
    agents.fake.script = cutting(3)
    with pytest.raises(anthropic.APIStatusError, match="closed"):
        async with agents.claude.messages.stream(
            model="fake", max_tokens=9, messages=HELLO
        ) as claude:
            await claude.get_final_message()
    with pytest.raises(openai.APIError) as broken:
        async with agents.client.responses.stream(model="fake", input="Hello!") as stream:
            await stream.get_final_response()
    assert broken.value.code == "upstream_truncated"


async def test_error_inside_a_stream_is_the_dialects(agents: Agents) -> None:
    async def failing(exchange: Exchange) -> None:
        made = VllmAnswer(exchange.request.json())
        exchange.begin(200, [("content-type", "text/event-stream")])
        exchange.write(next(made.events()))
        exchange.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    agents.fake.script = failing
    with pytest.raises(anthropic.APIStatusError, match="engine died"):
        async with agents.claude.messages.stream(
            model="fake", max_tokens=9, messages=HELLO
        ) as stream:
            await stream.get_final_message()
    event = await agents.event()
    assert event["status"] == "upstream_error"
    assert event["error"]["message"] == "engine died"


async def test_server_that_hangs_up_is_a_502_in_the_dialects_shape(agents: Agents) -> None:
    agents.fake.script = hanging_up
    with pytest.raises(anthropic.InternalServerError) as claude:
        await agents.claude.messages.create(model="fake", max_tokens=9, messages=HELLO)
    body: Any = claude.value.body
    assert (claude.value.status_code, body["type"]) == (502, "error")
