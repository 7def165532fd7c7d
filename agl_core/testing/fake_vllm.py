"""A model server that answers as vLLM does, or misbehaves as one does, on command.

``FakeVllm()`` leaves each request to the test (``take``); ``FakeVllm(script)`` answers by itself.
Scripts: ``saying(...)``, ``answering(...)``, ``each(...)``, ``silent``, ``cutting(...)``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from agl_core.testing.raw_http import Exchange, Header, RawServer, Script, SeenRequest

EVENT_STREAM: tuple[Header, ...] = (("content-type", "text/event-stream; charset=utf-8"),)
PROMPT = (1, 85, 1818, 2)
# What else each token could have been; those of ``Output`` are first to third among them.
ALTERNATIVES = (("Oh", -0.2), ("A", -0.75), ("The", -2.0), ("I", -3.0), ("So", -4.0), ("We", -5.0))


@frozen(kw_only=True)
class Output:
    """What the engine generates for one choice."""

    texts: tuple[str, ...] = ("Hel", "lo", "!", "")
    token_ids: tuple[int, ...] = (11, 12, 13, 2)
    logprobs: tuple[float, ...] = (-0.5, -0.25, -0.125, -1.0)
    finish_reason: str = "stop"
    tool: str | None = None
    """The texts are the arguments of a call of this function."""


class FakeVllm(RawServer):
    """A model server on raw sockets.

    What is asked of the engine itself (``/pause``, ``/resume``, ``/is_paused``, ``/health``,
    ``/metrics``) it answers as vLLM 0.32 does. A script's requests that come while it is paused
    wait.

    Attributes:
        cards: What its list of models holds; None: it has no such list.
        engine_requests: What was asked of the engine, apart from ``requests``.
        engine_answers: Statuses in place of vLLM's, by path; None: never answered.
        engine_scripts: Scripts in place of vLLM's answers, by path.
        dev_mode: Without it there is no ``/pause`` and no ``/resume``.
        is_paused: Whether the engine stands still.
        others: Requests that run there beside those that a script is answering.
        waiting: Requests in its queue.
        tells_load: Without it the metrics say nothing of requests.
    """

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script)
        self.cards: list[dict[str, Any]] | None = None
        self.engine_requests: list[SeenRequest] = []
        self.engine_answers: dict[str, int | None] = {}
        self.engine_scripts: dict[str, Script] = {}
        self.dev_mode = True
        self.others = 0
        self.waiting = 0
        self.tells_load = True
        self._running = asyncio.Event()
        self._running.set()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def restart_engine(self) -> None:
        """Let the engine run as a new one does."""
        self._running.set()

    def asked_of_engine(self, path: str) -> int:
        """How often a path was asked for, whatever the query."""
        return [r.target.partition("?")[0] for r in self.engine_requests].count(path)

    @property
    def model_calls(self) -> int:
        """Requests so far, those for the list of models left out."""
        return sum(request.method != "GET" for request in self.requests)

    def _serve(self, exchange: Exchange, connection: Any) -> None:
        request = exchange.request
        path, _, query = request.target.partition("?")
        if (request.method, path) in _ENGINE_ROUTES:
            self.engine_requests.append(request)
            if path in self.engine_scripts:
                self._begin(self.engine_scripts[path], exchange)
            else:
                self._answer_of_engine(exchange, path, query)
            return
        if (request.method, request.target) != ("GET", "/v1/models"):
            super()._serve(exchange, connection)
            return
        self.requests.append(request)
        if self.cards is None:
            exchange.whole_json(404, {"detail": "Not Found"})
        else:
            exchange.whole_json(200, {"object": "list", "data": self.cards})

    async def _run(self, script: Script, exchange: Exchange) -> None:
        await self._running.wait()
        await super()._run(script, exchange)

    def _answer_of_engine(self, exchange: Exchange, path: str, query: str) -> None:
        is_missing = path in _OF_DEV_MODE and not self.dev_mode
        status = self.engine_answers.get(path, 404 if is_missing else 200)
        if status is None:
            return
        if status != 200:
            exchange.whole_json(status, {"detail": "Not Found" if status == 404 else "Error"})
        elif path == "/health":
            exchange.whole(200, b"")
        elif path == "/metrics":
            exchange.whole(200, self._metrics(), [("content-type", "text/plain; charset=utf-8")])
        elif path == "/is_paused":
            exchange.whole_json(200, {"is_paused": self.is_paused})
        elif path == "/resume":
            self._running.set()
            exchange.whole_json(200, {"status": "resumed"})
        elif query == "mode=keep":
            self._running.clear()
            exchange.whole_json(200, {"status": "paused"})
        else:
            exchange.whole_json(400, {"detail": f"this engine knows mode keep alone: {query}"})

    def _metrics(self) -> bytes:
        """What a page of vLLM's metrics says of requests, and a gauge that is not about them."""
        gauges: dict[str, float] = {"kv_cache_usage_perc": 0.5}
        if self.tells_load:
            gauges["num_requests_running"] = len(self._tasks) + self.others
            gauges["num_requests_waiting"] = self.waiting
        lines = [
            f"# HELP vllm:{name} What it is.\n"
            f"# TYPE vllm:{name} gauge\n"
            f'vllm:{name}{{engine="0",model_name="tiny"}} {float(value)}\n'
            for name, value in gauges.items()
        ]
        return "".join(lines).encode()


