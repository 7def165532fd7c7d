"""Events in memory on their way to the store: one lane per rollout, each in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from attrs import define, field

from agl_core.errors import AglError, StoreError
from agl_core.gateway.spill_segment import SpilledEvent

log = logging.getLogger(__name__)

# Events of one attempt this close to each other go into the store as one, with one time.
_SAME_MOMENT_SECONDS = 0.05


@define(eq=False)
class Item:
    """One event, and who waits for it."""

    event: SpilledEvent
    written: asyncio.Future[None]

    def finish(self, error: AglError | None = None) -> None:
        """Say what became of it."""
        if self.written.done():
            return
        if error is None:
            self.written.set_result(None)
            return
        self.written.set_exception(error)
        self.written.exception()  # it may be that nobody waits any more


@define(eq=False)
class Lane:
    """The events of one rollout."""

    items: deque[Item] = field(factory=deque)
    batch: list[Item] = field(factory=list)
    """What is being written now."""
    worker: asyncio.Task[None] | None = None

    @property
    def last(self) -> Item:
        return self.items[-1] if self.items else self.batch[-1]


Write = Callable[[str, list[Item]], Awaitable[None]]


class Lanes:
    """Takes events and hands them on in batches: per rollout in order and one at a time.

    Args:
        write: Brings a batch to its end and finishes its items.
        freed: Told how many events have left.
    """

    def __init__(self, write: Write, freed: Callable[[int], None]) -> None:
        self._write = write
        self._freed = freed
        self._lanes: dict[str, Lane] = {}
        self.size = 0
        """Events in memory, those being written included."""

    def put(self, event: SpilledEvent) -> Item:
        """Queue an event."""
        item = Item(event, asyncio.get_running_loop().create_future())
        lane = self._lanes.setdefault(event.rollout_id, Lane())
        lane.items.append(item)
        self.size += 1
        if lane.worker is None:
            name = f"record-{event.rollout_id}"
            lane.worker = asyncio.create_task(self._drain(event.rollout_id, lane), name=name)
        return item

    async def _drain(self, rollout_id: str, lane: Lane) -> None:
        while lane.items:
            lane.batch = _next_batch(lane.items)
            try:
                await self._write(rollout_id, lane.batch)
            except Exception as exc:
                log.exception("events could not be written", extra={"rollout_id": rollout_id})
                for item in lane.batch:
                    item.finish(StoreError(f"the call cannot be recorded: {exc}"))
            self.size -= len(lane.batch)
            self._freed(len(lane.batch))
        del self._lanes[rollout_id]

    def last(self, rollout_id: str) -> Item | None:
        """What was put in last, if it is still on its way; with it goes all that came before."""
        lane = self._lanes.get(rollout_id)
        return None if lane is None else lane.last

    async def stop(self, seconds: float) -> list[list[Item]]:
        """Write for at most ``seconds``, and return by rollout what is left."""
        workers = {lane.worker for lane in self._lanes.values() if lane.worker is not None}
        if not workers:
            return []
        _, late = await asyncio.wait(workers, timeout=seconds)
        lanes = list(self._lanes.values())
        for worker in late:
            worker.cancel()
        if late:
            await asyncio.wait(late, timeout=seconds)
        self._lanes.clear()
        left = [
            [item for item in (*lane.batch, *lane.items) if not item.written.done()]
            for lane in lanes
        ]
        return [items for items in left if items]


def _next_batch(items: deque[Item]) -> list[Item]:
    """The first event and those that can be appended together with it."""
    first = items.popleft()
    batch = [first]
    while items:
        event = items[0].event
        if event.attempt_id != first.event.attempt_id:
            break
        if abs(event.timestamp - first.event.timestamp) > _SAME_MOMENT_SECONDS:
            break
        batch.append(items.popleft())
    return batch
