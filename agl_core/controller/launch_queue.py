"""Rollouts that wait for a free place: by priority, then in the order of their enqueueing."""

from __future__ import annotations

import heapq
import itertools

from agl_core.records import Rollout


class LaunchQueue:
    """A priority queue of ids; taking one out from the middle costs nothing."""

    def __init__(self) -> None:
        self._places = itertools.count()
        self._keys: dict[str, tuple[int, float, int]] = {}
        self._heap: list[tuple[int, float, int, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._keys

    def add(self, rollout: Rollout) -> None:
        """Let a rollout wait; one that waits already keeps its place."""
        if rollout.rollout_id in self._keys:
            return
        key = (-rollout.priority, rollout.created_at, next(self._places))
        self._keys[rollout.rollout_id] = key
        heapq.heappush(self._heap, (*key, rollout.rollout_id))

    def discard(self, rollout_id: str) -> None:
        if self._keys.pop(rollout_id, None) is not None and len(self._heap) > 2 * len(self._keys):
            self._heap = [(*key, name) for name, key in self._keys.items()]
            heapq.heapify(self._heap)

    def pop(self) -> str | None:
        """Take out the first; None: none waits."""
        while self._heap:
            *key, rollout_id = heapq.heappop(self._heap)
            if self._keys.get(rollout_id) == tuple(key):
                del self._keys[rollout_id]
                return rollout_id
        return None
