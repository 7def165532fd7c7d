"""The demo's model server: the policy behind an OpenAI-compatible HTTP API, as a process.

``python -m agl_demo.model_server --port 8001`` serves untrained weights on loopback. Beside vLLM's
routes it has one of its own, ``/weights``: ``GET`` gives them, ``POST`` replaces them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field
from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Quart, Response, request

from agl_core.clock import Clock, SystemClock
from agl_demo.chat_api import BadRequest, ChatAnswer, ChatRequest, model_list, read_request
from agl_demo.policy import SHAPE, Floats, initial_weights, random_for, sample

DEFAULT_MODEL = "demo-policy"
"""The name that the demo's agent asks for."""
_MAX_BODY_BYTES = 16 * 2**20


def weights_to_wire(weights: Floats, version: int) -> dict[str, Any]:
    """The body of ``/weights``; JSON keeps every bit of a float64."""
    return {"version": version, "weights": weights.tolist()}


def weights_from_wire(body: Any) -> tuple[Floats, int]:
    """Read the body of ``/weights``.

    Raises:
        BadRequest: It has not the shape, or a value is not finite.
    """
    version = body.get("version") if isinstance(body, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise BadRequest("weights need a version, an integer that is not negative", "version")
    try:
        weights = np.array(body.get("weights"), dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise BadRequest(f"weights must be numbers: {exc}", "weights") from exc
    if weights.shape != SHAPE or not np.isfinite(weights).all():
        raise BadRequest(f"weights must be finite, of shape {list(SHAPE)}", "weights")
    return weights, version


@define(kw_only=True)
class Engine:
    """The weights that answer now, and how answers are drawn from them."""

    model: str = DEFAULT_MODEL
    seed: int = 0
    version: int = 0
    weights: Floats = field(factory=initial_weights)
    clock: Clock = field(factory=SystemClock)

    def answer(self, asked: ChatRequest, request_id: str) -> ChatAnswer:
        """Draw an answer.

        What is drawn depends on the seed, the version, the request's ``user`` and the prompt, and
        on nothing that happened before: the same walk meets the same answers in any order, beside
        any others, and when it is walked again.
        """
        draws = [
            sample(
                self.weights,
                asked.prompt_ids,
                sampling=asked.sampling,
                max_tokens=asked.max_tokens,
                random=random_for(
                    self.seed, asked.seed, self.version, asked.user, asked.prompt_ids, choice
                ),
                top_logprobs=asked.top_logprobs,
            )
            for choice in range(asked.choices)
        ]
        return ChatAnswer(
            request=asked,
            draws=draws,
            completion_id=f"chatcmpl-{request_id}",
            model=self.model,
            created=int(self.clock.now()),
            fingerprint=f"agl-demo-{self.version}",
        )


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, separators=(",", ":"))
    return Response(text, status=status, content_type="application/json")


async def _body() -> Any:
    try:
        return json.loads(await request.get_data(cache=False))
    except ValueError as exc:
        raise BadRequest(f"the body is not JSON: {exc}", "body", kind="Bad Request") from exc


def create_app(engine: Engine) -> Quart:
    """The server's application."""
    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = _MAX_BODY_BYTES

    @app.errorhandler(BadRequest)
    async def refuse(error: BadRequest) -> Response:
        return _json(error.to_wire(), error.status)

    @app.after_request
    async def name_request(response: Response) -> Response:
        response.headers.setdefault("X-Request-Id", _request_id())
        return response

    @app.get("/health")
    async def health() -> Response:
        return Response(b"", status=200)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(model_list(engine.model, int(engine.clock.now())))

    @app.get("/weights")
    async def get_weights() -> Response:
        return _json(weights_to_wire(engine.weights, engine.version))

    @app.post("/weights")
    async def set_weights() -> Response:
        engine.weights, engine.version = weights_from_wire(await _body())
        return _json({"version": engine.version})

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        asked = read_request(await _body(), engine.model)
        request_id = _request_id()
        answer = engine.answer(asked, request_id)
        if asked.stream:
            response = Response(_events(answer), content_type="text/event-stream; charset=utf-8")
        else:
            response = _json(answer.to_wire())
        response.headers["X-Request-Id"] = request_id
        return response

    return app


def _request_id() -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex


async def _events(answer: ChatAnswer) -> AsyncIterator[bytes]:
    for chunk in answer.chunks():
        yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
    yield b"data: [DONE]\n\n"


async def run_server(engine: Engine, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.accesslog = None
    config.loglevel = "WARNING"
    config.graceful_timeout = 1.0
    config.include_server_header = False
    await serve(create_app(engine), config, shutdown_trigger=stopping.wait)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m agl_demo.model_server")
    parser.add_argument("--port", type=int, default=8001, help="on 127.0.0.1; 0: any free one")
    parser.add_argument("--fd", type=int, help="a listening socket that was inherited")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="a file as GET /weights gives it")
    options = parser.parse_args(arguments)
    engine = Engine(model=options.model, seed=options.seed)
    if options.weights is not None:
        engine.weights, engine.version = weights_from_wire(json.loads(options.weights.read_text()))
    if options.fd is not None:
        listening = socket.socket(fileno=options.fd)
    else:
        listening = socket.create_server(("127.0.0.1", options.port), backlog=256)
    port = listening.getsockname()[1]
    print(f"serving {engine.model} on http://127.0.0.1:{port}/v1", flush=True)  # noqa: T201
    asyncio.run(run_server(engine, listening))


if __name__ == "__main__":
    main()
