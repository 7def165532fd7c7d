"""A policy whose calls ask for more alternatives to each token than its agents do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from agl_core.gateway.dialects.alternatives import with_fewer
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import ReshapeRequest
from agl_core.testing.fake_vllm import EVENT_STREAM, Output, VllmAnswer, answer
from agl_core.testing.raw_http import Exchange
from agl_core.testing.replay import chunks_of
from agl_core.testing.service import Answer, chat
from agl_core.testing.translated import read_events

COMPLETION = {"model": "m", "prompt": "Hi"}
RESPONSE = {"model": "m", "input": "Hi"}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
ASKED: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        chat(),
        chat(logprobs=True),
        chat(logprobs=True, top_logprobs=1, n=2),
        chat(logprobs=True, top_logprobs=0),
        chat(logprobs=True, top_logprobs=2),
        chat(logprobs="true", top_logprobs="3", return_token_ids=True),
        chat(logprobs=True, top_logprobs=5),
        chat(logprobs=True, top_logprobs=None),
        chat(logprobs=False, top_logprobs=5),
    ],
    "completions": [
        COMPLETION,
        *({**COMPLETION, "logprobs": count} for count in (0, 1, 2, 3, 5)),
        {**COMPLETION, "logprobs": 2, "return_token_ids": True},
    ],
    "responses": [
        RESPONSE,
        {**RESPONSE, "top_logprobs": 2},
        {**RESPONSE, **LOGPROBS},
        {**RESPONSE, **LOGPROBS, "top_logprobs": 2},
    ],
    "messages": [MESSAGE],
}
# What the server says beside the sampled token where it is asked for five.
OTHERS = [["Oh", -0.2], ["A", -0.75], ["The", -2.0], ["I", -3.0]]
ALL = [
    [[text, logprob], *OTHERS]
    for text, logprob in zip(Output().texts, Output().logprobs, strict=True)
]


class MoreAlternatives:
    """A plugin that asks for five alternatives on behalf of trained policies."""

    @hookimpl
    def provide_request_reshaper(self) -> MoreAlternatives:
        return self

    def reshape(self, request: ReshapeRequest) -> Mapping[str, Any]:
        if not request.server.trained:
            return {}
        if request.api == "completions":
            return {"logprobs": 5}
        return {"logprobs": True, "top_logprobs": 5}


async def script(exchange: Exchange) -> None:
    fields = exchange.request.json()
    answer(exchange, VllmAnswer(fields, [Output()] * fields.get("n", 1)))


def seen(got: Answer, path: str) -> Any:
    """What an agent read of an answer, but for the model's name; null is as good as absent."""
    assert (got.status, got.is_clean) == (200, True)
    if not got.headers["content-type"].startswith("text/event-stream"):
        return essence(got.json())
    if path in ("responses", "messages"):
        return essence(read_events(got.body))
    return essence(chunks_of(got.body))


