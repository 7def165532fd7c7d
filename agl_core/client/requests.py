"""What each method of the client sends and how its answer is read.

Pure functions, which both clients share.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agl_core import wire
from agl_core.client import bodies, results
from agl_core.client.calls import (
    ApiCall,
    ApiRequest,
    Ids,
    Method,
    RolloutFilter,
    as_ids,
    fits,
    path_of,
    query_of,
)
from agl_core.errors import Invalid
from agl_core.records import (
    Attempt,
    Event,
    EventDraft,
    EventPage,
    Grade,
    ModelServer,
    PauseMode,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutError,
    RolloutPage,
    RolloutSpec,
    Status,
)

# A drain may take as long as the longest model call.
_DRAIN_SECONDS = 600.0


# --- rollouts ------------------------------------------------------------------------------------


def enqueue(
    items: Mapping[str, Any] | RolloutSpec | Iterable[Mapping[str, Any] | RolloutSpec],
    *,
    config: RolloutConfig | Mapping[str, Any] | None = None,
    resources_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ApiCall[list[Rollout]]:
    """``POST /api/rollouts``. Ids are made here, so that a repeat finds what exists already."""
    several = [items] if isinstance(items, Mapping | RolloutSpec) else list(items)
    body: dict[str, Any] = {"rollouts": [_item(item, i) for i, item in enumerate(several)]}
    if config is not None:
        body["config"] = bodies.sparse(config)
    if resources_id is not None:
        body["resources_id"] = resources_id
    if metadata is not None:
        body["metadata"] = metadata
    return ApiCall(
        ApiRequest(method="POST", path="/api/rollouts", body=bodies.encode(body)),
        partial(results.read_items, kind=Rollout),
    )


def _item(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, Mapping | RolloutSpec):
        raise Invalid(
            f"rollouts[{index}] must be a dict or a RolloutSpec, not {type(item).__name__}",
            hint='such as {"input": ...}',
        )
    fields = bodies.sparse(item) if isinstance(item, RolloutSpec) else dict(item)
    if fields.get("config") is not None:
        # Whole, its defaults would overrule the config that the batch has in common.
        fields["config"] = bodies.sparse(fields["config"])
    if fields.get("n") is not None or fields.get("group_id") is not None:
        fields["group_id"] = fields.get("group_id") or f"g-{uuid.uuid4().hex[:12]}"
    elif fields.get("rollout_id") is None:
        fields["rollout_id"] = f"r-{uuid.uuid4().hex[:16]}"
    return fields


def get_rollout(rollout_id: str) -> ApiCall[Rollout]:
    """``GET /api/rollouts/{rid}``."""
    return _on_rollout("GET", rollout_id)


def list_rollouts(
    chosen: RolloutFilter,
    *,
    changed_after: str | None = None,
    limit: int | None = None,
    wait: float | None = None,
    answer_seconds: float | None = None,
    retries: int | None = None,
) -> ApiCall[RolloutPage]:
    """``GET /api/rollouts``."""
    query = query_of(
        ids=chosen.ids,
        status=chosen.statuses,
        group_id=chosen.group_id,
        mode=chosen.mode,
        changed_after=changed_after,
        limit=limit,
        wait=None if wait is None else float(wait),
    )
    if not fits(query):
        raise Invalid("these are too many ids for one request", hint="ask for fewer at a time")
    request = ApiRequest(
        method="GET",
        path="/api/rollouts",
        query=query,
        waits_seconds=wait or 0.0,
        answer_seconds=answer_seconds,
        retries=retries,
    )
    return ApiCall(request, wire.structure_page)


def patch(
    rollout_id: str,
    *,
    status: Status | None = None,
    attempts: Sequence[Attempt | Mapping[str, Any]] = (),
    succeeded_attempt_id: str | None = None,
    error: RolloutError | Mapping[str, Any] | None = None,
    grade: Grade | None = None,
    expected_version: int | None = None,
) -> ApiCall[Rollout]:
    """``PATCH /api/rollouts/{rid}``: only what is given is sent."""
    fields = {
        "status": status,
        "attempts": bodies.sparse(list(attempts)) or None,
        "succeeded_attempt_id": succeeded_attempt_id,
        "error": bodies.sparse(error),
        "grade": grade,
        "expected_version": expected_version,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    # With a version, a repeat of what has been done would be refused as a conflict.
    return _on_rollout("PATCH", rollout_id, body=body, is_safe=expected_version is None)


def cancel(rollout_id: str) -> ApiCall[Rollout]:
    """``POST /api/rollouts/{rid}/cancel``."""
    return _on_rollout("POST", rollout_id, "cancel")


def _on_rollout(
    method: Method,
    rollout_id: str,
    *below: str,
    body: Any = None,
    is_safe: bool = True,
) -> ApiCall[Rollout]:
    request = ApiRequest(
        method=method,
        path=path_of("api", "rollouts", rollout_id, *below),
        body=None if body is None else bodies.encode(body),
        is_safe=is_safe,
    )
    return ApiCall(request, partial(results.read_record, kind=Rollout))


def cancel_many(ids: Ids | None, group_id: str | None) -> ApiCall[results.CancelResult]:
    """``POST /api/rollouts/cancel``."""
    if (ids is None) == (group_id is None):
        raise Invalid("cancel_many takes either ids or group_id")
    body = {"group_id": group_id} if ids is None else {"ids": as_ids(ids)}
    return ApiCall(
        ApiRequest(method="POST", path="/api/rollouts/cancel", body=bodies.encode(body)),
        partial(results.read_record, kind=results.CancelResult),
    )


def delete(rollout_id: str) -> ApiCall[None]:
    """``DELETE /api/rollouts/{rid}``."""
    path = path_of("api", "rollouts", rollout_id)
    return ApiCall(ApiRequest(method="DELETE", path=path, gone_is_done=True), lambda _: None)


def mint_token(rollout_id: str) -> ApiCall[results.RolloutToken]:
    """``POST /api/rollouts/{rid}/token``."""
    path = path_of("api", "rollouts", rollout_id, "token")
    return ApiCall(
        ApiRequest(method="POST", path=path),
        partial(results.read_record, kind=results.RolloutToken),
    )


# --- events --------------------------------------------------------------------------------------


def list_events(
    rollout_id: str,
    *,
    attempt_id: str | None = None,
    type: str | None = None,
    all_attempts: bool = False,
    after: str | None = None,
    limit: int | None = None,
) -> ApiCall[EventPage]:
    """``GET /api/events``."""
    query = query_of(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        type=type,
        all_attempts=all_attempts or None,
        after=after,
        limit=limit,
    )
    return ApiCall(
        ApiRequest(method="GET", path="/api/events", query=query), results.read_event_page
    )


def post_events(
    rollout_id: str, attempt_id: str, drafts: Iterable[EventDraft | Mapping[str, Any]]
) -> ApiCall[list[Event]]:
    """``POST .../events``: all or nothing. A repeat would append twice, so there is none."""
    request = ApiRequest(
        method="POST",
        path=path_of("rollout", rollout_id, "attempt", attempt_id, "events"),
        body=bodies.encode(list(drafts), "events"),
        is_safe=False,
    )
    return ApiCall(request, partial(results.read_items, kind=Event))


def reward(
    value: float | None,
    *,
    metrics: Mapping[str, float] | None = None,
    message: str | None = None,
    call_id: str | None = None,
    policy: str | None = None,
) -> EventDraft:
    """A reward as an event."""
    fields = {"metrics": metrics, "message": message, "call_id": call_id, "policy": policy}
    given = {name: item for name, item in fields.items() if item is not None}
    return EventDraft(event_type="reward", data={"value": value, **given})


# --- models and the gateway ----------------------------------------------------------------------


def list_models() -> ApiCall[list[results.ModelServerView]]:
    """``GET /api/models``."""
    return ApiCall(ApiRequest(method="GET", path="/api/models"), results.read_servers)


def register_model(
    server: ModelServer | None, fields: Mapping[str, Any]
) -> ApiCall[results.ModelServerView]:
    """``POST /api/models``: an upsert, so it may be repeated."""
    if (server is None) == (not fields):
        raise Invalid("register_model takes either a ModelServer or its fields")
    body = bodies.encode(fields if server is None else server, "model server")
    return ApiCall(ApiRequest(method="POST", path="/api/models", body=body), results.read_server)


def replace_models(
    servers: Iterable[ModelServer | Mapping[str, Any]], resume: bool
) -> ApiCall[list[results.ModelServerView]]:
    """``PUT /api/models``."""
    fields: dict[str, Any] = {"items": list(servers)}
    if resume:
        fields["resume"] = True
    body = bodies.encode(fields)
    return ApiCall(ApiRequest(method="PUT", path="/api/models", body=body), results.read_servers)


def remove_model(model: str, endpoint: str | None) -> ApiCall[list[results.ModelServerView]]:
    """``DELETE /api/models``."""
    query = query_of(model=model, endpoint=endpoint)
    return ApiCall(
        ApiRequest(method="DELETE", path="/api/models", query=query), results.read_servers
    )


def pause(
    policy: str | None,
    mode: PauseMode,
    reason: str | None = None,
    drain_seconds: float | None = None,
) -> ApiCall[results.GatewayView]:
    """``POST /api/gateway/pause``; it answers when the mode's work is done."""
    body: dict[str, Any] = {"policy": policy, "mode": mode}
    if reason is not None:
        body["reason"] = reason
    if drain_seconds is not None:
        body["drain_seconds"] = drain_seconds
    request = ApiRequest(
        method="POST",
        path="/api/gateway/pause",
        body=bodies.encode(body),
        waits_seconds=_DRAIN_SECONDS if drain_seconds is None else drain_seconds,
    )
    return ApiCall(request, partial(results.read_record, kind=results.GatewayView))


