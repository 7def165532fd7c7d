"""The headers that say whose call an answer was for, and who gave it."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from agl_core.gateway.call_headers import call_headers, server_name
from agl_core.records import ModelServer


def server(endpoint: str = "http://10.0.0.7:8000/v1", **fields: str) -> ModelServer:
    return ModelServer(model="m", endpoint=endpoint, **fields)  # type: ignore[arg-type]


def test_c93_an_answer_says_whose_call_it_was_and_who_answered() -> None:
    headers = dict(call_headers("r-1", "a-1", "p", 7, server_name(server())))
    assert headers.pop(b"x-agl-server").startswith(b"m@")
    assert headers == {
        b"x-agl-rollout-id": b"r-1",
        b"x-agl-attempt-id": b"a-1",
        b"x-agl-policy": b"p",
        b"x-agl-version": b"7",
    }


def test_c93_what_is_not_known_yet_is_left_out() -> None:
    assert call_headers("r", "a", None, None, None) == [
        (b"x-agl-rollout-id", b"r"),
        (b"x-agl-attempt-id", b"a"),
    ]
    assert call_headers(None, None, None, None, None) == []
    assert (b"x-agl-version", b"0") in call_headers("r", "a", "p", 0, None)


@pytest.mark.parametrize(
    "name", ["a/b c", "größe-☃", "x: y, z", "100%", "Qwen/Qwen3-8B", "a\r\nset-cookie: x", "\ud800"]
)
def test_any_id_makes_a_plain_header_value(name: str) -> None:
    headers = call_headers(name, name, name, 1, server_name(server(served_model="a/b")))
    for _, value in headers:
        assert all(0x21 <= byte <= 0x7E and byte != ord(",") for byte in value)
    if name != "\ud800":
        assert unquote(headers[0][1].decode()) == name


def test_a_server_is_told_from_another_but_not_where_it_is() -> None:
    first, second = server_name(server()), server_name(server("http://10.0.0.8:8000/v1"))
    assert first != second
    assert first == server_name(server())
    assert "10.0.0" not in first + second
    assert server_name(server(served_model="lora-3")).startswith("lora-3@")


def test_a_password_in_an_endpoint_has_no_part_in_the_name() -> None:
    plain = server_name(server("http://host:8000/v1"))
    assert server_name(server("http://user:secret@host:8000/v1")) == plain
    assert server_name(server("http://host:8000/v1?key=secret")) == plain
