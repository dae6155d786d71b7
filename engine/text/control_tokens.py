"""ControlTokens: keeps values from forging tokens that open turns, end them or stand for pictures.

BREAK is two characters that Unicode keeps for a program's own use. Where a value spells such a token, BREAK goes behind
the first character of the spelling. If only the beginning of a spelling stands at the value's end, it gets BREAK too,
as the next value may complete it. So neither the template nor the tokenizer sees a token.

Tokens without BREAK are genuine: they are replaced by names that no text has. Then BREAK is taken out, and a second
tokenizer reads the text. It knows the control tokens by these names alone, and splits all else as the first one does.
"""

import json
import re
from collections.abc import Collection, Mapping
from secrets import token_hex
from threading import Lock
from typing import Any

#: `jobs` writes this into filled templates too.
BREAK = "\ufdd0\ufdd1"


class ControlTokens:
    """The control tokens of a tokenizer, for any number of threads at once.

    backend: a tokenizers.Tokenizer, or None. added: the texts of all added tokens. texts: those of control tokens.
    kept: those of control tokens that an assistant's messages may hold.
    """

    def __init__(
        self, backend: Any, added: Collection[str], texts: Collection[str], kept: Collection[str]
    ) -> None:
        self._backend = backend
        self._added_texts = added
        self._kept_texts = kept
        self.texts = frozenset(texts)
        self._added_pattern = _pattern(added)
        self._control = Spellings(self.texts)
        self._in_answers = Spellings(self.texts.difference(kept))
        self._names = {
            text: f"\ufdd2{token_hex(8)}.{number}\ufdd2" for number, text in enumerate(self.texts)
        }
        self._lock = Lock()
        self._literal: Any = None

    def with_texts(self, texts: Collection[str]) -> "ControlTokens":
        """Return a copy with more control tokens; their texts need not be added tokens."""
        return ControlTokens(
            self._backend, self._added_texts, self.texts.union(texts), self._kept_texts
        )

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK in each control token that it spells, at any depth."""
        return self._control.broken(value)

    def broken_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with BREAK in each control token that it spells.

        An assistant's message may hold some control tokens: these get no BREAK there.
        """
        spellings = self._in_answers if message["role"] == "assistant" else self._control
        return {name: spellings.broken(value) for name, value in message.items()}

    def value_encoding(self, text: str) -> Any:
        """Return the tokenizers.Encoding of a value, without special tokens around it."""
        backend = self._literal_tokenizer() if self._control.pattern.search(text) else self._backend
        return backend.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text that may hold BREAK."""
        # While BREAK is still there, only genuine control tokens match.
        named = self._added_pattern.sub(lambda match: self._names.get(match[0], match[0]), text)
        encoding = self._literal_tokenizer().encode(
            named.replace(BREAK, ""), add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def _literal_tokenizer(self) -> Any:
        """Return the tokenizer that knows control tokens by their names alone. The first call makes it."""
        with self._lock:
            if self._literal is None:
                self._literal = _renamed(self._backend, self._names)
            return self._literal


def _pattern(texts: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Spellings:
    """Finds tokens that a value spells: whole ones, and one begun at its end, which the next value may complete."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = _pattern(texts)
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK behind the first character of each spelling."""
        if isinstance(value, str):
            while self.pattern.search(value):  # again, as a token may be within another one
                value = self.pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
            return self._broken_end(value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item) for item in value]
        return value

    def _broken_end(self, text: str) -> str:
        broken = text
        earliest = max(len(text) - self._longest, 0)
        # From the end, as each BREAK moves what follows it.
        for at in reversed(range(earliest, len(text))):
            if text[at:] in self._beginnings:
                broken = broken[: at + 1] + BREAK + broken[at + 1 :]
        return broken


def _renamed(backend: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a tokenizers.Tokenizer in which some added tokens have other texts. Their ids stay."""
    from tokenizers import Tokenizer

    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    renamed = Tokenizer.from_str(json.dumps(content))
    renamed.no_truncation()
    renamed.no_padding()
    return renamed
