"""What an attempt's events say to a trainer: turns and rewards (pure functions).

A turn is one choice of one captured call as the engine's own token ids. Nothing here tokenizes: a
call without ids is no turn.

Why a call or one of its choices is no turn, the keys of ``skipped``:

=====================  =======================================================================
``untrained``          a helper model's call; no fault
``other_policy``       another policy's call, where one policy was asked for; no fault
``other_api``          a path that samples no text that could be trained on
``model_not_found``    the model's name was refused, or its server did not know it
``context_exhausted``  refused, since the prompt was longer than the model's context
``upstream_error``     any other error of the model server
``client_gone``        the agent left before the answer ended
``timeout``            the answer did not end in time
``truncated``          the answer's stream broke off
``aborted``            the engine ended the call, for a weight update mostly
``no_token_ids``       the answer came without token ids
``nonfinite_logprob``  a log-probability is missing or not finite
``incomplete_tokens``  ids, log-probabilities and usage do not agree
``empty_response``     no token was sampled
=====================  =======================================================================

A cause of a call counts once, a cause of a choice once per choice. Two more are those of a line,
which count turns:

==========================  ==================================================================
``multimodal_unsupported``  its prompt has images, audio or video, which the line has no room for
``too_long``                it, or the row it was merged into, has more tokens than allowed
==========================  ==================================================================
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from agl_core.media import find_media, media_digest, media_request
from agl_core.records import Event

ID_BYTES = 4
_SAMPLING_APIS = frozenset({"chat", "completions", "responses", "messages"})
_STATUS_CAUSES = frozenset({"client_gone", "timeout", "truncated", "aborted"})


def pack_ids(ids: Sequence[int] | bytes) -> bytes:
    """Pack token ids as little-endian int32; what is packed already is taken as it is.

    Raises:
        TypeError: Something in it is no integer.
        OverflowError: An integer does not fit.
        ValueError: Packed ids whose size is no multiple of four bytes.
    """
    if isinstance(ids, bytes):
        if len(ids) % ID_BYTES:
            raise ValueError(f"packed token ids must be a multiple of 4 bytes, not {len(ids)}")
        return ids
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Read token ids back from packed little-endian int32."""
    ids = array("i", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


@frozen(kw_only=True, eq=False)
class Turn:
    """One choice of one captured call, seen as tokens. Compared by identity."""

    call_id: str
    seq: int
    """Place of the call's event within its rollout."""
    choice: int = 0
    policy: str = ""
    adapter: str | None = None
    """The name the server knows the weights by; a LoRA adapter's, where there is one."""
    prompt: bytes
    """Prompt ids, packed little-endian int32, [prompt_length]."""
    response: bytes
    """Sampled ids, packed little-endian int32, [response_length]; the end token is among them."""
    logprobs: array[float]
    """Natural log-probabilities of the sampled ids, float64, [response_length]."""
    version_start: int | None = None
    version_end: int | None = None
    version_spans: tuple[tuple[int, int], ...] | None = None
    """(first token of the response, version) in order; None where only start and end are known."""
    finish_reason: str | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    logprobs_mode: str | None = None
    media: tuple[str, ...] = ()
    """SHA-256 digests (hex) of the prompt's images, audio and video, in the order of the prompt."""
    reward: float | None = None
    """What a reward event gave to this very call."""
    extras: Mapping[str, Any] = field(factory=dict)
    """What else the engine told of the choice (``routed_experts``, ``top_logprobs``)."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpack_ids(self.prompt)

    @property
    def response_token_ids(self) -> list[int]:
        return unpack_ids(self.response)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def response_length(self) -> int:
        return len(self.response) // ID_BYTES

    @property
    def context_length(self) -> int:
        """Tokens of prompt and response together."""
        return (len(self.prompt) + len(self.response)) // ID_BYTES

    @property
    def spans(self) -> tuple[tuple[int, int], ...] | None:
        """Version spans, made from start and end where the engine told no more.

        The border between two versions is then unknown; all tokens but the last count as the older
        one, which errs towards staler. Lowest and highest version are right. None: no version is
        known.
        """
        if self.version_spans is not None:
            return self.version_spans
        start = self.version_end if self.version_start is None else self.version_start
        if start is None:
            return None
        last = self.response_length - 1
        if self.version_end in (None, start) or last < 1:
            return ((0, start),)
        assert self.version_end is not None
        return ((0, start), (last, self.version_end))


@frozen(kw_only=True)
class TurnsResult:
    """The turns of an attempt in order, and how many calls and choices are none, by cause."""

    turns: tuple[Turn, ...]
    skipped: dict[str, int]
    refused_models: dict[str, int] = field(factory=dict)
    """The names behind ``model_not_found``: how many calls asked for each."""


@frozen(kw_only=True)
class Rewards:
    """The rewards of an attempt. None is never 0: it says that there is no reward."""

    final: float | None = None
    metrics: dict[str, float] = field(factory=dict)
    by_call: dict[str, float | None] = field(factory=dict)


def turns_of(events: Iterable[Event], *, policy: str | None = None) -> TurnsResult:
    """Read the turns of one attempt out of its events.

    Args:
        events: Events of a single attempt, in any order.
        policy: The policy whose calls are wanted; None: every trained one.
    """
    ordered = sorted(events, key=lambda event: event.seq)
    rewards = rewards_of(ordered, policy=policy).by_call
    turns: list[Turn] = []
    skipped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for event in ordered:
        if event.event_type != "model_request":
            continue
        cause = _call_cause(event.data, policy)
        if cause is not None:
            skipped[cause] += 1
            if cause == "model_not_found":
                refused[str(event.data.get("model"))] += 1
            continue
        for made in _turns_of_call(event, rewards.get(event.data["call_id"])):
            if isinstance(made, Turn):
                turns.append(made)
            else:
                skipped[made] += 1
    return TurnsResult(turns=tuple(turns), skipped=dict(skipped), refused_models=dict(refused))


def _call_cause(data: Mapping[str, Any], policy: str | None) -> str | None:
    """Say why no choice of a call can be a turn; None: look at its choices."""
    owner = data.get("policy")
    # A call whose model name was refused belongs to no policy, and must be seen under each.
    if owner and not data.get("trained", True):
        return "untrained"
    if owner and policy is not None and owner != policy:
        return "other_policy"
    if data.get("api") not in _SAMPLING_APIS:
        return "other_api"
    status = data.get("status")
    if status in _STATUS_CAUSES:
        return str(status)
    if status != "ok":
        return _error_cause(data)
    if not owner:
        return "untrained"
    return None if data.get("choices") else "no_token_ids"


def _error_cause(data: Mapping[str, Any]) -> str:
    if data.get("http_status") == 404:
        return "model_not_found"
    response = data.get("response")
    error = response.get("error") if isinstance(response, Mapping) else None
    if data.get("http_status") == 400 and isinstance(error, Mapping):
        # The code is OpenAI's and the gateway's own, the words are those of vLLM 0.32.
        if error.get("code") == "context_length_exceeded":
            return "context_exhausted"
        if "maximum context length" in str(error.get("message")):
            return "context_exhausted"
    return "upstream_error"


def _turns_of_call(event: Event, reward: float | None) -> Iterator[Turn | str]:
    """Make a turn of each choice, or the cause why it is none."""
    data = event.data
    server = data.get("server") or {}
    sampling = data.get("sampling") or {}
    media = _media_digests(data)
    shared_prompt = b""
    for place, choice in enumerate(data["choices"]):
        packed = _packed_choice(choice)
        if isinstance(packed, str):
            yield packed
            continue
        prompt, response, logprobs = packed
        if prompt == shared_prompt:
            # Choices of one call mostly have one prompt, which is then kept once.
            prompt = shared_prompt
        shared_prompt = prompt
        spans = choice.get("version_spans")
        yield Turn(
            call_id=data["call_id"],
            seq=event.seq,
            choice=choice.get("index", place),
            policy=data["policy"],
            adapter=server.get("model"),
            prompt=prompt,
            response=response,
            logprobs=logprobs,
            version_start=data.get("version_start"),
            version_end=data.get("version_end"),
            version_spans=tuple((first, version) for first, version in spans) if spans else None,
            finish_reason=choice.get("finish_reason"),
            sampling=sampling,
            logprobs_mode=sampling.get("logprobs_mode"),
            media=media,
            reward=reward,
            extras=choice.get("extras") or {},
        )


def _packed_choice(choice: Mapping[str, Any]) -> tuple[bytes, bytes, array[float]] | str:
    """Pack prompt ids, response ids and logprobs of a choice, or say why they cannot train."""
    prompt_ids, response_ids = choice.get("prompt_token_ids"), choice.get("token_ids")
    logprobs = choice.get("logprobs")
    if choice.get("finish_reason") == "abort":
        return "aborted"
    if not prompt_ids or response_ids is None or choice.get("tokens") in (None, "absent"):
        return "no_token_ids"
    if len(response_ids) == 0:
        return "empty_response"
    if logprobs is not None and not all(_is_finite(logprob) for logprob in logprobs):
        return "nonfinite_logprob"
    if logprobs is None or choice["tokens"] != "complete":
        return "incomplete_tokens"
    try:
        prompt, response = pack_ids(prompt_ids), pack_ids(response_ids)
    except (TypeError, ValueError, OverflowError):
        return "incomplete_tokens"
    packed = array("d", logprobs)
    if len(packed) * ID_BYTES != len(response):
        return "incomplete_tokens"
    return prompt, response, packed


def _is_finite(logprob: Any) -> bool:
    return isinstance(logprob, int | float) and math.isfinite(logprob)


def _media_digests(data: Mapping[str, Any]) -> tuple[str, ...]:
    """List the SHA-256 digests of a prompt's media in the order of the prompt.

    The gateway records them; the events of other origins have them in their request alone.
    """
    recorded = data.get("media")
    if recorded is not None:
        return tuple(item if isinstance(item, str) else item["sha256"] for item in recorded)
    return tuple(media_digest(medium)[0] for medium in find_media(media_request(data)))


def rewards_of(events: Iterable[Event], policy: str | None = None) -> Rewards:
    """Read the rewards of one attempt.

    Final is the last value of a reward that names no call, and a grader's goes before an agent's;
    the same holds for each call. An explicit null counts like a number, and takes an earlier value
    back. A reward without ``value`` only adds metrics. One that names another policy does not
    count.
    """
    final: float | None = None
    metrics: dict[str, float] = {}
    by_call: dict[str, float | None] = {}
    # Graders are read last, so that the last one read is the one that counts.
    ordered = sorted(events, key=lambda event: (_is_graders(event), event.seq))
    for event in ordered:
        data = event.data
        if event.event_type != "reward":
            continue
        if policy is not None and data.get("policy") not in (None, policy):
            continue
        call_id = data.get("call_id")
        if call_id is None:
            metrics.update(data.get("metrics") or {})
        if "value" not in data:
            continue
        value = data["value"]
        number = None if value is None else float(value)
        if call_id is None:
            final = number
        else:
            by_call[call_id] = number
    return Rewards(final=final, metrics=metrics, by_call=by_call)


def _is_graders(event: Event) -> bool:
    return bool(event.data.get("source", "agent") != "agent")
