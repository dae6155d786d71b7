"""Files in object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

A store has no folders, links or renames. What takes their place: an object is put there whole or not at all;
`publish` is a copy within the store that fails where its target is, one request, whenever a worker that was frozen
sends it.
"""

import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import obstore
import pyarrow as pa
from obstore import exceptions

from jobs.context import never_interrupted
from jobs.errors import InputNotFound
from jobs.parquet.files.filesystem import Entry, FetchedFile, FileStat, StoreRefused, StoreUnfit
from jobs.parquet.files.local_files import root_of
from jobs.parquet.files.object_requests import TRIES_S, make_request, opened_store
from jobs.runs.plans.names import temporary_name
from jobs.runs.plans.paths import run_path
from sandbox import ChildFailed, Limits, Pool

T = TypeVar("T")
_TASK = "jobs.parquet.files.object_requests:list_prefix"
#: What a listing may take: some thousand bytes for each object.
MEMORY_BYTES = 512 << 20

_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
#: Of their own: these children, alone of all, hold a store's credentials, as obstore asks the store itself.
_pool = Pool()


def listed(kind: str, folder: str, timeout_s: float) -> Any:
    """Return what a listing of a kind tells of a prefix. Raises what obstore does, and StoreRefused without an end."""
    question: dict[str, Any] = dict(zip(("scheme", "bucket", "key"), _split(folder), strict=True))
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    question |= {"kind": kind, "timeout_s": timeout_s, "environment": variables}
    try:
        reply, _ = _pool.call(lambda child: child.ask(_TASK, question, Limits(timeout_s, MEMORY_BYTES)))
    except ChildFailed as error:
        raise StoreRefused(folder, f"its listing {error}") from None
    if "raised" in reply:
        raise getattr(exceptions, reply["raised"], ValueError)(reply["text"])
    return reply["found"]


MAX_COPY_BYTES = 5 << 30
BLOCK_BYTES = 1 << 18
#: Uploaded at once; a smaller object goes in one request. A store takes at most 10,000 such parts of one.
CHUNK_BYTES = 8 << 20

_CONCURRENCY = 2
#: The buckets that have shown that they keep what is there. Shared by all threads.
_fit: set[tuple[str, str]] = set()


