"""Repeats of a call by an SDK: they join the call in flight, or get the answer that was missed.

An SDK whose connection broke or timed out sends its call again. Run anew, that would leave a turn
in the record which no agent ever saw. A repeat is known by its marker: a retry counter above 0, or
an ``Idempotency-Key`` that was seen before; and by the same rollout, attempt, path and body.
Without a marker a call is a new sample, however equal.

What becomes of a repeat, in this order:

- An answer is there that nobody got: it is replayed.
- A call runs on whose client has left: joined. A call that was closed for that is not.
- A call failed, or was closed, and this is the repeat of it: it runs anew.
- A call runs and its client seems to be there: joined. The connection is dead and nobody noticed.

A sample belongs to one request, also among siblings with equal bodies: so each call is claimed by
one repeat of each count.

There is one ``Repeats`` in a service. ``forget`` is for a rollout's end, ``close`` for shutdown.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from typing import Any, Literal

from attrs import frozen

from agl_core.clock import Clock
from agl_core.gateway.broadcast import Broadcast, Follower, Message
from agl_core.gateway.incoming import Header, Send
from agl_core.settings import RepeatSettings

__all__ = ["CallKey", "Follower", "Lead", "RepeatSettings", "Repeats", "call_key"]

State = Literal["running", "kept", "spent", "dropped"]


@frozen(kw_only=True)
class CallKey:
    """What makes two requests the same call."""

    rollout_id: str
    digest: bytes
    count: int
    """The retry counter; 0 for a first try."""
    is_marked: bool
    """Its client would mark a repeat."""
    is_idempotent: bool
    """It has an ``Idempotency-Key``, which is part of the digest."""


def call_key(
    rollout_id: str,
    attempt_id: str,
    method: str,
    path: str,
    query: str,
    headers: Sequence[Header],
    body: bytes,
) -> CallKey | None:
    """Return the key of a request; None for one that makes no sample, and may always be repeated.

    Args:
        rollout_id: Whose call it is.
        attempt_id: And of which attempt.
        method: The HTTP method.
        path: Below ``v1``.
        query: What follows the question mark.
        headers: Names in lower case.
        body: As it came.
    """
    if method != "POST" or not body:
        return None
    found = {n: v for n, v in headers if n in (b"x-stainless-retry-count", b"idempotency-key")}
    counter = found.get(b"x-stainless-retry-count", b"").strip()
    idempotency_key = found.get(b"idempotency-key", b"").strip()
    digest = blake2b(digest_size=16)
    for part in (attempt_id.encode(), path.encode(), query.encode(), idempotency_key, body):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return CallKey(
        rollout_id=rollout_id,
        digest=digest.digest(),
        count=int(counter) if counter.isdigit() and len(counter) < 10 else 0,
        is_marked=bool(counter or idempotency_key),
        is_idempotent=bool(idempotency_key),
    )


class Repeats:
    """Knows the calls that a repeat could mean."""

    def __init__(self, settings: RepeatSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.joined = 0
        """Repeats that joined a call in flight."""
        self.replayed = 0
        """Repeats that got a kept answer."""
        self.kept_bytes = 0
        self._leads: dict[str, dict[bytes, list[Lead]]] = {}
        self._order = itertools.count()
        self._expiring: list[tuple[float, int, Lead]] = []
        self._kept: dict[Lead, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, key: CallKey) -> Lead | Follower:
        """Return the part that a request has: it makes the call, or follows another's."""
        self._expire()
        found = self._choose(key)
        if found is not None and found.state != "spent":
            self.joined += found.state == "running"
            self.replayed += found.state == "kept"
            return found.join(key.count)
        if found is not None:
            self.drop(found)  # each failure has one repeat
        lead = Lead(self, key)
        self._leads.setdefault(key.rollout_id, {}).setdefault(key.digest, []).append(lead)
        return lead

    def _choose(self, key: CallKey) -> Lead | None:
        if not key.count and not key.is_idempotent:
            return None
        ranked = [
            (rank, number, lead)
            for number, lead in enumerate(self._leads.get(key.rollout_id, {}).get(key.digest, ()))
            if (rank := lead.rank_for(key)) is not None
        ]
        return min(ranked)[2] if ranked else None

    def forget(self, rollout_id: str) -> None:
        """Drop what is known of a rollout that has ended; its calls in flight are not joined."""
        for leads in list(self._leads.get(rollout_id, {}).values()):
            for lead in list(leads):
                self.drop(lead)

    async def close(self) -> None:
        """Forget everything."""
        for rollout_id in list(self._leads):
            self.forget(rollout_id)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # For leads

    def keep(self, lead: Lead, seconds: float) -> None:
        """Remember a call that has ended for a while."""
        until = self.clock.monotonic() + seconds
        heapq.heappush(self._expiring, (until, next(self._order), lead))
        if lead.state == "kept":
            self._kept[lead] = None

    def drop(self, lead: Lead) -> None:
        """Forget a call; who follows it gets the rest of its answer all the same."""
        leads = self._leads.get(lead.key.rollout_id, {})
        same = leads.get(lead.key.digest, [])
        if lead in same:
            same.remove(lead)
            if not same:
                del leads[lead.key.digest]
            if not leads:
                del self._leads[lead.key.rollout_id]
        self._kept.pop(lead, None)
        lead.state = "dropped"
        lead.broadcast.release()

    def take(self, size: int) -> bool:
        """Count bytes in, or out; makes room by dropping the oldest answers that are kept."""
        self.kept_bytes += size
        while self.kept_bytes > self.settings.total_bytes and self._kept:
            self.drop(next(iter(self._kept)))
        return self.kept_bytes <= self.settings.total_bytes

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside, at most until ``close``."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _expire(self) -> None:
        now = self.clock.monotonic()
        while self._expiring and self._expiring[0][0] <= now:
            self.drop(heapq.heappop(self._expiring)[2])


