"""TokenBound: how many tokens a text has at least, known without tokenizing it."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORMALIZERS: tuple[list[dict[str, Any]], ...] = ([], [{"type": "NFC"}])
MOST_NFC_SAVES = 4  # of so many bytes at least one is left; a test asks Unicode's tables

SPACE = "\u2581"  # what SentencePiece writes for a space
NUM_CHARS = 0x110000
NUM_BYTES = 256

Weights = NDArray[np.float64]


class TokenBound:
    """A lower bound for BPE whose tokens stand for all of a text, in bytes or in characters; 0 for others.

    If a byte counts 1 / n, n being the length of the longest token that holds it, then no token counts more
    than 1, and a text has at least as many tokens as its bytes count together. With vocabularies of
    SentencePiece it is characters that count, and one that is in no token counts as many as it has bytes. A
    tokenizer that may drop or merge what is in a text (other normalizers, split characters that are removed,
    tokens that swallow the spaces around them, what no token stands for) has no such bound.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a tokenizers.Tokenizer, or None for one of another library."""
        self._count: Callable[[str], float] = lambda text: 0.0
        if tokenizer is None:
            return
        added = tokenizer.get_added_tokens_decoder().values()
        if type(tokenizer.model).__name__ != "BPE" or any(token.lstrip or token.rstrip for token in added):
            return
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        contents = [token.content for token in added]
        if _keeps_bytes(tokenizer):
            self._count = _ByteCount(byte_weights(vocabulary, contents), tokenizer.normalizer)
        elif _keeps_chars(tokenizer):
            as_bytes = bool(tokenizer.model.byte_fallback)
            self._count = _CharCount(char_weights(vocabulary, contents, as_bytes=as_bytes))

    def __call__(self, text: str) -> int:
        """Tokens that `text` has at least, whatever the tokenizer makes of it."""
        return math.ceil(self._count(text) * (1 - 1e-9))  # rounding must not add a token


class _ByteCount:
    """normalizer: NFC or None."""

    def __init__(self, weights: Weights, normalizer: Any) -> None:
        self._weights, self._normalizer = weights, normalizer

    def __call__(self, text: str) -> float:
        content = text.encode(errors="replace")
        if text.isascii() or self._normalizer is None or self._normalizer.normalize_str(text) == text:
            counts = np.bincount(np.frombuffer(content, np.uint8), minlength=NUM_BYTES)
            return float(counts @ self._weights)
        return len(content) * float(self._weights.min()) / MOST_NFC_SAVES


class _CharCount:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, text: str) -> float:
        return float(self._weights[_codes(text)].sum())


def _keeps_bytes(tokenizer: Any) -> bool:
    """Whether this is byte-level BPE that puts every byte of a text into a token."""
    steps = _steps(tokenizer.pre_tokenizer)
    return (
        _steps(tokenizer.normalizer) in NORMALIZERS
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
    )


def _keeps_chars(tokenizer: Any) -> bool:
    """Whether every character of a text comes out in a token, a space maybe written as another character."""
    writes_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return (
        not tokenizer.model.continuing_subword_prefix
        and not tokenizer.model.end_of_word_suffix
        and all(
            step.get("type") == "Prepend" or step == writes_space for step in _steps(tokenizer.normalizer)
        )
        and all(
            (step.get("type") == "Metaspace" and step["replacement"] == SPACE)
            or (step.get("type") in ("Split", "Digits") and step.get("behavior") != "Removed")
            for step in _steps(tokenizer.pre_tokenizer)
        )
    )


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer; none if there is none."""
    if component is None:
        return []
    # to_str() would write the whole vocabulary beside it, in a second or two
    step = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = step.get("normalizers", step.get("pretokenizers", [step]))
    return found


def byte_weights(vocabulary: Iterable[str], added: Iterable[str]) -> Weights:
    """What each byte counts, [256]; all 0 if there is one that no token stands for."""
    alphabet = byte_alphabet()
    pieces = set(vocabulary)
    if not alphabet.keys() <= pieces:
        return np.zeros(NUM_BYTES)
    by_char = _longest(pieces)
    longest = np.zeros(NUM_BYTES)
    for char, byte in alphabet.items():
        longest[byte] = by_char[ord(char)]
    for content in map(str.encode, added):
        for byte in content:
            longest[byte] = max(longest[byte], len(content))
    return np.asarray(1 / longest)


def char_weights(vocabulary: Iterable[str], added: Iterable[str], *, as_bytes: bool) -> Weights:
    """What each character counts, [all of Unicode]. as_bytes: one that is no piece becomes its bytes."""
    pieces = set(vocabulary)
    as_bytes = as_bytes and {f"<0x{byte:02X}>" for byte in range(256)} <= pieces
    longest = _longest(pieces)
    # a token of its own text may also stand for the space that a normalizer put before it
    for content in added:
        codes = _codes(content + SPACE)
        longest[codes] = np.maximum(longest[codes], len(content) + 1)
    weights = np.zeros(NUM_CHARS)
    if as_bytes:
        weights[:] = 1.0  # at least: each of its bytes is a token
        found = longest > 0
    else:
        found = np.zeros(NUM_CHARS, bool)
        found[[ord(piece) for piece in pieces if len(piece) == 1]] = True
    weights[found] = 1 / longest[found]
    weights[ord(" ")] = min(weights[ord(" ")], weights[ord(SPACE)])
    return weights


def _longest(pieces: Iterable[str]) -> Weights:
    """The length of the longest piece that holds a character, [all of Unicode]; 0 if none does."""
    longest = np.zeros(NUM_CHARS)
    in_order = sorted(pieces, key=len)
    lengths = np.array([len(piece) for piece in in_order], np.int64)
    longest[_codes("".join(in_order))] = np.repeat(lengths, lengths)  # of several places the last counts
    return longest


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32)


def byte_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level BPE writes it as: itself where that can be printed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
