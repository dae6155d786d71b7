"""Uses a prefix of an object store as a server's folder. The server needs no Arrow for this."""

import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar

import obstore
from obstore.exceptions import BaseError

from jobs.parquet.files.filesystem import FetchedFile, FileStat
from jobs.parquet.files.object_requests import make_request, make_upload_request, opened_store

T = TypeVar("T")
#: The most seconds that a request and its repetitions take.
TIMEOUT_S = 30.0
#: Bytes that are read at once.
READ_BYTES = 1 << 20
#: Bytes of one piece of an upload. A store takes at most 10,000 pieces.
CHUNK_BYTES = 8 << 20


class ObjectFolder:
    """A prefix in an object store, for servers and workers. Each process has its credentials in its environment.

    Methods block. They raise StoreError.
    """

    def __init__(self, folder: str) -> None:
        """folder: in the form that `run_path` returns, such as s3://bucket/prefix."""
        self._folder = folder
        scheme, _, bucket_and_prefix = folder.partition("://")
        bucket, _, self._prefix = bucket_and_prefix.partition("/")
        self._store = opened_store(scheme, bucket, TIMEOUT_S)
        # We do not keep written bytes, so only obstore itself can repeat an upload's requests.
        self._upload_store = opened_store(scheme, bucket, TIMEOUT_S, tries_s=TIMEOUT_S)

    def path(self, name: str) -> str:
        """Return the path by which workers know a file."""
        return f"{self._folder}/{name}"

    def stat(self, name: str) -> FileStat | None:
        """Return the state of a file; None if there is none."""
        try:
            head = self._head(name)
        except FileNotFoundError:
            return None
        mtime_ns = int(head["last_modified"].timestamp() * 1e9)
        return FileStat(head["size"], mtime_ns, head["e_tag"] or "")

    def names(self, name: str) -> list[str]:
        """Return the sorted names in the folder `name`. The list is empty if there is no such folder."""
        list_folder = partial(obstore.list_with_delimiter, self._store, self._key(name))
        level = self._make_request(name, list_folder)
        paths = list(level["common_prefixes"])
        for entry in level["objects"]:
            paths.append(entry["path"])
        return sorted(path.rpartition("/")[2] for path in paths)

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read at any offset. Raises FileNotFoundError."""
        key = self._key(name)
        head = self._head(name)
        same_state = {"if_match": head["e_tag"]} if head["e_tag"] else {}

        def fetch(start: int, end: int) -> bytes:
            """Get a range of bytes. Raises PathSwapped if the file has changed since it was opened."""
            options: Any = {"range": (start, end), **same_state}
            return self._make_request(
                name, lambda: bytes(obstore.get(self._store, key, options=options).bytes())
            )

        return io.BufferedReader(FetchedFile(fetch, head["size"]), READ_BYTES)

    def create(self, name: str) -> "ObjectDraft":
        """Begin to upload a file. The file exists once the draft's `finish` was called."""
        upload = obstore.open_writer(
            self._upload_store, self._key(name), buffer_size=CHUNK_BYTES, max_concurrency=2
        )
        send = partial(make_upload_request, self.path(name))
        return ObjectDraft(upload, send)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._make_request(name, partial(obstore.delete, self._store, self._key(name)))

    def _head(self, name: str) -> Any:
        """Return the size and the state of a file. Raises FileNotFoundError."""
        return self._make_request(name, partial(obstore.head, self._store, self._key(name)))

    def _key(self, name: str) -> str:
        """Return a file's key in the store."""
        return f"{self._prefix}/{name}".lstrip("/")  # the prefix of a whole bucket is empty

    def _make_request(self, name: str, request: Callable[[], T]) -> T:
        """Make a request about a file, as `make_request` does."""
        return make_request(self.path(name), request, timeout_s=TIMEOUT_S)


class ObjectDraft:
    """An upload in pieces; a small object is one piece. The object exists once `finish` was called."""

    def __init__(self, upload: Any, send: Callable[[Callable[[], object]], object]) -> None:
        """upload: obstore's writer. send: makes one of the upload's requests, see make_upload_request."""
        self._upload = upload
        self._send = send
        self._is_open = True

    def write(self, data: bytes | bytearray) -> object:
        """Add bytes."""
        return self._send(lambda: self._upload.write(bytes(data)))

    def finish(self) -> None:
        """Make the object of the written bytes. It replaces an object of the same name."""
        self._send(self._upload.close)
        self._is_open = False

    def drop(self) -> None:
        """Give up the upload, unless it is finished."""
        if not self._is_open:
            return
        self._is_open = False
        # If a `with` statement ends with an error, obstore's writer makes no object. So `__exit__` is given an error.
        with suppress(BaseError, OSError, ValueError):
            self._upload.__exit__(RuntimeError, RuntimeError("dropped"), None)
