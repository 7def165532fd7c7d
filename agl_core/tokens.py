"""Captured events seen as tokens: turns, rewards, and the lines that trainers read.

``turns_of`` says which captured calls are turns and counts why the others are not (``turns`` lists
the causes), ``rewards_of`` reads the rewards, ``merge`` makes rows of turns. ``triplet_line`` and
``trajectory_line`` put these together in the shape of the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agl_core.lineages import Merged, Row, RowTurn, Split, merge
from agl_core.records import Event, Rollout
from agl_core.turns import (
    Rewards,
    Turn,
    TurnsResult,
    pack_ids,
    rewards_of,
    turns_of,
    unpack_ids,
)

__all__ = [
    "Merged",
    "Rewards",
    "Row",
    "RowTurn",
    "Split",
    "Turn",
    "TurnsResult",
    "attempt_events",
    "merge",
    "pack_ids",
    "rewards_of",
    "row_to_wire",
    "trajectory_line",
    "triplet_line",
    "turns_of",
    "unpack_ids",
    "untrainable_sampling",
]


def attempt_events(rollout: Rollout, events: Iterable[Event]) -> tuple[str | None, list[Event]]:
    """Pick the attempt that trains, the succeeded one, else the latest, and its events."""
    listed = list(events)
    attempt_id = rollout.default_attempt_id
    if attempt_id is None and listed:
        attempt_id = max(listed, key=lambda event: event.seq).attempt_id
    return attempt_id, [event for event in listed if event.attempt_id == attempt_id]


def triplet_line(
    rollout: Rollout,
    events: Iterable[Event],
    *,
    policy: str | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Give a rollout as (prompt, response, reward) triplets, one for each turn, in order.

    A triplet has no place for images, audio and video: a turn whose prompt has any is left out,
    since its placeholder ids alone would look like text to train on.

    Args:
        rollout: Whose calls.
        events: Of the rollout.
        policy: The policy whose calls are wanted; None: every trained one.
        max_length: Tokens that prompt and response may have together; a longer turn is left out.
    """
    attempt_id, events = attempt_events(rollout, events)
    result = turns_of(events, policy=policy)
    skipped = Counter(result.skipped)
    turns = []
    for turn in result.turns:
        if turn.media:
            skipped["multimodal_unsupported"] += 1
        elif max_length is not None and turn.context_length > max_length:
            skipped["too_long"] += 1
        else:
            turns.append(turn)
    return {
        **_rollout_to_wire(rollout, attempt_id),
        "reward": rewards_of(events, policy=policy).final,
        "triplets": [
            {
                "call_id": turn.call_id,
                "choice": turn.choice,
                "policy": turn.policy,
                "prompt_token_ids": turn.prompt_token_ids,
                "response_token_ids": turn.response_token_ids,
                "logprobs": turn.logprobs.tolist(),
                "version_start": turn.version_start,
                "version_end": turn.version_end,
                "reward": turn.reward,
                **_extras_to_wire(turn.extras),
            }
            for turn in turns
        ],
        **_skipped_to_wire(skipped, result),
    }


def trajectory_line(
    rollout: Rollout,
    events: Iterable[Event],
    *,
    policy: str | None = None,
    keep_abandoned: bool = True,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Give a rollout as the rows that its turns merge into.

    A row's ``media`` are the digests of its prompt's images, audio and video, in order. The media
    themselves are in the request of the row's last call.

    Args:
        rollout: Whose calls.
        events: Of the rollout.
        policy: The policy whose calls are wanted; None: every trained one.
        keep_abandoned: Whether turns that were left behind train.
        max_length: Tokens that a row may have; a longer one is left out whole.
    """
    attempt_id, events = attempt_events(rollout, events)
    result = turns_of(events, policy=policy)
    rewards = rewards_of(events, policy=policy)
    merged = merge(result.turns, keep_abandoned=keep_abandoned, max_length=max_length)
    skipped = Counter(result.skipped)
    if merged.too_long:
        skipped["too_long"] += merged.too_long
    return {
        **_rollout_to_wire(rollout, attempt_id),
        "reward": rewards.final,
        "metrics": rewards.metrics,
        "rows": [row_to_wire(row) for row in merged.rows],
        "splits": [
            {"call_id": split.call_id, "choice": split.choice, "index": split.index}
            for split in merged.splits
        ],
        "abandoned": merged.abandoned,
        **_skipped_to_wire(skipped, result),
    }


def _skipped_to_wire(skipped: Mapping[str, int], result: TurnsResult) -> dict[str, Any]:
    refused = result.refused_models
    return {"skipped": dict(skipped), **({"refused_models": refused} if refused else {})}


def _extras_to_wire(extras: Mapping[str, Any]) -> dict[str, Any]:
    return {"extras": dict(extras)} if extras else {}


def _rollout_to_wire(rollout: Rollout, attempt_id: str | None) -> dict[str, Any]:
    group = rollout.group
    return {
        "rollout_id": rollout.rollout_id,
        "attempt_id": attempt_id,
        "group": group and {"id": group.id, "size": group.size, "index": group.index},
        "mode": rollout.mode,
        "status": rollout.status,
    }


def row_to_wire(row: Row) -> dict[str, Any]:
    """Give a row as JSON-able values."""
    return {
        "policy": row.policy,
        "segment": row.segment,
        "weight": row.weight,
        "shared": row.shared,
        "prompt_length": row.prompt_length,
        "token_ids": row.token_ids,
        "logprobs": row.logprobs.tolist(),
        "turns": [_row_turn_to_wire(turn) for turn in row.turns],
        "sampling": dict(row.sampling),
        "logprobs_mode": row.logprobs_mode,
        "media": list(row.media),
    }


def _row_turn_to_wire(turn: RowTurn) -> dict[str, Any]:
    spans = turn.version_spans
    return {
        "call_id": turn.call_id,
        "choice": turn.choice,
        "start": turn.start,
        "end": turn.end,
        "version_spans": None if spans is None else [list(span) for span in spans],
        "reward": turn.reward,
        "finish_reason": turn.finish_reason,
        **_extras_to_wire(turn.extras),
    }


def untrainable_sampling(sampling: Mapping[str, Any]) -> str | None:
    """Say why log-probabilities taken under this sampling cannot be trained on; None: they can.

    Raw log-probabilities are those before temperature, top_p, top_k and min_p, so with any of these
    in effect they are not those of the distribution that was sampled from, and no later division
    mends it.
    """
    mode = sampling.get("logprobs_mode")
    if mode != "raw":
        return None
    neutral = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    active = [
        f"{name} is {sampling[name]}"
        for name, values in neutral.items()
        if sampling.get(name) is not None and sampling[name] not in values
    ]
    if not active:
        return None
    return (
        f"logprobs_mode is {mode} while {', '.join(active)}: serve the model with processed "
        f"log-probabilities, or sample at temperature 1 without truncation"
    )
