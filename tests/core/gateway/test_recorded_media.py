"""The media of a prompt in its record, however the call is made and however it ends."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agl_core.gateway import call_end
from agl_core.media import Medium, media_to_wire
from agl_core.testing.fake_vllm import answering, saying
from agl_core.testing.service import chat

SMALL, LARGE = b"cat", bytes(3 * 2**20)


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def looking_at(*images: bytes, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    return chat(messages=[{"role": "user", "content": parts}], **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_c38_a_record_has_each_image_of_its_prompt(
    open_service: Any, open_vllm: Any, stream: bool
) -> None:
    service = await open_service()
    await service.register((await open_vllm(saying())).endpoint)
    await service.rollout("r")
    assert (await service.call("r", looking_at(SMALL, LARGE, stream=stream))).status == 200
    (event,) = await service.events("r")
    told = [(item["sha256"], item["size_bytes"]) for item in event["media"]]
    assert told == [(sha256(SMALL), 3), (sha256(LARGE), len(LARGE))]


async def test_c38_a_call_that_failed_has_its_images_too(open_service: Any, open_vllm: Any) -> None:
    service = await open_service(retries=0)
    await service.register((await open_vllm(answering(500, {}))).endpoint)
    await service.rollout("r")
    assert (await service.call("r", looking_at(SMALL))).status == 500
    (event,) = await service.events("r")
    assert [item["sha256"] for item in event["media"]] == [sha256(SMALL)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "messages",
            {
                "model": "m",
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": base64.b64encode(SMALL).decode(),
                                },
                            }
                        ],
                    }
                ],
            },
        ),
        (
            "responses",
            {
                "model": "m",
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": url_of(SMALL)}],
                    }
                ],
            },
        ),
    ],
)
async def test_c38_a_translated_call_points_into_what_was_sent(
    open_service: Any, open_vllm: Any, path: str, body: dict[str, Any]
) -> None:
    service = await open_service()
    await service.register((await open_vllm(saying())).endpoint)
    await service.rollout("r")
    assert (await service.call("r", body, path)).status == 200
    (event,) = await service.events("r")
    (medium,) = event["media"]
    assert (medium["kind"], medium["sha256"]) == ("image", sha256(SMALL))
    found: Any = event["sent"]
    for step in medium["pointer"].split("/")[1:]:
        found = found[int(step) if isinstance(found, list) else step]
    assert found["url"] == url_of(SMALL)


async def test_large_media_are_digested_beside_the_event_loop(
    open_service: Any, open_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noting(media: Sequence[Medium]) -> list[dict[str, Any]]:
        threads.append(threading.get_ident())
        return media_to_wire(media)

    monkeypatch.setattr(call_end, "media_to_wire", noting)
    service = await open_service()
    await service.register((await open_vllm(saying())).endpoint)
    await service.rollout("r")
    for image in (SMALL, LARGE):
        assert (await service.call("r", looking_at(image))).status == 200
    small, large = threads
    assert small == threading.get_ident() != large
