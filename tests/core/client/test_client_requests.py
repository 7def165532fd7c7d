"""What each method sends, and what becomes of the answer: the same for both clients."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from agl_core import records
from agl_core.client import (
    AglLiteClient,
    AsyncAglLiteClient,
    CancelResult,
    GatewayView,
    ModelServerView,
    RolloutToken,
)

ROLLOUT = {"rollout_id": "r1", "status": "queuing", "version": 1, "a_later_field": 1}
EVENT = {
    "seq": 1,
    "event_type": "reward",
    "rollout_id": "r1",
    "attempt_id": "a1",
    "timestamp": 1.5,
    "data": {"value": 1.0},
}
SERVER = {"model": "m", "endpoint": "http://h/v1", "version": 3, "healthy": True, "inflight": 2}
STATE = {"policies": {"m": {"paused": True, "mode": "drain", "inflight": 0, "held": 4}}}
BUNDLE = {"resources_id": "x", "version": 1, "data": {"p": "q"}, "created_at": 1}

# name, arguments, keywords, (method, path, query, body), answer
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], Any]] = [
    (
        "enqueue",
        ({"input": [1], "rollout_id": "r1"},),
        {"config": {"max_retries": 1}, "resources_id": "x", "metadata": {"a": 1}},
        (
            "POST",
            "/api/rollouts",
            {},
            {
                "rollouts": [{"input": [1], "rollout_id": "r1"}],
                "config": {"max_retries": 1},
                "resources_id": "x",
                "metadata": {"a": 1},
            },
        ),
        ROLLOUT,
    ),
    (
        "enqueue",
        ([records.RolloutSpec(input="q", rollout_id="r1", mode="val")],),
        {"config": records.RolloutConfig(image="i")},
        (
            "POST",
            "/api/rollouts",
            {},
            {
                "rollouts": [{"input": "q", "rollout_id": "r1", "mode": "val"}],
                "config": {"image": "i"},
            },
        ),
        {"items": [ROLLOUT]},
    ),
    (
        "enqueue_group",
        ({"q": 1}, 2),
        {"group_id": "g", "priority": 1},
        (
            "POST",
            "/api/rollouts",
            {},
            {
                "rollouts": [
                    {"input": {"q": 1}, "n": 2, "group_id": "g", "mode": "train", "priority": 1}
                ]
            },
        ),
        {"items": [ROLLOUT, ROLLOUT]},
    ),
    ("rollout", ("a/b c?é",), {}, ("GET", "/api/rollouts/a%2Fb%20c%3F%C3%A9", {}, None), ROLLOUT),
    (
        "rollouts",
        (),
        {
            "ids": ["r1", "r2"],
            "status": "running",
            "group_id": "g&h",
            "mode": "val",
            "changed_after": "c0",
            "limit": 7,
            "wait": 0.5,
        },
        (
            "GET",
            "/api/rollouts",
            {
                "ids": "r1,r2",
                "status": "running",
                "group_id": "g&h",
                "mode": "val",
                "changed_after": "c0",
                "limit": "7",
                "wait": "0.5",
            },
            None,
        ),
        {"items": [ROLLOUT, {"rollout_id": "r2", "version": 9, "deleted": True}], "cursor": "c"},
    ),
    (
        "iter_rollouts",
        (),
        {"status": ["queuing", "running"]},
        ("GET", "/api/rollouts", {"status": "queuing,running", "limit": "500"}, None),
        {"items": [ROLLOUT], "cursor": "c"},
    ),
    (
        "patch",
        ("r1",),
        {
            "status": "running",
            "attempts": [records.Attempt(attempt_id="a1"), {"attempt_id": "a2"}],
            "expected_version": 4,
        },
        (
            "PATCH",
            "/api/rollouts/r1",
            {},
            {
                "status": "running",
                "attempts": [{"attempt_id": "a1"}, {"attempt_id": "a2"}],
                "expected_version": 4,
            },
        ),
        ROLLOUT,
    ),
    (
        "patch",
        ("r1",),
        {"status": "failed", "error": records.RolloutError(code="oom", message="m")},
        (
            "PATCH",
            "/api/rollouts/r1",
            {},
            {"status": "failed", "error": {"code": "oom", "message": "m"}},
        ),
        ROLLOUT,
    ),
    ("cancel", ("r1",), {}, ("POST", "/api/rollouts/r1/cancel", {}, None), ROLLOUT),
    (
        "cancel_many",
        (["r1", "r2"],),
        {},
        ("POST", "/api/rollouts/cancel", {}, {"ids": ["r1", "r2"]}),
        {"items": [ROLLOUT], "refused": [{"rollout_id": "r2", "code": "x", "message": "y"}]},
    ),
    (
        "cancel_many",
        (),
        {"group_id": "g"},
        ("POST", "/api/rollouts/cancel", {}, {"group_id": "g"}),
        {"items": [], "refused": []},
    ),
    ("delete", ("r1",), {}, ("DELETE", "/api/rollouts/r1", {}, None), None),
    (
        "mint_token",
        ("r1",),
        {},
        ("POST", "/api/rollouts/r1/token", {}, None),
        {"token": "agl1.x", "expires_at": 5},
    ),
    (
        "events",
        ("r1", "a1"),
        {"type": "reward", "all_attempts": True},
        (
            "GET",
            "/api/events",
            {
                "rollout_id": "r1",
                "attempt_id": "a1",
                "type": "reward",
                "all_attempts": "true",
                "limit": "200",
            },
            None,
        ),
        {"items": [EVENT], "cursor": "1"},
    ),
    (
        "post_events",
        ("r/1", "a1", records.EventDraft(event_type="note", data={"x": 1})),
        {},
        (
            "POST",
            "/rollout/r%2F1/attempt/a1/events",
            {},
            [{"event_type": "note", "data": {"x": 1}}],
        ),
        {"items": [EVENT]},
    ),
    (
        "post_reward",
        ("r1", "a1", None),
        {"metrics": {"f1": 0.5}, "message": "m", "call_id": "c", "policy": "p"},
        (
            "POST",
            "/rollout/r1/attempt/a1/events",
            {},
            [
                {
                    "event_type": "reward",
                    "data": {
                        "value": None,
                        "metrics": {"f1": 0.5},
                        "message": "m",
                        "call_id": "c",
                        "policy": "p",
                    },
                }
            ],
        ),
        {"items": [EVENT]},
    ),
    ("models", (), {}, ("GET", "/api/models", {}, None), {"items": [SERVER]}),
    (
        "register_model",
        (),
        {"model": "m", "endpoint": "http://h/v1"},
        ("POST", "/api/models", {}, {"model": "m", "endpoint": "http://h/v1"}),
        SERVER,
    ),
    (
        "replace_models",
        ([{"model": "m", "endpoint": "http://h/v1"}],),
        {},
        ("PUT", "/api/models", {}, {"items": [{"model": "m", "endpoint": "http://h/v1"}]}),
        {"items": [SERVER]},
    ),
    (
        "replace_models",
        ([{"model": "m", "endpoint": "http://h/v1", "version": 1}],),
        {"resume": True},
        (
            "PUT",
            "/api/models",
            {},
            {
                "items": [{"model": "m", "endpoint": "http://h/v1", "version": 1}],
                "resume": True,
            },
        ),
        {"items": [SERVER]},
    ),
    (
        "remove_model",
        ("m",),
        {"endpoint": "http://h/v1"},
        ("DELETE", "/api/models", {"model": "m", "endpoint": "http://h/v1"}, None),
        {"items": [SERVER]},
    ),
    (
        "pause",
        (),
        {"policy": "m", "mode": "abort", "reason": "why", "drain_seconds": 3},
        (
            "POST",
            "/api/gateway/pause",
            {},
            {"policy": "m", "mode": "abort", "reason": "why", "drain_seconds": 3},
        ),
        STATE,
    ),
    ("resume", (), {}, ("POST", "/api/gateway/resume", {}, {"policy": None}), STATE),
    ("gateway_state", (), {}, ("GET", "/api/gateway/state", {}, None), STATE),
    (
        "add_resources",
        ({"p": "q"},),
        {},
        ("POST", "/api/resources", {}, {"data": {"p": "q"}}),
        BUNDLE,
    ),
    ("resources", (), {}, ("GET", "/api/resources/latest", {}, None), BUNDLE),
    ("resources", ("x",), {}, ("GET", "/api/resources/x", {}, None), BUNDLE),
    (
        "export",
        ("triplet",),
        {"ids": ["r1", "r2"], "policy": "p", "segment": "s"},
        (
            "GET",
            "/api/export/triplet",
            {"segment": "s", "ids": "r1,r2", "policy": "p", "mode": "train"},
            None,
        ),
        {"rollout_id": "r1"},
    ),
    (
        "export",
        ("triplet",),
        {"ids": ["a,b"], "group_id": "g", "mode": "all"},
        ("POST", "/api/export/triplet", {}, {"ids": ["a,b"], "group_id": "g", "mode": "all"}),
        {"rollout_id": "r1"},
    ),
    ("health", (), {}, ("GET", "/healthz", {}, None), {"status": "ok", "version": "1"}),
    ("ready", (), {}, ("GET", "/readyz", {}, None), {"ready": True}),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "sent", "reply"),
    CASES,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)],
)
def test_both_clients_send_the_same_request(
    shell, server, answer, name, args, kwargs, sent, reply
) -> None:
    status = 204 if reply is None else 200
    server.script = lambda _: answer(status=status, json=reply)
    shell.call(name, *args, **kwargs)
    (seen,) = server.seen
    method, path, query, body = sent
    assert (seen.method, seen.path, dict(seen.query), seen.json) == (method, path, query, body)
    assert seen.headers["user-agent"].startswith("agl-lite/")


def test_every_route_method_is_in_the_table() -> None:
    tested = {case[0] for case in CASES}
    elsewhere = {"close", "wait", "watch", "weight_update", "export_bytes", "url"}
    public = {name for name in vars(AglLiteClient) if not name.startswith("_")} | {"url"}
    assert public == tested | elsewhere


def test_both_clients_have_the_same_methods_arguments_and_results() -> None:
    def shape(cls: type) -> dict[str, tuple[str, str]]:
        found = {}
        for name, function in vars(cls).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            signature = inspect.signature(function)
            result = re.sub(r"Async(?=[A-Z])|Async", "", str(signature.return_annotation))
            result = result.replace(", None, None]", ", None]")
            found[name] = (str(signature.replace(return_annotation=None)), result)
        return found

    assert shape(AglLiteClient) == shape(AsyncAglLiteClient)


def test_answers_become_records(shell, server, answer) -> None:
    server.script = [
        answer(json=ROLLOUT),
        answer(
            json={
                "items": [ROLLOUT, {"rollout_id": "x", "version": 2, "deleted": True}],
                "cursor": "c",
            }
        ),
        answer(json={"token": "secret", "expires_at": 5}),
        answer(json={"items": [SERVER]}),
        answer(json=STATE),
        answer(json={"items": [], "refused": [{"rollout_id": "r", "code": "c"}]}),
        answer(json={"items": [EVENT]}),
        answer(json=BUNDLE),
    ]
    assert shell.call("rollout", "r1") == records.Rollout(rollout_id="r1", version=1)
    page = shell.call("rollouts")
    assert page.cursor == "c"
    assert page.items[1] == records.Tombstone(rollout_id="x", version=2)
    token = shell.call("mint_token", "r1")
    assert token == RolloutToken(token="secret", expires_at=5.0)
    assert "secret" not in repr(token)
    (view,) = shell.call("models")
    assert view == ModelServerView(
        server=records.ModelServer(model="m", endpoint="http://h/v1", version=3),
        healthy=True,
        inflight=2,
    )
    state = shell.call("gateway_state")
    assert isinstance(state, GatewayView)
    assert (state.policies["m"].held, state.policies["m"].mode) == (4, "drain")
    cancelled = shell.call("cancel_many", ids="r")
    assert isinstance(cancelled, CancelResult)
    assert cancelled.refused[0].code == "c"
    assert shell.call("post_reward", "r1", "a1", 1.0) == records.Event(
        seq=1,
        event_type="reward",
        rollout_id="r1",
        attempt_id="a1",
        timestamp=1.5,
        data={"value": 1.0},
    )
    assert shell.call("resources").data == {"p": "q"}


def test_a_repeated_enqueue_carries_the_same_generated_ids(shell, server, answer) -> None:
    server.script = [answer(status=503), answer(status=201, json={"items": [ROLLOUT, ROLLOUT]})]
    shell.call("enqueue", [{"input": 1}, {"input": 2, "n": 3}])
    first, second = server.seen
    assert first.body == second.body
    single, group = first.json["rollouts"]
    assert re.fullmatch("r-[0-9a-f]{16}", single["rollout_id"])
    assert re.fullmatch("g-[0-9a-f]{12}", group["group_id"])
    assert "rollout_id" not in group


def test_a_specs_own_defaults_do_not_overrule_the_batch(shell, server, answer) -> None:
    server.script = lambda _: answer(json={"items": [ROLLOUT]})
    config = records.RolloutConfig(timeout_seconds=5, limits=records.Limits(calls=2))
    shell.call(
        "enqueue",
        [records.RolloutSpec(config=config), {"config": config}],
        config={"max_retries": 2},
    )
    for item in server.seen[0].json["rollouts"]:
        assert item["config"] == {"timeout_seconds": 5.0, "limits": {"calls": 2}}


def test_nothing_selected_is_never_everything(shell, server) -> None:
    assert shell.call("enqueue", []) == []
    assert shell.call("cancel_many", ids=[]) == CancelResult()
    assert shell.call("export", "triplet", ids=[]) == []
    assert shell.call("wait", []) == []
    assert shell.call("post_events", "r", "a", []) == []
    for name in ("rollouts", "iter_rollouts", "watch"):
        with pytest.raises(Exception, match="ids is empty"):
            shell.call(name, ids=[])
    assert server.seen == []


def test_an_empty_or_dotted_id_never_becomes_another_path(shell, server) -> None:
    for bad in ("", ".", ".."):
        with pytest.raises(Exception, match="is no id"):
            shell.call("delete", bad)
    assert server.seen == []


def test_events_are_paged_to_the_end(shell, server, answer) -> None:
    def page(seen: Any) -> Any:
        after = int(dict(seen.query).get("after", 0))
        limit = int(dict(seen.query)["limit"])
        items = [{**EVENT, "seq": seq} for seq in range(after + 1, min(after + limit, 450) + 1)]
        return answer(json={"items": items, "cursor": str(after + len(items))})

    server.script = page
    events = shell.call("events", "r1")
    assert [event.seq for event in events] == [*range(1, 451)]
    assert len(server.seen) == 3


def test_rollouts_are_paged_to_the_end_without_tombstones(shell, server, answer) -> None:
    def page(seen: Any) -> Any:
        after = int(dict(seen.query).get("changed_after", 0))
        items: list[Any] = [
            {"rollout_id": f"r{i}", "version": 1} for i in range(after, min(after + 500, 700))
        ]
        if after:
            items.append({"rollout_id": "gone", "version": 1, "deleted": True})
        return answer(json={"items": items, "cursor": str(after + len(items))})

    server.script = page
    found = shell.call("iter_rollouts")
    assert [rollout.rollout_id for rollout in found] == [f"r{i}" for i in range(700)]


def test_ids_that_do_not_fit_into_a_query_are_posted_for_an_export(shell, server, answer) -> None:
    server.script = lambda _: answer(raw=b"")
    ids = [f"rollout-{i:06}" for i in range(1000)]
    assert shell.call("export", "triplet", ids) == []
    (seen,) = server.seen
    assert (seen.method, seen.json["ids"]) == ("POST", ids)
    with pytest.raises(Exception, match="too many ids"):
        shell.call("rollouts", ids)


def test_an_export_is_cut_into_lines_wherever_the_pieces_end(shell, server, answer) -> None:
    long = "x" * 300_000
    raw = b'{"a": 1}\n\n{"a": "' + long.encode() + b'"}\n{"a": 3}'
    server.script = lambda _: answer(raw=raw, media_type="application/x-ndjson")
    assert shell.call("export", "triplet") == [{"a": 1}, {"a": long}, {"a": 3}]
    assert b"".join(shell.call("export_bytes", "triplet")) == raw


def test_the_key_is_sent_and_never_shown(make_shell, server, answer, monkeypatch) -> None:
    server.script = lambda _: answer(json={"status": "ok"})
    make_shell(key="  s3cret\n").call("health")
    monkeypatch.setenv("AGL_KEY", "from-env")
    monkeypatch.setenv("AGL_URL", server.url + "/")
    shell = make_shell(url=None)
    shell.call("health")
    assert [seen.headers["authorization"] for seen in server.seen] == [
        "Bearer s3cret",
        "Bearer from-env",
    ]
    assert "from-env" not in repr(shell.client) + repr(vars(shell.client))
