"""Objects of a store as files that are written from their beginning to their end."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
from obstore.exceptions import BaseError

from jobs.parquet.files.object_requests import make_request


class ObjectSink(pa.PythonFile):  # type: ignore[misc]
    """An object that is written. It is there, whole, once it was closed; never where its body raises."""

    def __init__(self, writer: "ObjectWriter", mode: str) -> None:  # as PythonFile takes them
        self._writer = writer

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._writer.abort(kind, error, traceback)
        super().__exit__(kind, error, traceback)


class ObjectWriter:
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

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            make_request(self._path, self._upload.close, self._check_interrupted)

    def abort(self, *raised: Any) -> None:
        """Leave nothing in the store."""
        self.closed = True
        with suppress(BaseError, OSError, ValueError):  # what was raised says more
            self._upload.__exit__(*raised)
