"""Objects of a store as files that are written from their beginning to their end."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
from obstore.exceptions import BaseError


class ObjectSink(pa.PythonFile):  # type: ignore[misc]
    """An object that is written. It is there, whole, once it was closed; never where its body raises."""

    def __init__(self, writer: "ObjectWriter", mode: str) -> None:  # as PythonFile takes them
        self._writer = writer

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._writer.abort(kind, error, traceback)
        super().__exit__(kind, error, traceback)


class ObjectWriter:
    """What pyarrow needs of a Python file that it writes. once: makes a request of obstore's, and names what fails."""

    closed = False

    def __init__(self, upload: Any, once: Callable[[Callable[[], Any]], None]) -> None:
        """upload: obstore's writer, which puts an object of one chunk in one request."""
        self._upload, self._once = upload, once

    def write(self, data: Any) -> int:
        self._once(lambda: self._upload.write(bytes(data)))
        return len(data)

    def flush(self) -> None:
        """Do nothing: a store takes whole objects."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._once(self._upload.close)

    def abort(self, *raised: Any) -> None:
        """Leave nothing in the store."""
        self.closed = True
        with suppress(BaseError, OSError, ValueError):  # what was raised says more
            self._upload.__exit__(*raised)
