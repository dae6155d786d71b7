"""A SentencePiece model file, `tokenizer.model`, as a tokenizer of the tokenizers library.

What transformers 5 makes of such a file for most model types leaves out the space that SentencePiece puts
before a text, and lets ordinary text such as "<0x0A>" become a byte piece. Here the tokens are those of the
SentencePiece library itself, which tests compare. It need not be installed, nor protobuf.
Source: sentencepiece_model.proto of github.com/google/sentencepiece.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SPACE = "\u2581"  # what SentencePiece writes for a space

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


@dataclass
class SentencePieceModel:
    """What the file says that decides about tokens, with the defaults of the format."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    spaces_follow_words: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    denormalizes: bool = False

    def text_of(self, token_id: int) -> str | None:
        """A piece by its id; None for -1, which stands for none."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def is_sentencepiece(path: Path) -> bool:
    """Whether the file begins as such a model does: with a piece. A tiktoken file begins with base64."""
    with path.open("rb") as file:
        return file.read(1) == b"\x0a"


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read the file. Raises ConfigError if it is no such model, or one that computes what is not built."""
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error, TypeError, OSError) as error:
        raise ConfigError(f"{path} is no complete SentencePiece model ({error}); fetch it again") from error
    refusals = {
        f"its model type is {model.model_type}, neither unigram (1) nor BPE (2)": (
            model.model_type not in (UNIGRAM, BPE)
        ),
        "it puts spaces behind words": model.spaces_follow_words,
        "it leaves spaces as they are": not model.escape_whitespaces,
        "it changes the text that it decodes": model.denormalizes,
        "it has unused pieces": any(piece.kind == UNUSED for piece in model.pieces),
        "it has symbols of its own and puts a space before a text": (
            model.add_dummy_prefix and any(piece.kind == USER_DEFINED for piece in model.pieces)
        ),
    }
    for reason, applies in refusals.items():
        if applies:
            raise ConfigError(
                f"{path} cannot be read: {reason}; add the model's tokenizer.json to the folder"
            )
    return model


def build_tokenizer(model: SentencePieceModel) -> Any:
    """The tokenizers.Tokenizer of a model. It adds no token before or behind a text.

    Text that special tokens divide gets the space before it in each part, as Llama 2's tokenizer.json has it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    made: Any
    texts = [piece.text for piece in model.pieces]
    if model.model_type == BPE:
        made = models.BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=_merges(model.pieces),
            unk_token=model.text_of(model.unk_id),
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        made = models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.byte_fallback)
    tokenizer = Tokenizer(made)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_tokens(
        [
            # a symbol of spaces is found only once they are written as in the vocabulary
            AddedToken(piece.text, normalized=SPACE in piece.text, special=piece.kind != USER_DEFINED)
            for piece in model.pieces
            if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )
    return tokenizer


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """All pairs of pieces that give a piece, in the order in which they are merged: the best score first."""
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.kind == NORMAL}
    found = []
    for i, piece in enumerate(pieces):
        if piece.text not in ids:
            continue
        for at in range(1, len(piece.text)):
            left, right = piece.text[:at], piece.text[at:]
            if left in ids and right in ids:
                found.append((-piece.score, i, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _parse(content: bytes) -> SentencePieceModel:
    model, seen = SentencePieceModel(), set()
    for number, value in _fields(content):
        seen.add(number)
        if number == 1:
            model.pieces.append(_parse_piece(value))
        elif number == 2:
            for name, found in _named(value, _TRAINER):
                setattr(model, name, found)
        elif number == 3:
            for name, found in _named(value, _NORMALIZER):
                setattr(model, name, found)
        elif number == 5:
            model.denormalizes = any(number == 2 and value for number, value in _fields(value))
    if not seen >= {1, 2, 3}:
        raise ValueError("it lacks pieces, or how they were made, or how a text is normalized")
    return model


#: Fields of TrainerSpec and NormalizerSpec that decide about tokens: number -> name here.
_TRAINER = {
    3: "model_type",
    24: "spaces_follow_words",
    35: "byte_fallback",
    40: "unk_id",
    41: "bos_id",
    42: "eos_id",
    43: "pad_id",
}
_NORMALIZER = {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}


def _named(content: Any, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    for number, value in _fields(content):
        if number in names:
            name = names[number]
            kind = type(getattr(SentencePieceModel(), name))
            if isinstance(value, bytes) != (kind is bytes):
                raise ValueError(f"its {name} is of a wrong kind")
            # a negative number is written as 2 ** 64 less
            yield name, value if kind is bytes else kind(value - (value >> 63 << 64))


def _parse_piece(content: Any) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(content):
        if number == 1:
            text = value.decode()
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return Piece(text, score, kind)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: its number, and an int or the bytes of it."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        wire = key & 7
        value: Any
        if wire == VARINT:
            value, at = _varint(content, at)
        else:
            if wire == BYTES:
                length, at = _varint(content, at)
            elif wire in (FIXED32, FIXED64):
                length = 4 if wire == FIXED32 else 8
            else:
                raise ValueError(f"a field of the wire type {wire}")
            if at + length > len(content):
                raise ValueError("it ends too soon")
            value, at = content[at : at + length], at + length
        yield key >> 3, value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
