"""JSON is read strictly, every fault is told, and records survive the round trip."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from agl_core.errors import BadJson, CursorExpired, Invalid
from agl_core.records import (
    Attempt,
    Event,
    Group,
    Limits,
    ModelServer,
    Rollout,
    RolloutConfig,
    RolloutError,
    RolloutPage,
    RolloutPatch,
    RolloutSpec,
    Tombstone,
)
from agl_core.wire import (
    cursor_position,
    cursor_text,
    read_json,
    structure,
    structure_answer,
    structure_page,
    to_builtins,
    to_json,
    unknown_key,
)

FULL = Rollout(
    rollout_id="r/1",
    status="failed",
    mode="val",
    input={"q": [1, 2.5, None, "日本"]},
    group=Group(id="g", size=2, index=1),
    config=RolloutConfig(
        command=("python", "a.py"),
        env={"A": "b"},
        timeout_seconds=1.5,
        limits=Limits(calls=3),
        job_patch={"spec": {"x": [1]}},
    ),
    metadata={"k": {"n": True}},
    attempts=(Attempt(attempt_id="a", phase="failed", reason="oom", exit_code=137),),
    error=RolloutError(code="oom", message="m"),
    version=4,
    created_at=1.25,
)


@frozen(kw_only=True)
class Everything:
    """One field of each kind that records and settings use."""

    text: str = ""
    number: float = 0.0
    count: int = 0
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    maybe: int | None = None
    list_: tuple[str, ...] = ()
    table: Mapping[str, int] = {}
    free: Any = None
    limits: Limits = field(factory=Limits)


def problems(value: Any, kind: type[Any] = Everything) -> dict[str, str]:
    with pytest.raises(Invalid) as refused:
        structure(value, kind)
    return {p["path"]: p["message"] for p in refused.value.details["problems"]}


def test_a_record_survives_the_round_trip() -> None:
    assert structure(read_json(to_json(FULL)), Rollout) == FULL


def test_a_record_is_written_as_the_api_shows_it() -> None:
    written = json.loads(to_json(FULL))
    assert written["attempts"][0]["phase"] == "failed"
    assert written["config"]["command"] == ["python", "a.py"]
    assert written["succeeded_attempt_id"] is None
    assert json.loads(to_json(to_builtins(FULL))) == written


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=20,
    )
)
def test_any_json_value_passes_through_an_input_unchanged(value: Any) -> None:
    try:
        to_json(value).decode()
    except UnicodeEncodeError:
        return
    spec = RolloutSpec(input=value)
    assert structure(read_json(to_json(spec)), RolloutSpec) == spec


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"NaN",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'"\\ud800"',
        b'"\xff"',
        b"{'a': 1}",
        b'{"a": 1,}',
        b"1 2",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:16]),
)
def test_what_is_no_json_is_refused_as_such(body: bytes) -> None:
    with pytest.raises(BadJson) as refused:
        read_json(body)
    assert (refused.value.status, refused.value.code) == (400, "bad_json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("text", 5, "must be a string, not 5"),
        ("text", None, "must be a string, not null"),
        ("number", "1", "must be a number, not '1'"),
        ("number", True, "must be a number, not True"),
        ("number", math.inf, "must be a finite number"),
        ("count", 1.5, "must be a whole number, not 1.5"),
        ("count", True, "must be a whole number, not True"),
        ("count", "1", "must be a whole number, not '1'"),
        ("flag", "no", "must be true or false, not 'no'"),
        ("flag", 0, "must be true or false, not 0"),
        ("choice", "c", "must be one of 'a', 'b', not 'c'"),
        ("choice", ["a"], "must be one of 'a', 'b', not a list"),
        ("maybe", "x", "must be a whole number, not 'x'"),
        ("list_", "abc", "must be a list, not 'abc'"),
        ("list_", {"a": 1}, "must be a list, not an object"),
        ("table", [1], "must be an object, not a list"),
        ("limits", 5, "must be an object, not 5"),
        ("limits", "text", "must be an object, not 'text'"),
        ("limits", [], "must be an object, not a list"),
    ],
)
def test_nothing_is_converted_by_guess(field: str, value: Any, said: str) -> None:
    found = problems({field: value})
    assert [*found] == [field]
    assert said in found[field]


def test_an_integer_may_be_written_as_a_float_without_a_fraction() -> None:
    made = structure({"count": 3.0, "maybe": 206.0}, Everything)
    assert (made.count, made.maybe) == (3, 206)
    assert type(made.count) is int


def test_a_whole_number_is_a_number() -> None:
    made = structure({"number": 3}, Everything)
    assert type(made.number) is float


def test_all_faults_are_told_at_once_each_with_its_path() -> None:
    found = problems(
        {
            "text": 1,
            "list_": ["ok", 2, None],
            "table": {"good": 1, "bad": "x"},
            "limits": {"calls": "many", "call": 1},
            "colour": "red",
        }
    )
    assert set(found) == {
        "text",
        "list_[1]",
        "list_[2]",
        "table.bad",
        "limits.calls",
        "limits.call",
        "colour",
    }
    assert "did you mean 'calls'?" in found["limits.call"]


def test_a_fault_of_an_item_names_the_item() -> None:
    found = problems({"attempts": [{"attempt_id": "a"}, {"phase": "gone"}]}, RolloutPatch)
    assert "'gone'" in found["attempts[1].phase"]
    assert any(
        path.startswith("attempts[1]") and "attempt_id" in said for path, said in found.items()
    )


def test_the_message_begins_where_the_caller_says() -> None:
    with pytest.raises(Invalid, match=r"^rollouts\[3\]\.mode: must be one of 'train', 'val'"):
        structure({"mode": "test"}, RolloutSpec, "rollouts[3]")
    with pytest.raises(Invalid, match=r"^rollouts\[3\]: must be an object, not a list"):
        structure([], RolloutSpec, "rollouts[3]")


def test_a_fault_is_unprocessable_not_a_bad_request() -> None:
    with pytest.raises(Invalid) as refused:
        structure("text", RolloutSpec)
    assert (refused.value.status, refused.value.code) == (422, "invalid")
    assert "the body: must be an object, not 'text'" in str(refused.value)


def test_a_missing_field_is_named() -> None:
    assert "'endpoint' is missing" in problems({"model": "m"}, ModelServer).values()


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(problems({"count": "x" * 10_000})["count"]) < 200


def test_answers_of_a_newer_service_are_read() -> None:
    made = structure_answer({"rollout_id": "r", "colour": "red"}, Rollout)
    assert made == Rollout(rollout_id="r")


@pytest.mark.parametrize("value", [5, "text", []], ids=repr)
def test_an_answer_that_is_no_object_where_one_must_be_is_a_fault(value: Any) -> None:
    with pytest.raises(Invalid, match="must be an object"):
        structure_answer({"rollout_id": "r", "config": value}, Rollout)


def test_a_page_holds_rollouts_and_tombstones() -> None:
    page = RolloutPage(
        items=(Rollout(rollout_id="a"), Tombstone(rollout_id="b", version=7)), cursor="c"
    )
    assert structure_page(read_json(to_json(page))) == page


def test_an_event_keeps_its_data_as_it_was() -> None:
    event = Event(
        seq=1, event_type="t", rollout_id="r", attempt_id="a", timestamp=1.5, data={"x": [None, 1]}
    )
    assert structure(read_json(to_json(event)), Event) == event


def test_an_unknown_key_is_told_with_the_nearest() -> None:
    assert unknown_key("balence", ["balance", "probe"]) == (
        "unknown key 'balence', did you mean 'balance'? (allowed: balance, probe)"
    )
    assert unknown_key("zzz", ["balance"]) == "unknown key 'zzz' (allowed: balance)"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**63))
def test_a_cursor_leads_back_to_its_place(epoch: str, position: int) -> None:
    assert cursor_position(cursor_text(epoch, position), epoch) == position


def test_a_cursor_of_another_epoch_has_expired() -> None:
    with pytest.raises(CursorExpired) as refused:
        cursor_position(cursor_text("one", 5), "other")
    assert (refused.value.status, refused.value.code) == (410, "cursor_expired")


@pytest.mark.parametrize(
    "cursor", ["", "x", "%%%", "日本", "AAAA", "bm8gY29sb24", "ZTotNQ", "ZToxXzA"]
)
def test_text_that_is_no_cursor_is_invalid(cursor: str) -> None:
    with pytest.raises(Invalid, match="is no cursor"):
        cursor_position(cursor, "e")