def resume(policy: str | None) -> ApiCall[results.GatewayView]:
    """``POST /api/gateway/resume``."""
    body = bodies.encode({"policy": policy})
    return ApiCall(
        ApiRequest(method="POST", path="/api/gateway/resume", body=body),
        partial(results.read_record, kind=results.GatewayView),
    )


def gateway_state() -> ApiCall[results.GatewayView]:
    """``GET /api/gateway/state``."""
    return ApiCall(
        ApiRequest(method="GET", path="/api/gateway/state"),
        partial(results.read_record, kind=results.GatewayView),
    )


# --- resources, export, operations ---------------------------------------------------------------


def add_resources(data: Mapping[str, Any]) -> ApiCall[Resources]:
    """``POST /api/resources``: a repeat would make another version, so there is none."""
    request = ApiRequest(
        method="POST",
        path="/api/resources",
        body=bodies.encode({"data": data}),
        is_safe=False,
    )
    return ApiCall(request, partial(results.read_record, kind=Resources))


def get_resources(resources_id: str | None) -> ApiCall[Resources]:
    """``GET /api/resources/{id}``, by default the latest."""
    path = path_of("api", "resources", resources_id if resources_id is not None else "latest")
    return ApiCall(
        ApiRequest(method="GET", path=path), partial(results.read_record, kind=Resources)
    )


