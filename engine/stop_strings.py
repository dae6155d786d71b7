"""Stop strings: watching a growing text with constant work for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A UTF-8 character has at most four bytes, so text still cut off after so many tokens never heals.
MAX_PENDING_TOKENS = 8
REPLACEMENT = "\ufffd"


class IncrementalText:
    """The text of tokens that come one by one. Never gives out part of a character.

    Decoding a token needs the ones just before it (a leading space, a split character), so each step
    decodes a short window twice, without and with the new tokens, and gives out the difference.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens given out last, then pending ones
        self._num_given = 0  # tokens of the window already given out
        self._given = ""  # their text

    def add(self, token_id: int) -> str:
        """Return the text that this token completes, "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_given
        if text.endswith(REPLACEMENT) and num_pending < MAX_PENDING_TOKENS:
            return ""
        new_text = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        return new_text


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
        self.end: int | None = None

    def add(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is now complete. `end` is then where it begins."""
        new_text = self._text.add(token_id)
        self._pieces.append(new_text)
        self._num_chars += len(new_text)
        if self._num_ignored > 0:
            self._num_ignored -= 1
            return False
        searched = self._tail + new_text
        found = [position for text in self._stop if (position := searched.find(text)) >= 0]
        if found:
            self.end = self._num_chars - len(searched) + min(found)
            return True
        self._tail = searched[-self._overlap :] if self._overlap else ""
        return False

    @property
    def text(self) -> str:
        """The text before the stop string."""
        return "".join(self._pieces)[: self.end]
