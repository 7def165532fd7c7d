"""Where the media of a request are, and what they are known by."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from agl_core.media import find_media, media_digest, media_request, media_to_wire

CAT = hashlib.sha256(b"cat").hexdigest()
SLICE = 2**17


def told(part: dict[str, Any]) -> dict[str, Any]:
    (medium,) = media_to_wire(find_media({"messages": [{"role": "user", "content": [part]}]}))
    return medium


@pytest.mark.parametrize(
    ("part", "kind", "media_type", "field"),
    [
        ({"image_url": {"url": "data:image/png;base64,Y2F0"}}, "image", "image/png", "image_url"),
        ({"image_url": "data:;base64,Y2F0"}, "image", None, "image_url"),
        (
            {"type": "image", "source": {"media_type": "image/webp", "data": "Y2F0"}},
            "image",
            "image/webp",
            "source",
        ),
        (
            {"type": "document", "source": {"media_type": "application/pdf", "data": "Y2F0"}},
            "document",
            "application/pdf",
            "source",
        ),
        ({"source": {"data": "Y2F0"}}, "media", None, "source"),
        ({"input_audio": {"data": "Y2F0", "format": "wav"}}, "audio", "audio/wav", "input_audio"),
        ({"video_url": {"url": "data:video/mp4;base64,Y2F0"}}, "video", "video/mp4", "video_url"),
        ({"image_embeds": "Y2F0"}, "image_embeds", None, "image_embeds"),
    ],
)
def test_what_a_part_holds_is_told(
    part: dict[str, Any], kind: str, media_type: str | None, field: str
) -> None:
    assert told(part) == {
        "kind": kind,
        "sha256": CAT,
        "size_bytes": 3,
        "media_type": media_type,
        "pointer": f"/messages/0/content/0/{field}",
    }


@pytest.mark.parametrize(
    ("part", "reference"),
    [
        ({"image_url": {"url": "https://images.test/1.png"}}, "https://images.test/1.png"),
        ({"image_url": None, "uuid": "cat-1"}, "cat-1"),
        ({"image_url": {"url": "data:image/png;base64,no base64"}}, None),
        ({"image_url": {"url": "data:image/png"}}, None),
    ],
)
def test_media_without_bytes_are_known_by_what_stands_for_them(
    part: dict[str, Any], reference: str | None
) -> None:
    medium = told(part)
    known = (reference or part["image_url"]["url"]).encode()
    assert (medium["sha256"], medium["size_bytes"]) == (hashlib.sha256(known).hexdigest(), None)


def test_pointers_lead_through_nested_parts_in_the_order_of_the_prompt() -> None:
    image = {"image_url": {"url": "data:image/png;base64,Y2F0"}}
    request = {
        "messages": [
            {"content": "text"},
            {"content": [{"type": "tool_result", "content": [image]}]},
        ],
        "input": [{"type": "function_call_output", "output": [{"type": "input_text"}, image]}],
    }
    assert [medium.pointer for medium in find_media(request)] == [
        "/messages/1/content/0/content/0/image_url",
        "/input/0/output/1/image_url",
    ]


@pytest.mark.parametrize("request_", [None, "text", [], {}, {"messages": "Hi", "input": None}])
def test_a_request_without_media_has_none(request_: Any) -> None:
    assert find_media(request_) == []


def test_a_translated_request_is_looked_up_in_what_was_sent() -> None:
    sent = {"messages": [{"content": "Hi"}]}
    assert media_request({"request": {"input": "Hi"}, "sent": sent}) is sent
    assert media_request({"request": {"input": "Hi"}, "sent": {}}) == {"input": "Hi"}


@pytest.mark.parametrize("size", [0, 1, 2, 3, SLICE * 3 // 4 - 1, SLICE * 3 // 4, SLICE, 300_001])
def test_digests_do_not_depend_on_where_a_long_one_is_cut(size: int) -> None:
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    (medium,) = find_media({"input": [{"image_url": url}]})
    assert media_digest(medium) == (hashlib.sha256(content).hexdigest(), size)


@pytest.mark.parametrize("at", [SLICE - 2, SLICE - 1, SLICE, SLICE + 1])
def test_what_is_no_base64_as_a_whole_is_none_in_pieces(at: int) -> None:
    reference = "A" * at + "=" + "A" * SLICE
    (medium,) = find_media({"input": [{"image_embeds": reference}]})
    assert media_digest(medium) == (hashlib.sha256(reference.encode()).hexdigest(), None)
