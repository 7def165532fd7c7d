"""From a finished call to its event: in the store, else in the spill, else an error.

A call is accepted when ``Recorder.record`` returns. From then on its event is not lost: it is in
the store, or on disk until the store takes it (with durability "async" first in memory).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agl_core.clock import Clock
from agl_core.errors import AglError, NotFound, StoreError, Unavailable
from agl_core.gateway.capture import SinkQueue
from agl_core.gateway.lanes import Item, Lanes
from agl_core.gateway.replayer import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Replayer
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import SpilledEvent
from agl_core.gateway.spill_thread import SpillThread
from agl_core.interfaces import Store
from agl_core.records import Event, EventDraft
from agl_core.settings import CaptureSettings

log = logging.getLogger(__name__)


class Recorder:
    """Puts events into the store and hands them to the sinks. An async context manager.

    Events of one rollout go in the order in which they were accepted: while any of it is spilled,
    the later ones are spilled too.

    Args:
        store: Where the events belong.
        clock: For their times, and for the pauses between tries.
        sinks: By name.
        settings: The table ``[capture]``.
        barrier_seconds: How long a reader waits for what was accepted before its request.
        flush_seconds: How long the end waits for the store; what is left then is spilled.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sinks: Mapping[str, SinkQueue],
        settings: CaptureSettings | None = None,
        *,
        barrier_seconds: float = 15.0,
        flush_seconds: float = 5.0,
    ) -> None:
        settings = settings or CaptureSettings()
        self._store = store
        self._clock = clock
        self._sinks = sinks
        self._barrier_seconds = barrier_seconds
        self._flush_seconds = flush_seconds
        self._is_async = settings.durability == "async"
        self._queue = settings.queue
        self._file = SpillFile(
            Path(settings.spill_dir), max_bytes=settings.spill_max_bytes, keeps=store.is_durable
        )
        self._spill = SpillThread(self._file)
        self._replayer = Replayer(store, clock, self._spill, self.publish)
        self._lanes = Lanes(self._write, self._wake)
        self._room: deque[asyncio.Future[None]] = deque()
        self._stuck: StoreError | None = None
        """Why neither store nor spill takes what is in memory (durability "async" only)."""
        self._is_spilling = False
        self.recorded: dict[str, int] = {}
        """Accepted calls by status."""
        self.spilled = 0
        self.dropped = 0
        """Events of rollouts that were deleted meanwhile."""
        self.lost = 0
        """Events that neither the store nor the spill took."""

    async def __aenter__(self) -> Self:
        # A store that keeps nothing has nothing to be replayed: no folder before it is needed.
        if self._store.is_durable:
            await self._spill.open()
        self._replayer.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = await self._lanes.stop(self._flush_seconds)
        for items in left:
            await self._keep(items, StoreError("the store took too long at the end"))
        await self._replayer.stop(self._flush_seconds)
        waiting = len(self._file)
        if waiting and not self._store.is_durable:
            log.error("spilled events end with the store in memory", extra={"events": waiting})
        elif waiting:
            log.warning("spilled events wait for the next start", extra={"events": waiting})
        await self._spill.close()

    # --- recording

    async def record(self, rollout_id: str, attempt_id: str, draft: EventDraft) -> None:
        """Accept one event. Once it is queued it is written even if the caller is cancelled.

        Raises:
            StoreError: It could be put neither into the store nor into the spill.
            NotFound: The rollout was deleted.
        """
        if self._is_async:
            await self._wait_for_room()
        item = self._lanes.put(
            SpilledEvent(
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                timestamp=self._clock.now(),
                draft=draft,
            )
        )
        if not self._is_async:
            await asyncio.shield(item.written)
        status = str(draft.data["status"])
        self.recorded[status] = self.recorded.get(status, 0) + 1

    async def _wait_for_room(self) -> None:
        while self._stuck is None and self._lanes.size >= self._queue:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(room)
            await room
        if self._stuck is not None:
            raise StoreError(self._stuck.message, hint=self._stuck.hint)

    def _wake(self, count: int) -> None:
        while count and self._room:
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)
                count -= 1

    async def _write(self, rollout_id: str, batch: list[Item]) -> None:
        """Bring a batch to its end; the lane's next one comes after it."""
        cause: Exception | None = None
        if not self._file.holds(rollout_id):
            try:
                await self._append(rollout_id, batch)
                return
            except StoreError as exc:
                cause = exc
        if not self._is_async:
            await self._keep(batch, cause)
            return
        # These calls are answered: what nobody takes stays in memory, and no more is accepted.
        pause = FIRST_PAUSE_SECONDS
        while not await self._keep(batch, cause, is_last_try=False):
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                await self._append_again(rollout_id, batch)
                return
            except StoreError as exc:
                cause = exc

    async def _append_again(self, rollout_id: str, batch: Sequence[Item]) -> None:
        """Try the store once more; it may have taken before what it said that it did not.

        Raises:
            StoreError: It takes nothing now.
        """
        await self._replayer.replay(rollout_id)
        left = [item for item in batch if not item.written.done()]
        try:
            known = await self._replayer.find(rollout_id, {item.event.identity for item in left})
        except NotFound as exc:
            self._refuse(left, exc)
            return
        for item in left:
            event = known.get(item.event.identity)
            if event is None:
                await self._append(rollout_id, [item])
            else:
                self.publish([event])
                self._finish([item])

    async def _append(self, rollout_id: str, batch: Sequence[Item]) -> None:
        """Try the store.

        Raises:
            StoreError: It takes nothing now; whether it took the batch all the same is unknown.
        """
        first = batch[0].event
        try:
            events = await self._store.append_events(
                rollout_id,
                first.attempt_id,
                [item.event.draft for item in batch],
                timestamp=first.timestamp,
            )
        except AglError as exc:
            if isinstance(exc, Unavailable):
                raise StoreError(exc.message, hint=exc.hint) from exc
            if len(batch) > 1 and not isinstance(exc, NotFound):
                for item in batch:  # one that is refused must not take the others with it
                    await self._append(rollout_id, [item])
                return
            self._refuse(batch, exc)
        except Exception as exc:
            log.exception("the store failed", extra={"rollout_id": rollout_id})
            raise StoreError(f"the store failed: {type(exc).__name__}: {exc}") from exc
        else:
            self._is_spilling = False
            self.publish(events)
            self._finish(batch)

    def _refuse(self, batch: Sequence[Item], exc: AglError) -> None:
        """The store will never take these."""
        if isinstance(exc, NotFound):
            self.dropped += len(batch)
        else:
            self.lost += len(batch)
        if self._is_async:
            extra = {"rollout_id": batch[0].event.rollout_id, "events": len(batch)}
            log.error("the store refuses events of answered calls: %s", exc.message, extra=extra)
        self._finish(batch, exc)

    async def _keep(
        self, batch: Sequence[Item], cause: Exception | None, *, is_last_try: bool = True
    ) -> bool:
        """Put a batch into the spill, and return whether that went well."""
        batch = [item for item in batch if not item.written.done()]
        if cause is not None and not self._is_spilling:
            self._is_spilling = True
            log.warning("the store fails, events are spilled: %s", cause)
        try:
            await self._spill.append([item.event for item in batch])
        except StoreError as exc:
            error = StoreError(
                f"the call cannot be recorded: {cause or 'the store is behind'}; {exc.message}",
                hint=exc.hint,
            )
            if is_last_try:
                self.lost += len(batch)
                log.error("events are lost", extra={"events": len(batch), "cause": str(error)})
                self._finish(batch, error)
            elif self._stuck is None:
                self._stuck = error
                log.error("neither store nor spill takes events: %s", error)
                self._wake(len(self._room))
            return False
        self.spilled += len(batch)
        self._finish(batch)
        return True

    def _finish(self, batch: Sequence[Item], error: AglError | None = None) -> None:
        if error is None:
            self._stuck = None
        for item in batch:
            item.finish(error)

    # --- reading

    async def settled(self, rollout_id: str) -> None:
        """Wait until what was accepted for a rollout so far is in the store (read barrier).

        Raises:
            StoreError: It is not, because the store is down; less than there is must not be read.
        """
        last = self._lanes.last(rollout_id)
        if last is None and not self._file.holds(rollout_id):
            return
        try:
            async with asyncio.timeout(self._barrier_seconds):
                if last is not None:
                    await asyncio.wait({last.written})
                await self._replayed(rollout_id)
        except TimeoutError as exc:
            raise StoreError(
                f"calls of rollout {rollout_id!r} are not in the store yet",
                hint="ask again; the service writes them as soon as the store takes them",
            ) from exc

    async def _replayed(self, rollout_id: str) -> None:
        waiting = self._file.entries(rollout_id)
        while waiting:
            await self._replayer.replay(rollout_id)
            now = self._file.entries(rollout_id)
            waiting = [entry for entry in now if entry.number <= waiting[-1].number]

    # --- telling

    def publish(self, events: Sequence[Event]) -> None:
        """Hand stored events to the sinks; never waits."""
        for sink in self._sinks.values():
            for event in events:
                sink.put(event)

    def metrics(self) -> list[tuple[str, Mapping[str, str], float]]:
        """What became of events that the store did not take at once."""
        replayer = self._replayer
        return [
            ("agl_capture_spilled_total", {}, self.spilled),
            ("agl_capture_replayed_total", {}, replayer.replayed),
            ("agl_capture_dropped_total", {}, self.dropped + replayer.dropped),
            ("agl_capture_lost_total", {}, self.lost + replayer.lost + self._file.damaged),
            ("agl_capture_spill_events", {}, len(self._file)),
            ("agl_capture_spill_bytes", {}, self._file.size_bytes),
            ("agl_capture_queued", {}, self._lanes.size),
        ]
