"""The asynchronous client."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Self, TypeVar

import httpx
from attrs import frozen

from agl_core.client import operations, requests, results
from agl_core.client.base import ClientBase
from agl_core.client.calls import ApiRequest, Ids, as_ids, rollout_filter
from agl_core.client.connection import CALLS_AT_ONCE, ClientSettings, http_options
from agl_core.client.exchange import (
    Emit,
    Operation,
    Send,
    Sleep,
    Step,
    exchange,
    once,
    opened,
)
from agl_core.client.exports import JsonLines, LastLine
from agl_core.interfaces import ClientExtension
from agl_core.records import (
    Attempt,
    Event,
    EventDraft,
    Grade,
    Mode,
    ModelServer,
    PauseMode,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutError,
    RolloutPage,
    RolloutSpec,
    Status,
    Tombstone,
)

T = TypeVar("T")


@frozen
class _Open:
    """An httpx client, the process it belongs to, and the generator that closes it."""

    pid: int
    http: httpx.AsyncClient
    closing: AsyncGenerator[None, None]
    turns: asyncio.Semaphore
    """Calls queue here: the time that httpx's own queue takes grows with its length squared."""


class AsyncAglLiteClient(ClientBase):
    """Talks to the service from coroutines; methods and results are those of ``AglLiteClient``.

    One client serves any number of event loops, one after another or in different threads, and
    forked children and pickled copies: each loop opens connections of its own, which are closed
    with the loop.
    """

    def _start(self, settings: ClientSettings, given: tuple[str | ClientExtension, ...]) -> None:
        super()._start(settings, given)
        self._https: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, _Open]] = (
            weakref.WeakKeyDictionary()
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop. Another call would open new ones."""
        for held in self._https.pop(asyncio.get_running_loop(), {}).values():
            if held.pid == os.getpid():
                await held.closing.aclose()

    # --- rollouts --------------------------------------------------------------------------------

    async def enqueue(
        self,
        items: Mapping[str, Any] | RolloutSpec | Iterable[Mapping[str, Any] | RolloutSpec],
        *,
        config: RolloutConfig | Mapping[str, Any] | None = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Rollout]:
        """Enqueue one rollout or several, all or none.

        Args:
            items: Specs, or dicts of their fields (``input`` at least; ``n`` makes a group).
            config: Defaults for each item's config, key by key.
            resources_id: Default for each item.
            metadata: Defaults for each item's metadata, key by key.

        Returns:
            The rollouts in the order of the items, groups unfolded.
        """
        return await self._run(
            operations.enqueue(items, config=config, resources_id=resources_id, metadata=metadata)
        )

    async def enqueue_group(
        self,
        input: Any,
        n: int,
        *,
        group_id: str | None = None,
        mode: Mode = "train",
        config: RolloutConfig | Mapping[str, Any] | None = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Rollout]:
        """Enqueue ``n`` siblings with one input; ``fields`` are more of an item's."""
        item = {"input": input, "n": n, "group_id": group_id, "mode": mode, **fields}
        return await self.enqueue(item, config=config, resources_id=resources_id, metadata=metadata)

    async def rollout(self, rollout_id: str) -> Rollout:
        """One rollout with its attempts."""
        return await self._run(once(requests.get_rollout(rollout_id)))

    async def rollouts(
        self,
        ids: Ids | None = None,
        status: Status | Iterable[Status] | None = None,
        group_id: str | None = None,
        mode: Mode | None = None,
        changed_after: str | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> RolloutPage:
        """One page of rollouts in the order of change; with ``wait`` a long-poll (seconds)."""
        chosen = rollout_filter(ids, status, group_id, mode)
        return await self._run(
            once(
                requests.list_rollouts(chosen, changed_after=changed_after, limit=limit, wait=wait)
            )
        )

    def iter_rollouts(
        self,
        ids: Ids | None = None,
        status: Status | Iterable[Status] | None = None,
        group_id: str | None = None,
        mode: Mode | None = None,
    ) -> AsyncIterator[Rollout]:
        """All rollouts; one that changes meanwhile may come twice, the later state last."""
        chosen = rollout_filter(ids, status, group_id, mode)
        return self._iterate(operations.iterate_rollouts(chosen))

    def watch(
        self,
        ids: Ids | None = None,
        status: Status | Iterable[Status] | None = None,
        group_id: str | None = None,
        mode: Mode | None = None,
        changed_after: str | None = None,
    ) -> AsyncIterator[Rollout | Tombstone]:
        """What exists and then each change, without an end.

        Without ``changed_after``, and again when the service comes back with another store,
        everything is shown from the start.
        """
        chosen = rollout_filter(ids, status, group_id, mode)
        return self._iterate(operations.watch(chosen, changed_after, self._clock))

    async def wait(
        self,
        ids: Ids | None = None,
        group_id: str | None = None,
        *,
        timeout: float | None = None,
        until: operations.Until = "complete",
    ) -> list[Rollout]:
        """Wait until rollouts have ended, also over a restart of the service.

        Args:
            ids: Of the rollouts, or
            group_id: of their group.
            timeout: Seconds; None: as long as it takes.
            until: ``complete`` waits for pending grades too, ``terminal`` does not.

        Returns:
            The rollouts in the order of ``ids``, or of the group's indexes.

        Raises:
            WaitTimeout: Some had not ended; ``missing`` names them.
            NotFound: One does not exist, or no longer.
        """
        return await self._run(operations.wait(ids, group_id, timeout, until, self._clock))

    async def patch(
        self,
        rollout_id: str,
        *,
        status: Status | None = None,
        attempts: Sequence[Attempt | Mapping[str, Any]] = (),
        succeeded_attempt_id: str | None = None,
        error: RolloutError | Mapping[str, Any] | None = None,
        grade: Grade | None = None,
        expected_version: int | None = None,
    ) -> Rollout:
        """Change a rollout; what is not given stays as it is, attempts are merged by id."""
        return await self._run(
            once(
                requests.patch(
                    rollout_id,
                    status=status,
                    attempts=attempts,
                    succeeded_attempt_id=succeeded_attempt_id,
                    error=error,
                    grade=grade,
                    expected_version=expected_version,
                )
            )
        )

    async def cancel(self, rollout_id: str) -> Rollout:
        """Ask for the end of a rollout; its model calls are closed at once."""
        return await self._run(once(requests.cancel(rollout_id)))

    async def cancel_many(
        self, ids: Ids | None = None, group_id: str | None = None
    ) -> results.CancelResult:
        """Cancel what can be; ``refused`` says of the others why not."""
        return await self._run(operations.cancel_many(ids, group_id))

    async def delete(self, rollout_id: str) -> None:
        """Remove a rollout and its events."""
        await self._run(once(requests.delete(rollout_id)))

    async def mint_token(self, rollout_id: str) -> results.RolloutToken:
        """A token for the rollout's agent."""
        return await self._run(once(requests.mint_token(rollout_id)))

    # --- events ----------------------------------------------------------------------------------

    async def events(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        type: str | None = None,
        all_attempts: bool = False,
    ) -> list[Event]:
        """All events of an attempt (by default the succeeded one, else the latest) in order."""
        return await self._run(
            operations.collect_events(rollout_id, attempt_id, type, all_attempts)
        )

    async def post_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: EventDraft | Mapping[str, Any] | Iterable[EventDraft | Mapping[str, Any]],
    ) -> list[Event]:
        """Append events, all or none. Never repeated: a lost answer may hide a success."""
        return await self._run(operations.post_events(rollout_id, attempt_id, drafts))

    async def post_reward(
        self,
        rollout_id: str,
        attempt_id: str,
        value: float | None,
        *,
        metrics: Mapping[str, float] | None = None,
        message: str | None = None,
        call_id: str | None = None,
        policy: str | None = None,
    ) -> Event:
        """Append a reward: the rollout's, or with ``call_id`` one call's."""
        draft = requests.reward(
            value, metrics=metrics, message=message, call_id=call_id, policy=policy
        )
        return await self._run(operations.post_reward(rollout_id, attempt_id, draft))

    # --- models and the gateway ------------------------------------------------------------------

    async def models(self) -> list[results.ModelServerView]:
        """The registered model servers."""
        return await self._run(once(requests.list_models()))

    async def register_model(
        self, server: ModelServer | None = None, **fields: Any
    ) -> results.ModelServerView:
        """Register a model server or its new version; takes a ``ModelServer`` or its fields."""
        return await self._run(once(requests.register_model(server, fields)))

    async def replace_models(
        self, servers: Iterable[ModelServer | Mapping[str, Any]], resume: bool = False
    ) -> list[results.ModelServerView]:
        """Replace the whole registry at once; ``resume`` ends every pause in the same step."""
        return await self._run(once(requests.replace_models(servers, resume)))

    async def remove_model(
        self, model: str, endpoint: str | None = None
    ) -> list[results.ModelServerView]:
        """Remove one server of a model, or all of them; returns what was removed."""
        return await self._run(once(requests.remove_model(model, endpoint)))

    async def pause(
        self,
        policy: str | None = None,
        mode: PauseMode = "drain",
        reason: str | None = None,
        drain_seconds: float | None = None,
    ) -> results.GatewayView:
        """Hold the model calls of a policy (None: of all trained ones) until ``resume``."""
        return await self._run(once(requests.pause(policy, mode, reason, drain_seconds)))

    async def resume(self, policy: str | None = None) -> results.GatewayView:
        """Let held model calls go on."""
        return await self._run(once(requests.resume(policy)))

    async def gateway_state(self) -> results.GatewayView:
        """Pauses, versions and calls by policy."""
        return await self._run(once(requests.gateway_state()))

    def weight_update(
        self, policy: str | None = None, mode: PauseMode = "drain"
    ) -> AbstractAsyncContextManager[results.GatewayView]:
        """Pause around the block, and resume after it also when it raises."""
        return asynccontextmanager(self._iterate)(operations.weight_update(policy, mode))

    # --- resources, export, operations -----------------------------------------------------------

    async def add_resources(self, data: Mapping[str, Any]) -> Resources:
        """Keep a bundle that rollouts may refer to."""
        return await self._run(once(requests.add_resources(data)))

    async def resources(self, id: str | None = None) -> Resources:
        """A bundle; by default the latest."""
        return await self._run(once(requests.get_resources(id)))

    async def export(
        self,
        format: str,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        **parameters: str,
    ) -> AsyncIterator[dict[str, Any]]:
        """One object per rollout, read while they arrive; for formats made of JSON lines.

        Args:
            format: Such as ``triplet`` or ``trajectory``.
            ids: Of rollouts; None: all that have ended, as the next ones select.
            group_id: Of one group.
            policy: Calls of this policy only.
            mode: ``train``, ``val`` or ``all``.
            parameters: The format's own.
        """
        lines = JsonLines()
        async with aclosing(
            self.export_bytes(format, ids, group_id, policy, mode, **parameters)
        ) as pieces:
            async for piece in pieces:
                for line in lines.feed(piece):
                    yield line
        for line in lines.finish():
            yield line

    async def export_bytes(
        self,
        format: str,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        **parameters: str,
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of an export of any format, while they arrive."""
        if ids is not None and not (ids := as_ids(ids)):
            return
        request = requests.export(
            format, ids=ids, group_id=group_id, policy=policy, mode=mode, parameters=parameters
        )
        response = await self._run(opened(request))
        last = LastLine()
        try:
            async for piece in response.aiter_bytes():
                last.feed(piece)
                yield piece
        except httpx.TransportError as exc:
            raise last.error(exc, request, self._settings) from exc
        finally:
            await response.aclose()

    async def health(self) -> results.HealthView:
        """Whether the service lives."""
        return await self._run(once(requests.health()))

    async def ready(self) -> results.ReadyView:
        """Whether the service can take calls, and if not, why."""
        return await self._run(once(requests.ready()))

    # --- doing what operations ask for -----------------------------------------------------------

    async def _run(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                try:
                    outcome = await self._perform(step)
                except BaseException as exc:
                    step = operation.throw(exc)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _iterate(self, operation: Operation[None]) -> AsyncGenerator[Any, None]:
        try:
            step = next(operation)
            while True:
                outcome = None
                try:
                    if isinstance(step, Emit):
                        yield step.value
                    else:
                        outcome = await self._perform(step)
                except BaseException as exc:
                    step = operation.throw(exc)
                else:
                    step = operation.send(outcome)
        except StopIteration:
            return

    async def _perform(self, step: Step) -> httpx.Response | None:
        if isinstance(step, ApiRequest):
            return await self._run(exchange(step, self._settings, self._clock))
        if isinstance(step, Send):
            return await self._send(step.request)
        if isinstance(step, Sleep):
            await self._clock.sleep(step.seconds)
        return None

    async def _send(self, request: ApiRequest) -> httpx.Response:
        held = await self._open(is_waiting=request.waits_seconds > 0)
        message = self._message(held.http, request)
        if request.waits_seconds > 0:
            return await held.http.send(message)
        async with held.turns:
            response = await held.http.send(message, stream=request.is_stream)
            if request.is_stream and not response.is_success:
                await response.aread()
            return response

    async def _open(self, *, is_waiting: bool) -> _Open:
        of_loop = self._https.setdefault(asyncio.get_running_loop(), {})
        held = of_loop.get(is_waiting)
        if held is None or held.pid != os.getpid():
            http = httpx.AsyncClient(**http_options(self._settings, is_waiting=is_waiting))
            held = _Open(
                os.getpid(), http, _closed_at_the_end(http), asyncio.Semaphore(CALLS_AT_ONCE)
            )
            of_loop[is_waiting] = held
            await anext(held.closing)
        return held


async def _closed_at_the_end(http: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    """Close a client in the event loop that this generator was started in.

    The loop finishes it when nobody holds it any more, or at its own end
    (``loop.shutdown_asyncgens``, which ``asyncio.run`` calls); later nothing can be closed.
    """
    try:
        yield
    finally:
        await http.aclose()
