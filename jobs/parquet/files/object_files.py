"""Reaches files in object stores: S3 and stores with its protocol, Google Cloud Storage, Azure Blob Storage.

A store has no folders, links or renames. An object is put there whole or not at all. `publish` copies an object within
the store, and fails if the target exists. The store checks and copies in one request, so a worker that was frozen for a
while cannot overwrite anything.
"""

import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import obstore
import pyarrow as pa
from obstore import exceptions

from jobs.context import never_interrupted
from jobs.errors import InputNotFound
from jobs.parquet.files.filesystem import Entry, FetchedFile, FileStat, StoreRefused, StoreUnfit
from jobs.parquet.files.local_files import root_of
from jobs.parquet.files.object_requests import (
    HAS_ANY,
    LEVEL,
    TRIES_S,
    make_request,
    make_upload_request,
    opened_store,
)
from jobs.runs.plans.names import temporary_name
from jobs.runs.plans.paths import run_path
from sandbox import ChildFailed, Limits, Pool

T = TypeVar("T")
_TASK = "jobs.parquet.files.object_requests:list_prefix"
#: The memory that a listing may take: some thousand bytes for each object.
MEMORY_BYTES = 512 << 20

#: The beginnings of the names of environment variables for stores.
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
#: Children for listings only. These children alone hold a store's credentials, because they ask the store themselves.
_pool = Pool()


def list_in_child(kind: str, folder: str, timeout_s: float) -> Any:
    """Have a child process list a prefix. Raises obstore's errors, or StoreRefused.

    kind: HAS_ANY to return what has_any returns, LEVEL to return what level_of returns.
    """
    scheme, bucket, key = _split(folder)
    environment = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    limits = Limits(timeout_s, MEMORY_BYTES)
    question = {
        "scheme": scheme,
        "bucket": bucket,
        "key": key,
        "kind": kind,
        "timeout_s": timeout_s,
        "environment": environment,
    }
    try:
        reply, _ = _pool.call(lambda child: child.ask(_TASK, question, limits))
    except ChildFailed as error:
        # A listing that is too long would use up the time or memory of a second child too, so it is not tried again.
        raise StoreRefused(folder, f"its listing {error}") from None
    if "raised" in reply:
        # The error is obstore's own, or a FileNotFoundError or a ValueError.
        name = reply["raised"]
        if name == "FileNotFoundError":
            raise FileNotFoundError(reply["text"])
        error_class = getattr(exceptions, name, ValueError)
        raise error_class(reply["text"])
    return reply["answer"]


#: The largest object that a store copies in one request.
MAX_COPY_BYTES = 5 << 30
#: Bytes that are fetched at once from an opened object.
BLOCK_BYTES = 1 << 18
#: Bytes that are uploaded in one request. A smaller object takes a single request. A store takes at most 10,000
#: requests for one object.
CHUNK_BYTES = 8 << 20

#: The most requests of one upload that are sent at once.
_CONCURRENCY = 2
#: The scheme and name of each bucket that was found not to overwrite objects. Shared by all threads.
_safe_buckets: set[tuple[str, str]] = set()


