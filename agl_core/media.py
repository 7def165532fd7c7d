"""Images, audio and video in a model request: where they are, and what they are known by.

Placeholder ids of different images are equal, so only the media tell such prompts apart.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

# Fields of a content part that hold media, and of what kind. A ``source`` (Anthropic Messages) is
# of the kind that its part says.
_KINDS = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "source": None,
    "image_embeds": "image_embeds",
    "audio_embeds": "audio_embeds",
}
# Decoded and hashed at once, in characters: whole groups of four. It is short enough for other
# threads to get their turn in between.
_SLICE = 2**17


@frozen(kw_only=True)
class Medium:
    """One image, sound or film of a prompt."""

    kind: str
    pointer: str
    """JSON pointer (RFC 6901) to the field, from the top of the request."""
    media_type: str | None
    """As the request has it, such as ``image/png``."""
    reference: str = field(repr=False)
    """A data URL, bare base64, an address, or an id that the server knows it by."""


def media_request(data: Mapping[str, Any]) -> Any:
    """Return the request of a ``model_request`` event's data that has all of the prompt.

    A translated request may continue one that is not repeated in it; what was sent has it all.
    """
    sent = data.get("sent")
    return sent if isinstance(sent, Mapping) and sent.get("messages") else data.get("request")


def find_media(request: Any) -> list[Medium]:
    """List a request's media, in the order of the prompt. Nothing is decoded yet."""
    if not isinstance(request, Mapping):
        return []
    return [
        medium
        for name in ("messages", "input")
        for medium in _media_in(request.get(name), f"/{name}")
    ]


def media_digest(medium: Medium) -> tuple[str, int | None]:
    """Digest the bytes of a data URL or of bare base64, else the reference itself.

    Takes some 10 ms for a mebibyte, with a pause for other threads every millisecond or so.

    Returns:
        SHA-256 in hexadecimal, and the size of the bytes; None where the request has only a
        reference to them.
    """
    reference = medium.reference
    start = reference.find(",") + 1 if reference.startswith("data:") else 0
    digest, size = hashlib.sha256(), 0
    try:
        for at in range(start, len(reference), _SLICE):
            piece = reference[at : at + _SLICE]
            content = binascii.a2b_base64(piece, strict_mode=True)
            if len(content) < len(piece) // 4 * 3 and at + _SLICE < len(reference):
                raise binascii.Error("padding before the end")
            digest.update(content)
            size += len(content)
    except (binascii.Error, ValueError):
        return hashlib.sha256(reference.encode("utf-8", "surrogatepass")).hexdigest(), None
    return digest.hexdigest(), size


def media_to_wire(media: Sequence[Medium]) -> list[dict[str, Any]]:
    """Digest media, for the ``media`` of a ``model_request`` event."""
    told = []
    for medium in media:
        sha256, size_bytes = media_digest(medium)
        told.append(
            {
                "kind": medium.kind,
                "sha256": sha256,
                "size_bytes": size_bytes,
                "media_type": medium.media_type,
                "pointer": medium.pointer,
            }
        )
    return told


def _media_in(node: Any, pointer: str) -> Iterator[Medium]:
    if isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _media_in(item, f"{pointer}/{index}")
    elif isinstance(node, Mapping):
        for name, kind in _KINDS.items():
            reference = _reference(node, name)
            if reference is not None:
                yield Medium(
                    kind=kind or _text(node.get("type")) or "media",
                    pointer=f"{pointer}/{name}",
                    media_type=_media_type(node.get(name), reference),
                    reference=reference,
                )
        # A Responses tool result has its parts under ``output``.
        for name in ("content", "output"):
            yield from _media_in(node.get(name), f"{pointer}/{name}")


def _reference(part: Mapping[str, Any], name: str) -> str | None:
    """Return what a part says of its media, so that none passes for text; None: it has none."""
    value = part.get(name)
    if isinstance(value, Mapping):
        found = value.get("url") or value.get("data")
        if found is None and name != "source":
            found = json.dumps(value, sort_keys=True)
        value = found
    if value is None and name in part and isinstance(part.get("uuid"), str):
        # vLLM takes an image from its cache where only the id it was sent with is given.
        value = part["uuid"]
    return _text(value)


def _media_type(value: Any, reference: str) -> str | None:
    """The type that a data URL or a field beside the data tells; None: neither does."""
    if reference.startswith("data:"):
        end = max(reference.find(","), 5)
        return reference[5:end].partition(";")[0] or None
    if not isinstance(value, Mapping):
        return None
    sound = _text(value.get("format"))
    return _text(value.get("media_type")) or (f"audio/{sound}" if sound else None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
