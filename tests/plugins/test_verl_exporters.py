from __future__ import annotations

import json
from typing import Any

import pytest

from agl_core.errors import Invalid
from agl_core.interfaces import Exporter, ExportOptions
from agl_core.records import Attempt, Event, Rollout
from agl_verl import VerlPlugin

ROLLOUT = Rollout(
    rollout_id="r",
    status="succeeded",
    attempts=(Attempt(attempt_id="a", phase="succeeded"),),
    succeeded_attempt_id="a",
)


def exporter(format_name: str = "triplet") -> Exporter:
    (found,) = [e for e in VerlPlugin().provide_exporter() if e.format == format_name]
    return found


def call(seq: int, temperature: float | None, mode: str, **changes: Any) -> Event:
    data: dict[str, Any] = {
        "api": "chat",
        "call_id": f"call-{seq}",
        "policy": "p",
        "trained": True,
        "status": "ok",
        "http_status": 200,
        "server": {"endpoint": "http://e/v1", "model": "m"},
        "version_start": 3,
        "version_end": 3,
        "sampling": {"temperature": temperature, "logprobs_mode": mode},
        "choices": [
            {
                "index": 0,
                "prompt_token_ids": [1, 2],
                "token_ids": [3],
                "logprobs": [-0.5],
                "tokens": "complete",
                "finish_reason": "stop",
            }
        ],
        **changes,
    }
    return Event(
        seq=seq,
        event_type="model_request",
        rollout_id="r",
        attempt_id="a",
        timestamp=0.0,
        data=data,
    )


def export(events: list[Event], format_name: str = "triplet", **parameters: str) -> dict[str, Any]:
    chosen = exporter(format_name)
    options = ExportOptions(parameters=parameters)
    body = chosen.begin(options) + chosen.encode(ROLLOUT, events, options) + chosen.finish()
    line: dict[str, Any] = json.loads(body)
    return line


@pytest.mark.parametrize("format_name", ["triplet", "trajectory"])
def test_c36_raw_logprobs_at_another_temperature_stop_the_export(format_name: str) -> None:
    with pytest.raises(Invalid, match=r"call-1.*(raw.*0\.6|0\.6.*raw)"):
        export([call(1, 0.6, "raw")], format_name)


def test_c36_processed_logprobs_at_another_temperature_pass() -> None:
    (triplet,) = export([call(1, 0.6, "processed")])["triplets"]
    assert (triplet["response_token_ids"], triplet["logprobs"]) == ([3], [-0.5])


def test_raw_logprobs_are_exported_where_that_is_asked_for() -> None:
    assert len(export([call(1, 0.6, "raw")], allow_raw_sampling="true")["triplets"]) == 1


def test_a_batch_has_one_temperature_unless_told_otherwise() -> None:
    events = [call(1, 1.0, "processed"), call(2, 0.7, "processed")]
    with pytest.raises(Invalid, match=r"0\.7 in call call-2.*1\.0 in call call-1"):
        export(events)
    assert len(export(events, allow_mixed_temperature="true")["triplets"]) == 2


def test_calls_that_are_not_exported_are_not_judged() -> None:
    helper = call(1, 0.2, "raw", trained=False)
    failed = call(2, 0.2, "raw", status="client_gone")
    line = export([helper, failed, call(3, 1.0, "raw")])
    assert [t["call_id"] for t in line["triplets"]] == ["call-3"]
    assert line["skipped"] == {"untrained": 1, "client_gone": 1}


def test_c31_a_call_without_ids_is_skipped_and_never_tokenized_again() -> None:
    bare = {"index": 0, "token_ids": None, "tokens": "absent", "finish_reason": "stop"}
    line = export([call(1, 1.0, "raw", choices=[bare])])
    assert (line["triplets"], line["skipped"]) == ([], {"no_token_ids": 1})


@pytest.mark.parametrize("parameters", [{"allow_raw": "true"}, {"allow_raw_sampling": "yes"}])
def test_a_parameter_that_is_none_of_the_formats_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="allow_raw"):
        export([], **parameters)
