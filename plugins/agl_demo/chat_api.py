"""Chat completions as vLLM speaks them: reading a request, and the shapes of its answers.

Shapes, key order and messages follow recorded answers of vLLM 0.32, so that a client cannot tell
the demo's server from a large one: keys that were not asked for are there, with null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from agl_demo.policy import Draw, Sampling
from agl_demo.vocabulary import WORDS, encode_chat, pieces

MAX_MODEL_TOKENS = 1024
_MAX_TOP_LOGPROBS = 20
_MAX_CHOICES = 64
# What this model cannot do, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([],),
    "stop_token_ids": ([],),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
}


class BadRequest(Exception):
    """The request cannot be served; ``parameter`` names what is wrong with it."""

    def __init__(
        self,
        message: str,
        parameter: str | None = None,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.status = status
        self.kind = kind

    def to_wire(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.parameter,
                "code": self.status,
            }
        }


@frozen(kw_only=True)
class ChatRequest:
    """A chat completion request, checked."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    choices: int = 1
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    return_token_ids: bool = False
    include_usage: bool = False
    user: str = ""
    seed: int | None = None


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a number.", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise BadRequest(f"{name} must be an integer.", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.", name)
    return bool(value)


def _sampling(body: Mapping[str, Any]) -> Sampling:
    temperature = _number(body, "temperature", 1.0)
    if temperature < 0:
        raise BadRequest(
            f"temperature must be non-negative, got {temperature}. "
            f"(parameter=temperature, value={temperature})",
            "temperature",
        )
    top_p, min_p = _number(body, "top_p", 1.0), _number(body, "min_p", 0.0)
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    if not 0 <= min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {min_p}.", "min_p")
    top_k = _integer(body, "top_k") or 0
    if top_k < -1:
        raise BadRequest(f"top_k must be 0 or -1 (disable), or at least 1, got {top_k}.", "top_k")
    return Sampling(temperature=temperature, top_p=top_p, top_k=max(top_k, 0), min_p=min_p)


def _max_tokens(body: Mapping[str, Any], prompt_tokens: int) -> int:
    if prompt_tokens >= MAX_MODEL_TOKENS:
        raise BadRequest(
            f"This model's maximum context length is {MAX_MODEL_TOKENS} tokens. However, your "
            f"prompt contains at least {prompt_tokens} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={prompt_tokens})",
            "input_tokens",
        )
    room = MAX_MODEL_TOKENS - prompt_tokens
    asked = _integer(body, "max_completion_tokens")
    if asked is None:
        asked = _integer(body, "max_tokens")
    if asked is None:
        return room
    if asked < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if asked > MAX_MODEL_TOKENS:
        raise BadRequest(
            f"max_tokens={asked} cannot be greater than max_model_len={MAX_MODEL_TOKENS}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={asked})",
            "max_tokens",
        )
    return min(asked, room)


def _top_logprobs(body: Mapping[str, Any], logprobs: bool) -> int:
    count = _integer(body, "top_logprobs") or 0
    if count > _MAX_TOP_LOGPROBS:
        raise BadRequest(
            f"Requested sample logprobs of {count}, which is greater than max allowed: "
            f"{_MAX_TOP_LOGPROBS} (parameter=logprobs, value={count})",
            "logprobs",
        )
    if count < 0:
        raise BadRequest("`top_logprobs` must be a positive value.", "top_logprobs")
    if count and not logprobs:
        raise BadRequest(
            "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
            "top_logprobs",
        )
    return count


