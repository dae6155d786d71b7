"""Reads a SentencePiece model file, `tokenizer.model`, as a tokenizer of the tokenizers library.

transformers 5 leaves out SentencePiece's space before a text for most model types, and lets text such as "<0x0A>"
become a byte piece. Here the tokens are those of the SentencePiece library; tests compare them. Neither the library
nor protobuf need be installed. Source: sentencepiece_model.proto of github.com/google/sentencepiece.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SPACE = "\u2581"  # what SentencePiece writes for a space
UNIGRAM = 1
BPE = 2
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
NO_SCORE = struct.pack("<f", 0)


def read_sentencepiece(path: Path) -> tuple[Any, dict[str, str]]:
    """Return a file's tokenizers.Tokenizer, which adds no tokens to a text, and its special tokens by name.

    Raises ConfigError if the file is no SentencePiece model, or has a feature that is not built here. The numbers below
    are those of the fields in sentencepiece_model.proto.
    """
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(dict(_fields(value))) for number, value in fields if number == 1]
        parts = {number: dict(_fields(value)) for number, value in fields if number in (2, 3, 5)}
        trainer = parts[2]
        normalizer = parts[3]
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise ConfigError(
            f"{path} is no complete SentencePiece model ({error!r}); fetch it again, or add the model's "
            "tokenizer.json to the folder"
        ) from error
    has_prefix = normalizer.get(3, 1)
    kinds = {kind for _, _, kind in pieces}
    refusals = {
        "its model type is neither unigram nor BPE": trainer.get(3, UNIGRAM) not in (UNIGRAM, BPE),
        "it puts spaces behind words": trainer.get(24),
        "it leaves spaces as they are": not normalizer.get(5, 1),
        "it changes the text that it decodes": parts.get(5, {}).get(2),
        "it has unused pieces": UNUSED in kinds,
        "it has symbols of its own and puts a space before a text": has_prefix
        and USER_DEFINED in kinds,
    }
    for reason, applies in refusals.items():
        if applies:
            raise ConfigError(
                f"{path} cannot be read: {reason}; add the model's tokenizer.json to the folder"
            )
    ids = {
        "unk_token": trainer.get(40, 0),
        "bos_token": trainer.get(41, 1),
        "eos_token": trainer.get(42, 2),
        "pad_token": trainer.get(43, -1),
    }
    # -1 is read as 2 ** 64 - 1.
    names = {name: pieces[i][0] for name, i in ids.items() if 0 <= i < len(pieces)}
    return _build(pieces, trainer, normalizer), names


def _build(
    pieces: list[tuple[str, float, int]], trainer: dict[int, Any], normalizer: dict[int, Any]
) -> Any:
    """Build the tokenizer. Special tokens cut a text into parts, and each gets a space before it, as in Llama 2."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    made: Any
    unk_id = trainer.get(40, 0)
    byte_fallback = bool(trainer.get(35))
    if trainer.get(3, UNIGRAM) == BPE:
        vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
        unk = pieces[unk_id][0]
        merges = _merges(pieces)
        made = models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)
    else:
        made = models.Unigram([(text, score) for text, score, _ in pieces], unk_id, byte_fallback)
    tokenizer = Tokenizer(made)
    before: list[Any] = [normalizers.Precompiled(normalizer[2])] if normalizer.get(2) else []
    after: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    removes_extra_spaces = normalizer.get(4, 1)
    if removes_extra_spaces:
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = normalizer.get(3, 1)
    if has_prefix:
        before.append(normalizers.Prepend(SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(after)
    tokenizer.add_tokens(
        [
            # a symbol with spaces is found only after spaces are written as in the vocabulary
            AddedToken(text, normalized=SPACE in text, special=kind != USER_DEFINED)
            for text, _, kind in pieces
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """List the pairs of pieces that make up another one, in the order of merging: the best score first."""
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    return [
        (text[:at], text[at:])
        for text in sorted(scores, key=scores.__getitem__, reverse=True)
        for at in range(1, len(text))
        if text[:at] in scores and text[at:] in scores
    ]


def _piece(fields: dict[int, Any]) -> tuple[str, float, int]:
    """Read a piece's text, score and kind."""
    (score,) = struct.unpack("<f", fields.get(2, NO_SCORE))
    return fields[1].decode(), score, fields.get(3, NORMAL)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: their numbers, and an int or the bytes of each."""
    at = 0

    def varint() -> int:
        # Each byte holds seven bits of the number, the lowest first. Its top bit says that another byte follows.
        nonlocal at
        start = at
        while content[at] > 127:
            at += 1
        at += 1
        return sum((byte & 127) << 7 * i for i, byte in enumerate(content[start:at]))

    while at < len(content):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        length = {1: 8, 5: 4}.get(wire) or varint()  # wire types 1 and 5 have a fixed size
        if wire not in (1, 2, 5) or at + length > len(content):
            raise ValueError(f"field {number} of wire type {wire} ends too soon")
        at += length
        yield number, content[at - length : at]
