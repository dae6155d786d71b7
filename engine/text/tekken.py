"""Reads Mistral's `tekken.json`: the parts whose join has the lowest rank are merged first."""

import base64
import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


def read_tekken(path: Path) -> tuple[Any, list[str]]:
    """Return the tokenizers.Tokenizer of a tekken.json, and its special tokens in the order of their ids.

    Raises ConfigError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        special = [
            str(token["token_str"]) for token in sorted(content["special_tokens"], key=lambda each: int(each["rank"]))
        ]
        num_special = int(config.get("default_num_special_tokens") or len(special))
        special += [f"<SPECIAL_{number}>" for number in range(len(special), num_special)]
        entries = content["vocab"]
        if config.get("default_vocab_size"):
            entries = entries[: int(config["default_vocab_size"]) - num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
        return _build(ranks, str(config["pattern"]), special), special
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no tekken vocabulary ({error!r}); fetch it again") from error


def _build(ranks: dict[bytes, int], split: str, special: list[str]) -> Any:
    """Build it of ranks by runs of bytes, a word's regular expression, and the special tokens, which come first."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    chars = {byte: char for char, byte in byte_alphabet().items()}
    written = {token: "".join(chars[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[left], written[right]) for left, right in known]
    vocab = {text: i for i, text in enumerate(special)}
    vocab |= {written[token]: rank + len(special) for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level BPE writes it as: itself if printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
