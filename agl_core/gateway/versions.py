"""Which tokens of a call came from which version of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

# A stream that was silent for so long while its engine was frozen has delivered all that was
# sampled before; a tail still on its way takes some milliseconds.
SETTLED_SECONDS = 0.05


@frozen
class VersionMark:
    """A change of the weights under a call in flight."""

    version: int
    """From here on."""
    counts: Mapping[int, int] | None
    """Tokens that had come by then, by choice; None: not exactly known."""


def with_spans(
    choices: Sequence[dict[str, Any]],
    version_start: int | None,
    version_end: int | None,
    marks: Sequence[VersionMark],
) -> list[dict[str, Any]]:
    """The choices of a record with their ``version_spans``, where those are exactly known."""
    is_known = (
        version_start is not None
        and bool(marks)
        and marks[-1].version == version_end
        and all(mark.counts is not None for mark in marks)
    )
    if not is_known:
        return list(choices)
    assert version_start is not None
    return [{**choice, "version_spans": _spans(choice, version_start, marks)} for choice in choices]


def _spans(
    choice: Mapping[str, Any], version: int, marks: Sequence[VersionMark]
) -> list[list[int]] | None:
    length = len(choice.get("token_ids") or ())
    if not length:
        return None
    spans = [[0, version]]
    for mark in marks:
        assert mark.counts is not None
        start = mark.counts.get(choice["index"], 0)
        if start >= length:
            break
        if start == spans[-1][0]:
            spans[-1][1] = mark.version
        else:
            spans.append([start, mark.version])
    return spans
