"""Stop strings: watching a growing text with constant work for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # how a decoder shows bytes that are no complete character
WINDOW = 16
KEPT = 8  # an incomplete character is at most three bytes long, so it lies in the tokens kept


class IncrementalText:
    """The text of tokens that come one by one, always a prefix of what decoding all of them gives.

    A token's text depends on the few before it (a leading space, a split character), so a short window of
    tokens is decoded each time. A trailing replacement character may still become a real one with the
    next token: it is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text already given out

    def add(self, token_id: int) -> str:
        """Return the text that is certain with this token and was not before."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_certain = _num_certain(text)
        new_text = text[self._num_given : num_certain]
        self._num_given = num_certain
        if len(self._window) == WINDOW:
            self._window = self._window[-KEPT:]
            self._num_given = _num_certain(self._decode(self._window))
        return new_text


def _num_certain(text: str) -> int:
    return len(text) - text.endswith(REPLACEMENT)


class StopStrings:
    """Watches one sequence for its stop strings. Add each generated token once.

    min_tokens: a stop string that is complete within so many tokens does not count.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str], *, min_tokens: int) -> None:
        self._stop = stop
        self._text = IncrementalText(decode)
        self._num_ignored = min_tokens
        self._overlap = max(map(len, stop)) - 1  # a match may begin so far back
        self._pieces: list[str] = []
        self._tail = ""
        self._num_chars = 0  # of all pieces
        self._end: int | None = None

    def add(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is now complete."""
        new_text = self._text.add(token_id)
        self._pieces.append(new_text)
        self._num_chars += len(new_text)
        searched = self._tail + new_text
        if self._num_ignored > 0:
            self._num_ignored -= 1
        elif found := self._find(searched, len(self._tail)):
            self._end = self._num_chars - len(searched) + min(found)
            return True
        self._tail = searched[-self._overlap :] if self._overlap else ""
        return False

    def _find(self, searched: str, num_old: int) -> list[int]:
        """Where stop strings begin that do not end within the first num_old characters."""
        found = (searched.find(text, max(0, num_old - len(text) + 1)) for text in self._stop)
        return [position for position in found if position >= 0]

    @property
    def text(self) -> str | None:
        """The text before the stop string that ended the sequence, None if none did."""
        return None if self._end is None else "".join(self._pieces)[: self._end]
