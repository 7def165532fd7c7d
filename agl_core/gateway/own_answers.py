"""What the gateway answers itself: the list of models, and the knocks of harnesses at the door."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from agl_core.errors import NotFound
from agl_core.gateway.registry import Registry
from agl_core.wire import to_json

_MODELS = "models"


def own_answer(method: str, below: str, registry: Registry) -> bytes | None:
    """The body of a request that no model server needs to see; None for all others.

    Args:
        method: The HTTP method.
        below: The path below ``v1``.
        registry: Knows the models.

    Raises:
        NotFound: The model that was asked about is not registered.
    """
    if method == "HEAD":
        return b""
    if method != "GET":
        return None
    path = below.rstrip("/")
    if path == _MODELS:
        return to_json({"object": "list", "data": [*_cards(registry).values()]})
    if path.startswith(f"{_MODELS}/"):
        name = unquote(path.removeprefix(f"{_MODELS}/"))
        card = _cards(registry).get(name)
        if card is None:
            raise NotFound(
                f"the model {name!r} is not registered",
                code="model_not_found",
                hint=f"registered: {', '.join(registry.names()) or 'none'}",
            )
        return to_json(card)
    return None


def _cards(registry: Registry) -> dict[str, dict[str, Any]]:
    """Each name that a request may use, as an OpenAI model card; patterns are no names."""
    cards: dict[str, dict[str, Any]] = {}
    for state in registry.states:
        server = state.server
        names = [server.model, *(alias for alias in server.aliases if not set(alias) & set("*?["))]
        for name in names:
            cards.setdefault(
                name,
                {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "agl-lite",
                    "root": server.model,
                    "parent": None,
                    "max_model_len": state.context_tokens,
                },
            )
    return cards