class ObjectFiles:
    """Objects below the data roots that are prefixes in stores; see Storage for its methods."""

    def __init__(
        self, roots: Sequence[str], check_interrupted: Callable[[], None] = never_interrupted, timeout_s: float = 300.0
    ) -> None:
        self._roots, self._timeout_s = tuple(roots), timeout_s
        self._check_interrupted = check_interrupted

    def resolve(self, path: str) -> str:
        path = run_path(path)
        self._place(path)
        return path

    def stat(self, path: str) -> FileStat | None:
        found = self._head(path)
        return found and FileStat(found["size"], int(found["last_modified"].timestamp() * 1e9), found["e_tag"] or "")

    def look(self, path: str) -> Entry | None:
        key, name = self._place(path)[1], os.path.basename(path)
        if key and self._head(path) is not None:
            return Entry(name, False, False)
        return Entry(name, True, False) if not key or self._list("has_any", path) else None

    @contextmanager
    def scan(self, folder: str) -> Iterator[Iterator[Entry]]:
        """Lend what a prefix holds; an object that is a prefix of others counts as a folder."""
        key, found = self._place(folder)[1], self._list("level", folder)
        folders = {os.path.basename(prefix) for prefix in found["folders"]}
        files = {os.path.basename(path) for path in found["objects"] if path != key}
        yield (Entry(name, name in folders, False) for name in folders | files)

    def written_at(self, folder: str) -> dict[str, int]:
        objects = self._list("level", folder)["objects"]
        return {os.path.basename(path): written_at for path, written_at in objects.items()}

    def make_folder(self, path: str) -> None:
        """Nothing is to be made. Raises StoreUnfit where two workers could overwrite each other's parts."""
        store, key = self._place(path)
        place = _split(path)[:2]
        if place in _fit:
            return
        name = f"{key}/{temporary_name(secrets.token_hex(8), '_probe')}".lstrip("/")
        try:
            self._make(path, lambda: obstore.put(store, name, b"probe"))
            with suppress(FileExistsError):  # the reply to a first try was lost
                self._make(path, lambda: obstore.copy(store, name, f"{name}.tmp", overwrite=False))
            try:
                self._make(path, lambda: obstore.copy(store, name, f"{name}.tmp", overwrite=False))
            except FileExistsError:
                _fit.add(place)
            else:
                raise StoreUnfit(path, "overwrites what is there (it heeds no If-None-Match)")
        finally:
            for each in (name, f"{name}.tmp"):
                with suppress(FileNotFoundError):
                    self._make(path, lambda each=each: obstore.delete(store, each))  # type: ignore[misc]

    def open_input(self, path: str) -> Any:
        store, key = self._place(path)
        found = self._head(path)
        if found is None:
            raise InputNotFound(path)
        own = {"if_match": found["e_tag"]} if found["e_tag"] else {}

        def fetch(start: int, end: int) -> bytes:
            options: Any = {"range": (start, end), **own}
            return self._make(path, lambda: bytes(obstore.get(store, key, options=options).bytes()))

        return pa.PythonFile(io.BufferedReader(FetchedFile(fetch, found["size"]), BLOCK_BYTES), mode="r")

    @contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        """Lend an object that is written. It is there, whole, once the body has ended; never where that raises."""
        store, key = self._place(path, self._timeout_s)
        upload = obstore.open_writer(store, key, buffer_size=CHUNK_BYTES, max_concurrency=_CONCURRENCY)
        try:
            yield pa.PythonFile(_Writer(path, upload, self._check_interrupted), "w")
            make_request(path, upload.close, self._check_interrupted)
        except BaseException as error:
            with suppress(exceptions.BaseError, OSError, ValueError):  # what was raised says more
                upload.__exit__(type(error), error, error.__traceback__)
            raise

    def create(self, path: str) -> None:
        store, key = self._place(path)
        self._make(path, lambda: obstore.put(store, key, b"", mode="create"))

    def publish(self, temporary: str, target: str) -> None:
        """Publish; a FileExistsError may be of this very copy, if its reply was lost: what counts is there."""
        store, key = self._place(target)
        source = self._place(os.path.join(os.path.dirname(target), os.path.basename(temporary)))[1]
        found = self._head(temporary)
        if found is None or found["size"] <= MAX_COPY_BYTES:
            self._make(target, lambda: obstore.copy(store, source, key, overwrite=False))
        elif self._head(target) is not None:
            raise FileExistsError(target)
        else:  # of two that look at once, the second replaces what the first has put
            with self.open_input(temporary) as whole, self.open_output(target) as sink:
                while chunk := whole.read(CHUNK_BYTES):
                    sink.write(chunk)

    def remove(self, path: str) -> None:
        store, key = self._place(path)
        if self._head(path) is not None:  # or a bucket with versions would note that it is gone
            self._make(path, lambda: obstore.delete(store, key))

    def _head(self, path: str) -> Any:
        store, key = self._place(path)
        try:
            return self._make(path, lambda: obstore.head(store, key))
        except FileNotFoundError:
            return None
        except StoreRefused:  # the reply to a HEAD has no text; another one says why
            self._make(path, lambda: obstore.get_range(store, key, start=0, length=1))
            raise

    def _list(self, kind: str, folder: str) -> Any:
        self._place(folder)
        return self._make(folder, lambda: listed(kind, folder, self._timeout_s))

    def _make(self, path: str, request: Callable[[], T]) -> T:
        return make_request(path, request, self._check_interrupted, self._timeout_s)

    def _place(self, path: str, tries_s: float = TRIES_S) -> tuple[Any, str]:
        root_of(path, self._roots)
        scheme, bucket, key = _split(path)
        return opened_store(scheme, bucket, self._timeout_s, tries_s), key


def _split(path: str) -> tuple[str, str, str]:
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return scheme, bucket, key


class _Writer:
    """What pyarrow needs of a Python file that it writes; of its requests obstore alone makes some again."""

    closed = False

    def __init__(self, path: str, upload: Any, check_interrupted: Callable[[], None]) -> None:
        """upload: obstore's writer, which puts an object of one chunk in one request. path: for the errors."""
        self._path, self._upload, self._check_interrupted = path, upload, check_interrupted

    def write(self, data: Any) -> int:
        make_request(self._path, lambda: self._upload.write(bytes(data)), self._check_interrupted)
        return len(data)

    def flush(self) -> None:
        """Do nothing: a store takes whole objects."""

    close = flush
