"""Puts what was spilled into the store, in order and once, as soon as the store takes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from agl_core.clock import Clock
from agl_core.errors import AglError, NotFound, StoreError, Unavailable
from agl_core.gateway.spill import Entry
from agl_core.gateway.spill_segment import Damaged, identity_of
from agl_core.gateway.spill_thread import SpillThread
from agl_core.interfaces import EventQuery, Store
from agl_core.records import Event

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
# After so many failures in a row the store is taken to be down, not one rollout to be at fault.
_FAILURES_OF_A_STORE = 3
_PAGE = 200


class Replayer:
    """Replays in the background, and at once for whoever wants to read a rollout."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        spill: SpillThread,
        publish: Callable[[Sequence[Event]], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._spill = spill
        self._publish = publish
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, None] = {}
        """Rollouts whose last replay failed; their turn comes after the others'."""
        self._worker: asyncio.Task[None] | None = None
        self.replayed = 0
        self.dropped = 0
        """Events of rollouts that exist no longer."""
        self.lost = 0
        """Events that were damaged on disk, or that the store refuses for good."""

    def start(self) -> None:
        """Begin to replay in the background."""
        self._worker = asyncio.create_task(self._work(), name="replay")

    async def stop(self, seconds: float) -> None:
        """End; an append that goes on gets ``seconds``, and its event is looked for next time."""
        tasks = set(self._running.values())
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=seconds)

    async def _work(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self._spill.until_filled()
            if await self._replay_all():
                pause = FIRST_PAUSE_SECONDS
                continue
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _replay_all(self) -> bool:
        """Returns whether all went well."""
        waiting = self._spill.file.rollouts()
        failures = 0
        is_whole = True
        for rollout_id in sorted(waiting, key=lambda name: name in self._failed):
            try:
                await self.replay(rollout_id)
            except StoreError:
                is_whole = False
                failures += 1
                if failures == _FAILURES_OF_A_STORE:
                    break
            else:
                failures = 0
        if is_whole and not self._spill.file.rollouts():
            log.info("all that was spilled is in the store", extra={"replayed": self.replayed})
        return is_whole

    async def replay(self, rollout_id: str) -> None:
        """Bring what waits of a rollout now into the store, or join whoever does it.

        Raises:
            StoreError: The store does not take it yet.
        """
        task = self._running.get(rollout_id)
        if task is None or task.done():
            task = asyncio.create_task(self._replay(rollout_id), name=f"replay-{rollout_id}")
            self._running[rollout_id] = task
            task.add_done_callback(lambda task: self._ended(rollout_id, task))
        # A reader that goes away must not leave an append behind of which nobody knows the end.
        await asyncio.shield(task)

    def _ended(self, rollout_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(rollout_id) is task:
            del self._running[rollout_id]
        self._failed.pop(rollout_id, None)
        if not task.cancelled() and task.exception() is not None:
            self._failed[rollout_id] = None

    async def _replay(self, rollout_id: str) -> None:
        entries = self._spill.file.entries(rollout_id)
        try:
            found = await self.find(rollout_id, {entry.identity for entry in entries})
            known: dict[str, Event | None] = dict(found)
            for place, entry in enumerate(entries):
                try:
                    await self._replay_one(entry, known)
                except NotFound:
                    await self._drop(rollout_id, entries[place:])
                    return
        except NotFound:
            await self._drop(rollout_id, entries)
        except StoreError:
            raise
        except Exception as exc:
            log.exception("a replay failed", extra={"rollout_id": rollout_id})
            raise _failed(exc) from exc

    async def find(self, rollout_id: str, wanted: Collection[str]) -> dict[str, Event]:
        """The events with these identities that the store has, and no sink may have seen.

        An append that failed may have been done all the same, and a service that ended may not
        have noted what it had replayed.

        Raises:
            NotFound: There is no such rollout.
            StoreError: The store does not answer.
        """
        found: dict[str, Event] = {}
        after: str | None = None
        while True:
            query = EventQuery(
                rollout_id=rollout_id, event_type="model_request", after=after, limit=_PAGE
            )
            try:
                page = await self._store.list_events(query)
            except (NotFound, StoreError):
                raise
            except Exception as exc:
                raise _failed(exc) from exc
            for event in page.items:
                identity = identity_of(event.attempt_id, event.data)
                if identity in wanted:
                    found[identity] = event
            if len(page.items) < _PAGE:
                return found
            after = page.cursor

    async def _replay_one(self, entry: Entry, known: dict[str, Event | None]) -> None:
        if entry.identity in known:
            event = known[entry.identity]
            if event is not None:
                known[entry.identity] = None
                self._publish([event])
            await self._spill.done([entry])
            return
        try:
            spilled = await self._spill.read(entry)
        except Damaged as exc:
            await self._lose(entry, str(exc))
            return
        try:
            events = await self._store.append_events(
                entry.rollout_id,
                spilled.attempt_id,
                [spilled.draft],
                timestamp=spilled.timestamp,
            )
        except (NotFound, Unavailable):
            raise
        except AglError as exc:
            await self._lose(entry, exc.message)
            return
        known[entry.identity] = None
        self.replayed += 1
        self._publish(events)
        await self._spill.done([entry])

    async def _drop(self, rollout_id: str, entries: Sequence[Entry]) -> None:
        self.dropped += len(entries)
        log.warning(
            "spilled events of a rollout that exists no longer are dropped",
            extra={"rollout_id": rollout_id, "events": len(entries)},
        )
        await self._spill.done(entries)

    async def _lose(self, entry: Entry, why: str) -> None:
        self.lost += 1
        log.error("a spilled event is lost", extra={"rollout_id": entry.rollout_id, "cause": why})
        await self._spill.done([entry])


def _failed(exc: Exception) -> StoreError:
    return StoreError(f"the store failed: {type(exc).__name__}: {exc}")
