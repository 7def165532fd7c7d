"""Batches with nothing to train on stop loudly, with the causes: in the export and the client.

A model name that no server has, or a server without token ids, leaves rollouts that succeed with
rewards and no calls. A trainer that takes such a batch goes on for hours and learns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agl_core.errors import Invalid

NO_CALLS = "no_calls"
"""The cause of a rollout that made no call at all."""


class NoTrainableCalls(Invalid):
    """Too many of a batch's succeeded rollouts have no call that can be trained on.

    ``details`` has ``rollouts`` (their ids), ``succeeded`` (how many of all) and ``causes``.
    """

    default_code = "no_trainable_calls"


def check_share(share: float | None) -> None:
    """Refuse a share that is none.

    Raises:
        Invalid: It is not between 0 and 1.
    """
    if share is not None and not 0 <= share <= 1:
        raise Invalid(f"max_no_data_share is between 0 and 1, not {share}")


class NoDataCount:
    """Counts, line by line, the succeeded rollouts of a batch that have nothing to train on."""

    def __init__(self) -> None:
        self._succeeded = 0
        self._empty: list[str] = []
        self._causes: Counter[str] = Counter()

    def add(self, line: Mapping[str, Any]) -> None:
        """Count one line of ``triplet`` or ``trajectory``."""
        if line.get("status") != "succeeded":
            return
        self._succeeded += 1
        if not (line.get("triplets") or line.get("rows")):
            self._empty.append(line["rollout_id"])
            self._causes.update(_causes(line))

    def check(self, share: float | None) -> None:
        """Refuse the batch where too many of them have nothing.

        Args:
            share: How many of the succeeded may have nothing, from 0 to 1. None: not all of them.

        Raises:
            NoTrainableCalls: More have nothing.
        """
        empty, succeeded = len(self._empty), self._succeeded
        is_allowed = empty < succeeded if share is None else empty <= share * succeeded
        if not empty or is_allowed:
            return
        causes = dict(self._causes.most_common())
        told = ", ".join(f"{cause} ({count})" for cause, count in causes.items())
        raise NoTrainableCalls(
            f"{empty} of {succeeded} succeeded rollouts have no calls to train on: {told}",
            hint="max_no_data_share says how many may; 1 takes any batch",
            details={"rollouts": self._empty, "succeeded": succeeded, "causes": causes},
        )


def check_batch(lines: Iterable[Mapping[str, Any]], share: float | None) -> None:
    """Refuse a batch of lines in which too many succeeded rollouts have nothing to train on.

    Raises:
        NoTrainableCalls: More than ``share`` of them, as ``NoDataCount.check`` takes it.
    """
    count = NoDataCount()
    for line in lines:
        count.add(line)
    count.check(share)


def _causes(line: Mapping[str, Any]) -> Counter[str]:
    """Count the calls of a line by cause; a refused model by its name."""
    if not line["skipped"]:
        return Counter({NO_CALLS: 1})
    causes = Counter(line["skipped"])
    refused = line.get("refused_models") or {}
    causes["model_not_found"] -= sum(refused.values())
    causes.update({f"model_not_found: {name}": count for name, count in refused.items()})
    return +causes
