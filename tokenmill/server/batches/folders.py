"""The server's folder of files and batches. It is on a disk here; `ObjectFolder` is one in an object store.

Names are relative to the folder, with slashes: `default/files/file-1`.
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
    """A file that is written. Nobody sees it before `finish`."""

    def write(self, data: bytes | bytearray) -> object:
        """Add bytes."""

    def finish(self) -> None:
        """Put the file in its place, whole. One that is there is replaced."""

    def drop(self) -> None:
        """Remove what was written, unless it is finished."""


class Folder(Protocol):
    """What files and batches need of a disk or a store. Methods block. They raise OSError, or StoreError."""

    def path(self, name: str) -> str:
        """Return the path by which workers know a file."""

    def stat(self, name: str) -> FileStat | None:
        """Return the state of a file; None if there is none."""

    def names(self, name: str) -> list[str]:
        """Return the names in one of its folders, sorted; none if there is no such folder."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read at any place. Raises FileNotFoundError."""

    def create(self, name: str) -> Draft:
        """Begin a file."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


class LocalFolder:
    """A folder on a disk that servers and workers share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> str:
        """Return the path by which workers know a file."""
        return str(self._folder / name)

    def stat(self, name: str) -> FileStat | None:
        """Return the state of a file; None if there is none."""
        try:
            status = (self._folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(status.st_size, status.st_mtime_ns)

    def names(self, name: str) -> list[str]:
        """Return the names in one of its folders, sorted; none if there is no such folder."""
        try:
            return sorted(os.listdir(self._folder / name))
        except FileNotFoundError:
            return []

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read at any place. Raises FileNotFoundError."""
        return (self._folder / name).open("rb")

    def create(self, name: str) -> Draft:
        """Begin a file, and make the folders above it."""
        return _LocalDraft(self._folder / name)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self._folder / name).unlink(missing_ok=True)


class _LocalDraft:
    """A file with a hidden name, which is renamed."""

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
    """Lend a draft of a file. It is finished when the body ends, and dropped if the body raises."""
    draft = folder.create(name)
    try:
        yield draft
        draft.finish()
    finally:
        draft.drop()


def write_json(folder: Folder, name: str, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all."""
    with written(folder, name) as draft:
        draft.write(json.dumps(record).encode())


def read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return a record; None if there is none."""
    try:
        with folder.open(name) as source:
            record = json.load(source)
    except FileNotFoundError:
        return None
    assert isinstance(record, dict)
    return record
