"""Blacks out rollouts' tokens in what agents print, also where a cut or a read goes through one."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A rollout id of 256 characters makes a token of some 1,450; the start of a tail may cut it in two.
LONGEST_TOKEN = 2048

_CONTINUATION = re.compile(rb"[\x80-\xbf]{1,3}")
_BLACKED_OUT = b"[token]"
_TOKEN_CHARACTERS = rb"[A-Za-z0-9_.=-]"
_TOKEN = rb"agl1\." + _TOKEN_CHARACTERS + rb"+"
_TOKEN_PART = re.compile(_TOKEN_CHARACTERS + rb"{1,%d}" % LONGEST_TOKEN)
_REST_OF_TOKEN = re.compile(_TOKEN_CHARACTERS + rb"*")
# What the next bytes may make a token of, or a longer one.
_OPEN_END = re.compile(rb"(?:agl1\." + _TOKEN_CHARACTERS + rb"*|agl1|agl|ag|a)\Z")


class Redaction:
    """Blacks out tokens: known ones, and whatever has their form.

    Args:
        secrets: Known ones, which may have another form.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # The longest first: one may be the beginning of another.
        known = sorted({s.encode() for s in secrets if s}, key=len, reverse=True)
        self.longest = max([LONGEST_TOKEN, *map(len, known)])
        """In bytes: how far before a tail one must read to see all of a token that reaches in."""
        self._pattern = re.compile(b"|".join([*map(re.escape, known), _TOKEN]))

    def text(self, text: str) -> str:
        return self._pattern.sub(_BLACKED_OUT, text.encode(errors="replace")).decode()

    def tail(self, raw: bytes, start: int) -> str:
        """What follows ``start``; a token that reaches over it is blacked out as a whole.

        Blacking out first and cutting then would move the cut into the bytes before ``start``,
        which may begin in the middle of a token.
        """
        pieces: list[bytes] = []
        at = start
        for match in self._pattern.finditer(raw):
            if match.end() > start:
                pieces += (raw[at : max(at, match.start())], _BLACKED_OUT)
                at = match.end()
        pieces.append(raw[at:])
        if start and pieces[0] and (half := _CONTINUATION.match(pieces[0])):
            pieces[0] = pieces[0][half.end() :]  # of a character that was cut
        return b"".join(pieces).decode(errors="replace")


def end_of_first_word(raw: bytes) -> int:
    """Where the word at the start ends, which may be the rest of a token that was cut."""
    part = _TOKEN_PART.match(raw)
    return part.end() if part else 0


class RedactedStream:
    """Blacks out whatever has the form of a token in a stream of bytes, however it is cut.

    What may still become a token is held back until the next bytes, or the end, tell.
    """

    def __init__(self) -> None:
        self._held = b""
        self._is_inside = False
        """A token that is longer than any goes on; its beginning is blacked out already."""

    def feed(self, piece: bytes) -> bytes:
        """The next bytes that may be shown."""
        if self._is_inside:
            rest = _REST_OF_TOKEN.match(piece)
            skipped = rest.end() if rest else 0
            if skipped == len(piece):
                return b""
            piece, self._is_inside = piece[skipped:], False
        text = self._held + piece
        end = _OPEN_END.search(text)
        self._held = end.group() if end else b""
        shown = re.sub(_TOKEN, _BLACKED_OUT, text[: len(text) - len(self._held)])
        if len(self._held) > LONGEST_TOKEN:
            self._held, self._is_inside = b"", True
            shown += _BLACKED_OUT
        return shown

    def finish(self) -> bytes:
        """What was held back, at the end."""
        held, self._held = self._held, b""
        return re.sub(_TOKEN, _BLACKED_OUT, held)
