"""What JSON cannot hold is refused with its place, and nothing is sent."""

from __future__ import annotations

import datetime
import enum
from typing import Any

import pytest

from agl_core.client import bodies
from agl_core.errors import Invalid
from agl_core.records import RolloutSpec

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"x": [1.0, float("nan")]}, "rollouts[1].input.x[1]", "nan is not JSON"),
        ({"x": float("-inf")}, "rollouts[1].input.x", "-inf is not JSON"),
        ({"when": datetime.date(2026, 1, 1)}, "rollouts[1].input.when", "datetime.date"),
        ({"s": {1, 2}}, "rollouts[1].input.s", "builtins.set"),
        (b"bytes", "rollouts[1].input", "builtins.bytes"),
        ({1: 2}, "rollouts[1].input", "the key 1"),
        ({"t": "\ud800"}, "rollouts[1].input.t", "lone surrogate"),
        ({"n": 2**64}, "rollouts[1].input.n", "more than 64 bits"),
    ],
)
def test_what_is_not_json_is_named_with_its_path(shell, server, value, path, words) -> None:
    for second in ({"input": value}, RolloutSpec(input=value)):
        with pytest.raises(Invalid) as caught:
            shell.call("enqueue", [{"input": 1}, second])
        assert caught.value.details == {"path": path}
        assert caught.value.message.startswith(f"{path}: ")
        assert words in caught.value.message
        assert caught.value.hint
    assert server.seen == []


def test_input_that_contains_itself_is_refused(shell, server) -> None:
    with pytest.raises(Invalid, match="contains itself"):
        shell.call("enqueue", {"input": CYCLE})
    assert server.seen == []


def test_a_reward_that_is_not_a_number_is_refused(shell, server) -> None:
    with pytest.raises(Invalid, match=r"events\[0\]\.data\.value: nan"):
        shell.call("post_reward", "r", "a", float("nan"))
    assert server.seen == []


def test_an_item_that_is_no_dict_is_refused_by_its_index(shell, server) -> None:
    with pytest.raises(Invalid, match=r"rollouts\[1\] must be a dict"):
        shell.call("enqueue", [{"input": 1}, "text"])
    assert server.seen == []


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Half(float):
    pass


def test_subclasses_of_json_types_are_written_as_their_values() -> None:
    value = {"c": Colour.RED, "s": Size.BIG, "h": Half(0.5), "t": (1, None, True)}
    assert bodies.encode(value) == b'{"c":"red","s":3,"h":0.5,"t":[1,null,true]}'
