"""ControlTokens: keeps what values spell from becoming tokens that open turns, end them or stand for pictures.

A value's spelling of such a token gets BREAK behind its first character, so that neither a template's own text nor the
tokenizer's search meets it; so does a spelling that is begun at its end, which the next value may go on with. Once the
other tokens are found, a second tokenizer reads the text without BREAK: it knows the same tokens by names that no text
has, and therefore splits as the first one does.
"""

import json
import re
from collections.abc import Collection, Mapping
from secrets import token_hex
from threading import Lock
from typing import Any

#: Of two characters that Unicode keeps for a program's own use. `jobs` writes it into filled templates.
BREAK = "\ufdd0\ufdd1"


class ControlTokens:
    """The control tokens of a tokenizer, for any number of threads at once.

    backend: a tokenizers.Tokenizer; None knows none. added: the texts of all added tokens. texts: those that control.
    kept: those that an assistant's messages may hold.
    """

    def __init__(self, backend: Any, added: Collection[str], texts: Collection[str], kept: Collection[str]) -> None:
        self._backend, self._added_texts, self._kept_texts = backend, added, kept
        self.texts = frozenset(texts)
        self._added = _pattern(added)
        self._control, self._in_answers = _Spellings(self.texts), _Spellings(self.texts.difference(kept))
        self._names = {text: f"\ufdd2{token_hex(8)}.{number}\ufdd2" for number, text in enumerate(self.texts)}
        self._lock = Lock()
        self._literal: Any = None

    def with_texts(self, texts: Collection[str]) -> "ControlTokens":
        """Return the same with more texts that control, added tokens or not."""
        return ControlTokens(self._backend, self._added_texts, self.texts.union(texts), self._kept_texts)

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK in each control token that one of its texts spells."""
        return self._control.broken(value)

    def broken_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with BREAK in each control token that one of its texts spells."""
        spellings = self._in_answers if message["role"] == "assistant" else self._control
        return {name: spellings.broken(value) for name, value in message.items()}

    def value_encoding(self, text: str) -> Any:
        """Return the tokenizers.Encoding of a value, without special tokens around it."""
        backend = self._literal_tokenizer() if self._control.pattern.search(text) else self._backend
        return backend.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text that may hold BREAK."""
        named = self._added.sub(lambda match: self._names.get(match[0], match[0]), text).replace(BREAK, "")
        return list(self._literal_tokenizer().encode(named, add_special_tokens=add_special_tokens).ids)

    def _literal_tokenizer(self) -> Any:
        """Return the tokenizer that knows control tokens by their names alone; it is made when first needed."""
        with self._lock:
            if self._literal is None:
                self._literal = _renamed(self._backend, self._names)
            return self._literal


def _pattern(texts: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class _Spellings:
    """Finds what values spell of some tokens: whole ones, and how one begins at a value's end, for the next goes on."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = _pattern(texts)
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK behind the first character of each spelling in its texts."""
        if isinstance(value, str):
            while self.pattern.search(value):  # again for a token within another one
                value = self.pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
            return self._broken_end(value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(each) for each in value]
        return value

    def _broken_end(self, text: str) -> str:
        broken = text
        for at in range(len(text) - 1, max(len(text) - self._longest, 0) - 1, -1):
            if text[at:] in self._beginnings:
                broken = broken[: at + 1] + BREAK + broken[at + 1 :]
        return broken


def _renamed(backend: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a tokenizers.Tokenizer with other texts for some of its added tokens, at the same ids."""
    from tokenizers import Tokenizer

    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    renamed = Tokenizer.from_str(json.dumps(content))
    renamed.no_truncation()
    renamed.no_padding()
    return renamed
