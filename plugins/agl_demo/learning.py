"""How the demo's policy learns: group-relative advantages and a clipped policy gradient.

Everything comes from what the gateway captured: token ids, log-probabilities, rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from agl_demo.policy import Floats, contexts, log_softmax, logits_of

RATE = 10.0
"""Step size over the mean gradient of the batch; large, since a call touches few weights."""
EPOCHS = 24
LEAST_DEVIATION = 0.2
"""Added to a group's deviation: one bad call among many good ones must not shake all weights."""
CLIP = 1.0
"""A token whose probability went up, or after a bad call down, by a factor of 1 + this is left
alone until the next batch.
"""


@frozen(kw_only=True)
class Call:
    """One model call as captured, with the reward that the agent gave to it."""

    group: str
    """Calls of one group are compared with each other."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probabilities of the response's tokens when they were sampled."""
    reward: float


def advantages(calls: Sequence[Call]) -> list[float]:
    """How much better each call did than the calls of its group, in standard deviations."""
    rewards: dict[str, list[float]] = {}
    for call in calls:
        rewards.setdefault(call.group, []).append(call.reward)
    scale = {
        name: (float(np.mean(of)), float(np.std(of)) + LEAST_DEVIATION)
        for name, of in rewards.items()
    }
    return [(call.reward - scale[call.group][0]) / scale[call.group][1] for call in calls]


def improve(weights: Floats, calls: Sequence[Call]) -> Floats:
    """Return weights under which the calls that did well are likelier.

    Args:
        weights: float64 of ``policy.SHAPE``; not changed.
        calls: The batch; its order does not matter but for rounding.
    """
    rows = [contexts(call.prompt_ids, call.response_ids) for call in calls]
    if not rows:
        return weights.copy()
    context_rows = np.concatenate(rows)
    token_ids = np.concatenate([np.array(call.response_ids, dtype=np.int64) for call in calls])
    captured = np.concatenate([np.array(call.logprobs, dtype=np.float64) for call in calls])
    gains = np.repeat(advantages(calls), [len(call.response_ids) for call in calls])
    everyone = np.arange(len(token_ids))
    places = np.arange(context_rows.shape[1])
    improved = weights.copy()
    for _ in range(EPOCHS):
        logprobs = log_softmax(logits_of(improved, context_rows))
        ratios = np.exp(logprobs[everyone, token_ids] - captured)
        pulls = np.where(gains > 0, ratios < 1 + CLIP, ratios > 1 / (1 + CLIP)) * gains * ratios
        slopes = -np.exp(logprobs)
        slopes[everyone, token_ids] += 1
        slopes *= pulls[:, None] / len(calls)
        gradient = np.zeros_like(improved)
        np.add.at(gradient, (places, context_rows), slopes[:, None, :])
        improved += RATE * gradient
    return improved
