"""Limits of a rollout's calls, as counted by the gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_core.errors import AglError
from agl_core.gateway.context import is_context_error
from agl_core.gateway.limits import LimitBook
from agl_core.gateway.replies import error_body
from agl_core.records import Limits

USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


def refused(error: AglError | None) -> str | None:
    """Name the limit that an error is about."""
    return None if error is None else str(error.details["limit"])


def test_a_rollout_without_limits_is_never_refused() -> None:
    book = LimitBook()
    for _ in range(5):
        book.note("r", USAGE)
    assert book.check("r", Limits()) is None
    assert book.check("unknown", Limits(calls=1, completion_tokens=1, context_tokens=1)) is None


def test_calls_are_allowed_up_to_their_number() -> None:
    book, limits = LimitBook(), Limits(calls=2)
    book.note("r", None)
    assert book.check("r", limits) is None
    book.note("r", USAGE)
    assert refused(book.check("r", limits)) == "calls"
    assert book.check("another", limits) is None


def test_calls_in_flight_count_as_calls() -> None:
    book, limits = LimitBook(), Limits(calls=2)
    book.note("r", USAGE)
    assert book.check("r", limits, open_calls=0) is None
    assert refused(book.check("r", limits, open_calls=1)) == "calls"


def test_completion_tokens_add_up() -> None:
    book, limits = LimitBook(), Limits(completion_tokens=40)
    book.note("r", USAGE)
    assert book.check("r", limits) is None
    book.note("r", USAGE)
    assert refused(book.check("r", limits)) == "completion_tokens"


def test_the_largest_context_decides_where_nothing_is_known_of_the_prompt() -> None:
    book, limits = LimitBook(), Limits(context_tokens=120)
    book.note("r", {"prompt_tokens": 99, "completion_tokens": 20})
    assert book.check("r", limits) is None
    book.note("r", USAGE)
    book.note("r", {"prompt_tokens": 1, "completion_tokens": 1})
    assert refused(book.check("r", limits)) == "context_tokens"


def test_a_conversation_that_was_compacted_goes_on() -> None:
    book, limits = LimitBook(), Limits(context_tokens=120)
    book.note("r", USAGE)
    assert refused(book.check("r", limits, 130)) == "context_tokens"
    assert book.check("r", limits, 30) is None


def test_a_prompt_is_estimated_from_the_call_before() -> None:
    book = LimitBook()
    assert book.estimate("r", 1000) is None
    book.note("r", USAGE, body_bytes=500)
    assert book.estimate("r", 1000) == 200
    book.note("r", None, body_bytes=500)
    assert book.estimate("r", 1000) == 200


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"input_tokens": 100, "output_tokens": 20}, 20),
        ({"prompt_tokens": None, "completion_tokens": None}, 0),
        ({"completion_tokens": True}, 0),
        ({}, 0),
    ],
)
def test_usage_is_read_as_any_dialect_tells_it(usage: dict[str, Any], tokens: int) -> None:
    book = LimitBook()
    book.note("r", usage)
    error = book.check("r", Limits(completion_tokens=1))
    assert (error.details["used"] if error else 0) == tokens


def test_c82_the_refusal_reads_as_a_full_context_in_every_dialect() -> None:
    book = LimitBook()
    book.note("r", USAGE)
    for limits in (Limits(calls=1), Limits(completion_tokens=5), Limits(context_tokens=7)):
        error = book.check("r", limits)
        assert error is not None
        assert (error.status, error.code) == (400, "rollout_limit")
        for path in ("chat/completions", "messages", "responses"):
            body = error_body(error, path)
            assert is_context_error(error.status, body)
            assert json.loads(body)["error"]["code"] == "rollout_limit"


def test_the_refusal_names_the_limit_and_what_was_used() -> None:
    book = LimitBook()
    book.seed("r", calls=9, tokens=900, context_tokens=300)
    error = book.check("r", Limits(completion_tokens=800, context_tokens=4096))
    assert error is not None
    assert "4096 tokens" in error.message
    assert "900 completion tokens" in error.message
    assert "limits.completion_tokens is 800" in error.message
    assert error.details == {"limit": "completion_tokens", "allowed": 800, "used": 900}


def test_what_the_store_has_counts_and_is_taken_once() -> None:
    book = LimitBook()
    assert not book.knows("r")
    book.seed("r", calls=3, tokens=30)
    book.note("r", USAGE)
    book.seed("r", calls=3, tokens=30)
    assert book.knows("r")
    assert refused(book.check("r", Limits(calls=4))) == "calls"
    assert book.check("r", Limits(calls=5)) is None
    assert book.check("r", Limits(completion_tokens=51)) is None


def test_the_rollout_that_was_silent_longest_is_given_up_and_can_be_seeded_again() -> None:
    book = LimitBook(max_rollouts=2)
    book.note("a", USAGE)
    book.note("b", USAGE)
    book.note("a", USAGE)
    book.note("c", USAGE)
    assert [book.knows(name) for name in "abc"] == [True, False, True]
    book.seed("b", calls=1, tokens=20)
    assert refused(book.check("b", Limits(calls=1))) == "calls"


def test_a_rollout_that_ended_is_forgotten() -> None:
    book = LimitBook()
    book.note("r", USAGE)
    book.forget("r")
    book.forget("r")
    assert not book.knows("r")
    assert book.check("r", Limits(calls=1)) is None
