"""The blocking client."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Self, TypeVar

import httpx

from agl_core.client import operations, requests, results
from agl_core.client.base import ClientBase
from agl_core.client.calls import ApiRequest, Ids, as_ids, rollout_filter
from agl_core.client.connection import ClientSettings, http_options
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
from agl_core.clock import sleep_blocking
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


class AglLiteClient(ClientBase):
    """Talks to the service and blocks meanwhile.

    One client serves all threads of a process, and forked children and pickled copies too: each
    process opens connections of its own. Errors are ``ApiError``.
    """

    def _start(self, settings: ClientSettings, given: tuple[str | ClientExtension, ...]) -> None:
        super()._start(settings, given)
        self._https: dict[tuple[int, bool], httpx.Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Another call would open new ones."""
        for is_waiting in (False, True):
            http = self._https.pop((os.getpid(), is_waiting), None)
            if http is not None:
                http.close()

    # --- rollouts --------------------------------------------------------------------------------

    def enqueue(
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
        return self._run(
            operations.enqueue(items, config=config, resources_id=resources_id, metadata=metadata)
        )

    def enqueue_group(
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
        return self.enqueue(item, config=config, resources_id=resources_id, metadata=metadata)

    def rollout(self, rollout_id: str) -> Rollout:
        """One rollout with its attempts."""
        return self._run(once(requests.get_rollout(rollout_id)))

    def rollouts(
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
        return self._run(
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
    ) -> Iterator[Rollout]:
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
    ) -> Iterator[Rollout | Tombstone]:
        """What exists and then each change, without an end.

        Without ``changed_after``, and again when the service comes back with another store,
        everything is shown from the start.
        """
        chosen = rollout_filter(ids, status, group_id, mode)
        return self._iterate(operations.watch(chosen, changed_after, self._clock))

    def wait(
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
        return self._run(operations.wait(ids, group_id, timeout, until, self._clock))

    def patch(
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
        return self._run(
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

    def cancel(self, rollout_id: str) -> Rollout:
        """Ask for the end of a rollout; its model calls are closed at once."""
        return self._run(once(requests.cancel(rollout_id)))

    def cancel_many(
        self, ids: Ids | None = None, group_id: str | None = None
    ) -> results.CancelResult:
        """Cancel what can be; ``refused`` says of the others why not."""
        return self._run(operations.cancel_many(ids, group_id))

    def delete(self, rollout_id: str) -> None:
        """Remove a rollout and its events."""
        self._run(once(requests.delete(rollout_id)))

    def mint_token(self, rollout_id: str) -> results.RolloutToken:
        """A token for the rollout's agent."""
        return self._run(once(requests.mint_token(rollout_id)))

    # --- events ----------------------------------------------------------------------------------

    def events(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        type: str | None = None,
        all_attempts: bool = False,
    ) -> list[Event]:
        """All events of an attempt (by default the succeeded one, else the latest) in order."""
        return self._run(operations.collect_events(rollout_id, attempt_id, type, all_attempts))

    def post_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: EventDraft | Mapping[str, Any] | Iterable[EventDraft | Mapping[str, Any]],
    ) -> list[Event]:
        """Append events, all or none. Never repeated: a lost answer may hide a success."""
        return self._run(operations.post_events(rollout_id, attempt_id, drafts))

    def post_reward(
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
        return self._run(operations.post_reward(rollout_id, attempt_id, draft))

    # --- models and the gateway ------------------------------------------------------------------

    def models(self) -> list[results.ModelServerView]:
        """The registered model servers."""
        return self._run(once(requests.list_models()))

    def register_model(
        self, server: ModelServer | None = None, **fields: Any
    ) -> results.ModelServerView:
        """Register a model server or its new version; takes a ``ModelServer`` or its fields."""
        return self._run(once(requests.register_model(server, fields)))

    def replace_models(
        self, servers: Iterable[ModelServer | Mapping[str, Any]], resume: bool = False
    ) -> list[results.ModelServerView]:
        """Replace the whole registry at once; ``resume`` ends every pause in the same step."""
        return self._run(once(requests.replace_models(servers, resume)))

    def remove_model(
        self, model: str, endpoint: str | None = None
    ) -> list[results.ModelServerView]:
        """Remove one server of a model, or all of them; returns what was removed."""
        return self._run(once(requests.remove_model(model, endpoint)))

    def pause(
        self,
        policy: str | None = None,
        mode: PauseMode = "drain",
        reason: str | None = None,
        drain_seconds: float | None = None,
    ) -> results.GatewayView:
        """Hold the model calls of a policy (None: of all trained ones) until ``resume``."""
        return self._run(once(requests.pause(policy, mode, reason, drain_seconds)))

    def resume(self, policy: str | None = None) -> results.GatewayView:
        """Let held model calls go on."""
        return self._run(once(requests.resume(policy)))

    def gateway_state(self) -> results.GatewayView:
        """Pauses, versions and calls by policy."""
        return self._run(once(requests.gateway_state()))

    def weight_update(
        self, policy: str | None = None, mode: PauseMode = "drain"
    ) -> AbstractContextManager[results.GatewayView]:
        """Pause around the block, and resume after it also when it raises."""
        return contextmanager(self._iterate)(operations.weight_update(policy, mode))

    # --- resources, export, operations -----------------------------------------------------------

    def add_resources(self, data: Mapping[str, Any]) -> Resources:
        """Keep a bundle that rollouts may refer to."""
        return self._run(once(requests.add_resources(data)))

    def resources(self, id: str | None = None) -> Resources:
        """A bundle; by default the latest."""
        return self._run(once(requests.get_resources(id)))

    def export(
        self,
        format: str,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        **parameters: str,
    ) -> Iterator[dict[str, Any]]:
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
        with closing(
            self.export_bytes(format, ids, group_id, policy, mode, **parameters)
        ) as pieces:
            for piece in pieces:
                yield from lines.feed(piece)
        yield from lines.finish()

    def export_bytes(
        self,
        format: str,
        ids: Ids | None = None,
        group_id: str | None = None,
        policy: str | None = None,
        mode: str = "train",
        **parameters: str,
    ) -> Generator[bytes, None, None]:
        """The pieces of an export of any format, while they arrive."""
        if ids is not None and not (ids := as_ids(ids)):
            return
        request = requests.export(
            format, ids=ids, group_id=group_id, policy=policy, mode=mode, parameters=parameters
        )
        response = self._run(opened(request))
        last = LastLine()
        try:
            for piece in response.iter_bytes():
                last.feed(piece)
                yield piece
        except httpx.TransportError as exc:
            raise last.error(exc, request, self._settings) from exc
        finally:
            response.close()

    def health(self) -> results.HealthView:
        """Whether the service lives."""
        return self._run(once(requests.health()))

    def ready(self) -> results.ReadyView:
        """Whether the service can take calls, and if not, why."""
        return self._run(once(requests.ready()))

    # --- doing what operations ask for -----------------------------------------------------------

    def _run(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                try:
                    outcome = self._perform(step)
                except BaseException as exc:
                    step = operation.throw(exc)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _iterate(self, operation: Operation[None]) -> Generator[Any, None, None]:
        try:
            step = next(operation)
            while True:
                outcome = None
                try:
                    if isinstance(step, Emit):
                        yield step.value
                    else:
                        outcome = self._perform(step)
                except BaseException as exc:
                    step = operation.throw(exc)
                else:
                    step = operation.send(outcome)
        except StopIteration:
            return

    def _perform(self, step: Step) -> httpx.Response | None:
        if isinstance(step, ApiRequest):
            return self._run(exchange(step, self._settings, self._clock))
        if isinstance(step, Send):
            return self._send(step.request)
        if isinstance(step, Sleep):
            sleep_blocking(step.seconds)
        return None

    def _send(self, request: ApiRequest) -> httpx.Response:
        http = self._http(is_waiting=request.waits_seconds > 0)
        response = http.send(self._message(http, request), stream=request.is_stream)
        if request.is_stream and not response.is_success:
            response.read()
        return response

    def _http(self, *, is_waiting: bool) -> httpx.Client:
        key = (os.getpid(), is_waiting)
        http = self._https.get(key)
        if http is None:
            made = httpx.Client(**http_options(self._settings, is_waiting=is_waiting))
            # Two threads may come here at once; one of the two is used. What a fork inherited
            # stays where it is: closing it could wait for a lock of a thread that is not there.
            http = self._https.setdefault(key, made)
            if http is made:
                weakref.finalize(self, _close_in, key[0], made)
            else:
                made.close()
        return http


def _close_in(pid: int, http: httpx.Client) -> None:
    if os.getpid() == pid:
        http.close()
