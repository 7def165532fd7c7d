"""A weight update pauses, and resumes whatever happens in between."""

from __future__ import annotations

import pytest

from agl_core.errors import ApiError

STATE = {"policies": {"m": {"paused": True, "held": 1}}}


class Gone(Exception):
    pass


def paths(server) -> list[str]:
    return [seen.path.rpartition("/")[2] for seen in server.seen]


def test_the_block_runs_between_pause_and_resume(shell, server, answer) -> None:
    server.script = lambda _: answer(json=STATE)
    shell.update(lambda: server.seen.append(server.seen[0]), policy="m", mode="keep")
    assert paths(server) == ["pause", "pause", "resume"]
    assert server.seen[0].json == {"policy": "m", "mode": "keep"}
    assert server.seen[-1].json == {"policy": "m"}


@pytest.mark.parametrize(
    "error", [Gone("x"), KeyboardInterrupt(), ApiError(409, "version_conflict", "m")]
)
def test_an_error_in_the_block_resumes_and_goes_on(shell, server, answer, error) -> None:
    server.script = lambda _: answer(json=STATE)

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        shell.update(fail)
    assert caught.value is error
    assert paths(server) == ["pause", "resume"]


def test_a_pause_whose_answer_was_lost_is_resumed(make_shell, server, answer) -> None:
    server.script = [answer(json=STATE, breaks_off=True), answer(json=STATE)]
    with pytest.raises(ApiError) as caught:
        make_shell(retries=0).update(lambda: None)
    assert caught.value.code == "broken_off"
    assert paths(server) == ["pause", "resume"]


def test_a_pause_that_was_refused_is_not_resumed(shell, server, answer) -> None:
    server.script = [answer(status=404, json={"code": "not_found", "detail": "no policy 'x'"})]
    with pytest.raises(ApiError, match="no policy 'x'"):
        shell.update(lambda: None, policy="x")
    assert paths(server) == ["pause"]


def test_a_failed_resume_does_not_hide_the_error_of_the_block(shell, server, answer) -> None:
    server.script = [answer(json=STATE), answer(status=500, json={"detail": "broken"})]

    def fail() -> None:
        raise Gone("the reason")

    with pytest.raises(Gone, match="the reason") as caught:
        shell.update(fail)
    assert "broken" in caught.value.__notes__[0]


def test_a_failed_resume_is_an_error(shell, server, answer) -> None:
    server.script = [answer(json=STATE), answer(status=500, json={"detail": "broken"})]
    with pytest.raises(ApiError, match="broken"):
        shell.update(lambda: None)