def essence(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: essence(inner) for name, inner in value.items() if inner is not None}
        kept.pop("model", None)
        return kept
    return [essence(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
async def test_agent_sees_the_alternatives_that_it_asked_for_and_no_more(
    open_service: Any, open_vllm: Any, path: str, stream: bool
) -> None:
    server = await open_vllm(script)
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    # A helper model gets what the agent sends, and the agent what it answers.
    await service.register(server.endpoint, "helper", trained=False, served_model="m")
    await service.rollout("r")
    for asked in ASKED[path]:
        body = {**asked, "stream": stream}
        untouched = await service.call("r", {**body, "model": "helper"}, path)
        got = await service.call("r", body, path)
        sent = server.requests[-1].json()
        assert sent.get("logprobs" if path == "completions" else "top_logprobs") == 5
        assert seen(got, path) == seen(untouched, path), asked
        *_, recorded = await service.events("r")
        (choice, *_) = recorded["choices"]
        assert choice["tokens"] == "complete"
        assert choice["logprobs"] == list(Output().logprobs)
        if not stream:
            assert recorded["response"] == got.json()
        elif path == "chat/completions":
            assert tops_of(recorded["response"]) == tops_of(*chunks_of(got.body))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
async def test_alternatives_that_only_the_policy_asked_for_are_recorded_with_each_choice(
    open_service: Any, open_vllm: Any, path: str, stream: bool
) -> None:
    server = await open_vllm(script)
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    await service.register(server.endpoint, "helper", trained=False, served_model="m")
    await service.rollout("r")
    for asked in ASKED[path]:
        await service.call("r", {**asked, "stream": stream}, path)
        *_, recorded = await service.events("r")
        # Where the agent asked for as many, they are in its answer.
        count = asked.get("logprobs" if path == "completions" else "top_logprobs")
        has_all = count == 5 and asked["logprobs"] is not False
        told = {} if has_all else {"top_logprobs": ALL}
        assert len(recorded["choices"]) == asked.get("n", 1)
        assert [choice["extras"] for choice in recorded["choices"]] == [told] * asked.get("n", 1)
        await service.call("r", {**asked, "model": "helper", "stream": stream}, path)
        *_, untouched = await service.events("r")
        assert not any(choice["extras"] for choice in untouched["choices"])


def changing(changes: Mapping[bytes, bytes]) -> Any:
    """Answer as the server does, but with other bytes in each piece."""

    async def changed(exchange: Exchange) -> None:
        fields = exchange.request.json()
        made = VllmAnswer(fields, [Output(texts=("token_id:11", "token_id: 5", "!", ""))])
        whole = json.dumps(made.whole()).encode()
        pieces = list(made.events()) if fields.get("stream") else [whole]
        for old, new in changes.items():
            assert any(old in piece for piece in pieces)
            pieces = [piece.replace(old, new) for piece in pieces]
        if not fields.get("stream"):
            exchange.whole(200, pieces[0], [("content-type", "application/json")])
            return
        exchange.begin(200, EVENT_STREAM)
        for piece in pieces:
            exchange.write(piece)
        exchange.end()

    return changed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat()),
        ("chat/completions", chat(logprobs=True, top_logprobs=1)),
        ("completions", COMPLETION),
        ("completions", {**COMPLETION, "logprobs": 1}),
    ],
    ids=["chat", "chat-1", "completion", "completion-1"],
)
async def test_recorded_alternatives_have_ids_where_told_and_null_for_what_is_not_finite(
    open_service: Any, open_vllm: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    changes = {b'"Oh"': b'"token_id:7"', b"-3.0": b"-Infinity", b"-2.0": b"NaN"}
    server = await open_vllm(changing(changes))
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    await service.rollout("r")
    assert (await service.call("r", {**body, "stream": stream}, path)).status == 200
    (recorded,) = await service.events("r")
    (choice,) = recorded["choices"]
    others = [[7, -0.2], ["A", -0.75], ["The", None], ["I", None]]
    sampled = [[11, -0.5], ["token_id: 5", -0.25], ["!", -0.125], ["", -1.0]]
    assert choice["extras"] == {"top_logprobs": [[pair, *others] for pair in sampled]}
    assert choice["tokens"] == "complete"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "one_tokens"),
    [
        ("chat/completions", chat(), b'"top_logprobs": [{"token": "!"'),
        ("completions", COMPLETION, b'{"!": -0.125'),
    ],
)
async def test_alternatives_that_do_not_go_with_the_tokens_are_not_recorded(
    open_service: Any,
    open_vllm: Any,
    path: str,
    body: dict[str, Any],
    one_tokens: bytes,
    stream: bool,
) -> None:
    other_shape = one_tokens.replace(b'"!"', b"7").replace(b"{7: -0.125", b'{"!": "?"')
    server = await open_vllm(changing({one_tokens: other_shape}))
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    await service.rollout("r")
    assert (await service.call("r", {**body, "stream": stream}, path)).status == 200
    (recorded,) = await service.events("r")
    (choice,) = recorded["choices"]
    assert (choice["tokens"], choice["extras"]) == ("complete", {})


