"""Headers that say of an answer what its record says: whose call it was, and who answered it."""

from __future__ import annotations

import hashlib
from urllib.parse import quote, urlsplit

from agl_core.gateway.incoming import Header
from agl_core.records import ModelServer


def call_headers(
    rollout_id: str | None,
    attempt_id: str | None,
    policy: str | None,
    version: int | None,
    server_name: str | None,
) -> list[Header]:
    """Return the headers for what is known of a call; they stand beside ``x-request-id``.

    Names are percent-encoded: they may hold any printable character, and a header may not.
    """
    values = (
        (b"x-agl-rollout-id", _encoded(rollout_id)),
        (b"x-agl-attempt-id", _encoded(attempt_id)),
        (b"x-agl-policy", _encoded(policy)),
        (b"x-agl-version", None if version is None else b"%d" % version),
        (b"x-agl-server", None if server_name is None else server_name.encode("ascii")),
    )
    return [(name, value) for name, value in values if value is not None]


def server_name(server: ModelServer) -> str:
    """Return a name that tells a policy's servers apart without telling where they are.

    It is the model's name there, percent-encoded, and eight digits that stand for the endpoint.
    An endpoint may hold a user name and a password, which are left out before.
    """
    parts = urlsplit(server.endpoint)
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    digits = hashlib.sha256(place.geturl().encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{quote(server.upstream_model, safe='')}@{digits}"


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else quote(text, safe="", errors="replace").encode("ascii")
