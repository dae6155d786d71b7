"""The server's folder of files and batches, as an interface and for a disk.

Names are relative to the folder, with slashes, such as `default/files/file-1`.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from jobs.parquet.files.filesystem import FileStat


class Draft(Protocol):
    """A file that is being written. It does not exist for others before `finish`."""

    def write(self, data: bytes | bytearray) -> object:
        """Append bytes."""

    def finish(self) -> None:
        """Publish the whole file. A file of the same name is replaced."""

    def drop(self) -> None:
        """Remove what was written, unless the file is finished."""


class Folder(Protocol):
    """A folder on a disk or in an object store. Its methods block, and raise OSError or StoreError."""

    def path(self, name: str) -> str:
        """Return the path of a file for workers."""

    def stat(self, name: str) -> FileStat | None:
        """Return the size and time of a file; None if it does not exist."""

    def names(self, name: str) -> list[str]:
        """Return the names in a subfolder, sorted; [] if it does not exist."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading from any position. Raises FileNotFoundError."""

    def create(self, name: str) -> Draft:
        """Begin to write a file."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


class LocalFolder:
    """A folder on a disk that servers and workers share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> str:
        """Return the path of a file for workers."""
        return str(self._folder / name)

    def stat(self, name: str) -> FileStat | None:
        """Return the size and time of a file; None if it does not exist."""
        try:
            status = (self._folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(status.st_size, status.st_mtime_ns)

    def names(self, name: str) -> list[str]:
        """Return the names in a subfolder, sorted; [] if it does not exist."""
        try:
            return sorted(os.listdir(self._folder / name))
        except FileNotFoundError:
            return []

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading from any position. Raises FileNotFoundError."""
        return (self._folder / name).open("rb")

    def create(self, name: str) -> Draft:
        """Begin to write a file, and make the folders above it."""
        return _LocalDraft(self._folder / name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self._folder / name).unlink(missing_ok=True)


class _LocalDraft:
    """A file that is written under a hidden name, and renamed when it is finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = self._hidden.open("xb")

    def write(self, data: bytes | bytearray) -> object:
        return self._sink.write(data)

    def finish(self) -> None:
        self._sink.close()
        os.replace(self._hidden, self._path)

    def drop(self) -> None:
        self._sink.close()
        self._hidden.unlink(missing_ok=True)


@contextmanager
def written(folder: Folder, name: str) -> Iterator[Draft]:
    """A context manager around a draft. It finishes the draft at the end of the block, or drops it after an error."""
    draft = folder.create(name)
    try:
        yield draft
        draft.finish()
    finally:
        draft.drop()


def write_json(folder: Folder, name: str, record: Mapping[str, Any]) -> None:
    """Write a record as JSON. Readers see the whole file or none."""
    with written(folder, name) as draft:
        draft.write(json.dumps(record).encode())


def read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return a record that `write_json` wrote; None if it does not exist."""
    try:
        with folder.open(name) as source:
            record = json.load(source)
    except FileNotFoundError:
        return None
    assert isinstance(record, dict)
    return record