class ObjectFiles:
    """Reaches objects below the data roots that lie in stores. It has the methods of Storage."""

    def __init__(
        self,
        roots: Sequence[str],
        check_interrupted: Callable[[], None] = never_interrupted,
        timeout_s: float = 300.0,
    ) -> None:
        self._roots = tuple(roots)
        self._timeout_s = timeout_s
        self._check_interrupted = check_interrupted

    def resolve(self, path: str) -> str:
        """Return the canonical form of a path. Raises PathOutsideRoots."""
        path = run_path(path)
        root_of(path, self._roots)
        return path

    def stat(self, path: str) -> FileStat | None:
        """Return the state of an object; None if there is none."""
        head = self._head(path)
        if head is None:
            return None
        mtime_ns = int(head["last_modified"].timestamp() * 1e9)
        return FileStat(head["size"], mtime_ns, head["e_tag"] or "")

    def entry(self, path: str) -> Entry | None:
        """Return the object or the prefix with this path; None if there is neither."""
        _, key = self._store_and_key(path)
        name = os.path.basename(path)
        if key and self._head(path) is not None:
            return Entry(name, is_folder=False, is_link=False)
        is_bucket = not key
        if is_bucket or self._has_any(path):
            return Entry(name, is_folder=True, is_link=False)
        return None

    @contextmanager
    def scan(self, folder: str) -> Iterator[Iterator[Entry]]:
        """Lend the entries of a prefix. An object whose name is also a prefix of other objects counts as a folder."""
        _, key = self._store_and_key(folder)
        level = self._level(folder)
        folders = {os.path.basename(prefix) for prefix in level["folders"]}
        # An object may have the prefix itself as its name. That object is not in the folder.
        files = {os.path.basename(path) for path in level["objects"] if path != key}
        yield (Entry(name, is_folder=name in folders, is_link=False) for name in folders | files)

    def written_at(self, folder: str) -> dict[str, int]:
        """Return the Unix time, in nanoseconds, at which each object of a prefix was written. The keys are names."""
        objects = self._level(folder)["objects"]
        return {os.path.basename(path): written_at for path, written_at in objects.items()}

    def make_folder(self, path: str) -> None:
        """Check that the store is fit for a run's folder. Nothing is made, because a store has no folders.

        Raises StoreUnfit if the store overwrites existing objects: two workers could overwrite each other's parts.
        """
        store, key = self._store_and_key(path)
        scheme, bucket, _ = _split(path)
        if (scheme, bucket) in _safe_buckets:
            return

        # An object is copied twice to the same key. A safe store refuses the second copy.
        probe_name = temporary_name(secrets.token_hex(8), "_probe")
        probe = f"{key}/{probe_name}".lstrip("/")  # the key of a whole bucket is empty
        target = f"{probe}.tmp"
        copy_probe = partial(obstore.copy, store, probe, target, overwrite=False)
        try:
            self._make_request(path, lambda: obstore.put(store, probe, b"probe"))
            with suppress(FileExistsError):  # raised if the reply to a first try was lost
                self._make_request(path, copy_probe)
            try:
                self._make_request(path, copy_probe)
            except FileExistsError:
                _safe_buckets.add((scheme, bucket))
            else:
                raise StoreUnfit(path, "overwrites what is there (it ignores If-None-Match)")
        finally:
            for written_key in (probe, target):
                with suppress(FileNotFoundError):
                    self._make_request(path, partial(obstore.delete, store, written_key))

    def open_input(self, path: str) -> Any:
        """Open an object for pyarrow. All reads see the same state of the object. Raises InputNotFound."""
        store, key = self._store_and_key(path)
        head = self._head(path)
        if head is None:
            raise InputNotFound(path)
        same_state = {"if_match": head["e_tag"]} if head["e_tag"] else {}

        def fetch(start: int, end: int) -> bytes:
            """Get a range of bytes. Raises PathSwapped if the object has changed since it was opened."""
            options: Any = {"range": (start, end), **same_state}
            return self._make_request(
                path, lambda: bytes(obstore.get(store, key, options=options).bytes())
            )

        fetched_file = FetchedFile(fetch, head["size"])
        return pa.PythonFile(io.BufferedReader(fetched_file, BLOCK_BYTES), mode="r")

    @contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        """Lend a file whose bytes become an object at the end of the body. An error leaves no object."""
        # We do not keep written bytes, so only obstore itself can repeat an upload's requests.
        store, key = self._store_and_key(path, tries_s=self._timeout_s)
        upload = obstore.open_writer(
            store, key, buffer_size=CHUNK_BYTES, max_concurrency=_CONCURRENCY
        )
        try:
            yield pa.PythonFile(_Writer(path, upload, self._check_interrupted), "w")
            make_upload_request(path, upload.close, self._check_interrupted)
        except BaseException as error:
            with suppress(exceptions.BaseError, OSError, ValueError):  # the earlier error says more
                upload.__exit__(type(error), error, error.__traceback__)
            raise

    def create(self, path: str) -> None:
        """Make an empty object. Raises FileExistsError."""
        store, key = self._store_and_key(path)
        self._make_request(path, lambda: obstore.put(store, key, b"", mode="create"))

    def publish(self, temporary: str, target: str) -> None:
        """Copy a temporary object to the name `target`. Raises FileExistsError if the name is taken.

        FileExistsError is also raised if the reply to the copy was lost: a repeated request finds the copy there.
        """
        store, key = self._store_and_key(target)
        _, temporary_key = self._store_and_key(temporary)
        head = self._head(temporary)
        # If the temporary object is missing, the copy raises FileNotFoundError.
        if head is None or head["size"] <= MAX_COPY_BYTES:
            self._make_request(
                target, lambda: obstore.copy(store, temporary_key, key, overwrite=False)
            )
        elif self._head(target) is not None:
            raise FileExistsError(target)
        else:
            # If two workers come here at once, the slower worker replaces the faster worker's object.
            with self.open_input(temporary) as whole, self.open_output(target) as sink:
                while chunk := whole.read(CHUNK_BYTES):
                    sink.write(chunk)

    def remove(self, path: str) -> None:
        """Remove an object."""
        store, key = self._store_and_key(path)
        # In a bucket with versions, the removal of a missing object would add a delete marker.
        if self._head(path) is not None:
            self._make_request(path, lambda: obstore.delete(store, key))

    def _head(self, path: str) -> Any:
        """Return what the store knows of an object; None if there is no object."""
        store, key = self._store_and_key(path)
        try:
            return self._make_request(path, lambda: obstore.head(store, key))
        except FileNotFoundError:
            return None
        except StoreRefused:
            # The reply to a HEAD has no text. The reply to a GET says why the store refuses.
            self._make_request(path, lambda: obstore.get_range(store, key, start=0, length=1))
            raise

    def _has_any(self, folder: str) -> bool:
        """Whether there is any object below a prefix. Raises PathOutsideRoots."""
        root_of(folder, self._roots)  # raises if the folder is below no root
        answer = self._make_request(folder, lambda: list_in_child(HAS_ANY, folder, self._timeout_s))
        return bool(answer)

    def _level(self, folder: str) -> dict[str, Any]:
        """Return the `folders` and `objects` of a prefix, see object_requests.level_of. Raises PathOutsideRoots."""
        root_of(folder, self._roots)  # raises if the folder is below no root
        level: dict[str, Any] = self._make_request(
            folder, lambda: list_in_child(LEVEL, folder, self._timeout_s)
        )
        return level

    def _make_request(self, path: str, request: Callable[[], T]) -> T:
        """Make a request, and return the store's answer. path: for errors."""
        return make_request(path, request, self._check_interrupted, self._timeout_s)

    def _store_and_key(self, path: str, tries_s: float = TRIES_S) -> tuple[Any, str]:
        """Return obstore's client of a path's bucket, and the path's key. Raises PathOutsideRoots."""
        root_of(path, self._roots)
        scheme, bucket, key = _split(path)
        return opened_store(scheme, bucket, self._timeout_s, tries_s), key


def _split(path: str) -> tuple[str, str, str]:
    """Return a path's scheme, bucket and key."""
    scheme, _, bucket_and_key = path.partition("://")
    bucket, _, key = bucket_and_key.partition("/")
    return scheme, bucket, key


class _Writer:
    """A Python file through which pyarrow writes an object."""

    closed = False  # pyarrow looks at this attribute

    def __init__(self, path: str, upload: Any, check_interrupted: Callable[[], None]) -> None:
        """upload: obstore's writer, which puts an object of one chunk in one request. path: shown in errors."""
        self._path = path
        self._upload = upload
        self._check_interrupted = check_interrupted

    def write(self, data: Any) -> int:
        """Upload bytes; return how many."""
        make_upload_request(
            self._path, lambda: self._upload.write(bytes(data)), self._check_interrupted
        )
        return len(data)

    def flush(self) -> None:
        """Do nothing. The object does not exist before the upload is closed."""

    close = flush