_OF_DEV_MODE = frozenset({"/pause", "/resume", "/is_paused"})
_ENGINE_ROUTES = frozenset(
    {("POST", "/pause"), ("POST", "/resume")}
    | {("GET", path) for path in ("/is_paused", "/health", "/metrics")}
)


def event(value: Any) -> bytes:
    """One server-sent event with JSON in it."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class VllmAnswer:
    """The pieces of vLLM 0.32's answer to one chat or completions request.

    Args:
        request: The request's fields; ids, logprobs, usage and streaming are as it asks.
        outputs: One per choice.
        ignores: Request fields that this server does not know, as a router in front of it might.
        usage: Added to the counts.
    """

    def __init__(
        self,
        request: dict[str, Any],
        outputs: Sequence[Output] = (Output(),),
        *,
        ignores: Sequence[str] = (),
        usage: dict[str, Any] | None = None,
    ) -> None:
        asked = {name: value for name, value in request.items() if name not in ignores}
        self.is_chat = "messages" in asked
        self.outputs = tuple(outputs)
        self.with_ids = bool(asked.get("return_token_ids"))
        tops = asked.get("top_logprobs", 0) is not None
        wanted = asked.get("logprobs")
        self.with_logprobs = bool(wanted) and tops if self.is_chat else wanted is not None
        self.tops = int((asked.get("top_logprobs") if self.is_chat else wanted) or 0)
        self.with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        count = sum(len(output.token_ids) for output in self.outputs)
        self.usage = {
            "prompt_tokens": len(PROMPT),
            "total_tokens": len(PROMPT) + count,
            "completion_tokens": count,
            **(usage or {}),
        }
        kind = "chat.completion" if self.is_chat else "text_completion"
        self._head = {
            "id": "chatcmpl-1" if self.is_chat else "cmpl-1",
            "object": kind,
            "created": 1_800_000_000,
            "model": asked.get("model"),
        }

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        answer = {
            **self._head,
            "choices": [self._choice(index) for index in range(len(self.outputs))],
            "usage": self.usage,
        }
        if self.is_chat:
            answer["prompt_token_ids"] = list(PROMPT) if self.with_ids else None
        return answer

    def _choice(self, index: int) -> dict[str, Any]:
        output = self.outputs[index]
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(output, 0, len(output.token_ids)),
            "finish_reason": self._finish(output),
            "stop_reason": None,
            "token_ids": list(output.token_ids) if self.with_ids else None,
        }
        if not self.is_chat:
            choice["prompt_token_ids"] = list(PROMPT) if self.with_ids else None
            choice["text"] = "".join(output.texts)
        elif output.tool is None:
            choice["message"] = {"role": "assistant", "content": "".join(output.texts)}
        else:
            function = {"name": output.tool, "arguments": "".join(output.texts)}
            call = {"id": "call-1", "type": "function", "function": function}
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        return choice

    def events(self) -> Iterator[bytes]:
        """The events of the stream; the choices of several outputs take turns."""
        if self.is_chat:
            for index in range(len(self.outputs)):
                yield self._first(index)
        longest = max(len(output.token_ids) for output in self.outputs)
        for at in range(longest):
            for index, output in enumerate(self.outputs):
                if at < len(output.token_ids):
                    yield self.token(index, at)
        if self.with_usage:
            chunk = "chat.completion.chunk" if self.is_chat else "text_completion"
            yield event({**self._head, "object": chunk, "choices": [], "usage": self.usage})
        yield DONE

    def _first(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(choice, list(PROMPT) if self.with_ids else None)

    def token(self, index: int, at: int) -> bytes:
        """The event of one token."""
        output = self.outputs[index]
        is_last = at == len(output.token_ids) - 1
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(output, at, at + 1),
            "finish_reason": self._finish(output) if is_last else None,
        }
        if self.with_ids:
            choice["token_ids"] = [output.token_ids[at]]
        text = output.texts[at]
        if not self.is_chat:
            choice["text"] = text
            if self.with_ids:
                choice["prompt_token_ids"] = list(PROMPT) if at == 0 else None
        elif output.tool is not None:
            call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
            if at == 0:
                call |= {"id": "call-1", "type": "function"}
                call["function"]["name"] = output.tool
            choice["delta"] = {"tool_calls": [call]}
        else:
            choice["delta"] = {"content": text} if text else {}
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any], prompt: list[int] | None = None) -> bytes:
        head = dict(self._head)
        if self.is_chat:
            head["object"] = "chat.completion.chunk"
            if prompt is not None:
                head["prompt_token_ids"] = prompt
        return event({**head, "choices": [choice]})

    def _finish(self, output: Output) -> str:
        called = output.tool is not None and output.finish_reason == "stop"
        return "tool_calls" if called else output.finish_reason

    def _logprobs(self, output: Output, start: int, end: int) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        tokens, values = output.texts[start:end], output.logprobs[start:end]
        likeliest = [self._likeliest(*pair) for pair in zip(tokens, values, strict=True)]
        if not self.is_chat:
            return {
                "tokens": list(tokens),
                "token_logprobs": list(values),
                "top_logprobs": [dict(pairs) for pairs in likeliest],
            }
        return {
            "content": [
                {
                    **_logprob(token, value),
                    "top_logprobs": [_logprob(*pair) for pair in pairs[: self.tops]],
                }
                for token, value, pairs in zip(tokens, values, likeliest, strict=True)
            ]
        }

    def _likeliest(self, token: str, value: float) -> list[tuple[str, float]]:
        """The sampled token and then the likeliest ones, which it may be among."""
        ranked = sorted([(token, value), *ALTERNATIVES], key=lambda pair: -pair[1])
        return [(token, value), *(p for p in ranked[: self.tops] if p[0] != token)]


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def answer(exchange: Exchange, made: VllmAnswer) -> None:
    """Send an answer, streamed where the request asks for it."""
    if not exchange.request.json().get("stream"):
        exchange.whole_json(200, made.whole())
        return
    exchange.begin(200, EVENT_STREAM)
    for piece in made.events():
        exchange.write(piece)
    exchange.end()


def saying(*outputs: Output, ignores: Sequence[str] = (), usage: Any = None) -> Script:
    """Answer as vLLM would whose engine generates these outputs."""

    async def script(exchange: Exchange) -> None:
        fields = exchange.request.json()
        made = VllmAnswer(fields, outputs or (Output(),), ignores=ignores, usage=usage)
        answer(exchange, made)

    return script


def answering(status: int, value: Any, headers: Sequence[Header] = ()) -> Script:
    """Answer with a status and a JSON body."""

    async def script(exchange: Exchange) -> None:
        exchange.whole_json(status, value, headers)

    return script


def each(*scripts: Script) -> Script:
    """One script after the other, the last one for good."""
    order = itertools.chain(scripts[:-1], itertools.repeat(scripts[-1]))

    async def script(exchange: Exchange) -> None:
        await next(order)(exchange)

    return script


async def silent(exchange: Exchange) -> None:
    """Take the request and never answer."""
    await exchange.gone.wait()


async def hanging_up(exchange: Exchange) -> None:
    """Take the request and close the connection."""
    exchange.cut()


def cutting(events: int) -> Script:
    """Begin a stream and close the connection after some events."""

    async def script(exchange: Exchange) -> None:
        made = VllmAnswer(exchange.request.json())
        exchange.begin(200, EVENT_STREAM)
        for piece in itertools.islice(made.events(), events):
            exchange.write(piece)
        exchange.cut()

    return script
