"""From a finished call to an event in the store, and from there to the sinks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from agl_core.clock import Clock
from agl_core.errors import AglError, StoreError
from agl_core.gateway.dialects import Answer, ParsedRequest
from agl_core.interfaces import CaptureSink, Store
from agl_core.records import Event, EventDraft, ModelServer
from agl_core.wire import read_json

log = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@define(kw_only=True)
class CallFacts:
    """What is known of a call while it goes on; ``as_event`` makes the record of it."""

    call_id: str
    rollout_id: str
    attempt_id: str
    api: str
    method: str
    path: str
    parsed: ParsedRequest
    began: float
    """Monotonic seconds at the arrival of the request."""
    policy: str | None = None
    trained: bool = False
    server: ModelServer | None = None
    version_start: int | None = None
    version_end: int | None = None
    adjusted: dict[str, Any] = field(factory=dict)
    http_status: int | None = None
    ttft_seconds: float | None = None
    retries: int = 0
    error: dict[str, Any] | None = None


def as_event(facts: CallFacts, answer: Answer, status: str, now: float) -> EventDraft:
    """The ``model_request`` event of a call."""
    request = _request_of(facts.parsed)
    sent = {**request, **facts.adjusted} if isinstance(request, dict) else {}
    server = facts.server
    data: dict[str, Any] = {
        "api": facts.api,
        "call_id": facts.call_id,
        "method": facts.method,
        "path": facts.path,
        "policy": facts.policy,
        "trained": facts.trained,
        "model": facts.parsed.model,
        "server": {"endpoint": server.endpoint, "model": server.upstream_model} if server else None,
        "version_start": facts.version_start,
        "version_end": facts.version_end,
        "request": request,
        "adjusted": facts.adjusted,
        "response": answer.response,
        "choices": answer.choices,
        "sampling": {
            **{name: sent.get(name) for name in _SAMPLING},
            "logprobs_mode": server.logprobs_mode if server else "unknown",
        },
        "usage": answer.usage,
        "status": status,
        "http_status": facts.http_status,
        "latency_ms": round((now - facts.began) * 1000, 3),
        "ttft_ms": None if facts.ttft_seconds is None else round(facts.ttft_seconds * 1000, 3),
        "retries": facts.retries,
    }
    error = facts.error if facts.error is not None else answer.error
    if error is not None:
        data["error"] = error
    if answer.flags:
        data["flags"] = list(answer.flags)
    return EventDraft(event_type="model_request", data=data)


def _request_of(parsed: ParsedRequest) -> Any:
    """The agent's request as JSON, else as text; bytes that are no text are only counted."""
    if not parsed.body:
        return None
    try:
        return read_json(parsed.body)
    except AglError:
        pass
    try:
        return parsed.body.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": len(parsed.body)}


class SinkQueue:
    """Feeds one capture sink from a bounded queue, so that it can never hold up an answer."""

    def __init__(self, name: str, sink: CaptureSink, size: int) -> None:
        self.name = name
        self.dropped = 0
        self.failed = 0
        self._sink = sink
        self._queue: asyncio.Queue[Event] = asyncio.Queue(size)
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to feed the sink."""
        self._worker = asyncio.create_task(self._feed(), name=f"sink-{self.name}")

    def put(self, event: Event) -> None:
        """Queue an event; a full queue drops it, which is counted and logged."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 1000 == 0:
                log.error(
                    "capture sink cannot keep up, events are lost to it",
                    extra={"sink": self.name, "dropped": self.dropped},
                )

    async def _feed(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                await self._sink.receive(event)
            except Exception:
                self.failed += 1
                log.exception("capture sink failed", extra={"sink": self.name})
            finally:
                self._queue.task_done()

    async def stop(self, seconds: float) -> None:
        """Give the sink what is queued, for at most ``seconds``."""
        if self._worker is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._queue.join()
        except TimeoutError:
            log.error(
                "capture sink did not finish in time",
                extra={"sink": self.name, "lost": self._queue.qsize()},
            )
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)


class Recorder:
    """Puts events into the store and hands them to the sinks."""

    def __init__(self, store: Store, clock: Clock, sinks: Mapping[str, SinkQueue]) -> None:
        self._store = store
        self._clock = clock
        self._sinks = sinks
        self._pending: dict[str, set[asyncio.Task[tuple[Event, ...]]]] = {}
        self.recorded: dict[str, int] = {}
        """Calls by status."""

    async def record(self, rollout_id: str, attempt_id: str, draft: EventDraft) -> None:
        """Store one event. It is written even if the caller is cancelled meanwhile.

        Raises:
            StoreError: It could not be stored.
            NotFound: The rollout was deleted.
        """
        writing = asyncio.ensure_future(self._append(rollout_id, attempt_id, draft))
        pending = self._pending.setdefault(rollout_id, set())
        pending.add(writing)
        writing.add_done_callback(lambda task: self._written(rollout_id, task))
        events = await asyncio.shield(writing)
        status = str(draft.data["status"])
        self.recorded[status] = self.recorded.get(status, 0) + 1
        self.publish(events)

    async def _append(
        self, rollout_id: str, attempt_id: str, draft: EventDraft
    ) -> tuple[Event, ...]:
        try:
            return await self._store.append_events(
                rollout_id, attempt_id, [draft], timestamp=self._clock.now()
            )
        except AglError:
            raise
        except Exception as exc:
            log.exception("the store failed", extra={"rollout_id": rollout_id})
            raise StoreError(f"the store failed: {type(exc).__name__}: {exc}") from exc

    def _written(self, rollout_id: str, task: asyncio.Task[tuple[Event, ...]]) -> None:
        pending = self._pending.get(rollout_id)
        if pending is not None:
            pending.discard(task)
            if not pending:
                del self._pending[rollout_id]
        if not task.cancelled():
            task.exception()  # told to whoever waits in record(), if anybody still does

    async def settled(self, rollout_id: str) -> None:
        """Wait until what was accepted for a rollout so far has been written (read barrier)."""
        pending = self._pending.get(rollout_id)
        if pending:
            await asyncio.wait(set(pending))

    def publish(self, events: Sequence[Event]) -> None:
        """Hand stored events to the sinks; never waits."""
        for sink in self._sinks.values():
            for event in events:
                sink.put(event)
