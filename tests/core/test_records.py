"""Records refuse what no store could keep and no path could hold."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from agl_core import records
from agl_core.records import (
    Attempt,
    EventDraft,
    Group,
    Limits,
    ModelServer,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutSpec,
)


@pytest.mark.parametrize(
    "bad",
    ["", "x" * 257, ".", "..", "a\nb", "a\x00b", "\x7f", "\ud800", "\u202e", 5, None],
    ids=repr,
)
def test_an_id_that_cannot_stand_in_a_path_or_a_log_is_refused(bad: Any) -> None:
    for make in (
        lambda: Rollout(rollout_id=bad),
        lambda: Attempt(attempt_id=bad),
        lambda: Group(id=bad, size=1, index=0),
        lambda: ModelServer(model=bad, endpoint="http://x/v1"),
        lambda: Resources(resources_id=bad, version=1, data={}, created_at=0.0),
    ):
        with pytest.raises(ValueError, match=r"must (have|be)"):
            make()


@pytest.mark.parametrize("good", ["a", "x" * 256, "a/b", "a b", "日本", "...", "%2e%2e", "-", "😀"])
def test_any_other_printable_text_is_an_id(good: str) -> None:
    assert Rollout(rollout_id=good).rollout_id == good


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Limits, {"calls": 0}),
        (Limits, {"completion_tokens": -1}),
        (Limits, {"context_tokens": 0}),
        (RolloutConfig, {"timeout_seconds": 0}),
        (RolloutConfig, {"max_retries": -1}),
        (Group, {"id": "g", "size": 0, "index": 0}),
        (Group, {"id": "g", "size": 1, "index": -1}),
        (EventDraft, {"event_type": ""}),
        (EventDraft, {"event_type": "x" * 129}),
        (ModelServer, {"model": "m", "endpoint": "e", "version": -1}),
    ],
)
def test_a_value_out_of_range_is_refused(kind: type[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|Length"):
        kind(**fields)


def test_every_record_is_frozen_and_takes_keywords_only() -> None:
    kinds = [kind for kind in vars(records).values() if isinstance(kind, type) and attrs.has(kind)]
    assert len(kinds) > 10
    for kind in kinds:
        assert all(field.kw_only for field in attrs.fields(kind)), kind
        assert kind.__setattr__ is not object.__setattr__, kind


def test_a_record_cannot_be_changed() -> None:
    rollout = Rollout(rollout_id="r")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        rollout.status = "running"  # type: ignore[misc]


def test_a_server_serves_the_policy_of_its_own_name_unless_told_otherwise() -> None:
    server = ModelServer(model="m", endpoint="http://x/v1")
    assert (server.policy, server.upstream_model) == ("m", "m")
    other = attrs.evolve(server, policy="p", served_model="/models/m")
    assert (other.policy, other.upstream_model, other.key) == (
        "p",
        "/models/m",
        ("m", "http://x/v1"),
    )


def test_the_default_attempt_is_the_succeeded_one_else_the_latest() -> None:
    attempts = (Attempt(attempt_id="a"), Attempt(attempt_id="b"))
    assert Rollout(rollout_id="r").default_attempt_id is None
    assert Rollout(rollout_id="r", attempts=attempts).default_attempt_id == "b"
    chosen = Rollout(rollout_id="r", attempts=attempts, succeeded_attempt_id="a")
    assert chosen.default_attempt_id == "a"
    assert chosen.attempt("b") == attempts[1]
    assert chosen.attempt("c") is None


def test_a_rollout_is_complete_when_it_has_ended_and_no_grade_is_awaited() -> None:
    assert not Rollout(rollout_id="r", status="running").is_complete
    assert not Rollout(rollout_id="r", status="succeeded", grade="pending").is_complete
    for grade in ("none", "done", "failed"):
        assert Rollout(rollout_id="r", status="failed", grade=grade).is_complete


def test_specs_are_equal_by_value() -> None:
    assert RolloutSpec(input={"a": [1]}) == RolloutSpec(input={"a": [1]})
    assert RolloutSpec(input={"a": [1]}) != RolloutSpec(input={"a": [2]})
