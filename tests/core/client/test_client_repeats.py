"""When a call is sent again, how long it waits before that, and what its errors say."""

from __future__ import annotations

import email.utils
import json
import socket
from typing import Any

import httpx
import pytest

from agl_core.client.calls import ApiRequest
from agl_core.client.connection import make_settings
from agl_core.client.exchange import Send, Sleep, exchange
from agl_core.clock import SystemClock
from agl_core.errors import ApiError, ConfigError
from agl_core.testing.clock import FakeClock

SAFE = ApiRequest(method="GET", path="/x")
UNSAFE = ApiRequest(method="POST", path="/x", is_safe=False)


def play(request: ApiRequest, outcomes: list[Any], retries: int = 4) -> tuple[Any, list[float]]:
    """Run an exchange over scripted outcomes: how it ended, and the waits in between."""
    steps = exchange(request, make_settings("http://h", None, 60, retries), SystemClock())
    waits: list[float] = []
    step = next(steps)
    try:
        while True:
            if isinstance(step, Sleep):
                waits.append(step.seconds)
                step = steps.send(None)
                continue
            assert isinstance(step, Send)
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                step = steps.throw(outcome)
            else:
                status, headers = outcome
                sent = httpx.Request("GET", "http://h/x")
                step = steps.send(httpx.Response(status, headers=headers, request=sent))
    except StopIteration as stop:
        return stop.value, waits
    except ApiError as exc:
        return exc, waits


REFUSED = httpx.ConnectError("refused")
BROKEN = httpx.ReadError("reset")
LATE = httpx.ReadTimeout("late")
OK = (200, {})


@pytest.mark.parametrize(
    ("sent", "outcomes", "ended", "repeats"),
    [
        (SAFE, [REFUSED, BROKEN, (502, {}), (503, {}), OK], 200, 4),
        (SAFE, [(504, {}), (429, {}), OK], 200, 2),
        (SAFE, [(503, {})] * 5, 503, 4),
        (SAFE, [REFUSED] * 5, 0, 4),
        (SAFE, [LATE], 0, 0),
        (SAFE, [(500, {})], 500, 0),
        (SAFE, [(404, {})], 404, 0),
        (UNSAFE, [REFUSED, (429, {}), OK], 200, 2),
        (UNSAFE, [BROKEN], 0, 0),
        (UNSAFE, [(503, {})], 503, 0),
    ],
)
def test_only_what_may_be_repeated_is_and_a_bounded_number_of_times(
    sent, outcomes, ended, repeats
) -> None:
    outcomes = [*outcomes]
    result, waits = play(sent, outcomes)
    status = result.status if isinstance(result, ApiError) else result.status_code
    assert (status, len(waits), outcomes) == (ended, repeats, [])


def test_pauses_grow_with_jitter() -> None:
    _, waits = play(SAFE, [REFUSED] * 9, retries=8)
    bounds = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert len(set(waits)) == len(waits)


def test_retry_after_is_obeyed_in_seconds_and_as_a_date() -> None:
    in_twenty = email.utils.formatdate(SystemClock().now() + 20, usegmt=True)
    answers = [(503, {"retry-after": "7"}), (429, {"retry-after": in_twenty}), OK]
    _, (first, second) = play(SAFE, answers)
    assert 7 < first <= 7.2
    assert 18 < second <= 20.2


def test_a_long_retry_after_is_reported_and_not_waited_for() -> None:
    result, waits = play(SAFE, [(503, {"retry-after": "3600"})])
    assert (result.status, waits) == (503, [])


def test_retry_after_nonsense_is_ignored() -> None:
    for text in ("soon", "-1", "1.2.3", "٣"):
        _, waits = play(SAFE, [(503, {"retry-after": text.encode()}), OK])
        assert waits[0] <= 0.2


def test_repeats_are_counted_on_the_wire(make_shell, server, answer) -> None:
    server.script = lambda _: answer(status=503, headers={"Retry-After": "0"})
    shell = make_shell(retries=2)
    with pytest.raises(ApiError) as caught:
        shell.call("rollout", "r1")
    assert (caught.value.status, len(server.seen)) == (503, 3)
    server.seen.clear()
    with pytest.raises(ApiError):
        shell.call("post_reward", "r1", "a1", 1.0)
    assert len(server.seen) == 1


def test_a_delete_whose_answer_was_lost_is_done_when_its_repeat_finds_nothing(
    shell, server, answer
) -> None:
    gone = {"code": "not_found", "detail": "no rollout 'r'"}
    server.script = [
        answer(status=502),
        answer(status=404, json=gone),
        answer(status=404, json=gone),
    ]
    shell.call("delete", "r")
    with pytest.raises(ApiError, match="no rollout 'r'"):
        shell.call("delete", "r")


def test_an_answer_that_breaks_off_is_asked_for_again(shell, server, answer) -> None:
    whole = answer(json={"status": "ok"})
    server.script = [answer(json={"status": "ok"}, breaks_off=True), whole]
    assert shell.call("health").status == "ok"


def test_a_readiness_of_503_is_an_answer(shell, server, answer) -> None:
    server.script = [answer(status=503, json={"ready": False, "reasons": [{"message": "m"}]})]
    ready = shell.call("ready")
    assert (ready.ready, ready.reasons) == (False, ({"message": "m"},))


