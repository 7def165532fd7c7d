"""The demo's agent as the process it is, against a real model server and a receiver of events."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from quart import Quart, Response, request

import agl_demo
from agl_core.testing.servers import serve_asgi
from agl_demo.model_server import Engine, create_app
from agl_demo.policy import initial_weights
from agl_demo.vocabulary import ASSISTANT, UNKNOWN, WORDS

AGENT = Path(agl_demo.__file__).with_name("agent.py")
KEY = "agl1.k1.cg.1.c2ln"


class Surroundings:
    """The model server with a note of each request, and a place where events are posted."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.requests: list[dict[str, Any]] = []
        self.call_ids: list[str] = []
        self.events: list[tuple[str | None, Any]] = []
        self.event_status = 201
        self.url = ""

    def app(self) -> Quart:
        app = create_app(self.engine)

        @app.before_request
        async def note() -> None:
            if request.path == "/v1/chat/completions":
                self.requests.append(await request.get_json())

        @app.after_request
        async def note_id(response: Response) -> Response:
            if request.path == "/v1/chat/completions":
                self.call_ids.append(response.headers["X-Request-Id"])
            return response

        @app.post("/events")
        async def events() -> Response:
            body = json.loads(await request.get_data())
            self.events.append((request.headers.get("Authorization"), body))
            return Response(b"{}", status=self.event_status)

        return app

    async def run(self, rollout_id: str, **change: Any) -> int:
        task = {"key": "0-1", "robot": [0, 0], "charger": [2, 1], "max_calls": 6, **change}
        # Nothing but the contract and what any program gets.
        environment = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": KEY,
            "AGL_EVENT_URL": f"{self.url}/events",
            "AGL_ROLLOUT_ID": rollout_id,
            "AGL_ATTEMPT_ID": "a1",
            "AGL_TASK_INPUT": json.dumps(task),
        }
        process = await asyncio.create_subprocess_exec(sys.executable, AGENT, env=environment)
        try:
            async with asyncio.timeout(50):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture
async def around() -> AsyncIterator[Surroundings]:
    surroundings = Surroundings()
    async with serve_asgi(surroundings.app()) as url:
        surroundings.url = url
        yield surroundings


def always(word: str) -> Any:
    """Weights that say one word whatever is asked."""
    weights = initial_weights()
    weights[-1, ASSISTANT, WORDS.index(word)] += 50
    return weights


async def test_agent_makes_calls_that_build_on_each_other_and_streams_every_other_one(
    around: Surroundings,
) -> None:
    around.engine.weights = always("west")
    assert await around.run("demo-1f-0-1-3") == 0
    assert [asked["stream"] for asked in around.requests] == [False, True] * 3
    assert [asked["user"] for asked in around.requests] == [f"0-1/3:{n}" for n in range(6)]
    for asked, following in zip(around.requests, around.requests[1:], strict=False):
        extended = following["messages"][: len(asked["messages"]) + 1]
        assert extended == [*asked["messages"], {"role": "assistant", "content": "west"}]


async def test_agent_posts_a_reward_for_each_call_and_one_for_the_walk(
    around: Surroundings,
) -> None:
    around.engine.weights = always("east")
    assert await around.run("g-0", charger=[2, 0]) == 0
    [(authorization, events)] = around.events
    assert authorization == f"Bearer {KEY}"
    assert all(event["event_type"] == "reward" for event in events)
    assert [event["data"].get("call_id") for event in events] == [*around.call_ids, None]
    assert [event["data"]["value"] for event in events] == [1.0, 1.0, 1.0]
    assert events[-1]["data"]["metrics"] == {"moves": 2}


async def test_walk_that_does_not_arrive_earns_nothing(around: Surroundings) -> None:
    around.engine.weights = always("down")
    assert await around.run("g-0") == 0
    [(_, events)] = around.events
    assert [event["data"]["value"] for event in events] == [0.0] * 7


async def test_same_walk_meets_the_same_answers_in_another_run(around: Surroundings) -> None:
    assert await around.run("demo-aaaa-0-1-2") == 0
    first, around.requests[:] = list(around.requests), []
    assert await around.run("demo-bbbb-0-1-2") == 0
    assert around.requests == first
    around.requests.clear()
    assert await around.run("demo-bbbb-0-1-1") == 0
    assert around.requests != first


async def test_agent_fails_where_its_rewards_are_refused(around: Surroundings) -> None:
    around.event_status = 409
    assert await around.run("g-0") != 0


def test_agent_imports_nothing_of_agl_lite() -> None:
    tree = ast.parse(AGENT.read_text())
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names
    assert not [name for name in names if name.startswith("agl")]


async def test_agents_words_are_all_known_to_the_model(around: Surroundings) -> None:
    assert await around.run("g-1") == 0
    from agl_demo.vocabulary import encode_chat

    for asked in around.requests:
        spoken = [one for one in asked["messages"] if one["role"] != "assistant"]
        assert UNKNOWN not in encode_chat(spoken)
