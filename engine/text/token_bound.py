"""Bounds a text's tokens from below without tokenizing it, to refuse one far too long at once."""

import json
from collections.abc import Callable, Container
from typing import Any

NORMALIZERS: tuple[list[dict[str, Any]], ...] = ([], [{"type": "NFC"}])

SPACE = "\u2581"  # what SentencePiece writes for a space


def token_bound(tokenizer: Any) -> Callable[[str], int]:
    """Return the function from a text to its least number of tokens; 0 if no bound is known.

    tokenizer: a tokenizers.Tokenizer, or None for one of another library. No token is longer than the longest one, in
    bytes or characters. There is no bound without BPE, nor for tokenizers that may drop or merge characters.
    """
    if tokenizer is None or type(tokenizer.model).__name__ != "BPE":
        return _no_bound
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return _no_bound
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    longest = max(map(len, pieces), default=1)
    contents = [token.content for token in added]
    if _keeps_bytes(tokenizer) and byte_alphabet().keys() <= pieces.keys():
        longest = max([longest, *(len(content.encode()) for content in contents)])
        normalizer = tokenizer.normalizer

        def bound(text: str) -> int:
            if normalizer is not None and not text.isascii():
                text = normalizer.normalize_str(text)
            return -(-len(text.encode()) // longest)

        return bound
    if _keeps_chars(tokenizer, pieces):
        # a token of its own text may also stand for the space that a normalizer put before it
        longest = max([longest, *(len(content) + 1 for content in contents)])
        return lambda text: -(-len(text) // longest)
    return _no_bound


def _no_bound(text: str) -> int:
    return 0


def _keeps_bytes(tokenizer: Any) -> bool:
    """Whether this is byte-level BPE that puts every byte of a text into a token."""
    steps = _steps(tokenizer.pre_tokenizer)
    return (
        _steps(tokenizer.normalizer) in NORMALIZERS
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
    )


def _keeps_chars(tokenizer: Any, pieces: Container[str]) -> bool:
    """Return whether every character comes out in a token: an unknown one might be dropped or merged."""
    writes_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return (
        bool(tokenizer.model.byte_fallback)
        and all(f"<0x{byte:02X}>" in pieces for byte in range(256))
        and not tokenizer.model.continuing_subword_prefix
        and not tokenizer.model.end_of_word_suffix
        and all(step.get("type") == "Prepend" or step == writes_space for step in _steps(tokenizer.normalizer))
        and all(
            (step.get("type") == "Metaspace" and step["replacement"] == SPACE)
            or (step.get("type") in ("Split", "Digits") and step.get("behavior") != "Removed")
            for step in _steps(tokenizer.pre_tokenizer)
        )
    )


def _steps(component: Any) -> list[dict[str, Any]]:
    """List the steps of a normalizer or a pre-tokenizer."""
    if component is None:
        return []
    # to_str() would write the whole vocabulary beside it, in a second or two
    step = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = step.get("normalizers", step.get("pretokenizers", [step]))
    return found


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level BPE writes it as: itself if printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
