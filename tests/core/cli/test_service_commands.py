"""The commands that talk to a service, against a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_core.client import AglLiteClient
from agl_core.records import Rollout

Enqueue = Callable[..., Rollout]


@pytest.fixture
def enqueue(service: AglLiteClient) -> Enqueue:
    def run(rollout_id: str, **fields: Any) -> Rollout:
        [made] = service.enqueue({"input": {"q": 1}, "rollout_id": rollout_id, **fields})
        return made

    return run


# --- rollouts ------------------------------------------------------------------------------------


def test_rollouts_are_listed_in_a_table(agl: Any, enqueue: Enqueue, service: Any) -> None:
    enqueue("listed")
    service.patch("listed", status="failed", error={"code": "oom"})
    ran = agl("rollouts", "list", "--status", "failed")
    assert ran.status == 0
    head, *rows = ran.out.splitlines()
    assert head.split() == ["ROLLOUT", "STATUS", "MODE", "GROUP", "ATTEMPTS", "AGE", "ERROR"]
    [row] = [row for row in rows if row.startswith("listed ")]
    assert row.split() == ["listed", "failed", "train", "-", "0", "0s", "oom"]


def test_rollouts_as_json_are_the_apis_records(agl: Any, service: AglLiteClient) -> None:
    service.enqueue_group({"q": 1}, 3, group_id="json")
    told = json.loads(agl("rollouts", "list", "--group", "json", "--json").out)
    assert [item["rollout_id"] for item in told["items"]] == ["json-0", "json-1", "json-2"]
    assert told["items"][1]["group"] == {"id": "json", "size": 3, "index": 1}


def test_rollouts_are_listed_up_to_the_limit(agl: Any, service: AglLiteClient) -> None:
    service.enqueue_group({"q": 1}, 3, group_id="limited")
    told = agl("rollouts", "list", "--group", "limited", "--limit", "2", "--json")
    assert len(json.loads(told.out)["items"]) == 2


def test_no_rollouts_are_said_to_be_none(agl: Any, service: AglLiteClient) -> None:
    assert agl("rollouts", "list", "--group", "nobody").out == "none\n"


def test_one_rollout_is_shown_with_its_attempts(
    agl: Any, enqueue: Enqueue, service: AglLiteClient
) -> None:
    enqueue("shown")
    attempt = {"attempt_id": "pod", "phase": "failed", "reason": "oom", "exit_code": 137}
    times = {"started_at": 10.0, "finished_at": 12.5}
    service.patch("shown", attempts=[{**attempt, **times}], status="failed")
    ran = agl("rollouts", "show", "shown")
    assert 'input              {"q":1}' in ran.out
    assert "error              oom\n" in ran.out
    assert ran.out.splitlines()[-1].split() == ["pod", "failed", "oom", "137", "-", "2.5"]
    assert json.loads(agl("rollouts", "show", "shown", "--json").out)["status"] == "failed"


def test_an_unknown_rollout_is_an_error(agl: Any, service: AglLiteClient) -> None:
    ran = agl("rollouts", "show", "nobody")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "'nobody'" in ran.err


def test_a_value_from_outside_does_not_steer_the_terminal(
    agl: Any, enqueue: Enqueue, service: AglLiteClient
) -> None:
    enqueue("steering")
    error = {"code": "config", "message": "\x1b[2Jgone"}
    service.patch("steering", status="failed", error=error)
    assert "\x1b" not in agl("rollouts", "show", "steering").out


def test_cancel_ends_what_can_be_and_says_of_the_rest_why_not(
    agl: Any, enqueue: Enqueue, service: AglLiteClient
) -> None:
    enqueue("cancel-me")
    ran = agl("rollouts", "cancel", "cancel-me")
    assert (ran.status, ran.out) == (0, "cancel-me: cancelled\n")
    again = agl("rollouts", "cancel", "cancel-me")
    assert (again.status, again.out) == (1, "")
    assert again.err.startswith("cancel-me: ")
    as_json = agl("rollouts", "cancel", "cancel-me", "--json")
    assert as_json.status == 1
    assert json.loads(as_json.out)["refused"][0]["rollout_id"] == "cancel-me"


def test_cancel_takes_a_whole_group(agl: Any, service: AglLiteClient) -> None:
    service.enqueue_group({"q": 1}, 2, group_id="all")
    assert agl("rollouts", "cancel", "--group", "all").status == 0
    assert {service.rollout(f"all-{n}").status for n in range(2)} == {"cancelled"}


@pytest.mark.parametrize("arguments", [[], ["one", "--group", "g"]])
def test_cancel_wants_names_or_a_group(
    agl: Any, service: AglLiteClient, arguments: list[str]
) -> None:
    ran = agl("rollouts", "cancel", *arguments)
    assert ran.status == 2
    assert "but not both" in ran.err


# --- events --------------------------------------------------------------------------------------


def test_events_are_shown_with_what_they_say(
    agl: Any, enqueue: Enqueue, service: AglLiteClient
) -> None:
    enqueue("eventful")
    service.post_reward("eventful", "a", 0.5)
    service.post_events("eventful", "a", {"event_type": "note", "data": {"text": "x" * 200}})
    service.post_events("eventful", "b", {"event_type": "other", "data": {}})
    ran = agl("events", "eventful", "--attempt", "a")
    rows = ran.out.splitlines()
    assert rows[1].split() == ["1", "reward", "a", "0.5", "from", "algorithm"]
    assert rows[2].endswith("xxx...")
    assert len(rows) == 3
    assert agl("events", "eventful", "--attempt", "a", "--type", "reward").out.count("\n") == 2
    lines = agl("events", "eventful", "--all-attempts", "--json").out.splitlines()
    assert [json.loads(line)["event_type"] for line in lines] == ["reward", "note", "other"]


# --- models --------------------------------------------------------------------------------------


def test_models_are_added_listed_and_removed(agl: Any, service: AglLiteClient) -> None:
    endpoint = "http://127.0.0.1:1/v1"
    added = agl(
        *("models", "add", "m", endpoint, "--version", "3", "--policy", "p", "--helper"),
        *("--alias", "gpt-*", "--served-model", "/models/m"),
    )
    assert (added.status, added.out) == (0, f"m at {endpoint}: version 3\n")
    for arguments in (["models"], ["models", "list"]):
        row = agl(*arguments).out.splitlines()[1]
        assert row.split()[:5] == ["m", endpoint, "p", "no", "3"]
        assert row.endswith("gpt-*")
    told = json.loads(agl("models", "list", "--json").out)
    assert told["items"][0]["served_model"] == "/models/m"
    older = agl("models", "add", "m", endpoint, "--version", "2")
    assert older.status == 1
    assert older.err.startswith("error: ")
    removed = agl("models", "remove", "m")
    assert (removed.status, removed.out) == (0, f"removed m at {endpoint}\n")
    assert agl("models", "list").out == "none\n"
    assert agl("models", "remove", "m").status == 1


def test_models_as_json(agl: Any, service: AglLiteClient) -> None:
    endpoint = "http://127.0.0.1:2/v1"
    added = json.loads(agl("models", "add", "j", endpoint, "--helper", "--json").out)
    assert (added["model"], added["endpoint"], added["version"]) == ("j", endpoint, 0)
    removed = json.loads(agl("models", "remove", "j", endpoint, "--json").out)
    assert [item["model"] for item in removed["items"]] == ["j"]


# --- export --------------------------------------------------------------------------------------


@pytest.fixture
def ended(enqueue: Enqueue, service: AglLiteClient) -> str:
    rollout_id = f"exported-{service.rollouts().cursor}"
    enqueue(rollout_id)
    service.post_reward(rollout_id, "a", 1.0)
    service.patch(rollout_id, status="succeeded")
    return rollout_id


@pytest.mark.parametrize("format_", ["triplet", "trajectory"])
def test_export_writes_a_format_to_standard_output(agl: Any, ended: str, format_: str) -> None:
    ran = agl("export", format_, "--id", ended)
    assert (ran.status, ran.err) == (0, "")
    line = json.loads(ran.out)
    assert (line["rollout_id"], line["reward"]) == (ended, 1.0)


def test_export_writes_to_a_file_and_leaves_no_part_beside_it(agl: Any, ended: str) -> None:
    ran = agl("export", "triplet", "--id", ended, "--output", "out.jsonl")
    assert (ran.status, ran.out) == (0, "")
    assert json.loads(Path("out.jsonl").read_text())["rollout_id"] == ended
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


def test_an_export_that_fails_leaves_the_old_file(agl: Any, ended: str) -> None:
    Path("out.jsonl").write_text("old")
    ran = agl("export", "no-such-format", "--id", ended, "-o", "out.jsonl")
    assert ran.status == 1
    assert "no-such-format" in ran.err
    assert Path("out.jsonl").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("metrics", [0, 80_000], ids=["at once", "broken off"])
def test_c41_an_export_over_the_share_says_why_and_leaves_no_file(
    agl: Any, enqueue: Enqueue, service: AglLiteClient, metrics: int
) -> None:
    rollout_id = f"idle-{metrics}"
    enqueue(rollout_id)
    # What is long has begun to be answered before its end says that it is too little.
    service.post_reward(rollout_id, "a", 1.0, metrics={f"metric-{n}": n for n in range(metrics)})
    service.patch(rollout_id, status="succeeded")
    Path("out.jsonl").write_text("old")
    asked = ("export", "trajectory", "--id", rollout_id, "-o", "out.jsonl")
    ran = agl(*asked, "--option", "max_no_data_share=0.5")
    assert (ran.status, ran.out) == (1, "")
    assert "1 of 1 succeeded rollouts have no calls to train on: no_calls (1)" in ran.err
    assert "max_no_data_share" in ran.err
    assert Path("out.jsonl").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]
    assert agl(*asked, "--option", "max_no_data_share=1").status == 0
    assert Path("out.jsonl").stat().st_size > 12 * metrics


def test_an_export_into_no_folder_is_told(agl: Any, ended: str) -> None:
    ran = agl("export", "triplet", "--id", ended, "-o", "no/folder/out.jsonl")
    assert ran.status == 1
    assert "no/folder/out.jsonl" in ran.err
    assert "Traceback" not in ran.err


def test_export_takes_options_of_the_format(agl: Any, ended: str) -> None:
    options = ("--option", "max_length=9", "--option", "allow_raw_sampling=true")
    ran = agl("export", "triplet", "--id", ended, *options)
    assert (ran.status, ran.err) == (0, "")
    assert json.loads(ran.out)["rollout_id"] == ended


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("max_length=none=1", "none=1"),
        ("max_lenght=9", "max_lenght"),
        ("allow_raw_sampling=", "allow_raw_sampling"),
    ],
)
def test_the_format_refuses_an_option_that_is_none_of_its(
    agl: Any, ended: str, option: str, told: str
) -> None:
    good = ("--option", "allow_mixed_temperature=true")
    ran = agl("export", "triplet", "--id", ended, *good, "--option", option)
    assert (ran.status, ran.out) == (1, "")
    assert told in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["max_length"], "'max_length' is not NAME=VALUE"),
        (["=4"], "'=4' is not NAME=VALUE"),
        (["ids=a"], "'ids' is none of a format's parameters"),
        (["self=a"], "'self' is none of a format's parameters"),
        (["max_length=1", "max_length=2"], "'max_length' is given twice"),
    ],
)
def test_an_option_that_is_none_is_refused_at_once(agl: Any, options: list[str], told: str) -> None:
    given = [argument for option in options for argument in ("--option", option)]
    ran = agl("export", "triplet", *given)
    assert ran.status == 2
    assert told in ran.err
