"""TokenBound: how many tokens a text has at least, known without tokenizing it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORMALIZERS = (None, {"type": "NFC"})
MOST_NFC_SAVES = 4  # of so many bytes at least one is left; a test asks Unicode's tables


class TokenBound:
    """A lower bound for byte-level BPE, whose tokens stand for all bytes of a text; 0 for other tokenizers.

    If a byte counts 1 / n, n being the length of the longest token that holds it, then no token counts more
    than 1, and a text has at least as many tokens as its bytes count together. A tokenizer that may drop or
    merge what is in a text (other normalizers, split characters that are removed, tokens that swallow the
    spaces around them, bytes that no token stands for) has no such bound.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a tokenizers.Tokenizer, or None for one of another library."""
        self._weights: NDArray[np.float64] = np.zeros(256)
        self._normalizer: Any = None
        if tokenizer is None:
            return
        parts = json.loads(tokenizer.to_str())
        added = parts.get("added_tokens") or []
        if not _keeps_all(parts, added):
            return
        self._normalizer = tokenizer.normalizer
        self._weights = _weights(
            tokenizer.get_vocab(with_added_tokens=False), [token["content"].encode() for token in added]
        )

    def __call__(self, text: str) -> int:
        """Tokens that `text` has at least, whatever the tokenizer makes of it."""
        content = text.encode(errors="replace")
        if text.isascii() or self._normalizer is None or self._normalizer.normalize_str(text) == text:
            counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
            count = float(counts @ self._weights)
        else:
            count = len(content) * float(self._weights.min()) / MOST_NFC_SAVES
        return math.ceil(count * (1 - 1e-9))  # rounding must not add a token


def _keeps_all(parts: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether this is byte-level BPE of which every byte of a text comes out in a token."""
    splits = parts.get("pre_tokenizer") or {}
    steps = splits.get("pretokenizers", [splits])
    return (
        parts["model"].get("type") == "BPE"
        and parts.get("normalizer") in NORMALIZERS
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    )


def _weights(vocabulary: Iterable[str], added: list[bytes]) -> NDArray[np.float64]:
    """What each byte counts; all 0 if there is one that no token stands for."""
    alphabet = _byte_alphabet()
    longest: dict[int, int] = {}
    for token in sorted(vocabulary, key=len, reverse=True):
        for char in set(token):
            if char in alphabet:
                longest.setdefault(alphabet[char], len(token))
        if len(longest) == 256:
            break
    if len(longest) < 256 or not alphabet.keys() <= set(vocabulary):
        return np.zeros(256)
    for content in added:
        for byte in content:
            longest[byte] = max(longest[byte], len(content))
    return np.array([1 / longest[byte] for byte in range(256)])


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level BPE writes it as: itself where that can be printed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
