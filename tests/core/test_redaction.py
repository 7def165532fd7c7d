"""Tokens are blacked out wherever a text is cut."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.redaction import LONGEST_TOKEN, RedactedStream, Redaction, end_of_first_word

TOKEN = b"agl1.k1.ci0x.1750000000.c2lnbmF0dXJl"


def shown(*pieces: bytes) -> bytes:
    stream = RedactedStream()
    return b"".join([*(stream.feed(piece) for piece in pieces), stream.finish()])


@given(
    st.lists(
        st.sampled_from([TOKEN, b"agl1.", b"agl1", b"agl", b"a", b" ", b"\n", b"x", b"=", b"\xc3"]),
        max_size=12,
    ),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_stream_shows_the_same_however_it_is_cut(words: list[bytes], cuts: list[int]) -> None:
    text = b"".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert shown(*pieces) == re.sub(rb"agl1\.[A-Za-z0-9_.=-]+", b"[token]", text)


def test_what_cannot_be_a_token_is_shown_at_once() -> None:
    stream = RedactedStream()
    assert stream.feed(b"37 %") == b"37 %"
    assert stream.feed(b" of ag") == b" of "
    assert stream.feed(b"ents\r") == b"agents\r"
    assert stream.feed(b"key " + TOKEN) == b"key "
    assert stream.feed(b" done") == b"[token] done"


def test_endless_token_is_held_back_no_longer_than_any_can_be() -> None:
    stream = RedactedStream()
    assert stream.feed(b"agl1." + b"x" * LONGEST_TOKEN) == b"[token]"
    assert stream.feed(b"y" * 100_000) == b""
    assert stream.feed(b"z\nnext\n") == b"\nnext\n"
    assert stream.finish() == b""


@pytest.mark.parametrize("inside", range(len(TOKEN)))
def test_tail_that_begins_inside_a_token_shows_nothing_of_it(inside: int) -> None:
    raw = b"before " + TOKEN + b" after"
    assert Redaction().tail(raw, len(b"before ") + inside) == "[token] after"


def test_known_secrets_may_have_any_form() -> None:
    redact = Redaction(["s3cret", "s3cret-longer"])
    assert redact.text("a s3cret-longer b s3cret") == "a [token] b [token]"
    assert redact.longest == LONGEST_TOKEN
    assert Redaction(["s" * 5000]).longest == 5000


def test_first_word_may_be_the_rest_of_a_token() -> None:
    assert end_of_first_word(b"c2lnbmF0dXJl and more") == len(b"c2lnbmF0dXJl")
    assert end_of_first_word(b" and more") == 0
