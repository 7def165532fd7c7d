"""Batches with nothing to train on stop loudly, with the causes.

A model name that no server has, or a server without token ids, leaves rollouts that succeed with
rewards and no calls. A trainer that takes such a batch goes on for hours and learns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agl_core.errors import Invalid

NO_CALLS = "no_calls"
"""The cause of a rollout that made no call at all."""


class NoTrainableCalls(Invalid):
    """Too many of a batch's succeeded rollouts have no call that can be trained on.

    ``details`` has ``rollouts`` (their ids), ``succeeded`` (how many of all) and ``causes``.
    """


def check_share(share: float | None) -> None:
    """Refuse a share that is none.

    Raises:
        Invalid: It is not between 0 and 1.
    """
    if share is not None and not 0 <= share <= 1:
        raise Invalid(f"max_no_data_share is between 0 and 1, not {share}")


def check_batch(lines: Sequence[Mapping[str, Any]], share: float | None) -> None:
    """Refuse a batch of lines in which too many succeeded rollouts have nothing to train.

    Args:
        lines: Of ``triplet`` or ``trajectory``.
        share: How many of the succeeded may have nothing, between 0 and 1. None: not all of them.

    Raises:
        NoTrainableCalls: More have nothing.
    """
    succeeded = [line for line in lines if line.get("status") == "succeeded"]
    empty = [line for line in succeeded if not (line.get("triplets") or line.get("rows"))]
    is_allowed = (
        len(empty) < len(succeeded) if share is None else len(empty) <= share * len(succeeded)
    )
    if not empty or is_allowed:
        return
    causes = _causes(empty)
    told = ", ".join(f"{cause} ({count})" for cause, count in causes.items())
    raise NoTrainableCalls(
        f"{len(empty)} of {len(succeeded)} succeeded rollouts have no calls to train on: {told}",
        hint="max_no_data_share says how many may; 1 takes any batch",
        details={
            "rollouts": [line["rollout_id"] for line in empty],
            "succeeded": len(succeeded),
            "causes": causes,
        },
    )


def _causes(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the calls by cause, the most frequent first; a refused model by its name."""
    causes: Counter[str] = Counter()
    for line in lines:
        skipped = Counter(line["skipped"])
        refused = line.get("refused_models") or {}
        skipped["model_not_found"] -= sum(refused.values())
        causes.update({f"model_not_found: {name}": count for name, count in refused.items()})
        causes.update(+skipped)
        if not line["skipped"]:
            causes[NO_CALLS] += 1
    return dict(causes.most_common())
