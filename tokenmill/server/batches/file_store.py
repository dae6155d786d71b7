"""The files of each project, in a folder that the workers see too.

    <folder>/<project>/files/<id>          what was uploaded
    <folder>/<project>/files/<id>.json     its description, written last: without it the file does not exist
    <folder>/<project>/batches/<id>/...    see batch_runs.py

Several servers may share the folder. Nothing is kept in memory.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from tokenmill.server.errors import ApiError

#: An id of a file or batch. It begins with the time when it was made, so that ids sort by age.
_ID = re.compile(r"(file|batch)[-_][0-9a-f]{28}(-output|-errors)?")
#: How long an unfinished upload is left alone.
ABANDONED_S = 24 * 3600
_PARTIAL = ".partial"
#: The folder of a cancelled batch that holds the files of its answered lines.
ANSWERED = "answered"


def new_id(prefix: str, now: float) -> str:
    """Return an id that sorts behind all earlier ones."""
    return f"{prefix}{int(now * 1000):012x}{secrets.token_hex(8)}"


@dataclass(frozen=True)
class StoredFile:
    """A file of a project. Times are Unix seconds. expires_at: None for a file that stays."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's object of the file."""
        return {**asdict(self), "object": "file", "status": "processed"}


class FileStore:
    """Reads and writes files. Its methods block, and are called in threads."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock

    def project_folder(self, project: str, kind: str) -> Path:
        """Return the folder of a project's "files" or "batches"."""
        return self.folder / project / kind

    def begin(self, project: str) -> tuple[str, BinaryIO]:
        """Begin an upload; return its id and where its bytes go. Raises OSError."""
        folder = self.project_folder(project, "files")
        folder.mkdir(parents=True, exist_ok=True)
        file_id = new_id("file-", self._clock())
        return file_id, open(folder / (file_id + _PARTIAL), "xb")

    def drop(self, project: str, file_id: str) -> None:
        """Remove the bytes of an unfinished upload."""
        (self.project_folder(project, "files") / (file_id + _PARTIAL)).unlink(missing_ok=True)

    def finish(
        self,
        project: str,
        file_id: str,
        filename: str,
        purpose: str,
        expires_s: int | None,
        *,
        as_id: str | None = None,
    ) -> StoredFile:
        """Put an upload in its place. From then on it exists. Raises OSError.

        as_id: the id of the same upload as an earlier request has sent it. That file is returned, if it is there.
        """
        folder = self.project_folder(project, "files")
        if as_id is not None and as_id != file_id:
            known = self._read(folder, as_id)
            if known is not None:
                return known
            os.rename(folder / (file_id + _PARTIAL), folder / (as_id + _PARTIAL))
            file_id = as_id
        partial = folder / (file_id + _PARTIAL)
        now = int(self._clock())
        file = StoredFile(
            file_id,
            filename,
            purpose,
            partial.stat().st_size,
            now,
            None if expires_s is None else now + expires_s,
        )
        partial.rename(folder / file_id)
        write_json(folder / f"{file_id}.json", asdict(file))
        return file

    def uploads(self, project: str) -> list[StoredFile]:
        """Return a project's uploads, the latest first, and remove those that have expired."""
        folder = self.project_folder(project, "files")
        files = []
        names = set(_names(folder))
        for path in sorted(names, reverse=True):
            if path.endswith(".json"):
                file = self._read(folder, path.removesuffix(".json"))
                if file is not None:
                    files.append(file)
            elif f"{path}.json" not in names:
                self._remove_abandoned(folder / path)
        return files

    def find(self, project: str, file_id: str) -> tuple[StoredFile, Path]:
        """Return a project's file and its path. Raises ApiError if there is none."""
        check_id(file_id, "file")
        folder = self.project_folder(project, "files")
        file = self._read(folder, file_id)
        if file is not None:
            return file, folder / file_id
        path = self._output_path(project, file_id)
        if path is None or not path.is_file():
            raise missing("file", file_id)
        status = path.stat()
        output = StoredFile(
            file_id, f"{file_id}.jsonl", "batch_output", status.st_size, int(status.st_mtime)
        )
        return output, path

    def delete(self, project: str, file_id: str) -> None:
        """Remove a file. Raises ApiError if there is none."""
        _, path = self.find(project, file_id)
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _output_path(self, project: str, file_id: str) -> Path | None:
        """Return the path of a batch's output or errors; None for the id of an upload."""
        batch_id = file_id.replace("file-", "batch_", 1)
        for kind, name in (("-output", "output.jsonl"), ("-errors", "errors.jsonl")):
            if batch_id.endswith(kind):
                folder = self.project_folder(project, "batches") / batch_id.removesuffix(kind)
                answered = folder / ANSWERED / name
                return answered if answered.is_file() else folder / "run" / name
        return None

    def _read(self, folder: Path, file_id: str) -> StoredFile | None:
        record = read_json(folder / f"{file_id}.json")
        if record is None:
            return None
        file = StoredFile(**record)
        if file.expires_at is not None and file.expires_at <= self._clock():
            (folder / f"{file_id}.json").unlink(missing_ok=True)
            (folder / file_id).unlink(missing_ok=True)
            return None
        return file

    def _remove_abandoned(self, path: Path) -> None:
        """Remove a file that a server left unfinished when it died long ago."""
        try:
            if path.stat().st_mtime < self._clock() - ABANDONED_S:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # it has ended meanwhile


def check_id(name: str, kind: str) -> None:
    """Raise ApiError for a text that is no id of this kind, such as a path."""
    if _ID.fullmatch(name) is None or not name.startswith(kind):
        raise missing(kind, name)


def missing(kind: str, name: str) -> ApiError:
    """Return the error that a project has no such file or batch."""
    return ApiError(404, f"no {kind} has the id {name[:80]!r}", code="not_found")


class HasId(Protocol):
    """A file or a batch."""

    @property
    def id(self) -> str:
        """The id by which clients name it."""


Entry = TypeVar("Entry", bound=HasId)


def page_of(
    entries: Sequence[Entry], after: str | None, limit: int
) -> tuple[Sequence[Entry], bool]:
    """Return at most `limit` entries behind the one with the id `after`, and whether there are more."""
    start = 0
    if after is not None:
        ids = [entry.id for entry in entries]
        start = ids.index(after) + 1 if after in ids else len(ids)
    end = start + limit
    return entries[start:end], end < len(entries)


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's object of a page."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(record), "utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a record; None if there is none."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(record, dict)
    return record


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
