"""Stop strings: watching a growing text with constant work for each token."""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

REPLACEMENT = "\ufffd"  # how a decoder shows bytes that are no complete character
WINDOW = 16
KEPT = 8  # an incomplete character is at most three bytes long, so it lies in the tokens kept


class IncrementalText:
    """The text of tokens that come one by one, always a prefix of the text of all of them.

    Only the tokens behind the last complete character are decoded each time. A trailing replacement character is held
    back, as the next token may complete it. In some vocabularies bytes are tokens. If all tokens are decoded together
    there, bytes that make no character spoil complete characters before them. Here complete characters stay.

    behind: decodes tokens that stand behind others, which decoders may treat unlike a text's beginning.
    num_open: the most replacement characters for one incomplete character.
    joined: tokens that are decoded again with the next one.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        behind: Callable[[list[int]], str] | None = None,
        num_open: int = 1,
        joined: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._behind = behind or decode
        self._num_open = num_open
        self._joined = joined
        self._pending: list[int] = []
        self._num_given = 0  # characters of the pending tokens' text already given out

    @property
    def is_whole(self) -> bool:
        """Whether the text of all tokens is certain: the last one ends with a whole character."""
        return self._num_given == 0 and not self._pending

    def add(self, token_id: int) -> str:
        """Return the text that this token has made certain."""
        self._pending.append(token_id)
        text = self._decode(self._pending)
        num_certain = self._num_certain(text)
        new_text = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if text and num_certain == len(text):
            self._pending = []
            self._num_given = 0
            self._decode = self._behind
            if token_id in self._joined:
                # Its text may depend on the next token, so both are decoded together.
                self._pending = [token_id]
                self._num_given = len(self._behind([token_id]))
        elif len(self._pending) == WINDOW:
            # No whole character has come for long: the first of these tokens are no longer decoded.
            self._pending = self._pending[-KEPT:]
            self._num_given = self._num_certain(self._decode(self._pending))
        return new_text

    def _num_certain(self, text: str) -> int:
        return max(len(text.rstrip(REPLACEMENT)), len(text) - self._num_open)


class StopStrings:
    """Watches one sequence for its stop strings. Add each generated token once.

    min_tokens: a stop string within the first min_tokens tokens does not count.
    include: leave the stop string at the end of the text.
    answer_part: returns the part of a token's text that belongs to the answer, not to the reasoning before it.
    """

    def __init__(
        self,
        stop: Sequence[str],
        text: IncrementalText,
        *,
        min_tokens: int,
        include: bool = False,
        may_end: Callable[[str], bool] | None = None,
        answer_part: Callable[[int, str], str] | None = None,
    ) -> None:
        self._may_end = may_end
        self._answer_part = answer_part
        self._stop = stop
        self._include = include
        self._text = text
        self._num_ignored = min_tokens
        # A match may begin this many characters before new text.
        self._overlap = max(map(len, stop)) - 1
        self._pieces: list[str] = []
        self._tail = ""
        self._num_chars = 0  # of all pieces
        self._end: int | None = None

    def add(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is now complete."""
        new_text = self._text.add(token_id)
        self._pieces.append(new_text)
        self._num_chars += len(new_text)
        if self._answer_part is not None:
            part = self._answer_part(token_id, new_text)
            if new_text and not part:  # no stop string spans text outside the answer
                self._tail = ""
            new_text = part
        searched = self._tail + new_text
        if self._num_ignored > 0:
            self._num_ignored -= 1
        else:
            for begin, length in self._find(searched, len(self._tail)):
                end = self._num_chars - len(searched) + begin
                if self._include:
                    end += length
                if self._may_end is None or self._may_end("".join(self._pieces)[:end]):
                    self._end = end
                    return True
        self._tail = searched[-self._overlap :] if self._overlap else ""
        return False

    def _find(self, searched: str, num_old: int) -> list[tuple[int, int]]:
        """Return the beginnings and lengths of stop strings that end behind the first num_old characters, in order."""
        matches = []
        for text in self._stop:
            begin = searched.find(text, max(0, num_old - len(text) + 1))
            if begin >= 0:
                matches.append((begin, len(text)))
        return sorted(matches, key=itemgetter(0))

    @property
    def text(self) -> str | None:
        """The text up to the stop string that ended the sequence, None without one."""
        return None if self._end is None else "".join(self._pieces)[: self._end]
