"""The demo's tasks: where the robot and its charger stand, the same for the same seed."""

from __future__ import annotations

from typing import Any

from agl_demo.policy import random_for

SIBLINGS = 4
"""Walks of one task, compared with each other."""
MAX_CALLS = 8
"""Model calls of one walk; the longest way needs all of them."""
_SIZE = 5
_QUARTERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
GROUPS = len(_QUARTERS)
"""Tasks of one step: one for each quarter of the compass, so that no step is one-sided."""


def _place(offset: int, random_number: int) -> tuple[int, int]:
    """Where robot and charger stand along one axis for the charger to be ``offset`` cells on."""
    nearest = random_number % (_SIZE - abs(offset))
    return (nearest, nearest + offset) if offset > 0 else (nearest - offset, nearest)


def tasks_of(seed: int, step: int) -> list[dict[str, Any]]:
    """The inputs of a step's groups.

    ``key`` names the task for good: the agent hands it to the model server as ``user``, so that
    the same walk gets the same answers however often and beside whatever else it is walked.
    """
    tasks: list[dict[str, Any]] = []
    for group, (east, north) in enumerate(_QUARTERS):
        random = random_for("task", seed, step, group)
        across, along = (int(cells) for cells in random.integers(1, _SIZE, size=2))
        where = [int(number) for number in random.integers(0, 1000, size=2)]
        columns, rows = _place(east * across, where[0]), _place(north * along, where[1])
        tasks.append(
            {
                "key": f"{step}-{group}",
                "robot": [columns[0], rows[0]],
                "charger": [columns[1], rows[1]],
                "max_calls": MAX_CALLS,
            }
        )
    return tasks
