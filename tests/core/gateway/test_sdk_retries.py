"""The official SDKs with their own defaults: their retries must not multiply the gateway's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import attrs
import openai
import pytest
import pytest_asyncio

from agl_core.testing.fake_vllm import FakeVllm, answering, cutting, hanging_up, saying, silent
from agl_core.testing.service import RunningService, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: Any = [{"role": "user", "content": "Hi"}]
SDKS = ["chat", "completions", "responses", "messages"]
FAILED = (openai.APIStatusError, anthropic.APIStatusError)


@attrs.define
class Agents:
    """Both SDKs as they come."""

    service: RunningService
    server: FakeVllm
    client: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic

    async def ask(self, api: str, **more: Any) -> Any:
        """Make one call as an agent's code has it."""
        if api == "messages":
            return await self.claude.messages.create(
                model="m", max_tokens=9, messages=HELLO, **more
            )
        if api == "responses":
            return await self.client.responses.create(model="m", input="Hi", **more)
        if api == "completions":
            return await self.client.completions.create(model="m", prompt="Hi", **more)
        return await self.client.chat.completions.create(model="m", messages=HELLO, **more)


@pytest_asyncio.fixture(loop_scope="module")
async def agents() -> AsyncIterator[Agents]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeVllm(saying()))
        gateway = {"retries": 2, "first_byte_seconds": 0.3}
        service = await stack.enter_async_context(running_service({"gateway": gateway}))
        await service.register(server.endpoint)
        await service.rollout("r")
        base = service.base("r")
        client = openai.AsyncOpenAI(base_url=base, api_key="k")
        claude = anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="k")
        async with client, claude:
            assert client.max_retries == claude.max_retries == 2
            yield Agents(service, server, client, claude)


@pytest.mark.parametrize("api", SDKS)
async def test_c84_server_that_always_fails_is_called_three_times_in_all(
    agents: Agents, api: str
) -> None:
    agents.server.script = answering(500, {"error": {"message": "no"}})
    with pytest.raises(FAILED) as failed:
        await agents.ask(api)
    error: Any = failed.value
    assert error.status_code == 500
    assert len(agents.server.requests) == 3
    (event,) = await agents.service.events("r")
    assert (event["status"], event["retries"]) == ("upstream_error", 2)
    assert error.response.headers["x-request-id"] == event["call_id"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_c84_server_that_dies_under_each_call_is_called_three_times_in_all(
    agents: Agents, api: str, stream: bool
) -> None:
    agents.server.script = hanging_up
    with pytest.raises(FAILED) as failed:
        await agents.ask(api, stream=stream)
    error: Any = failed.value
    assert error.status_code == 502
    assert len(agents.server.requests) == 3
    (event,) = await agents.service.events("r")
    assert event["error"]["code"] == "upstream_truncated"


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_c84_refused_connections_are_told_once(agents: Agents, api: str) -> None:
    agents.server.refuse()
    with pytest.raises(FAILED) as failed:
        await agents.ask(api)
    error: Any = failed.value
    assert error.status_code == 502
    (event,) = await agents.service.events("r")
    assert event["retries"] == 2


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_c84_silent_server_is_asked_again_by_the_sdk_alone(agents: Agents, api: str) -> None:
    """The engine may still be at it, so the gateway does not ask it again on its own."""
    agents.server.script = silent
    with pytest.raises(FAILED) as failed:
        await agents.ask(api)
    error: Any = failed.value
    assert error.status_code == 504
    assert len(agents.server.requests) == 3
    events = await agents.service.events("r")
    assert [(event["status"], event["retries"]) for event in events] == [("timeout", 0)] * 3


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_c84_answer_that_breaks_off_is_asked_for_once(agents: Agents, api: str) -> None:
    agents.server.script = cutting(3)

    async def read() -> None:
        async for _ in await agents.ask(api, stream=True):
            pass

    with pytest.raises((openai.APIError, anthropic.APIError)):
        await read()
    assert len(agents.server.requests) == 1