def read_request(body: Any, model: str) -> ChatRequest:
    """Check a request body.

    Raises:
        BadRequest: Something in it is wrong, or asks for what this model cannot do.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object", "body", kind="Bad Request")
    asked = body.get("model") or model
    if asked != model:
        raise BadRequest(
            f"The model `{asked}` does not exist. Valid aliases: {model}.",
            "model",
            status=404,
            kind="NotFoundError",
        )
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise BadRequest(f"this small model does not support {name}.", name)
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise BadRequest("messages must be a list", "body.messages", kind="Bad Request")
    if not messages:
        raise BadRequest(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    try:
        prompt_ids = encode_chat(messages)
    except ValueError as exc:
        raise BadRequest(str(exc), "messages") from exc
    choices = 1 if (given := _integer(body, "n")) is None else given
    if choices < 1:
        raise BadRequest(f"n must be at least 1, got {choices}.")
    if choices > _MAX_CHOICES:
        raise BadRequest(f"n must be at most {_MAX_CHOICES}, got {choices}.")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise BadRequest("stream_options must be an object.", "stream_options")
    logprobs = _flag(body, "logprobs")
    return ChatRequest(
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling(body),
        max_tokens=_max_tokens(body, len(prompt_ids)),
        choices=choices,
        stream=_flag(body, "stream"),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(body, logprobs),
        return_token_ids=_flag(body, "return_token_ids"),
        include_usage=_flag(options or {}, "include_usage"),
        user=str(body.get("user") or ""),
        seed=_integer(body, "seed"),
    )


@frozen(kw_only=True)
class ChatAnswer:
    """The draws for a request, and how they look on the wire."""

    request: ChatRequest
    draws: Sequence[Draw]
    completion_id: str
    model: str
    created: int
    """Seconds since the epoch."""
    fingerprint: str = field()

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.request.prompt_ids)
        completion = sum(len(draw.token_ids) for draw in self.draws)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
        }

    def _logprobs(self, draw: Draw, texts: Sequence[str], start: int, end: int) -> Any:
        if not self.request.logprobs:
            return None
        return {
            "content": [
                {
                    **_token(draw.token_ids[place], texts[place], draw.logprobs[place]),
                    "top_logprobs": [
                        _token(token_id, WORDS[token_id], logprob)
                        for token_id, logprob in draw.alternatives[place]
                    ],
                }
                for place in range(start, end)
            ]
        }

    def to_wire(self) -> dict[str, Any]:
        """The whole answer as one object."""
        asked = self.request
        choices = []
        for index, draw in enumerate(self.draws):
            texts = pieces(draw.token_ids)
            message = {
                "role": "assistant",
                "content": "".join(texts),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(draw, texts, 0, len(texts)),
                    "finish_reason": _finish_reason(draw),
                    "stop_reason": None,
                    "token_ids": list(draw.token_ids) if asked.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        usage = self._usage()
        usage["prompt_tokens_details"]["multimodal_tokens"] = None
        usage["completion_tokens_details"] = None
        return {
            "id": self.completion_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": list(asked.prompt_ids) if asked.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The answer as the objects of a stream, a token each, choices side by side."""
        asked = self.request
        prompt_ids = list(asked.prompt_ids) if asked.return_token_ids else None
        for index in range(len(self.draws)):
            opening = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield self._chunk([opening], prompt_token_ids=prompt_ids, prompt_text=None)
        texts = [pieces(draw.token_ids) for draw in self.draws]
        for place in range(max(len(draw.token_ids) for draw in self.draws)):
            for index, draw in enumerate(self.draws):
                if place < len(draw.token_ids):
                    yield from self._token_chunk(index, draw, texts[index], place)
        if asked.include_usage:
            yield self._chunk([], usage=self._usage(), system_fingerprint=self.fingerprint)

    def _token_chunk(
        self, index: int, draw: Draw, texts: Sequence[str], place: int
    ) -> Iterator[dict[str, Any]]:
        asked = self.request
        is_last = place == len(draw.token_ids) - 1
        # A token without text gets a chunk only where something else is told of it.
        if not (texts[place] or is_last or asked.return_token_ids or asked.logprobs):
            return
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": texts[place]} if texts[place] else {},
            "logprobs": self._logprobs(draw, texts, place, place + 1),
            "finish_reason": _finish_reason(draw) if is_last else None,
        }
        if is_last:
            choice["stop_reason"] = None
        choice["token_ids"] = [draw.token_ids[place]] if asked.return_token_ids else None
        # With usage to come the fingerprint moves to the usage's chunk.
        tells_fingerprint = is_last and not asked.include_usage
        yield self._chunk(
            [choice], **({"system_fingerprint": self.fingerprint} if tells_fingerprint else {})
        )


def _token(token_id: int, text: str, logprob: float) -> dict[str, Any]:
    shown = text or WORDS[token_id]
    return {"token": shown, "logprob": logprob, "bytes": list(shown.encode())}


def _finish_reason(draw: Draw) -> str:
    return "stop" if draw.is_ended else "length"


def model_list(model: str, created: int) -> dict[str, Any]:
    """The answer of ``GET /v1/models``."""
    permission = {
        "id": f"modelperm-{model}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "agl-demo",
        "root": model,
        "parent": None,
        "max_model_len": MAX_MODEL_TOKENS,
        "permission": [permission],
    }
    return {"object": "list", "data": [entry]}
