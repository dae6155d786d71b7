"""Reads the identity of a served model: a fingerprint of its files, and the dtype it computes in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from engine.checkpoint.folder import list_weight_files
from engine.errors import MissingWeights

MAX_HEADER_BYTES = 100 << 20  # no checkpoint has a larger one

#: Raise this by one when a code change changes answers: in sampling, rendering, tokenizing, stopping or scoring.
#: Answers of different numbers count as answers of different models: no run mixes them, and `--reuse` takes none.
#: `tests/engine/test_answers_version.py` says when to raise it.
ANSWERS_VERSION = 3


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. dtype: as safetensors names it. start, end: where its data lies in the file, in bytes."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


def check_file(path: Path) -> list[TensorEntry]:
    """Return a file's tensors. Raises MissingWeights if the file is shorter than its header says."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
        data_start = 8 + size  # offsets in the header count from here
        entries = [
            TensorEntry(
                name,
                entry["dtype"],
                entry["shape"],
                *(data_start + offset for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        num_bytes = path.stat().st_size
        num_named = max((entry.end for entry in entries), default=0)
        if num_bytes < num_named:
            raise ValueError(f"it has {num_bytes} bytes, and its header names {num_named}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MissingWeights(
            f"{path} is no complete safetensors file ({error}); fetch it again"
        ) from error
    return entries


#: Files that are read whole: they decide a text's tokens, what is computed of them, and where a text ends.
TEXT_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
#: Patterns of further files that are read whole.
MORE_TEXT_FILES = (
    "additional_chat_templates/*.jinja",
    "*Pooling/config.json",
    "*Dense/config.json",
    "*Dense/*.safetensors",
)

#: A tensor of up to WHOLE_BYTES is read whole; of a larger one, samples of WHOLE_BYTES in all.
WHOLE_BYTES = 1 << 16
NUM_SAMPLES = 16


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a served model.

    fingerprint: 32 hexadecimal digits. dtype: what the model computes in, "float32" or "float32, int8 weights".
    embedding_size: how many numbers an embedding has; 0 if the model gives no embeddings.
    embedding_prompts: the names of the prompts that may stand before a text to embed.
    classes: the labels of its classification head; () without one.
    control_tokens, reads_pictures, generates: filled in by an engine.
    clock_formats: see engine.text.chat_templates.read_clock.
    """

    fingerprint: str
    dtype: str
    embedding_size: int = 0
    embedding_prompts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = field(default=(), compare=False)
    reads_pictures: bool = field(default=True, compare=False)
    generates: bool = field(default=True, compare=False)
    clock_formats: tuple[str, ...] | None = ()


def read_identity(
    folder: Path, dtype: str, chat_template: str | None = None, pooling: str | None = None
) -> ModelIdentity:
    """Return the identity of a folder's model. Raises MissingWeights or another ConfigError.

    dtype: the dtype that the model computes in, followed by every other choice that changes answers, in words.
    chat_template, pooling: the name of a chosen one; None if the checkpoint's own is in use.

    Two models have the same fingerprint if these arguments, ANSWERS_VERSION, the TEXT_FILES and the tensors (name,
    type, shape and values) are the same. How the tensors are divided into files does not matter. A tensor larger than
    64 KiB is sampled, 16 times 4 KiB: another training, merge or rounding shows, an edit of a few values may not.
    """
    digest = blake2b(dtype.encode(), digest_size=16)
    _add(digest, b"answers", str(ANSWERS_VERSION).encode())
    more = sorted(
        str(path.relative_to(folder))
        for pattern in MORE_TEXT_FILES
        for path in folder.glob(pattern)
    )
    for name in (*TEXT_FILES, *more):
        if (folder / name).is_file():
            _add(digest, name.encode(), (folder / name).read_bytes())
    if chat_template is not None:
        _add(digest, b"chat_template", chat_template.encode())
    if pooling is not None:
        _add(digest, b"pooling", pooling.encode())
    tensors = sorted(tensor for path in list_weight_files(folder) for tensor in _read_tensors(path))
    for description, content in tensors:
        _add(digest, description.encode(), content)
    return ModelIdentity(digest.hexdigest(), dtype)


def tensor_names(folder: Path) -> list[str]:
    """Return the names of all tensors of a checkpoint. Raises MissingWeights."""
    return [entry.name for path in list_weight_files(folder) for entry in check_file(path)]


def _add(digest: blake2b, *fields: bytes) -> None:
    for value in fields:  # each with its length, so that no two lists of fields give the same bytes
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)


def _read_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a description (name, dtype, shape) and a digest of the samples of each tensor of a safetensors file."""
    entries = check_file(path)
    with path.open("rb") as file:
        for entry in entries:
            description = json.dumps([entry.name, entry.dtype, entry.shape])
            yield description, _digest_samples(file, entry.start, entry.end - entry.start)


def _digest_samples(file: BinaryIO, start: int, length: int) -> bytes:
    """Hash samples of a tensor's bytes at even distances, or all bytes of a small tensor."""
    digest = blake2b(digest_size=16)
    if length <= WHOLE_BYTES:
        offsets = [0]
        sample = length
    else:
        sample = WHOLE_BYTES // NUM_SAMPLES
        offsets = [(length - sample) * i // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
    for offset in offsets:
        file.seek(start + offset)
        digest.update(file.read(sample))
    return digest.digest()
