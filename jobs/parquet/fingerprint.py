"""What tells an input file from another one, whenever it was written."""

from __future__ import annotations

from hashlib import blake2b

from jobs.errors import CorruptParquet
from jobs.parquet.storage import Storage, reading
from jobs.runs.plans.formats import PARQUET

#: Read besides the footer: a file of at most so many bytes whole, of a larger one as many in samples.
WHOLE_BYTES = 1 << 16
NUM_SAMPLES = 4

_CHUNK_BYTES = 1 << 20

_TAIL = 8  # bytes at a file's end: the footer's length, and Parquet's mark


def file_fingerprint(storage: Storage, path: str, input_format: str = PARQUET) -> str:
    """Return 32 hexadecimal digits that depend on a file's contents alone, not on its times.

    Of a Parquet file beyond 64 KiB only the footer and 4 samples of 16 KiB, evenly spaced, are read. The
    footer holds row counts, offsets and sizes of all column chunks, and their statistics: what a writer
    changes shows there, or shifts what comes after it. An edit in place that keeps every size and every
    minimum and maximum, outside of the samples, is not found. Any other file has nothing that tells of the
    rest of it, and is read whole. Raises CorruptParquet or InputNotFound.
    """
    digest = blake2b(digest_size=16)
    if input_format != PARQUET:
        return _of_all(storage, path, digest)
    with reading(path), storage.open_input(path) as file:
        size = file.size()
        digest.update(size.to_bytes(8, "little"))
        if size <= WHOLE_BYTES:
            digest.update(file.read_at(size, 0))
            return digest.hexdigest()
        footer = int.from_bytes(file.read_at(4, size - _TAIL), "little") + _TAIL
        if footer > size:
            raise CorruptParquet(path, f"its footer would have {footer} bytes")
        sample = WHOLE_BYTES // NUM_SAMPLES
        for number in range(NUM_SAMPLES):
            digest.update(file.read_at(sample, max(0, size - footer - sample) * number // (NUM_SAMPLES - 1)))
        digest.update(file.read_at(footer, size - footer))
    return digest.hexdigest()


def prefix_fingerprint(storage: Storage, path: str, size: int) -> str:
    """Return what the fingerprint of a file of text would be if it ended after so many bytes."""
    return _of_all(storage, path, blake2b(digest_size=16), size)


def _of_all(storage: Storage, path: str, digest: blake2b, most: int | None = None) -> str:
    with reading(path), storage.open_input(path) as file:
        left = file.size() if most is None else most
        while chunk := file.read(min(_CHUNK_BYTES, left)):
            storage.check_interrupted()
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()
