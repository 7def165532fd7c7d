"""The event splitter works on bytes: any split, any line end, nothing lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.gateway.dialects.sse import EventSplitter, data_of, with_data

PIECES = [
    b"data: a",
    b"data:{}",
    b": ping",
    b"event: x",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"\r\n\r\n",
    b"\xe6",
]
STREAMS = st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join)


def split_at(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(ends)]


def events_of(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.rest


@given(stream=STREAMS, cuts=st.lists(st.integers(min_value=0), max_size=6))
def test_any_split_gives_the_same_events_and_loses_nothing(stream: bytes, cuts: list[int]) -> None:
    expected = events_of([stream])
    assert events_of(split_at(stream, cuts)) == expected
    assert events_of([stream[at : at + 1] for at in range(len(stream))]) == expected
    assert b"".join(expected[0]) + expected[1] == stream


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_of_the_standard_ends_an_event(end: bytes) -> None:
    stream = b"data: 1" + end + end + b"data: 2" + end + b"id: 3" + end + end + b":"
    events, rest = events_of([stream])
    assert events == [b"data: 1" + end + end, b"data: 2" + end + b"id: 3" + end + end]
    assert rest == b":"
    assert [data_of(event) for event in events] == [b"1", b"2"]


def test_a_partial_event_is_held() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.rest == b"data: 1\n"
    assert splitter.feed(b"\ndata") == [b"data: 1\n\n"]
    assert splitter.take_rest() == b"data"
    assert splitter.rest == b""


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data\n\n", b""),
        (b"event: e\r\ndata: x\r\nid: 1\r\n\r\n", b"x"),
        (b": a comment\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
        (b"data: unended", b"unended"),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


@pytest.mark.parametrize(
    ("event", "changed"),
    [
        (b"data: x\n\n", b"data: new\n\n"),
        (b"data:x\n\n", b"data:new\n\n"),
        (b"event: e\r\ndata: x\r\nid: 1\r\n\r\n", b"event: e\r\ndata: new\r\nid: 1\r\n\r\n"),
        (b": c\rdata: a\rdata: b\r\r", b": c\rdata: new\r\r"),
        (b"data: unended", b"data: new"),
    ],
)
def test_changed_data_keeps_the_rest_of_the_event(event: bytes, changed: bytes) -> None:
    assert with_data(event, b"new") == changed


def test_a_long_event_in_small_pieces_is_not_searched_again_from_its_start() -> None:
    splitter = EventSplitter()
    for _ in range(2_000):
        assert splitter.feed(b"x" * 500) == []
    assert splitter._searched == 1_000_000 - 3
    assert splitter.feed(b"\n\n") == [b"x" * 1_000_000 + b"\n\n"]