def test_an_export_that_breaks_off_is_an_error_and_never_a_short_one(shell, server, answer) -> None:
    server.script = [answer(raw=b'{"a": 1}\n', breaks_off=True)]
    with pytest.raises(ApiError) as caught:
        shell.call("export", "triplet")
    assert caught.value.code == "broken_off"


@pytest.mark.parametrize("how", ["export", "export_bytes"])
@pytest.mark.parametrize("length", [9, 300_000], ids=["short", "long"])
def test_an_export_that_breaks_off_with_a_reason_is_that_error(
    shell, server, answer, how, length
) -> None:
    problem = {"status": 422, "detail": "no data", "code": "c", "hint": "h", "details": {"n": 1}}
    raw = json.dumps({"a": "x" * length}) + "\n" + json.dumps({"error": problem}) + "\n"
    server.script = [answer(raw=raw.encode(), breaks_off=True)]
    with pytest.raises(ApiError) as caught:
        shell.call(how, "triplet")
    error = caught.value
    assert (error.status, error.code, error.message) == (422, "c", "no data")
    assert (error.hint, error.details) == ("h", {"n": 1})


@pytest.mark.parametrize("last", [b'{"a": 1', b'{"error": 1}', b'{"error": {}}', b"\xff\n", b""])
def test_bytes_that_break_off_without_a_reason_are_told_as_that(
    shell, server, answer, last
) -> None:
    server.script = [answer(raw=b'{"a": 1}\n' + last, breaks_off=True)]
    with pytest.raises(ApiError) as caught:
        shell.call("export_bytes", "triplet")
    assert caught.value.code == "broken_off"


def test_an_export_is_asked_for_again_while_the_service_is_busy(shell, server, answer) -> None:
    server.script = [answer(status=503), answer(raw=b'{"a": 1}\n')]
    assert shell.call("export", "triplet") == [{"a": 1}]


def test_a_problem_document_becomes_an_error_with_all_its_parts(shell, server, answer) -> None:
    problem = {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "the rollout has version 5",
        "code": "version_conflict",
        "hint": "read it again",
        "details": {"version": 5},
    }
    server.script = [answer(status=409, json=problem, media_type="application/problem+json")]
    with pytest.raises(ApiError) as caught:
        shell.call("patch", "r1", expected_version=4)
    error = caught.value
    assert (error.status, error.code, error.message) == (
        409,
        "version_conflict",
        "the rollout has version 5",
    )
    assert (error.hint, error.details) == ("read it again", {"version": 5})
    assert str(error) == "the rollout has version 5 (read it again)"


@pytest.mark.parametrize(
    ("status", "raw", "headers", "code", "words"),
    [
        (404, b"<html> <b>nginx</b>\n</html>", {}, "api_error", "HTTP 404: <html> <b>nginx</b>"),
        (500, b"", {}, "api_error", "HTTP 500"),
        (500, b"\xff\xfe[]", {}, "api_error", "HTTP 500"),
        (400, b"[1]", {}, "api_error", "HTTP 400: [1]"),
        (307, b"", {"location": "https://else/"}, "api_error", "a redirect to https://else/"),
        (401, b'{"title": "Unauthorized"}', {}, "api_error", "AGL_KEY"),
        (404, b'{"error": {"message": "m", "code": "c"}}', {}, "c", "m"),
        (200, b"<html>", {}, "bad_answer", "is this URL an agl-lite service"),
        (200, b'{"rollout_id": 3}', {}, "bad_answer", "must be a string"),
        (200, b"[]", {}, "bad_answer", "must be an object"),
    ],
)
def test_every_other_answer_becomes_an_error_that_says_what_came(
    shell, server, answer, status, raw, headers, code, words
) -> None:
    server.script = [answer(status=status, raw=raw, headers=headers)]
    with pytest.raises(ApiError) as caught:
        shell.call("rollout", "r1")
    assert (caught.value.status, caught.value.code) == (status, code)
    assert words in str(caught.value)


def test_where_nothing_answers_the_error_says_what_to_do(make_shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ApiError) as caught:
            make_shell(url=url, retries=1).call("post_reward", "r", "a", 1.0)
    error = caught.value
    assert (error.status, error.code) == (0, "unreachable")
    assert url in error.message
    assert "agl serve" in (error.hint or "")


def test_a_service_that_never_answers_is_given_up(make_shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ApiError) as caught:
            make_shell(url=url, timeout_seconds=0.05).call("health")
    assert (caught.value.status, caught.value.code) == (0, "timeout")
    assert "timeout_seconds" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "options",
    [
        {"url": "localhost:8080"},
        {"url": "ftp://h"},
        {"url": "http://"},
        {"url": "http://h:99999"},
        {"url": "http://h/?x=1"},
        {"key": "a\nb"},
        {"key": "schlüssel"},
        {"timeout_seconds": 0},
        {"retries": -1},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(make_shell, options) -> None:
    with pytest.raises(ConfigError):
        make_shell(**options)


def test_a_date_in_retry_after_is_read_against_the_clock() -> None:
    clock = FakeClock()
    steps = exchange(SAFE, make_settings("http://h", None, 60, 1), clock)
    next(steps)
    date = email.utils.formatdate(int(clock.now()) + 10, usegmt=True)
    response = httpx.Response(
        503, headers={"retry-after": date}, request=httpx.Request("GET", "http://h")
    )
    pause = steps.send(response)
    assert isinstance(pause, Sleep)
    assert 8.9 < pause.seconds <= 10.2