async def test_alternatives_of_an_echoed_prompt_are_not_recorded(
    open_service: Any, open_vllm: Any
) -> None:
    async def echoing(exchange: Exchange) -> None:
        whole = VllmAnswer(exchange.request.json()).whole()
        (choice,) = whole["choices"]
        logprobs = choice["logprobs"]
        count = len(choice["prompt_token_ids"])
        logprobs["tokens"][:0] = ["p"] * count
        logprobs["token_logprobs"][:0] = [None, *[-9.0] * (count - 1)]
        logprobs["top_logprobs"][:0] = [None, *[{"p": -9.0}] * (count - 1)]
        exchange.whole_json(200, whole)

    server = await open_vllm(echoing)
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    await service.rollout("r")
    await service.call("r", {**COMPLETION, "echo": True, "return_token_ids": True}, "completions")
    (recorded,) = await service.events("r")
    assert recorded["choices"][0]["extras"] == {"top_logprobs": ALL}


def tops_of(*answers: Any) -> dict[int, list[list[str]]]:
    """By choice, the alternatives of each token."""
    found: dict[int, list[list[str]]] = {}
    for choice in (choice for one in answers for choice in one["choices"]):
        for token in (choice.get("logprobs") or {}).get("content") or ():
            tops = [top["token"] for top in token["top_logprobs"]]
            found.setdefault(choice["index"], []).append(tops)
    return found


async def test_alternatives_that_an_agent_asked_for_keep_their_bytes(
    open_service: Any, open_vllm: Any
) -> None:
    body = (
        b'{"choices": [{"index": 0, "token_ids": null, "logprobs": {"content": [{"token": "a",'
        b' "logprob": -1e-05, "top_logprobs": [{"token": "a", "logprob": -1.0E-5},'
        b' {"token": "b", "logprob": -12.50}]}]}}]}'
    )

    async def as_it_stands(exchange: Exchange) -> None:
        exchange.whole(200, body, [("content-type", "application/json")])

    server = await open_vllm(as_it_stands)
    service = await open_service(plugins=(MoreAlternatives(),))
    await service.register(server.endpoint)
    await service.rollout("r")
    got = await service.call("r", chat(logprobs=True, top_logprobs=1, return_token_ids=True))
    assert b'"top_logprobs":[{"token": "a", "logprob": -1.0E-5}]' in got.body
    assert b'"logprob":-1e-05' in got.body


@pytest.mark.parametrize(
    ("tops", "count", "kept"),
    [
        ({"a": -0.1, "b": -1.0, "c": -2.0}, 1, "a"),
        ({"b": -1.0, "a": -0.1, "c": -2.0}, 1, "ba"),
        ({"b": -1.0, "a": -0.1, "c": -2.0}, 2, "ba"),
        ({"c": -2.0, "a": -0.1, "b": -1.0}, 2, "cab"),
        ({"c": -2.0, "a": -0.1, "b": -1.0}, 0, "c"),
        ({"c": None, "a": -0.1, "b": -1.0}, 1, "ca"),
        ({}, 1, ""),
        (None, 1, None),
    ],
)
def test_completions_keep_the_sampled_token_and_the_likeliest(
    tops: dict[str, float] | None, count: int, kept: str | None
) -> None:
    logprobs = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [tops]}
    answer = msgspec.json.encode({"choices": [{"index": 0, "logprobs": logprobs}]})
    fewer = msgspec.json.decode(with_fewer(answer, count))["choices"][0]["logprobs"]
    (found,) = fewer["top_logprobs"]
    assert (None if found is None else "".join(found)) == kept
    assert {**fewer, "top_logprobs": None} == {**logprobs, "top_logprobs": None}


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": [ {"logprobs": {"content": [{"top_logprobs": [1]}, {}]}}]}',
        b'{"choices": null, "logprobs": {"content": []}}',
        b'{"choices": [{"logprobs": null}, {"logprobs": {"content": null}}]}',
        b'{"choices": [{"logprobs": {"content": 7}}]}',
        b'{"choices": [{"logprobs": {"top_logprobs": [[1, 2, 3]]}}]}',
        b'{"error": {}}',
        b"[1]",
    ],
)
def test_what_has_no_more_or_another_shape_stays_as_it_came(data: bytes) -> None:
    assert with_fewer(data, 1) is data
