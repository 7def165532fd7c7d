"""From a finished call to an event in the store, and from there to the sinks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from attrs import define, field

from agl_core.errors import AglError
from agl_core.gateway.dialects import Answer, ParsedRequest
from agl_core.gateway.reshape import Outgoing
from agl_core.gateway.versions import VersionMark, with_spans
from agl_core.interfaces import CaptureSink
from agl_core.records import Event, EventDraft, LogprobsMode, ModelServer
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
    logprobs_mode: LogprobsMode = "unknown"
    """Of the server, as it is registered or as it was seen to answer."""
    version_start: int | None = None
    version_end: int | None = None
    marks: list[VersionMark] = field(factory=list)
    """Changes of the weights since ``version_start``."""
    outgoing: Outgoing | None = None
    """What went upstream, once something did."""
    labels: dict[str, str] = field(factory=dict)
    """Which conversation of the attempt it belongs to, as far as its headers tell."""
    http_status: int | None = None
    ttft_seconds: float | None = None
    retries: int = 0
    error: dict[str, Any] | None = None


def as_event(facts: CallFacts, answer: Answer, status: str, now: float) -> EventDraft:
    """The ``model_request`` event of a call."""
    request = _request_of(facts.parsed)
    outgoing = facts.outgoing
    translated = _request_of(outgoing.translated) if outgoing and outgoing.translated else None
    adjusted = outgoing.adjusted if outgoing else {}
    asked = request if translated is None else translated
    sent = {**asked, **adjusted} if isinstance(asked, dict) else {}
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
        "adjusted": adjusted,
        "response": answer.response,
        "choices": with_spans(answer.choices, facts.version_start, facts.version_end, facts.marks),
        "sampling": {
            **{name: sent.get(name) for name in _SAMPLING},
            "logprobs_mode": facts.logprobs_mode,
        },
        "usage": answer.usage,
        "status": status,
        "http_status": facts.http_status,
        "latency_ms": round((now - facts.began) * 1000, 3),
        "ttft_ms": None if facts.ttft_seconds is None else round(facts.ttft_seconds * 1000, 3),
        "retries": facts.retries,
    }
    if translated is not None:
        data["sent"] = sent
    if outgoing is not None and outgoing.normalised:
        data["normalised"] = outgoing.normalised
    if outgoing is not None and outgoing.is_constrained:
        data["constrained"] = True
    if facts.labels:
        data["conversation"] = facts.labels
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
