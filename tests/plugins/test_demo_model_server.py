"""The demo's model server over real sockets: vLLM's shapes, the official SDK, its own route."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from agl_core.testing.servers import serve_asgi
from agl_demo.model_server import Engine, create_app, weights_to_wire
from agl_demo.policy import initial_weights
from agl_demo.vocabulary import END, encode_chat

RECORDED = Path(__file__).parents[1] / "data" / "vllm"
MESSAGES = [{"role": "user", "content": "the charger is 2 east 1 north"}]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serve_asgi(create_app(Engine(seed=7))) as base:
        yield base


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield client


def shape(value: Any) -> Any:
    """Keys in their order and what kind of value each has; of a list, the shapes in it."""
    if isinstance(value, dict):
        # The recorded model has tokens that are parts of a character: no bytes at all.
        return [(key, "bytes" if key == "bytes" else shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        kinds: list[Any] = []
        for inner in map(shape, value):
            if inner not in kinds:
                kinds.append(inner)
        return kinds
    return type(value).__name__


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"data: [DONE]\n\n")
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return [json.loads(part) for part in parts[:-1]]


def recorded(case: str) -> tuple[dict[str, Any], bytes]:
    folder = RECORDED / case
    return json.loads((folder / "request.json").read_bytes()), (
        folder / "response.body"
    ).read_bytes()


def as_ours(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "model": "demo-policy", "messages": MESSAGES}


@pytest.mark.parametrize(
    "case",
    ["chat_plain", "chat_token_ids", "chat_token_ids_logprobs", "chat_n2", "chat_logprobs"],
)
async def test_answer_has_the_shape_that_vllm_gives(http: httpx.AsyncClient, case: str) -> None:
    asked, body = recorded(case)
    answer = await http.post("/v1/chat/completions", json=as_ours(asked))
    assert answer.status_code == 200
    assert shape(answer.json()) == shape(json.loads(body))


@pytest.mark.parametrize(
    "case",
    [
        "chat_plain_stream",
        "chat_token_ids_stream",
        "chat_token_ids_logprobs_stream",
        "chat_logprobs_stream",
        "chat_n2_stream",
        "chat_usage",
    ],
)
async def test_stream_has_the_chunks_that_vllm_gives(http: httpx.AsyncClient, case: str) -> None:
    asked, body = recorded(case)
    answer = await http.post("/v1/chat/completions", json=as_ours(asked))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    ours, theirs = events(answer.content), events(body)
    assert shape(ours) == shape(theirs)
    # The places that differ within a stream: how it opens and how it ends.
    assert [shape(chunk) for chunk in ours[:2]] == [shape(chunk) for chunk in theirs[:2]]
    assert shape(ours[-1]) == shape(theirs[-1])


async def test_unknown_model_is_refused_as_by_vllm(http: httpx.AsyncClient) -> None:
    asked, body = recorded("error_unknown_model")
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 404
    assert answer.text == body.decode().replace("tiny-qwen", "demo-policy")


async def test_model_list_and_health_are_those_of_vllm(http: httpx.AsyncClient) -> None:
    ours = (await http.get("/v1/models")).json()
    keys = "id object created owned_by root parent max_model_len permission"
    assert list(ours) == ["object", "data"]
    assert list(ours["data"][0]) == keys.split()
    assert ours["data"][0]["max_model_len"] == 1024
    assert ours["data"][0]["id"] == "demo-policy"
    health = await http.get("/health")
    assert (health.status_code, health.content) == (200, b"")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "20"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
        ({"messages": [{"role": "user", "content": "go " * 1100}]}, "maximum context length"),
        ({"max_tokens": 5000}, "max_model_len"),
        ({"max_tokens": True}, "integer"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["x"]}, "does not support stop"),
        ({"presence_penalty": 0.5}, "does not support presence_penalty"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_request_that_cannot_be_served_is_refused_by_name(
    http: httpx.AsyncClient, change: dict[str, Any], word: str
) -> None:
    body = {"model": "demo-policy", "messages": MESSAGES, **change}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


async def test_body_that_is_not_json_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", content=b'{"model": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


async def test_neutral_sampling_sent_explicitly_is_accepted(http: httpx.AsyncClient) -> None:
    body = {
        "messages": MESSAGES,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "stop": None,
    }
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_ids_logprobs_and_usage_of_an_answer_agree(http: httpx.AsyncClient) -> None:
    body = {
        "messages": MESSAGES,
        "n": 3,
        "logprobs": True,
        "return_token_ids": True,
        "user": "a",
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_token_ids"] == encode_chat(MESSAGES)
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert lengths == [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    assert all(choice["token_ids"][-1] == END for choice in answer["choices"])


async def test_one_token_with_top_k_1_shows_that_logprobs_are_raw(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "top_k": 1, "temperature": 1, "logprobs": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] < 0
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_answer_depends_on_user_and_version_and_not_on_what_came_before(
    http: httpx.AsyncClient,
) -> None:
    async def answers(**change: Any) -> list[Any]:
        body = {"messages": MESSAGES, "n": 8, "return_token_ids": True, **change}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        return [choice["token_ids"] for choice in answer["choices"]]

    first = await answers(user="task:0")
    other = await answers(user="task:1")
    assert await answers(user="task:0") == first != other
    await http.post("/weights", json=weights_to_wire(initial_weights(), 1))
    assert await answers(user="task:0") != first


async def test_streamed_and_whole_answer_are_the_same(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "return_token_ids": True, "user": "task:3", "max_tokens": 2}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    streamed = events(
        (await http.post("/v1/chat/completions", json={**body, "stream": True})).content
    )
    ids = [token for chunk in streamed for token in chunk["choices"][0].get("token_ids") or ()]
    assert ids == whole["choices"][0]["token_ids"]


async def test_weights_come_back_to_the_last_bit(http: httpx.AsyncClient) -> None:
    weights = np.random.default_rng(1).normal(size=initial_weights().shape)
    set_answer = await http.post("/weights", json=weights_to_wire(weights, 4))
    assert set_answer.json() == {"version": 4}
    got = (await http.get("/weights")).json()
    assert got["version"] == 4
    assert (np.array(got["weights"]) == weights).all()


@pytest.mark.parametrize(
    "body",
    [
        {"version": 1, "weights": [[1.0]]},
        {"version": -1, "weights": initial_weights().tolist()},
        {"weights": initial_weights().tolist()},
        {"version": 1, "weights": "none"},
        [],
    ],
)
async def test_weights_of_a_wrong_shape_are_refused_and_change_nothing(
    http: httpx.AsyncClient, body: Any
) -> None:
    before = (await http.get("/weights")).text
    answer = await http.post("/weights", json=body)
    assert answer.status_code == 400
    assert (await http.get("/weights")).text == before


async def test_official_client_reads_answer_stream_and_error(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="demo-policy",
            messages=MESSAGES,  # type: ignore[arg-type]
            logprobs=True,
            extra_headers={"X-Request-Id": "call-1"},
        )
        assert raw.headers["x-request-id"] == "call-1"
        answer = raw.parse()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)

        stream = await client.chat.completions.create(
            model="demo-policy",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"

        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(
                model="other",
                messages=MESSAGES,  # type: ignore[arg-type]
            )


def test_server_process_takes_an_inherited_socket_and_weights_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps(weights_to_wire(initial_weights() + 1, 9)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        number = str(listening.fileno())
        command = [sys.executable, "-m", "agl_demo.model_server", "--fd", number]
        with subprocess.Popen(
            [*command, "--weights", str(weights)],
            pass_fds=[listening.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line == f"serving demo-policy on http://127.0.0.1:{port}/v1\n"
                got = httpx.get(f"http://127.0.0.1:{port}/weights", trust_env=False).json()
                assert got["version"] == 9
                assert (np.array(got["weights"]) == initial_weights() + 1).all()
                process.terminate()
                assert process.wait(timeout=10) == 0
            finally:
                process.kill()