class Lead:
    """A call that is made, for its own client and for whoever joins it."""

    def __init__(self, repeats: Repeats, key: CallKey) -> None:
        self.key = key
        self.state: State = "running"
        self.broadcast = Broadcast(repeats.settings.answer_bytes, repeats.take)
        self.on_forsaken: Callable[[], bool] = _nothing_to_end
        """Ends the call when nobody waits for it; returns whether there was anything to end."""
        self._repeats = repeats
        self._count = key.count
        self._has_client = True
        self._is_delivered = False
        self._is_closed = False
        self._is_cut_off = False
        self._is_ending = False
        self._writer: asyncio.Task[object] | None = None
        self._writes = 0
        self._is_watched = False

    @property
    def is_forsaken(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return not self._has_client and not self.broadcast.followers

    # Its own client

    def through(self, send: Send) -> Send:
        """Return a ``send`` that everybody gets the messages of."""

        async def send_to_all(message: Message) -> None:
            if not self._is_closed:
                await self.broadcast.put(message)
            if self._has_client:
                await self._send_to_client(send, message)

        return send_to_all

    async def _send_to_client(self, send: Send, message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._writer, self._writes = task, self._writes + 1
        try:
            await send(message)
        except asyncio.CancelledError:
            if not self._is_cut_off or task.uncancel() > cancels:
                raise  # it is the call that is cancelled, be it as well
        finally:
            self._writer = None
        if self.broadcast.has_ended and self._has_client:
            self._is_delivered = True

    def client_left(self) -> None:
        """The client closed its connection. The call goes on for those who joined or soon do."""
        self._has_client = False
        self._end_if_forsaken()

    def _end_if_forsaken(self) -> None:
        if self.is_forsaken and not self._is_closed:
            seconds = self._repeats.settings.linger_seconds if self.key.is_marked else 0.0
            if seconds and self.broadcast.is_whole:
                self._repeats.start(self._linger(seconds))
            else:
                self._end()

    async def _linger(self, seconds: float) -> None:
        await self._repeats.clock.sleep(seconds)
        if self.is_forsaken and not self._is_closed:
            self._end()

    def _end(self) -> None:
        # One whose record is being written ends by itself, and its answer can still be had.
        self._is_ending = self._is_ending or self.on_forsaken()

    # Those who join

    def rank_for(self, key: CallKey) -> int | None:
        """Return how well a repeat fits, the lower the better; None where it does not."""
        is_claimed = self._count >= key.count and not key.is_idempotent
        if self.state == "spent":
            return 2 if self._count == key.count - 1 and not key.is_idempotent else None
        if self.state == "dropped" or not self.broadcast.is_whole or self._is_ending:
            return None
        if is_claimed:
            return 4
        if self.state == "kept":
            return 0
        return 3 if self._has_client else 1

    def join(self, count: int) -> Follower:
        """Return a follower of the answer, from its beginning."""
        self._count = max(self._count, count)
        follower = Follower(self.broadcast, self._on_follower_end)
        if self.state == "running" and not self._is_watched:
            self._is_watched = True
            self._repeats.start(self._watch())
        return follower

    def _on_follower_end(self, is_delivered: bool) -> None:
        self._is_delivered = self._is_delivered or is_delivered
        if self.state == "kept" and is_delivered and not self.key.is_idempotent:
            self._repeats.drop(self)
        self._end_if_forsaken()

    async def _watch(self) -> None:
        """Cut the client off once it has taken nothing for a while: it must not hold others up."""
        while not self._is_closed and self._has_client:
            before = self._writer, self._writes
            await self._repeats.clock.sleep(self._repeats.settings.stall_seconds)
            task = self._writer
            if task is not None and (task, self._writes) == before and self.broadcast.followers:
                self._is_cut_off = True
                self._has_client = False
                task.cancel()

    # Its end

    def close(self) -> None:
        """The call is over: keep its answer if nobody got it, or that it failed."""
        self._is_closed = True
        self.on_forsaken = _nothing_to_end  # what is kept for a while does not keep the call
        self.broadcast.close()
        if self.state != "running":
            return
        settings, broadcast = self._repeats.settings, self.broadcast
        is_answered = broadcast.has_ended and (broadcast.status or 500) < 400
        if not is_answered:
            self.state = "spent"
            broadcast.release()
            self._repeats.keep(self, settings.keep_seconds)
        elif broadcast.is_whole and (self.key.is_idempotent or not self._is_delivered):
            self.state = "kept"
            is_idempotent = self.key.is_idempotent
            seconds = settings.idempotency_seconds if is_idempotent else settings.keep_seconds
            self._repeats.keep(self, seconds)
        else:
            self._repeats.drop(self)


def _nothing_to_end() -> bool:
    return False
