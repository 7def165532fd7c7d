"""The 33 words of the demo's language, and how a chat becomes token ids.

One word is one token. Text that is split at white space and joined by single spaces comes back
as the same ids, so a conversation that is sent again starts with exactly the ids sampled before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = range(6)
_SPECIAL = ("<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<end>")
ACTION_WORDS = ("north", "south", "east", "west", "up", "down", "left", "right")
_PLAIN = (
    *("0", "1", "2", "3", "4"),
    *("bring", "the", "robot", "to", "its", "charger"),
    *("answer", "with", "one", "direction"),
    *("is", "level", "moved", "stayed"),
)
WORDS = (*_SPECIAL, *ACTION_WORDS, *_PLAIN)
ACTION_IDS = tuple(WORDS.index(word) for word in ACTION_WORDS)
_ID_OF = {word: index for index, word in enumerate(WORDS) if index >= len(_SPECIAL)}
_ROLE_ID = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}


def is_special(token_id: int) -> bool:
    """Whether the token marks structure and has no text."""
    return token_id < len(_SPECIAL)


def encode(text: str) -> list[int]:
    """Token ids of plain text; a marker such as ``<end>`` in it is an unknown word."""
    return [_ID_OF.get(word, UNKNOWN) for word in text.split()]


def pieces(token_ids: Iterable[int]) -> list[str]:
    """The text that each token adds; structure adds none."""
    texts: list[str] = []
    is_first = True
    for token_id in token_ids:
        if is_special(token_id):
            texts.append("")
            continue
        texts.append(WORDS[token_id] if is_first else f" {WORDS[token_id]}")
        is_first = False
    return texts


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        for part in content
    ):
        return " ".join(part["text"] for part in content)
    raise ValueError("content must be a string or a list of text parts")


def encode_chat(messages: Sequence[Any]) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to speak.

    Raises:
        ValueError: A message has no known role, or content that is not text.
    """
    ids: list[int] = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in _ROLE_ID:
            raise ValueError(f"messages[{index}] needs a role of {', '.join(_ROLE_ID)}")
        try:
            text = _text_of(message.get("content"))
        except ValueError as exc:
            raise ValueError(f"messages[{index}]: {exc}") from exc
        ids += [_ROLE_ID[role], *encode(text), END]
    return [*ids, ASSISTANT]