def export(
    format: str,
    *,
    ids: Ids | None = None,
    group_id: str | None = None,
    policy: str | None = None,
    mode: str = "train",
    parameters: Mapping[str, str] | None = None,
) -> ApiRequest:
    """``GET /api/export/{format}``, or POST where the ids do not fit into a query."""
    chosen = None if ids is None else as_ids(ids)
    path = path_of("api", "export", format)
    named = {"ids": chosen, "group_id": group_id, "policy": policy, "mode": mode}
    values = {**(parameters or {}), **{k: v for k, v in named.items() if v is not None}}
    query = query_of(**values)
    has_comma = any("," in rollout_id for rollout_id in chosen or ())
    if has_comma or not fits(query):
        return ApiRequest(
            method="POST", path=path, body=bodies.encode(values), accept="*/*", is_stream=True
        )
    return ApiRequest(method="GET", path=path, query=query, accept="*/*", is_stream=True)


def health() -> ApiCall[results.HealthView]:
    """``GET /healthz``."""
    return ApiCall(
        ApiRequest(method="GET", path="/healthz"),
        partial(results.read_record, kind=results.HealthView),
    )


def ready() -> ApiCall[results.ReadyView]:
    """``GET /readyz``: 503 is an answer like any other."""
    return ApiCall(
        ApiRequest(method="GET", path="/readyz", good_statuses=frozenset({503})),
        partial(results.read_record, kind=results.ReadyView),
    )
