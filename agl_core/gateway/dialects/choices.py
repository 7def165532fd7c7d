"""What is gathered of one choice, and the proof that its tokens are all there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from agl_core.gateway.dialects.alternatives import Alternatives
from agl_core.gateway.dialects.shapes import decode_lenient

Proof = Literal["complete", "incomplete", "absent"]

# Control tokens such as <|im_end|>, </s> or <end_of_turn> are sampled but are not part of the text.
_CONTROL_TOKEN = re.compile(r"<[^<>\s]+>\Z")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# vLLM 0.32 has the field in every whole answer, mostly null, and never in a stream.
_HAS_ROUTING = re.compile(rb'"routed_experts"\s*+:\s*+(?!null)')


class _ExtraChoice(msgspec.Struct):
    index: int = 0
    routed_experts: Any = None


class _ExtraAnswer(msgspec.Struct):
    choices: list[_ExtraChoice] | None = None


_extras_decoder = msgspec.json.Decoder(_ExtraAnswer)


class ChoiceState:
    """One choice while its answer comes in."""

    __slots__ = (
        "alternatives",
        "extras",
        "finish_reason",
        "index",
        "logprobs",
        "parts",
        "prompt_token_ids",
        "shown_logprobs",
        "stop_reason",
        "text_tokens",
        "token_ids",
        "tool_calls",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] | None = None
        self.logprobs: list[float | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.extras: dict[str, Any] = {}
        # Only where more came than the agent asked for.
        self.alternatives: Alternatives | None = None
        # Streams only: the pieces of each text field, the tool calls, the tokens' texts and the
        # logprobs as sent.
        self.parts: dict[str, Any] = {}
        self.tool_calls: list[dict[str, Any]] = []
        self.text_tokens: list[str] = []
        self.shown_logprobs: list[Any] = []

    def add_token_ids(self, ids: list[int] | None) -> None:
        """Append the ids of one chunk; a chunk that has none says nothing."""
        if ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids += ids

    def add_logprobs(self, values: Sequence[Any]) -> None:
        """Append chosen-token logprobs; what is no finite number becomes None."""
        if self.logprobs is None:
            self.logprobs = []
        self.logprobs += [v if type(v) is float else _number(v) for v in values]

    def add_alternatives(self, values: Alternatives) -> None:
        """Append the alternatives of one chunk's tokens."""
        if self.alternatives is None:
            self.alternatives = []
        self.alternatives += values

    def drop_prompt_logprobs(self) -> None:
        """With ``echo`` the logprobs of the prompt come first; keep those of the sampled tokens."""
        ids, logprobs, prompt = self.token_ids, self.logprobs, self.prompt_token_ids
        if ids is None or logprobs is None or prompt is None:
            return
        if len(logprobs) == len(prompt) + len(ids):
            self.logprobs = logprobs[len(prompt) :]
            if self.alternatives is not None:
                self.alternatives = self.alternatives[len(prompt) :]

    @property
    def told(self) -> dict[str, Any]:
        """What the engine told for trainers alone.

        Alternatives that are not one list for each token's logprob are left out: nobody could say
        whose they are.
        """
        found, logprobs = self.alternatives, self.logprobs
        if not found or logprobs is None or len(found) != len(logprobs) or not any(found):
            return self.extras
        return {**self.extras, "top_logprobs": found}

    @property
    def has_gaps(self) -> bool:
        """Whether a token's logprob is missing or was not finite."""
        return self.logprobs is not None and None in self.logprobs

    def text_differs(self, text: str) -> bool:
        """Tell whether the text is not that of the sampled tokens, as the logprobs name them.

        What a stop string cut off, control tokens, and bytes that make no whole character are no
        difference.
        """
        tokens = self.text_tokens
        if not tokens or any(token.startswith("token_id:") for token in tokens):
            return False
        text = text.rstrip(_REPLACEMENT)
        spoken = "".join(token for token in tokens if not _CONTROL_TOKEN.match(token))
        for sampled in (spoken, "".join(tokens)):
            sampled = sampled.rstrip(_REPLACEMENT)
            if sampled.strip() == text.strip():
                return False
            if self.stop_reason is not None and sampled.startswith(text):
                return False
        return True


def _number(value: Any) -> float | None:
    """Return a logprob that is written as an integer as a float; None for what is no logprob."""
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return None


def extras_in(body: bytes) -> dict[int, dict[str, Any]]:
    """Return what a whole answer tells of each choice for trainers alone, as it tells it.

    ``routed_experts`` says which experts of a mixture each token went through.
    """
    read = decode_lenient(_extras_decoder, body) if _HAS_ROUTING.search(body) else None
    return {
        choice.index: {"routed_experts": choice.routed_experts}
        for choice in (read[0].choices if read is not None else None) or ()
        if choice.routed_experts is not None
    }


def prove(
    states: Sequence[ChoiceState], usage: Mapping[str, Any] | None, *, ended: bool
) -> list[Proof]:
    """Say of each choice whether its tokens are proved to be all there.

    ``complete``: it has its prompt's ids, as many ids as finite logprobs, and the ids of all
    choices are together as many as the server counted. ``absent``: no ids came. ``incomplete``:
    anything else.
    """
    counted = None if usage is None else usage.get("completion_tokens")
    total = sum(len(state.token_ids or ()) for state in states)
    adds_up = ended and isinstance(counted, int) and counted == total
    proofs: list[Proof] = []
    for state in states:
        ids, logprobs = state.token_ids, state.logprobs
        if ids is None:
            proofs.append("absent")
        elif (
            adds_up
            and state.prompt_token_ids is not None
            and logprobs is not None
            and len(logprobs) == len(ids)
            and not state.has_gaps
        ):
            proofs.append("complete")
        else:
            proofs.append("incomplete")
    return proofs


def record(state: ChoiceState, proof: Proof) -> dict[str, Any]:
    """Return the choice as a ``model_request`` event has it."""
    return {
        "index": state.index,
        "prompt_token_ids": state.prompt_token_ids,
        "token_ids": state.token_ids,
        "logprobs": state.logprobs,
        "version_spans": None,
        "finish_reason": state.finish_reason,
        "tokens": proof,
        "extras": state.told,
    }
