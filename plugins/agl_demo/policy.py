"""The demo's model: a softmax over 33 words, linear in the last five tokens.

Small enough to train in seconds on one core, and yet a language model: it reads token ids, samples
token ids with log-probabilities, and knows nothing of robots.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from agl_demo.vocabulary import ACTION_IDS, ASSISTANT, END, PAD, WORDS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONTEXT_TOKENS = 5
SHAPE = (CONTEXT_TOKENS, len(WORDS), len(WORDS))
"""[place in the context (the last token last), token there, next token]."""

_ANSWER_LOGIT = 6.0
_END_LOGIT = 8.0


def initial_weights() -> Floats:
    """Weights float64 of ``SHAPE`` that know how to answer but not what.

    Asked, they say one of the action words and then stop, as a pretrained model would.
    """
    weights = np.zeros(SHAPE)
    weights[-1, ASSISTANT, list(ACTION_IDS)] = _ANSWER_LOGIT
    weights[-1, list(ACTION_IDS), END] = _END_LOGIT
    return weights


def log_softmax(logits: Floats) -> Floats:
    """Natural log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalized: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def contexts(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Ints:
    """What the model saw before each token of a response: int64 [response_length, 5]."""
    before = [PAD] * CONTEXT_TOKENS + list(prompt_ids)
    ids = before + list(response_ids)
    start = len(before)
    rows = [ids[end - CONTEXT_TOKENS : end] for end in range(start, len(ids))]
    return np.array(rows, dtype=np.int64).reshape(len(rows), CONTEXT_TOKENS)


def logits_of(weights: Floats, context_rows: Ints) -> Floats:
    """Logits float64 [rows, words] of the token after each context int64 [rows, 5]."""
    places = np.arange(CONTEXT_TOKENS)
    logits: Floats = weights[places, context_rows].sum(axis=1)
    return logits


@frozen(kw_only=True)
class Sampling:
    """How a token is drawn; names, ranges and neutral values are those of vLLM's requests."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def probabilities(self, logits: Floats) -> Floats:
        """The distribution that is drawn from, float64 [words]."""
        if self.temperature == 0:
            greedy = np.zeros_like(logits)
            greedy[int(logits.argmax())] = 1.0
            return greedy
        chances = np.exp(log_softmax(logits / self.temperature))
        order = np.argsort(-chances, kind="stable")
        ranked = chances[order]
        keep = ranked >= self.min_p * ranked[0]
        if self.top_k > 0:
            keep[self.top_k :] = False
        # The word that crosses top_p is still in.
        keep &= np.cumsum(ranked) - ranked < self.top_p
        keep[0] = True
        kept = np.zeros_like(chances)
        kept[order[keep]] = ranked[keep]
        normalized: Floats = kept / kept.sum()
        return normalized


@frozen(kw_only=True)
class Draw:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the sampled tokens at temperature 1, before any cut: what vLLM calls raw."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token the likeliest (id, log-probability) first; as many as were asked for."""
    is_ended: bool = field(default=False)
    """Whether the end token came before the room was used up."""


def random_for(*key: Any) -> np.random.Generator:
    """A generator that depends on ``key`` alone, never on what was drawn before or beside it."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def sample(
    weights: Floats,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    max_tokens: int,
    random: np.random.Generator,
    top_logprobs: int = 0,
) -> Draw:
    """Draw an answer of at most ``max_tokens`` tokens; the end token is among them."""
    ids = [PAD] * CONTEXT_TOKENS + list(prompt_ids)
    start = len(ids)
    logprobs: list[float] = []
    alternatives: list[tuple[tuple[int, float], ...]] = []
    while len(ids) - start < max_tokens:
        logits = logits_of(weights, np.array([ids[-CONTEXT_TOKENS:]]))[0]
        cumulative = np.cumsum(sampling.probabilities(logits))
        point = random.random() * cumulative[-1]
        token_id = int(np.searchsorted(cumulative, point, side="right"))
        raw = log_softmax(logits)
        ids.append(token_id)
        logprobs.append(float(raw[token_id]))
        best = np.argsort(-raw, kind="stable")[:top_logprobs]
        alternatives.append(tuple((int(index), float(raw[index])) for index in best))
        if token_id == END:
            break
    return Draw(
        token_ids=tuple(ids[start:]),
        logprobs=tuple(logprobs),
        alternatives=tuple(alternatives),
        is_ended=ids[-1] == END and len(ids) > start,
    )
