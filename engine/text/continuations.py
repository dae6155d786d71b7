"""Continuations: texts behind a prompt as tokens, without tokenizing the prompt once for each of them.

A text's tokens depend on what stands before it: a continuation is tokenized with the prompt, as
lm-evaluation-harness does it. A word further back changes nothing of that, in most tokenizers. So what the
prompt's last word makes of the continuations is remembered, once it was seen to be the same as with all of
the prompt.
"""

from __future__ import annotations

from threading import Lock

from engine.errors import InvalidPrompt
from engine.text.tokenizer import Tokenizer

MAX_LAST_WORD = 64  # characters
MAX_REMEMBERED = 256
MAX_CHARS = 65_536  # of continuations that are remembered

Texts = tuple[str, ...]
Tail = tuple[tuple[int, ...], int]
"""Tokens behind what all continuations of a prompt share, and which of them is the first to be scored."""
Tails = tuple[list[int], tuple[Tail, ...]]  # tokens, and what stands behind them or in their place
UNLIKE: Tails = ([], ())


class Continuations:
    """Tokenizes them for any number of threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._remembered: dict[tuple[str, Texts], Tails] = {}

    def alone(self, texts: Texts) -> tuple[Tail, ...]:
        """Their tails behind a prompt of token ids: each tokenized by itself."""
        found = self._remembered.get(("", texts))
        if found is None:
            tails = tuple((tuple(self._tokenizer.encode_alone(text)), 0) for text in texts)
            found = self._remember(("", texts), ([], tails))
        return found[1]

    def behind(self, prompt: str, token_ids: list[int], texts: Texts) -> Tails:
        """What stands before all the tails of a prompt's continuations, and the tails.

        prompt: with no space at its end, and not empty.  token_ids: its own.
        """
        for word in _last_words(prompt):
            found = self._remembered.get((word, texts))
            if found is None:
                found = self._remember((word, texts), self._with_word(prompt, token_ids, word, texts))
            own, tails = found
            if own and token_ids[-len(own) :] == own:
                return token_ids[: -len(own)], tails
        return self._with_all(prompt, token_ids, texts)

    def _with_word(self, prompt: str, token_ids: list[int], word: str, texts: Texts) -> Tails:
        """The word's tokens, and the tails behind what is before it; UNLIKE if those are not of the whole."""
        own = self._tokenizer.encode_alone(word)
        if not own or len(own) >= len(token_ids) or token_ids[-len(own) :] != own:
            return UNLIKE
        before = token_ids[: -len(own)]
        tails = [tuple(self._tokenizer.encode_alone(word + text)) for text in texts]
        whole = [self._tokenizer.encode(prompt + text) for text in texts]
        if any([*before, *tail] != each for tail, each in zip(tails, whole, strict=True)):
            return UNLIKE
        return own, tuple((tail, len(own)) for tail in tails)

    def _with_all(self, prompt: str, token_ids: list[int], texts: Texts) -> Tails:
        wholes = [tuple(self._tokenizer.encode(prompt + text)) for text in texts]
        num_shared = min(num_common(token_ids, whole) for whole in wholes)
        first = len(token_ids) - num_shared
        return token_ids[:num_shared], tuple((whole[num_shared:], first) for whole in wholes)

    def _remember(self, key: tuple[str, Texts], found: Tails) -> Tails:
        with self._lock:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if sum(map(len, key[1])) <= MAX_CHARS:
                self._remembered[key] = found
        return found


def check_tails(tails: tuple[Tail, ...]) -> None:
    """Raise InvalidPrompt for a continuation that has no token of its own."""
    for number, (token_ids, first) in enumerate(tails):
        if len(token_ids) <= first:
            raise InvalidPrompt(f"continuation {number} has no token of its own behind the prompt")


def num_common(some: list[int], others: tuple[int, ...]) -> int:
    """First tokens that both have."""
    pairs = zip(some, others, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(some), len(others)))


def _last_words(text: str) -> list[str]:
    """The last word with the white space before it, and without: tokenizers draw the line at either place."""
    end = text[-MAX_LAST_WORD:]
    start = max((i for i, char in enumerate(end) if char.isspace()), default=-1)
    return [end[start:], end[start + 1 :]] if start >= 0 else []
