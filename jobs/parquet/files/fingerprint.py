"""Makes fingerprints of input files, and checks that a file has not changed since planning."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from jobs.errors import ConvertedInputGone, CorruptParquet, InputChanged
from jobs.parquet.files.storage import Storage, reading
from jobs.runs.plans.names import PARQUET
from jobs.runs.plans.plan import Plan, PlannedFile

#: A Parquet file of at most this many bytes is read whole. The samples of a larger file have this many bytes together.
WHOLE_BYTES = 1 << 16
NUM_SAMPLES = 4

GONE = "it is gone, or no regular file any more"
_CHUNK_BYTES = 1 << 20
#: The last 8 bytes of a Parquet file: the footer's length in 4 bytes, and the magic number PAR1.
_LENGTH_BYTES = 4
_TAIL_BYTES = 8


def file_fingerprint(storage: Storage, path: str, input_format: str = PARQUET) -> str:
    """Return 32 hexadecimal digits that depend only on a file's contents, not on its times.

    If a Parquet file is larger than 64 KiB, only the footer and 4 samples of 16 KiB are read. So an edit in place is
    not noticed if it keeps the sizes and statistics and lies outside the samples. A file of another format is read
    whole. Raises CorruptParquet or InputNotFound.
    """
    digest = blake2b(digest_size=16)
    with reading(path), storage.open_input(path) as file:
        if input_format != PARQUET:
            while chunk := file.read(_CHUNK_BYTES):
                storage.check_interrupted()
                digest.update(chunk)
            return digest.hexdigest()

        size = file.size()
        digest.update(size.to_bytes(8, "little"))
        if size <= WHOLE_BYTES:
            digest.update(file.read_at(size, 0))
            return digest.hexdigest()

        packed_length = file.read_at(_LENGTH_BYTES, size - _TAIL_BYTES)
        footer_bytes = int.from_bytes(packed_length, "little") + _TAIL_BYTES
        if footer_bytes > size:
            raise CorruptParquet(path, f"its footer would have {footer_bytes} bytes")
        # The samples are evenly spaced, from the file's beginning to the footer's beginning.
        sample_bytes = WHOLE_BYTES // NUM_SAMPLES
        # If the footer is nearly the whole file, all samples begin at 0.
        last_start = max(0, size - footer_bytes - sample_bytes)
        for number in range(NUM_SAMPLES):
            start = last_start * number // (NUM_SAMPLES - 1)
            digest.update(file.read_at(sample_bytes, start))
        # The footer is read in pieces, because it may claim to be most of the file.
        for start in range(size - footer_bytes, size, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, size - start)
            digest.update(file.read_at(num_bytes, start))
    return digest.hexdigest()


@contextmanager
def unchanged(storage: Storage, plan: Plan, file: PlannedFile) -> Iterator[None]:
    """Raise InputChanged if the file is not the planned one before or after the body.

    If the run reads a converted file in the input's place, nothing is compared. In this case, ConvertedInputGone is
    raised if the converted file is missing.
    """
    rows_path = plan.rows_path(file)
    if rows_path != file.path:
        if storage.stat(rows_path) is None:
            raise ConvertedInputGone(rows_path, file.path)
        yield
        return
    check_unchanged(storage, file)
    try:
        yield
    finally:  # if the file was replaced meanwhile, that explains any other error
        check_unchanged(storage, file)


def check_unchanged(storage: Storage, file: PlannedFile, input_format: str = PARQUET) -> None:
    """Raise InputChanged if a file is not the planned one.

    If only the file's time or ETag differs from the plan, its fingerprint decides.
    """
    stat = storage.stat(file.path)
    if stat is None:
        raise InputChanged(file.path, GONE)
    if stat.size != file.size:
        raise InputChanged(file.path, f"planned {file.size} bytes, found {stat.size}")
    if (stat.mtime_ns, stat.etag) == (file.mtime_ns, file.etag):
        return
    if file_fingerprint(storage, file.path, input_format) != file.fingerprint:
        raise InputChanged(file.path, f"it has the same {file.size} bytes, but other contents")
